"""Entries for operations that change colours."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuaug.augment.ops.codes import Code
from gpuaug.augment.ops.kornia_private import fixed_order, range_of, ranges
from gpuaug.augment.parameters import Argument, Entry, Params, Prepared, Rule, Size, Steps, step, steps_of, uniform_from
from gpuaug.errors import ConfigError
from gpuaug.random.keyed import Float, Int, pick, scale, uniform_field

# --- ColorJitter and ColorJiggle

ORDERS = np.array(list(itertools.permutations(range(4))), dtype=np.int64)  # [24, 4]
_FACTORS = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")  # of Kornia's changes 0..3
_SAMPLERS = ("brightness_sampler", "contrast_sampler", "saturation_sampler", "hue_sampler")
_NEUTRAL = (1, 1, 1, 0)
_JITTER = (Code.MULTIPLY, Code.CONTRAST, Code.SATURATION, Code.HUE)
_JIGGLE = (Code.ADD, Code.MULTIPLY, Code.SATURATION_HSV, Code.HUE)
_uniform_factors = uniform_from(*(_FACTORS[k] for k in (0, 1, 3, 2)))  # Kornia draws the hue third


def _idle(op: Any) -> list[bool]:
    """For each change: whether the factor is always neutral. Kornia and the fused program skip such a change."""
    return [range_of(op, sampler) == (n, n) for sampler, n in zip(_SAMPLERS, _NEUTRAL, strict=True)]


def _factors(op: Any, *, hsv: bool) -> tuple[int, Rule]:
    count, rule = _uniform_factors(op)
    hue, saturation = range_of(op, "hue_sampler"), range_of(op, "saturation_sampler")
    # Kornia skips a change if the factors of the whole batch are neutral. Otherwise a neutral factor can change the
    # last bits. Almost neutral factors replace neutral ones, so that a sample's pixels do not depend on its batch.
    nudged: dict[str, tuple[Any, Any]] = {}  # factor name to (neutral value, replacement)
    if hue[0] != hue[1]:
        nudged["hue_factor"] = (0, np.float32(1e-30))  # too small to change a pixel
    if hsv and saturation[0] != saturation[1]:  # in HSV a factor of 1 is not exactly the identity
        towards = saturation[0] if saturation[0] < 1 else np.float32(2)
        nudged["saturation_factor"] = (1, np.nextafter(np.float32(1), towards, dtype=np.float32))
    return count, partial(_nudged, rule=rule, nudged=nudged)


def _nudged(u: Float, size: Size, *, rule: Rule, nudged: dict[str, tuple[Any, Any]]) -> Params:
    params = rule(u, size)
    for name, (neutral, instead) in nudged.items():
        values = params[name]
        values[values == neutral] = instead
    return params


def _prepare_jitter(name: str, op: Any, *, hsv: bool) -> Prepared | None:
    """Prepare a jitter in random order: each of four slots makes one of the four changes. The pixels equal ``op``'s."""
    if fixed_order(op) is not None:
        return None
    count, factors = _factors(op, hsv=hsv)
    changes = tuple(type(op)(op.brightness, op.contrast, op.saturation, op.hue, p=1.0, order=(k,)) for k in range(4))
    idle = np.array(_idle(op))
    # -1 is an empty slot. If all changes are idle, all slots run, because Kornia still clamps the input.
    orders = ORDERS if idle.all() else np.where(idle[ORDERS], -1, ORDERS)
    rule = partial(_ordered, p=float(op.p), factors=factors, orders=orders, order_column=1 + count)
    return Prepared(name, op, (changes,) * 4, 2 + count, rule)


def _ordered(u: Float, size: Size, *, p: float, factors: Rule, orders: Int, order_column: int) -> tuple[Int, Any]:
    params = factors(u[:, 1:], size)
    choice = orders[pick(u[:, order_column], len(orders))]
    choice[u[:, 0] >= np.float32(p)] = -1
    return choice, ((params,) * 4,) * 4


def _jitter_steps(op: Any, *, hsv: bool) -> Steps | None:
    order = fixed_order(op)
    if order is None:
        return None
    idle = _idle(op)
    changes = [k for k in order if not idle[k]]
    if not changes:  # without changes, Kornia still clamps
        return steps_of(Code.ADD)

    def write(out: Float, params: Params, size: Size) -> None:
        for column, k in enumerate(changes):
            value = params[_FACTORS[k]]
            out[:, column, :3] = (value - np.float32(1) if hsv and k == 0 else value)[:, None]

    return Steps(tuple((_JIGGLE if hsv else _JITTER)[k] for k in changes), write)


def _jitter_takes(op: Any, channels: int) -> tuple[str, str] | None:
    order, idle = fixed_order(op), _idle(op)
    used = [name for k, name in ((2, "saturation"), (3, "hue")) if not idle[k] and (order is None or k in order)]
    return (used[0], "RGB images") if used and channels != 3 else None


def _jitter(*, hsv: bool) -> Entry:
    steps, factors, prepare = (partial(f, hsv=hsv) for f in (_jitter_steps, _factors, _prepare_jitter))
    return Entry("pixels", steps, factors, prepare=prepare, takes=_jitter_takes)  # type: ignore[arg-type]


# --- the others


def _clipped(code: Code, argument: Argument) -> Callable[[Any], Steps | None]:
    """A step with the same argument for all channels. Operations that do not clamp have no fused form."""
    return lambda op: steps_of(code, argument, argument, argument) if op.clip_output else None


def _grayscale(op: Any) -> Steps | None:
    weights = (0.299, 0.587, 0.114) if op.rgb_weights is None else tuple(float(w) for w in op.rgb_weights)
    return steps_of(Code.GRAY, *weights, min(weights) < 0 or sum(weights) > 1 + 1e-6) if len(weights) == 3 else None


def _prepare_gray(name: str, op: Any) -> Prepared:
    """Make a tensor of the weights, because Kornia takes no list, such as one of a YAML file."""
    given = copy.copy(op)
    given.rgb_weights = None if op.rgb_weights is None else torch.as_tensor(op.rgb_weights)
    return replace(ENTRIES["RandomGrayscale"].gated(name, given), op=op)


def _grayscale_takes(op: Any, channels: int) -> tuple[str, str] | None:
    # Kornia's gray of other images is the mean of all channels, also of alpha or infrared
    count = 3 if op.rgb_weights is None else len(op.rgb_weights)
    return None if count == channels else ("rgb_weights", f"images with {count} channels")


def _invert(op: Any) -> Steps | None:
    top = op.flags["max_val"]
    return steps_of(Code.INVERT, float(top)) if getattr(top, "ndim", 0) == 0 else None


def _bits(u: Float, size: Size, *, drawn: tuple[Any, Any]) -> Params:
    return {"bits_factor": np.rint(scale(u[:, 0], *drawn)).astype(np.int32)}  # rounds half to even, as torch does


def _check_gamma(op: Any, key: str) -> None:
    # Kornia checks the range only when it draws. On a GPU, a failed check makes the CUDA context unusable.
    for name, (low, high) in ranges(op).items():
        if not 0 <= low <= high:
            raise ConfigError(f"`{key}` must draw `{name}` from 0 <= low <= high. Found: ({low}, {high}).")


def _temperature(u: Float, size: Size, *, drawn: tuple[Any, Any]) -> Params:
    return {"idx": np.minimum(scale(u[:, 0], *drawn).astype(np.int64), int(drawn[1]) - 1)}


def _planckian(op: Any) -> Steps:
    red, blue = op.pl.cpu().numpy().astype(np.float32).T
    return steps_of(Code.MULTIPLY, lambda params: red[params["idx"]], 1, lambda params: blue[params["idx"]])


def _channels(u: Float, size: Size, *, name: str = "channels", count: int = 3) -> Params:
    return {name: np.argsort(u[:, :3], axis=1, kind="stable")[:, :count]}


def _dropped(op: Any, params: Any, keys: Tensor, size: Size, normal: Any, channels: int) -> dict[str, Tensor]:
    """The numbers of rows, and the dropped channels of images that are not RGB; ``params`` has those of RGB images."""
    order = uniform_field(keys, channels).argsort(dim=1) if channels != 3 else params["channel_idx"]
    rows = torch.arange(len(keys), device="cpu")[:, None]
    return {"batch_idx": rows, "channel_idx": order[:, : op.num_drop_channels].cpu()}


def _dropout_takes(op: Any, channels: int) -> tuple[str, str] | None:
    count = op.num_drop_channels
    return None if count < channels else ("num_drop_channels", f"images with more than {count} channels")


_SHUFFLED = tuple((lambda params, c=c: params["channels"][:, c]) for c in range(3))
ENTRIES = {
    "ColorJitter": _jitter(hsv=False),
    "ColorJiggle": _jitter(hsv=True),
    "RandomBrightness": Entry("pixels", _clipped(Code.ADD, lambda params: params["brightness_factor"] - np.float32(1))),
    "RandomContrast": Entry("pixels", _clipped(Code.MULTIPLY, "contrast_factor")),
    "RandomSaturation": Entry("pixels", step(Code.SATURATION_HSV, "saturation_factor"), takes="rgb"),
    "RandomHue": Entry("pixels", step(Code.HUE, "hue_factor"), takes="rgb"),
    "RandomGrayscale": Entry("pixels", _grayscale, prepare=_prepare_gray, takes=_grayscale_takes),
    "RandomSolarize": Entry("pixels", step(Code.SOLARIZE, "thresholds", "additions")),
    "RandomPosterize": Entry(
        "pixels",
        step(Code.POSTERIZE, "bits_factor"),
        lambda op: (1, partial(_bits, drawn=range_of(op, "bit_sampler"))),
        takes="levels",
    ),
    "RandomInvert": Entry("pixels", _invert),
    # torch's `pow` rounds the last pixels of a chunk of memory differently, and the chunks depend on the batch size.
    "RandomGamma": Entry(
        "pixels", step(Code.GAMMA, "gamma_factor", "gain_factor"), check=_check_gamma, one_by_one=True
    ),
    "RandomRGBShift": Entry("pixels", step(Code.ADD, "r_shift", "g_shift", "b_shift"), takes="rgb"),
    "RandomPlanckianJitter": Entry(
        "pixels", _planckian, lambda op: (1, partial(_temperature, drawn=range_of(op, "pl_idx_dist"))), takes="rgb"
    ),
    # Kornia's takes any number of channels, but our draws and steps have three
    "RandomChannelShuffle": Entry("pixels", step(Code.SHUFFLE, *_SHUFFLED), lambda op: (3, _channels), takes="rgb"),
    "RandomChannelDropout": Entry(
        "pixels",
        parameters=lambda op: (3, partial(_channels, name="channel_idx", count=op.num_drop_channels)),
        fields=_dropped,
        takes=_dropout_takes,
    ),
    "RandomAutoContrast": Entry("pixels", lambda op: steps_of(Code.AUTOCONTRAST, op.clip_output)),
    "RandomEqualize": Entry("pixels", step(Code.EQUALIZE), takes="levels"),
    "RandomClahe": Entry("pixels", takes="levels"),
}
