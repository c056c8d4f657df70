"""What the pictures that commands draw have in common: colours, fonts, text that fits, images that are scaled."""

from __future__ import annotations

from typing import Any

from PIL import Image, ImageFont

PAPER, INK, FAINT = (255, 255, 255), (32, 32, 36), (118, 118, 126)


def font(size: int) -> Any:
    """Pillow's own, so that pictures look the same everywhere."""
    return ImageFont.load_default(size)


def fitting(text: str, face: Any, width: float, *, middle: bool = False) -> str:
    """The text, its end or its ``middle`` left out where it is wider than ``width`` pixels."""
    text = text.encode("utf-8", "replace").decode()  # names need not be UTF-8
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
    """Lines of at most ``width`` pixels; of a word that is wider its middle is left out."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if face.getlength(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return [fitting(line, face, width, middle=True) for line in lines]


def scaled(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The image at (width, height): smoothed where it shrinks, its pixels as squares where it grows."""
    return image.resize(size, Image.Resampling.LANCZOS if size[0] < image.width else Image.Resampling.NEAREST)
