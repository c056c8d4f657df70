"""Filters of a source: ``subset``, ``exclude`` and the extensions of images."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.errors import ConfigError, SourceError
from gpuaug.source.index import range_problem, read_numbers, share
from gpuaug.source.local import open_text
from gpuaug.source.paths import redact

log = logging.getLogger("gpuaug")

# torchvision's IMG_EXTENSIONS plus GIF, AVIF and HEIF
IMAGE_EXTENSIONS = (
    ".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif", ".avif", ".heic", ".heif",
)  # fmt: skip

Subset = int | float | Sequence[int] | Tensor | str | os.PathLike[str] | None


def active(names: Any, subset: Subset, exclude: str | os.PathLike[str] | None, *, root: str) -> Tensor | None:
    """Ascending numbers of the active samples, int64; None if all are active. ``names``: the keys of all samples."""
    chosen = np.arange(len(names)) if subset is None else _subset(subset, len(names))
    if exclude is not None:
        keys = _excluded(exclude)
        out = [number for number, name in enumerate(names) if name in keys]
        if missing := len(keys) - len(out):
            log.warning("source %s: %d of %d keys in `source.exclude` are unknown", redact(root), missing, len(keys))
        left = chosen[~np.isin(chosen, out)]
        log.info("source %s: %d samples excluded by %s", redact(root), len(chosen) - len(left), os.fspath(exclude))
        if not len(left):
            raise SourceError(f"`source.exclude` must leave samples. {os.fspath(exclude)!r} lists all {len(chosen)}.")
        chosen = left
    return None if len(chosen) == len(names) else share(torch.from_numpy(chosen))


def extensions_of(extensions: Sequence[str]) -> tuple[str, ...]:
    """The extensions in lower case, each with a leading dot."""
    several = isinstance(extensions, Iterable) and not isinstance(extensions, str | bytes | Tensor | np.ndarray)
    if not several or not extensions or not all(isinstance(x, str) and x for x in extensions):
        raise ConfigError(f"`source.extensions` must be a list such as ['.jpg', '.png']. Found: {extensions!r}.")
    return tuple(x.lower() if x.startswith(".") else f".{x.lower()}" for x in extensions)


def _subset(subset: Any, total: int) -> NDArray[np.int64]:
    if isinstance(subset, bool):
        raise SourceError(f"`source.subset` must be a count, a fraction, or a FILE of sample numbers. Found: {subset}.")
    if isinstance(subset, float):
        if not 0 < subset <= 1:
            raise SourceError(f"a fraction in `source.subset` must satisfy 0 < fraction <= 1. Found: {subset}.")
        subset = max(1, round(subset * total))
    if isinstance(subset, int):
        if not 1 <= subset <= total:
            raise SourceError(f"a count in `source.subset` must be 1 .. {total}. Found: {subset}.")
        return np.arange(subset, dtype=np.int64) * total // subset
    if isinstance(subset, str | os.PathLike):
        numbers = read_numbers(subset, key="source.subset", dtype=np.int64)
    else:
        try:
            numbers = np.asarray(subset)
            if numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in "iu"):
                raise ValueError(f"{numbers.dtype} of shape {numbers.shape}")
        except (TypeError, ValueError, RuntimeError) as error:
            raise SourceError(f"`source.subset` must hold sample numbers. Found: {subset!r:.200} ({error}).") from error
    ascending = np.unique(numbers).astype(np.int64)
    if not len(ascending) or len(ascending) < len(numbers) or range_problem(ascending, total):
        text = f"{len(numbers)} numbers, {len(ascending)} of them distinct"
        if len(ascending):
            text += f", from {ascending[0]} to {ascending[-1]}"
        raise SourceError(f"sample numbers in `source.subset` must be 0 .. {total - 1}, each once. Found: {text}.")
    return ascending


def _excluded(file: str | os.PathLike[str]) -> set[bytes]:
    """Keys in a file of JSON lines. Lines without a key are ignored: a killed run may leave a part of a line."""
    if not isinstance(file, str | os.PathLike):
        raise SourceError(f"`source.exclude` must be a FILE in the format of `faults.file`. Found: {file!r:.200}.")
    path = os.path.expanduser(os.fspath(file))
    keys, ignored, first = set(), 0, ""
    try:
        with open_text(path) as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    if line.strip():
                        keys.add(os.fsencode(json.loads(line)["key"]))
                except (ValueError, KeyError, TypeError, RecursionError):
                    ignored, first = ignored + 1, first or f"line {number}: {line.strip()[:100]!r}"
        if ignored and not keys:
            raise ValueError(first)
    except (OSError, ValueError) as error:
        raise SourceError(
            f'`source.exclude` must be a FILE of JSON lines with the field "key", such as `faults.file`. '
            f"Found: {path!r} ({error})."
        ) from error
    if ignored:
        log.warning("source: lines of %s without a key are ignored: %d, such as %s", path, ignored, first)
    return keys
