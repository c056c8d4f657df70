"""Decodes masks, and the images that DALI does not decode, with Pillow. Only this file uses Pillow for decoding."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuaug.batch import Int32, Int64, Interpolation
from gpuaug.decode import header
from gpuaug.decode.header import Header, HeaderError
from gpuaug.decode.request import DecodeRequest, Pixels
from gpuaug.errors import shown_size
from gpuaug.files import Buffer

# Pillow's plugin has the name of the codec, capitalised; these are the exceptions
_PLUGINS = {"webp": "WebP", "jpeg2000": "Jpeg2K"}
_IN_PYTHON = ("bmp_rle", "ppm")  # Pillow's decoders that are Python: run-length encoding, odd numbers of levels
_STRIP = 2**16  # pixels that are converted to RGB at once: converting a whole image would take 6 more bytes per pixel


def complete(info: Header, data: Buffer) -> Header:
    """Fill in what only Pillow reads: size, bits, effort and orientation. For the codecs of `header.BY_PILLOW`."""
    image = _open(data, info.codec)
    effort = 8 if image.tile and image.tile[0][0] in _IN_PYTHON else info.effort
    info = replace(info, height=image.height, width=image.width, bits=_bits(image), effort=effort)
    # Pillow turns TIFF upright, and pillow-heif turns HEIF; JPEG 2000 has no orientation
    if info.codec not in ("webp", "avif"):
        return info
    return replace(info, orientation=header.oriented(image.info.get("exif"), image.info.get("xmp")))


def _opener(codec: str) -> Any:
    """Pillow's class for images of ``codec``. HeaderError if it is not installed."""
    try:
        if codec == "heif":
            return import_module("pillow_heif").HeifImageFile
        plugin = _PLUGINS.get(codec, codec.capitalize())
        module: Any = import_module(f"PIL.{plugin}ImagePlugin")
    except ImportError as error:
        if codec == "heif":
            raise HeaderError(f"heif needs pillow-heif ({error}). Install it: pip install 'gpuaug[heif]'") from None
        raise HeaderError(f"{codec} needs Pillow 11.3 or later. Install it: pip install -U Pillow") from None
    if codec == "avif":  # one thread per image, because the decoder decodes several images at once
        module.DEFAULT_MAX_THREADS = module.DEFAULT_MAX_THREADS or 1
    return getattr(module, f"{plugin}ImageFile")


def decode(data: Buffer, codec: str, size: Int64, box: Int32, max_pixels: int) -> Pixels:
    """Decode a box of the first frame to RGB, uint8 [h, w, 3]. EXIF orientation is not applied.

    Args:
        codec: one of `files.CODECS`.
        size: (height, width) in the header.
        box: (top, left, height, width), in stored coordinates.
        max_pixels: limit for the whole image.

    Raises:
        HeaderError: if the image cannot be decoded, or its size differs from ``size``.
    """
    with _faults(codec):
        image = _open(data, codec)
        if image.width * image.height > max_pixels:
            found = shown_size(image.height, image.width)
            raise HeaderError(f"{codec} of {found} is larger than `decode.max_pixels` ({max_pixels})")
        if codec == "jpeg":
            image.decodermaxblock = len(data)  # Pillow's blocks of 64 KiB take a fifth more time
        image.load()
        height, width = size.tolist()
        if image.size != (width, height):
            found = shown_size(image.height, image.width)
            raise HeaderError(f"{codec} of {found}, but its header says {width} x {height}")
        y, x, h, w = box.tolist()
        image.info.pop("transparency", None)  # Pillow would warn; DALI drops transparency too
        white = (1 << _bits(image)) - 1
        rgb = np.empty((h, w, 3), dtype=np.uint8)
        rows = max(1, _STRIP // w)
        for top in range(0, h, rows):
            strip = image.crop((x, y + top, x + w, y + min(h, top + rows)))
            if image.mode.startswith("I"):  # 16 bits are scaled here: Pillow would clip values above 255
                gray = (np.asarray(strip).astype(np.uint32) * 255 + white // 2) // white
                rgb[top : top + rows] = gray[:, :, None]
            else:
                rgb[top : top + rows] = np.asarray(strip if strip.mode == "RGB" else strip.convert("RGB"))
        return rgb


def reduced(data: Buffer, row: DecodeRequest) -> Iterator[Pixels] | None:
    """Decode a JPEG at 1/2, 1/4 or 1/8 of its size with Pillow's draft mode, and yield each view's resized box.

    None: a view needs more pixels. The edges of a box may lie between the pixels of the smaller image. Pillow's resize
    takes such edges exactly, so views are not shifted. ``row``: a request for this image.
    """
    turn = -1 if row.headers.swapped[0] else 1  # boxes and sizes are those before orientation
    each = zip(row.parts, row.windows, strict=True)
    views = [(part[0].tolist(), b.resized[0, ::turn].tolist(), b.interpolation) for part, b in each]
    with _faults("jpeg"):
        image, (height, width) = _open(data, "jpeg"), row.headers.stored[0].tolist()
        least = [(-(-width * wide // w), -(-height * high // h)) for (_, _, h, w), (high, wide), _ in views]
        drafted = image.draft(None, tuple(map(max, zip(*least, strict=True))))
        if drafted is None or drafted[1] == (0, 0, width, height):
            return None
        image.decodermaxblock = len(data)
        image.load()
    return (_resized(image, round(width / drafted[1][2]), *view) for view in views)


def _resized(image: Any, scale: int, box: list[int], size: list[int], interpolation: Interpolation) -> Pixels:
    """A box of an image, resized. ``box`` is in pixels of the image at full size, ``scale`` times as large."""
    from PIL import Image

    top, left, h, w = (edge / scale for edge in box)
    x, y = int(left), int(top)
    part = image.crop((x, y, ceil(left + w), ceil(top + h)))
    part = part if part.mode == "RGB" else part.convert("RGB")
    edges = left - x, top - y, left + w - x, top + h - y
    return np.asarray(part.resize(size[::-1], Image.Resampling[interpolation.upper()], box=edges))


def values(png: bytes, *, colors: bool = False) -> tuple[NDArray[Any], str]:
    """The stored values of a PNG, [h, w] or [h, w, channels], and Pillow's mode. EXIF orientation is ignored.

    The values of a palette image are indices of colours. Pillow scales gray values of 2 and 4 bits to 0..255. The
    caller must check the image's size first. ``colors``: True: the values are R + 256 G + 65536 B, int32 [h, w].
    """
    with _faults("png"):
        image = _open(png, "png")
        if colors:
            return np.asarray(image.convert("RGBA")).view("<i4")[:, :, 0] & 0xFFFFFF, image.mode
        return np.asarray(image), image.mode


def last_line(text: str) -> str:
    """The last useful line of an error message, at most 200 characters."""
    lines = [s.strip() for s in text.splitlines() if s.strip() and "no longer valid" not in s]
    return lines[-1][:200] if lines else "no message"


@contextmanager
def _faults(codec: str) -> Iterator[None]:
    """Turn Pillow's errors into HeaderError."""
    try:
        yield
    except HeaderError:
        raise
    except Exception as e:  # Pillow raises many types for damaged bytes
        raise HeaderError(f"{codec} cannot be decoded: {type(e).__name__}: {last_line(str(e))}") from e


def _open(data: Buffer, codec: str) -> Any:
    """Open an image without decoding it. HeaderError if it cannot be opened, or its pixel type is not supported."""
    # `Image.open` would try every codec of Pillow, and would apply Pillow's limit of 179 million
    # pixels. This limit still applies to WebP, TIFF, some GIF images, and crops.
    try:
        image = _opener(codec)(io.BytesIO(bytes(data)))  # the only copy: BytesIO would copy other types twice
    except HeaderError:
        raise
    except Exception as e:  # Pillow raises many types for damaged bytes
        raise HeaderError(f"{codec} cannot be opened: {type(e).__name__}: {last_line(str(e))}") from e

    channels = len(image.getbands())
    if codec == "tiff":  # Pillow reports only the first channels
        channels = max(image.tag_v2.get(277, 1), len(image.tag_v2.get(258, ())))
    if channels > 4:
        raise HeaderError(f"{codec} of {channels} channels: 1 to 4 are supported")
    if image.mode == "F" or (image.mode == "I" and codec not in ("png", "ppm")):
        # PPM with more than 255 levels is I with values up to 65535; so are 16-bit PNGs in Pillow below 11
        kind = "floating-point" if image.mode == "F" else "signed or 32-bit"
        raise HeaderError(f"{codec} of {kind} numbers: only unsigned 8-bit and 16-bit numbers are supported")
    return image


def _bits(image: Any) -> int:
    """Bits per sample of an image that Pillow has opened."""
    if hasattr(image, "tag_v2"):
        return int(image.tag_v2.get(258, (1,))[0])
    return 16 if image.mode.startswith("I") else 8
