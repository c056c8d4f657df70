"""Entries for operations that move pixels: by a matrix or by one offset per pixel (a field)."""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.augment.ops.codes import Code
from gpuaug.augment.ops.kornia_private import setting
from gpuaug.augment.parameters import (
    Entry,
    Matrix,
    Normal,
    Params,
    Rule,
    Size,
    Steps,
    Tensors,
    all_uniform,
    derived,
    step,
    tensors,
    uniform_from,
)  # fmt: skip
from gpuaug.random.keyed import Float, scale, uniform_field

# --- parameters


def _center(count: int, size: Size) -> Float:
    return np.broadcast_to(np.array([size[1], size[0]], dtype=np.float32) / np.float32(2) - np.float32(0.5), (count, 2))


def _affine(u: Float, size: Size, *, rule: Rule) -> Params:
    drawn = rule(u, size)
    zeros, ones = (np.full(len(u), v, dtype=np.float32) for v in (0, 1))
    across = drawn.get("scale_2", ones)
    moved = _translate(u, size, rule=rule)
    return {
        "translations": np.stack([moved["translate_x"], moved["translate_y"]], axis=1),
        "center": _center(len(u), size),
        "scale": np.stack([across, drawn.get("scale_4", across)], axis=1),
        "angle": drawn["degree"],
        "shear_x": drawn.get("shear_x", zeros),
        "shear_y": drawn.get("shear_y", zeros),
    }


def _shear(u: Float, size: Size, *, rule: Rule) -> Params:
    return {"center": _center(len(u), size), **rule(u, size)}


def _translate(u: Float, size: Size, *, rule: Rule) -> Params:
    drawn, zeros = rule(u, size), np.zeros(len(u), dtype=np.float32)
    sides = {"translate_x": size[1], "translate_y": size[0]}
    return {name: drawn.get(name, zeros) * np.float32(side) for name, side in sides.items()}


_INWARD = np.array([[1, 1], [-1, 1], [-1, -1], [1, -1]], dtype=np.float32)  # towards the centre, from each corner


def _perspective(op: Any) -> tuple[int, Rule]:
    basic = setting(op, "sampling_method") == "basic"
    return 8, partial(_perspective_parameters, distortion=float(setting(op, "_distortion_scale")), basic=basic)


def _perspective_parameters(u: Float, size: Size, *, distortion: float, basic: bool) -> Params:
    height, width = size
    x, y = max(width - 1, 1), max(height - 1, 1)  # if a side is one pixel, Kornia puts the corners at 0 and 1
    start = np.array([[0, 0], [x, 0], [x, y], [0, y]], dtype=np.float32)
    extent = np.array([width if width > 1 else 0, height if height > 1 else 0], dtype=np.float32)
    factor = np.float32(distortion) * extent / np.float32(2)
    corners = u.reshape(len(u), 4, 2)
    offset = factor * corners * _INWARD if basic else np.float32(2) * factor * (corners - np.float32(0.5))
    return {"start_points": np.broadcast_to(start, offset.shape), "end_points": start + offset}


_CONTROLS = np.array([[-1, -1], [-1, 1], [1, -1], [1, 1], [0, 0]], dtype=np.float32)


def _spline(op: Any) -> tuple[int, Rule]:
    limits = (0, 0) if op.dist is None else (float(op.dist.low), float(op.dist.high))
    return 10, partial(_controls, limits=limits)


def _controls(u: Float, size: Size, *, limits: tuple[float, float]) -> Params:
    """Five control points, before and after the move."""
    before = np.broadcast_to(_CONTROLS, (len(u), 5, 2))
    return {"src": before, "dst": before + scale(u.reshape(-1, 5, 2), *limits)}


def _fisheye(u: Float, size: Size, *, rule: Rule) -> Params:
    return {name: values[:, None] for name, values in rule(u, size).items()}


def _jigsaw(op: Any) -> tuple[int, Rule]:
    rows, columns = op.flags["grid"]
    unchanged = np.arange(rows * columns).reshape(rows, columns).T.flatten()  # Kornia's permutation that moves nothing
    changed = bool(setting(op, "ensure_perm"))
    return len(unchanged) + changed, partial(_pieces, unchanged=unchanged if changed else None)


def _pieces(u: Float, size: Size, *, unchanged: NDArray[np.int64] | None) -> Params:
    """Permutations int64 [B, pieces], all equally likely. ``unchanged``: a permutation that no sample gets."""
    if unchanged is None:
        return {"permutation": np.argsort(u, axis=1, kind="stable")}
    pieces = np.argsort(u[:, :-1], axis=1, kind="stable")
    for row in np.flatnonzero((pieces == unchanged).all(axis=1)):
        left, count = unchanged.tolist(), math.factorial(len(unchanged))
        number = 1 + int(float(u[row, -1]) * (count - 1))  # number 0 would be the order `unchanged`
        for column in range(len(unchanged)):
            count //= len(left)
            place, number = divmod(number, count)
            pieces[row, column] = left.pop(place)
    return {"permutation": pieces}


def _elastic_noise(op: Any, params: Tensors, keys: Tensor, size: Size, normal: Normal, channels: int) -> Tensors:
    return {"noise": uniform_field(keys, 2 * size[0] * size[1]).view(-1, 2, *size) * 2 - 1}


# --- matrices

# One call computes all affine matrices of a batch from these numbers. Kornia's own code would take 0.15 ms for each
# operation.
_AFFINE = ("angle", "scale_x", "scale_y", "translate_x", "translate_y", "shear_x", "shear_y")


def _numbers(out: Float, params: Params, size: Size) -> None:
    """Write the seven numbers of an affine operation. Each Kornia class has its own names for them."""
    out[:, 1:3] = 1
    for column, name in enumerate(_AFFINE):
        if name in params:
            out[:, column] = params[name]
    if "scale" in params:
        out[:, 1:3], out[:, 3:5] = params["scale"], params["translations"]
    elif "degrees" in params:
        out[:, 0] = -params["degrees"]  # `degrees` is counter-clockwise, `angle` is clockwise
    elif "times" in params:
        out[:, 0] = -90 * np.rint(params["times"])


def _mirrored(out: Float, params: Params, size: Size, *, axis: int) -> None:
    out[:, (0, 4, 8)] = 1
    out[:, 4 * axis] = -1
    out[:, 3 * axis + 2] = size[1 - axis] - 1


def _homography(out: Float, params: Params, size: Size) -> None:
    from kornia.geometry.transform import get_perspective_transform

    points = tensors(params)
    out[:] = get_perspective_transform(points["start_points"], points["end_points"]).reshape(-1, 9)


def pixel_matrices(values: Tensor, size: Size, *, elements: bool) -> Tensor:
    """Compute matrices float32 [n, 3, 3] as Kornia does, bit for bit. ``values``: [n, 9], from ``Matrix.write``."""
    if elements:
        return values.view(-1, 3, 3)
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


def finish_warps(code: NDArray[np.int32], args: Float, size: Size) -> None:
    """Write Kornia's matrix from output to input positions (in -1..1) into the arguments of each warp."""
    sample, step = np.nonzero(code == Code.WARP)
    warps = args[sample, step]
    kind = 2 * warps[:, 10] + warps[:, 11]  # align_corners, projective
    for number in np.unique(kind):
        rows = np.flatnonzero(kind == number)
        m = pixel_matrices(torch.from_numpy(warps[rows, :9]), size, elements=bool(number % 2))
        if number % 2:
            m = m / _projective_scale(m)
        to, back = _normalized(size, number >= 2)
        args[sample[rows], step[rows], :9] = _inverse(to @ (m @ back)).reshape(-1, 9)


@lru_cache(maxsize=32)
def _normalized(size: Size, corners: bool) -> tuple[Tensor, Tensor]:
    """Matrices float32 [1, 3, 3] from pixel indices to -1..1 and back."""
    from kornia.geometry.conversions import normal_transform_pixel

    to = normal_transform_pixel(*size, device=torch.device("cpu"), dtype=torch.float32, align_corners=corners)
    return to, _inverse(to)


@lru_cache(maxsize=16)
def warp_ramps(size: Size) -> Float:
    """Output positions in -1..1, float32 [2, 2, W + H].

    Axis 0: affine, projective. Axis 1: align_corners False, True. Axis 2: all x, then all y.
    """
    from kornia.geometry.grid import create_meshgrid

    kind: Any = {"device": torch.device("cpu"), "dtype": torch.float32}
    ramps = np.zeros((2, 2, size[1] + size[0]), dtype=np.float32)
    for corners in (False, True):
        for start, n in ((0, size[1]), (size[1], size[0])):
            end = 1.0 if corners else 1.0 - 1.0 / n
            if n > 1:
                ramps[0, int(corners), start : start + n] = torch.linspace(-end, end, n, **kind)
        grid = create_meshgrid(*size, normalized_coordinates=True, align_corners=corners, **kind)
        ramps[1, int(corners)] = torch.cat([grid[0, 0, :, 0], grid[0, :, 0, 1]])
    return ramps


def _projective_scale(m: Tensor) -> Tensor:
    """Kornia's divisor for a homography: 1, clamped to the range of the non-zero absolute values in ``m``."""
    magnitude = m.abs()
    smallest = magnitude.masked_fill(magnitude == 0, float("inf")).amin(dim=(-2, -1), keepdim=True)
    return magnitude.amax(dim=(-2, -1), keepdim=True).clamp_max(1).maximum(smallest)


def _inverse(m: Tensor) -> Tensor:
    """Inverses of 3x3 matrices by cross products, as in Kornia."""
    a, b, c = m.unbind(-1)
    rows = [torch.linalg.cross(p, q, dim=-1) for p, q in ((b, c), (c, a), (a, b))]
    return torch.stack(rows, dim=-2) / (a * rows[0]).sum(-1)[..., None, None]


_AFFINE_MATRIX, _PERSPECTIVE_MATRIX = Matrix(_numbers), Matrix(_homography, elements=True)

# --- steps

_PADDINGS = ("ZEROS", "BORDER", "REFLECTION")


def _warp(op: Any, *, matrix: Matrix = _AFFINE_MATRIX) -> Steps | None:
    flags = op.flags
    padding = flags["padding_mode"].name if "padding_mode" in flags else "ZEROS"
    resample = flags["resample"].name
    if resample not in ("NEAREST", "BILINEAR") or padding not in _PADDINGS:
        return None
    how = (_PADDINGS.index(padding), flags["align_corners"], matrix.elements, resample == "NEAREST")

    def write(out: Float, params: Params, size: Size) -> None:
        matrix.write(out[:, 0, :9], params, size)
        out[:, 0, 9:13] = how

    return Steps((Code.WARP,), write)


def _flip(code: Code, axis: int) -> Entry:
    return Entry("matrix", step(code), matrix=Matrix(partial(_mirrored, axis=axis), elements=True))


_TRANSLATIONS, _SHEARS = ("translate_x", "translate_y"), ("shear_x", "shear_y")
_affine_draws = uniform_from("degree", "scale_2", "scale_4", *_TRANSLATIONS, *_SHEARS)
_affine_entry = partial(Entry, "matrix", _warp, matrix=_AFFINE_MATRIX)

ENTRIES = {
    "RandomHorizontalFlip": _flip(Code.HFLIP, axis=0),
    "RandomVerticalFlip": _flip(Code.VFLIP, axis=1),
    "RandomAffine": _affine_entry(derived(_affine_draws, _affine)),
    "RandomRotation": _affine_entry(),
    "RandomRotation90": _affine_entry(),
    "RandomShear": _affine_entry(derived(uniform_from(*_SHEARS), _shear)),
    "RandomTranslate": _affine_entry(derived(uniform_from(*_TRANSLATIONS), _translate)),
    "RandomPerspective": Entry(
        "matrix", partial(_warp, matrix=_PERSPECTIVE_MATRIX), _perspective, matrix=_PERSPECTIVE_MATRIX
    ),
    "RandomElasticTransform": Entry("field", fields=_elastic_noise),
    "RandomThinPlateSpline": Entry("field", parameters=_spline),
    "RandomJigsaw": Entry("field", parameters=_jigsaw),
    "RandomFisheye": Entry("field", parameters=derived(all_uniform, _fisheye)),
}
