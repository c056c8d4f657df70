"""Which images an operation takes: their number of channels, and whether they have more than 256 levels."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from gpuaug.augment.normalize import Normalize
from gpuaug.augment.parameters import Prepared
from gpuaug.augment.policy import entry_of
from gpuaug.errors import ConfigError


def check(
    ops: Iterable[Prepared],
    *,
    channels: int,
    deep: bool,
    key: str = "augment.ops",
    crop: Any = None,
    normalize: Normalize | None = None,
) -> None:
    """Raise ConfigError, with its key, for an operation that would fail or do something else than it says.

    A user's modules and Kornia's operations without an entry are not checked.

    Args:
        ops: the operations of a recipe.
        channels: number of channels of the images.
        deep: whether the images are uint16. Floats are not: operations of 256 levels round them, as Kornia does.
        key: configuration key of ``ops``.
        crop, normalize: of the recipe. Their numbers of values are checked.
    """
    _check(tuple(ops), channels, deep, key)
    if normalize is not None:
        normalize.check_channels(channels)
    fill = getattr(crop, "fill", 0)
    if isinstance(fill, tuple) and len(fill) != channels:
        raise ConfigError(
            f"`augment.crop.fill` has values for {len(fill)} channels. Found: images with {channels}. "
            "Give one value per channel, or one for all."
        )


@lru_cache(maxsize=64)  # a recipe calls it for every batch
def _check(ops: tuple[Prepared, ...], channels: int, deep: bool, key: str) -> None:
    for where, leaf in (pair for op in ops for pair in op.leaves(f"{key}.{op.name}")):
        # a policy has no entry, but its modules have
        modules = [leaf.op] if entry_of(leaf.op) is not None else [module for slot in leaf.slots for module in slot]
        for module, entry in ((module, entry_of(module)) for module in modules):
            takes = "any" if entry is None else entry.takes
            needs = ("", "RGB images") if takes in ("rgb", "rgb levels") and channels != 3 else None
            if callable(takes):
                needs = takes(module, channels)
            if needs is not None:
                name, remedy = (f"{where}.{needs[0]}", "Change") if needs[0] else (where, "Remove")
                raise ConfigError(
                    f"`{name}` needs {needs[1]}. Found: {channels} channel{'s' if channels != 1 else ''}. "
                    f"{remedy} it, or pass other images."
                )
            if deep and takes in ("levels", "rgb levels"):
                raise ConfigError(
                    f"`{where}` works on 256 levels. Found: uint16 images. Convert them: "
                    "`images.float().div(257).round().to(torch.uint8)`."
                )
