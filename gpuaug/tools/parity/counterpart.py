"""Which of torchvision's functions a Kornia operation corresponds to, and why their pixels differ where they do.

A counterpart is a list of calls of ``torchvision.transforms.v2.functional`` with the values that were drawn; or a text
that says why there is none.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpuaug.augment.parameters import Params
from gpuaug.errors import ConfigError

Call = tuple[str, dict[str, Any]]  # a function of torchvision, and what to call it with, values in 0..1


@lru_cache(maxsize=1)
def torchvision() -> tuple[Any, str]:
    """``torchvision.transforms.v2`` and torchvision's version.

    Raises:
        ConfigError: if torchvision cannot be imported.
    """
    try:
        try:
            import torchvision
        except RuntimeError:  # a build for another torch lacks two operators at import, which no transform uses
            for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
            _operators.append(torch.library.Library("torchvision", "DEF"))
            for name in ("nms", "qnms"):
                _operators[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            import torchvision
        from torchvision.transforms import v2
    except Exception as error:
        raise ConfigError(
            f"`gpuaug parity` compares with torchvision, which cannot be imported ({type(error).__name__}: {error}). "
            "Install the release for your torch: pip install torchvision."
        ) from error
    return v2, str(torchvision.__version__)


_operators: list[Any] = []  # torch forgets what nobody holds


def call(one: Call, image: Tensor) -> Tensor:
    """The function of a call, on float32 or uint8 [3, H, W]."""
    name, given = one
    if not image.is_floating_point():
        given = {k: v * 255 if k in ("threshold", "v") else v for k, v in given.items()}
    if name == "gaussian_noise":  # torchvision's draws by itself: the same sum, with the field that was drawn here
        field = torch.from_numpy(given["noise"]).permute(2, 0, 1)
        if image.is_floating_point():
            return (image + field).clamp(0, 1)
        return (image + (field * 255).to(torch.int16)).clamp(0, 255).to(torch.uint8)
    if name in ("affine", "rotate", "perspective"):
        given = {**given, "interpolation": "bilinear"}
    elif name == "rgb_to_grayscale":
        given = {"num_output_channels": 3}
    elif name == "elastic":
        given = {"displacement": torch.from_numpy(given["displacement"].astype(np.float32))[None]}
    elif name == "erase":
        given = {**given, "v": torch.tensor(given["v"]).to(image.dtype)}
    elif name == "jpeg":  # torchvision's needs its compiled operators; both are libjpeg
        return _jpeg(image, **given)
    out: Tensor = getattr(torchvision()[0].functional, name)(image, **given)
    return out


def _jpeg(image: Tensor, quality: int) -> Tensor:
    """What Pillow, and so libjpeg, gives back of an image at this quality."""
    from PIL import Image

    pixels = image if image.dtype == torch.uint8 else (image * 255).round().to(torch.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(file, "JPEG", quality=quality)
    made = torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1)
    return made if image.dtype == torch.uint8 else made.float() / 255


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
