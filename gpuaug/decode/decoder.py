"""Encoded images to uint8 views on the device; the only file that imports DALI, and Pillow for decoding.

takes: :class:`EncodedBatch`, then one :class:`Boxes` per view.
does: looks first (true shapes, faults), then decodes each image once, however many views, crops and resizes.
gives: uint8 [B, H, W, 3] per view, on the device; rows that cannot be decoded are zero and have a :class:`Fault`.

On the CPU, DALI decodes the smallest box that holds all views of an image and `resize` makes each view: DALI's own CPU
resize is several times slower. On CUDA, DALI decodes (`mixed`), slices and resizes in one pipeline, and every view is
copied into torch's memory. Where DALI is not installed, Pillow decodes. Orientation is read by `header` and applied
here for every codec alike.

What a sample looks like never depends on the others of its batch. Nothing here is random.
"""

from __future__ import annotations

import io
import logging
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug import machine
from gpuaug.batch import Boxes, EncodedBatch, Fault, Int32, Int64
from gpuaug.decode import header, resize
from gpuaug.decode.header import CODECS, RAW_HEADER, Header, HeaderError, TruncatedError
from gpuaug.errors import ConfigError, GpuaugError
from gpuaug.native import buffers as recycled
from gpuaug.verdicts import verdict

log = logging.getLogger("gpuaug")

Backend = Literal["auto", "dali", "pillow"]
Pixels = NDArray[np.uint8]

# Pillow decodes PNGs. It inflates what the image needs and stops; DALI inflates all there is, 1 GiB out of 1 MB, and
# takes three times that in memory. Pillow costs 1.5 times the processor time (500 x 375, crop to 224).
_BY_DALI = frozenset({"jpeg", "webp", "bmp"})
_END_OF_JPEG = b"\xff\xd9"
# Each thread decodes so many samples, and as many bytes, before their views are made. DALI allocates the pixels of all
# of them anew in one piece, of another size each time, and malloc keeps several of those: with whole batches of 30 MiB
# 250 MiB after 50 batches and 450 after 300, now 60 to 90, in the same processor time (64 files of 700 x 525).
SAMPLES_AT_ONCE, BYTES_AT_ONCE = 8, 8 << 20
# Peak bytes per pixel while an image is decoded: DALI on the CPU up to 11.5 (PNG of 16 bits), on CUDA the pixels alone
# are counted; Pillow 13, and 21 for WebP, whose canvases it holds several times.
_DALI_CPU, _DALI_CUDA, _PILLOW_MOST, _PILLOW_WEBP = 12, 3, 13, 21
# Few bytes can claim many pixels. More than max(2**25, `max_pixels` / 4) need a byte for every 64, which a JPEG of one
# colour has, so that no file below 1 MiB takes more than 2 s of a core. A pixel counts as its `effort`.
_SPARSE, _PIXELS_PER_BYTE = 2**25, 64
_SCANS = 12  # of the largest image; 0.6 ns a pixel and scan
_ANCILLARY = 65_536  # bytes of a PNG that decide no pixel, from which on they are left out
# DALI allocates at once, per thread and pipeline, what nvJPEG decodes in; these are its defaults. Twice that is pinned.
DEVICE_PADDING, PINNED_PADDING = 16 << 20, 8 << 20
_REBUILDS = 3  # of a pipeline per batch; an error of the device itself stays and comes up again
_SAMPLE = re.compile(r"Failed to decode sample #(\d+)")
# Who decodes a row; refused: DALI does not, so Pillow has the second chance; raw: nobody has to.
MOST_THREADS = 1024  # a typing error beyond: each has a stack, and DALI makes them all at once
_BAD, _DALI, _PILLOW, _REFUSED, _RAW = range(5)


@dataclass(frozen=True, kw_only=True)
class Decode:
    """Settings of the decoder.

    Args:
        num_threads: of the host; None: the CPUs of this process, at most 8, shared between the ranks of a machine.
            On CUDA nvImageCodec waits actively: each takes a core while it waits for a GPU that trains.
        backend: ``auto`` is DALI where it can be imported, else Pillow.
        hardware_load: share of JPEGs for the GPU's JPEG engine, 0..1. Its pixels differ slightly from those of the
            CUDA cores and the split depends on the batch, so anything above 0 gives up bit equality.
        max_pixels: an image whose header claims more pixels is a fault, before anything is allocated; so is one of more
            than a quarter of it that has less than a byte for 64 pixels.
        max_bytes: bytes of memory for decoding; a batch that takes more is decoded in chunks, an image that does alone.
        codecs: which of jpeg, png, webp, bmp, gif, ppm, tiff, jpeg2000, raw are decoded; others are faults. `raw` is
            what `gpuaug pack` writes: pixels, with their size in front.
    """

    num_threads: int | None = None
    backend: Backend = "auto"
    hardware_load: float = 0.0
    max_pixels: int = 178_000_000
    max_bytes: int = 2**30
    codecs: Sequence[str] = ("jpeg", "png", "webp", "bmp", "gif", "ppm", "raw")

    def __post_init__(self) -> None:
        if self.num_threads is not None and not (_is_count(self.num_threads) and self.num_threads <= MOST_THREADS):
            raise ConfigError(
                f"`num_threads` must be an int from 1 to {MOST_THREADS}, or None. Found: {self.num_threads!r}."
            )
        if not isinstance(self.backend, str) or self.backend not in get_args(Backend):
            raise ConfigError(f"`backend` must be 'auto', 'dali' or 'pillow'. Found: {self.backend!r}.")
        if isinstance(self.hardware_load, bool) or not isinstance(self.hardware_load, (int, float)):
            raise ConfigError(f"`hardware_load` must be a number from 0 to 1. Found: {self.hardware_load!r}.")
        if not 0 <= self.hardware_load <= 1:
            raise ConfigError(f"`hardware_load` must be a number from 0 to 1. Found: {self.hardware_load!r}.")
        for name in ("max_pixels", "max_bytes"):
            if not _is_count(getattr(self, name)):
                raise ConfigError(f"`{name}` must be an int >= 1. Found: {getattr(self, name)!r}.")
        named = isinstance(self.codecs, Sequence) and not isinstance(self.codecs, str)
        if not named or any(not isinstance(name, str) or name not in CODECS for name in self.codecs):
            raise ConfigError(f"`codecs` must be a list out of {', '.join(CODECS)}. Found: {self.codecs!r}.")

    def open(
        self, device: torch.device | str = "auto", *, accept_truncated: bool = False, batch_size: int = 1
    ) -> Decoder:
        """A decoder for ``cpu`` or ``cuda``; ``auto`` takes CUDA where there is a device, and says so.

        Args:
            device: where views arrive; ``cuda`` is LOCAL_RANK's device where that is set, else torch's current one.
            accept_truncated: whether a JPEG without its end is shown as far as it goes, instead of being a fault.
            batch_size: samples of a usual batch, so that on CUDA a smaller first one builds nothing that is too small.
        """
        if device == "auto":
            found = torch.cuda.is_available()
            log.info("decode on %s", "cuda" if found else "cpu: no CUDA device")
            device = "cuda" if found else "cpu"
        return Decoder(self, torch.device(device), accept_truncated=accept_truncated, batch_size=batch_size)


@dataclass(frozen=True, kw_only=True)
class Look:
    """What the headers of a batch say; rows are samples.

    Attributes:
        height, width: int64 [B], after orientation; 0 where the sample cannot be decoded.
        orientation: int64 [B], EXIF's 1..8.
        faults: the rows that cannot be decoded, without those that could not be read.
        route: int8 [B], who decodes the row.
        replaced: rows to the bytes that are decoded instead: of a JPEG with the end marker that it lacks, of a PNG
            without long texts and profiles.
    """

    height: Int64
    width: Int64
    orientation: Int64
    faults: list[Fault]
    route: NDArray[np.int8]
    replaced: dict[int, Pixels] = field(default_factory=dict)


class Decoder:
    """Encoded batches to uint8 views on one device; made by :meth:`Decode.open`.

    One thread may look while another one decodes.

    Attributes:
        device: where views arrive.
        backend: ``dali`` or ``pillow``, as found.
        num_threads: of the host.
        rescued: samples that DALI refused and Pillow decoded.
        truncated: samples without their end that were shown as far as they go.
    """

    def __init__(
        self, settings: Decode, device: torch.device, *, accept_truncated: bool = False, batch_size: int = 1
    ) -> None:
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"`device` must be cpu or cuda for decoding. Found: {str(device)!r}. Use cpu.")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"`device` is {str(device)!r} and torch finds no CUDA device. Use device=cpu or auto.")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", machine.cuda_device())
        self.device = device
        if settings.hardware_load and device.type == "cuda":
            settings = _without_engine(settings)
        self.settings = settings
        self.backend = _backend(settings.backend)
        self.num_threads = settings.num_threads or _threads()
        self.accept_truncated, self.batch_size = accept_truncated, batch_size
        self.rescued = self.truncated = 0
        self._closed = self._deep = False
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(self.num_threads, thread_name_prefix="gpuaug-decode")
        self._dali = self._pipelines()
        if settings.hardware_load and device.type == "cuda" and self.backend == "dali":
            log.info("decode with hardware_load=%g: pixels depend on the batch", settings.hardware_load)

    def look(self, batch: EncodedBatch) -> Look:
        """True shapes and certain faults, from the headers alone; nothing is decoded or allocated."""
        size = len(batch)
        shape = np.zeros((2, size), dtype=np.int64)
        orientation = np.ones(size, dtype=np.int64)
        route = np.zeros(size, dtype=np.int8)
        faults = []
        replaced: dict[int, Pixels] = {}
        unread = {fault.row for fault in batch.faults}
        for row, encoded in enumerate(batch.images):  # 10 µs a sample; a JPEG's header has to be walked
            if row in unread:
                continue
            try:
                raw = header.read_raw(encoded.data)
                data = b"" if raw else encoded.tobytes()  # a header is not worth a copy of the pixels
                whole = data
                try:
                    found = raw or header.read(data)
                except TruncatedError:
                    if not self.accept_truncated:
                        raise
                    whole = data + _END_OF_JPEG
                    found = header.read(whole)
                if found.ancillary > _ANCILLARY:
                    whole = header.png_pixels(data)
                found, route[row] = self._checked(whole, found)
                if whole is not data:
                    replaced[row] = np.frombuffer(whole, dtype=np.uint8)
                    self.truncated += found.codec == "jpeg"
            except HeaderError as e:
                faults.append(_fault(row, encoded, str(e)))
                continue
            orientation[row] = found.orientation
            shape[:, row] = (found.height, found.width)[:: -1 if found.orientation > 4 else 1]
        return Look(
            height=shape[0], width=shape[1], orientation=orientation, faults=faults, route=route, replaced=replaced
        )

    def pixels(self, batch: EncodedBatch, look: Look, boxes: Sequence[Boxes]) -> tuple[list[Tensor], list[Fault]]:
        """Every view of every image, each image decoded once.

        On CUDA the work is queued on torch's current stream of the device.

        Args:
            batch: encoded images.
            look: what :meth:`look` found for this batch.
            boxes: one per view, B rows each; rows of bad samples are not used.

        Returns:
            uint8 [B, H, W, 3] per view on the device, zero where a row is bad; and the faults found only now.
        """
        # DALI takes a stream without the device that it belongs to: the current one's.
        with self._lock, torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            return self._pixels(batch, look, boxes)

    def full(self, batch: EncodedBatch, look: Look) -> list[Tensor]:
        """Whole oriented images, uint8 [height, width, 3] on the device; [0, 0, 3] where a row is bad.

        Raises:
            ConfigError: if they take more than `max_bytes` together.
        """
        size = int((look.height * look.width).sum()) * 3
        if size > self.settings.max_bytes and len(batch) > 1:
            raise ConfigError(
                f"`decode.max_bytes` must hold the {len(batch)} whole images, {size} bytes. Found: "
                f"{self.settings.max_bytes}. Raise it, or take fewer samples."
            )
        out = []
        for row in range(len(batch)):
            h, w = int(look.height[row]), int(look.width[row])
            box = np.array([[0, 0, h, w]], dtype=np.int32)
            whole = Boxes(box, box[:, 2:], np.zeros_like(box[:, :2]), (h, w))
            views, faults = self.pixels(*_single(batch, look, row), [whole])
            out.append(views[0][0] if not faults else views[0][0, :0, :0])
        return out

    def close(self) -> None:
        """Give back threads and DALI's memory; the decoder cannot be used afterwards."""
        self._closed = True
        free = self._lock.acquire(timeout=5.0)  # not under a thread that still decodes, unless it hangs
        try:
            self._pool.shutdown(wait=free)
            if self._dali is not None and free:
                self._dali.close()
                self._dali = None
        finally:
            if free:
                self._lock.release()

    def _pipelines(self) -> _Slices | _Mixed | None:
        if self.backend != "dali":
            return None
        return _Slices(self.num_threads) if self.device.type == "cpu" else _Mixed(self)

    # -- looking --

    def _checked(self, data: bytes, found: Header) -> tuple[Header, int]:
        """The header with the size that its decoder finds, and who decodes it; HeaderError beyond the limits."""
        codec, most = found.codec, self.settings.max_pixels
        if codec not in self.settings.codecs:
            raise HeaderError(f"{codec} is not among `decode.codecs`: {', '.join(self.settings.codecs)}")
        if codec in ("tiff", "jpeg2000"):
            image = _opened(data, codec)
            found = replace(found, height=image.height, width=image.width, bits=_bits(image))
        pixels = found.height * found.width
        if pixels == 0:
            raise HeaderError(f"{codec} without pixels: {found.height}x{found.width}")
        if pixels > most:
            raise HeaderError(f"{codec} of {found.height}x{found.width} is larger than `decode.max_pixels` ({most})")
        work = pixels * found.effort
        if work > _SPARSE and work > max(most // 4, _PIXELS_PER_BYTE * len(data)) and codec != "raw":
            raise HeaderError(
                f"{codec} of {found.height}x{found.width} in {len(data)} bytes: so many pixels need a byte for every "
                f"{_PIXELS_PER_BYTE // found.effort}, or `decode.max_pixels` of {4 * work}"
            )
        if found.scans > 1 and found.scans * pixels > _SCANS * most:
            raise HeaderError(f"{codec} of {found.height}x{found.width} in {found.scans} scans is too much work")
        if found.bits > 8 and not self._deep:
            self._deep = True
            log.info("decode scales images of more than 8 bits to 8, the largest value that can be stored to 255")
        if codec == "raw":
            return found, _RAW
        if self._dali is None or codec not in _BY_DALI or not found.plain:
            return found, _PILLOW
        return found, _DALI if self._dali.accepts(data, found) else _REFUSED

    # -- decoding --

    def _pixels(self, batch: EncodedBatch, look: Look, boxes: Sequence[Boxes]) -> tuple[list[Tensor], list[Fault]]:
        if self._closed:
            raise GpuaugError("This decoder was closed. Open another one with `Decode.open`.")
        if not boxes:
            return [], []
        plan = _Plan.of(batch, look, boxes)
        faults: list[Fault] = []
        # The whole of a long thin image, its shorter side resized, can be far larger than the image or the canvas.
        large = np.max([b.resized.astype(np.int64).prod(axis=1) for b in plan.boxes], axis=0) > self.settings.max_pixels
        for k in np.flatnonzero(large):
            h, w = look.height[plan.rows[k]], look.width[plan.rows[k]]
            text = f"resizing {h}x{w} takes more than `decode.max_pixels` ({self.settings.max_pixels})"
            faults.append(_fault(int(plan.rows[k]), plan.encoded[k], text))
        plan = plan.take(np.flatnonzero(~large))
        by_dali = plan.route == _DALI
        refused = list(np.flatnonzero(~by_dali))
        shares = self._shares(np.flatnonzero(by_dali), plan.stored)
        each = _DALI_CPU if self.device.type == "cpu" else _DALI_CUDA
        sizes = plan.stored.prod(axis=1) * each
        chunks = [plan.take(k) for share in shares for k in _chunks(share, sizes, self.settings.max_bytes)]
        if isinstance(self._dali, _Mixed):
            return self._on_device(len(batch), plan, chunks, refused, faults)
        images = _canvases(len(batch), boxes, self.device)
        targets = [x.numpy() for x in images]
        for part, regions in self._decoded(chunks, plan, refused):
            self._paint(part, regions, targets)
            del regions  # before the next chunk is decoded
        faults += self._on_host(plan.take(np.array(refused, dtype=np.int64)), targets)
        painted = np.zeros(len(batch), dtype=bool)
        painted[plan.rows] = True
        painted[[fault.row for fault in faults]] = False
        for target in targets:
            target[~painted] = 0
        return [recycled.to_device(x, self.device) for x in images], faults

    def _shares(self, rows: Int64, stored: Int64) -> list[Int64]:
        """Rows in equal parts that the CPU decodes one after the other: only one part's pixels are in memory."""
        if self.device.type != "cpu" or not len(rows):
            return [rows]
        return np.array_split(rows, parts(len(rows), int(stored[rows].prod(axis=1).sum()) * 3, self.num_threads))

    def _decoded(self, chunks: list[_Plan], plan: _Plan, refused: list[Any]) -> Iterator[tuple[_Plan, Any]]:
        """Every chunk decoded; a sample that fails goes to `refused`, and the others are decoded again without it."""
        place = {int(row): k for k, row in enumerate(plan.rows)}
        pending, rebuilt = chunks[::-1], 0
        while pending:
            part = pending.pop()
            try:
                assert self._dali is not None
                result = self._dali.run(part)
            except RuntimeError as e:
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)  # raises an error of the device itself: no sample is to blame
                text = str(e)
                match = _SAMPLE.search(text)
                if "decoders.image" not in text and match is None:
                    if rebuilt == _REBUILDS:
                        raise GpuaugError(f"DALI failed while decoding on {self.device}: {_brief(text)}") from e
                    rebuilt += 1
                    log.warning("decode: DALI's pipeline failed and is built again: %s", _brief(text))
                    self._rebuild()
                    pending.append(part)
                    continue
                failed = int(match[1]) if match and int(match[1]) < len(part) else None
                if failed is None and len(part) == 1:
                    failed = 0
                rest = np.arange(len(part))
                if failed is None:  # no sample is named: out of memory, say
                    log.info("decode of %d images again in halves: %s", len(part), _brief(text))
                if failed is not None:
                    refused.append(place[int(part.rows[failed])])
                    rest = np.delete(rest, failed)
                # DALI names one sample only. Halves, so that a batch of bad samples costs log2(B) decodes, not B.
                pending += [part.take(half) for half in np.array_split(rest, 2) if len(half)]
                continue
            yield part, result
            del result

    def _rebuild(self) -> None:
        if self._dali is not None:
            with suppress(RuntimeError):  # it failed; whatever it says about its end is no news
                self._dali.close()
        self._dali = self._pipelines()

    def _on_host(self, plan: _Plan, targets: list[Pixels]) -> list[Fault]:
        """Rows that DALI does not decode: by Pillow, or raw ones out of the memory where they are."""
        raw = np.flatnonzero(plan.route == _RAW)
        pixels = plan.take(raw)
        images = [
            e[RAW_HEADER:].reshape(h, w, 3) for e, (h, w) in zip(pixels.encoded, pixels.stored.tolist(), strict=True)
        ]
        self._paint(pixels, _cut(images, pixels.read), targets)
        others = plan.take(np.flatnonzero(plan.route != _RAW))
        faults: list[Fault | None] = [None] * len(others)

        def one(k: int) -> None:
            row, encoded = others.take(np.array([k])), others.encoded[k]
            try:
                image = _pillow(encoded.tobytes(), row.stored[0], row.read[0], self.settings.max_pixels)
            except HeaderError as e:
                faults[k] = _fault(int(row.rows[0]), encoded, str(e))
                return
            self._paint(row, [image], targets, alone=True)

        webp = np.array([header.sniff(e[:12].tobytes()) == "webp" for e in others.encoded], dtype=bool)
        sizes = others.stored.prod(axis=1) * np.where(webp, _PILLOW_WEBP, _PILLOW_MOST)
        for group in _chunks(np.arange(len(others)), sizes, self.settings.max_bytes):
            self._each(group.tolist(), one)
        refused = others.route != _PILLOW
        self.rescued += sum(fault is None and refused[k] for k, fault in enumerate(faults))
        return [fault for fault in faults if fault is not None]

    def _paint(self, plan: _Plan, regions: Sequence[Pixels], targets: list[Pixels], *, alone: bool = False) -> None:
        """Every view of the plan's rows into ``targets[view][row]``, out of ``regions``, their pixels in ``read``.

        ``alone``: on this thread, one of several that do the same.
        """
        threads, each = (1, None) if alone else (self.num_threads, self._each)
        for view, (boxes, target) in enumerate(zip(plan.boxes, targets, strict=True)):
            resize.views(plan.parts_of(view, regions), boxes, target, plan.rows, threads=threads, each=each)

    def _on_device(
        self,
        count: int,
        plan: _Plan,
        chunks: list[_Plan],
        refused: list[Any],
        faults: list[Fault],
    ) -> tuple[list[Tensor], list[Fault]]:
        """The same on CUDA; where nothing is out of the ordinary the views are as the pipeline gives them."""
        # A pipeline gives one canvas size, and rows stored lying down need theirs transposed.
        chunks = [c.take(k) for c in chunks for k in (np.flatnonzero(~c.swapped), np.flatnonzero(c.swapped)) if len(k)]
        images: list[Tensor] | None = None
        for part, views in self._decoded(chunks, plan, refused):
            if len(part) == count and (part.orientation == 1).all():
                return views, faults
            if images is None:
                images = [torch.zeros((count, *b.size, 3), dtype=torch.uint8, device=self.device) for b in plan.boxes]
            for value in np.unique(part.orientation):
                k = np.flatnonzero(part.orientation == value)
                rows, at = (recycled.to_device(torch.from_numpy(x), self.device) for x in (part.rows[k], k))
                for image, view in zip(images, views, strict=True):
                    image.index_copy_(0, rows, _oriented_batch(view[at], int(value)))
        if images is None:
            images = [torch.zeros((count, *b.size, 3), dtype=torch.uint8, device=self.device) for b in plan.boxes]
        if refused:
            rest = plan.take(np.array(refused, dtype=np.int64))
            host = [x.zero_() for x in _canvases(len(rest), plan.boxes, self.device)]
            found = self._on_host(replace(rest, rows=np.arange(len(rest))), [x.numpy() for x in host])
            faults += [replace(fault, row=int(rest.rows[fault.row])) for fault in found]
            rows = recycled.to_device(torch.from_numpy(rest.rows), self.device)
            for image, view in zip(images, host, strict=True):
                image.index_copy_(0, rows, recycled.to_device(view, self.device))
        return images, faults

    def _each(self, rows: Sequence[int], work: Callable[[int], None]) -> None:
        """Call ``work(k)`` for every k of `rows`; one task per thread, as one per row would cost 30 µs each."""

        def share(first: int) -> None:
            for k in rows[first :: self.num_threads]:
                work(k)

        if len(rows) < 2 or self.num_threads == 1:
            for k in rows:
                work(k)
        else:
            list(self._pool.map(share, range(min(self.num_threads, len(rows)))))


@dataclass(frozen=True)
class _Plan:
    """Rows of a batch that are to be decoded, and what of them.

    Attributes:
        rows: int64 [n], places in the batch.
        route: int8 [n], who decodes it.
        encoded: n uint8 arrays, views into the packed buffer or into mapped files.
        orientation: int64 [n].
        stored: int64 [n, 2], height and width before orientation.
        read: int32 [n, 4], the box that holds all views, before orientation.
        boxes: per view, n rows, after orientation.
        parts: per view int32 [n, 4], the box before orientation.
    """

    rows: Int64
    route: NDArray[np.int8]
    encoded: list[Pixels]
    orientation: Int64
    stored: Int64
    read: Int32
    boxes: list[Boxes]
    parts: list[Int32]

    @staticmethod
    def of(batch: EncodedBatch, look: Look, boxes: Sequence[Boxes]) -> _Plan:
        rows = np.flatnonzero(look.route != _BAD)
        encoded = batch.images
        orientation = look.orientation[rows]
        swapped = orientation > 4
        h, w = look.height[rows], look.width[rows]
        stored = np.stack([np.where(swapped, w, h), np.where(swapped, h, w)], axis=1)
        taken = [_boxes_of(b, rows) for b in boxes]
        corner = np.stack([b.box[:, :2] for b in taken]).min(axis=0)
        end = np.stack([b.box[:, :2] + b.box[:, 2:] for b in taken]).max(axis=0)
        union = np.concatenate([corner, end - corner], axis=1)
        inside = (corner >= 0).all(axis=1) & (union[:, 2:] > 0).all(axis=1) & (end <= np.stack([h, w], 1)).all(axis=1)
        if not inside.all():
            k = int((~inside).argmax())
            raise ConfigError(
                f"A crop's boxes must lie inside the image. Found: {union[k].tolist()} (top, left, height, width) in "
                f"an image of {h[k]}x{w[k]}. Clip them in the crop's `boxes`."
            )
        read = _stored(union, stored, orientation)
        parts = [_stored(b.box, stored, orientation) for b in taken]
        return _Plan(
            rows,
            look.route[rows],
            [look.replaced.get(r, encoded[r]) for r in rows.tolist()],
            orientation,
            stored,
            read,
            taken,
            parts,
        )

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def swapped(self) -> NDArray[np.bool_]:
        """bool [n], rows that are stored lying down."""
        return self.orientation > 4

    def take(self, keep: Int64) -> _Plan:
        """The plan for some of its rows."""
        return _Plan(
            self.rows[keep],
            self.route[keep],
            [self.encoded[k] for k in keep],
            self.orientation[keep],
            self.stored[keep],
            self.read[keep],
            [_boxes_of(b, keep) for b in self.boxes],
            [part[keep] for part in self.parts],
        )

    def parts_of(self, view: int, regions: Sequence[Pixels]) -> list[Pixels]:
        """A view's part of every row as it is to be seen, out of ``regions``, each row's pixels in its ``read``."""
        corner = self.parts[view][:, :2] - self.read[:, :2]
        found = np.concatenate([corner, corner + self.parts[view][:, 2:]], axis=1).tolist()
        parts = [
            region[top:bottom, left:right] for region, (top, left, bottom, right) in zip(regions, found, strict=True)
        ]
        if (self.orientation != 1).any():
            parts = [_oriented(part, o) for part, o in zip(parts, self.orientation.tolist(), strict=True)]
        return parts


# -- orientation: O[Y, X] = F[Y, X], or F[X, Y] where axes are swapped; F is the stored image, flipped --

_FLIP_Y = np.array([0, 0, 0, 1, 1, 0, 1, 1, 0], dtype=bool)  # by EXIF's number 1..8
_FLIP_X = np.array([0, 0, 1, 1, 0, 0, 0, 1, 1], dtype=bool)


def _stored(box: Int32, size: Int64, orientation: Int64) -> Int32:
    """Boxes [n, 4] of oriented images in coordinates of the stored ones, whose (height, width) are ``size`` [n, 2]."""
    swap = (orientation > 4)[:, None]
    corner = np.where(swap, box[:, 1::-1], box[:, :2])
    extent = np.where(swap, box[:, :1:-1], box[:, 2:])
    flip = np.stack([_FLIP_Y[orientation], _FLIP_X[orientation]], axis=1)
    return np.concatenate([np.where(flip, size - corner - extent, corner), extent], axis=1).astype(np.int32)


def _oriented(image: Pixels, orientation: int) -> Pixels:
    """A stored image or box uint8 [h, w, 3] as it is to be seen; a view."""
    if _FLIP_Y[orientation]:
        image = image[::-1]
    if _FLIP_X[orientation]:
        image = image[:, ::-1]
    return image.transpose(1, 0, 2) if orientation > 4 else image


def _oriented_batch(images: Tensor, orientation: int) -> Tensor:
    """The same for uint8 [n, h, w, 3] on a device."""
    dims = [d for d, flip in ((1, _FLIP_Y), (2, _FLIP_X)) if flip[orientation]]
    images = images.flip(dims) if dims else images
    return images.transpose(1, 2) if orientation > 4 else images


# -- DALI --


class _Slices:
    """DALI on the CPU: decodes a box of each image, in stored coordinates."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._pipeline: Any = None
        self._capacity = 0

    def accepts(self, data: bytes, found: Header) -> bool:
        return _parsed(data, found)

    def run(self, plan: _Plan) -> list[Pixels]:
        """Per row, uint8 [height, width, 3] of ``plan.read``; views into DALI's memory, which they keep."""
        if len(plan) > self._capacity:
            self._capacity = 1 << max(5, (len(plan) - 1).bit_length())
            self._pipeline = self._build()
        self._pipeline.feed_input("encoded", plan.encoded)
        self._pipeline.feed_input("start", _rows(plan.read[:, :2], np.int32))
        self._pipeline.feed_input("shape", _rows(plan.read[:, 2:], np.int32))
        (regions,) = self._pipeline.run()
        # Through DLPack, because what DALI shows to numpy directly is read-only and would be copied for torch.
        return [torch.from_dlpack(regions[k]).numpy() for k in range(len(plan))]

    def _build(self) -> Any:
        Pipeline, fn, types = _dali()
        pipeline = Pipeline(self._capacity, self._num_threads, device_id=None, prefetch_queue_depth=1)
        with pipeline:
            pipeline.set_outputs(
                fn.decoders.image_slice(
                    fn.external_source(name="encoded", ndim=1, dtype=types.UINT8),
                    start=fn.external_source(name="start", ndim=1, dtype=types.INT32),
                    shape=fn.external_source(name="shape", ndim=1, dtype=types.INT32),
                    axes=[0, 1],
                    device="cpu",
                    output_type=types.RGB,
                    adjust_orientation=False,
                )
            )
        with _host_codecs():
            pipeline.build()
        return pipeline

    def close(self) -> None:
        self._pipeline = None
        _release()


class _Mixed:
    """DALI on CUDA: whole images decoded once, then per view slice, resize and canvas, in stored coordinates.

    Boxes are not decoded alone: nvImageCodec 0.9 crashes doing so on some GPUs.
    """

    def __init__(self, decoder: Decoder, *, device: str = "mixed") -> None:
        self._device = device  # "cpu" runs the same pipeline where there is no GPU, for the tests
        self._cuda = decoder.device
        self._num_threads = decoder.num_threads
        self._hardware_load = float(decoder.settings.hardware_load)
        self._batch_size = decoder.batch_size
        self._pipelines: dict[tuple[Any, ...], tuple[int, Any]] = {}

    def accepts(self, data: bytes, found: Header) -> bool:
        return _parsed(data, found)

    def run(self, plan: _Plan) -> list[Tensor]:
        """Per view uint8 [n, H, W, 3], stored orientation, in torch's memory, on torch's current stream."""
        key = tuple((b.interpolation, b.fill) for b in plan.boxes)
        capacity, pipeline = self._pipelines.get(key, (0, None))
        if len(plan) > capacity:
            capacity = max(self._batch_size, 1 << max(5, (len(plan) - 1).bit_length()))
            pipeline = self._build(capacity, plan.boxes)
            self._pipelines[key] = capacity, pipeline
        pipeline.feed_input("encoded", plan.encoded)
        for v, (boxes, part) in enumerate(zip(plan.boxes, plan.parts, strict=True)):
            size = np.array(boxes.size, dtype=np.int64)
            swapped = plan.swapped[:, None]
            canvas = np.where(swapped, size[::-1], size)
            placed = _stored(np.concatenate([boxes.offset, boxes.resized], axis=1), canvas, plan.orientation)
            pipeline.feed_input(f"start{v}", _rows(part[:, :2], np.int32))
            pipeline.feed_input(f"shape{v}", _rows(part[:, 2:], np.int32))
            pipeline.feed_input(f"size{v}", _rows(placed[:, 2:], np.float32))
            pipeline.feed_input(f"corner{v}", _rows(-placed[:, :2], np.int32))
            pipeline.feed_input(f"canvas{v}", _rows(canvas, np.int32))
        stream = None if self._device == "cpu" else torch.cuda.current_stream(self._cuda)
        return [self._copied(view.as_tensor(), stream) for view in pipeline.run(stream)]

    def _copied(self, view: Any, stream: torch.cuda.Stream | None) -> Tensor:
        """DALI's pixels in torch's memory.

        Had torch taken them over by DLPack, DALI would free them after a cudaDeviceSynchronize in a thread of its own,
        which spins for as long as the training keeps the device busy.
        """
        from nvidia.dali.plugin.pytorch import feed_ndarray

        out = torch.empty(view.shape(), dtype=torch.uint8, device=self._cuda)
        return feed_ndarray(view, out, cuda_stream=stream)

    def _build(self, capacity: int, views: Sequence[Boxes]) -> Any:
        Pipeline, fn, types = _dali()
        cuda = self._device == "mixed"
        only_cuda: dict[str, Any] = {}
        if cuda:
            only_cuda = {
                "hw_decoder_load": self._hardware_load,
                "device_memory_padding": DEVICE_PADDING,
                "host_memory_padding": PINNED_PADDING,
            }
        kinds = {"bilinear": types.INTERP_LINEAR, "bicubic": types.INTERP_CUBIC}
        pipeline = Pipeline(
            capacity, self._num_threads, device_id=self._cuda.index if cuda else None, prefetch_queue_depth=1
        )

        def given(name: str, dtype: Any) -> Any:
            return fn.external_source(name=name, ndim=1, dtype=dtype)

        with pipeline:
            image = fn.decoders.image(
                given("encoded", types.UINT8),
                device=self._device,
                output_type=types.RGB,
                adjust_orientation=False,
                jpeg_fancy_upsampling=True,  # within 1 of the CPU; without it within 4
                **only_cuda,
            )
            out = []
            for v, view in enumerate(views):
                part = fn.slice(
                    image, start=given(f"start{v}", types.INT32), shape=given(f"shape{v}", types.INT32), axes=[0, 1]
                )
                resized = fn.resize(
                    part, size=given(f"size{v}", types.FLOAT), interp_type=kinds[view.interpolation], antialias=True
                )
                out.append(
                    fn.slice(
                        resized,
                        start=given(f"corner{v}", types.INT32),
                        shape=given(f"canvas{v}", types.INT32),
                        axes=[0, 1],
                        out_of_bounds_policy="pad",
                        fill_values=[float(view.fill)],
                    )
                )
            pipeline.set_outputs(*out)
        with _loading:
            pipeline.build()
        return pipeline

    def close(self) -> None:
        self._pipelines.clear()
        _release()


def _parsed(data: bytes, found: Header) -> bool:
    """Whether DALI's own parser finds in the bytes what the header says; 3 µs.

    What DALI refuses while it sets up a batch it does not name, and its threads crash (SIGSEGV): samples of a type that
    it does not know. `Header.plain` and this leave it what it is known to decode.
    """
    try:
        stream = _code_stream()(data)
        same = stream.height == found.height and stream.width == found.width
        return bool(same and stream.dtype.kind == "u")  # TypeError where it knows no type
    except (RuntimeError, TypeError):
        return False


_loading = threading.Lock()  # while codecs are loaded: which ones is an environment variable


@lru_cache(maxsize=1)
def _code_stream() -> Any:
    """nvImageCodec's parser, the one that DALI has."""
    with _host_codecs():
        from nvidia.nvimgcodec import CodeStream

    return CodeStream


@contextmanager
def _host_codecs() -> Iterator[None]:
    """Leave nvImageCodec's GPU codecs out of what is opened within: they ask for a JPEG engine as they are loaded.

    That opens a CUDA context on the current device, for a parser or ``device=cpu``, which need none.
    """
    name = "NVIMGCODEC_EXTENSIONS_PATH"
    found = find_spec("nvidia.nvimgcodec")
    codecs = [Path(folder) / "extensions" for folder in (found and found.submodule_search_locations) or ()]
    with _loading, tempfile.TemporaryDirectory(prefix="gpuaug-") as folder:
        for codec in (file for place in codecs for file in place.glob("*.so*")):
            if not codec.name.startswith(("libnvjpeg", "libnvtiff")):
                (Path(folder) / codec.name).symlink_to(codec)
        own = os.environ.get(name)
        os.environ[name] = folder if own is None else own
        try:
            yield
        finally:
            if own is None:
                del os.environ[name]


def _release() -> None:
    from nvidia.dali import backend

    cast(Any, backend).ReleaseUnusedMemory()


def _dali() -> tuple[Any, Any, Any]:
    """DALI's Pipeline, fn and types; its stubs know neither the constants nor what an operator gives."""
    from nvidia.dali import Pipeline, fn, types

    return Pipeline, fn, types


def _rows(array: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """One array, which DALI takes as a batch of its rows: as a list of them it costs DALI 4 µs of Python each."""
    return np.ascontiguousarray(array, dtype=dtype)


# -- Pillow --


def _opened(data: bytes, codec: str) -> Any:
    """The image, not yet decoded, by the codec's own class; HeaderError if its data are no picture's.

    Not ``Image.open``: it compares sizes with a process-wide limit, where `max_pixels` is this decoder's, and asks
    every codec that Pillow knows. GIF, WebP and TIFF still ask that limit themselves, 179 million pixels.
    """
    from PIL import (
        BmpImagePlugin,
        GifImagePlugin,
        Jpeg2KImagePlugin,
        JpegImagePlugin,
        PngImagePlugin,
        PpmImagePlugin,
        TiffImagePlugin,
        WebPImagePlugin,
    )

    kinds: dict[str, Callable[[Any], Any]] = {
        "jpeg": JpegImagePlugin.JpegImageFile,
        "png": PngImagePlugin.PngImageFile,
        "webp": WebPImagePlugin.WebPImageFile,
        "bmp": BmpImagePlugin.BmpImageFile,
        "gif": GifImagePlugin.GifImageFile,
        "ppm": PpmImagePlugin.PpmImageFile,
        "tiff": TiffImagePlugin.TiffImageFile,
        "jpeg2000": Jpeg2KImagePlugin.Jpeg2KImageFile,
    }
    try:
        image = kinds[codec](io.BytesIO(data))
    except Exception as e:  # Pillow's readers raise whatever the bytes lead them to
        raise HeaderError(f"{codec} that cannot be opened: {type(e).__name__}: {_brief(str(e))}") from e

    channels = len(image.getbands())
    if codec == "tiff":  # Pillow shows the first ones
        channels = max(image.tag_v2.get(277, 1), len(image.tag_v2.get(258, ())))
    if channels > 4:
        raise HeaderError(f"{codec} of {channels} channels: an image has 1 to 4")
    if image.mode == "F" or (image.mode == "I" and codec != "png"):  # as which Pillow before 11 opens PNGs of 16 bits
        kind = "floating-point" if image.mode == "F" else "signed or 32-bit"
        raise HeaderError(f"{codec} of {kind} numbers: images have 8 or 16 bits, unsigned")
    return image


def _bits(image: Any) -> int:
    """Bits of a sample, of an image that Pillow has opened."""
    if hasattr(image, "tag_v2"):
        return int(image.tag_v2.get(258, (1,))[0])
    return 16 if image.mode.startswith("I") else 8


def _pillow(data: bytes, size: Int64, box: Int32, max_pixels: int) -> Pixels:
    """A box of the first frame by Pillow, uint8 [h, w, 3] RGB, not oriented; a fault unless all of it decodes."""
    codec = header.sniff(data) or "image"
    image = _opened(data, codec)
    if image.width * image.height > max_pixels:
        raise HeaderError(f"{codec} of {image.height}x{image.width} is larger than `decode.max_pixels` ({max_pixels})")
    y, x, h, w = box.tolist()
    try:
        bits = _bits(image)
        image.load()
        if image.size != (size[1], size[0]):
            raise HeaderError(f"{codec} of {image.height}x{image.width} that claims {size[0]}x{size[1]}")
        # Transparency is dropped, as it is everywhere else here; Pillow would warn about it.
        image.info.pop("transparency", None)
        if (h, w) != tuple(size):
            image = image.crop((x, y, x + w, y + h))
        if image.mode.startswith("I"):  # 16 bits; Pillow's own conversion cuts everything above 255 to white
            most = (1 << bits) - 1
            gray = (np.asarray(image).astype(np.uint32) * 255 + most // 2) // most
            return np.repeat(gray.astype(np.uint8)[:, :, None], 3, axis=2)
        return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
    except HeaderError:
        raise
    except Exception as e:  # Pillow's decoders raise whatever the bytes lead them to
        raise HeaderError(f"{codec} cannot be decoded: {type(e).__name__}: {_brief(str(e))}") from e


# -- small things --


def _backend(wanted: Backend) -> str:
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


def _without_engine(settings: Decode) -> Decode:
    """The settings, without the JPEG engine where `gpuaug doctor` found that it cannot be trusted on this machine."""
    refused = [name for name in ("hardware", "stream_hardware") if verdict(name) is False]
    if not refused:
        return settings
    log.warning("decode with hardware_load=0: `gpuaug doctor` found %s broken here", " and ".join(refused))
    return replace(settings, hardware_load=0.0)


def _threads() -> int:
    cpus, ranks = machine.usable_cpus(), machine.local_world_size()
    count = max(1, min(8, cpus // ranks))
    log.info("decode with num_threads=%d (CPUs: %d, ranks on this machine: %d)", count, cpus, ranks)
    return count


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _single(batch: EncodedBatch, look: Look, row: int) -> tuple[EncodedBatch, Look]:
    """One row as a batch of its own."""
    at = slice(row, row + 1)
    encoded = batch.encoded(row)
    alone = EncodedBatch(
        data=encoded,
        offsets=torch.tensor([0, len(encoded)]),
        labels=None,
        indices=batch.indices[at],
        repeats=batch.repeats[at],
        valid=batch.valid[at],
    )
    return alone, Look(
        height=look.height[at],
        width=look.width[at],
        orientation=look.orientation[at],
        faults=[],
        route=look.route[at],
        replaced={0: look.replaced[row]} if row in look.replaced else {},
    )


def parts(samples: int, size: float, threads: int) -> int:
    """How many parts of a batch the CPU decodes one after the other, given the bytes of all its pixels."""
    return max(1, min(samples // (SAMPLES_AT_ONCE * threads), int(size // (BYTES_AT_ONCE * threads))))


def _chunks(rows: Int64, sizes: Int64, max_bytes: int) -> list[Int64]:
    """Rows in groups that take at most `max_bytes` together, each `sizes[row]`; a larger image is alone."""
    out: list[list[int]] = []
    held = 0
    for row, size in zip(rows.tolist(), sizes[rows].tolist(), strict=True):
        if not out or held + size > max_bytes:
            out.append([])
            held = 0
        out[-1].append(row)
        held += size
    return [np.array(group, dtype=np.int64) for group in out]


def _canvases(count: int, boxes: Sequence[Boxes], device: torch.device) -> list[Tensor]:
    """uint8 [B, H, W, 3] per view on the host, of any content; pinned where it goes to a device."""
    if device.type == "cuda":
        return [torch.empty((count, *b.size, 3), dtype=torch.uint8, pin_memory=True) for b in boxes]
    taken = [recycled.outputs.take((count, 3, *b.size), torch.uint8, channels_last=True) for b in boxes]
    return [x.permute(0, 2, 3, 1) for x in taken]


def _cut(images: Sequence[Pixels], boxes: Int32) -> list[Pixels]:
    """Boxes [n, 4] of whole images."""
    return [image[y : y + h, x : x + w] for image, (y, x, h, w) in zip(images, boxes.tolist(), strict=True)]


def _boxes_of(boxes: Boxes, rows: Int64) -> Boxes:
    return replace(boxes, box=boxes.box[rows], resized=boxes.resized[rows], offset=boxes.offset[rows])


def _fault(row: int, encoded: Pixels, reason: str) -> Fault:
    return Fault(row, "decode", reason, len(encoded), encoded[:16].tobytes())


def _brief(text: str) -> str:
    """An error's last telling line, at most 200 characters."""
    lines = [s.strip() for s in text.splitlines() if s.strip() and "no longer valid" not in s]
    return lines[-1][:200] if lines else "no message"
