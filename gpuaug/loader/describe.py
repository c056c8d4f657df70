"""Describes a loader and its recipe as text, without reading a sample."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from gpuaug.read import order as orders


def facts(loader: Any) -> dict[str, str]:
    source = loader.source
    own = type(source).__repr__ is not object.__repr__
    dtype = str(loader.dtype).removeprefix("torch.")
    each = [view.augment for view in loader.augment.at(loader.epoch).views]
    given = [None if getattr(one.crop, "pad", None) == "batch" else one.output_size for one in each]
    sides = ["H, W" if size is None else ", ".join(map(str, size)) for size in given]
    batch, samples = loader.batch_size, f"{loader.batch_size} samples"
    if loader.tokens is not None:
        batch, samples = "B", f"up to {samples}, {loader.tokens.tokens} patches"
    counts = [(len(list(views)), f"[{batch}, 3, {side}]") for side, views in groupby(sides)]
    sizes = ", ".join(f"{count} x {shape}" if count > 1 else shape for count, shape in counts)
    made = {
        "source": repr(source)[:200] if own else f"{type(source).__name__}: {len(source)} samples",
        "augment": "\n".join(steps(loader.augment, loader.epoch)),
        "images": f"{dtype} {sizes} on {loader.device}",
        "batches": f"{samples}, {orders.describe(loader.order)}, seed {loader.seed}, epoch {loader.epoch}",
        "workers": f"{loader.num_workers}, prefetch {loader.prefetch}",
    }
    if loader.targets is not None:
        made["targets"] = ", ".join(loader.targets.names)
    if loader.mix is not None:
        made["mix"] = repr(loader.mix)
    if loader.patch_masks is not None:
        made["patch masks"] = repr(loader.patch_masks)
    if loader.device.type == "cuda":
        made["self-check"] = str(loader.pipeline.self_check or "off")
    return made


def steps(recipe: Any, epoch: int) -> list[str]:
    """List the recipe's steps at ``epoch``, one line for each view and its copies, and the epochs of changes."""
    made = []
    for view in recipe.at(epoch).views:
        augment = view.augment
        if not view.copy:
            crop = [] if augment.crop is None else [type(augment.crop).__name__]
            copies = f"{augment.copies} views" if augment.copies > 1 else ""
            name = f"{view.name} ({copies})" if view.name and copies else view.name or copies
            listed = ", ".join([*crop, *augment.combine.entries, *augment.ops]) or "nothing"
            made.append(f"{name}: {listed}" if name else listed)
    if (sizes := getattr(recipe.at(epoch), "sizes", None)) is not None:
        made.append(f"one of {len(sizes.choose)} sizes for each step, from {min(sizes.choose)} to {max(sizes.choose)}")
    if others := [str(first) for first in recipe.schedule if first]:
        made.append(f"this is epoch {epoch}; the recipe changes at epoch {', '.join(others)}")
    return made


def text(loader: Any) -> str:
    made = facts(loader)
    width = max(map(len, made)) + 2
    below = "\n" + " " * (width + 2)  # aligns further lines of a value with its first line
    lines = [f"  {name + ':':{width}}{value}".replace("\n", below) for name, value in made.items()]
    return "\n".join(["Loader(", *lines, ")"])
