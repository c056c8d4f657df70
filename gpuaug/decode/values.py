"""Reads the stored values of PNG, TIFF and npy files, for ``decode.pixels=raw``: nothing is scaled or left out.

DALI decodes PNG and most TIFF files. Only this file imports tifffile and imagecodecs, which decode the others.
"""

from __future__ import annotations

import ast
import io
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuaug.batch import WHITES, Fault, Fill
from gpuaug.decode import header
from gpuaug.decode.header import Header, HeaderError
from gpuaug.decode.request import DecodeRequest, Pixels, Route, decode_fault
from gpuaug.errors import ConfigError, shown_size
from gpuaug.files import Buffer, sniff

Values = NDArray[Any]  # uint8, uint16 or float32, [height, width, channels]

READ = ("png", "tiff", "npy")
_ONE_TYPE = "Only uint8, uint16 and float32 are read. Convert it, for example to float32 with numpy and save it as .npy"

_STEP = 1 << 20  # bytes that are inflated at once
_PNG_CHANNELS = {0: 1, 2: 3, 4: 2, 6: 4}  # by colour type; 3 is a palette
# Adam7: (first row, row step, first column, column step) of each pass
_ADAM7 = ((0, 8, 0, 8), (0, 8, 4, 8), (4, 8, 0, 4), (0, 4, 2, 4), (2, 4, 0, 2), (0, 2, 1, 2), (1, 2, 0, 1))

_NPY_HEADER = 10_000  # limit of the text that is parsed, as in numpy
_NPY_TYPES = {"|u1": "uint8", "<u2": "uint16", ">u2": "uint16", "<f4": "float32", ">f4": "float32"}

_TIFF_TYPES = {1: "B", 3: "H", 4: "I", 16: "Q"}  # of the tags that are read
_TIFF_COUNT = 65_535  # limit of the tags of a directory
_TIFF_BY_DALI = (1, 5, 8, 32773, 32946, 50000)  # none, LZW, deflate, PackBits, deflate, zstd
_TIFF_JPEG2000, _TIFF_LERC = (33003, 33005, 34712), (34887,)
_TIFF_BY_EXTRA = (*_TIFF_BY_DALI, *_TIFF_JPEG2000, *_TIFF_LERC)
_SUBFILE, _WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _ORIENTATION = 254, 256, 257, 258, 259, 262, 274
_SAMPLES, _PLANAR, _TILE_WIDTH, _TILE_HEIGHT, _FORMAT = 277, 284, 322, 323, 339
_TAGS = {_SUBFILE, _WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _ORIENTATION}
_OFFSETS, _COUNTS = (273, 324), (279, 325)  # of the parts of an image: strips, tiles
_TAGS |= {_SAMPLES, _PLANAR, _TILE_WIDTH, _TILE_HEIGHT, _FORMAT, *_OFFSETS, *_COUNTS}
_FORMATS = {(8, 1): "uint8", (16, 1): "uint16", (32, 3): "float32"}  # (bits, format) to type
_FORMAT_NAMES = {1: "unsigned", 2: "signed", 3: "floating-point"}


def read(data: Buffer) -> Header:
    """Read size, type and channels of an image. HeaderError if its stored values cannot be read.

    ``pixel_bytes`` of the result is the peak memory per pixel while the image is decoded and resized.
    """
    codec = sniff(data)
    if codec not in READ:
        if codec is None or codec == "raw":
            known, begin = ", ".join(READ), bytes(data[:12])
            raise HeaderError(f"not a file of stored values ({known}): {len(data)} bytes, which begin with {begin!r}")
        raise HeaderError(f"{codec} has no stored values: `decode.pixels=raw` reads {', '.join(READ)}. Use rgb8")
    try:
        return {"png": _png, "tiff": _tiff, "npy": _npy}[codec](data)
    except (struct.error, IndexError, OverflowError):
        raise HeaderError(f"{codec} header is truncated: {len(data)} bytes") from None


class Stored:
    """The one type and number of channels of a run.

    Attributes:
        dtype: the type of the first file that can be read; None before it.
    """

    def __init__(self, channels: int, white: float | None) -> None:
        self.channels, self._white = channels, white
        self.dtype: str | None = None

    @property
    def white(self) -> float:
        """The value that means 1.0."""
        return self._white or WHITES[self.dtype or "uint8"]

    def check(self, info: Header) -> None:
        """HeaderError if an image has another type or number of channels."""
        if info.channels != self.channels:
            size = shown_size(info.height, info.width)
            raise HeaderError(
                f"{info.codec} of {info.channels} channels ({size}), but `decode.channels` is {self.channels}. All "
                "files of a run must have as many; in npy files, channels are the last axis"
            )
        if self.dtype not in (None, info.dtype):
            raise HeaderError(
                f"{info.codec} of {info.dtype} values, but the first file of the run has {self.dtype}. All files of a "
                "run must have one type. Convert them, or leave some out with `source.exclude`"
            )

    def fill(self, fill: Fill) -> Any:
        """The fill of a crop, 0..255, in the unit of the stored values."""
        if not isinstance(fill, int) and len(fill) != self.channels:
            raise ConfigError(f"`augment.crop.fill` must be one number for {self.channels} channels. Found: {fill}.")
        return np.multiply(fill, self.white / 255).astype(self.dtype)


def of_row(row: DecodeRequest, stored: Stored) -> Values:
    """The values inside the ``union`` box of an image that DALI does not decode. ``row``: a request for this image."""
    headers, (y, x, h, w) = row.headers, row.union[0].tolist()
    codec, shape = headers.codec[0], (*headers.stored[0].tolist(), stored.channels)
    if headers.route[0] == Route.REFUSED:
        raise HeaderError(f"{codec} cannot be decoded: DALI found damaged or missing data")
    return _decode(headers.encoded[0].data, codec, shape, stored.dtype or "")[y : y + h, x : x + w]


def prepare(
    opened: dict[int, Header],
    images: list[Pixels],
    each: Callable[[Sequence[int], Callable[[int], None]], None],
    accepts: Callable[[Pixels, Header], bool] | None,
) -> list[Fault]:
    """Leave only pixels in the ``images`` that are PNG, and check what DALI decodes. Returns the faults that are found.

    ``opened``: the headers, by row; ``each``: runs a function for every row; ``accepts``: DALI's check, if it is used.
    """
    reasons: dict[int, str] = {}

    def one(row: int) -> None:
        info = opened[row]
        try:
            if info.codec == "png":
                images[row] = np.frombuffer(_only_pixels(images[row].data, info), dtype=np.uint8)
            if accepts is not None and info.dali_safe and not accepts(images[row], info):
                reasons[row] = f"{info.codec} is damaged: DALI reads its header differently"
        except HeaderError as error:
            reasons[row] = str(error)

    each([*opened], one)
    return [decode_fault(row, images[row], reasons[row]) for row in sorted(reasons)]


def not_finite(request: DecodeRequest, canvases: list[Values], known: set[int]) -> list[Fault]:
    """Faults of rows whose views have NaN or infinity, which the kernels do not keep. ``known``: rows with faults."""
    reason = "NaN or infinity in the part that a crop takes: values must be finite. Replace them, for example by 0"
    return [
        decode_fault(row, request.headers.encoded[k], reason)
        for k, row in enumerate(request.rows.tolist())
        if row not in known and not all(np.isfinite(canvas[row]).all() for canvas in canvases)
    ]


def _decode(data: Buffer, codec: str, shape: tuple[int, ...], dtype: str) -> Values:
    """Decode an image of the shape and type that :func:`read` has found.

    The values of a npy file are not copied, and keep its order of bytes.
    """
    if codec == "npy":
        descr, shape, start = _npy_header(data)
        return np.frombuffer(data, dtype=descr, offset=start).reshape(shape if len(shape) == 3 else (*shape, 1))
    tifffile, imagecodecs = _extra(codec)
    try:
        if codec == "png":
            values = imagecodecs.png_decode(bytes(data))
        else:
            with tifffile.TiffFile(io.BytesIO(bytes(data))) as file:
                values = _tiff_page(file, shape, dtype)
    except HeaderError:
        raise
    except Exception as e:  # these libraries raise many types for damaged bytes
        raise HeaderError(f"{codec} cannot be decoded: {type(e).__name__}: {str(e)[:200]}") from e
    values = values if values.ndim == 3 else values[..., None]
    if values.shape != shape or values.dtype != dtype:
        found = f"{values.dtype} {list(values.shape)}"
        raise HeaderError(f"{codec} of {found}, but its header says {dtype} {list(shape)}")
    decoded: Values = values
    return decoded


@lru_cache(maxsize=1)
def _libraries() -> tuple[Any, Any] | ImportError:
    try:
        return import_module("tifffile"), import_module("imagecodecs")
    except ImportError as error:
        return error


def _extra(what: str) -> tuple[Any, Any]:
    """The modules tifffile and imagecodecs. HeaderError if they are not installed."""
    if isinstance(found := _libraries(), ImportError):
        raise HeaderError(
            f"{what} needs tifffile and imagecodecs ({found}). Install them: pip install 'gpuaug[tiff]'"
        ) from None
    return found


def check_extra(info: Header) -> None:
    """HeaderError if the image needs tifffile and imagecodecs, and they are not installed."""
    if info.codec != "npy":
        _extra(f"{info.codec} without DALI" if info.dali_safe else f"{info.codec} {info.kind}")


def _pixel_bytes(channels: int, dtype: str, *, decoded: bool = True) -> int:
    """Decoded values, a copy that is turned upright, and the float32 copy that is resized."""
    size = np.dtype(dtype).itemsize
    return channels * (size * (1 + decoded) + 4)


# -- PNG --


def _png(data: Buffer) -> Header:
    info = header.read(data)
    bits, color, interlaced = data[24], data[25], data[28]
    if color == 3:
        raise HeaderError("png with a palette: its values are numbers of colours. Convert it to gray or RGB")
    if bits not in (8, 16) or color not in _PNG_CHANNELS or interlaced > 1:
        raise HeaderError(f"png of {bits} bits and colour type {color}: 8 and 16 bits of gray or RGB are read")
    channels, dtype = _PNG_CHANNELS[color], f"uint{bits}"
    return Header(
        "png", info.height, info.width, info.orientation, dali_safe=color != 4, channels=channels, dtype=dtype,
        pixel_bytes=_pixel_bytes(channels, dtype), kind="of gray and alpha",
    )  # fmt: skip


def _only_pixels(data: Buffer, info: Header) -> Buffer:
    """A PNG without the chunks that change or accompany its values. HeaderError if it has too few or too many values.

    DALI would inflate all that a file holds: 1 MB can become 1 GB. And it would not notice damaged bytes.
    """
    pieces = [data[:8]]
    engine, inflated, needed = zlib.decompressobj(), 0, _png_bytes(info, interlaced=data[28] == 1)
    for kind, at, length, end in header.chunks(data):
        if kind not in (b"IHDR", b"IDAT", b"IEND"):
            continue
        if end > len(data) or zlib.crc32(data[at - 4 : at + length]) != struct.unpack_from(">I", data, at + length)[0]:
            raise HeaderError(f"png is damaged or truncated: the checksum of its {kind.decode()} chunk is wrong")
        pieces.append(data[at - 8 : end])
        if kind == b"IDAT":
            rest: Buffer = data[at : at + length]
            try:
                while rest and not engine.eof and inflated <= needed:
                    inflated += len(engine.decompress(rest, _STEP))
                    rest = engine.unconsumed_tail
            except zlib.error as error:
                raise HeaderError(f"png is damaged: {error}") from None
    if inflated != needed or not engine.eof:
        found = "more" if inflated > needed else "fewer"
        raise HeaderError(
            f"png of {shown_size(info.height, info.width)} is damaged or truncated: it has {found} values"
        )
    return data if sum(map(len, pieces)) == len(data) else b"".join(pieces)


def _png_bytes(info: Header, *, interlaced: bool) -> int:
    """Number of bytes of the inflated pixels."""
    pixel = info.channels * np.dtype(info.dtype).itemsize
    total = 0
    for top, down, left, right in _ADAM7 if interlaced else ((0, 1, 0, 1),):
        rows, columns = -(-(info.height - top) // down), -(-(info.width - left) // right)
        total += rows * (1 + columns * pixel) if rows > 0 and columns > 0 else 0
    return total


# -- npy --


def _npy(data: Buffer) -> Header:
    descr, shape, start = _npy_header(data)
    height, width, channels = (*shape, 1)[:3]
    dtype = _NPY_TYPES[descr]
    if (needed := height * width * channels * np.dtype(dtype).itemsize) != len(data) - start:
        raise HeaderError(
            f"npy of {dtype} {list(shape)} must have {needed} bytes of values. Found: {len(data) - start}"
        )
    return Header(
        "npy",
        height,
        width,
        dali_safe=False,
        channels=channels,
        dtype=dtype,
        pixel_bytes=_pixel_bytes(channels, dtype, decoded=False),
    )


def _npy_header(data: Buffer) -> tuple[str, tuple[int, ...], int]:
    """Type, shape, and the place of the first value. Objects (pickles) are no type, so they are never loaded."""
    version = data[6]
    if version not in (1, 2, 3):
        raise HeaderError(f"npy of version {version}: versions 1 to 3 are read")
    begin, form = (10, "<H") if version == 1 else (12, "<I")
    (length,) = struct.unpack_from(form, data, 8)
    if length > min(_NPY_HEADER, len(data) - begin):
        raise HeaderError(f"npy header of {length} bytes in a file of {len(data)}: at most {_NPY_HEADER} are read")
    try:
        fields = ast.literal_eval(
            bytes(data[begin : begin + length]).decode("utf-8" if version == 3 else "latin-1").strip()
        )
        descr, fortran, shape = (fields[name] for name in ("descr", "fortran_order", "shape"))
    except (ValueError, SyntaxError, KeyError, TypeError, MemoryError, RecursionError) as error:
        raise HeaderError(f"npy header is damaged: {type(error).__name__}") from None
    if not isinstance(descr, str) or descr not in _NPY_TYPES:
        raise HeaderError(f"npy of type {descr!r:.60}. {_ONE_TYPE}")
    if not isinstance(shape, tuple) or len(shape) not in (2, 3) or any(type(n) is not int or n < 0 for n in shape):
        raise HeaderError(f"npy must have the axes (height, width) or (height, width, channels). Found: {shape!r:.60}")
    if fortran is not False:
        raise HeaderError("npy must be in C order. Save it again: np.save(file, np.ascontiguousarray(x))")
    return descr, shape, begin + length


# -- TIFF --


def _tiff(data: Buffer) -> Header:
    order = "<" if data[:2] == b"II" else ">"
    big = struct.unpack_from(f"{order}H", data, 2)[0] == 43
    if big and struct.unpack_from(f"{order}HH", data, 4) != (8, 0):
        raise HeaderError("tiff header is damaged: BigTIFF needs offsets of 8 bytes")
    (at,) = struct.unpack_from(f"{order}{'Q' if big else 'I'}", data, 8 if big else 4)
    tags, following = _tiff_tags(data, order, at, big=big)
    if following:
        more, _ = _tiff_tags(data, order, following, big=big)
        if not _first(more, _SUBFILE, 0) & 0b101:  # neither a smaller copy nor a mask
            raise HeaderError("tiff with several images: only files of one image are read. Save each as its own file")
    channels, height, width = (
        _first(tags, tag, default) for tag, default in ((_SAMPLES, 1), (_HEIGHT, 0), (_WIDTH, 0))
    )
    forms = {*zip(_each(tags, _BITS, channels), _each(tags, _FORMAT, channels), strict=False)}
    if len(forms) != 1 or not forms <= _FORMATS.keys():
        names = sorted(f"{_FORMAT_NAMES.get(kind, 'other')} {bits}-bit" for bits, kind in forms)[:3]
        raise HeaderError(f"tiff of {', '.join(names) or 'no'} numbers. {_ONE_TYPE}")
    form = forms.pop()
    compression, planar = _first(tags, _COMPRESSION, 1), _first(tags, _PLANAR, 1)
    if compression not in _TIFF_BY_EXTRA:
        raise HeaderError(f"tiff with compression {compression}: these are read: {', '.join(map(str, _TIFF_BY_EXTRA))}")
    dtype, photometric = _FORMATS[form], _first(tags, _PHOTOMETRIC, 1)
    if photometric not in (1, 2):
        raise HeaderError(
            f"tiff of photometric interpretation {photometric}: only 1 (gray, bands) and 2 (RGB) are read"
        )
    by_dali = compression in _TIFF_BY_DALI and (planar == 1 or channels == 1)
    offsets, counts = ([x for tag in of for x in tags.get(tag, ())] for of in (_OFFSETS, _COUNTS))
    if not offsets or len(offsets) != len(counts) or max(map(sum, zip(offsets, counts, strict=True))) > len(data):
        raise HeaderError(f"tiff is damaged or truncated: its values do not lie in its {len(data)} bytes")
    # a tile is decoded as a whole, also if it is larger than the image
    tile = _first(tags, _TILE_WIDTH, 0) * _first(tags, _TILE_HEIGHT, 0)
    if tile > 4 * max(height * width, 1 << 20):
        raise HeaderError(f"tiff of {shown_size(height, width)} with tiles of {tile} pixels is damaged")
    orientation = _first(tags, _ORIENTATION, 1)
    return Header(
        "tiff", height, width, orientation if orientation in range(1, 9) else 1, dali_safe=by_dali, channels=channels,
        dtype=dtype, pixel_bytes=_pixel_bytes(channels, dtype),
        kind=f"of planes and compression {compression}" if planar != 1 else f"with compression {compression}",
    )  # fmt: skip


def _tiff_tags(data: Buffer, order: str, at: int, *, big: bool) -> tuple[dict[int, tuple[int, ...]], int]:
    """The whole numbers in a directory, by tag, and the place of the next directory (0: none)."""
    (count,) = struct.unpack_from(f"{order}{'Q' if big else 'H'}", data, at)
    if count > _TIFF_COUNT:
        raise HeaderError(f"tiff with {count} tags is damaged")
    at, entry, word = at + (8 if big else 2), 20 if big else 12, "Q" if big else "I"
    tags = {}
    for place in range(at, at + count * entry, entry):
        tag, kind, length = struct.unpack_from(f"{order}HH{word}", data, place)
        if kind not in _TIFF_TYPES or not length or tag not in _TAGS:
            continue
        form = f"{order}{length}{_TIFF_TYPES[kind]}"
        place += 12 if big else 8
        if struct.calcsize(form) > (8 if big else 4):
            (place,) = struct.unpack_from(f"{order}{word}", data, place)
        tags[tag] = struct.unpack_from(form, data, place)
    return tags, struct.unpack_from(f"{order}{word}", data, at + count * entry)[0]


def _first(tags: dict[int, tuple[int, ...]], tag: int, default: int) -> int:
    return tags.get(tag, (default,))[0]


def _each(tags: dict[int, tuple[int, ...]], tag: int, channels: int) -> tuple[int, ...]:
    """The values of a tag that has one per channel; libtiff writes a single one for all channels."""
    values = tags.get(tag, (1,))
    return values * channels if len(values) == 1 else values


def _tiff_page(file: Any, shape: tuple[int, ...], dtype: str) -> Values:
    """Decode the first page, after a check of what tifffile and the codecs would allocate."""
    page = file.pages[0]
    planes = len(shape) == 3 and page.planarconfig == 2 and shape[2] > 1
    expected = (shape[2], *shape[:2]) if planes else shape if page.ndim == 3 else shape[:2]
    if page.shape != expected or page.dtype != dtype:
        raise HeaderError(f"tiff of {page.dtype} {list(page.shape)}, but its header says {dtype} {list(expected)}")
    if page.compression in (*_TIFF_JPEG2000, *_TIFF_LERC):
        most = max(page.chunks[-2:]) if page.ndim == 2 else max(page.chunks)
        for at, count in zip(page.dataoffsets, page.databytecounts, strict=True):
            file.filehandle.seek(at)
            for side in _sides(file.filehandle.read(min(count, 64))):
                if side > most:
                    raise HeaderError(f"tiff is damaged: a part of {side} pixels, larger than {most}")
    values: Values = page.asarray(maxworkers=1)
    return np.moveaxis(values, 0, -1) if planes else values


def _sides(part: bytes) -> Iterator[int]:
    """The sides in the header of a part that is JPEG 2000 or LERC."""
    if (at := part.find(b"\xff\x4f\xff\x51")) >= 0:
        right, bottom, left, top = struct.unpack_from(">4I", part, at + 8)
        yield from (right - left, bottom - top)
    elif part.startswith(b"Lerc2 "):
        yield from struct.unpack_from("<2I", part, 14)
    else:
        raise HeaderError("tiff is damaged: a part is neither JPEG 2000 nor LERC")
