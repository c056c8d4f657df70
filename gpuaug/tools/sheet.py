"""Drawing that commands share: colours, fonts, text that fits, scaled images."""

from __future__ import annotations

from typing import Any

from PIL import Image, ImageFont

from gpuaug.errors import ConfigError
from gpuaug.tools.report import printable

PAPER, INK, FAINT = (255, 255, 255), (32, 32, 36), (118, 118, 126)
MOST_PIXELS = 200_000_000  # 600 MB; viewers show no more


def blank(width: int, height: int) -> Image.Image:
    """An empty page.

    Raises:
        ConfigError: if it would have more than ``MOST_PIXELS``.
    """
    check_pixels(width * height)
    return Image.new("RGB", (width, height), PAPER)


def check_pixels(count: int) -> None:
    """Raise ConfigError if ``count`` pixels are more than ``MOST_PIXELS``."""
    if count > MOST_PIXELS:
        raise ConfigError(
            f"this would be a picture of {count / 1e6:,.0f} million pixels, and {MOST_PIXELS / 1e6:.0f} million are "
            "the most. Make `samples`, `draws` or `cell` smaller."
        )


def font(size: int) -> Any:
    """Pillow's built-in font: pictures look the same on every machine."""
    return ImageFont.load_default(size)


def fitting(text: str, face: Any, width: float, *, middle: bool = False) -> str:
    """The text, shortened at its end or in its ``middle`` to at most ``width`` pixels."""
    text = printable(text)
    if face.getlength(text) <= width:
        return text
    keep = len(text)
    while keep > 2 and face.getlength(_left(text, keep, middle)) > width:
        keep -= 1
    return _left(text, keep, middle)


def _left(text: str, keep: int, middle: bool) -> str:
    behind = keep - keep // 2 if middle else 0
    return f"{text[: keep - behind]}...{text[len(text) - behind :]}"


def wrapped(text: str, face: Any, width: float) -> list[str]:
    """Lines of at most ``width`` pixels. A wider word is shortened in its middle."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if face.getlength(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return [fitting(line, face, width, middle=True) for line in lines]


def scaled(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The image resized to (width, height): smoothed if it shrinks, its pixels as squares if it grows."""
    return image.resize(size, Image.Resampling.LANCZOS if size[0] < image.width else Image.Resampling.NEAREST)
