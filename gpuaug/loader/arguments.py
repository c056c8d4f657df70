"""Checks and converts arguments of the loader."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpuaug import checks, machine
from gpuaug.augment.crop import ResizeToSequence
from gpuaug.augment.domains import check as check_domains
from gpuaug.augment.mix import Mix
from gpuaug.augment.mosaic import TileMixUp
from gpuaug.augment.policy import entry_of
from gpuaug.augment.progressive import Recipe, views_of
from gpuaug.augment.recipe import FLIPPED
from gpuaug.errors import ConfigError
from gpuaug.read.order import Sequential, Shuffle
from gpuaug.read.tokens import Tokens

if TYPE_CHECKING:
    from gpuaug.targets.rules import Targets

log = logging.getLogger("gpuaug")

NOT_A_DATASET = (
    "it takes the place of a DataLoader. Pass the loader itself. Lightning's trainer takes the loader. With Accelerate "
    "and Fabric, iterate over the loader. For Hugging Face's Trainer, see examples/hugging_face_trainer.py."
)


class NamedLog(logging.LoggerAdapter[logging.Logger]):
    """Puts the name of a loader before its messages."""

    def process(self, msg: Any, kwargs: Any) -> Any:
        name = (self.extra or {})["name"]
        return (f"{name}: {msg}" if name else msg), kwargs


def whole_numbers(name: str, values: Any) -> Tensor:
    """Convert whole numbers >= 0 to int64 [n] on the CPU."""
    try:
        numbers = torch.as_tensor(values, device="cpu")
        if numbers.ndim == 1 and not len(numbers):
            return numbers.to(torch.int64)
        torch.iinfo(numbers.dtype)  # TypeError for float and bool types
        if numbers.ndim != 1 or int(numbers.min()) < 0:
            raise ValueError(f"{numbers.dtype} {list(numbers.shape)}")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ConfigError(f"`{name}` must be whole numbers >= 0. Found: {values!r:.200}.") from error
    return numbers.to(torch.int64)


def choose_order(order: Any, shuffle: bool | None) -> Any:
    if checks.flag("shuffle", shuffle, optional=True) is None:
        return "shuffle" if order is None else order
    named = "shuffle" if shuffle else "sequential"
    # A configuration always has an order object, such as its default `Shuffle()`. `shuffle` may replace this object.
    default = order is None or isinstance(order, Shuffle | Sequential)
    if not default and not (isinstance(order, str) and order == named):
        raise ConfigError(f"`shuffle={str(shuffle).lower()}` means `order={named}`, but `order` is {order!r}. Set one.")
    return named


def choose_last(last: str | None, drop_last: bool) -> str | None:
    """Combine ``last`` and ``drop_last``; None if neither is set."""
    if not checks.flag("drop_last", drop_last):
        return last
    if last not in (None, "drop"):
        raise ConfigError(f"`drop_last=true` means `last=drop`, but `last` is {last!r}. Set one of them.")
    return "drop"


def check_recipe(recipe: Recipe, channels: int, *, raw: bool = False) -> None:
    """Raise ConfigError if an operation cannot take images with ``channels``, or a crop is only for tensors."""
    for key, view in views_of(recipe):
        crop, normalize = view.augment.crop, view.augment.normalize
        if raw and (combine := view.augment.combine):
            raise ConfigError(
                f"`{key}.{combine.key}` needs images of 8 bits. Found: {combine}, decode.pixels=raw. Use its default."
            )
        ops = view.augment.prepared
        check_domains(ops, channels=channels, deep=False, key=f"{key}.ops", crop=crop, normalize=normalize)
        if isinstance(crop, ResizeToSequence):
            for each in ops:
                for name, op in each.leaves(f"{key}.ops.{each.name}"):
                    _check_stays(name, op, () if each.members else FLIPPED)
        if getattr(crop, "interpolation", None) == "nearest":
            raise ConfigError(
                f"`{key}.crop.interpolation` must be bilinear or bicubic in a loader. Found: nearest, which is for "
                "recipes that are called with tensors."
            )


def _check_stays(name: str, op: Any, allowed: Iterable[str]) -> None:
    """Raise ConfigError if an operation moves pixels: `Batch.patches` would lose the image. ``allowed``: classes."""
    for module in (module for slot in op.slots for module in slot):
        entry = entry_of(module)
        moves = entry is not None and (entry.matrix is not None or entry.affects == "field")
        if moves and type(module).__name__ not in allowed:
            raise ConfigError(
                f"`{name}` must not move the image inside its padding with gpuaug.ResizeToSequence. Found: "
                f"{type(module).__name__}. Use operations of values, and flips that are entries of `ops`."
            )


def check_targets(targets: Any, source: Any, recipe: Recipe, mix: Any) -> Targets | None:
    """Return ``targets``. Raise ConfigError if the source, the recipe or ``mix`` does not fit the targets."""
    names = getattr(targets, "names", ())
    for key, view in views_of(recipe):
        missing = sorted(set(getattr(view.augment.crop, "needs", ())) - set(names))
        if missing:
            raise ConfigError(
                f"`{key}.crop` ({type(view.augment.crop).__name__}) needs {missing[0]}, but `targets` has "
                f"{', '.join(names) or 'none'}. Set `targets`, or use another crop."
            )
    known = source.target_kinds
    if targets is None:
        if known:
            log.info("the source has %s: set `targets` to use them", ", ".join(sorted(known)))
        return None
    from gpuaug.augment.moves import check_carried
    from gpuaug.targets.rules import Targets

    checks.instance("targets", targets, Targets)
    for key, view in views_of(recipe):
        name, mixup = view.augment.combine.named(TileMixUp)
        if mixup is not None and targets.masks is not None:
            raise ConfigError(
                f"`{key}.combine.{name}` (TileMixUp) cannot blend masks. Found: targets.masks. "
                f"Set `targets.masks=null`, or remove `{key}.combine.{name}`."
            )
        if view.copy == 0:
            check_carried(view.augment.prepared, names, path=f"{key}.ops")
    if known is not None and (absent := sorted(set(names) - set(known))):
        if absent[0] == "corners":
            raise ConfigError(
                "`targets.boxes.oriented` needs a source with the corners of oriented boxes. Found: "
                f"{type(source).__name__} with {', '.join(sorted(known))} (YOLO's label files have "
                "them if there are polygons, and all have 4 corners). Set it to false, or choose another source."
            )
        without = f"targets.{absent[0]}=null" if len(absent) < len(names) else "targets=none"
        raise ConfigError(
            f"`targets.{absent[0]}` needs a source with {absent[0]}. Found: {type(source).__name__} with "
            f"{', '.join(sorted(known)) or 'no targets'}. Set `{without}`, or choose another source."
        )
    flip, points = getattr(targets.keypoints, "flip", None), source.num_keypoints
    if flip is not None and points is not None and len(flip) != points:
        raise ConfigError(
            f"`targets.keypoints.flip` must name the mirror image of each of the {points} keypoints of the source. "
            f"Found: {len(flip)} numbers."
        )
    if isinstance(mix, Mix):
        raise ConfigError(
            "`mix` mixes labels of whole images, but `targets` is set. Found: Mix. Set `mix=none` or `targets=none`, "
            "or use a mix for targets: mix=mixup_objects, cutmix_masks, classmix or copy_paste."
        )
    return targets


def check_mix(mix: Any, recipe: Recipe, targets: Any) -> Any:
    """Return ``mix``. Raise ConfigError if it does not fit the recipe or the targets."""
    if mix is None or isinstance(mix, Mix):
        return mix
    from gpuaug.augment.mix_targets import ClassMix, CopyPaste, CutMixMasks, MixObjects
    from gpuaug.augment.mix_targets import check_targets as check_targets_of_mix  # other runs do not need it

    checks.instance("mix", mix, Mix, MixObjects, CutMixMasks, ClassMix, CopyPaste, optional=True)
    if len(recipe.at(0).views) > 1:
        raise ConfigError(
            f"`mix` ({type(mix).__name__}) needs a recipe with one view. Found: {len(recipe.at(0).views)} views."
        )
    check_targets_of_mix(mix, targets)
    return mix


def check_tokens(tokens: Tokens | None, recipe: Recipe, others: Mapping[str, Any]) -> None:
    """Raise ConfigError if a recipe does not fit ``tokens``. ``others``: settings that must be None."""
    if tokens is None:
        return
    for key, view in views_of(recipe):
        count = len(recipe.at(0).views)
        if not isinstance(view.augment.crop, ResizeToSequence) or count > 1:
            raise ConfigError(
                "`batch_size` as gpuaug.Tokens needs a recipe with one view and the crop gpuaug.ResizeToSequence. "
                f"Found: {count} views, `{key}.crop` {view.augment.crop!r:.99}."
            )
    if given := [name for name, value in others.items() if value is not None]:
        raise ConfigError(f"`{given[0]}` must be none if `batch_size` is gpuaug.Tokens. Remove one of them.")


def check_patch_masks(patch_masks: Any, recipe: Recipe, seed: int) -> Any:
    """Return the function that draws the patch masks of a batch; None if there are none."""
    if patch_masks is None:
        return None
    from gpuaug.augment.patch_masks import GENERATORS, for_recipe

    for augment in (view.augment for each in recipe.schedule.values() for view in each.views):
        if augment.sizes or augment.combine:
            found = "`sizes`" if augment.sizes else augment.combine
            raise ConfigError(f"a recipe must have no {found} with `patch_masks`. Remove one of them.")
    return for_recipe(checks.instance("patch_masks", patch_masks, *GENERATORS), recipe, seed=seed)


def choose_workers(num_workers: int | None, source: Any, log: NamedLog) -> int:
    if num_workers is not None:
        return num_workers
    if source.mapped:
        log.info("num_workers 0: the source is memory-mapped, and workers would only add a copy")
        return 0
    cores, ranks = machine.usable_cpus(), machine.local_world_size()
    # Workers only read bytes, so one worker keeps several decoding threads busy. While one waits for a server, the
    # other sends requests.
    workers = min(4, max(1 if source.read_many is None else 2, cores // (2 * ranks)))
    log.info("num_workers %d (CPUs: %d, ranks on this machine: %d)", workers, cores, ranks)
    return workers
