"""Decodes batches to uint8 views on the device.

Each image is decoded once for all its views. If ``hardware_load`` is 0, a sample's pixels do not depend on the other
samples of its batch.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug import checks, machine
from gpuaug.batch import CropWindows, EncodedBatch, Fault, Int64
from gpuaug.decode import dali, header, pillow, resize, values
from gpuaug.decode.dali import Backend
from gpuaug.decode.header import Header, HeaderError, TruncatedError
from gpuaug.decode.request import (
    DecodeRequest,
    HeaderInfo,
    Pixels,
    Route,
    decode_fault,
    num_parts,
    oriented,
    oriented_batch,
    split_by_bytes,
)
from gpuaug.errors import ConfigError, GpuaugError, shown_size
from gpuaug.files import CODECS
from gpuaug.native import buffers

log = logging.getLogger("gpuaug")

Kind = Literal["rgb8", "raw"]
_RGB_CODECS = ("jpeg", "png", "webp", "bmp", "gif", "ppm", "avif", "heif", "raw")
MAX_THREADS = MAX_CHANNELS = 1024  # more is surely a typo; DALI starts all threads at once, and each has a stack
_MAX_REBUILDS = 3  # new pipelines per batch; if the device itself is broken, every new pipeline fails too

_END_OF_JPEG = np.array([0xFF, 0xD9], dtype=np.uint8)
# A small file can claim many pixels. So an image with more than max(2**25, `max_pixels` / 4) pixels must have at least
# one byte per 64 pixels. Even a JPEG of one colour has that. Then no file below 1 MiB takes more than 2 s of a core.
_SPARSE_PIXELS, _PIXELS_PER_BYTE = 2**25, 64
_MAX_SCANS = 12  # for an image of `max_pixels`; half the pixels allow twice the scans. A scan costs 0.6 ns per pixel
_ANCILLARY_BYTES = 65_536  # above this, PNG chunks that do not affect pixels are removed before decoding


@dataclass(frozen=True, kw_only=True)
class Decode:
    """Settings of the decoder.

    Args:
        num_threads: number of CPU threads. None: the CPUs of this process divided by the ranks on the machine, at most
            8. On CUDA, each thread uses a CPU core while it waits for the GPU; a loader's two decoders share them.
        backend: ``auto`` is DALI if it can be imported, else Pillow.
        hardware_load: share of JPEGs for the GPU's JPEG engine, 0..1. The engine's pixels differ slightly from those of
            the CUDA cores, and the batch decides which JPEGs the engine gets.
        max_pixels: if the header of an image claims more pixels, the image is a fault. A large image is also a fault if
            its file has less than one byte per 64 pixels.
        max_bytes: memory limit for decoding images and masks, in bytes, for all threads of the decoder together. The
            encoded bytes and the results, which have the size of the views, are not counted. If a batch needs more, it
            is decoded in chunks. If a single image needs more, it is a fault: an RGB image takes 7 bytes per pixel, a
            progressive JPEG up to 15, WebP 17. A mask may take half: 4 bytes per pixel, with a table or 16 bits
            24. Crops that read masks, such as RandomScaleCrop, take up to as much memory again.
        codecs: names from jpeg, png, webp, bmp, gif, ppm, avif, heif, tiff, jpeg2000, raw. Images of other codecs
            are faults. AVIF needs Pillow 11.3. HEIF (the files of many phones, .heic) needs
            ``pip install 'gpuaug[heif]'``. `gpuaug pack` writes `raw`. With ``pixels="raw"``: png, tiff, npy.
        pixels: ``rgb8``: all images become 8-bit RGB. ``raw``: the stored values, uint8, uint16 or float32, from PNG,
            TIFF and npy files. All files of a run must have one type and number of channels; others are faults.
        channels: number of channels of each file, for ``pixels="raw"``.
        white: the value that becomes 1.0, for ``pixels="raw"``, such as 4095 for 12 bits. None: 255 for uint8, 65535
            for uint16, 1 for float32.
        reduced: Pillow decodes large JPEGs at 1/2, 1/4 or 1/8 of their size, if resizing divides both sides of every
            crop by at least 2, 4 or 8. Pixels change by 1 level of 255 on average. It has no effect with DALI.

    >>> with_pillow = Decode(backend="pillow", num_threads=2, codecs=["jpeg", "png"])
    >>> decoder = with_pillow.open("cpu")
    >>> decoder.close()
    """

    num_threads: int | None = None
    backend: Backend = "auto"
    hardware_load: float = 0.0
    max_pixels: int = 178_000_000
    max_bytes: int = 2**30
    codecs: Sequence[str] = _RGB_CODECS
    reduced: bool = False
    pixels: Kind = "rgb8"
    channels: int | None = None
    white: float | None = None

    def __post_init__(self) -> None:
        checks.whole_number("num_threads", self.num_threads, 1, MAX_THREADS, optional=True)
        checks.one_of("backend", self.backend, get_args(Backend))
        checks.number("hardware_load", self.hardware_load, 0, 1)
        checks.whole_number("max_pixels", self.max_pixels, 1)
        checks.whole_number("max_bytes", self.max_bytes, 1)
        checks.flag("reduced", self.reduced)
        raw = checks.one_of("pixels", self.pixels, get_args(Kind)) == "raw"
        checks.whole_number("channels", self.channels, 1, MAX_CHANNELS, optional=True)
        checks.number("white", self.white, 1e-6, 1e9, optional=True)
        if raw != (self.channels is not None) or (self.white is not None and not raw):
            raise ConfigError(
                "`decode.pixels=raw` needs `decode.channels`, and may have `decode.white`. rgb8 has neither. Found: "
                f"pixels={self.pixels}, channels={self.channels}, white={self.white}."
            )
        if raw and (self.reduced or self.hardware_load):
            raise ConfigError("`decode.reduced` and `hardware_load` are for JPEG. Remove them, or set pixels=rgb8.")
        known = values.READ if raw else CODECS
        is_list = isinstance(self.codecs, Sequence) and not isinstance(self.codecs, str)
        codecs = values.READ if raw and is_list and tuple(self.codecs) == _RGB_CODECS else self.codecs
        if not is_list or any(name not in known for name in codecs):
            raise ConfigError(f"`codecs` must be a list of names from {', '.join(known)}. Found: {self.codecs!r}.")
        object.__setattr__(self, "codecs", tuple(codecs))

    def open(
        self,
        device: torch.device | str = "auto",
        *,
        accept_truncated: bool = False,
        batch_size: int = 1,
        dtype: str | None = None,
        decoders: int = 1,
    ) -> Decoder:
        """Open a decoder.

        Args:
            device: the device of the views. ``auto``: CUDA if there is a CUDA device, else the CPU. ``cuda``: the
                device of the environment variable LOCAL_RANK, if set, else torch's current device.
            accept_truncated: decode what exists of a truncated JPEG, instead of reporting a fault.
            batch_size: usual batch size. On CUDA, pipelines are built for at least this size.
            dtype: with ``pixels="raw"``, the type of all files; None: that of the first.
            decoders: number of decoders that work at the same time and share ``num_threads``.
        """
        decoder = Decoder(
            self,
            machine.choose_device(device),
            accept_truncated=accept_truncated,
            batch_size=batch_size,
            decoders=decoders,
        )
        if decoder.stored is not None:
            decoder.stored.dtype = dtype
        return decoder


class Decoder:
    """Decodes batches to views on one device. One thread may read headers while another thread decodes.

    Attributes:
        backend: ``dali`` or ``pillow``.
        num_threads: number of its threads.
        rescued: number of samples that DALI refused and Pillow decoded.
        stored: with ``pixels="raw"``, the channels and the type of all files; else None.
    """

    def __init__(
        self,
        settings: Decode,
        device: torch.device,
        *,
        accept_truncated: bool = False,
        batch_size: int = 1,
        decoders: int = 1,
    ) -> None:
        self.device = device
        if settings.hardware_load and device.type == "cuda":
            settings = _without_broken_engine(settings)
        self.settings = settings
        self.backend = dali.choose_backend(settings.backend)
        self.num_threads = -(-(settings.num_threads or _threads()) // decoders)
        self._reduced = settings.reduced and self.backend == "pillow"
        if settings.reduced and not self._reduced:
            log.warning("decode.reduced=true has no effect with DALI. To use it, set decode.backend=pillow")
        self.accept_truncated, self._batch_size = accept_truncated, batch_size
        self.rescued = 0
        self._closed = False
        self._pid: int | None = None  # of the process that decodes; None before the first batch
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(self.num_threads, thread_name_prefix="gpuaug-decode")
        self.stored = values.Stored(settings.channels, settings.white) if settings.channels else None
        self._dali = self._new_pipeline()
        self._failed = False  # whether the last run of this pipeline failed
        self._deep_logged = False
        if settings.hardware_load and device.type == "cuda" and self.backend == "dali":
            log.info("decode with hardware_load=%g: pixels depend on the batch", settings.hardware_load)

    def read_headers(self, batch: EncodedBatch) -> HeaderInfo:
        """Read sizes, orientations and faults from the headers. The result keeps the images' bytes, to decode them."""
        shape = np.zeros((len(batch), 2), dtype=np.int64)
        orientation = np.ones(len(batch), dtype=np.int64)
        route = np.full(len(batch), Route.BAD, dtype=np.int8)
        memory = np.zeros(len(batch), dtype=np.int64)
        codec, faults, images = [""] * len(batch), [], list(batch.images)
        unread, opened = {fault.row for fault in batch.faults}, dict[int, Header]()
        for row, encoded in enumerate(batch.images):  # 10 µs per sample
            if row in unread:
                continue
            try:
                info, route[row], images[row] = self._read_header(encoded)
            except HeaderError as e:
                faults.append(decode_fault(row, encoded, str(e)))
                continue
            opened[row], codec[row], orientation[row] = info, info.codec, info.orientation
            shape[row] = (info.height, info.width)[:: -1 if info.orientation > 4 else 1]
            # the result has 3 bytes per pixel; torch's resize needs a copy of an image that is turned
            each = info.pixel_bytes + (0 if self.stored else 3 if info.orientation == 1 else 6)
            memory[row] = info.height * info.width * each + len(encoded)
        if self.stored:  # inflating a PNG takes as long as decoding it
            self._check_process()
            accepts = dali.accepts if self.backend == "dali" else None
            for fault in values.prepare(opened, images, self.each, accepts):
                faults.append(fault)
                codec[fault.row], route[fault.row], shape[fault.row] = "", Route.BAD, 0
        height, width = shape.T.copy()
        image = self._equal(batch.images, images, route)
        return HeaderInfo(codec, height, width, orientation, faults, route, memory, image, images)

    def _equal(self, images: Sequence[Pixels], decoded: Sequence[Pixels], route: NDArray[np.int8]) -> Int64:
        """For each image, the row of the first image with the same bytes; its own row if it must be decoded alone.

        What libjpeg makes of the missing end of a file depends on the region that is decoded.
        """
        rows, first, count = np.arange(len(images)), dict[bytes, int](), Counter(map(len, images))
        if self.stored or self._reduced or isinstance(self._dali, dali.CudaPipeline):  # DALI on CUDA cannot share
            return rows
        for row, encoded in enumerate(images):
            whole = len(decoded[row]) == len(encoded)  # else an end was added, or a part of a PNG removed
            if count[len(encoded)] > 1 and whole and route[row] != Route.RAW:  # few other files have the same length
                rows[row] = first.setdefault(encoded.tobytes(), row)
        return rows

    def pixels(self, headers: HeaderInfo, windows: Sequence[CropWindows]) -> tuple[list[Tensor], list[Fault]]:
        """Decode each image once and make all its views. On CUDA, the work is queued on torch's current stream.

        Args:
            headers: :meth:`read_headers` of the batch.
            windows: one entry per view, with B rows.

        Returns:
            The views and the faults. A view is uint8 [B, H, W, 3] on the device. Rows that cannot be decoded are zero.
            With `pixels=raw`, a view is [B, H, W, channels], of the type of the files.

        Raises:
            GpuaugError: in a forked child of a process that has used this decoder, because threads do not survive it.
        """
        if not windows:
            return [], []
        request = DecodeRequest.of(headers, windows)
        self._check_process()
        # DALI uses the current device, not the stream's device
        with self._lock, torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            if self._closed:
                raise GpuaugError("This decoder is closed. Open a new decoder with `Decode.open`.")
            too_large = self._too_large(request)
            request = request.take(np.flatnonzero(~np.isin(request.rows, [fault.row for fault in too_large])))
            decode = self._on_device if isinstance(self._dali, dali.CudaPipeline) else self._on_host
            images, faults = decode(len(headers), request)
            return images, [*too_large, *faults]

    def _check_process(self) -> None:
        self._pid = self._pid or os.getpid()
        if self._pid != os.getpid():
            raise GpuaugError(
                f"This decoder was used in process {self._pid}, which then forked process {os.getpid()}. A fork does "
                "not copy the decoder's threads. Build the loader in each process, or fork before the first batch."
            )

    @property
    def white(self) -> float:
        """The value that means 1.0 in the views."""
        return self.stored.white if self.stored else 255.0

    def whole(self, headers: HeaderInfo) -> Tensor:
        """The whole upright image of a batch of one: uint8 [height, width, 3] on the device; [0, 0, 3] if it is bad."""
        size = np.stack([headers.height, headers.width], axis=1).astype(np.int32)
        corner, (h, w) = np.zeros_like(size), size[0].tolist()
        window = CropWindows(np.concatenate([corner, size], axis=1), size, corner, (h, w))
        (view,), faults = self.pixels(headers, [window])
        return view[0, :0, :0] if faults else view[0]

    def use_pillow(self) -> None:
        """From the next batch on, let Pillow decode everything, also images whose headers were read for DALI."""
        with self._lock:
            self.backend = "pillow"
            self._renew_pipeline()

    def close(self) -> None:
        """Free threads and DALI's memory. A forked child leaves them to its parent."""
        self._closed = True
        if self._pid not in (None, os.getpid()):
            return
        free = self._lock.acquire(timeout=5.0)  # wait for a thread that is still decoding, but not for ever
        try:
            self._pool.shutdown(wait=free)
            if self._dali is not None and free:
                self._dali = None
                dali.release_memory()
        finally:
            if free:
                self._lock.release()

    def _read_header(self, encoded: Pixels) -> tuple[Header, Route, Pixels]:
        """The image's header and route, and the bytes to decode: ``encoded``, or repaired bytes."""
        if self.stored:
            return self._read_values(encoded, self.stored)
        try:
            info = header.read(encoded.data)
        except TruncatedError:
            if not self.accept_truncated:
                raise
            encoded = np.concatenate([encoded, _END_OF_JPEG])
            info = header.read(encoded.data)
        if info.ancillary > _ANCILLARY_BYTES:
            encoded = np.frombuffer(header.png_pixels(encoded.data), dtype=np.uint8)
        return *self._check_header(encoded, info), encoded

    def _check_header(self, encoded: Pixels, info: Header) -> tuple[Header, Route]:
        """Check the limits. Return the header and the route. For some codecs, Pillow reads the size."""
        codec, max_pixels = info.codec, self.settings.max_pixels
        self._check_codec(codec)
        if codec in header.BY_PILLOW:
            info = pillow.complete(info, encoded.data)
        name, pixels = self._check_size(info)
        work = pixels * info.effort
        if work > _SPARSE_PIXELS and work > max(max_pixels // 4, _PIXELS_PER_BYTE * len(encoded)):
            raise HeaderError(
                f"{name} has only {len(encoded)} bytes: an image this large needs a byte for every "
                f"{_PIXELS_PER_BYTE // info.effort} pixels. To accept it, raise `decode.max_pixels` to {4 * work}"
            )
        if info.scans > 1 and info.scans * pixels > _MAX_SCANS * max_pixels:
            raise HeaderError(f"{name} with {info.scans} scans is too much work. Raise `decode.max_pixels`")
        if info.bits > 8 and not self._deep_logged:
            self._deep_logged = True
            log.info("decode scales images with more than 8 bits to 8 bits: the largest possible value becomes 255")
        if codec == "raw":
            return info, Route.RAW
        # DALI keeps up to half of its memory while Pillow decodes the other images
        large = self.device.type == "cpu" and 2 * pixels * dali.CpuPipeline.bytes_per_pixel > self.settings.max_bytes
        # Pillow decodes PNG, and stops when the image is complete. DALI would decompress all data in the file: a file
        # of 1 MB can then take 3 GiB of memory. Pillow takes 1.5 times the CPU time of DALI (500 x 375, crop to 224).
        if self.backend != "dali" or codec != "jpeg" or not info.dali_safe or large:
            return info, Route.PILLOW
        return info, Route.DALI if dali.accepts(encoded, info) else Route.REFUSED

    def _check_codec(self, codec: str) -> None:
        if codec not in self.settings.codecs:
            raise HeaderError(f"{codec} is not among `decode.codecs`: {', '.join(self.settings.codecs)}")

    def _check_size(self, info: Header) -> tuple[str, int]:
        """Check an image's size. Return its name in messages, and its number of pixels."""
        size, pixels, most = shown_size(info.height, info.width), info.height * info.width, self.settings.max_pixels
        if pixels == 0:
            raise HeaderError(f"{info.codec} without pixels: {size}")
        if pixels > most:
            raise HeaderError(f"{info.codec} of {size} is larger than `decode.max_pixels` ({most})")
        return f"{info.codec} of {size}", pixels

    def _read_values(self, encoded: Pixels, stored: values.Stored) -> tuple[Header, Route, Pixels]:
        """As :meth:`_read_header`, for `pixels=raw`."""
        info = values.read(encoded.data)
        self._check_codec(info.codec)
        name, pixels = self._check_size(info)
        by_dali, most = self.backend == "dali" and info.dali_safe, self.settings.max_bytes
        needed = (pixels * info.pixel_bytes + len(encoded)) * (2 if by_dali else 1)  # DALI has half of the memory
        if needed > most:
            needs = f"{name}, with {info.channels} channels, takes {needed} bytes"
            raise HeaderError(f"{needs}, more than `decode.max_bytes` ({most}). Raise it")
        stored.check(info)
        if not by_dali:
            values.check_extra(info)
        if stored.dtype is None:
            stored.dtype = info.dtype
            log.info("decode raw: %s values with %d channels, as in the first file", info.dtype, info.channels)
        return info, Route.DALI if by_dali else Route.VALUES, encoded

    def _too_large(self, request: DecodeRequest) -> list[Fault]:
        """Faults of images that would be too large after resizing, such as very thin images."""
        most = self.settings.max_pixels
        if self.stored:  # a resized view is float32, and then has the type of the files
            most = min(most, self.settings.max_bytes // (8 * self.stored.channels))
        headers, faults = request.headers, []
        for k in np.flatnonzero(request.largest_view > most).tolist():
            size = shown_size(headers.height[k], headers.width[k])
            limit = "max_bytes` allows" if most < self.settings.max_pixels else "max_pixels`"
            reason = f"resizing {size} gives more pixels than `decode.{limit} ({most})"
            faults.append(decode_fault(int(request.rows[k]), headers.encoded[k], reason))
        return faults

    def _on_host(self, count: int, request: DecodeRequest) -> tuple[list[Tensor], list[Fault]]:
        """Decode and resize on the CPU, then copy the views to the device.

        A view has ``count`` rows. Rows that are not in the request are zero.
        """
        channels, dtype = (self.stored.channels, self.stored.dtype) if self.stored else (3, "uint8")
        shapes, kind = [(count, *b.size, channels) for b in request.windows], getattr(torch, dtype or "uint8")
        if self.device.type == "cuda":
            images = [torch.empty(shape, dtype=kind, device="cpu", pin_memory=True) for shape in shapes]
        else:
            images = [buffers.outputs.take(shape, kind, channels_last=False) for shape in shapes]
        canvases = [x.numpy() for x in images]
        failed: list[int] = []
        for part, regions in self._by_dali(request, failed):
            self._paint(*request.sharing(part, regions), canvases)
            del regions  # free memory before the next chunk is decoded
            self._return_freed_memory(part.headers.memory.max())
        rest = self._left(request, failed)
        raw = rest.take(np.flatnonzero(rest.headers.route == Route.RAW))
        self._paint(raw, [raw.raw_region(k) for k in range(len(raw))], canvases)
        faults = self._by_pillow(rest.take(np.flatnonzero(rest.headers.route != Route.RAW)), canvases)
        if dtype == "float32":
            faults += values.not_finite(request, canvases, {fault.row for fault in faults})
        bad = np.setdiff1d(np.arange(count), request.rows).tolist() + [fault.row for fault in faults]
        for canvas in canvases:
            canvas[bad] = 0
        return [buffers.to_device(x, self.device) for x in images], faults

    def _on_device(self, count: int, request: DecodeRequest) -> tuple[list[Tensor], list[Fault]]:
        """As :meth:`_on_host`, with DALI's CUDA pipeline. The CPU makes the rows that DALI does not decode."""
        images: list[Tensor] = []
        failed: list[int] = []

        def put(rows: Int64, views: Sequence[Tensor]) -> None:
            if not images:
                images.extend(view.new_zeros((count, *view.shape[1:])) for view in views)
            at = buffers.to_device(torch.from_numpy(rows), self.device)
            for image, view in zip(images, views, strict=True):
                image.index_copy_(0, at, view)

        for part, views in self._by_dali(request, failed):
            orientation = part.headers.orientation
            if len(part) == count and (orientation == 1).all():
                return views, []  # the pipeline decoded the whole batch: no copy needed
            for value in np.unique(orientation):
                k = np.flatnonzero(orientation == value)
                at = buffers.to_device(torch.from_numpy(k), self.device)
                put(part.rows[k], [oriented_batch(view[at], int(value)) for view in views])
        rest = self._left(request, failed)
        if not len(rest) and images:
            return images, []
        views, faults = self._on_host(len(rest), replace(rest, rows=np.arange(len(rest))))
        put(rest.rows, views)
        return images, [replace(fault, row=int(rest.rows[fault.row])) for fault in faults]

    def _paint(
        self, request: DecodeRequest, regions: Sequence[Pixels], canvases: list[Pixels], *, alone: bool = False
    ) -> None:
        """Make all views. ``regions``: pixels of the ``union`` boxes. ``alone``: use only the calling thread."""
        threads, each = (1, resize.one_by_one) if alone else (self.num_threads, self.each)
        for view, (windows, canvas) in enumerate(zip(request.windows, canvases, strict=True)):
            if self.stored:
                windows = replace(windows, fill=self.stored.fill(windows.fill))
            resize.views(request.view_parts(view, regions), windows, canvas, request.rows, threads=threads, each=each)

    def _new_pipeline(self) -> dali.CpuPipeline | dali.CudaPipeline | None:
        if self.backend != "dali":
            return None
        if self.stored or self.device.type == "cpu":
            return dali.CpuPipeline(self.num_threads, self.stored)
        return dali.CudaPipeline(
            self.device,
            num_threads=self.num_threads,
            hardware_load=self.settings.hardware_load,
            batch_size=self._batch_size,
        )

    def _renew_pipeline(self) -> None:
        """Free DALI's memory."""
        self._dali = None
        with suppress(RuntimeError):  # a failed pipeline may fail here again
            dali.release_memory()
        self._dali, self._failed = self._new_pipeline(), False

    def _by_dali(self, request: DecodeRequest, failed: list[int]) -> Iterator[tuple[DecodeRequest, Any]]:
        """Let DALI decode its rows in chunks. Add rows that DALI cannot decode to ``failed``."""
        pending, rebuilds = self._chunks(request)[::-1], 0
        while pending:
            part = pending.pop()
            assert self._dali is not None
            try:
                result = self._dali.run(part)
                self._failed = False
            except RuntimeError as e:
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)  # raises if the device itself failed
                message = pillow.last_line(str(e))
                of_decoding, k = dali.failed_sample(str(e))
                named = k is not None and k < len(part)
                # DALI says that a pipeline is no longer valid after an error; so far this was true of none on a CPU
                invalid, self._failed = self._failed and not named and not rebuilds, True
                if invalid or not of_decoding:
                    if rebuilds == _MAX_REBUILDS:
                        raise GpuaugError(f"DALI failed while decoding on {self.device}: {message}") from e
                    rebuilds += 1
                    log.warning("decode: DALI's pipeline failed and is rebuilt. Cause: %s", message)
                    self._renew_pipeline()
                    pending.append(part)
                    continue
                rest = np.arange(len(part))
                if len(part) == 1:
                    k = 0
                if k is None or k >= len(part):  # no image is named, e.g. if memory ran out
                    log.info("decode splits %d images into halves and tries again. Cause: %s", len(part), message)
                else:
                    failed.append(int(part.rows[k]))
                    rest = np.delete(rest, k)
                # A run names only one bad sample. With halves, each of n samples is decoded at most about log2(n)
                # times, not n times.
                pending += [part.take(half) for half in np.array_split(rest, 2) if len(half)]
                continue
            yield part, result
            del result

    def _chunks(self, request: DecodeRequest) -> list[DecodeRequest]:
        if self._dali is None:
            return []
        rows, pixels = np.flatnonzero(self._for_dali(request)), request.headers.height * request.headers.width
        rows = rows[_firsts(request.headers.image[rows])]
        sizes = request.headers.memory if self.stored else pixels * self._dali.bytes_per_pixel
        if isinstance(self._dali, dali.CudaPipeline):  # a run has one output size; swapped rows need another size
            swapped = request.headers.swapped[rows]
            groups = [rows[~swapped], rows[swapped]]
        else:
            decoded = (sizes if self.stored else 3 * pixels)[rows].sum()
            groups = np.array_split(rows, num_parts(len(rows), float(decoded), self.num_threads))
        most = self.settings.max_bytes
        most = most // 2 if isinstance(self._dali, dali.CpuPipeline) else most
        return [request.take(k) for group in groups for k in split_by_bytes(group, sizes, most)]

    def _for_dali(self, request: DecodeRequest) -> NDArray[np.bool_]:
        """The rows that DALI decodes, bool [n].

        If a box is one pixel wide, libjpeg-turbo does not interpolate the colors of its neighbors.
        """
        wide = (request.union[:, 3] > 1) | (self.stored is not None)
        return (request.headers.route == Route.DALI) & wide & (self._dali is not None)

    def _left(self, request: DecodeRequest, failed: list[int]) -> DecodeRequest:
        """The rows that DALI has not decoded. Rows with the image of a row in ``failed`` get `Route.REFUSED`."""
        image = request.headers.image
        refused = np.isin(image, image[np.isin(request.rows, failed)])
        route = np.where(refused, Route.REFUSED, request.headers.route).astype(np.int8)
        request = replace(request, headers=replace(request.headers, route=route))
        return request.take(np.flatnonzero(~self._for_dali(request)))

    def _by_pillow(self, request: DecodeRequest, canvases: list[Pixels]) -> list[Fault]:
        faults: list[Fault | None] = [None] * len(request)
        headers, stored = request.headers, request.headers.stored

        def one(k: int) -> None:
            data, codec, same = headers.encoded[k].data, headers.codec[k], left[headers.image[left] == headers.image[k]]
            row = request.take(same)
            try:
                if self.stored:
                    self._paint(row, [values.of_row(row, self.stored)], canvases, alone=True)
                    return
                views = pillow.reduced(data, row) if self._reduced and codec == "jpeg" else None
                if views is None:
                    image = pillow.decode(data, codec, stored[k], request.union[k], self.settings.max_pixels)
                    self._paint(row, [image] * len(row), canvases, alone=True)
                    return
            except HeaderError as e:
                for n in same.tolist():
                    faults[n] = decode_fault(int(request.rows[n]), headers.encoded[n], str(e))
                return
            for view, windows, canvas in zip(views, row.windows, canvases, strict=True):
                resize.views([oriented(view, int(headers.orientation[k]))], windows, canvas, row.rows, threads=1)

        # resizing takes memory for the largest view
        each = 8 * self.stored.channels if self.stored else 3
        sizes, most = headers.memory + each * request.largest_view, self.settings.max_bytes
        for k in np.flatnonzero(sizes > most).tolist():
            needed = f"decoding {shown_size(*stored[k])} pixels takes {sizes[k]} bytes"
            reason = f"{needed}, more than `decode.max_bytes` ({most}). Raise it"
            faults[k] = decode_fault(int(request.rows[k]), headers.encoded[k], reason)
        left = np.flatnonzero(sizes <= most)
        left = left[np.argsort(-sizes[left], kind="stable")]  # an image has the size of its largest row
        images = np.sort(left[_firsts(headers.image[left])])
        beside_dali = most // 2 if isinstance(self._dali, dali.CpuPipeline) else most  # DALI keeps up to the other half
        for group in split_by_bytes(images, sizes, beside_dali):
            if sizes[group].sum() > beside_dali:
                self._renew_pipeline()
                self._return_freed_memory(most)
            self.each(group[np.argsort(-sizes[group])].tolist(), one)  # sorted, so that threads get equal shares
            self._return_freed_memory(sizes[group].max())
        self.rescued += sum(fault is None for fault, r in zip(faults, headers.route, strict=True) if r == Route.REFUSED)
        return [fault for fault in faults if fault is not None]

    def _return_freed_memory(self, largest: int) -> None:
        """Limit what the threads' heaps keep. Each would keep the memory of its largest image, of ``largest`` bytes."""
        keep = self.settings.max_bytes // (4 * self.num_threads)  # all heaps together keep a quarter of the limit
        if largest > keep:
            buffers.return_freed_memory(self._pool, self.num_threads, keep)

    def each(self, rows: Sequence[int], work: Callable[[int], None]) -> None:
        """Call ``work(k)`` for every k of ``rows``, with one task per thread, because a task costs 30 µs."""

        def share(first: int) -> None:
            resize.one_by_one(rows[first :: self.num_threads], work)

        count, shares = min(self.num_threads, len(rows)), list[Future[None]]()
        try:
            for first in range(count) if count > 1 else ():
                shares.append(self._pool.submit(share, first))
        except RuntimeError as error:
            wait(shares)
            if "interpreter shutdown" not in str(error):
                raise
            shares.clear()  # the main thread has ended, and the pool's threads with it; this thread goes on
        if not shares:
            resize.one_by_one(rows, work)
        wait(shares)
        for done in shares:
            done.result()


def _firsts(images: Int64) -> Int64:
    """The position of the first row of each image."""
    return np.unique(images, return_index=True)[1]


def _without_broken_engine(settings: Decode) -> Decode:
    """Switch the JPEG engine off if `gpuaug doctor` found it broken on this machine."""
    if machine.verdict("hardware") is not False:
        return settings
    log.warning("decode with hardware_load=0: the JPEG engine failed the test of `gpuaug doctor` on this machine")
    return replace(settings, hardware_load=0.0)


def _threads() -> int:
    cpus, ranks = machine.usable_cpus(), machine.local_world_size()
    count = max(1, min(8, cpus // ranks))
    log.info("decode with num_threads=%d (CPUs: %d, ranks on this machine: %d)", count, cpus, ranks)
    return count
