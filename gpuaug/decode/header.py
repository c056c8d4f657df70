"""Reads codec, stored size and orientation from image headers, in pure Python. A JPEG takes about 5 µs."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from gpuaug.errors import shown_size
from gpuaug.files import CODECS, Buffer, sniff

BY_PILLOW = ("webp", "bmp", "tiff", "jpeg2000", "ppm", "avif", "heif")  # codecs whose headers only Pillow reads

# "raw" is gpuaug's own format: magic, height and width as little-endian uint32, then height * width * 3 bytes of RGB
RAW_HEADER = 16  # bytes
_RAW = b"\x89gpuaug\n"

# of a JPEG: the first byte of all markers; the markers of scans and of the end
_MARKER, _SCAN, _END = re.compile(b"\xff"), re.compile(b"\xff\xda"), re.compile(b"\xff\xd9")
_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
# numbers of each type of EXIF, for `struct`; bytes and text, which no camera writes, are no orientation
_EXIF_TYPES = {1: "s", 2: "s", 3: "H", 4: "I", 5: "II", 6: "b", 7: "s", 8: "h", 9: "i", 10: "ii", 11: "f", 12: "d"}
_EXIF_TYPES |= {13: "I", 16: "Q"}
_JUNK = 65_536  # limit of the bytes outside segments before a JPEG's first scan
_CHUNKS = 131_072  # limit of the number of chunks; enough for 1 GB in libpng's chunks of 8 kB
_SCANS = 256  # limit of the scans of a JPEG; encoders write about ten
_PIECES = {b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND", b"acTL", b"fcTL", b"fdAT"}  # PNG chunks that affect pixels
_PNG_XMP = b"XML:com.adobe.xmp\0\0"
_PROFILE = b"Raw profile type exif\0"  # ImageMagick stores EXIF in a PNG as hexadecimal text
_PROFILE_BYTES = 65_536  # limit of the text that is read; orientation is near its start
# bytes per pixel that Pillow takes, measured with the most channels and bits; TIFF: one strip of 16-bit CMYK
_MEMORY = {"webp": 14, "bmp": 4, "ppm": 12, "tiff": 12, "jpeg2000": 24, "avif": 16, "heif": 16}
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF0..SOF15 without DHT, JPG, DAC
_ALONE = frozenset(range(0xD0, 0xD9)) | {0x01}  # RST0..7, SOI, TEM: markers without a length


class HeaderError(ValueError):
    """The bytes are not a complete image of a known codec. The message says what is wrong."""


class TruncatedError(HeaderError):
    """A JPEG has a complete header, but no end marker. If a marker is added, decoders decode what exists."""


@dataclass(frozen=True, slots=True)
class Header:
    """Header fields of an encoded image.

    Attributes:
        codec: one of `files.CODECS`.
        height, width: as stored, before orientation; 0 for `BY_PILLOW`, whose headers only Pillow reads.
        orientation: EXIF's 1..8; 1 if it is missing or invalid.
        dali_safe: False if DALI might refuse a JPEG, or decode it differently than Pillow.
        scans: number of passes over the pixels. If there are several, arithmetic-coded passes count twice.
        bits: bits per sample; 8 for `BY_PILLOW`.
        effort: CPU time per pixel, relative to an 8-bit PNG.
        pixel_bytes: peak memory per pixel while Pillow decodes, without the result.
        ancillary: bytes of PNG chunks that do not affect pixels.
        channels, dtype, kind: of the stored values; ``kind`` says what a file has that DALI does not decode.
    """

    codec: str
    height: int
    width: int
    orientation: int = 1
    dali_safe: bool = True
    scans: int = 1
    bits: int = 8
    effort: int = 1
    pixel_bytes: int = field(default=4, compare=False)
    ancillary: int = 0
    channels: int = 3
    dtype: str = "uint8"
    kind: str = ""


def read(data: Buffer) -> Header:
    """Read the header of an encoded image, without a copy. HeaderError if the image is empty, unknown or broken."""
    if not len(data):
        raise HeaderError("empty: 0 bytes")
    codec = sniff(data)
    if codec is None:
        known, begin = ", ".join(CODECS), bytes(data[:12])
        raise HeaderError(f"not an image of a known codec ({known}): {len(data)} bytes, which begin with {begin!r}")
    if codec == "npy":
        raise HeaderError("npy has stored values, which only `decode.pixels=raw` reads")
    parser = _PARSERS.get(codec)
    try:
        return parser(data) if parser else Header(codec, 0, 0, pixel_bytes=_MEMORY[codec])
    except (struct.error, IndexError):
        raise HeaderError(f"{codec} header is truncated: {len(data)} bytes") from None


def raw_header(height: int, width: int) -> bytes:
    """The header of a "raw" image, `RAW_HEADER` bytes. The pixels, uint8 [height, width, 3], follow."""
    return _RAW + struct.pack("<II", height, width)


def exif_orientation(data: bytes) -> int | None:
    """Orientation 1..8 from an EXIF block, with or without the ``Exif`` prefix; None if the block has none.

    Types and counts are read as Pillow reads them. An orientation that is not a number from 1 to 8 counts as 1.
    """
    start = 0
    while data.startswith(b"Exif\0\0", start) and start < 12:
        start += 6
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(data[start : start + 4])
    with suppress(struct.error):
        (at,) = struct.unpack_from(f"{order}I", data, start + 4)
        at += start
        (entries,) = struct.unpack_from(f"{order}H", data, at)
        for entry in range(at + 2, at + 2 + 12 * entries, 12):
            tag, kind, count = struct.unpack_from(f"{order}HHI", data, entry)
            if tag != 0x0112 or kind not in _EXIF_TYPES or not count:
                continue
            form = f"{order}{_EXIF_TYPES[kind]}"
            size, at = struct.calcsize(form) * count, entry + 8
            if size > 4:
                at = start + struct.unpack_from(f"{order}I", data, at)[0]
            if at + size <= len(data):
                value = struct.unpack_from(form, data, at)
                value = value[0] / value[1] if len(value) == 2 and value[1] else value[0]
                return int(value) if value in range(1, 9) else 1
    return None


def oriented(exif: bytes | None, xmp: bytes | None) -> int:
    """Orientation from EXIF. If EXIF has none: from XMP, as Pillow does."""
    if exif is not None and (value := exif_orientation(exif)) is not None:
        return value
    if xmp is not None and (match := _XMP_ORIENTATION.search(xmp)) and 1 <= int(match[1]) <= 8:
        return int(match[1])
    return 1


def _jpeg(data: Buffer) -> Header:
    exif = xmp = frame = None
    at, junk, adobe = 2, 0, False
    while True:
        following = _MARKER.search(data, at)  # decoders skip bytes between segments
        if following is None:
            raise HeaderError("jpeg without a scan")
        junk += following.end() - at
        if junk > _JUNK:
            raise HeaderError(f"jpeg with more than {_JUNK} bytes of junk before its first scan")
        at = following.end()
        marker = data[at]
        if marker in (0xFF, 0x00):
            continue
        at += 1
        if marker in _ALONE:
            continue
        if marker == 0xD9:
            raise HeaderError("jpeg ends before its first scan")
        length = data[at] << 8 | data[at + 1]
        if marker in _FRAMES:
            if frame is not None:
                raise HeaderError("jpeg with two frame headers")
            frame = (marker, *struct.unpack_from(">BHHB", data, at + 2))
        elif marker == 0xE1:
            segment = bytes(data[at + 2 : at + length])
            if segment.startswith(b"Exif\0") and exif is None:
                exif = segment
            elif segment.startswith(_XMP) and xmp is None:
                xmp = segment
        elif marker == 0xEE:
            adobe |= length > 13 and data[at + 2 : at + 7] == b"Adobe"
        elif marker == 0xDA:
            break
        at += max(length, 2)
        if at >= len(data):
            raise HeaderError(f"jpeg header is truncated: {len(data)} bytes")
    if frame is None:
        raise HeaderError("jpeg without a frame header")
    marker, bits, height, width, parts = frame
    if not _END.search(data, max(at, len(data) - 2)) and not _END.search(data, at):
        # a decoder that skips the last rows would not notice this
        raise TruncatedError(f"jpeg truncated: no end marker in {len(data)} bytes")
    scans, pixel_bytes = 1, 1 if parts == 1 else 4
    if marker in (0xC2, 0xC6, 0xCA, 0xCE) or data[at + 2] < parts:  # progressive, or one component at a time
        scans = sum(1 for _ in _SCAN.finditer(data, at - 2))
        if scans > _SCANS:
            raise HeaderError(f"jpeg with {scans} scans, more than {_SCANS}")
        pixel_bytes += 2 * parts  # libjpeg keeps the coefficients
        if marker > 0xC8:  # arithmetic coding takes twice the time per scan
            scans *= 2
    # Pillow takes all CMYK values as inverted; DALI only those of Adobe
    dali_safe = marker in (0xC0, 0xC1, 0xC2) and bits == 8 and (parts < 4 or adobe)
    return Header("jpeg", height, width, oriented(exif, xmp), dali_safe, scans, bits, pixel_bytes=pixel_bytes)


def _png(data: Buffer) -> Header:
    if data[12:16] != b"IHDR":
        raise HeaderError("png does not begin with an IHDR chunk")
    width, height = struct.unpack_from(">II", data, 16)
    bits, color = data[24], data[25]
    exif = xmp = profile = None
    ancillary = 0
    for kind, at, length, _ in chunks(data):
        if kind == b"eXIf":
            exif = bytes(data[at : at + length])
        elif kind == b"iTXt" and data[at : at + len(_PNG_XMP)] == _PNG_XMP:
            xmp = bytes(data[at : at + length])
        elif kind in (b"tEXt", b"zTXt") and data[at : at + len(_PROFILE)] == _PROFILE:
            profile = bytes(data[at + len(_PROFILE) : at + length])
            if kind == b"zTXt":
                with suppress(zlib.error):  # else it is no hexadecimal text
                    profile = zlib.decompressobj().decompress(profile[1:], _PROFILE_BYTES)
        if kind not in _PIECES:
            ancillary += length
    if exif is None and profile is not None:
        text = b"".join(profile[:_PROFILE_BYTES].split(b"\n")[3:])  # the first lines are kind and length
        with suppress(ValueError):  # else it is no hexadecimal text
            exif = bytes.fromhex(text[: len(text) // 2 * 2].decode("ascii"))
    return Header(
        "png", height, width, oriented(exif, xmp), bits=bits, effort=4 if bits == 16 else 1,
        pixel_bytes=4 if color not in (0, 3) else 2 if bits == 16 else 1, ancillary=ancillary,
    )  # fmt: skip


def chunks(png: Buffer) -> Iterator[tuple[bytes, int, int, int]]:
    """Yield (kind, content start, content length, chunk end) for each chunk of a PNG."""
    at = 8
    for _ in range(_CHUNKS):
        if at + 8 > len(png):
            return
        length, kind = struct.unpack_from(">I4s", png, at)
        end = at + 12 + length
        yield kind, at + 8, length, end
        if kind == b"IEND":
            return
        at = end
    raise HeaderError(f"png with more than {_CHUNKS} chunks")


def png_pixels(data: Buffer) -> bytes:
    """Remove PNG chunks that do not affect pixels, because readers may inflate texts to 1,000 times their size."""
    pieces = (data[at - 8 : end] for kind, at, _, end in chunks(data) if kind in _PIECES)
    return b"".join([data[:8], *pieces])


def _gif(data: Buffer) -> Header:
    """The size of the GIF's screen, enlarged if the first frame is larger, as in Pillow and browsers."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    inside = False  # inside an extension, which ends with an empty block
    for _ in range(_CHUNKS):
        kind = data[at]
        if inside:
            inside = kind > 0
            at += 1 + kind
        elif kind == 0x2C:
            x, y, w, h = struct.unpack_from("<HHHH", data, at + 1)
            return Header("gif", max(height, y + h), max(width, x + w))
        elif kind == 0x3B:
            raise HeaderError("gif without a frame")
        else:  # bytes between blocks are skipped
            inside = kind == 0x21
            at += 1 + inside
    raise HeaderError(f"gif with more than {_CHUNKS} blocks before its first frame")


def _raw(data: Buffer) -> Header:
    height, width = struct.unpack_from("<II", data, len(_RAW))
    if len(data) != (needed := RAW_HEADER + height * width * 3):
        raise HeaderError(f"raw of {shown_size(height, width)} must have {needed} bytes. Found: {len(data)}")
    return Header("raw", height, width)


_PARSERS: dict[str, Callable[[Buffer], Header]] = {"jpeg": _jpeg, "png": _png, "gif": _gif, "raw": _raw}
