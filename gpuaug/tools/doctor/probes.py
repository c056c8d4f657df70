"""The tests of `gpuaug doctor`. Each runs in a process of its own and prints its result.

Nothing heavy is imported at the top, because spawned workers import this file.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

Answer = tuple[bool | None, str, Any]  # good (None: cannot be tested here), what was seen, details as JSON

ROUNDS = 8  # repetitions of tests that look for a race
TOLERANCE = 4  # levels between GPU and CPU decoders, as in DALI's own tests
IN_A_ROW = 4  # batches decoded while the device is busy
BUSY = 10_000_000  # clock cycles of work on the consumer's stream after each batch: some 6 ms


def main() -> None:
    """Run the test that the command line names, and print its result as the last line."""
    good, text, value = TESTS[sys.argv[1]]()
    print(json.dumps({"good": good, "text": text, "value": value}), flush=True)


def cuda() -> Answer:
    """Which devices torch can use, and which CUDA it is built for."""
    import torch

    devices: list[dict[str, Any]] = []
    build, value = torch.version.cuda, {"build": torch.version.cuda, "devices": devices}
    if not torch.cuda.is_available():
        if build is None:
            return False, "torch is a build without CUDA", value
        try:
            torch.cuda.init()
            why = "no device is visible"
        except Exception as error:  # any error says why
            why = str(error).strip().splitlines()[0][:200]
        return False, f"torch is built for CUDA {build}, and {why}", value
    for k in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(k)
        devices.append({"name": p.name, "memory": p.total_memory, "capability": f"{p.major}.{p.minor}"})
        torch.ones(8, device=f"cuda:{k}").sum().item()  # a listed device may still fail
    return True, f"torch is built for CUDA {build}", value


# --- decoders


def _images() -> list[tuple[str, bytes]]:
    """Names and bytes of encoded images of many kinds. Like photographs they have smooth colours and edges."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    images = []
    kinds: list[tuple[str, str, dict[str, Any]]] = [
        ("jpeg 4:4:4", "JPEG", {"quality": 92, "subsampling": 0}),
        ("jpeg 4:2:0", "JPEG", {"quality": 85, "subsampling": 2}),
        ("jpeg 4:2:2", "JPEG", {"quality": 80, "subsampling": 1}),
        ("jpeg progressive", "JPEG", {"quality": 85, "progressive": True}),
        ("jpeg gray", "JPEG", {"quality": 90}),
        ("png", "PNG", {}),
        ("webp", "WEBP", {"lossless": True}),
        ("bmp", "BMP", {}),
    ]
    for n, (name, codec, options) in enumerate(kinds * 2):
        width, height = int(rng.integers(150, 500)), int(rng.integers(150, 500))
        small = rng.integers(0, 256, (6, 7, 3), dtype=np.uint8)
        image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
        image.paste((255 - 10 * n, 16 * n, 40), (width // 3, height // 4, width // 2, height // 2))
        stream = io.BytesIO()
        (image.convert("L") if name.endswith("gray") else image).save(stream, codec, **options)
        images.append((name, stream.getvalue()))
    return images


def _truth(data: bytes) -> Any:
    """Pixels by Pillow: uint8 [H, W, 3]."""
    import numpy as np
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def _batch(encoded: Sequence[bytes]) -> Any:
    import numpy as np
    import torch

    from gpuaug.batch import EncodedBatch

    count = len(encoded)
    return EncodedBatch(
        data=torch.from_numpy(np.frombuffer(b"".join(encoded), dtype=np.uint8).copy()),
        offsets=torch.tensor([0, *np.cumsum([len(data) for data in encoded]).tolist()]),
        labels=None,
        indices=torch.arange(count),
        repeats=torch.zeros(count, dtype=torch.int64),
        valid=torch.ones(count, dtype=torch.bool),
    )


def header() -> Answer:
    """Compare our header parser with Pillow."""
    from gpuaug.decode import header as parser

    images = _images()
    for name, data in images:
        size, truth = parser.read(data), _truth(data)
        if (size.height, size.width) != truth.shape[:2]:
            return False, f"{name}: {size.height}x{size.width} instead of {truth.shape[0]}x{truth.shape[1]}", None
    return (
        True,
        f"{len(images)} images of {len({name for name, _ in images})} kinds: sizes and codecs as Pillow's",
        None,
    )


def _decode(device: str, *, hardware: float, tolerance: int, only: str = "") -> Answer:
    from gpuaug.decode.decoder import Decode

    images = [(name, data) for name, data in _images() if name.startswith(only)]
    batch = _batch([data for _, data in images])
    decoder = Decode(backend="dali", hardware_load=hardware, num_threads=2).open(device)
    largest = 0
    for _ in range(ROUNDS if hardware else 1):
        look = decoder.read_headers(batch)
        if look.faults:
            return False, f"{images[look.faults[0].row][0]} is refused: {look.faults[0].reason}", None
        for (name, data), decoded in zip(images, decoder.full(batch, look), strict=True):
            gap = _gap(decoded, _truth(data))
            if gap > tolerance:
                return False, f"{name} differs from Pillow by {gap} levels where {tolerance} are expected", None
            largest = max(largest, gap)
    rescued = f", {decoder.rescued} of them only by Pillow" if decoder.rescued else ""
    decoder.close()
    return not rescued, f"{len(images)} images within {largest} levels of Pillow's{rescued}", {"largest": largest}


def _gap(decoded: Any, truth: Any) -> int:
    import numpy as np

    pixels = decoded.cpu().numpy()
    if pixels.shape != truth.shape:
        return 255
    return int(np.abs(pixels.astype(np.int16) - truth.astype(np.int16)).max())


def decoder_cpu() -> Answer:
    """Compare DALI on the CPU with Pillow."""
    return _decode("cpu", hardware=0.0, tolerance=1)


def decoder_mixed() -> Answer:
    """Compare DALI on the GPU, without its JPEG engine, with Pillow."""
    return _decode("cuda", hardware=0.0, tolerance=TOLERANCE)


def hardware() -> Answer:
    """Compare the GPU's JPEG engine with Pillow. Without an engine DALI decodes without it silently: no result then."""
    if not _engine():
        allowed = os.environ.get("NVIDIA_DRIVER_CAPABILITIES")
        text = "nvImageCodec finds no JPEG engine, so `decode.hardware_load` changes nothing. Most GPUs have none; "
        text += "those of A100, H100 and newer need NVIDIA_DRIVER_CAPABILITIES=compute,utility,video in a container"
        return None, f"{text}. Found: {allowed or 'not set'}", None
    return _decode("cuda", hardware=1.0, tolerance=TOLERANCE, only="jpeg 4")


def _engine() -> bool:
    from nvidia import nvimgcodec

    data = next(data for name, data in _images() if name == "jpeg 4:2:0")
    try:
        decoder = nvimgcodec.Decoder(backends=[nvimgcodec.Backend(nvimgcodec.BackendKind.HW_GPU_ONLY)])
        return decoder.decode(data) is not None
    except Exception:  # releases report a missing engine by different errors
        return False


def roi() -> Answer:
    """Compare parts of images decoded on the GPU with Pillow."""
    return _parts("mixed")


def _parts(device: str) -> Answer:
    """Compare parts of images decoded by DALI with Pillow. Tests call it with ``cpu``."""
    import numpy as np
    import torch
    from nvidia.dali import Pipeline, fn, types

    images = [data for name, data in _images() if name.startswith("jpeg")]
    truths = [_truth(data) for data in images]
    cuda = device == "mixed"
    only_cuda: dict[str, Any] = {"hw_decoder_load": 0.0, "jpeg_fancy_upsampling": True} if cuda else {}
    pipeline: Any = Pipeline(len(images), 2, device_id=0 if cuda else None, prefetch_queue_depth=1)
    sources: Any = fn.external_source
    with pipeline:
        pipeline.set_outputs(
            fn.decoders.image_slice(
                sources(name="encoded", ndim=1, dtype=types.DALIDataType.UINT8),
                start=sources(name="start", ndim=1, dtype=types.DALIDataType.INT32),
                shape=sources(name="shape", ndim=1, dtype=types.DALIDataType.INT32),
                axes=[0, 1],
                device=device,
                output_type=types.DALIImageType.RGB,
                **only_cuda,
            )
        )
    pipeline.build()
    rng = np.random.default_rng(1)
    largest = 0
    for _ in range(ROUNDS):
        sizes = np.array([t.shape[:2] for t in truths])
        shape = np.maximum(1, (sizes * rng.uniform(0.05, 1, sizes.shape)).astype(np.int32)).astype(np.int32)
        start = (rng.uniform(0, 1, sizes.shape) * (sizes - shape + 1)).astype(np.int32)
        pipeline.feed_input("encoded", [np.frombuffer(data, dtype=np.uint8) for data in images])
        pipeline.feed_input("start", list(start))
        pipeline.feed_input("shape", list(shape))
        (parts,) = pipeline.run()
        for k, truth in enumerate(truths):
            (y, x), (h, w) = start[k], shape[k]
            gap = _gap(torch.from_dlpack(parts[k]), truth[y : y + h, x : x + w])
            largest = max(largest, gap)
    text = f"{ROUNDS * len(images)} parts of images within {largest} levels of Pillow's"
    return largest <= TOLERANCE, text, {"largest": largest}


class _Work:
    """Keeps every multiprocessor of a device busy, by matrix products on streams of high priority."""

    def __init__(self) -> None:
        import torch

        self.streams = [torch.cuda.Stream(priority=-1) for _ in range(4)]
        self.matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for event in (begin, end):  # first round: loads the library
            for _ in range(4):
                self.matrix @ self.matrix
            event.record()
        end.synchronize()
        self.each = begin.elapsed_time(end) / 4e3  # seconds

    def queue(self, seconds: float) -> None:
        """Queue work of some seconds, without waiting for it."""
        import torch

        for stream in self.streams:
            with torch.cuda.stream(stream):
                for _ in range(1 + int(seconds / self.each / len(self.streams))):
                    self.matrix @ self.matrix

    @property
    def running(self) -> bool:
        """Whether some of the work is left."""
        return not all(stream.query() for stream in self.streams)


def _order(hardware: float, tolerance: int, *, device: str = "cuda") -> Answer:
    """Compare batches decoded on a busy device, and read late, with the same batches decoded on an idle one.

    DALI resizes on the multiprocessors, which are busy, while the JPEG engine decodes. An engine that does not wait for
    its stream overwrites pixels that are not resized yet. Tests call it with ``cpu``.
    """
    from contextlib import nullcontext

    import torch

    from gpuaug.augment.crop import Resize
    from gpuaug.decode.decoder import Decode

    images = [data for name, data in _images() if name.startswith("jpeg")] * 4
    decoder = Decode(backend="dali", hardware_load=hardware, num_threads=2).open(device)
    crop, given = Resize((96, 96)), []
    for turn in range(IN_A_ROW):  # each batch has other pixels and sizes
        batch = _batch([images[(k + turn) % len(images)] for k in range(len(images))])
        look = decoder.read_headers(batch)
        given.append((batch, look, [crop.boxes(None, look.height, look.width)]))
    cuda = device != "cpu"
    work, consumer = (_Work(), torch.cuda.Stream()) if cuda else (None, None)
    for _ in range(2):  # first round: builds the pipeline
        began = time.perf_counter()
        truths = [decoder.pixels(*arguments)[0][0].cpu().clone() for arguments in given]
        seconds = (time.perf_counter() - began) / IN_A_ROW
    wrong = busy = largest = 0
    factor = 2  # of the time of a batch; grows while the device is idle before the batch is there
    for _ in range(ROUNDS):
        copies = []
        with torch.cuda.stream(consumer) if consumer is not None else nullcontext():
            for arguments in given:
                if work is not None:
                    work.queue(factor * seconds)
                made = decoder.pixels(*arguments)[0][0]
                if work is not None:
                    running = work.running  # the resize may still wait while the next batch is decoded
                    busy, factor = busy + running, factor if running else min(2 * factor, 16)
                    torch.cuda._sleep(BUSY)
                copies.append(made.clone())  # runs when the consumer's stream gets there
                del made
        if cuda:
            torch.cuda.synchronize()
        gaps = [_gap(copy, truth.numpy()) for copy, truth in zip(copies, truths, strict=True)]
        wrong, largest = wrong + sum(gap > tolerance for gap in gaps), max(largest, *gaps)
    decoder.close()
    count = ROUNDS * IN_A_ROW
    value = {"largest": largest, "wrong": wrong, "busy": busy}
    if wrong:
        return False, f"{wrong} of {count} batches have other pixels when decoded on a busy device or used late", value
    waits = "; decoding waits for the device" if cuda and not busy else ""
    return True, f"{count} batches keep their pixels, {busy} of them with work of others in front{waits}", value


def stream() -> Answer:
    """Check the order of decoding and a busy consumer's stream."""
    return _order(0.0, 0)


def stream_hardware() -> Answer:
    """As :func:`stream`, with the JPEG engine."""
    if not _engine():
        return None, "this GPU has no JPEG engine that nvImageCodec can use", None
    return _order(1.0, TOLERANCE)


# --- augmentation


def _augmented(device: str) -> float:
    """Largest difference, in levels, between the fused backend on a device and Kornia's modules on the CPU."""
    import kornia.augmentation as K
    import torch

    import gpuaug

    ops = {
        "flip": K.RandomHorizontalFlip(p=0.5),
        "jitter": K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.9),
        "gray": K.RandomGrayscale(p=0.2),
        "blur": K.RandomGaussianBlur((5, 5), (0.2, 2.0), p=0.5),
        "rotate": K.RandomRotation(20.0, p=0.5),
    }
    images = torch.arange(16 * 40 * 48 * 3, dtype=torch.int64).mul(7).remainder(251).to(torch.uint8)
    images = images.view(16, 40, 48, 3)
    made: list[Any] = [
        gpuaug.Augment(ops=ops, backend=backend)(images.to(on), seed=0, indices=range(16))
        for backend, on in (("fused", device), ("kornia", "cpu"))
    ]
    return float((made[0].cpu() - made[1]).abs().max()) * 255


def compiler() -> Answer:
    """Build the compiled augmentations for the CPU, and compare them with Kornia's."""
    import logging

    from gpuaug.augment.fused import cpu as native

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gpuaug").addHandler(handler)
    if native.library() is None:
        return False, messages[-1] if messages else "no C++ compiler", None
    gap = _augmented("cpu")
    return gap < 1, f"compiled augmentations within {gap:.2g} levels of Kornia's", {"largest": gap}


def fused_cuda() -> Answer:
    """Compare the augmentations that Triton compiles with Kornia's."""
    gap = _augmented("cuda")
    return gap < 1, f"compiled augmentations within {gap:.2g} levels of Kornia's", {"largest": gap}


# --- workers


class _Few:
    """A source of a few bytes."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        return bytes([index]) * 100_000, index


def workers() -> Answer:
    """Start a process by every method and let it write to shared memory; then read with the loader's own workers."""
    import multiprocessing
    from multiprocessing import shared_memory

    default = multiprocessing.get_start_method()
    seen = {}
    for method in multiprocessing.get_all_start_methods():
        context: Any = multiprocessing.get_context(method)
        try:
            memory: Any = shared_memory.SharedMemory(create=True, size=1 << 20)
        except OSError as error:
            return False, f"shared memory cannot be had: {error}", None
        try:
            process = context.Process(target=_touch, args=(memory.name,))
            process.start()
            process.join(30)
            seen[method] = process.exitcode == 0 and memory.buf[-1] == 7
            if process.is_alive():
                process.kill()
        except (OSError, RuntimeError) as error:
            return False, f"{method}: {error}", seen
        finally:
            memory.close()
            memory.unlink()
    broken = [method for method, good in seen.items() if not good]
    if default in broken:
        return False, f"workers do not start by {default}, Python's default", seen
    try:
        _read()
    except Exception as error:  # a loader would meet the same error
        return False, f"the loader's workers fail ({default}): {error}", seen
    text = ", ".join(f"{m}{' (default)' if m == default else ''}{'' if seen[m] else ' FAILS'}" for m in seen)
    return not broken, text, {**seen, "default": default}


def _touch(name: str) -> None:
    from multiprocessing import shared_memory

    memory: Any = shared_memory.SharedMemory(name=name)
    memory.buf[-1] = 7
    memory.close()


def _read() -> None:
    import torch

    from gpuaug.read.reader import Reader

    reader = Reader(_Few(), num_workers=1, timeout=60.0)
    numbers = torch.arange(4)
    for batch in reader.batches([(numbers, numbers * 0, numbers >= 0)]):
        if len(batch.data) != 400_000 or batch.faults:
            raise RuntimeError(f"{len(batch.data)} bytes instead of 400000")
    reader.close()


TESTS: dict[str, Callable[[], Answer]] = {
    f.__name__: f
    for f in (
        cuda, header, decoder_cpu, decoder_mixed, roi, hardware, stream, stream_hardware, compiler, fused_cuda, workers,
    )
}  # fmt: skip
