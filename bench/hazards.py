"""Questions that only a GPU can answer and no test can decide: `python bench/hazards.py OUT.jsonl [NAMES...]`.

    python bench/hazards.py hazards.jsonl                           # all of them, some twelve minutes
    python bench/hazards.py hazards.jsonl context engine paging     # these
    python bench/hazards.py hazards.jsonl --rehearse                # on the CPU, small: shows that they run

Each question runs in a process of its own with a time limit. Its answer is added to OUT.jsonl at once, as one line.
Questions that a test can decide are in tests/test_gpu.py or in `gpuaug doctor`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

REHEARSE = "--rehearse" in sys.argv or "--cpu" in sys.argv
DEVICE = "cpu" if REHEARSE else "cuda"
BATCH = 32 if REHEARSE else 256
NEEDS_GPU = "needs a GPU"


def jpegs(count: int, size: tuple[int, int] = (500, 375)) -> list[bytes]:
    """Encoded parts of photographs, 4:4:4 and 4:2:0."""
    from photographs import photograph

    found = []
    photos = [photograph(name).resize((700, 525)) for name in ("astronaut", "coffee", "rocket")]
    for k in range(count):
        x, y = k % (701 - size[0]), 3 * k % (526 - size[1])
        out = io.BytesIO()
        window = photos[k % 3].crop((x, y, x + size[0], y + size[1]))
        window.save(out, "JPEG", quality=85 + k % 10, subsampling=2 * (k % 2))
        found.append(out.getvalue())
    return found


def contexts() -> list[int] | None:
    """Devices on which this process has a primary context; None without a driver. This opens no context."""
    try:
        cu = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, device, flags, active = (ctypes.c_int() for _ in range(4))
    if cu.cuInit(0) or cu.cuDeviceGetCount(ctypes.byref(count)):
        return None
    found = []
    for number in range(count.value):
        cu.cuDeviceGet(ctypes.byref(device), number)
        cu.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
        found += [number] * bool(active.value)
    return found


def _synchronize() -> None:
    if not REHEARSE:
        import torch

        torch.cuda.synchronize()


def _training() -> Callable[[int], None]:
    """A function that queues ``count`` matrix products, like a training step; it does nothing on a CPU."""
    import torch

    if REHEARSE:
        return lambda count: None
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def step(count: int) -> None:
        for _ in range(count):
            a @ a

    return step


def context() -> Any:
    """On which devices does a process have a context after an import? Forked workers must not inherit one."""
    ours = "from gpuaug.tools.doctor.probes import _batch, _images; from gpuaug.decode.decoder import Decode\n"
    ours += "d = Decode().open('cpu'); b = _batch([_images()[0][1]]); d.whole(d.read_headers(b))"
    ways = {
        "nothing": "",
        "import nvidia.nvimgcodec": "import nvidia.nvimgcodec",
        "import nvidia.dali": "import nvidia.dali",
        "import gpuaug": "import gpuaug",
        "our decoder for the CPU": ours,
    }
    found = {}
    for name, code in ways.items():
        code = f"import sys\nsys.path[:0] = {sys.path[:2]!r}\nimport hazards\n{code}\nprint(hazards.contexts())"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        found[name] = done.stdout.splitlines()[-1] if done.returncode == 0 else f"fails: {done.stderr[-500:]}"
    return found


def feed() -> Any:
    """Host milliseconds per batch and stage: with waiting, and CPU time of the calling thread alone."""
    import numpy as np
    import torch

    import gpuaug
    from gpuaug.decode.decoder import Decode
    from gpuaug.tools.doctor.probes import _batch

    decoder, batch, found = Decode(num_threads=2 if REHEARSE else 8).open(DEVICE), _batch(jpegs(BATCH)), {}
    for recipe in ("standard", "dino"):
        augment = gpuaug.build(gpuaug.compose("train", [f"augment={recipe}", "source.root=."]).augment)
        look, drawn = decoder.read_headers(batch), augment.draw(seed=0, epoch=0, indices=np.arange(BATCH))
        boxes = augment.windows(drawn, look.height, look.width)
        images, _ = decoder.pixels(look, boxes)
        stages: dict[str, Callable[[], Any]] = {
            "headers": partial(decoder.read_headers, batch),
            "draws": partial(augment.draw, seed=0, epoch=0, indices=np.arange(BATCH)),
            "boxes": partial(augment.windows, drawn, look.height, look.width),
            "pixels": partial(decoder.pixels, look, boxes),
            "augment": partial(augment.render, images, drawn, dtype=torch.bfloat16),
        }
        for name, stage in stages.items():
            took = []
            for _ in range(3 if REHEARSE else 8):
                _synchronize()
                wall, own = time.perf_counter(), time.thread_time()
                stage()
                took.append((time.perf_counter() - wall, time.thread_time() - own))
            found[f"{recipe}: {name}"] = [round(1e3 * float(np.median(t)), 2) for t in zip(*took, strict=True)]
    return found


def ceiling() -> Any:
    """DALI alone, images per second and CPU time per image, for several settings: threads, share of the JPEG engine,
    Huffman threshold, prefetch depth.

    With depth 2, a batch is fed while DALI decodes the batch before. gpuaug has two pipelines with depth 1, which take
    turns (CudaPipeline in decode/dali.py says why).
    """
    import numpy as np
    import torch
    from nvidia.dali import Pipeline, fn, types

    encoded = [np.frombuffer(data, np.uint8) for data in jpegs(BATCH)]

    def rate(threads: int, load: float, huffman: int, depth: int) -> dict[str, Any]:
        device = {"device": "cpu"}
        if not REHEARSE:
            device = {"device": "mixed", "hw_decoder_load": load, "hybrid_huffman_threshold": huffman}
        pipeline: Any = Pipeline(BATCH, threads, device_id=None if REHEARSE else 0, prefetch_queue_depth=depth)
        with pipeline:
            data = fn.external_source(name="x", ndim=1, dtype=types.UINT8)  # copies, as in gpuaug
            image = fn.decoders.image(data, jpeg_fancy_upsampling=True, **device)
            pipeline.set_outputs(fn.resize(image, size=[224, 224], antialias=True))
        pipeline.build()
        stream = None if REHEARSE else torch.cuda.Stream()
        if depth > 1:  # the first call of schedule_run takes as many
            for _ in range(depth):
                pipeline.feed_input("x", encoded)
            pipeline.schedule_run()

        def once() -> None:
            pipeline.feed_input("x", encoded)
            pipeline.schedule_run()
            pipeline.outputs(stream)

        for _ in range(4):
            once()
        _synchronize()
        count, began, own = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() - began < (0.3 if REHEARSE else 2.5):
            once()
            count += BATCH
        _synchronize()
        wall, own = time.perf_counter() - began, time.process_time() - own
        return {"images_per_second": round(count / wall), "cpu_microseconds": round(1e6 * own / count)}

    never = 1_000_000
    grid = [(t, 0.0, never, 1) for t in (4, 8, 12, 16)] + [(12, load, never, 1) for load in (0.3, 0.5, 0.65, 0.8, 1.0)]
    grid += [(12, 0.0, h, 1) for h in (0, 100_000)] + [(8, 0.0, never, 2), (12, 0.0, never, 2), (12, 0.65, never, 2)]
    rows = []
    for setting in [(2, 0.0, never, 1), (2, 0.0, never, 2)] if REHEARSE else grid:
        row = dict(zip(("threads", "load", "huffman", "depth"), setting, strict=True))
        try:
            rows.append({**row, **rate(*setting)})
        except Exception as error:  # the other settings are worth having
            rows.append({**row, "reason": f"{type(error).__name__}: {error}"[:300]})
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def graveyard() -> Any:
    """Cores that decoding uses while the GPU trains: ours, and DALI's own with outputs through DLPack.

    DALI frees such outputs after a cudaDeviceSynchronize, in a thread that spins until the device is idle.
    """
    import numpy as np
    import torch
    from nvidia.dali import Pipeline, fn, types

    from gpuaug.augment.crop import Resize
    from gpuaug.decode.decoder import Decode
    from gpuaug.tools.doctor.probes import _batch

    if REHEARSE:
        return NEEDS_GPU
    data = jpegs(16)
    decoder, batch = Decode(num_threads=2).open("cuda"), _batch(data)
    look = decoder.read_headers(batch)
    boxes = [Resize((224, 224)).windows(None, look.height, look.width)]
    pipeline: Any = Pipeline(16, 2, device_id=0, prefetch_queue_depth=1)
    with pipeline:
        image = fn.decoders.image(fn.external_source(name="x", ndim=1, dtype=types.UINT8), device="mixed")
        pipeline.set_outputs(fn.resize(image, size=[224, 224]))
    pipeline.build()
    stream, step = torch.cuda.Stream(), _training()

    def by_dlpack() -> torch.Tensor:
        pipeline.feed_input("x", [np.frombuffer(x, np.uint8) for x in data])
        (out,) = pipeline.run(stream)
        return torch.from_dlpack(out.as_tensor())

    ways: dict[str, Callable[[], Any]] = {
        "training alone": lambda: None,
        "ours": lambda: decoder.pixels(look, boxes)[0][0],
        "DLPack": by_dlpack,
    }
    found = {}
    for name, way in ways.items():
        with torch.cuda.stream(stream):
            way()
        torch.cuda.synchronize()
        began, own, steps = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - began < 5:
            step(60)
            done = torch.cuda.Event(blocking=True)
            done.record()
            with torch.cuda.stream(stream):
                way()
            done.synchronize()
            steps += 1
        wall = time.perf_counter() - began
        found[name] = {"cores_busy": round((time.process_time() - own) / wall, 2), "steps": steps}
    return found


def loader() -> Any:
    """Images per second of the whole loader: alone, during a training, and with the JPEG engine."""
    import gpuaug

    files = jpegs(64 if REHEARSE else 512)

    class Encoded:
        num_classes = 2

        def __len__(self) -> int:
            return 64 if REHEARSE else 6144

        def __getitem__(self, index: int) -> tuple[bytes, int]:
            return files[index % len(files)], index % 2

    found, step = {}, _training()
    augment = gpuaug.build(gpuaug.compose("train", ["augment=standard", "source.root=."]).augment)
    for load in (0.0,) if REHEARSE else (0.0, 0.65):
        decode = gpuaug.Decode(num_threads=2 if REHEARSE else 12, hardware_load=load)
        settings = {"batch_size": BATCH // 2, "dtype": "bfloat16", "num_workers": 2 if REHEARSE else 6, "prefetch": 3}
        with gpuaug.Loader(Encoded(), augment=augment, decode=decode, device=DEVICE, **settings) as batches:
            list(batches)  # what is compiled and opened
            for products in (0, 20):
                began, own, images = time.perf_counter(), time.process_time(), 0
                for _ in range(1 if REHEARSE else 2):
                    for batch in batches:
                        images += len(batch)
                        step(products)
                _synchronize()
                wall, own = time.perf_counter() - began, time.process_time() - own
                found[f"engine {load}, {products} products per batch"] = {
                    "images_per_second": round(images / wall), "waited": round(batches.waited / wall, 3),
                    "main_process_cores": round(own / wall, 2),
                }  # fmt: skip
                print(list(found.items())[-1], file=sys.stderr, flush=True)
    return found


def engine() -> Any:
    """Batches decoded in sequence on a busy device, as `gpuaug doctor` does, without and with the JPEG engine."""
    from gpuaug.tools.doctor import probes

    if REHEARSE:
        return {"cpu": probes._order(0.0, 0, device="cpu")}
    return {"an engine": probes._engine(), "without": probes._order(0.0, 0), "with": probes.hardware()}


def paging() -> Any:
    """Does a large copy from pageable memory block the host on a stream that waits? And one from pinned memory?"""
    import torch

    if REHEARSE:
        return NEEDS_GPU
    stream, found = torch.cuda.Stream(), {}
    for name, pinned in (("pageable", False), ("pinned", True)):
        x = torch.empty(38 << 20, dtype=torch.uint8, pin_memory=pinned).fill_(1)
        x.to("cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(400_000_000)
            began = time.perf_counter()
            y = x.to("cuda", non_blocking=True)
            held = time.perf_counter() - began
            x.fill_(2)  # where nothing was staged, this is what arrives
        torch.cuda.synchronize()
        began = time.perf_counter()
        x.to("cuda")
        torch.cuda.synchronize()
        rate = x.numel() / (time.perf_counter() - began) / 1e9
        found[name] = {"host_held_ms": 1e3 * held, "gigabytes_per_second": rate, "late_bytes": int((y == 2).sum())}
    return found


def batch() -> Any:
    """The largest difference of a sample in different batches, by backend. Only `fused` promises 0."""
    import torch

    import gpuaug

    x = torch.randint(0, 256, (64, 96, 80, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found = {}
    for backend in ("fused", "kornia"):
        for recipe in ("standard", "simclr", "randaugment_torchvision"):
            overrides = [f"augment={recipe}", f"augment.backend={backend}", "source.root=."]
            augment = gpuaug.build(gpuaug.compose("train", overrides).augment)

            def on(rows: list[int], augment: Any = augment) -> list[torch.Tensor]:
                drawn = augment.draw(seed=1, epoch=0, indices=rows)
                made: list[torch.Tensor] = augment.render([x[rows] for _ in augment.views], drawn, dtype=torch.float32)
                return made

            whole, gaps = on(list(range(64))), []
            for rows in ([0], [3, 9], list(range(7))):
                gaps += [float((a - b[rows]).abs().max()) for a, b in zip(on(rows), whole, strict=True)]
            found[f"{backend} {recipe}"] = max(gaps)
    return found


def parts() -> bool:
    """Whether DALI decodes parts of images as Pillow does; decoding them on a GPU crashes some (nvImageCodec 0.9)."""
    import numpy as np
    import torch
    from nvidia.dali import Pipeline, fn, types

    from gpuaug.tools.doctor.probes import _gap, _images, _truth

    images = [data for name, data in _images() if name.startswith("jpeg")]
    rng = np.random.default_rng(1)
    for _ in range(8):
        (y, x), (h, w) = rng.integers(0, 75, 2).tolist(), rng.integers(1, 75, 2).tolist()  # images have 150 pixels
        pipeline: Any = Pipeline(len(images), 2, device_id=None if REHEARSE else 0, prefetch_queue_depth=1)
        with pipeline:
            encoded = fn.external_source(source=lambda: [np.frombuffer(data, dtype=np.uint8) for data in images])
            part = {"start": (y, x), "shape": (h, w), "axes": (0, 1), "output_type": types.DALIImageType.RGB}
            gpu = {"hw_decoder_load": 0.0, "jpeg_fancy_upsampling": True, "device": "mixed"}
            pipeline.set_outputs(fn.decoders.image_slice(encoded, **part, **({} if REHEARSE else gpu)))
        pipeline.build()
        (out,) = pipeline.run()
        for k, data in enumerate(images):
            if _gap(torch.from_dlpack(out[k]), _truth(data)[y : y + h, x : x + w]) > 4:
                return False
    return True


# time limit of each question, in seconds
LIMITS = {
    context: 120, feed: 90, engine: 120, paging: 40, batch: 90, graveyard: 60, loader: 260, ceiling: 170, parts: 60,
}  # fmt: skip
HAZARDS = {f.__name__: (f, limit) for f, limit in LIMITS.items()}


def ask(name: str) -> dict[str, Any]:
    """The answer to one question, from a process of its own that is killed after its time limit."""
    command = [sys.executable, "-X", "faulthandler", __file__, "--one", name, *(["--rehearse"] * REHEARSE)]
    began = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=HAZARDS[name][1])
        reason = f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # faulthandler then says where it is
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        reason = f"not there after {HAZARDS[name][1]} s"
    lines = [line for line in out.splitlines() if line.startswith("ANSWER ")]
    answer: dict[str, Any] = {"name": name, "seconds": round(time.perf_counter() - began, 1)}
    if lines:
        return {**answer, "answer": json.loads(lines[-1].removeprefix("ANSWER "))}
    return {**answer, "reason": reason, "end": (out + err)[-6000:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a line of JSON for each is added to this file")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(HAZARDS)}; default: all")
    parser.add_argument("--rehearse", "--cpu", action="store_true", help="on the CPU, small")
    args = parser.parse_intermixed_args()
    if unknown := set(args.names) - set(HAZARDS):
        parser.error(f"names are {', '.join(HAZARDS)}. Found: {', '.join(sorted(unknown))}.")
    failed = 0
    for name in args.names or HAZARDS:
        answer = ask(name)
        failed += "reason" in answer
        with args.out.open("a") as file:
            file.write(json.dumps(answer) + "\n")
        print(f"{name}: {json.dumps(answer.get('answer', answer), indent=1)}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print("ANSWER " + json.dumps(HAZARDS[sys.argv[2]][0]()), flush=True)
        sys.exit(0)
    sys.exit(main())
