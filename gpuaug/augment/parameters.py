"""Draws to Kornia's parameters: one rule per operation, numpy float32 on the host, vectorised over the batch.

An operation of a recipe is prepared once. What comes out, :class:`Prepared`, says how many uniforms a sample needs and
turns them into :class:`Chosen`: which Kornia module each sample goes through, and Kornia's own ``params`` for it. Both
backends execute that and draw nothing. Formulas and distributions are Kornia's: given the uniforms that Kornia would
have drawn, the parameters are the same to the last bit.

A sample's parameters depend on its own uniforms only, and so must its pixels. Kornia's jitter skips a step when *all*
factors of a batch are neutral, so a neutral factor next to others would not give what it gives alone: a factor drawn
exactly neutral is moved to the next float.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpuaug.random.keyed import Float, Int, field, normal_field, scale

logger = logging.getLogger("gpuaug")

Size = tuple[int, int]  # H, W of the images an operation is applied to
Params = dict[str, NDArray[Any]]  # Kornia's names to arrays [B, ...]
Rule = Callable[[Float, Size], Params]  # uniforms [B, n] to parameters, without the gate
Alternatives = tuple[Params, ...]

ORDERS = np.array(list(itertools.permutations(range(4))), dtype=np.int64)  # [24, 4]
_NUDGE = np.float32(1e-30)  # smaller than any hue that changes a pixel, and not 0


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """What happens to each sample of a batch in one operation.

    Attributes:
        choice: int64 [B, S]: which alternative of slot s a sample goes through; -1: the slot leaves it untouched.
        params: per slot and alternative, Kornia's parameters [B, ...] without ``batch_prob``; every row is valid, also
            the rows of samples that go elsewhere. Slots and alternatives may share one dictionary.
        keys: int64 [B, 2], for per-pixel noise (see :func:`noise`) and for seeded operations; None for the others.
    """

    choice: Int
    params: tuple[Alternatives, ...]
    keys: Int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """One operation of a recipe, ready to be drawn; settings are read once, when it is made.

    Attributes:
        name: its key in ``ops``.
        op: the module as given; never changed.
        slots: S slots, applied one after the other; each offers alternatives, of which a sample goes through one or
            none. The modules are private copies with ``p = 1``: the gate is in ``Chosen.choice``.
        count: uniforms that a sample needs, the gate first.
        rule: uniforms [B, count] and (H, W) to ``choice`` and ``params``.
        keyed: whether each sample also needs a key, for per-pixel noise or as a seed.
        seeded: None, or why no rule is known: then the module itself draws, per sample, with torch's global generator
            set from the sample's key and restored afterwards (its own ``p`` is left in place).
    """

    name: str
    op: Any
    slots: tuple[tuple[nn.Module, ...], ...]
    count: int
    rule: Callable[[Float, Size], tuple[Int, tuple[Alternatives, ...]]]
    keyed: bool = False
    seeded: str | None = None

    def draw(self, u: Float, size: Size, keys: Int | None = None) -> Chosen:
        """Uniforms float32 [B, count], image size (H, W) and, if ``keyed``, int64 keys [B, 2] to choices."""
        choice, params = self.rule(u, size)
        return Chosen(choice, params, keys)


def private(op: nn.Module) -> Any:
    """A copy of a Kornia operation that is always applied: the gate is drawn outside, and ``p = 1`` skips blending."""
    module = copy.deepcopy(op)
    module.p = 1.0  # type: ignore[assignment]
    return module


# --- rules: uniforms of a sample, in the order Kornia draws them, to Kornia's parameters


def gated(u: Float, size: Size, *, p: float, rule: Rule) -> tuple[Int, tuple[Alternatives, ...]]:
    """The rule's parameters for the samples whose first uniform is below ``p``."""
    choice = (u[:, :1] < np.float32(p)).astype(np.int64) - 1
    return choice, ((rule(u[:, 1:], size),),)


def nothing(u: Float, size: Size) -> Params:
    """For operations that have a gate only."""
    return {}


def uniform(u: Float, size: Size, *, names: tuple[str, ...], low: Float, span: Float) -> Params:
    """Independent uniform parameters; ``low`` and ``span`` are float32 [n, 1]."""
    values = np.multiply(u[:, : len(names)].T, span, order="C")  # one contiguous row per parameter
    values += low
    return dict(zip(names, values, strict=True))


def _jitter_factors(u: Float, size: Size, *, low: Float, span: Float, jiggle: bool) -> Params:
    params = uniform(
        u, size, names=("brightness_factor", "contrast_factor", "hue_factor", "saturation_factor"), low=low, span=span
    )
    if span[2, 0] != 0:
        hue = params["hue_factor"]
        hue[hue == 0] = _NUDGE
    if jiggle and span[3, 0] != 0:  # in HSV, so that 1 is not quite the identity
        saturation = params["saturation_factor"]
        saturation[saturation == 1] = (
            np.nextafter(np.float32(1), low[3, 0], dtype=np.float32)
            if low[3, 0] < 1
            else np.nextafter(np.float32(1), np.float32(2), dtype=np.float32)
        )
    return params


def jitter(
    u: Float, size: Size, *, p: float, factors: Rule, orders: Int, order_column: int
) -> tuple[Int, tuple[Alternatives, ...]]:
    """Factors for the samples whose first uniform is below ``p``, and one of ``orders`` for each."""
    params = factors(u[:, 1:], size)
    number = (u[:, order_column] * np.float32(len(orders))).astype(np.int64)
    choice = orders[number]
    if p < 1:
        choice[u[:, 0] >= np.float32(p)] = -1
    return choice, ((params,) * 4,) * 4


def posterize(u: Float, size: Size, *, low: Any, span: Any) -> Params:
    """Bits: a rounded uniform, half to even as torch rounds."""
    return {"bits_factor": np.rint(u[:, 0] * span + low).astype(np.int32)}


def _erasing(u: Float, size: Size, *, area: tuple[Any, Any], ratios: tuple[Any, ...], value: float) -> Params:
    height, width = size
    target = scale(u[:, 0], *area) * np.float32(height * width)
    if len(ratios) == 3:  # low < 1 < high: a coin decides for wide or tall
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


def _center(count: int, size: Size) -> Float:
    return np.broadcast_to(np.array([size[1], size[0]], dtype=np.float32) / np.float32(2) - np.float32(0.5), (count, 2))


def _affine(u: Float, size: Size, *, low: Float, span: Float, scales: int, translate: bool, shear: bool) -> Params:
    # columns: angle, [scale_x, [scale_y]], [translate_x, translate_y], [shear_x, shear_y]
    values = u[:, : len(low)] * span[:, 0] + low[:, 0]
    zeros = np.zeros(len(u), dtype=np.float32)
    at = 1 + scales
    moved = np.zeros((len(u), 2), dtype=np.float32)
    if translate:
        moved = values[:, at : at + 2] * np.array([size[1], size[0]], dtype=np.float32)
        at += 2
    grown = values[:, [1, scales]] if scales else np.ones((len(u), 2), dtype=np.float32)
    return {
        "translations": moved,
        "center": _center(len(u), size),
        "scale": grown,
        "angle": values[:, 0],
        "shear_x": values[:, at] if shear else zeros,
        "shear_y": values[:, at + 1] if shear else zeros,
    }


def _shear(u: Float, size: Size, *, low: Float, span: Float) -> Params:
    params = uniform(u, size, names=("shear_x", "shear_y"), low=low, span=span)
    return {"center": _center(len(u), size), **params}


def _translate(u: Float, size: Size, *, x: tuple[Any, Any] | None, y: tuple[Any, Any] | None) -> Params:
    zeros = np.zeros(len(u), dtype=np.float32)
    last = 1 if x is not None else 0
    return {
        "translate_x": zeros if x is None else scale(u[:, 0], *x) * np.float32(size[1]),
        "translate_y": zeros if y is None else scale(u[:, last], *y) * np.float32(size[0]),
    }


_INWARD = np.array([[1, 1], [-1, 1], [-1, -1], [1, -1]], dtype=np.float32)  # towards the centre, from each corner


def _perspective(u: Float, size: Size, *, distortion: Any, basic: bool) -> Params:
    height, width = size
    x, y = max(width - 1, 1), max(height - 1, 1)  # Kornia's corners of an image one pixel wide
    start = np.array([[0, 0], [x, 0], [x, y], [0, y]], dtype=np.float32)
    extent = np.array([width if width > 1 else 0, height if height > 1 else 0], dtype=np.float32)
    factor = np.float32(distortion) * extent / np.float32(2)
    corners = u.reshape(len(u), 4, 2)
    offset = factor * corners * _INWARD if basic else np.float32(2) * factor * (corners - np.float32(0.5))
    return {"start_points": np.broadcast_to(start, offset.shape), "end_points": start + offset}


def _channels(u: Float, size: Size) -> Params:
    return {"channels": np.argsort(u[:, :3], axis=1, kind="stable")}


def _planckian(u: Float, size: Size, *, low: Any, high: Any) -> Params:
    return {"idx": np.minimum(scale(u[:, 0], low, high).astype(np.int64), int(high) - 1)}


def _motion(u: Float, size: Size, *, names: tuple[str, ...], low: Float, span: Float, kernel_size: int) -> Params:
    return {
        "ksize_factor": np.full(len(u), kernel_size, dtype=np.int32),
        **uniform(u, size, names=names, low=low, span=span),
    }


# --- reading the settings of a Kornia operation


def bounds(sampler: Any) -> tuple[np.float32, np.float32]:
    """Lowest and highest value of a Kornia sampler."""
    return np.float32(float(sampler.low)), np.float32(float(sampler.high))


def _ranges(*samplers: Any) -> dict[str, Any]:
    """``low`` and ``span`` float32 [n, 1], as torch's Uniform has them."""
    low, high = np.array([bounds(s) for s in samplers], dtype=np.float32).T[:, :, None]
    return {"low": low, "span": high - low}


def rule_of(op: nn.Module) -> tuple[int, Rule] | None:
    """How many uniforms an operation's parameters take (without the gate), and the rule; None where none is known.

    The exact class decides: what a subclass draws is its own affair.
    """
    import kornia.augmentation as K

    kind: type[nn.Module] = type(op)
    g: Any = getattr(op, "_param_generator", None)
    if kind in (
        K.RandomHorizontalFlip, K.RandomVerticalFlip, K.RandomGrayscale, K.RandomEqualize, K.RandomInvert,
        K.RandomAutoContrast, K.RandomGaussianNoise, K.RandomElasticTransform, K.RandomBoxBlur, K.RandomMedianBlur,
    ):  # fmt: skip
        return 0, nothing
    if kind in (
        K.RandomBrightness, K.RandomContrast, K.RandomSaturation, K.RandomHue, K.RandomGamma, K.RandomSharpness,
        K.RandomSolarize, K.RandomRotation, K.RandomRotation90, K.RandomRGBShift, K.RandomSnow, K.RandomClahe,
    ):  # fmt: skip
        samplers: dict[str, Any] = g.sampler_dict
        return len(samplers), partial(uniform, names=tuple(samplers), **_ranges(*samplers.values()))
    if kind in (K.ColorJitter, K.ColorJiggle):
        samplers_ = [g.brightness_sampler, g.contrast_sampler, g.hue_sampler, g.saturation_sampler]
        return 4, partial(_jitter_factors, jiggle=kind is K.ColorJiggle, **_ranges(*samplers_))
    if kind is K.RandomGaussianBlur:
        return 1, partial(uniform, names=("sigma",), **_ranges(g.sigma_sampler))
    if kind is K.RandomJPEG:
        return 1, partial(uniform, names=("jpeg_quality",), **_ranges(g.jpeg_quality_sampler))
    if kind is K.RandomPosterize:
        low, high = bounds(g.bit_sampler)
        return 1, partial(posterize, low=low, span=high - low)
    if kind is K.RandomErasing:
        if hasattr(g, "ratio_sampler1"):
            ratios: tuple[Any, ...] = (*bounds(g.ratio_sampler1), bounds(g.ratio_sampler2)[1])
        else:
            ratios = bounds(g.ratio_sampler)
        return 2 * len(ratios), partial(_erasing, area=bounds(g.scale_sampler), ratios=ratios, value=float(g.value))
    if kind is K.RandomAffine:
        optional = (
            g.scale_2_sampler,
            g.scale_4_sampler,
            g.translate_x_sampler,
            g.translate_y_sampler,
            g.shear_x_sampler,
            g.shear_y_sampler,
        )
        drawn = [g.degree_sampler, *(s for s in optional if s is not None)]
        scales = (g.scale_2_sampler is not None) + (g.scale_4_sampler is not None)
        settings: dict[str, Any] = {
            "scales": scales,
            "translate": optional[2] is not None,
            "shear": optional[4] is not None,
        }
        return len(drawn), partial(_affine, **settings, **_ranges(*drawn))
    if kind is K.RandomShear:
        return 2, partial(_shear, **_ranges(g.shear_x_sampler, g.shear_y_sampler))
    if kind is K.RandomTranslate:
        x, y = (None if s is None else bounds(s) for s in (g.translate_x_sampler, g.translate_y_sampler))
        return (x is not None) + (y is not None), partial(_translate, x=x, y=y)
    if kind is K.RandomPerspective:
        return 8, partial(_perspective, distortion=float(g._distortion_scale), basic=g.sampling_method == "basic")
    if kind is K.RandomChannelShuffle:
        return 3, _channels
    if kind is K.RandomPlanckianJitter:
        low, high = bounds(g.pl_idx_dist)
        return 1, partial(_planckian, low=low, high=high)
    if kind is K.RandomMotionBlur and isinstance(g.kernel_size, int):
        names = ("angle_factor", "direction_factor")
        return 2, partial(
            _motion, names=names, kernel_size=g.kernel_size, **_ranges(g.angle_sampler, g.direction_sampler)
        )
    return None


# --- per-pixel noise


def needs_noise(op: nn.Module) -> bool:
    """Whether :func:`noise` gives parameters of the operation."""
    import kornia.augmentation as K

    return type(op) in (K.RandomGaussianNoise, K.RandomElasticTransform)


def noise(
    op: nn.Module, keys: Tensor, size: Size, normal: Callable[[Tensor, int], Tensor] = normal_field
) -> dict[str, Tensor]:
    """The per-pixel parameters of an operation, float32 on the device of ``keys`` (int64 [B, 2]); {} for most.

    ``normal`` draws standard normal values as :func:`gpuaug.random.keyed.normal_field` does.
    """
    import kornia.augmentation as K

    height, width = size
    if type(op) is K.RandomGaussianNoise:
        generator: Any = op._param_generator
        values = normal(keys, 3 * height * width).view(-1, 3, height, width)
        return {"gaussian_noise": values.mul_(generator.std).add_(generator.mean)}  # as large as the batch
    if type(op) is K.RandomElasticTransform:
        return {"noise": field(keys, 2 * height * width).view(-1, 2, height, width) * 2 - 1}
    return {}


def tensors(params: Params, rows: Int | None = None) -> dict[str, Tensor]:
    """Parameters of the given rows (None: all) as CPU tensors, where Kornia wants them."""
    chosen = {k: v if rows is None else v[rows] for k, v in params.items()}
    # what is the same for every sample is a view of one row that cannot be written, and torch warns of those
    return {k: torch.from_numpy(np.require(v, requirements=["C", "W"])) for k, v in chosen.items()}
