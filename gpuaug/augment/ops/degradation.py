"""Entries for blurs, sharpness, noise, erasing, plasma, weather and JPEG artefacts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuaug.augment.ops.codes import Code
from gpuaug.augment.ops.kornia_private import generated, range_of, setting
from gpuaug.augment.parameters import Entry, Params, Rule, Size, Steps, Tensors, step, steps_of, uniform_from
from gpuaug.errors import ConfigError, shown_size
from gpuaug.native.buffers import to_device
from gpuaug.random.keyed import Float, scale, uniform_field

_LEAST = {1: 1, 3: 0}  # minimum of (image side - kernel size // 2), by border type: 1 reflect, 3 circular


def _check_kernel(op: Any, key: str) -> None:
    given = op.flags["kernel_size"]
    sizes = tuple(given) if isinstance(given, list | tuple) else (given, given)
    if len(sizes) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 or n % 2 == 0 for n in sizes):
        raise ConfigError(f"`{key}.kernel_size` must be an odd, positive integer or two of them. Found: {given!r}.")


def _blur(op: Any, *, sigma: str | float) -> Steps | None:
    """A Gaussian blur. A box blur is a Gaussian blur with a sigma so large that all weights are equal."""
    size, border = op.flags["kernel_size"], op.flags["border_type"].value
    ky, kx = (size, size) if isinstance(size, int) else size
    arguments, least = steps_of(Code.BLUR, kx, ky, sigma, border), _LEAST.get(border, -math.inf)

    def write(out: Float, params: Params, size: Size) -> None:
        if min(size[0] - ky // 2, size[1] - kx // 2) < least:
            raise ConfigError(
                f"{type(op).__name__} needs images larger than half its `kernel_size` {(ky, kx)}. Found: "
                f"{shown_size(*size)} pixels. Choose a smaller kernel."
            )
        arguments.write(out, params, size)

    return Steps(arguments.codes, write) if ky % 2 and kx % 2 else None


def _check_motion(op: Any, key: str) -> None:
    size = setting(op, "kernel_size")
    if not isinstance(size, int):
        raise ConfigError(
            f"`{key}.kernel_size` must be one number, because Kornia draws one size for a whole batch. "
            f"Found: {size!r}. Use gpuaug.OneOf with one motion blur per size."
        )


def _motion(op: Any) -> tuple[int, Rule]:
    count, rule = uniform_from("angle_factor", "direction_factor")(op)
    return count, partial(_motion_parameters, rule=rule, kernel_size=setting(op, "kernel_size"))


def _motion_parameters(u: Float, size: Size, *, rule: Rule, kernel_size: int) -> Params:
    return {"ksize_factor": np.full(len(u), kernel_size, dtype=np.int32), **rule(u, size)}


def _write_sharpness(out: Float, params: Params, size: Size) -> None:
    if min(size) < 3:
        raise ConfigError(f"RandomSharpness needs images of at least 3 x 3 pixels. Found: {shown_size(*size)}.")
    out[:, 0, 0] = params["sharpness"]


def _erasing(op: Any) -> tuple[int, Rule]:
    ratios: tuple[Any, ...] | None = range_of(op, "ratio_sampler")
    if ratios is None:  # if the range contains 1, Kornia has one sampler below 1 and one above 1
        ratios = (*range_of(op, "ratio_sampler1"), range_of(op, "ratio_sampler2")[1])
    area, value = range_of(op, "scale_sampler"), float(setting(op, "value"))
    return 2 * len(ratios), partial(_erased_box, area=area, ratios=ratios, value=value)


def _erased_box(u: Float, size: Size, *, area: tuple[Any, Any], ratios: tuple[Any, ...], value: float) -> Params:
    height, width = size
    target = scale(u[:, 0], *area) * np.float32(height * width)
    if len(ratios) == 3:  # low < 1 < high: choose between the two ranges with equal probability
        wide, tall = scale(u[:, 1], ratios[0], ratios[1]), scale(u[:, 2], ratios[1], ratios[2])
        ratio = np.where(np.rint(u[:, 3]) != 0, wide, tall)
        at = 4
    else:
        ratio, at = scale(u[:, 1], *ratios), 2
    h = np.clip(np.rint(np.sqrt(target * ratio)), 1, height).astype(np.float32)
    w = np.clip(np.rint(np.sqrt(target / ratio)), 1, width).astype(np.float32)
    one = np.float32(1)
    return {
        "widths": w,
        "heights": h,
        "xs": np.floor(u[:, at] * (np.float32(width) - w + one)),
        "ys": np.floor(u[:, at + 1] * (np.float32(height) - h + one)),
        "values": np.full(len(u), value, dtype=np.float32),
    }


def _gaussian_noise(op: Any, params: Tensors, keys: Tensor, size: Size, normal: Any, channels: int) -> Tensors:
    values = normal(keys, channels * size[0] * size[1]).view(-1, channels, *size)
    return {"gaussian_noise": values.mul_(setting(op, "std")).add_(setting(op, "mean"))}  # in place, to save memory


# --- illumination, specks, plasma, rain


def _light(count: int, *names: str) -> Callable[[Any], tuple[int, Rule]]:
    """A gradient of light from ``count`` uniforms. ``names``: Kornia's samplers in order of their draws."""
    return lambda op: (count, partial(_gradient, op=op, samplers=[f"{name}_sampler" for name in names]))


def _gradient(u: Float, size: Size, *, op: Any, samplers: list[str]) -> Params:
    return {"gradient": generated(op, torch.from_numpy(u.copy()), size, samplers)["gradient"].numpy()}


def _specks(op: Any, params: Tensors, keys: Tensor, size: Size, normal: Any, channels: int) -> Tensors:
    u = uniform_field(keys, 2 * size[0] * size[1]).view(-1, 2, *size)
    amount, ratio = (
        to_device(params[name], u.device).view(-1, 1, 1, 1) for name in ("amount_factor", "salt_and_pepper_factor")
    )
    noise, salt = u[:, :1] < amount, u[:, 1:] < ratio
    masks = {"mask_salt": noise & salt, "mask_pepper": noise & ~salt}
    return {name: mask.expand(-1, channels, -1, -1) for name, mask in masks.items()}


def _plasma(op: Any, params: Tensors, keys: Tensor, size: Size, normal: Any, channels: int) -> Tensors:
    """Kornia's plasma, with separate random numbers for each sample.

    One sample at a time, because its convolutions depend on the size of the batch on some processors.
    """
    from kornia.contrib import diamond_square

    roughness = to_device(params["roughness"], keys.device)
    made, shape = [], (1, channels, *size)
    for row in range(len(keys)):
        key, used = keys[row : row + 1], 0

        def random(shape: Any, key: Tensor = key, **_: Any) -> Tensor:
            nonlocal used
            first, used = used, used + math.prod(shape)
            return uniform_field(key, used)[:, first:].reshape(shape)

        own = roughness[row : row + 1]
        made.append(diamond_square(shape, own, random_fn=random, device=keys.device, dtype=torch.float32))
    return {"plasma": torch.cat(made) if made else torch.empty(0, *shape[1:], device=keys.device)}


_RAIN = ("number_of_drops", "drop_height", "drop_width")


def _rain(op: Any) -> tuple[int, Rule]:
    return 3, partial(_drops, limits=[range_of(op, f"{name}_sampler") for name in _RAIN])


def _drops(u: Float, size: Size, *, limits: list[tuple[Any, Any]]) -> Params:
    """Draw integers, all equally likely, from the lower limit to just below the upper limit."""
    values = [np.minimum(np.floor(scale(u[:, k], *each)), each[1] - np.float32(1)) for k, each in enumerate(limits)]
    return {f"{name}_factor": value.astype(np.int64) for name, value in zip(_RAIN, values, strict=True)}


def _check_rain(op: Any, key: str) -> None:
    (few, _), (low, _), _ = (range_of(op, f"{name}_sampler") for name in _RAIN)
    for name, least, value in (("number_of_drops", 0, few), ("drop_height", 1, low)):
        if value < least:
            raise ConfigError(f"`{key}.{name}` must be at least {least}. Found: {value:.0f}.")


def _coordinates(op: Any, params: Tensors, keys: Tensor, size: Size, normal: Any, channels: int) -> Tensors:
    """Positions (y, x) in 0..1 for the maximum number of drops. In Kornia, this number depends on the batch."""
    (_, most), (_, tall), (left, right) = (range_of(op, f"{name}_sampler") for name in _RAIN)
    if tall > size[0] or max(right - 1, -left) >= size[1]:
        raise ConfigError(
            f"RandomRain needs drops that are smaller than the image: `drop_height` below {size[0]}, `drop_width` "
            f"between -{size[1]} and {size[1]}. Found: up to {tall - 1:.0f}, and {left:.0f} to {right - 1:.0f}."
        )
    return {"coordinates_factor": uniform_field(keys, 2 * int(most - 1)).view(len(keys), -1, 2)}


def _gray_or_rgb(op: Any, channels: int) -> tuple[str, str] | None:
    return None if channels in (1, 3) else ("", "images with 1 or 3 channels")  # Kornia checks it


def _floor(x: Tensor) -> Tensor:
    whole = x.floor()
    return whole + (x - 0.5 - whole) ** 3


def _divisors(values: Tensors) -> Tensor:
    """Kornia's JPEG quantization tables for luma and chroma, float32 [n, 128]."""
    from kornia.enhance import JPEGCodecDifferentiable

    with torch.device("cpu"):
        codec = JPEGCodecDifferentiable()
    tables = torch.cat([codec.get_buffer(f"quantization_table_{name}").flatten() for name in "yc"]).float()
    quality = values["jpeg_quality"][:, None]
    x = (tables * _floor(torch.where(quality < 50, 5000 / quality, 200 - 2 * quality)) + 50) / 100
    x = torch.where(x > 255, 255 - 0.02 * (torch.exp(-(x - 255).clamp(min=0)) - 1), x)
    return _floor(torch.where(x < 1, 1 + 0.02 * (torch.exp((x - 1).clamp(max=0)) - 1), x))


ENTRIES = {
    "RandomGaussianBlur": Entry("pixels", partial(_blur, sigma="sigma"), uniform_from("sigma"), check=_check_kernel),
    # the last bits of Kornia's box blur depend on the batch size
    "RandomBoxBlur": Entry("pixels", partial(_blur, sigma=1e9), one_by_one=True),
    "RandomMedianBlur": Entry("pixels"),
    "RandomMotionBlur": Entry("pixels", parameters=_motion, check=_check_motion),
    "RandomSharpness": Entry("pixels", lambda op: Steps((Code.SHARPNESS,), _write_sharpness)),
    "RandomErasing": Entry("pixels", step(Code.ERASE, "xs", "ys", "widths", "heights", "values"), _erasing),
    "RandomGaussianNoise": Entry(
        "pixels", step(Code.NOISE, table=lambda values: values["gaussian_noise"]), fields=_gaussian_noise
    ),
    # the last bits of torch's matrix products depend on the batch size
    "RandomJPEG": Entry(
        *("pixels", step(Code.JPEG, "jpeg_quality", table=_divisors), uniform_from("jpeg_quality")),
        one_by_one=True,
        takes="rgb",
    ),
    "RandomSaltAndPepperNoise": Entry(
        "pixels", parameters=uniform_from("amount_factor", "salt_and_pepper_factor"), fields=_specks, takes=_gray_or_rgb
    ),
    "RandomGaussianIllumination": Entry("pixels", parameters=_light(6, "gain", "sigma", "center", "sign")),
    "RandomLinearIllumination": Entry("pixels", parameters=_light(3, "gain", "sign", "directions")),
    "RandomLinearCornerIllumination": Entry("pixels", parameters=_light(3, "gain", "sign", "directions")),
    "RandomPlasmaBrightness": Entry("pixels", fields=_plasma),
    "RandomPlasmaContrast": Entry("pixels", fields=_plasma),
    "RandomPlasmaShadow": Entry(
        "pixels", fields=lambda op, params, keys, size, normal, channels: _plasma(op, params, keys, size, normal, 1)
    ),
    "RandomRain": Entry("pixels", parameters=_rain, check=_check_rain, fields=_coordinates, takes=_gray_or_rgb),
    "RandomSnow": Entry("pixels", takes="rgb"),
}
