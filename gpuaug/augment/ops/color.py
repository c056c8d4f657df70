"""Operations on colours."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np

from gpuaug.augment.ops.entry import (
    Code,
    Entry,
    Steps,
    all_uniform,
    constant,
    step,
    uniform_from,
    write_nothing,
)
from gpuaug.augment.ops.kornia_private import fixed_order, range_of, ranges
from gpuaug.augment.parameters import Alternatives, Params, Prepared, Rule, Size
from gpuaug.errors import ConfigError
from gpuaug.random.keyed import Float, Int, scale

# --- ColorJitter and ColorJiggle

ORDERS = np.array(list(itertools.permutations(range(4))), dtype=np.int64)  # [24, 4]
_FACTORS = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")  # as `order` numbers the steps
_SAMPLERS = ("brightness_sampler", "contrast_sampler", "saturation_sampler", "hue_sampler")
_NEUTRAL = (1, 1, 1, 0)
_JITTER = (Code.MULTIPLY, Code.CONTRAST, Code.SATURATION, Code.HUE)
_JIGGLE = (Code.ADD, Code.MULTIPLY, Code.SATURATION_HSV, Code.HUE)
_uniform_factors = uniform_from(**{_FACTORS[k]: _SAMPLERS[k] for k in (0, 1, 3, 2)})  # Kornia draws the hue third


def _idle(op: Any) -> list[bool]:
    """Per step, whether its factor can only be neutral; Kornia skips such a step too."""
    return [range_of(op, sampler) == (n, n) for sampler, n in zip(_SAMPLERS, _NEUTRAL, strict=True)]


def _factors(op: Any, *, hsv: bool) -> tuple[int, Rule]:
    count, rule = _uniform_factors(op)
    nudged: dict[str, tuple[Any, Any]] = {}  # factor to (neutral value, what replaces it)
    hue, saturation = range_of(op, "hue_sampler"), range_of(op, "saturation_sampler")
    if hue[0] != hue[1]:
        nudged["hue_factor"] = (0, np.float32(1e-30))  # smaller than any hue that changes a pixel
    if hsv and saturation[0] != saturation[1]:  # in HSV, so that 1 is not quite the identity
        towards = saturation[0] if saturation[0] < 1 else np.float32(2)
        nudged["saturation_factor"] = (1, np.nextafter(np.float32(1), towards, dtype=np.float32))
    return count, partial(_nudged, rule=rule, nudged=nudged)


def _nudged(u: Float, size: Size, *, rule: Rule, nudged: dict[str, tuple[Any, Any]]) -> Params:
    """Factors of the rule, moved off neutral: Kornia skips a step only where all factors of a batch are neutral."""
    params = rule(u, size)
    for name, (neutral, instead) in nudged.items():
        values = params[name]
        values[values == neutral] = instead
    return params


def _prepare_jitter(name: str, op: Any, *, hsv: bool) -> Prepared | None:
    """Without a given ``order`` every sample has its own.

    Four slots, each offering the four steps as modules of one step: the same bits as one module with the whole order.
    """
    if fixed_order(op) is not None:
        return None
    count, factors = _factors(op, hsv=hsv)
    steps = tuple(
        type(op)(op.brightness, op.contrast, op.saturation, op.hue, p=1.0, order=(step,)) for step in range(4)
    )
    idle = _idle(op)
    orders = ORDERS
    if not all(idle):  # where all are idle, the input is still clamped
        orders = np.where(np.array(idle)[ORDERS], -1, ORDERS)
    rule = partial(_ordered, p=float(op.p), factors=factors, orders=orders, order_column=1 + count)
    return Prepared(name, op, (steps,) * 4, 2 + count, rule)


def _ordered(
    u: Float, size: Size, *, p: float, factors: Rule, orders: Int, order_column: int
) -> tuple[Int, tuple[Alternatives, ...]]:
    """Factors for the samples whose first uniform is below ``p``, and one of ``orders`` for each."""
    params = factors(u[:, 1:], size)
    number = (u[:, order_column] * np.float32(len(orders))).astype(np.int64)
    choice = orders[number]
    if p < 1:
        choice[u[:, 0] >= np.float32(p)] = -1
    return choice, ((params,) * 4,) * 4


def _jitter_steps(op: Any, *, hsv: bool) -> Steps | None:
    order = fixed_order(op)
    if order is None:
        return None
    idle = _idle(op)
    steps = tuple(k for k in order if not idle[k])
    if not steps:  # what remains of it is the clamp
        return Steps((Code.ADD,), write_nothing)
    codes = tuple((_JIGGLE if hsv else _JITTER)[k] for k in steps)
    return Steps(codes, partial(_write_factors, steps=steps, additive=hsv))


def _write_factors(out: Float, params: Params, size: Size, *, steps: tuple[int, ...], additive: bool) -> None:
    for column, k in enumerate(steps):
        value = params[_FACTORS[k]]
        if additive and k == 0:
            value = value - np.float32(1)
        out[:, column, :3] = value[:, None]


def _jitter(*, hsv: bool) -> Entry:
    return Entry(
        "pixels",
        parameters=partial(_factors, hsv=hsv),
        steps=partial(_jitter_steps, hsv=hsv),
        prepare=partial(_prepare_jitter, hsv=hsv),
    )


# --- the others


def _write_brightness(out: Float, params: Params, size: Size) -> None:
    out[:, 0, :3] = (params["brightness_factor"] - np.float32(1))[:, None]


def _grayscale(op: Any) -> Steps | None:
    weights = (0.299, 0.587, 0.114) if op.rgb_weights is None else tuple(float(w) for w in op.rgb_weights)
    if len(weights) != 3:
        return None
    return constant(Code.GRAY, *weights, float(min(weights) < 0 or sum(weights) > 1 + 1e-6))


def _invert(op: Any) -> Steps | None:
    top = op.flags["max_val"]
    return constant(Code.INVERT, float(top)) if getattr(top, "ndim", 0) == 0 else None


def _bits(u: Float, size: Size, *, low: Any, span: Any) -> Params:
    return {"bits_factor": np.rint(u[:, 0] * span + low).astype(np.int32)}  # half to even, as torch rounds


def _posterize(op: Any) -> tuple[int, Rule]:
    low, high = range_of(op, "bit_sampler")
    return 1, partial(_bits, low=low, span=high - low)


def _check_gamma(op: Any, key: str) -> None:
    # Kornia checks only when it draws, and on a GPU its check ends the context.
    for name, (low, high) in ranges(op).items():
        if not 0 <= low <= high:
            raise ConfigError(f"`{key}` must draw `{name}` from 0 <= low <= high. Found: ({low}, {high}).")


def _temperature(u: Float, size: Size, *, drawn: tuple[Any, Any]) -> Params:
    return {"idx": np.minimum(scale(u[:, 0], *drawn).astype(np.int64), int(drawn[1]) - 1)}


def _write_planckian(out: Float, params: Params, size: Size, *, table: Float) -> None:
    out[:, 0, 0], out[:, 0, 1], out[:, 0, 2] = table[params["idx"], 0], 1, table[params["idx"], 1]


def _channels(u: Float, size: Size) -> Params:
    return {"channels": np.argsort(u[:, :3], axis=1, kind="stable")}


def _write_channels(out: Float, params: Params, size: Size) -> None:
    out[:, 0, :3] = params["channels"]


_scaled = step(Code.MULTIPLY, *("contrast_factor",) * 3)

ENTRIES = {
    "ColorJitter": _jitter(hsv=False),
    "ColorJiggle": _jitter(hsv=True),
    "RandomBrightness": Entry(
        "pixels",
        parameters=all_uniform,
        steps=lambda op: Steps((Code.ADD,), _write_brightness) if op.clip_output else None,
    ),
    "RandomContrast": Entry("pixels", parameters=all_uniform, steps=lambda op: _scaled(op) if op.clip_output else None),
    "RandomSaturation": Entry("pixels", parameters=all_uniform, steps=step(Code.SATURATION_HSV, "saturation_factor")),
    "RandomHue": Entry("pixels", parameters=all_uniform, steps=step(Code.HUE, "hue_factor")),
    "RandomGrayscale": Entry("pixels", steps=_grayscale),
    "RandomSolarize": Entry("pixels", parameters=all_uniform, steps=step(Code.SOLARIZE, "thresholds", "additions")),
    "RandomPosterize": Entry("pixels", parameters=_posterize, steps=step(Code.POSTERIZE, "bits_factor")),
    "RandomInvert": Entry("pixels", steps=_invert),
    # torch's `pow` rounds the last pixels of a stretch of memory differently, and where stretches end depends on the
    # size of the batch (6e-8 in one of some hundred batches).
    "RandomGamma": Entry(
        "pixels",
        parameters=all_uniform,
        steps=step(Code.GAMMA, "gamma_factor", "gain_factor"),
        check=_check_gamma,
        one_by_one=True,
    ),
    "RandomRGBShift": Entry("pixels", parameters=all_uniform, steps=step(Code.ADD, "r_shift", "g_shift", "b_shift")),
    "RandomPlanckianJitter": Entry(
        "pixels",
        parameters=lambda op: (1, partial(_temperature, drawn=range_of(op, "pl_idx_dist"))),
        steps=lambda op: Steps(
            (Code.MULTIPLY,), partial(_write_planckian, table=op.pl.cpu().numpy().astype(np.float32))
        ),
    ),
    "RandomChannelShuffle": Entry(
        "pixels", parameters=lambda op: (3, _channels), steps=lambda op: Steps((Code.SHUFFLE,), _write_channels)
    ),
    "RandomAutoContrast": Entry("pixels", steps=lambda op: constant(Code.AUTOCONTRAST, float(op.clip_output))),
    "RandomEqualize": Entry("pixels", steps=step(Code.EQUALIZE)),
    "RandomClahe": Entry("pixels", parameters=all_uniform),
}
