"""`gpuaug preview show=operations`: every operation of a recipe at the ends and in the middle of its range.

No operation is known here by name. Each draw is varied to see which of Kornia's parameters it changes. The pixels come
from the backend that trains.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gpuaug.augment.fingerprint import settings
from gpuaug.augment.fused.backend import FusedBackend
from gpuaug.augment.parameters import Chosen, Params, Prepared, Size
from gpuaug.augment.policy import OneOf
from gpuaug.augment.recipe import View
from gpuaug.augment.reference import ReferenceBackend
from gpuaug.random.keyed import Float, Stream, sample_keys

TOP = np.float32(1 - 2**-24)  # the largest value of a draw
STEPS = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")  # as `order` numbers them
SEEDED = 3  # examples of an operation whose range is not known


@dataclass(frozen=True, eq=False)
class Span:
    """The range of one parameter of an operation, or of several that change together.

    Attributes:
        what: the Kornia class, and the parameter where there is one.
        slot, alternative: the module of the prepared operation.
        uniforms: float32 [n, count], the draws of n values, from one end to the other.
        captions: the n values, as texts.
    """

    what: str
    slot: int
    alternative: int
    uniforms: Float
    captions: list[str]


@dataclass(frozen=True)
class Row:
    """A row of the sheet.

    Attributes:
        name: key of the operation in ``ops``.
        notes: class, parameter, probability, views that have the operation.
        captions: texts below all pictures except the first.
        pictures: per sample: the image before, and at each value.
    """

    name: str
    notes: list[str]
    captions: list[str]
    pictures: list[list[Image.Image]]


def spans(op: Prepared, size: Size) -> list[Span]:
    """The ranges of an operation's parameters on images of ``size``, (H, W), in the order of its slots."""
    if op.seeded is not None:
        drawn = np.zeros((SEEDED, op.count), dtype=np.float32)
        return [Span(type(op.op).__name__, 0, 0, drawn, [f"draw {n + 1}" for n in range(SEEDED)])]
    ranges: list[Span] = []
    earlier: set[Any] = set()
    for slot, modules in enumerate(op.slots):
        kinds = [(type(module), getattr(module, "_fixed_order", None)) for module in modules]
        for alternative, module in enumerate(modules):
            if kinds[alternative] not in earlier:  # later slots mostly repeat the first one
                ranges += _spans_of(op, size, slot, alternative, module)
        earlier.update(kinds)
    return ranges


def _spans_of(op: Prepared, size: Size, slot: int, alternative: int, module: Any) -> list[Span]:
    def params(u: Float) -> Params:
        return op.rule(u, size)[1][slot][alternative]

    kind = type(module).__name__
    order = getattr(module, "_fixed_order", None)
    mine = None if order is None else {STEPS[step] for step in order}  # the module reads only these factors
    groups = _groups(params, op.count, mine)
    if not groups:
        middle = np.full((1, op.count), 0.5, dtype=np.float32)
        values = {k: v for k, v in params(middle).items() if mine is None or k in mine}
        if mine and all(float(v[0]) == (0 if k == "hue_factor" else 1) for k, v in values.items()):
            return []  # a step of a jitter that is switched off
        said = {k: v for k, v in values.items() if v.ndim == 1}
        return [Span(kind, slot, alternative, middle, [_said(said, 0) if 0 < len(said) <= 2 else "after"])]
    return [
        Span(
            f"{kind}: {', '.join(map(_short_name, names))}", slot, alternative, *_over(params, op.count, names, columns)
        )
        for names, columns in groups
    ]


def _groups(params: Callable[[Float], Params], count: int, mine: set[str] | None) -> list[tuple[list[str], list[int]]]:
    """Parameters that change together, and the columns of the draws that change them."""
    u = np.full((1 + 2 * count, count), 0.5, dtype=np.float32)
    for column in range(count):
        u[1 + 2 * column, column], u[2 + 2 * column, column] = 0, TOP
    values = {k: v for k, v in params(u).items() if mine is None or k in mine}
    groups: list[tuple[list[str], list[int]]] = []
    for column in range(count):
        rows = [0, 1 + 2 * column, 2 + 2 * column]
        moved = [name for name, v in values.items() if (v[rows] != v[0]).any()]
        if not moved:
            continue
        touched = [g for g in groups if set(g[0]) & set(moved)]
        groups = [g for g in groups if g not in touched]
        names = dict.fromkeys([*(name for g in touched for name in g[0]), *moved])
        groups.append((list(names), [*(c for g in touched for c in g[1]), column]))
    return groups


def _over(
    params: Callable[[Float], Params], count: int, names: list[str], columns: list[int]
) -> tuple[Float, list[str]]:
    """Draws from one end of the range to the other, and the values there as texts. Equal values appear once."""
    ends = np.array([0, 0.5, TOP], dtype=np.float32)
    single = len(names) == 1 and len(columns) <= 3  # e.g. a magnitude and its random sign
    points = list(itertools.product(ends, repeat=len(columns))) if single else [(e,) * len(columns) for e in ends]
    u = np.full((len(points), count), 0.5, dtype=np.float32)
    u[:, columns] = points
    values = {name: params(u)[name] for name in names}
    picked = list(range(len(points)))
    if single and values[names[0]].ndim == 1:
        value = values[names[0]].astype(np.float64)
        low, high = int(value.argmin()), int(value.argmax())
        picked = [low, int(np.abs(value - (value[low] + value[high]) / 2).argmin()), high]
    elif single:
        picked = [0, len(points) // 2, len(points) - 1]
    said = [_said(values, row) or end for row, end in zip(picked, ("least", "middle", "most"), strict=True)]
    kept = [n for n in range(len(picked)) if said[n] not in said[:n]]
    if len(kept) == 1 and len(columns) > 1:  # only the order of the draws matters, as for channels: there are no ends
        u = np.random.default_rng(0).random((SEEDED, count), dtype=np.float32)
        values = {name: params(u)[name] for name in names}
        return u, [_said(values, row) or f"draw {row + 1}" for row in range(SEEDED)]
    return u[[picked[n] for n in kept]], [said[n] for n in kept]


def _said(values: Params, row: int) -> str:
    parts = []
    for name, of in values.items():
        value = np.atleast_1d(of[row])
        if value.ndim > 1 or len(value) > 3:
            continue
        numbers = ", ".join(f"{v + 0.0:.3g}" if abs(v) > 1e-20 else "0" for v in value.tolist())
        parts.append(f"{_short_name(name)} {numbers if len(value) == 1 else f'({numbers})'}")
    return ", ".join(parts)


def _short_name(name: str) -> str:
    return name.removesuffix("_factor").replace("_", " ")


def rows(views: Sequence[View], images: Sequence[Sequence[Tensor]], *, seed: int) -> list[Row]:
    """A row for every operation of every view. One that several views share with equal settings appears once.

    Args:
        views: the views of the recipe.
        images: per view and sample: uint8 [H, W, 3], the input of the operations.
        seed: keys the noise of operations that have one value per pixel.
    """
    shared: dict[str, list[tuple[int, Prepared]]] = {}
    for number, view in enumerate(views):
        for op in view.augment.prepared:
            of = {k: v for k, v in settings(op.op).items() if k != "p"}
            shared.setdefault(json.dumps([op.name, of], sort_keys=True), []).append((number, op))
    made_rows = []
    for users in shared.values():
        number, op = users[0]
        kind = FusedBackend if views[number].augment.backend == "fused" else ReferenceBackend
        backend = kind((op,), None)
        each = spans(op, (images[number][0].shape[0], images[number][0].shape[1]))
        made = [_applied(backend, op, each, image, seed=seed) for image in images[number]]
        for n, span in enumerate(each):
            pictures = [[_picture(image), *one[n]] for image, one in zip(images[number], made, strict=True)]
            notes = _notes(op, span)
            chances = _chances(users, views)
            if len(notes) > 1:  # the probability is that of the whole choice
                notes, chances = [notes[0], *chances, *notes[1:]], []
            made_rows.append(Row(op.name, [*notes, *chances], span.captions, pictures))
    return made_rows


def _notes(op: Prepared, span: Span) -> list[str]:
    """The class, and the choice that it is part of."""
    whole = type(op.op).__name__
    return [span.what] if span.what.startswith(whole) else [f"{whole}:", span.what, *_among(op, span)]


def _among(op: Prepared, span: Span) -> list[str]:
    """Number of operations to choose from, and the probability of this one after it was chosen."""
    if isinstance(op.op, OneOf):
        members = [member for member in op.op.ops.values() if member is not None]
        same = {getattr(m, "p", 1.0) for m in members if type(m) is type(op.slots[span.slot][span.alternative])}
        return [f"one of {len(members)}", *(f"p {p:g} of its own" for p in same if len(same) == 1 and p != 1)]
    name = type(op.op).__name__
    if name in ("RandAugment", "TrivialAugment"):
        return [f"{len(op.slots) if len(op.slots) > 1 else 'one'} of {len(op.slots[0])}"]
    return []  # AutoAugment has pairs, each with probabilities of its own


def _chances(users: Sequence[tuple[int, Prepared]], views: Sequence[View]) -> list[str]:
    chances = {views[number].name: getattr(op.op, "p", None) for number, op in users}
    if set(chances) == {""} or len(set(chances.values())) == 1:
        names = ", ".join(filter(None, chances))
        (gate, *_) = chances.values()
        return [*([f"p {gate:g}"] if isinstance(gate, int | float) else []), *([names] if names else [])]
    return [f"{name}: p {gate:g}" for name, gate in chances.items()]


def _applied(
    backend: FusedBackend | ReferenceBackend, op: Prepared, each: Sequence[Span], image: Tensor, *, seed: int
) -> list[list[Image.Image]]:
    """Pictures of one image, per span and value."""
    counts = [len(span.uniforms) for span in each]
    u = np.concatenate([span.uniforms for span in each])
    size = (image.shape[0], image.shape[1])
    choice, params = op.rule(u, size)
    if op.seeded is None:
        choice = np.full_like(choice, -1)
        for span, start in zip(each, np.cumsum([0, *counts[:-1]]), strict=True):
            choice[start : start + len(span.uniforms), span.slot] = span.alternative
    numbers = np.arange(len(u))
    keys = sample_keys(Stream("", 0, op.name, op.count), seed=seed, epoch=0, indices=numbers) if op.keyed else None
    many = image.expand(len(u), *image.shape).contiguous()
    made = backend(many, [Chosen(choice, params, keys)], dtype=torch.float32)
    array = made.clamp(0, 1).mul(255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    whole = iter(map(Image.fromarray, array))
    return [list(itertools.islice(whole, count)) for count in counts]


def _picture(image: Tensor) -> Image.Image:
    return Image.fromarray(image.cpu().numpy())
