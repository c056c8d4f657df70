"""DALI's pipelines, on the CPU and on CUDA; the only file that imports DALI and nvImageCodec.

Both decode in stored coordinates and leave EXIF orientation to the caller.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.batch import Boxes
from gpuaug.decode.header import Header
from gpuaug.decode.plan import Pixels, Plan, to_stored
from gpuaug.errors import ConfigError

log = logging.getLogger("gpuaug")

Backend = Literal["auto", "dali", "pillow"]

# Not PNG: DALI inflates all there is, 1 GiB out of 1 MB, and takes three times that in memory. Pillow inflates what the
# image needs and stops; it costs 1.5 times the processor time (500 x 375, crop to 224).
CODECS = frozenset({"jpeg", "webp", "bmp"})
# DALI allocates at once, per thread and pipeline, what nvJPEG decodes in; these are its defaults. Twice the second is
# pinned.
DEVICE_PADDING, PINNED_PADDING = 16 << 20, 8 << 20
_FAILED_SAMPLE = re.compile(r"Failed to decode sample #(\d+)")
_loading = threading.Lock()  # held while codecs are loaded: an environment variable chooses them


def choose_backend(wanted: Backend) -> str:
    """``dali`` or ``pillow``; ``auto`` is Pillow where DALI cannot be imported, and logs why.

    Raises:
        ConfigError: if DALI is wanted and cannot be imported.
    """
    if wanted == "pillow":
        return wanted
    try:
        import nvidia.dali  # noqa: F401

        _code_stream()
    except (ImportError, OSError) as e:
        if wanted == "dali":
            raise ConfigError(
                f"`backend` is 'dali' and it cannot be imported ({e}). Install nvidia-dali-cuda120, or use 'auto'."
            ) from e
        log.info("decode with pillow: DALI cannot be imported (%s)", e)
        return "pillow"
    return "dali"


def accepts(data: bytes, header: Header) -> bool:
    """Whether DALI's own parser reads in ``data`` what ``header`` says; 3 µs.

    DALI does not name a sample that it refuses while it sets up a batch, and its threads crash (SIGSEGV) on sample
    types that it does not know. This check and `Header.dali_safe` leave it the images that it is known to decode.
    """
    try:
        stream = _code_stream()(data)
        same = stream.height == header.height and stream.width == header.width
        return bool(same and stream.dtype.kind == "u")  # TypeError where it does not know the type
    except (RuntimeError, TypeError):
        return False


def failed_sample(message: str) -> tuple[bool, int | None]:
    """Whether an error's message is about decoding a sample, and the sample's number in the batch, if it is named."""
    match = _FAILED_SAMPLE.search(message)
    return match is not None or "decoders.image" in message, int(match[1]) if match else None


class CpuPipeline:
    """DALI on the CPU: decodes one box of each image."""

    bytes_per_pixel = 12  # peak memory while an image is decoded, of its whole size

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._pipeline: Any = None
        self._capacity = 0

    def run(self, plan: Plan) -> list[Pixels]:
        """Per row uint8 [height, width, 3], its ``plan.union``; views that hold DALI's memory."""
        if len(plan) > self._capacity:
            self._capacity = _capacity(plan)
            self._pipeline = self._build()
        self._pipeline.feed_input("encoded", plan.encoded)
        _feed(self._pipeline, np.int32, start=plan.union[:, :2], shape=plan.union[:, 2:])
        (regions,) = self._pipeline.run()
        # Through DLPack, because DALI's arrays for numpy are read-only and would be copied for torch.
        return [torch.from_dlpack(regions[k]).numpy() for k in range(len(plan))]

    def _build(self) -> Any:
        def graph(fn: Any, types: Any, fed: Callable[..., Any]) -> list[Any]:
            box = {"start": fed("start"), "shape": fed("shape"), "axes": [0, 1]}
            return [fn.decoders.image_slice(fed("encoded", types.UINT8), **box, device="cpu", **_rgb(types))]

        return _pipeline(self._capacity, self._num_threads, None, graph)


class CudaPipeline:
    """DALI on CUDA: decodes whole images once, then slices, resizes and pads each view.

    Boxes are not decoded alone: nvImageCodec 0.9 crashes doing so on some GPUs. A pipeline is built for ``batch_size``
    samples at least. ``operators="cpu"`` runs the same graph without a GPU, for tests.
    """

    bytes_per_pixel = 3  # only the pixels are counted

    def __init__(
        self,
        device: torch.device,
        *,
        num_threads: int,
        hardware_load: float = 0.0,
        batch_size: int = 1,
        operators: str = "mixed",
    ) -> None:
        self._device, self._operators = device, operators
        self._num_threads, self._batch_size = num_threads, batch_size
        self._hardware_load = float(hardware_load)
        self._pipelines: dict[tuple[Any, ...], tuple[int, Any]] = {}

    def run(self, plan: Plan) -> list[Tensor]:
        """Per view uint8 [n, H, W, 3], stored orientation, in torch's memory, on torch's current stream."""
        key = tuple((b.interpolation, b.fill) for b in plan.boxes)
        capacity, pipeline = self._pipelines.get(key, (0, None))
        if len(plan) > capacity:
            capacity = max(self._batch_size, _capacity(plan))
            pipeline = self._build(capacity, plan.boxes)
            self._pipelines[key] = capacity, pipeline
        pipeline.feed_input("encoded", plan.encoded)
        for v, (boxes, part) in enumerate(zip(plan.boxes, plan.parts, strict=True)):
            size = np.array(boxes.size, dtype=np.int64)
            canvas = np.where(plan.swapped[:, None], size[::-1], size)
            resized = to_stored(np.concatenate([boxes.offset, boxes.resized], axis=1), canvas, plan.orientation)
            _feed(pipeline, np.int32, **{f"start{v}": part[:, :2], f"shape{v}": part[:, 2:]})
            _feed(pipeline, np.int32, **{f"corner{v}": -resized[:, :2], f"canvas{v}": canvas})
            _feed(pipeline, np.float32, **{f"size{v}": resized[:, 2:]})
        stream = None if self._operators == "cpu" else torch.cuda.current_stream(self._device)
        return [self._copied(view.as_tensor(), stream) for view in pipeline.run(stream)]

    def _copied(self, view: Any, stream: torch.cuda.Stream | None) -> Tensor:
        # If torch held DALI's memory by DLPack, DALI would free it after a cudaDeviceSynchronize in its own thread,
        # which spins for as long as the training keeps the device busy.
        from nvidia.dali.plugin.pytorch import feed_ndarray

        out = torch.empty(view.shape(), dtype=torch.uint8, device=self._device)
        return feed_ndarray(view, out, cuda_stream=stream)

    def _build(self, capacity: int, views: Sequence[Boxes]) -> Any:
        index, only_cuda = None, dict[str, Any]()
        if self._operators == "mixed":
            index = self._device.index
            only_cuda = {"device_memory_padding": DEVICE_PADDING, "host_memory_padding": PINNED_PADDING}
            only_cuda["hw_decoder_load"] = self._hardware_load

        def graph(fn: Any, types: Any, fed: Callable[..., Any]) -> list[Any]:
            def slice_of(image: Any, start: str, shape: str, **more: Any) -> Any:
                return fn.slice(image, start=fed(start), shape=fed(shape), axes=[0, 1], **more)

            # fancy upsampling: within 1 of the CPU; without it within 4
            settings = {"device": self._operators, "jpeg_fancy_upsampling": True, **_rgb(types), **only_cuda}
            image = fn.decoders.image(fed("encoded", types.UINT8), **settings)
            interpolations = {"bilinear": types.INTERP_LINEAR, "bicubic": types.INTERP_CUBIC}
            outputs = []
            for v, view in enumerate(views):
                resized = fn.resize(
                    slice_of(image, f"start{v}", f"shape{v}"),
                    size=fed(f"size{v}", types.FLOAT),
                    interp_type=interpolations[view.interpolation],
                    antialias=True,
                )
                padded = {"out_of_bounds_policy": "pad", "fill_values": [float(view.fill)]}
                outputs.append(slice_of(resized, f"corner{v}", f"canvas{v}", **padded))
            return outputs

        return _pipeline(capacity, self._num_threads, index, graph)


def _capacity(plan: Plan) -> int:
    """Batch size of a new pipeline: a power of two, at least 32, so that few batches need another one."""
    return 1 << max(5, (len(plan) - 1).bit_length())


def _feed(pipeline: Any, dtype: Any, **inputs: NDArray[Any]) -> None:
    for name, rows in inputs.items():  # one array each: a list of rows costs DALI 4 µs of Python each
        pipeline.feed_input(name, np.ascontiguousarray(rows, dtype=dtype))


def _rgb(types: Any) -> dict[str, Any]:
    return {"output_type": types.RGB, "adjust_orientation": False}


def _pipeline(capacity: int, num_threads: int, device: int | None, graph: Callable[..., list[Any]]) -> Any:
    """A pipeline, built, with the outputs of ``graph(fn, types, fed)``, where ``fed(name, dtype)`` is an input."""
    from nvidia import dali

    fn, types = cast(Any, dali.fn), cast(Any, dali.types)  # its stubs lack constants and operators' results

    def fed(name: str, dtype: Any = types.INT32) -> Any:
        return fn.external_source(name=name, ndim=1, dtype=dtype)

    pipeline = cast(Any, dali.Pipeline)(capacity, num_threads, device_id=device, prefetch_queue_depth=1)
    with pipeline:
        pipeline.set_outputs(*graph(fn, types, fed))
    with _host_codecs() if device is None else _loading:
        pipeline.build()
    return pipeline


def release_memory() -> None:
    """Give the memory of pipelines that are gone back to the system."""
    from nvidia.dali import backend

    cast(Any, backend).ReleaseUnusedMemory()


@lru_cache(maxsize=1)
def _code_stream() -> Any:
    """nvImageCodec's parser, which DALI uses."""
    with _host_codecs():
        from nvidia.nvimgcodec import CodeStream

    return CodeStream


@contextmanager
def _host_codecs() -> Iterator[None]:
    """Leave out nvImageCodec's GPU codecs while its codecs are loaded: their search for a JPEG engine opens a CUDA
    context on the current device, which the parser and ``device=cpu`` do not need."""
    name = "NVIMGCODEC_EXTENSIONS_PATH"
    spec = find_spec("nvidia.nvimgcodec")
    with _loading, tempfile.TemporaryDirectory(prefix="gpuaug-") as folder:
        for package in (spec and spec.submodule_search_locations) or ():
            for codec in Path(package, "extensions").glob("*.so*"):
                if not codec.name.startswith(("libnvjpeg", "libnvtiff")):
                    Path(folder, codec.name).symlink_to(codec)
        before = os.environ.get(name)
        os.environ.setdefault(name, folder)
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
