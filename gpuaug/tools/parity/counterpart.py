"""The two sides of a comparison: steps of a recipe, and the same steps by torchvision or Pillow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpuaug.augment.ops import by_class, fields
from gpuaug.augment.ops.kornia_private import fixed_order
from gpuaug.augment.ops.pillow import PillowOp
from gpuaug.augment.parameters import Chosen, Params, Prepared, tensors
from gpuaug.augment.recipe import Augment, Drawn, MultiView, View
from gpuaug.batch import CropWindows
from gpuaug.loader.loader import Loader
from gpuaug.tools.parity.differences import Image, Sample
from gpuaug.tools.peers import torchvision

Call = tuple[str, dict[str, Any]]  # a function of torchvision.transforms.v2 and its arguments, for pixels in 0..1


class Step:
    """The recipe of a view with changed settings, such as ``crop=None``. The random numbers stay those of the view."""

    def __init__(self, loader: Loader, view: View, **changes: Any) -> None:
        self.augment = view.augment.replace(**changes, copies=1)
        self.recipe: Augment | MultiView = MultiView(views={view.name: self.augment}) if view.name else self.augment
        self._seed, self._device = loader.seed, loader.device

    def draw(self, sample: Sample, epoch: int) -> Drawn:
        return self.recipe.draw(seed=self._seed, epoch=epoch, indices=[sample.index])

    def choose(self, sample: Sample, image: Image, epoch: int) -> list[Chosen]:
        """The choices and parameters of every operation, as a batch of one."""
        return self.recipe.choose(self.draw(sample, epoch), [(image.shape[0], image.shape[1])])[0]

    def run(self, image: Image, chosen: list[Chosen]) -> Image:
        """Augment uint8 [H, W, 3]. Returns [H, W, 3] in levels, without the normalization."""
        made = self.augment.run(torch.from_numpy(image)[None].to(self._device), chosen)
        pixels = np.asarray(made[0].permute(1, 2, 0).float().cpu())
        return levels(pixels, self.augment)


def levels(pixels: Image, augment: Augment) -> Image:
    """Undo the normalization of pixels [H, W, 3], and scale them to levels 0..255."""
    if (normalize := augment.normalize) is not None:
        pixels = pixels * np.array(normalize.settings["std"]) + np.array(normalize.settings["mean"])
    return pixels * 255


def run(calls: list[Call], image: NDArray[Any], *, uint8: bool) -> NDArray[Any]:
    """Run calls on an image, uint8 [H, W, 3], in uint8 or in float. Returns levels."""
    x = torch.from_numpy(image).permute(2, 0, 1)
    x, white = (x, 255) if uint8 else (x.float() / 255, 1)
    for name, given in calls:
        if name == "erase":
            given = {**given, "v": torch.tensor(given["v"] * white).to(x.dtype)}
        elif name == "solarize":
            given = {"threshold": given["threshold"] * white}
        x = getattr(torchvision()[0].functional, name)(x, **given)
    return np.asarray(x.permute(1, 2, 0)).astype(np.float32) * (255 // white)


def crop_by_pillow(image: NDArray[Any], window: CropWindows, *, mask_fill: int | None = None) -> NDArray[Any]:
    """Crop, resize and place one image, uint8 [H, W, 3], or one mask, int32 [H, W], which needs ``mask_fill``."""
    fill: Any = tuple(np.broadcast_to(window.fill, 3).tolist()) if mask_fill is None else mask_fill
    resample = PIL.Image.Resampling[window.interpolation.upper() if mask_fill is None else "NEAREST"]
    top, left, height, width = window.window[0].tolist()
    (h, w), (y, x) = window.resized[0].tolist(), window.offset[0].tolist()
    part = PIL.Image.fromarray(np.ascontiguousarray(image[top : top + height, left : left + width]))
    if (h, w) != (height, width):
        part = part.resize((w, h), resample)
    canvas = PIL.Image.new(part.mode, window.size[::-1], fill)
    canvas.paste(part, (x, y))
    return np.array(canvas)


def counterpart(module: nn.Module, params: Params) -> list[Call] | str:
    """torchvision's calls that match a Kornia operation for one sample. If there are none, the reason as text."""
    if isinstance(module, PillowOp):
        return "this operation gives the levels of Pillow. torchvision's functions for tensors give other levels"
    make = by_class(TABLE, module)
    if make is None:
        return f"torchvision has no counterpart of {type(module).__name__} that takes the same parameters"
    return make(module, {k: v.tolist() if v.ndim < 3 else torch.from_numpy(v) for k, v in params.items()})


def calls_of(
    ops: Sequence[Prepared], chosen: Sequence[Chosen], size: tuple[int, ...]
) -> tuple[list[Call] | str, set[str]]:
    """torchvision's calls for the modules that one sample takes, and the class names of these modules.

    If a module has no counterpart, the reason replaces the calls. ``size`` is the image's (H, W).
    """
    calls: list[Call] = []
    kinds = set()
    for op, own, slot, choice in ((op, c, *place) for op, c in zip(ops, chosen, strict=True) for place in taken(c)):
        module, values = op.slots[slot][choice], own.params[slot][choice]
        kinds.add(type(module).__name__)
        params = {k: v[0] for k, v in values.items()}
        if own.keys is not None:  # add further parameters, such as noise per pixel
            made = fields(module, tensors(values), torch.from_numpy(own.keys), (size[0], size[1]))
            params |= {k: v[0].numpy() for k, v in made.items()}
        functions = counterpart(module, params)
        if isinstance(functions, str):
            return functions, kinds
        calls += functions
    return calls, kinds


def taken(chosen: Chosen) -> list[tuple[int, int]]:
    """The slots in which one sample takes a module, with the number of the module."""
    return [(slot, choice) for slot, choice in enumerate(chosen.choice[0].tolist()) if choice >= 0]


def only(chosen: Chosen, slots: Iterable[int]) -> Chosen:
    """The same choices in ``slots``, and none in the other slots."""
    kept = np.isin(np.arange(chosen.choice.shape[1]), [*slots])
    return replace(chosen, choice=np.where(kept, chosen.choice, -1))


def why(kinds: Iterable[str], reference: str) -> str:
    """Why these Kornia classes differ from ``reference``, which is torchvision in float or in uint8."""
    cut = reference.endswith("uint8")
    reasons = [table[kind] for table in (_ALWAYS, _UINT8 if cut else _FLOAT) for kind in sorted(kinds) if kind in table]
    return next(iter(reasons), _CUT if cut else "")


def text(calls: list[Call]) -> str:
    """The calls as a caption, such as ``adjust_hue(0.0312), ...``."""

    def short(value: Any) -> str:
        if isinstance(value, list):
            return f"({', '.join(map(short, value))})"
        return "a field" if isinstance(value, Tensor) else f"{value:.3g}" if isinstance(value, float) else str(value)

    return ", ".join(f"{name}({', '.join(map(short, given.values()))})" for name, given in calls)


# --- the table

Make = Callable[[Any, dict[str, Any]], list[Call] | str]  # (module, parameters) to calls


def _same(function: str, **names: str) -> Make:
    """A call of ``function`` with Kornia's values. ``names`` maps torchvision's names to Kornia's."""
    return lambda op, p: [(function, {theirs: p[ours] for theirs, ours in names.items()})]


def _jitter(op: Any, p: dict[str, Any]) -> list[Call]:
    steps = ("brightness", "contrast", "saturation", "hue")
    names = [steps[k] for k in fixed_order(op) or ()]
    drawn = {name: p[f"{name}_factor"] for name in names}
    return [(f"adjust_{k}", {f"{k}_factor": v}) for k, v in drawn.items() if v != (0 if k == "hue" else 1)]


def _solarize(op: Any, p: dict[str, Any]) -> list[Call] | str:
    if p.get("additions"):
        return f"torchvision's solarize adds no value before it inverts; Kornia's adds {p['additions']:.3g} here"
    return [("solarize", {"threshold": p["thresholds"]})]


def _blur(op: Any, p: dict[str, Any]) -> list[Call] | str:
    if op.flags["border_type"].name != "REFLECT":
        return "torchvision's blur always reflects at the edge"
    size = op.flags["kernel_size"]
    ky, kx = (size, size) if isinstance(size, int) else size
    return [("gaussian_blur", {"kernel_size": [kx, ky], "sigma": [p["sigma"]] * 2})]


def _elastic(op: Any, p: dict[str, Any]) -> list[Call] | str:
    from kornia.filters import gaussian_blur2d

    flags = op.flags
    if flags["resample"].name != "BILINEAR" or flags["padding_mode"] != "zeros" or flags["align_corners"]:
        return "elastic is only compared if it is bilinear, with zeros outside and align_corners=False"
    sigma, alpha = (torch.as_tensor(flags[k], dtype=torch.float32).view(-1)[:2] for k in ("sigma", "alpha"))
    field = gaussian_blur2d(p["noise"][None], flags["kernel_size"], sigma[None], border_type="constant")
    return [("elastic", {"displacement": field.permute(0, 2, 3, 1) * alpha})]


def _warp(function: str, arguments: Callable[[dict[str, Any]], dict[str, Any]]) -> Make:
    def make(op: Any, p: dict[str, Any]) -> list[Call] | str:
        if op.flags["resample"].name != "BILINEAR" or ("padding_mode" in op.flags and op.flags["padding_mode"].value):
            return f"{function} is only compared if it is bilinear, with zeros outside"
        if "scale" in p and p["scale"][0] != p["scale"][1]:
            return "torchvision scales both axes by the same factor"
        return [(function, {**arguments(p), "interpolation": "bilinear"})]

    return make


def _affine(p: dict[str, Any]) -> dict[str, Any]:
    return {
        "angle": p.get("angle", 0.0),
        "translate": p.get("translations") or [p.get("translate_x", 0.0), p.get("translate_y", 0.0)],
        "scale": p.get("scale", [1.0])[0],
        "shear": [p.get("shear_x", 0.0), p.get("shear_y", 0.0)],
    }


_BOX = {"i": "ys", "j": "xs", "h": "heights", "w": "widths"}
TABLE: dict[str, Make] = {
    "RandomHorizontalFlip": _same("horizontal_flip"),
    "RandomVerticalFlip": _same("vertical_flip"),
    "RandomGrayscale": lambda op, p: [("rgb_to_grayscale", {"num_output_channels": 3})],
    "RandomEqualize": _same("equalize"),
    "RandomAutoContrast": _same("autocontrast"),
    "RandomBrightness": _same("adjust_brightness", brightness_factor="brightness_factor"),
    "RandomContrast": _same("adjust_contrast", contrast_factor="contrast_factor"),
    "RandomSaturation": _same("adjust_saturation", saturation_factor="saturation_factor"),
    "RandomHue": _same("adjust_hue", hue_factor="hue_factor"),
    "RandomSharpness": _same("adjust_sharpness", sharpness_factor="sharpness"),
    "RandomGamma": _same("adjust_gamma", gamma="gamma_factor", gain="gain_factor"),
    "RandomPosterize": lambda op, p: [("posterize", {"bits": int(p["bits_factor"])})],
    "RandomInvert": lambda op, p: (
        [("invert", {})] if float(op.flags["max_val"]) == 1 else "torchvision inverts only with max_val=1"
    ),
    "ColorJitter": _jitter,
    "ColorJiggle": _jitter,
    "RandomSolarize": _solarize,
    "RandomGaussianBlur": _blur,
    "RandomErasing": lambda op, p: [("erase", {k: int(p[v]) for k, v in _BOX.items()} | {"v": p["values"]})],
    "RandomElasticTransform": _elastic,
    "RandomRotation": _warp("rotate", lambda p: {"angle": p["degrees"]}),
    **dict.fromkeys(("RandomAffine", "RandomShear", "RandomTranslate"), _warp("affine", _affine)),
    "RandomPerspective": _warp(
        "perspective", lambda p: {"startpoints": p["start_points"], "endpoints": p["end_points"]}
    ),
}

_CUT = "torchvision's uint8 operations truncate after every step; gpuaug rounds nothing before the end"
_WARP = "compared with bilinear interpolation on both sides; torchvision's classes default to `nearest`"
_ALWAYS = {
    "RandomBrightness": "another formula: Kornia's RandomBrightness adds `factor - 1`, torchvision multiplies",
    "RandomContrast": "another formula: Kornia's RandomContrast multiplies, torchvision blends with the mean gray",
    "RandomSaturation": "another formula: Kornia's RandomSaturation scales S of HSV, torchvision blends with gray",
    "ColorJiggle": "another formula: ColorJiggle adds brightness, multiplies for contrast and saturates in HSV; "
    "ColorJitter has torchvision's formulas",
    "RandomPerspective": "torchvision applies the homography at pixel centers (x + 0.5), Kornia at whole coordinates",
    **dict.fromkeys(("RandomAffine", "RandomRotation", "RandomShear", "RandomTranslate"), _WARP),
}
_FLOAT = {
    "RandomPosterize": "torchvision's float posterize is floor(x * 2**bits) / 2**bits; gpuaug equals its uint8 version",
    "RandomGrayscale": "torchvision's weight of red is 0.2989, Kornia's 0.299",
    "RandomAutoContrast": "if a channel is constant, torchvision keeps it, and Kornia makes it black",
}
_UINT8 = {
    "RandomGaussianBlur": "torchvision's uint8 blur rounds to whole levels; gpuaug rounds nothing before the end",
    "RandomEqualize": "equal levels are expected: both sides use 256 levels",
}
