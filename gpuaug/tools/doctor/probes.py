"""The tests of `gpuaug doctor`. Spawned workers import this file, so only functions import heavy modules."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

Answer = tuple[bool | None, str, Any]  # good, text and value of a `Verdict`

ROUNDS = 8  # repetitions of a test for race conditions
TOLERANCE = 4  # levels (0 to 255) by which GPU and CPU decoders may differ, as in DALI's tests
IN_A_ROW = 4  # batches decoded while the device is busy
PRODUCTS = 64  # matrix products that keep the multiprocessors busy: about 15 ms on an H200
BUSY = 10_000_000  # clock cycles to wait before a batch is used: about 6 ms


def main() -> None:
    """Run the test named on the command line, and print its result as the last line."""
    from gpuaug import machine

    machine.verdicts = dict  # type: ignore[assignment]  # a bad stored result would switch off the tested feature
    good, text, value = TESTS[sys.argv[1]]()
    print(json.dumps({"good": good, "text": text, "value": value}), flush=True)


def cuda() -> Answer:
    import torch

    devices: list[dict[str, Any]] = []
    build, value = torch.version.cuda, {"build": torch.version.cuda, "devices": devices}
    if not torch.cuda.is_available():
        if build is None:
            return False, "this torch is built without CUDA", value
        try:
            torch.cuda.init()
            why = "no device is visible"
        except Exception as error:
            why = str(error).strip().splitlines()[0][:200]
        return False, f"torch is built for CUDA {build}, but {why}", value
    for k in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(k)
        devices.append({"name": p.name, "memory": p.total_memory, "capability": f"{p.major}.{p.minor}"})
        torch.ones(8, device=f"cuda:{k}").sum().item()  # a listed device may still fail
    return True, f"torch is built for CUDA {build}", value


# --- decoders


def _images() -> list[tuple[str, bytes]]:
    """Names and bytes of encoded test images, with smooth colours and edges like photographs."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    images = []
    kinds: dict[str, dict[str, Any]] = {
        "jpeg 4:4:4": {"quality": 92, "subsampling": 0},
        "jpeg 4:2:0": {"quality": 85, "subsampling": 2},
        "jpeg 4:2:2": {"quality": 80, "subsampling": 1},
        "jpeg progressive": {"quality": 85, "progressive": True},
        "jpeg gray": {"quality": 90},
        **{"png": {}, "webp": {"lossless": True}, "bmp": {}},
    }
    for n, (name, options) in enumerate([*kinds.items()] * 2):
        width, height = int(rng.integers(150, 500)), int(rng.integers(150, 500))
        small = rng.integers(0, 256, (6, 7, 3), dtype=np.uint8)
        image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
        image.paste((255 - 10 * n, 16 * n, 40), (width // 3, height // 4, width // 2, height // 2))
        stream = io.BytesIO()
        (image.convert("L") if name.endswith("gray") else image).save(stream, name.partition(" ")[0], **options)
        images.append((name, stream.getvalue()))
    return images


def _truth(data: bytes) -> Any:
    """The image decoded by Pillow: uint8 [H, W, 3]."""
    import numpy as np
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def _batch(encoded: Sequence[bytes]) -> Any:
    import torch

    from gpuaug.read.reader import Reader

    numbers = torch.arange(len(encoded))
    return next(Reader([(data, 0) for data in encoded], num_workers=0).batches([(numbers, numbers * 0, numbers >= 0)]))


def _decode(device: str, *, hardware: float = 0.0, tolerance: int = TOLERANCE, kind: str = "") -> Answer:
    """Decode the images whose names begin with ``kind``, and compare DALI's pixels with Pillow's."""
    from gpuaug.decode.decoder import Decode

    images = [(name, data) for name, data in _images() if name.startswith(kind)]
    batch = _batch([data for _, data in images])
    decoder = Decode(backend="dali", hardware_load=hardware, num_threads=2).open(device)
    largest = 0
    for _ in range(ROUNDS if hardware else 1):
        headers = decoder.read_headers(batch)
        if headers.faults:
            return False, f"DALI cannot decode {images[headers.faults[0].row][0]}: {headers.faults[0].reason}", None
        for (name, data), decoded in zip(images, decoder.full(batch, headers), strict=True):
            gap = _gap(decoded, _truth(data))
            if gap > tolerance:
                return False, f"{name} differs from Pillow by {gap} levels; at most {tolerance} are expected", None
            largest = max(largest, gap)
    rescued = f", but only Pillow could decode {decoder.rescued} of them" if decoder.rescued else ""
    decoder.close()
    text = f"{len(images)} images differ from Pillow by at most {largest} levels{rescued}"
    return not rescued, text, {"largest": largest}


def _gap(decoded: Any, truth: Any) -> int:
    """The largest difference in levels; 255 if the shapes differ."""
    import numpy as np

    pixels = decoded.cpu().numpy()
    if pixels.shape != truth.shape:
        return 255
    return int(np.abs(pixels.astype(np.int16) - truth.astype(np.int16)).max())


def hardware() -> Answer:
    """Compare the GPU's JPEG engine with Pillow, then test if the engine waits for its stream."""
    if not _engine():  # DALI does not report a missing engine
        allowed = os.environ.get("NVIDIA_DRIVER_CAPABILITIES", "not set")
        text = "no JPEG engine; containers need NVIDIA_DRIVER_CAPABILITIES=compute,utility,video. Found:"
        return None, f"{text} {allowed}", None
    good, text, value = _decode("cuda", hardware=1.0, kind="jpeg 4")
    if good:
        good, text, value = _order(1.0, TOLERANCE)
    return good, f"{text}{'; decode.hardware_load may be raised above 0' * bool(good)}", value


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
    import torch

    from gpuaug.augment.crop import Resize
    from gpuaug.decode.decoder import Decode

    images = [data for name, data in _images() if name.startswith("jpeg")] * 4
    decoder = Decode(backend="dali", hardware_load=hardware, num_threads=2).open(device)
    batches = []
    for turn in range(IN_A_ROW):  # each batch has different pixels and sizes
        batch = _batch([images[(k + turn) % len(images)] for k in range(len(images))])
        headers = decoder.read_headers(batch)
        batches.append((batch, headers, [Resize((96, 96)).windows(None, headers.height, headers.width)]))
    truths = [decoder.pixels(*arguments)[0][0].cpu().clone() for arguments in batches]
    wrong = largest = 0
    others = consumer = None
    if cuda := device != "cpu":
        others, consumer = torch.cuda.Stream(priority=-1), torch.cuda.Stream()
        matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    for _ in range(ROUNDS):
        copies = []
        for arguments in batches:
            with torch.cuda.stream(others):
                for _ in range(PRODUCTS * cuda):
                    matrix @ matrix
            with torch.cuda.stream(consumer):
                made = decoder.pixels(*arguments)[0][0]
                if cuda:
                    torch.cuda._sleep(BUSY)
                copies.append(made.clone())
                del made
        if cuda:
            torch.cuda.synchronize()
        gaps = [_gap(copy, truth.numpy()) for copy, truth in zip(copies, truths, strict=True)]
        wrong, largest = wrong + sum(gap > tolerance for gap in gaps), max(largest, *gaps)
    decoder.close()
    count, value = ROUNDS * IN_A_ROW, {"largest": largest, "wrong": wrong}
    if wrong:
        return False, f"{wrong} of {count} batches get wrong pixels when decoded on a busy device or used late", value
    return True, f"{count} batches, decoded on a busy device and used late, have the right pixels", value


# --- augmentation


def _augmented(device: str, *, unbuilt: bool | None) -> Answer:
    """Compare the fused backend with Kornia's modules. ``unbuilt``: value of ``good`` if compilation fails."""
    import logging

    import kornia.augmentation as K
    import torch

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
        return unbuilt, " ".join(warnings.getvalue().split()), {"compiled": False}
    gap = float((fused.cpu() - kornia).abs().max()) * 255
    return gap < 1, f"compiled augmentations differ from Kornia by at most {gap:.2g} levels", {"largest": gap}


# --- workers


def workers() -> Answer:
    """Read a small batch through a worker of each start method."""
    import multiprocessing

    import torch

    from gpuaug.read.reader import Reader

    default, failures = multiprocessing.get_start_method(), {}
    methods = multiprocessing.get_all_start_methods()
    numbers, samples = torch.arange(4), [(bytes([index]) * 100_000, index) for index in range(4)]
    for method in methods:
        reader = Reader(samples, num_workers=1, timeout=60.0, start_method=method)
        try:
            (batch,) = reader.batches([(numbers, numbers * 0, numbers >= 0)])
            if len(batch.data) != 400_000 or batch.faults:
                failures[method] = f"{len(batch.data)} bytes instead of 400000"
        except Exception as error:
            failures[method] = str(error)
        reader.close()
    value = {"default": default, **{method: method not in failures for method in methods}}
    if failures:
        text = "; ".join(f"workers fail with start_method={method}: {why}" for method, why in failures.items())
        return False, text, value
    return True, f"{', '.join(methods)}; the default is {default}", value


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
