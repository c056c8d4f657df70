"""The two sides of a comparison: steps and choices of a recipe, and the same by torchvision, timm or Pillow."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import PIL.Image
import torch

from gpuaug.augment.auto import FACTORS, Policy
from gpuaug.augment.auto_timm import TimmAugment
from gpuaug.augment.multi_view import MultiView
from gpuaug.augment.ops.kornia_private import fixed_order
from gpuaug.augment.ops.pillow import PillowOp
from gpuaug.augment.parameters import Chosen, Prepared, Size
from gpuaug.augment.policy import by_class
from gpuaug.augment.recipe import Augment, View
from gpuaug.batch import CropWindows
from gpuaug.loader.loader import Loader
from gpuaug.random.generators import restore_generators
from gpuaug.tools import peers
from gpuaug.tools.parity.differences import Image
from gpuaug.tools.peers import timm, torchvision

NO_LEVEL = ("identity", "auto_contrast", "equalize", "invert")
Call = tuple[str, dict[str, Any]]  # a function of torchvision.transforms.v2, or "policy", and its arguments


def choose(
    loader: Loader, view: View, ops: dict[str, Any], size: tuple[int, ...], *, indices: Sequence[int], epoch: int
) -> tuple[Augment, list[Chosen]]:
    """Let some operations of a view choose for images of ``size`` (H, W, ...), with the recipe's random numbers.

    Returns the operations without crop and normalization, and what each operation chose.
    """
    augment = view.augment.replace(crop=None, combine=None, normalize=None, copies=1, ops=ops)
    recipe: Augment | MultiView = MultiView(views={view.name: augment}) if view.name else augment
    drawn = recipe.draw(seed=loader.seed, epoch=epoch, indices=indices)
    return augment, recipe.choose(drawn, [(size[0], size[1])])[0]


def augmented(
    loader: Loader, view: View, ops: dict[str, Any], image: Image, *, index: int, epoch: int
) -> tuple[list[Chosen], Image]:
    """Run some operations of a view on the crop of one sample, uint8 [H, W, 3].

    Returns what each operation chose, and the image [H, W, 3] in levels 0..255.
    """
    augment, chosen = choose(loader, view, ops, image.shape, indices=[index], epoch=epoch)
    made = augment.run(torch.from_numpy(image)[None].to(loader.device), chosen)
    return chosen, np.asarray(made[0].permute(1, 2, 0).float().cpu()) * 255


def run(calls: Sequence[Call], image: Image) -> Image:
    """Run calls in float on an image, uint8 [H, W, 3]. Returns levels. Policies run in uint8, on Pillow images."""
    x = torch.from_numpy(image).permute(2, 0, 1) / 255
    for name, given in calls:
        if name == "policy":
            levels = applied(**given, image=(x * 255).round().byte().permute(1, 2, 0).numpy())
            x = torch.from_numpy(levels).permute(2, 0, 1) / 255
        else:
            x = getattr(torchvision()[0].functional, name)(x, **given)
    return np.asarray(x.permute(1, 2, 0)) * 255


def crop_by_pillow(image: Image, window: CropWindows) -> Image:
    """Crop, resize and place one image, uint8 [H, W, 3]."""
    fill, resample = tuple(np.broadcast_to(window.fill, 3).tolist()), PIL.Image.Resampling[window.interpolation.upper()]
    top, left, height, width = window.window[0].tolist()
    (h, w), (y, x) = window.resized[0].tolist(), window.offset[0].tolist()
    part = PIL.Image.fromarray(np.ascontiguousarray(image[top : top + height, left : left + width]))
    if (h, w) != (height, width):
        part = part.resize((w, h), resample)
    canvas = PIL.Image.new("RGB", window.size[::-1], fill)
    canvas.paste(part, (x, y))
    return np.array(canvas)


def calls_of(ops: Sequence[Prepared], chosen: Sequence[Chosen]) -> list[Call] | str:
    """The calls that match what one sample takes. If an operation has no counterpart, the reason as text."""
    calls: list[Call] = []
    for op, own in zip(ops, chosen, strict=True):
        if isinstance(op.op, Policy) and not op.chains:
            calls.append(("policy", {"op": op, "chosen": own}))
            continue
        for slot, choice in enumerate(own.choice[0].tolist()):
            module = op.slots[slot][choice]
            make = None if op.seeded or op.chains else by_class(TABLE, module)
            params = {} if choice < 0 else {k: v[0].tolist() for k, v in own.params[slot][choice].items()}
            made = [] if choice < 0 else make and make(module, params)
            if made is None:
                return f"`{op.name}`: torchvision has no {type(module).__name__} with the same random numbers"
            calls += made
    return calls


Make = Callable[[Any, dict[str, Any]], list[Call] | None]  # (module, parameters) to calls


def _same(function: str, **names: str) -> Make:
    """A call of ``function`` with Kornia's values. ``names`` maps torchvision's names to Kornia's."""
    return lambda op, p: [(function, {theirs: p[ours] for theirs, ours in names.items()})]


def _jitter(op: Any, p: dict[str, Any]) -> list[Call]:
    steps = ("brightness", "contrast", "saturation", "hue")
    names = [steps[k] for k in fixed_order(op) or ()]
    drawn = {name: p[f"{name}_factor"] for name in names}
    return [(f"adjust_{k}", {f"{k}_factor": v}) for k, v in drawn.items() if v != (0 if k == "hue" else 1)]


def _blur(op: Any, p: dict[str, Any]) -> list[Call] | None:
    if op.flags["border_type"].name != "REFLECT":
        return None
    size = op.flags["kernel_size"]
    ky, kx = (size, size) if isinstance(size, int) else size
    return [("gaussian_blur", {"kernel_size": [kx, ky], "sigma": [p["sigma"]] * 2})]


_BOX = {"i": "ys", "j": "xs", "h": "heights", "w": "widths"}
TABLE: dict[str, Make] = {
    "RandomHorizontalFlip": _same("horizontal_flip"),
    "RandomVerticalFlip": _same("vertical_flip"),
    "RandomGrayscale": lambda op, p: [("rgb_to_grayscale", {"num_output_channels": 3})],
    "RandomEqualize": _same("equalize"),
    "RandomAutoContrast": _same("autocontrast"),
    "RandomHue": _same("adjust_hue", hue_factor="hue_factor"),
    "RandomSharpness": _same("adjust_sharpness", sharpness_factor="sharpness"),
    "RandomGamma": _same("adjust_gamma", gamma="gamma_factor", gain="gain_factor"),
    "RandomPosterize": lambda op, p: [("posterize", {"bits": int(p["bits_factor"])})],
    "RandomInvert": lambda op, p: [("invert", {})] if float(op.flags["max_val"]) == 1 else None,
    "ColorJitter": _jitter,
    "RandomSolarize": lambda op, p: None if p.get("additions") else [("solarize", {"threshold": p["thresholds"]})],
    "RandomGaussianBlur": _blur,
    "RandomErasing": lambda op, p: [
        ("erase", {k: int(p[v]) for k, v in _BOX.items()} | {"v": torch.tensor(p["values"])})
    ],
}


def library(policy: Policy) -> str:
    """The library that the policy reproduces, with its version."""
    of_timm = isinstance(policy, TimmAugment)
    return f"timm {timm().__version__}, PIL" if of_timm else f"torchvision {torchvision()[1]}, PIL"


def applied(op: Prepared, chosen: Chosen, image: Image) -> Image:
    """Run the library's functions for one sample's choices on its image, uint8 [H, W, 3]."""
    by = _by_timm if isinstance(op.op, TimmAugment) else _by_torchvision
    made = PIL.Image.fromarray(image)
    for slot, alternative in enumerate(chosen.choice[0].tolist()):
        if alternative < 0:
            continue
        module: Any = op.slots[slot][alternative]
        level = float(chosen.params[slot][alternative]["magnitude"][0])
        if module.name == "posterize" and level == 0:  # Pillow 13 refuses it; older releases give black
            made = PIL.Image.new("RGB", made.size)
        else:
            made = by(module.name.title().replace("_", ""), level, made, module)
    return np.array(made)


def _by_torchvision(name: str, level: float, image: PIL.Image.Image, module: PillowOp) -> Any:
    from torchvision.transforms import InterpolationMode, autoaugment

    mode = InterpolationMode(module.interpolation)
    level -= module.name in FACTORS
    return autoaugment._apply_op(image, name, level, interpolation=mode, fill=list(module.fill))


def _by_timm(name: str, level: float, image: PIL.Image.Image, module: PillowOp) -> Any:
    from timm.data.auto_augment import NAME_TO_OP

    if name.startswith("Translate"):
        name, level = f"{name}Rel", -level / image.size[name == "TranslateY"]
    levels = () if module.name in NO_LEVEL else (int(level) if name.startswith(("Poster", "Solar")) else level,)
    resample = PIL.Image.Resampling[module.interpolation.upper()]
    return NAME_TO_OP[name](image, *levels, fillcolor=module.fill, resample=resample)


# -- choices of policies


DRAWS, DRAWS_OF_CHAINS = 10_000, 1_000  # AugMix computes pixels for each draw
# Limits that chance exceeds in less than 1 of 10,000 policies
SIGMAS = 5.0  # of the difference between two numbers of choices
DISTANCE = 2.5  # Kolmogorov-Smirnov distance, times sqrt(n m / (n + m))

Levels = dict[str, list[float]]  # operation: its level each time it was chosen


def compare_choices(
    loader: Loader, view: View, op: Prepared, size: tuple[int, ...], *, epoch: int
) -> dict[str, dict[str, float]]:
    """Compare our choices, of many samples, with as many choices of the library. ``size`` begins with H, W.

    For each operation: times per image (``ours``, ``theirs``), the Kolmogorov-Smirnov distance of the levels
    (``levels``), and whether both are equal, except for chance.
    """
    count, made, theirs = DRAWS_OF_CHAINS if op.chains else DRAWS, {}, Levels()
    _, (chosen,) = choose(loader, view, {op.name: op.op}, size, indices=range(count), epoch=epoch)
    library = _timm if isinstance(op.op, TimmAugment) else _torchvision
    transform, image = library(op.op, (size[0], size[1]), theirs)
    with restore_generators():
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        for _ in range(count):
            transform(image)
    ours = _ours(op, chosen)
    for name in sorted(ours.keys() | theirs.keys()):
        a, b = (np.sort(np.round(levels.get(name, []), 3)) for levels in (ours, theirs))
        distance, both = 0.0, np.concatenate([a, b])
        if len(a) and len(b) and name not in NO_LEVEL:
            below = [np.searchsorted(each, both, "right") / len(each) for each in (a, b)]
            distance = float(np.abs(below[0] - below[1]).max())
        as_often = abs(len(a) - len(b)) <= SIGMAS * len(both) ** 0.5
        equal = as_often and distance * (len(a) * len(b) / len(both)) ** 0.5 <= DISTANCE
        made[name] = {"ours": len(a) / count, "theirs": len(b) / count, "levels": distance, "equal": equal}
    return made


def _ours(op: Prepared, chosen: Chosen) -> Levels:
    levels: Levels = {}
    for slot, modules in enumerate(op.slots):
        for alternative, module in enumerate(modules):
            values = chosen.params[slot][alternative]["magnitude"][chosen.choice[:, slot] == alternative]
            levels.setdefault(str(module.name), []).extend(values.tolist())
    return {name: values for name, values in levels.items() if values}


def _torchvision(policy: Policy, size: Size, levels: Levels) -> tuple[Any, PIL.Image.Image]:
    """torchvision's policy, which adds to ``levels`` what it chooses, and an image for it."""
    v2 = peers.torchvision()[0]

    class Recorder(getattr(v2, type(policy).__name__)):  # type: ignore[misc]
        def _apply_image_or_video_transform(self, image: Any, transform_id: str, magnitude: float, **_: Any) -> Any:
            name = _name(transform_id)
            value = magnitude * (255 if name == "solarize" else 1) + (name in FACTORS)
            whole = name.startswith(("translate", "posterize"))
            levels.setdefault(name, []).append(int(value) if whole else value)
            return image

    given = {k: getattr(policy, k) for k in inspect.signature(Recorder.__init__).parameters if hasattr(policy, k)}
    if "policy" in given:
        given["policy"] = v2.AutoAugmentPolicy(given["policy"])
    given["interpolation"] = v2.InterpolationMode(policy.interpolation)
    return Recorder(**given), PIL.Image.new("RGB", size[::-1])


def _timm(policy: TimmAugment, size: Size, levels: Levels) -> tuple[Any, PIL.Image.Image]:
    """As :func:`_torchvision`, for timm's policies."""
    peers.timm()
    from timm.data import auto_augment

    def record(image: Any, level: float = 0.0, *, theirs: str, **_: Any) -> Any:
        name, scale = _name(theirs), {"TranslateXRel": -size[1], "TranslateYRel": -size[0]}.get(theirs, 1)
        levels.setdefault(name, []).append(min(level, 8) if name == "posterize" else level * scale)
        return image

    makers = {"rand": auto_augment.rand_augment_transform, "augmix": auto_augment.augment_and_mix_transform}
    kind, extra = policy.config.partition("-")[0], {"translate_pct": 0.3} if policy.config.startswith("augmix") else {}
    transform = makers.get(kind, auto_augment.auto_augment_transform)(policy.config, {"img_mean": policy.fill, **extra})
    for op in getattr(transform, "ops", None) or [op for pair in transform.policy for op in pair]:
        op.aug_fn = partial(record, theirs=op.name)
    return transform, PIL.Image.new("RGB", (1, 1))


def _name(theirs: str) -> str:
    """The name of the PillowOp, such as ``shear_x`` for ``ShearX`` or ``color`` for timm's ``ColorIncreasing``."""
    theirs = re.sub("(Increasing|Original|Rel)$", "", theirs)
    return re.sub("(?<!^)([A-Z])", r"_\1", theirs).lower()
