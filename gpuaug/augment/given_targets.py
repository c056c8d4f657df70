"""Targets that a caller gives with decoded images: ``augment(images, masks=..., boxes=...)``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug import checks
from gpuaug.augment.moves import check_carried
from gpuaug.augment.parameters import Chosen
from gpuaug.augment.target_mover import TargetMover
from gpuaug.augment.target_view import TargetView
from gpuaug.batch import CropWindows, Int64, Objects
from gpuaug.errors import ConfigError
from gpuaug.read.targets import join
from gpuaug.source.objects import as_arrays, find_faults
from gpuaug.targets import masks
from gpuaug.targets.batch import BatchTargets
from gpuaug.targets.objects import by_rules
from gpuaug.targets.rules import Boxes, Keypoints, Masks, Targets


def augment_targets(
    recipe: Any,
    drawn: Any,
    given: Mapping[str, Any],
    *,
    size: tuple[int, int],
    indices: Int64,
    device: torch.device,
) -> tuple[list[CropWindows], list[list[Chosen]], list[BatchTargets]]:
    """Move the targets of decoded images. Returns crop windows, choices and targets of every view.

    ``drawn``: the random numbers; ``given``: the call's masks, boxes, labels, keypoints, corners and targets, or None;
    ``size``: (H, W) of the images; ``indices``: sample numbers.
    """
    checks.instance("targets", given["targets"], Targets, optional=True)
    kinds: dict[str, Any] = {"masks": Masks, "boxes": Boxes, "keypoints": Keypoints}
    made: dict[str, Any] = {name: kind() for name, kind in kinds.items() if given[name] is not None}
    if given["corners"] is not None:
        made["boxes"] = Boxes(oriented=True)
    rules = given["targets"] or Targets(**made)
    for view in (view for view in recipe.views if view.copy == 0):
        check_carried(view.augment.prepared, rules.names)
        for name in sorted(set(getattr(view.augment.crop, "needs", ())) - set(rules.names)):
            kind = type(view.augment.crop).__name__
            raise ConfigError(f"`augment.crop` ({kind}) needs {name}. Found: {', '.join(rules.names)}. Give `{name}`.")
    table = _table(given, rules, len(indices))
    mover = TargetMover(rules, recipe)
    decoded = None
    if rules.masks is not None:
        decoded = _label_maps(given["masks"], rules.masks, (len(indices), *size), mover.lookup)
    objects = by_rules(replace(table, ids=np.arange(len(table))), rules)
    sizes = np.tile(np.array(size, dtype=np.int64), (len(indices), 1))
    matrices = np.tile(np.eye(3), (len(indices), 1, 1))
    upright = TargetView(table=table, objects=objects, matrices=matrices, sizes=sizes, annotated=sizes, decoded=decoded)
    windows = recipe.windows(drawn, *sizes.T, objects=objects, masks=decoded, empty=size)
    chosen = recipe.choose(drawn, [window.size for window in windows])
    views = mover.place(upright, windows, chosen, views=recipe.views)
    if decoded is not None:
        mover.sample(views, iter([decoded]), device)
    return windows, chosen, mover.finish(views, torch.from_numpy(indices), bad=[], keep=None, device=device)


def _table(given: Mapping[str, Any], rules: Targets, count: int) -> Objects:
    """The objects of ``count`` images in one table."""
    columns = dict[str, Any]()  # an array of each image, or one array of all
    for name in dict.fromkeys([*rules.names, "boxes", "labels", "keypoints"]):
        value = given[name]
        if value is None and (name not in rules.names or (name == "boxes" and given["corners"] is not None)):
            continue
        listed = isinstance(value, Tensor | np.ndarray | Sequence) and getattr(value, "ndim", 1) > 0
        if not listed or len(value) != count:
            found = f"{len(value)}" if isinstance(value, Sequence) else f"{value!r:.100}"
            raise ConfigError(f"`{name}` must have one entry per image, {count}. Found: {found}.")
        if name != "masks":
            columns[name] = _array(value) if isinstance(value, Tensor) else [_array(each) for each in value]
    used, rows = {*rules.names, "labels"}, list[dict[str, NDArray[Any]]]()
    for row in range(count):
        try:
            rows.append(as_arrays({name: column[row] for name, column in columns.items() if name in used}))
        except ValueError as error:
            raise ConfigError(f"`boxes`, `labels` and `keypoints`: image {row}: {error}.") from error
    table = join(rows, rules.names)
    for row, reason in find_faults(table.sample, {name: getattr(table, name) for name in columns}).items():
        raise ConfigError(f"`boxes`, `labels` and `keypoints`: image {row}: {reason}.")
    return table


def _label_maps(
    given: Any, rules: Masks, shape: tuple[int, ...], table: masks.Lookup | None
) -> list[NDArray[Any] | None]:
    """The masks as uint8 or int32 arrays, with the values that ``table`` gives."""
    values = _array(given)
    if values.shape != shape or values.dtype.kind not in "biu":
        raise ConfigError(
            f"`masks` must be integers {list(shape)}, like the images. Found: {values.dtype} {list(values.shape)}."
        )
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    if not 0 <= low <= high < 2**31:
        raise ConfigError(f"`masks` must have values from 0 to {2**31 - 1}. Found: {low} .. {high}.")
    if rules.colors is not None:
        raise ConfigError("`targets.masks.colors` must be null, because `masks` are class numbers.")
    small = values.astype(np.uint8 if values.dtype in (np.bool_, np.uint8) else np.int32, copy=False)
    return list(small if table is None else table.apply(small))


def _array(value: Any) -> NDArray[Any]:
    try:
        # numpy may make an array of objects from nested lists; a later check refuses such an array
        return value.numpy(force=True) if isinstance(value, Tensor) else np.asarray(value)
    except (ValueError, TypeError, NotImplementedError) as error:  # also sparse and meta tensors
        raise ConfigError(f"`masks`, `boxes`, `labels` and `keypoints` must be arrays. Found: {error}.") from error
