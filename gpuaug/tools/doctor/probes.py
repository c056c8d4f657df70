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
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from gpuaug import machine
from gpuaug.decode.decoder import Decode
from gpuaug.loader.self_check import TOLERANCE
from gpuaug.native.build import INSTALLED
from gpuaug.read.reader import Reader
from gpuaug.tools.doctor.command import UNCOMPILED, Answer

ROUNDS = 8  # repetitions of a test for race conditions
IN_A_ROW = 4  # batches decoded while the device is busy
PRODUCTS = 64  # matrix products that keep the multiprocessors busy: about 15 ms on an H200
BUSY = 10_000_000  # clock cycles to wait before a batch is used: about 6 ms
KINDS: dict[str, dict[str, Any]] = {  # formats, and options of Pillow
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
    try:
        torch.cuda.init()
    except Exception as error:  # no device is visible, the driver is too old, ...
        return Answer(False, str(error).strip().partition("\n")[0][:200], devices)
    for k in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(k)
        capability = f"{p.major}.{p.minor}"
        devices.append({"name": p.name, "memory": p.total_memory, "capability": capability, "cuda": torch.version.cuda})
        torch.ones(8, device=f"cuda:{k}").sum().item()  # a listed device may still fail
    return Answer(True, f"torch is built for CUDA {torch.version.cuda}", devices)


def _images() -> list[tuple[str, bytes]]:
    """Names and bytes of encoded test images, with smooth colours and edges like photographs."""
    rng, images = np.random.default_rng(0), []
    for n, (name, options) in enumerate([*KINDS.items()] * 2):
        width, height = rng.integers(150, 500, 2).tolist()
        image = Image.fromarray(rng.integers(0, 256, (6, 7, 3), dtype=np.uint8)).resize((width, height))  # bicubic
        image.paste((255 - 10 * n, 16 * n, 40), (width // 3, height // 4, width // 2, height // 2))
        stream = io.BytesIO()
        (image.convert("L") if name.endswith("gray") else image).save(stream, name.partition(" ")[0], **options)
        images.append((name, stream.getvalue()))
    return images


def _truth(data: bytes) -> Any:
    """Pillow's pixels, uint8 [H, W, 3]."""
    return torch.tensor(np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


def _batch(encoded: Sequence[bytes]) -> Any:
    numbers = torch.arange(len(encoded))
    return next(Reader([(data, 0) for data in encoded], num_workers=0).batches([(numbers, numbers * 0, numbers >= 0)]))


def _gap(decoded: Any, truth: Any) -> int:
    """The largest difference in levels."""
    return int((decoded.cpu().int() - truth).abs().max())


def _decode(device: str, *, hardware: float = 0.0, tolerance: int = TOLERANCE, kind: str = "") -> Answer:
    """Decode the images whose names begin with ``kind``, and compare DALI's pixels with Pillow's."""
    images = [(name, data) for name, data in _images() if name.startswith(kind)]
    decoder = Decode(backend="dali", hardware_load=hardware, num_threads=2).open(device)
    largest = 0
    for name, data in images * (ROUNDS if hardware else 1):
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
        text = "no JPEG engine; containers need NVIDIA_DRIVER_CAPABILITIES=compute,utility,video. Found:"
        return Answer(None, f"{text} {os.environ.get('NVIDIA_DRIVER_CAPABILITIES', 'not set')}")
    good, text, *_ = _decode("cuda", hardware=1.0, kind="jpeg 4")
    if good:
        good, text, *_ = _order(1.0, TOLERANCE)
    return Answer(good, f"{text}{'; decode.hardware_load may be raised above 0' * bool(good)}")


@lru_cache(maxsize=1)
def _engine() -> bool:
    """Whether the GPU has a JPEG engine. A decoder opened before would hide it: it loads no GPU codecs."""
    assert "nvidia.nvimgcodec" not in sys.modules, "the engine must be tested before this process opens a decoder"
    from nvidia import nvimgcodec

    try:
        decoder = nvimgcodec.Decoder(backends=[nvimgcodec.Backend(nvimgcodec.BackendKind.HW_GPU_ONLY)])
        return decoder.decode(dict(_images())["jpeg 4:2:0"]) is not None
    except Exception:  # the error for a missing engine depends on the release
        return False


def _order(hardware: float, tolerance: int, *, device: str = "cuda") -> Answer:
    """Decode batches on a busy device, use them late, and compare them with batches of an idle device.

    DALI resizes on the multiprocessors, which this test keeps busy. A JPEG engine that does not wait for its stream
    overwrites decoded pixels before DALI resizes these pixels. As a control, each batch is also copied without waiting
    for it. The control must be wrong: if its pixels are right, DALI resizes at once, and the test shows nothing. Only
    gpuaug's tests set ``device="cpu"``.
    """
    from gpuaug.augment.crop import Resize

    images = [data for name, data in _images() if name.startswith("jpeg")] * 4
    decoder = Decode(backend="dali", hardware_load=hardware, num_threads=2).open(device)
    batches = []
    for turn in range(IN_A_ROW):  # each batch has different pixels and sizes
        headers = decoder.read_headers(_batch(images[turn:] + images[:turn]))
        batches.append((headers, [Resize((96, 96)).windows(None, headers.height, headers.width)]))
    truths = [decoder.pixels(*arguments)[0][0].cpu().clone() for arguments in batches]
    on_gpu = device != "cpu"
    others, consumer, unordered = (torch.cuda.Stream(priority=p) if on_gpu else None for p in (-1, 0, 0))
    matrix = torch.randn(4096, 4096, device=device, dtype=torch.float16)
    # allocated here, because allocating may wait for the device
    copies = [torch.empty_like(truth, device=device) for truth in truths * ROUNDS]
    controls = [torch.empty_like(truth, pin_memory=on_gpu) for truth in truths * ROUNDS]
    for number, (copy, control) in enumerate(zip(copies, controls, strict=True)):
        with torch.cuda.stream(others):
            for _ in range(PRODUCTS * on_gpu):
                matrix @ matrix
        with torch.cuda.stream(consumer):
            made = decoder.pixels(*batches[number % IN_A_ROW])[0][0]
        with torch.cuda.stream(unordered):
            control.copy_(made, non_blocking=True)
        with torch.cuda.stream(consumer):
            if on_gpu:
                torch.cuda._sleep(BUSY)
            copy.copy_(made)
            del made
        if on_gpu and (number + 1) % IN_A_ROW == 0:
            torch.cuda.synchronize()
    decoder.close()
    everything = (copies, controls)
    wrong, noticed = (sum(gap > tolerance for gap in map(_gap, made, truths * ROUNDS)) for made in everything)
    if wrong:
        text = f"{wrong} of {len(copies)} batches have wrong pixels"
        return Answer(False, f"decoded on a busy device or used late, {text}")
    if not noticed:
        return Answer(None, "the device was not busy enough: copies that wait for nothing have the right pixels too")
    text = f"{len(copies)} batches, decoded on a busy device and used late, have the right pixels"
    return Answer(True, f"{text}; of as many copies that wait for nothing, {noticed} are wrong, as they must be")


def _augmented(device: str, *, unbuilt: bool | None) -> Answer:
    """Compare the fused backend with Kornia's modules. ``unbuilt``: value of ``good`` if compilation fails."""
    import kornia.augmentation as K

    from gpuaug.augment.fused.backend import library
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
        return Answer(unbuilt, " ".join(warnings.getvalue().split()), UNCOMPILED)
    gap = float((fused.cpu() - kornia).abs().max()) * 255
    file = Path(getattr(library(), "_name", ""))
    installed = f" (installed for {file.parent.name})" if device == "cpu" and INSTALLED in file.parents else ""
    return Answer(gap < 1, f"compiled augmentations{installed} differ from Kornia by at most {gap:.2g} levels")


def workers() -> Answer:
    """Read a small batch through a worker of each start method. The details: whether the default method works."""
    default, methods = multiprocessing.get_start_method(), multiprocessing.get_all_start_methods()
    numbers, samples = torch.arange(4), [(bytes(100_000), 0)] * 4
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
