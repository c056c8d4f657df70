"""The tests of `gpuaug doctor`. Each runs in a process of its own."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image

from gpuaug import machine
from gpuaug.decode.decoder import Decode
from gpuaug.read.reader import Reader
from gpuaug.tools.doctor.command import Answer

ROUNDS = 8  # repetitions of a test for race conditions
TOLERANCE = 4  # levels (0 to 255) by which GPU and CPU decoders may differ, as in DALI's tests
IN_A_ROW = 4  # batches decoded while the device is busy
PRODUCTS = 64  # matrix products that keep the multiprocessors busy: about 15 ms on an H200
BUSY = 10_000_000  # clock cycles to wait before a batch is used: about 6 ms
KINDS: dict[str, dict[str, Any]] = {  # images: options of Pillow
    "jpeg 4:4:4": {"quality": 92, "subsampling": 0},
    "jpeg 4:2:0": {"quality": 85, "subsampling": 2},
    "jpeg 4:2:2": {"quality": 80, "subsampling": 1},
    "jpeg progressive": {"quality": 85, "progressive": True},
    "jpeg gray": {"quality": 90},
    **{"png": {}, "webp": {"lossless": True}, "bmp": {}},
}


def main() -> None:
    """Run the test named on the command line, and print its result as the last line."""
    machine.verdicts = dict  # type: ignore[assignment]  # a bad stored result would switch off the tested feature
    print(json.dumps(TESTS[sys.argv[1]]()), flush=True)


def cuda() -> Answer:
    devices: list[dict[str, Any]] = []
    text = f"torch is built for CUDA {torch.version.cuda}"
    if torch.version.cuda is None:
        return Answer(False, "this torch is built without CUDA", devices)
    if not torch.cuda.is_available():
        why = "no device is visible"
        try:
            torch.cuda.init()
        except Exception as error:
            why = str(error).strip().splitlines()[0][:200]
        return Answer(False, f"{text}, but {why}", devices)
    for k in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(k)
        devices.append({"name": p.name, "memory": p.total_memory, "capability": f"{p.major}.{p.minor}"})
        torch.ones(8, device=f"cuda:{k}").sum().item()  # a listed device may still fail
    return Answer(True, text, devices)


# -- decoders ---------------------------------------------------------------------------------------------------------


def _images() -> list[tuple[str, bytes]]:
    """Names and bytes of encoded test images, with smooth colours and edges like photographs."""
    rng, images = np.random.default_rng(0), []
    for n, (name, options) in enumerate([*KINDS.items()] * 2):
        width, height = rng.integers(150, 500, 2).tolist()
        small = Image.fromarray(rng.integers(0, 256, (6, 7, 3), dtype=np.uint8))
        image = small.resize((width, height), Image.Resampling.BICUBIC)
        image.paste((255 - 10 * n, 16 * n, 40), (width // 3, height // 4, width // 2, height // 2))
        stream = io.BytesIO()
        (image.convert("L") if name.endswith("gray") else image).save(stream, name.partition(" ")[0], **options)
        images.append((name, stream.getvalue()))
    return images


def _truth(data: bytes) -> Any:
    """The image decoded by Pillow: uint8 [H, W, 3]."""
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def _batch(encoded: Sequence[bytes]) -> Any:
    numbers = torch.arange(len(encoded))
    return next(Reader([(data, 0) for data in encoded], num_workers=0).batches([(numbers, numbers * 0, numbers >= 0)]))


def _gap(decoded: Any, truth: Any) -> int:
    """The largest difference in levels."""
    return int(np.abs(decoded.cpu().numpy().astype(np.int16) - truth).max())


def _decode(device: str, *, hardware: float = 0.0, tolerance: int = TOLERANCE, kind: str = "") -> Answer:
    """Decode the images whose names begin with ``kind``, and compare DALI's pixels with Pillow's."""
    images = [(name, data) for name, data in _images() if name.startswith(kind)]
    decoder = Decode(backend="dali", hardware_load=hardware, num_threads=2).open(device)
    largest = 0
    for _ in range(ROUNDS if hardware else 1):
        for name, data in images:
            headers = decoder.read_headers(_batch([data]))
            if headers.faults:
                return Answer(False, f"DALI cannot decode {name}: {headers.faults[0].reason}")
            gap = _gap(decoder.whole(headers), _truth(data))
            if gap > tolerance:
                return Answer(False, f"{name} differs from Pillow by {gap} levels; at most {tolerance} are expected")
            largest = max(largest, gap)
    rescued = f", but only Pillow could decode {decoder.rescued} of them" if decoder.rescued else ""
    decoder.close()
    return Answer(not rescued, f"{len(images)} images differ from Pillow by at most {largest} levels{rescued}")


def hardware() -> Answer:
    """Compare the GPU's JPEG engine with Pillow, then test if the engine waits for its stream."""
    if not _engine():  # DALI does not report a missing engine
        allowed = os.environ.get("NVIDIA_DRIVER_CAPABILITIES", "not set")
        text = "no JPEG engine; containers need NVIDIA_DRIVER_CAPABILITIES=compute,utility,video. Found:"
        return Answer(None, f"{text} {allowed}")
    good, text, *_ = _decode("cuda", hardware=1.0, kind="jpeg 4")
    if good:
        good, text, *_ = _order(1.0, TOLERANCE)
    return Answer(good, f"{text}{'; decode.hardware_load may be raised above 0' * bool(good)}")


def _engine() -> bool:
    from nvidia import nvimgcodec

    data = next(data for name, data in _images() if name == "jpeg 4:2:0")
    try:
        decoder = nvimgcodec.Decoder(backends=[nvimgcodec.Backend(nvimgcodec.BackendKind.HW_GPU_ONLY)])
        return decoder.decode(data) is not None
    except Exception:  # the error for a missing engine depends on the release
        return False


def _order(hardware: float, tolerance: int, *, device: str = "cuda") -> Answer:
    """Decode batches on a busy device, use them late, and compare them with batches of an idle device.

    DALI resizes on the multiprocessors, which this test keeps busy. A JPEG engine that does not wait for its stream
    overwrites decoded pixels before DALI resizes these pixels. Only gpuaug's tests set ``device="cpu"``.
    """
    from gpuaug.augment.crop import Resize

    images = [data for name, data in _images() if name.startswith("jpeg")] * 4
    decoder = Decode(backend="dali", hardware_load=hardware, num_threads=2).open(device)
    batches = []
    for turn in range(IN_A_ROW):  # each batch has different pixels and sizes
        batch = _batch(images[turn:] + images[:turn])
        headers = decoder.read_headers(batch)
        batches.append((headers, [Resize((96, 96)).windows(None, headers.height, headers.width)]))
    truths = [decoder.pixels(*arguments)[0][0].cpu().clone() for arguments in batches]
    gaps: list[int] = []
    others = consumer = None
    if on_gpu := device != "cpu":
        others, consumer = torch.cuda.Stream(priority=-1), torch.cuda.Stream()
        matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    for _ in range(ROUNDS):
        copies = []
        for arguments in batches:
            with torch.cuda.stream(others):
                for _ in range(PRODUCTS * on_gpu):
                    matrix @ matrix
            with torch.cuda.stream(consumer):
                made = decoder.pixels(*arguments)[0][0]
                if on_gpu:
                    torch.cuda._sleep(BUSY)
                copies.append(made.clone())
                del made
        if on_gpu:
            torch.cuda.synchronize()
        gaps += [_gap(copy, truth.numpy()) for copy, truth in zip(copies, truths, strict=True)]
    decoder.close()
    if wrong := sum(gap > tolerance for gap in gaps):
        return Answer(
            False, f"{wrong} of {len(gaps)} batches get wrong pixels when decoded on a busy device or used late"
        )
    return Answer(True, f"{len(gaps)} batches, decoded on a busy device and used late, have the right pixels")


# -- augmentation and workers -----------------------------------------------------------------------------------------


def _augmented(device: str, *, unbuilt: bool | None) -> Answer:
    """Compare the fused backend with Kornia's modules. ``unbuilt``: value of ``good`` if compilation fails."""
    import kornia.augmentation as K

    from gpuaug.augment.recipe import Augment

    ops = {
        "flip": K.RandomHorizontalFlip(p=0.5),
        "jitter": K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.9),
        "gray": K.RandomGrayscale(p=0.2),
        "blur": K.RandomGaussianBlur((5, 5), (0.2, 2.0), p=0.5),
        "rotate": K.RandomRotation(20.0, p=0.5),
    }
    warnings = io.StringIO()
    logging.getLogger("gpuaug").addHandler(logging.StreamHandler(warnings))
    images = torch.arange(16 * 40 * 48 * 3).mul(7).remainder(251).to(torch.uint8).view(16, 40, 48, 3)
    fused = Augment(ops=ops)(images.to(device), seed=0, indices=range(16))
    kornia = Augment(ops=ops, backend="kornia")(images, seed=0, indices=range(16))
    if warnings.getvalue():  # the backend ran uncompiled; its warning gives the reason and the remedy
        return Answer(unbuilt, " ".join(warnings.getvalue().split()), {"compiled": False})
    gap = float((fused.cpu() - kornia).abs().max()) * 255
    return Answer(gap < 1, f"compiled augmentations differ from Kornia by at most {gap:.2g} levels")


def workers() -> Answer:
    """Read a small batch through a worker of each start method. The details: whether the default method works."""
    default, methods = multiprocessing.get_start_method(), multiprocessing.get_all_start_methods()
    numbers, samples = torch.arange(4), [(bytes([index]) * 100_000, index) for index in range(4)]
    failures: dict[str, str] = {}
    for method in methods:
        with contextlib.closing(Reader(samples, num_workers=1, timeout=60.0, start_method=method)) as reader:
            try:
                list(reader.batches([(numbers, numbers * 0, numbers >= 0)]))
            except Exception as error:
                failures[method] = str(error)
    text = "; ".join(f"workers fail with start_method={method}: {why}" for method, why in failures.items())
    return Answer(not failures, text or f"{', '.join(methods)}; the default is {default}", default not in failures)


TESTS: dict[str, Callable[[], Answer]] = {
    "cuda": cuda,
    "decoder_cpu": partial(_decode, "cpu", tolerance=1),
    "decoder_mixed": partial(_decode, "cuda"),
    "hardware": hardware,
    "stream": partial(_order, 0.0, 0),
    "compiler": partial(_augmented, "cpu", unbuilt=False),
    "fused_cuda": partial(_augmented, "cuda", unbuilt=None),
    "workers": workers,
}
