"""Which of torchvision's functions a Kornia operation corresponds to, and why their pixels differ where they do.

A counterpart is a list of calls of formulas.py (or of torchvision itself, which has the same names), with the values
that were drawn; or a text that says why there is none.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from gpuaug.augment.parameters import Params

Call = tuple[str, dict[str, Any]]  # a function of formulas.py, and what to call it with, values in 0..1


def counterpart(module: nn.Module, params: Params) -> list[Call] | str:
    """torchvision's functions that a Kornia operation corresponds to, or why there are none.

    Args:
        module: Kornia's.
        params: its parameters for one sample; values per pixel as [channels, H, W].
    """
    import kornia.augmentation as K

    kind: type[nn.Module] = type(module)
    flags: dict[str, Any] = getattr(module, "flags", {})
    if kind.__name__ in ABSENT:
        return ABSENT[kind.__name__]
    if kind is K.RandomGaussianNoise:
        return [("gaussian_noise", {"noise": params["gaussian_noise"].transpose(1, 2, 0)})]
    if kind is K.RandomElasticTransform:
        if flags["resample"].name != "BILINEAR" or flags["padding_mode"] != "zeros" or flags["align_corners"]:
            return "torchvision's elastic is compared as bilinear with zeros outside and align_corners=False"
        return [("elastic", {"displacement": displacement(params["noise"], **_smoothing(flags))})]
    p = {k: v.tolist() for k, v in params.items()}
    if kind in (K.ColorJitter, K.ColorJiggle):
        steps = (
            ("adjust_brightness", "brightness_factor", 1),
            ("adjust_contrast", "contrast_factor", 1),
            ("adjust_saturation", "saturation_factor", 1),
            ("adjust_hue", "hue_factor", 0),
        )
        order: Any = module._fixed_order
        return [(name, {key: p[key]}) for name, key, idle in (steps[k] for k in order) if p[key] != idle]
    if kind in _same():
        name, keys = _same()[kind]
        return [(name, {theirs: p[ours] for theirs, ours in keys.items()})]
    if kind is K.RandomPosterize:
        return [("posterize", {"bits": int(p["bits_factor"])})]
    if kind is K.RandomSolarize:
        if p.get("additions"):
            return f"torchvision's solarize adds nothing before it inverts, and {p['additions']:.3g} was drawn"
        return [("solarize", {"threshold": p["thresholds"]})]
    if kind is K.RandomInvert:
        return [("invert", {})] if float(flags["max_val"]) == 1 else "torchvision inverts from white only"
    if kind is K.RandomGaussianBlur:
        if flags["border_type"].name != "REFLECT":
            return "torchvision's blur reflects at the edge"
        size = flags["kernel_size"]
        ky, kx = (size, size) if isinstance(size, int) else size
        return [("gaussian_blur", {"kernel_size": [kx, ky], "sigma": [p["sigma"]] * 2})]
    if kind is K.RandomErasing:
        box = {"i": p["ys"], "j": p["xs"], "h": p["heights"], "w": p["widths"]}
        return [("erase", {**{k: int(v) for k, v in box.items()}, "v": p["values"]})]
    if kind is K.RandomJPEG:
        return [("jpeg", {"quality": round(p["jpeg_quality"])})]
    if kind in (K.RandomAffine, K.RandomRotation, K.RandomShear, K.RandomTranslate, K.RandomPerspective):
        padding = flags["padding_mode"].name if "padding_mode" in flags else "ZEROS"
        if flags["resample"].name != "BILINEAR" or padding != "ZEROS":
            return (
                f"{flags['resample'].name.lower()} with {padding.lower()} outside has no counterpart written out here"
            )
        return _geometry(kind, p)
    return f"torchvision has no counterpart of {kind.__name__} that takes the same parameters"


def displacement(
    noise: NDArray[Any], *, kernel_size: tuple[int, int], sigma: tuple[float, float], alpha: tuple[float, float]
) -> NDArray[np.float64]:
    """What Kornia's RandomElasticTransform makes of its noise: (x, y) in halves of width and height, [H, W, 2].

    Args:
        noise: [2, H, W], (x, y) in -1..1.
        kernel_size, sigma: of the blur, (y, x); zeros outside the image.
        alpha: factors of (x, y).
    """
    fields = noise.astype(np.float64)
    for axis, size, s in ((1, kernel_size[0], sigma[0]), (2, kernel_size[1], sigma[1])):
        weights = np.exp(-0.5 * ((np.arange(size) - size // 2) / s) ** 2)
        pad = [(size // 2, size // 2) if a == axis else (0, 0) for a in range(3)]
        padded, length = np.pad(fields, pad), fields.shape[axis]
        taps = (np.take(padded, range(k, k + length), axis=axis) * w for k, w in enumerate(weights / weights.sum()))
        fields = sum(taps, np.zeros_like(fields))
    return (fields * np.array(alpha, dtype=np.float64)[:, None, None]).transpose(1, 2, 0)


def _smoothing(flags: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    given = {name: flags[name] for name in ("kernel_size", "sigma", "alpha")}
    return {k: tuple(v.tolist() if hasattr(v, "tolist") else v) for k, v in given.items()}


def remark(module: nn.Module, call: Call, params: Params) -> str:
    """What somebody who comes from torchvision should know of an operation even where pixels are equal; else ""."""
    import kornia.augmentation as K

    if type(module) is K.RandomGaussianNoise:
        generator: Any = module._param_generator
        field = call[1]["noise"]
        return (
            f"both add a normal field; ours comes from the sample's key, torchvision's from torch's generator, so ours "
            f"was given to both: mean {field.mean():.2g} and std {field.std():.3g}, where {float(generator.mean):.2g} "
            f"and {float(generator.std):.3g} were asked for"
        )
    if type(module) is K.RandomElasticTransform:
        from gpuaug.tools.parity.formulas import elastic_displacement

        how = _smoothing(vars(module)["flags"])
        field = call[1]["displacement"]
        size = np.array(field.shape[:2])
        alpha = (np.array(how["alpha"]) * size).tolist()
        own = elastic_displacement(params["noise"].transpose(1, 2, 0).astype(np.float64), alpha, how["sigma"][::-1])
        moved, theirs = (np.abs(x * size[::-1] / 2).max() for x in (field, own))
        return (
            f"the same displacements were given to both. Kornia's alpha is in halves of the image and its blur has "
            f"zeros outside; torchvision's v2.ElasticTransform(alpha=[{alpha[0]:.4g}, {alpha[1]:.4g}], "
            f"sigma=[{how['sigma'][1]:.4g}, {how['sigma'][0]:.4g}]) blurs over 8 sigma and reflects: the same noise "
            f"moves pixels by up to {moved:.2f} pixels here, and by up to {theirs:.2f} there"
        )
    return ""


def _geometry(kind: type[nn.Module], p: dict[str, Any]) -> list[Call] | str:
    import kornia.augmentation as K

    still = {"angle": 0.0, "translate": [0.0, 0.0], "scale": 1.0, "shear": [0.0, 0.0]}
    if kind is K.RandomRotation:
        return [("rotate", {"angle": p["degrees"]})]
    if kind is K.RandomShear:
        return [("affine", {**still, "shear": [p["shear_x"], p["shear_y"]]})]
    if kind is K.RandomTranslate:
        return [("affine", {**still, "translate": [p["translate_x"], p["translate_y"]]})]
    if kind is K.RandomPerspective:
        return [("perspective", {"startpoints": p["start_points"], "endpoints": p["end_points"]})]
    if p["scale"][0] != p["scale"][1]:
        return "torchvision scales both axes alike"
    how = {"angle": p["angle"], "translate": p["translations"], "scale": p["scale"][0]}
    return [("affine", {**how, "shear": [p["shear_x"], p["shear_y"]]})]


@lru_cache(maxsize=1)
def _same() -> dict[type, tuple[str, dict[str, str]]]:
    """Kornia's classes whose parameters only have other names at torchvision."""
    import kornia.augmentation as K

    return {
        K.RandomHorizontalFlip: ("horizontal_flip", {}),
        K.RandomVerticalFlip: ("vertical_flip", {}),
        K.RandomGrayscale: ("rgb_to_grayscale", {}),
        K.RandomEqualize: ("equalize", {}),
        K.RandomAutoContrast: ("autocontrast", {}),
        K.RandomBrightness: ("adjust_brightness", {"brightness_factor": "brightness_factor"}),
        K.RandomContrast: ("adjust_contrast", {"contrast_factor": "contrast_factor"}),
        K.RandomSaturation: ("adjust_saturation", {"saturation_factor": "saturation_factor"}),
        K.RandomHue: ("adjust_hue", {"hue_factor": "hue_factor"}),
        K.RandomSharpness: ("adjust_sharpness", {"sharpness_factor": "sharpness"}),
        K.RandomGamma: ("adjust_gamma", {"gamma": "gamma_factor", "gain": "gain_factor"}),
    }


ABSENT = {"RandomMotionBlur": "torchvision has no motion blur"}
ANOTHER = {
    "RandomBrightness": "another formula: Kornia's RandomBrightness adds `factor - 1`, torchvision multiplies",
    "RandomContrast": "another formula: Kornia's RandomContrast multiplies, torchvision moves away from the mean gray",
    "RandomSaturation": "another formula: Kornia's RandomSaturation scales S of HSV, torchvision blends with gray",
    "ColorJiggle": "another formula: ColorJiggle adds brightness, multiplies for contrast and saturates in HSV; "
    "ColorJitter is torchvision's",
    "RandomPerspective": "torchvision applies the homography at half coordinates, Kornia at whole ones",
    "RandomJPEG": "Kornia's JPEG is a differentiable imitation, without chroma rounding; torchvision's is libjpeg",
}
_CUT = "torchvision's uint8 operations cut off the fraction after every step; here nothing is rounded before the end"
_CLIPS = "torchvision clips the sum to 0..1 (clip=True), Kornia leaves what goes beyond to the next operation"
_FLOAT = {
    "RandomPosterize": "torchvision's float posterize is floor(x * 2**bits) / 2**bits; ours is its uint8 one",
    "RandomGrayscale": "torchvision's weight of red is 0.2989, Kornia's 0.299",
    "RandomAutoContrast": "a constant channel: torchvision leaves it, Kornia makes it black",
    "RandomGaussianNoise": _CLIPS,
}
_UINT8 = {
    "RandomGaussianNoise": f"{_CLIPS}; and its uint8 noise has whole levels",
    "RandomGaussianBlur": "torchvision's uint8 blur rounds to whole levels; here nothing is rounded before the end",
    "RandomEqualize": "both through 256 levels",
}
_WARPS = ("RandomAffine", "RandomRotation", "RandomShear", "RandomTranslate")
_WARP = (
    "the same geometry, bilinear on both sides; torchvision's RandomAffine and RandomRotation take `nearest` unless "
    "told otherwise"
)


def why(kinds: Iterable[str], reference: str) -> str:
    """Where the difference between Kornia's classes and torchvision's functions comes from, in words.

    Args:
        kinds: names of the classes.
        reference: names torchvision's arithmetic, float or uint8.
    """
    names = sorted(kinds)
    for kind in names:
        if kind in ANOTHER:
            return ANOTHER[kind]
        if kind in _WARPS:
            return _WARP
    table = _UINT8 if "uint8" in reference else _FLOAT
    return next((table[k] for k in names if k in table), _CUT if "uint8" in reference else "")


def text(calls: list[Call]) -> str:
    """``adjust_hue(0.0312), ...`` for a caption."""

    def short(value: Any) -> str:
        if isinstance(value, list):
            return f"({', '.join(short(v) for v in value)})"
        if isinstance(value, np.ndarray):
            return f"a field of std {value.std():.3g}"
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    return ", ".join(f"{name}({', '.join(short(v) for v in given.values())})" for name, given in calls)
