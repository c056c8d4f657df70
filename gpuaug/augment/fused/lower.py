"""Kornia's operations as steps of one small instruction set, which the fused backend executes in one pass.

takes: a Kornia module, and its parameters for a batch (numpy, on the host).
does: names the steps (:class:`Code`) and writes their arguments.
gives: ``code`` int32 [B, S] and ``args`` float32 [B, S, ARGS]; what each sample goes through, in order.

A new operation is one function here. The formulas of the steps stand in native.cpp (CPU), batched.py (torch) and
triton_kernels.py (CUDA), and are those of Kornia 0.9.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpuaug.augment.parameters import Chosen, Params, Prepared, Size, tensors
from gpuaug.errors import ConfigError
from gpuaug.random.keyed import Float

ARGS = 12  # float32 arguments of one step


class Code(IntEnum):
    """The steps; in brackets their arguments. Colours are clamped to 0..1 where Kornia clamps them."""

    NONE = 0
    HFLIP = 1
    VFLIP = 2
    MULTIPLY = 3  # (r, g, b)
    ADD = 4  # (r, g, b)
    CONTRAST = 5  # (factor), around the mean gray of the image at this point
    SATURATION = 6  # (factor), towards gray
    SATURATION_HSV = 7  # (factor)
    HUE = 8  # (turns)
    GRAY = 9  # (weights of r, g, b, 1 where they can leave 0..1)
    SOLARIZE = 10  # (threshold, addition)
    POSTERIZE = 11  # (bits)
    INVERT = 12  # (maximum)
    GAMMA = 13  # (gamma, gain)
    SHUFFLE = 14  # (source of r, of g, of b)
    ERASE = 15  # (x, y, width, height, value)
    NOISE = 16  # (); adds a field
    AUTOCONTRAST = 17  # (1: clamp)
    EQUALIZE = 18
    SHARPNESS = 19  # (factor)
    BLUR = 20  # (taps in x, taps in y, sigma, border: kornia.constants.BorderType)
    WARP = 21  # (matrix row by row from output to input in -1..1, padding: SamplePadding, align_corners, projective)


Write = Callable[[Float, Params, Size], None]  # arguments float32 [n, steps, ARGS] (zeros) to fill, from n rows


@dataclass(frozen=True, slots=True)
class Lowered:
    """The steps of one Kornia module, and what writes their arguments."""

    codes: tuple[Code, ...]
    write: Write


def lower(module: nn.Module) -> Lowered | None:
    """The steps that equal a Kornia module, or None where there are none: then the module itself has to run.

    The exact class decides: what a subclass does is its own affair.
    """
    import kornia.augmentation as K

    kind: type[nn.Module] = type(module)
    m: Any = module
    flags: dict[str, Any] = getattr(module, "flags", {})
    if kind is K.RandomHorizontalFlip:
        return Lowered((Code.HFLIP,), _nothing)
    if kind is K.RandomVerticalFlip:
        return Lowered((Code.VFLIP,), _nothing)
    if kind in (K.ColorJitter, K.ColorJiggle) and m._fixed_order is not None:
        return _jitter(m, _JITTER if kind is K.ColorJitter else _JIGGLE)
    if kind is K.RandomBrightness and m.clip_output:
        return Lowered((Code.ADD,), _brightness)
    if kind is K.RandomContrast and m.clip_output:
        return Lowered((Code.MULTIPLY,), partial(_same, name="contrast_factor"))
    if kind is K.RandomSaturation:
        return Lowered((Code.SATURATION_HSV,), partial(_one, names=("saturation_factor",)))
    if kind is K.RandomHue:
        return Lowered((Code.HUE,), partial(_one, names=("hue_factor",)))
    if kind is K.RandomGrayscale:
        weights = (0.299, 0.587, 0.114) if m.rgb_weights is None else tuple(float(w) for w in m.rgb_weights)
        if len(weights) != 3:
            return None
        leaves = float(min(weights) < 0 or sum(weights) > 1 + 1e-6)
        return Lowered((Code.GRAY,), partial(_constant, values=(*weights, leaves)))
    if kind is K.RandomSolarize:
        return Lowered((Code.SOLARIZE,), partial(_one, names=("thresholds", "additions")))
    if kind is K.RandomPosterize:
        return Lowered((Code.POSTERIZE,), partial(_one, names=("bits_factor",)))
    if kind is K.RandomInvert:
        top = flags["max_val"]
        if getattr(top, "ndim", 0) != 0:
            return None
        return Lowered((Code.INVERT,), partial(_constant, values=(float(top),)))
    if kind is K.RandomGamma:
        return Lowered((Code.GAMMA,), partial(_one, names=("gamma_factor", "gain_factor")))
    if kind is K.RandomRGBShift:
        return Lowered((Code.ADD,), partial(_one, names=("r_shift", "g_shift", "b_shift")))
    if kind is K.RandomPlanckianJitter:
        return Lowered((Code.MULTIPLY,), partial(_planckian, table=m.pl.detach().cpu().numpy().astype(np.float32)))
    if kind is K.RandomChannelShuffle:
        return Lowered((Code.SHUFFLE,), _channels)
    if kind is K.RandomErasing:
        return Lowered((Code.ERASE,), partial(_one, names=("xs", "ys", "widths", "heights", "values")))
    if kind is K.RandomGaussianNoise:
        return Lowered((Code.NOISE,), _nothing)
    if kind is K.RandomAutoContrast:
        return Lowered((Code.AUTOCONTRAST,), partial(_constant, values=(float(m.clip_output),)))
    if kind is K.RandomEqualize:
        return Lowered((Code.EQUALIZE,), _nothing)
    if kind is K.RandomSharpness:
        return Lowered((Code.SHARPNESS,), _sharpness)
    if kind is K.RandomGaussianBlur:
        size = flags["kernel_size"]
        ky, kx = (size, size) if isinstance(size, int) else size
        if kx % 2 == 0 or ky % 2 == 0:
            return None
        return Lowered((Code.BLUR,), partial(_blur, taps=(kx, ky), border=flags["border_type"].value))
    if kind in _warps():
        padding = flags["padding_mode"].name if "padding_mode" in flags else "ZEROS"
        if flags["resample"].name != "BILINEAR" or padding not in _PADDINGS:
            return None
        projective = kind is K.RandomPerspective
        how = tuple(float(v) for v in (_PADDINGS.index(padding), flags["align_corners"], projective))
        return Lowered((Code.WARP,), partial(_perspective if projective else _warp, how=how))
    return None


@lru_cache(maxsize=1)
def _warps() -> tuple[type[nn.Module], ...]:
    import kornia.augmentation as K

    return (
        K.RandomAffine, K.RandomRotation, K.RandomRotation90, K.RandomShear, K.RandomTranslate, K.RandomPerspective,
    )  # fmt: skip


_PADDINGS = ("ZEROS", "BORDER", "REFLECTION")


# --- arguments of the steps


def _nothing(out: Float, params: Params, size: Size) -> None:
    pass


def _constant(out: Float, params: Params, size: Size, *, values: tuple[float, ...]) -> None:
    out[:, 0, : len(values)] = values


def _one(out: Float, params: Params, size: Size, *, names: tuple[str, ...]) -> None:
    for column, name in enumerate(names):
        out[:, 0, column] = params[name]


def _same(out: Float, params: Params, size: Size, *, name: str) -> None:
    out[:, 0, :3] = params[name][:, None]


def _brightness(out: Float, params: Params, size: Size) -> None:
    out[:, 0, :3] = (params["brightness_factor"] - np.float32(1))[:, None]


def _channels(out: Float, params: Params, size: Size) -> None:
    out[:, 0, :3] = params["channels"]


def _planckian(out: Float, params: Params, size: Size, *, table: Float) -> None:
    out[:, 0, 0], out[:, 0, 1], out[:, 0, 2] = table[params["idx"], 0], 1, table[params["idx"], 1]


_FACTORS = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")  # as `order` numbers them
_NEUTRAL = (1, 1, 1, 0)
_JITTER = (Code.MULTIPLY, Code.CONTRAST, Code.SATURATION, Code.HUE)
_JIGGLE = (Code.ADD, Code.MULTIPLY, Code.SATURATION_HSV, Code.HUE)


def _jitter(module: Any, codes: tuple[Code, ...]) -> Lowered:
    g = module._param_generator
    samplers = (g.brightness_sampler, g.contrast_sampler, g.saturation_sampler, g.hue_sampler)
    # A step whose factor can only be neutral is skipped by Kornia too.
    steps = tuple(
        k for k in module._fixed_order if not float(samplers[k].low) == float(samplers[k].high) == _NEUTRAL[k]
    )
    if not steps:  # what remains of it is the clamp
        return Lowered((Code.ADD,), _nothing)
    return Lowered(tuple(codes[k] for k in steps), partial(_factors, steps=steps, additive=codes is _JIGGLE))


def _factors(out: Float, params: Params, size: Size, *, steps: tuple[int, ...], additive: bool) -> None:
    for column, k in enumerate(steps):
        value = params[_FACTORS[k]]
        if additive and k == 0:
            value = value - np.float32(1)
        out[:, column, :3] = value[:, None]


def _sharpness(out: Float, params: Params, size: Size) -> None:
    if min(size) < 3:
        raise ConfigError(f"RandomSharpness needs images of at least 3x3 pixels. Found: {size[0]}x{size[1]}.")
    out[:, 0, 0] = params["sharpness"]


def _blur(out: Float, params: Params, size: Size, *, taps: tuple[int, int], border: int) -> None:
    least = {1: 1, 3: 0}.get(border)  # reflection needs one pixel more than it reaches, circular none
    if least is not None and (size[1] < taps[0] // 2 + least or size[0] < taps[1] // 2 + least):
        raise ConfigError(
            f"RandomGaussianBlur with `kernel_size` {taps[::-1]} needs images larger than half of it. Found: "
            f"{size[0]}x{size[1]}. Choose a smaller kernel."
        )
    out[:, 0, 0], out[:, 0, 1], out[:, 0, 2], out[:, 0, 3] = taps[0], taps[1], params["sigma"], border


# What an affine matrix is made of, until finish_warps() makes the matrices of a batch in one go: Kornia's functions
# take 0.15 ms each, and the two slots of RandAugment have ten.
_AFFINE = ("angle", "scale_x", "scale_y", "translate_x", "translate_y", "shear_x", "shear_y")
_IDENTITY = (0, 1, 1, 0, 0, 0, 0, 0, 0)


def _warp(out: Float, params: Params, size: Size, *, how: tuple[float, ...]) -> None:
    out[:, 0] = (*_IDENTITY, *how)
    for column, name in enumerate(_AFFINE):
        if name in params:
            out[:, 0, column] = params[name]
    if "scale" in params:
        out[:, 0, 1:3], out[:, 0, 3:5] = params["scale"], params["translations"]
    elif "degrees" in params:
        out[:, 0, 0] = -params["degrees"]  # counter-clockwise, unlike the others
    elif "times" in params:
        out[:, 0, 0] = -90 * np.rint(params["times"])


def _perspective(out: Float, params: Params, size: Size, *, how: tuple[float, ...]) -> None:
    from kornia.geometry.transform import get_perspective_transform

    points = tensors(params)
    out[:, 0, :9] = get_perspective_transform(points["start_points"], points["end_points"]).reshape(-1, 9)
    out[:, 0, 9:12] = how


def finish_warps(code: NDArray[np.int32], args: Float, size: Size) -> None:
    """Matrices from output to input coordinates in -1..1, in the place of what they are made of; bits as Kornia's."""
    sample, step = np.nonzero(code == Code.WARP)
    warps = args[sample, step]
    kind = 2 * warps[:, 10] + warps[:, 11]  # align_corners, projective
    for number in np.unique(kind):
        rows = np.flatnonzero(kind == number)
        given = torch.from_numpy(warps[rows, :9])
        if number % 2:
            m = given.view(-1, 3, 3)
            m = m / _projective_scale(m)
        else:
            m = _affine(given, size)
        to, back = _normalized(size, number >= 2)
        args[sample[rows], step[rows], :9] = _inverse(to @ (m @ back)).reshape(-1, 9)


def _affine(values: Tensor, size: Size) -> Tensor:
    """Matrices in pixels, float32 [n, 3, 3], from columns as `_AFFINE`; kornia's get_affine_matrix2d, to the bit."""
    angle, scale_x, scale_y = (-values[:, 0]).deg2rad(), values[:, 1], values[:, 2]
    x, y = (torch.full_like(angle, (n - 1) / 2) for n in size[::-1])
    cos, sin, zero, one = angle.cos(), angle.sin(), torch.zeros_like(angle), torch.ones_like(angle)
    turned = torch.stack([cos * scale_x, sin * scale_y, x, -sin * scale_x, cos * scale_y, y, zero, zero, one], dim=1)
    around = torch.stack([one, zero, -x, zero, one, -y, zero, zero, one], dim=1)
    m = turned.view(-1, 3, 3) @ around.view(-1, 3, 3)
    m[:, :2, 2] += values[:, 3:5]
    a, b = (values[:, 5:7] * (math.pi / 180)).tan().unbind(1)
    shear = torch.stack([one, -a, a * y, -b, one + a * b, b * (x - a * y), zero, zero, one], dim=1)
    return m @ shear.view(-1, 3, 3)


@lru_cache(maxsize=32)
def _normalized(size: Size, corners: bool) -> tuple[Tensor, Tensor]:
    """float32 [1, 3, 3] from pixels to -1..1, and back."""
    from kornia.geometry.conversions import normal_transform_pixel

    to = normal_transform_pixel(*size, dtype=torch.float32, align_corners=corners)
    return to, _inverse(to)


@lru_cache(maxsize=16)
def warp_ramps(size: Size) -> Float:
    """Output positions in -1..1, float32 [2, 2, W + H]: affine or projective, align_corners; all x, then all y."""
    from kornia.geometry.grid import create_meshgrid

    ramps = np.zeros((2, 2, size[1] + size[0]), dtype=np.float32)
    for corners in (False, True):
        for start, n in ((0, size[1]), (size[1], size[0])):
            end = 1.0 if corners else 1.0 - 1.0 / n
            if n > 1:
                ramps[0, int(corners), start : start + n] = torch.linspace(-end, end, n, dtype=torch.float32)
        grid = create_meshgrid(*size, normalized_coordinates=True, dtype=torch.float32, align_corners=corners)
        ramps[1, int(corners)] = torch.cat([grid[0, 0, :, 0], grid[0, :, 0, 1]])
    return ramps


def _projective_scale(m: Tensor) -> Tensor:
    """What Kornia divides a homography by: the magnitude nearest to 1 in its range."""
    magnitude = m.abs()
    smallest = magnitude.masked_fill(magnitude == 0, float("inf")).amin(dim=(-2, -1), keepdim=True)
    return magnitude.amax(dim=(-2, -1), keepdim=True).clamp_max(1).maximum(smallest)


def _inverse(m: Tensor) -> Tensor:
    """3x3 inverses by cross products of the columns, as Kornia takes them."""
    a, b, c = m.unbind(-1)
    rows = [torch.linalg.cross(p, q, dim=-1) for p, q in ((b, c), (c, a), (a, b))]
    return torch.stack(rows, dim=-2) / (a * rows[0]).sum(-1)[..., None, None]


# --- a whole recipe


@dataclass(frozen=True, slots=True)
class Column:
    """Where the steps of one slot stand in the program: the slot's alternatives, and the columns they share."""

    op: int
    slot: int
    alternatives: tuple[Lowered, ...]
    start: int
    width: int
    table: NDArray[np.int32]  # [alternatives + 1, width]: codes per choice; the last row, for choice -1, is empty


class Lowering:
    """Consecutive operations of a recipe, lowered; turns what was chosen into the program of every sample.

    Args:
        ops: prepared operations, all of whose modules can be lowered (see :func:`lowered_slots`).
        slots: their lowered alternatives.
    """

    def __init__(self, ops: list[Prepared], slots: list[list[tuple[Lowered, ...]]]) -> None:
        self.ops = ops
        self.columns: list[Column] = []
        at = 0
        for number, op_slots in enumerate(slots):
            for slot, alternatives in enumerate(op_slots):
                width = max(len(a.codes) for a in alternatives)
                table = np.zeros((len(alternatives) + 1, width), dtype=np.int32)
                for row, a in enumerate(alternatives):
                    table[row, : len(a.codes)] = a.codes
                self.columns.append(Column(number, slot, alternatives, at, width, table))
                at += width
        self.steps = at
        self.codes = frozenset(Code(int(c)) for column in self.columns for c in column.table.ravel() if c)

    def program(self, chosen: list[Chosen], size: Size) -> tuple[NDArray[np.int32], Float]:
        """``code`` int32 [B, steps] and ``args`` float32 [B, steps, ARGS], zero where nothing is done."""
        batch = len(chosen[0].choice) if chosen else 0
        code = np.empty((batch, self.steps), dtype=np.int32)
        args = np.zeros((batch, self.steps, ARGS), dtype=np.float32)
        everything = np.arange(batch)
        values: dict[int, Float] = {}
        for column in self.columns:
            c = chosen[column.op]
            choice, params = c.choice[:, column.slot], c.params[column.slot]
            where = slice(column.start, column.start + column.width)
            code[:, where] = column.table[choice]  # -1 is the last row
            if len(column.alternatives) == 1:
                column.alternatives[0].write(args[:, where], params[0], size)
                continue
            # Every alternative for every sample, then one of them picked: fewer calls than rows of each. The slots of
            # a jitter share factors and differ in the step: written once.
            if id(params) not in values:
                stacked = np.zeros((len(params), batch, column.width, ARGS), dtype=np.float32)
                for alternative, a in enumerate(column.alternatives):
                    a.write(stacked[alternative][:, : len(a.codes)], params[alternative], size)
                values[id(params)] = stacked
            args[:, where] = values[id(params)][choice, everything]
        if Code.WARP in self.codes:
            finish_warps(code, args, size)
        return code, args


def lowered_slots(op: Prepared) -> list[tuple[Lowered, ...]] | str:
    """The lowered alternatives of every slot of an operation, or why it cannot be lowered."""
    if op.seeded is not None:
        return op.seeded
    slots = []
    for modules in op.slots:
        alternatives = []
        for module in modules:
            lowered = lower(module)
            if lowered is None:
                return f"no fused form of {type(module).__name__} with these settings"
            alternatives.append(lowered)
        slots.append(tuple(alternatives))
    return slots
