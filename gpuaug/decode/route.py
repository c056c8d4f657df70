"""Reads the headers of a batch: true shapes, certain faults, and which decoder each image takes."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from gpuaug.batch import EncodedBatch
from gpuaug.decode import dali, header, pillow
from gpuaug.decode.header import Header, HeaderError, TruncatedError
from gpuaug.decode.plan import HeaderInfo, Pixels, Route, decode_fault

if TYPE_CHECKING:
    from gpuaug.decode.decoder import Decode

log = logging.getLogger("gpuaug")

_END_OF_JPEG = b"\xff\xd9"
# Few bytes can claim many pixels. Above max(2**25, `max_pixels` / 4) pixels an image needs a byte for every 64, which a
# JPEG of one colour has, so that no file below 1 MiB takes more than 2 s of a core. A pixel counts as its `effort`.
_SPARSE_PIXELS, _PIXELS_PER_BYTE = 2**25, 64
_MAX_SCANS = 12  # of the largest image; 0.6 ns a pixel and scan
_ANCILLARY_BYTES = 65_536  # PNG chunks that do not affect pixels are left out when they have more bytes


class HeaderReader:
    """Reads the headers of batches and applies the decoder's limits.

    Args:
        settings: of the decoder.
        accept_truncated: complete a JPEG without its end, instead of reporting a fault.
        with_dali: whether DALI decodes what it can.
    """

    def __init__(self, settings: Decode, *, accept_truncated: bool, with_dali: bool) -> None:
        self._codecs, self._max_pixels = settings.codecs, settings.max_pixels
        self._accept_truncated, self._with_dali = accept_truncated, with_dali
        self._deep_logged = False

    def read(self, batch: EncodedBatch) -> HeaderInfo:
        """True shapes and certain faults, from the headers alone; no pixel is decoded."""
        shape = np.zeros((len(batch), 2), dtype=np.int64)
        orientation = np.ones(len(batch), dtype=np.int64)
        route = np.full(len(batch), Route.BAD, dtype=np.int8)
        faults, replaced, truncated = [], dict[int, Pixels](), 0
        unread = {fault.row for fault in batch.faults}
        for row, encoded in enumerate(batch.images):  # 10 µs a sample, as a JPEG's header has to be walked
            if row in unread:
                continue
            try:
                info, route[row], replacement = self._read_header(encoded)
            except HeaderError as e:
                faults.append(decode_fault(row, encoded, str(e)))
                continue
            if replacement is not None:
                replaced[row] = replacement
                truncated += info.codec == "jpeg"
            orientation[row] = info.orientation
            shape[row] = (info.height, info.width)[:: -1 if info.orientation > 4 else 1]
        height, width = shape.T.copy()
        return HeaderInfo(
            height=height,
            width=width,
            orientation=orientation,
            faults=faults,
            route=route,
            replaced=replaced,
            truncated=truncated,
        )

    def _read_header(self, encoded: Pixels) -> tuple[Header, Route, Pixels | None]:
        """One image's header, its decoder, and the bytes that are decoded in place of its own, if any."""
        if raw := header.read_raw(encoded.data):  # its pixels are not copied
            return *self._check(b"", raw), None
        data = original = encoded.tobytes()
        try:
            info = header.read(data)
        except TruncatedError:
            if not self._accept_truncated:
                raise
            data = original + _END_OF_JPEG
            info = header.read(data)
        if info.ancillary > _ANCILLARY_BYTES:
            data = header.png_pixels(original)
        info, route = self._check(data, info)
        return info, route, None if data is original else np.frombuffer(data, dtype=np.uint8)

    def _check(self, data: bytes, info: Header) -> tuple[Header, Route]:
        """The header with the size that its decoder finds, and the decoder; HeaderError beyond the limits."""
        codec, max_pixels = info.codec, self._max_pixels
        if codec not in self._codecs:
            raise HeaderError(f"{codec} is not among `decode.codecs`: {', '.join(self._codecs)}")
        if codec in ("tiff", "jpeg2000"):
            height, width, bits = pillow.size_and_bits(data, codec)
            info = replace(info, height=height, width=width, bits=bits)
        name, pixels = f"{codec} of {info.height}x{info.width}", info.height * info.width
        if pixels == 0:
            raise HeaderError(f"{codec} without pixels: {info.height}x{info.width}")
        if pixels > max_pixels:
            raise HeaderError(f"{name} is larger than `decode.max_pixels` ({max_pixels})")
        work = pixels * info.effort
        if work > _SPARSE_PIXELS and work > max(max_pixels // 4, _PIXELS_PER_BYTE * len(data)) and codec != "raw":
            raise HeaderError(
                f"{name} in {len(data)} bytes: so many pixels need a byte for every "
                f"{_PIXELS_PER_BYTE // info.effort}, or `decode.max_pixels` of {4 * work}"
            )
        if info.scans > 1 and info.scans * pixels > _MAX_SCANS * max_pixels:
            raise HeaderError(f"{name} in {info.scans} scans is too much work")
        if info.bits > 8 and not self._deep_logged:
            self._deep_logged = True
            log.info("decode scales images of more than 8 bits to 8, the largest value that can be stored to 255")
        if codec == "raw":
            return info, Route.RAW
        if not self._with_dali or codec not in dali.CODECS or not info.dali_safe:
            return info, Route.PILLOW
        return info, Route.DALI if dali.accepts(data, info) else Route.REFUSED
