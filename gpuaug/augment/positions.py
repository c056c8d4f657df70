"""Where the pixels of a view come from, and which patches of two views show the same part of an image."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuaug import checks
from gpuaug.augment.crop import pair
from gpuaug.augment.moves import check_carried, moves
from gpuaug.augment.recipe import Drawn, RecipeBase
from gpuaug.batch import CropWindows
from gpuaug.errors import ConfigError
from gpuaug.targets import geometry


def matrices(
    recipe: RecipeBase,
    drawn: Drawn,
    windows: Sequence[CropWindows],
    combined: Any = None,
    keep: Tensor | None = None,
) -> list[Tensor]:
    """For each view, float64 [B, 3, 3] on the CPU: from positions in the image to positions in the view.

    Args:
        recipe: the recipe of the batch's epoch.
        drawn: the batch's random numbers.
        windows: of each view.
        combined: how the outputs were put together from tiles; None: they were not.
        keep: int64 [n], the rows to return; None: all.

    Raises:
        ConfigError: an operation moves pixels, but not by a matrix.
    """
    made = []
    sizes = [window.size for window in windows] if combined is None else [combined.layout.size]
    chosen = recipe.choose(drawn, sizes)
    for view, window, choices in zip(recipe.views, windows, chosen, strict=True):
        path = f"augment.views.{view.name}.ops" if view.name else "augment.ops"
        check_carried(view.augment.prepared, ("matrices",), path=path)
        first, size = (geometry.crop(window), window.size) if combined is None else (combined.matrices, sizes[0])
        ops = [move for move in moves(view.augment.prepared, choices, size) if isinstance(move, np.ndarray)]
        if recipe.resized is not None:
            ops.append(np.diag([recipe.resized[1] / size[1], recipe.resized[0] / size[0], 1.0]))
        made.append(torch.from_numpy(reduce(lambda whole, op: op @ whole, ops, first)))
    return made if keep is None else [each[keep] for each in made]


def match_patches(
    a: Tensor, b: Tensor, *, size: int | tuple[int, int], other: int | tuple[int, int], patch: int = 16
) -> tuple[Tensor, Tensor]:
    """Find where the patches of view ``a`` lie in view ``b``, for losses on positions (PixPro, DenseCL, VICRegL).

    The overlap of the two views are the patches of ``a`` that are inside ``b``. The patch of ``b`` there is
    ``places.floor()``; in units of distance between patches, ``places - 0.5`` are positions of the patches' centres.

    Args:
        a, b: [B, 3, 3], the matrices of two views, as in ``batch.matrices``.
        size: (H, W) of view ``a`` in pixels; an int is a square.
        other: (H, W) of view ``b``.
        patch: side of a patch in pixels.

    Returns:
        ``places``, float64 [B, h, w, 2], (x, y) of the centre of each patch of ``a`` in view ``b``, in patches: 0 is
        the left or top edge. ``inside``, bool [B, h, w], whether this is inside view ``b``.

    Raises:
        ConfigError: the matrices or sizes do not fit.

    >>> same = torch.eye(3)[None]
    >>> half = torch.tensor([[[2.0, 0, 0], [0, 2, 0], [0, 0, 1]]])  # the top left quarter, enlarged
    >>> places, inside = match_patches(same, half, size=64, other=64, patch=16)
    >>> inside[0].int().tolist()
    [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    """
    for name, matrix in (("a", a), ("b", b)):
        if not isinstance(matrix, Tensor) or matrix.shape[1:] != (3, 3) or matrix.is_complex():
            given = list(matrix.shape) if isinstance(matrix, Tensor) else type(matrix).__name__
            raise ConfigError(f"`{name}` must be matrices [B, 3, 3] of a view, as in batch.matrices. Found: {given}.")
    if len(a) != len(b):
        raise ConfigError(f"`a` and `b` must be of the same samples. Found: {len(a)} and {len(b)} matrices.")
    (height, width), (H, W) = pair("size", size), pair("other", other)
    checks.whole_number("patch", patch, 1)
    if any(side % patch for side in (height, width, H, W)):
        raise ConfigError(f"`patch` must divide the sides of both views. Found: {patch}, {size} and {other}.")
    a, b = a.double(), b.double()
    y, x = (torch.arange(side // patch, device=a.device, dtype=torch.float64) + 0.5 for side in (height, width))
    centres = torch.stack([*torch.meshgrid(x * patch, y * patch, indexing="xy"), torch.ones(len(y), len(x)).to(x)], -1)
    moved = torch.einsum("bij,hwj->bhwi", b @ torch.linalg.inv_ex(a).inverse, centres)
    places = moved[..., :2] / moved[..., 2:] / patch
    limits = torch.tensor([W, H], device=a.device, dtype=torch.float64) / patch
    return places, ((places >= 0) & (places < limits)).all(-1) & (moved[..., 2] > 0)
