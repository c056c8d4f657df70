"""DALI's pipelines for the CPU and for CUDA. Only this file imports DALI and nvImageCodec.

The pipelines do not apply EXIF orientation.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import re
import tempfile
import threading
import weakref
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

from gpuaug.batch import CropWindows
from gpuaug.decode.header import Header
from gpuaug.decode.request import DecodeRequest, Pixels, to_stored
from gpuaug.decode.values import Stored
from gpuaug.errors import ConfigError
from gpuaug.read.ends import end_all

log = logging.getLogger("gpuaug")

Backend = Literal["auto", "dali", "pillow"]

# nvImageCodec loads the codecs in these folders, separated by colons; empty: in its own. The variable exists from the
# import on, because to add or remove one is not safe while other threads read the environment (glibc before 2.41).
_CODEC_FOLDERS = "NVIMGCODEC_EXTENSIONS_PATH"
os.environ.setdefault(_CODEC_FOLDERS, "")
_FAILED_SAMPLE = re.compile(r"Failed to decode sample #(\d+)")
_loading = threading.Lock()  # held while codecs load: an environment variable selects the codecs
_pipelines = weakref.WeakSet[Any]()  # those of this process


def choose_backend(wanted: Backend) -> str:
    """Return ``dali`` or ``pillow``. If DALI cannot be imported, ``auto`` chooses Pillow."""
    if wanted == "pillow":
        return wanted
    try:
        import nvidia.dali  # noqa: F401

        _code_stream()
    except (ImportError, OSError) as e:
        if wanted == "dali":
            raise ConfigError(
                f"`backend` is 'dali', but DALI cannot be imported ({e}). Install nvidia-dali-cuda120, or use 'auto'."
            ) from e
        log.info("decode with pillow: DALI cannot be imported (%s)", e)
        return "pillow"
    return "dali"


def accepts(encoded: Pixels, header: Header) -> bool:
    """Whether DALI's own parser knows the pixel type of ``encoded``, and reads the same size as ``header``. Takes 3 µs.

    If DALI refuses a sample before decoding, the error does not name the sample. If DALI does not know the pixel type,
    its threads crash (SIGSEGV).
    """
    try:
        stream = _code_stream()(encoded)
        same = stream.height == header.height and stream.width == header.width
        known = stream.dtype.kind == "u"  # TypeError if DALI does not know the pixel type
        if header.codec != "jpeg":  # the values of the file, not RGB
            known = stream.dtype == header.dtype and stream.num_channels == header.channels
        return bool(same and known)
    except (RuntimeError, TypeError):
        return False


def failed_sample(message: str) -> tuple[bool, int | None]:
    """Whether an error message is about decoding, and the row that the message names; None: no row."""
    match = _FAILED_SAMPLE.search(message)
    return match is not None or "decoders.image" in message, int(match[1]) if match else None


class CpuPipeline:
    """DALI on the CPU: decodes one box of each image. DALI's resize would be several times slower.

    ``stored``: the stored values that it decodes. None: RGB.
    """

    bytes_per_pixel = 12  # peak memory while decoding, per pixel of the whole image

    def __init__(self, num_threads: int, stored: Stored | None = None) -> None:
        self._num_threads, self._stored = num_threads, stored
        self._pipeline: Any = None
        self._capacity = 0

    def run(self, request: DecodeRequest) -> list[Pixels]:
        """Decode each row's ``request.union`` box, [height, width, channels]. The arrays keep DALI's memory alive."""
        if len(request) > self._capacity:
            self._capacity = _capacity(request)
            self._pipeline = self._build()
        self._pipeline.feed_input("encoded", request.headers.encoded)
        _feed(self._pipeline, np.int32, start=request.union[:, :2], shape=request.union[:, 2:])
        (regions,) = self._pipeline.run()
        # DALI's own numpy arrays are read-only, so torch would have to copy them
        return [torch.from_dlpack(regions[k]).numpy() for k in range(len(request))]

    def _build(self) -> Any:
        def graph(fn: Any, types: Any, fed: Callable[..., Any]) -> list[Any]:
            box = {"start": fed("start"), "shape": fed("shape"), "axes": [0, 1]}
            dtypes = {"uint8": types.UINT8, "uint16": types.UINT16, "float32": types.FLOAT}
            stored = {}
            if self._stored is not None and self._stored.dtype is not None:
                stored = {"output_type": types.ANY_DATA, "dtype": dtypes[self._stored.dtype]}
            return [fn.decoders.image_slice(fed("encoded", types.UINT8), **box, device="cpu", **_rgb(types) | stored)]

        return _pipeline(self._capacity, self._num_threads, None, graph)


class CudaPipeline:
    """DALI on CUDA: decodes whole images once, then slices, resizes and pads each view.

    Decoding only the windows crashes nvImageCodec 0.9 on some GPUs. ``operators="cpu"`` runs the same graph without a
    GPU, for tests.

    :meth:`run` feeds a batch (4.3 ms for 256 files of 46 KB), waits for DALI's work on the CPU, and returns when all
    GPU work is queued. DALI's threads are idle while a batch is fed, so a loader has two decoders, and a thread for
    each, which take turns. A queue of two batches in one pipeline would do the same (on an H100, 27 % faster than a
    queue of one, 40 % with the JPEG engine). But an error would come while another batch is in DALI.
    """

    bytes_per_pixel = 3  # only the decoded pixels

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

    def run(self, request: DecodeRequest) -> list[Tensor]:
        """Queue the work on torch's current stream. Return views before orientation, uint8 [n, h, w, 3]."""
        key = tuple((b.interpolation, b.fill) for b in request.windows)
        capacity, pipeline = self._pipelines.get(key, (0, None))
        if len(request) > capacity:
            capacity = max(self._batch_size, _capacity(request))
            pipeline = self._build(capacity, request.windows)
            self._pipelines[key] = capacity, pipeline
        headers = request.headers
        pipeline.feed_input("encoded", headers.encoded)
        for v, (windows, part) in enumerate(zip(request.windows, request.parts, strict=True)):
            size = np.array(windows.size, dtype=np.int64)
            canvas = np.where(headers.swapped[:, None], size[::-1], size)
            resized = to_stored(np.concatenate([windows.offset, windows.resized], axis=1), canvas, headers.orientation)
            _feed(pipeline, np.int32, **{f"start{v}": part[:, :2], f"shape{v}": part[:, 2:]})
            _feed(pipeline, np.int32, **{f"corner{v}": -resized[:, :2], f"canvas{v}": canvas})
            _feed(pipeline, np.float32, **{f"size{v}": resized[:, 2:]})
        stream = None if self._operators == "cpu" else torch.cuda.current_stream(self._device)
        return [self._copied(view.as_tensor(), stream) for view in pipeline.run(stream)]

    def _copied(self, view: Any, stream: torch.cuda.Stream | None) -> Tensor:
        # With DLPack, a thread of DALI would call cudaDeviceSynchronize before it frees memory. Such a wait keeps a
        # CPU core busy while the device trains.
        from nvidia.dali.plugin.pytorch import feed_ndarray

        out = torch.empty(view.shape(), dtype=torch.uint8, device=self._device)
        return feed_ndarray(view, out, cuda_stream=stream)

    def _build(self, capacity: int, views: Sequence[CropWindows]) -> Any:
        index, only_cuda = None, dict[str, Any]()
        if self._operators == "mixed":
            index, only_cuda = self._device.index, {"hw_decoder_load": self._hardware_load}

        def graph(fn: Any, types: Any, fed: Callable[..., Any]) -> list[Any]:
            def slice_of(image: Any, start: str, shape: str, **more: Any) -> Any:
                return fn.slice(image, start=fed(start), shape=fed(shape), axes=[0, 1], **more)

            # with fancy upsampling, pixels differ from the CPU's by at most 1; without it, by at most 4
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
                padded = {"out_of_bounds_policy": "pad", "fill_values": np.atleast_1d(view.fill).astype(float).tolist()}
                outputs.append(slice_of(resized, f"corner{v}", f"canvas{v}", **padded))
            return outputs

        return _pipeline(capacity, self._num_threads, index, graph)


def _capacity(request: DecodeRequest) -> int:
    """Batch size of a new pipeline: a power of two, so that few batches need a larger pipeline."""
    return 1 << max(5, (len(request) - 1).bit_length())


def _feed(pipeline: Any, dtype: Any, **inputs: NDArray[Any]) -> None:
    for name, rows in inputs.items():  # one array per input: a list of rows costs 4 µs of Python per row
        pipeline.feed_input(name, np.ascontiguousarray(rows, dtype=dtype))


def _rgb(types: Any) -> dict[str, Any]:
    return {"output_type": types.RGB, "adjust_orientation": False}


def _pipeline(capacity: int, num_threads: int, device: int | None, graph: Callable[..., list[Any]]) -> Any:
    """Build a pipeline with the outputs of ``graph(fn, types, fed)``. ``fed(name, dtype)`` declares an input."""
    from nvidia import dali

    fn, types = cast(Any, dali.fn), cast(Any, dali.types)  # DALI's stubs lack constants and operators' results

    def fed(name: str, dtype: Any = types.INT32) -> Any:
        return fn.external_source(name=name, ndim=1, dtype=dtype)

    pipeline = cast(Any, dali.Pipeline)(capacity, num_threads, device_id=device, prefetch_queue_depth=1)
    with pipeline:
        pipeline.set_outputs(*graph(fn, types, fed))
    with _host_codecs() if device is None else _loading:
        pipeline.build()
    _pipelines.add(pipeline)
    return pipeline


def _leave_to_parent() -> None:
    """In a forked child: never free the pipelines. DALI would wait for their threads, which a fork does not copy."""
    for pipeline in _pipelines:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pipeline._pipe))
        pipeline._pipe = None  # DALI shuts this object down when the pipeline is freed or Python ends


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


def release_memory() -> None:
    """Return the memory of deleted pipelines to the system."""
    from nvidia.dali import backend

    cast(Any, backend).ReleaseUnusedMemory()


@lru_cache(maxsize=1)
def _code_stream() -> Any:
    """nvImageCodec's parser, which DALI uses too."""
    with _host_codecs():
        from nvidia.nvimgcodec import CodeStream

    # At exit, DALI stops pipelines also while a thread runs them. atexit calls the newest function first.
    atexit.register(end_all)
    return CodeStream


@contextmanager
def _host_codecs() -> Iterator[None]:
    """Inside the block, nvImageCodec loads no GPU codecs, which would open a CUDA context."""
    spec = find_spec("nvidia.nvimgcodec")
    own = [str(Path(package, "extensions")) for package in (spec and spec.submodule_search_locations) or ()]
    with _loading, tempfile.TemporaryDirectory(prefix="gpuaug-") as folder:
        before = os.environ.get(_CODEC_FOLDERS, "")
        for place in filter(None, before.split(":") if before else own):
            for codec in Path(place).absolute().glob("*.so*"):
                host = Path(folder, codec.name)
                if not codec.name.startswith(("libnvjpeg", "libnvtiff")) and not host.is_symlink():
                    host.symlink_to(codec)
        os.environ[_CODEC_FOLDERS] = folder
        try:
            yield
        finally:
            os.environ[_CODEC_FOLDERS] = before
