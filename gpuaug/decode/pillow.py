"""Pillow decodes masks, and the images that DALI does not decode. Only this file imports Pillow for decoding."""

from __future__ import annotations

import io
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from gpuaug.batch import Int32, Int64, Interpolation
from gpuaug.decode import header
from gpuaug.decode.header import HeaderError
from gpuaug.decode.plan import Pixels, reduced_box

# codec to the name of Pillow's plugin, if that is not the capitalised codec
_PLUGINS = {"webp": "WebP", "jpeg2000": "Jpeg2K"}


def bytes_per_pixel(data: bytes) -> int:
    """Peak decoding memory per pixel; WebP needs several canvases. ``data``: at least the first 12 bytes."""
    return 21 if header.sniff(data) == "webp" else 13


def size_and_bits(data: bytes, codec: str) -> tuple[int, int, int]:
    """Stored height, width and bits per sample, for codecs whose headers only Pillow reads. No pixel is decoded."""
    image = _open(data, codec)
    return image.height, image.width, _bits(image)


def decode(data: bytes, size: Int64, box: Int32, max_pixels: int, scale: int = 1) -> Pixels:
    """Decode a box of the first frame.

    Args:
        data: the encoded image.
        size: stored (height, width), as its header says.
        box: (top, left, height, width), in stored coordinates.
        max_pixels: limit for the whole image.
        scale: 2, 4 or 8: decode a JPEG at 1/``scale`` of its size. libjpeg then makes fewer pixels of each block.

    Returns:
        uint8 [h, w, 3], RGB, not oriented: the pixels of ``box``, or with ``scale`` those of `reduced_box`.

    Raises:
        HeaderError: if the whole image does not decode, or its size differs from ``size``.
    """
    codec = header.sniff(data) or "image"
    image = _open(data, codec)
    if image.width * image.height > max_pixels:
        raise HeaderError(f"{codec} of {image.height}x{image.width} is larger than `decode.max_pixels` ({max_pixels})")
    if codec == "jpeg":
        image.decodermaxblock = len(data)  # Pillow's blocks of 64 KiB take a fifth more time
    try:
        bits = _bits(image)
        if scale > 1:
            image.draft(None, (image.width // scale, image.height // scale))
            size, box = -(-size // scale), reduced_box(box, scale)
        image.load()
        if image.size != (size[1], size[0]):
            raise HeaderError(f"{codec} of {image.height}x{image.width}, but its header says {size[0]}x{size[1]}")
        y, x, h, w = box.tolist()
        # Drop transparency, like DALI. Otherwise Pillow warns.
        image.info.pop("transparency", None)
        if (h, w) != tuple(size):
            image = image.crop((x, y, x + w, y + h))
        if image.mode.startswith("I"):  # 16 bits; Pillow's conversion clips values above 255
            white = (1 << bits) - 1
            gray = (np.asarray(image).astype(np.uint32) * 255 + white // 2) // white
            return np.repeat(gray.astype(np.uint8)[:, :, None], 3, axis=2)
        return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
    except HeaderError:
        raise
    except Exception as e:  # Pillow raises many types for damaged bytes
        raise HeaderError(f"{codec} cannot be decoded: {type(e).__name__}: {last_line(str(e))}") from e


def resize(part: Pixels, box: tuple[float, ...], size: tuple[int, int], interpolation: Interpolation) -> Pixels:
    """Resize a box of uint8 [h, w, 3] to ``size`` (height, width), antialiased. ``box``: left, top, right, bottom.

    The box may begin and end inside a pixel, which `gpuaug.decode.resize` does not support.
    """
    resample = Image.Resampling[interpolation.upper()]
    return np.asarray(Image.fromarray(part).resize(size[::-1], resample, box=box))


def values(png: bytes) -> tuple[NDArray[Any], str]:
    """The stored values of a PNG, [h, w] or [h, w, channels], and Pillow's mode; not oriented.

    Values are not turned into colours: a palette image gives the indices of its colours. But Pillow scales gray values
    of 2 and 4 bits to 0..255. The caller limits the size.

    Raises:
        HeaderError: if the image cannot be decoded.
    """
    image = _open(png, "png")
    try:
        return np.asarray(image), image.mode
    except Exception as e:  # Pillow raises many types for damaged bytes
        raise HeaderError(f"png cannot be decoded: {type(e).__name__}: {last_line(str(e))}") from e


def last_line(text: str) -> str:
    """The last useful line of an error message, at most 200 characters."""
    lines = [s.strip() for s in text.splitlines() if s.strip() and "no longer valid" not in s]
    return lines[-1][:200] if lines else "no message"


def _open(data: bytes, codec: str) -> Any:
    """Open an image without decoding it. HeaderError if it cannot be read, or its samples are not supported."""
    # Not `Image.open`: it applies a process-wide size limit, but `max_pixels` belongs to one decoder. It also tries
    # every codec that Pillow knows. GIF, WebP and TIFF still apply that limit, 179 million pixels.
    plugin = _PLUGINS.get(codec, codec.capitalize())
    try:
        image = getattr(import_module(f"PIL.{plugin}ImagePlugin"), f"{plugin}ImageFile")(io.BytesIO(data))
    except Exception as e:  # Pillow raises many types for damaged bytes
        raise HeaderError(f"{codec} cannot be opened: {type(e).__name__}: {last_line(str(e))}") from e

    channels = len(image.getbands())
    if codec == "tiff":  # Pillow reports only the first channels
        channels = max(image.tag_v2.get(277, 1), len(image.tag_v2.get(258, ())))
    if channels > 4:
        raise HeaderError(f"{codec} of {channels} channels: 1 to 4 are supported")
    if image.mode == "F" or (image.mode == "I" and codec != "png"):  # Pillow below 11 opens 16-bit PNGs as I
        kind = "floating-point" if image.mode == "F" else "signed or 32-bit"
        raise HeaderError(f"{codec} of {kind} numbers: only unsigned 8-bit and 16-bit numbers are supported")
    return image


def _bits(image: Any) -> int:
    """Bits per sample of an image that Pillow has opened."""
    if hasattr(image, "tag_v2"):
        return int(image.tag_v2.get(258, (1,))[0])
    return 16 if image.mode.startswith("I") else 8
