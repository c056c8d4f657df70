"""`gpuaug preview show=operations`: shows every operation of a recipe at the ends and in the middle of its range.

To find the ranges, this module changes one random number of an operation at a time, and compares the Kornia
parameters. So it needs no table of operations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from gpuaug.augment.explain import FACTORS
from gpuaug.augment.fused.backend import FusedBackend
from gpuaug.augment.ops.kornia_private import fixed_order
from gpuaug.augment.ops.pillow import PillowOp
from gpuaug.augment.parameters import Chosen, Params, Prepared, Size
from gpuaug.augment.recipe import View
from gpuaug.augment.reference import ReferenceBackend
from gpuaug.display.sheet import Cell, SheetRow, scaled
from gpuaug.random.keyed import Float, Stream, sample_keys
from gpuaug.tools.preview.originals import Sample

ENDS = np.array([0, 0.5, 1 - 2**-24], dtype=np.float32)  # smallest, middle and largest uniform random number
EXAMPLES = 3  # largest number of pictures of one range; exact for a seeded operation


class Span(NamedTuple):
    """The range of one parameter of an operation, or of parameters that change together."""

    what: str  # the Kornia class, and the parameter if there is one
    slot: int  # slot and alternative select a module of the prepared operation: slots[slot][alternative]
    alternative: int
    uniforms: Float  # float32 [n, count]: the operation's random numbers for n values in the range
    captions: list[str]  # the n values as text


def spans(op: Prepared, size: Size) -> list[Span]:
    """The ranges of an operation's parameters, in the order of the slots. ``size`` of the images is (H, W)."""
    if op.seeded is not None:
        drawn = np.zeros((EXAMPLES, op.count), dtype=np.float32)
        return [Span(type(op.op).__name__, 0, 0, drawn, [f"draw {n + 1}" for n in range(EXAMPLES)])]
    ranges: list[Span] = []
    earlier: set[Any] = set()
    for slot, modules in enumerate(op.slots):
        kinds = [(type(module), _kind(module), fixed_order(module)) for module in modules]
        for alternative, kind in enumerate(kinds):
            if kind not in earlier:  # most later slots repeat the first slot
                ranges += _spans_of(op, size, slot, alternative)
        earlier.update(kinds)
    return ranges


def _spans_of(op: Prepared, size: Size, slot: int, alternative: int) -> list[Span]:
    module = op.slots[slot][alternative]
    kind, order = _kind(module), fixed_order(module)
    read = None if order is None else {FACTORS[k] for k in order}  # factors that this jitter reads

    def params(u: Float) -> Params:
        return {k: v for k, v in op.draw(u, size).params[slot][alternative].items() if read is None or k in read}

    u = np.full((1 + 2 * op.count, op.count), 0.5, dtype=np.float32)
    u[1::2][np.diag_indices(op.count)], u[2::2][np.diag_indices(op.count)] = ENDS[[0, 2]]
    values = params(u)
    # parameters that change together, and the columns of `u` that change them
    groups: dict[tuple[str, ...], list[int]] = {}
    for column in range(op.count):
        rows = [0, 1 + 2 * column, 2 + 2 * column]
        if moved := tuple(name for name, v in values.items() if (v[rows] != v[0]).any()):
            groups.setdefault(moved, []).append(column)
    if groups:
        return [_over(params, op.count, names, columns, (kind, slot, alternative)) for names, columns in groups.items()]
    if read and all(float(v[0]) == (0 if k == "hue_factor" else 1) for k, v in values.items()):
        return []  # a jitter that is switched off
    fixed = {k: v for k, v in values.items() if v.ndim == 1}
    return [Span(kind, slot, alternative, u[:1], [_caption(fixed, 0) if 0 < len(fixed) <= 2 else "applied"])]


def _kind(module: Any) -> str:
    """The name of a module's class. For an operation of Pillow: the name of the operation."""
    return module.name if isinstance(module, PillowOp) else type(module).__name__


def _over(
    params: Callable[[Float], Params], count: int, names: Sequence[str], columns: list[int], at: tuple[str, int, int]
) -> Span:
    """The span of the parameters ``names``, which the random numbers at ``columns`` change."""
    many = itertools.product(ENDS, repeat=len(columns)) if len(columns) <= 3 else ((e,) * len(columns) for e in ENDS)
    points = list(many)  # a parameter can use several random numbers, such as one for its size and one for its sign
    u = np.full((len(points), count), 0.5, dtype=np.float32)
    u[:, columns] = points
    values = {name: params(u)[name] for name in names}
    total = values[names[0]].reshape(len(points), -1).sum(1, dtype=np.float64)
    low, high = int(total.argmin()), int(total.argmax())
    middle = int(np.abs(total - (total[low] + total[high]) / 2).argmin())
    picked = [low, middle, high] if total[low] < total[high] else [*range(len(points))]
    shown: dict[str, int] = {}
    for row, end in zip(picked, itertools.cycle(("least", "middle", "most")), strict=False):
        shown.setdefault(_caption(values, row) or end, row)
    kept = list(shown.items())[:EXAMPLES]
    what = f"{at[0]}: {', '.join(map(_short_name, names))}"
    return Span(what, at[1], at[2], u[[row for _, row in kept]], [caption for caption, _ in kept])


def _caption(values: Params, row: int) -> str:
    parts = []
    for name, of in values.items():
        value = np.atleast_1d(of[row])
        if value.ndim == 1 and len(value) <= 3:
            numbers = ", ".join(f"{v + 0.0:.3g}" if abs(v) > 1e-20 else "0" for v in value.tolist())
            parts.append(f"{_short_name(name)} {numbers if len(value) == 1 else f'({numbers})'}")
    return ", ".join(parts)


def _short_name(name: str) -> str:
    return name.removesuffix("_factor").replace("_", " ")


def grid(
    views: Sequence[View], samples: Sequence[Sample], *, seed: int, device: torch.device, cell: int
) -> tuple[list[SheetRow], list[dict[str, Any]]]:
    """A row for each sample: the original, then every operation over its range.

    An operation that several views have with the same range is shown once, with the notes of all of them. Also returns,
    for each range, the operation's name, notes and values.
    """
    images = [[torch.from_numpy(np.array(fitted(s.original.picture, v.augment.crop))) for v in views] for s in samples]
    shown: dict[Any, tuple[int, Prepared, Span, dict[str, Any]]] = {}
    for place, view in enumerate(views):
        for entry, (key, op) in ((each, leaf) for each in view.augment.prepared for leaf in each.leaves(each.name)):
            for span in spans(op, tuple(images[0][place].shape[:2])):  # type: ignore[arg-type]
                name, module = key.replace(".ops.", "."), op.slots[span.slot][span.alternative]
                if op.seeded is None and isinstance(module, PillowOp):
                    name = f"{name}.{module.name}"
                new = {"name": name, "notes": list[str](), "values": span.captions}
                *_, known = shown.setdefault((name, span.what, *span.captions), (place, op, span, new))
                known["notes"] += [note for note in _notes(entry, span, view.name) if note not in known["notes"]]
    rows = [SheetRow(s.label or s.key, [f"{s.index}: {s.key}"], []) for s in samples]
    for own, row in zip(images, rows, strict=True):
        row.cells.append(Cell(_picture(own[0].numpy(), cell), "original"))
        for place, op, span, known in shown.values():
            kind = FusedBackend if views[place].augment.backend == "fused" else ReferenceBackend
            one = kind((replace(op, chains=0),), None)  # `chains=0`: one operation of AugMix alone, without mixing
            made = _applied(one, op, span, own[place].to(device), seed=seed)
            for array, caption in zip(made, span.captions, strict=True):
                text, details = f"{known['name']}: {caption}", "\n".join(known["notes"])
                row.cells.append(Cell(_picture(array, cell), text, details=details))
    return (rows if shown else []), [known for *_, known in shown.values()]


def _picture(array: np.ndarray[Any, Any], cell: int) -> Image.Image:
    return scaled(Image.fromarray(array), cell / max(array.shape[:2]))


def fitted(picture: Image.Image, crop: Any) -> Image.Image:
    """The picture center-cropped to the size of a view's crop, if this is one size."""
    return picture if crop is None or isinstance(crop.size, int) else ImageOps.fit(picture, crop.size[::-1])


def _notes(op: Prepared, span: Span, view: str) -> list[str]:
    """The class, the probability and the view. For a member of a random choice, the choice's class comes first."""
    p, whole = getattr(op.op, "p", None), type(op.op).__name__
    notes = [f"{f'{view}: ' if view else ''}p {p:g}"] if isinstance(p, int | float) else [view] * bool(view)
    return [span.what, *notes] if span.what.startswith(whole) else [f"{whole}:", *notes, span.what]


def _applied(
    backend: FusedBackend | ReferenceBackend, op: Prepared, span: Span, image: Tensor, *, seed: int
) -> np.ndarray[Any, Any]:
    """Apply each value of a span to one image. Returns uint8 [n, H, W, 3]."""
    count = len(span.uniforms)
    chosen = op.draw(span.uniforms, (image.shape[0], image.shape[1]))
    choice, params = chosen.choice, chosen.params
    if op.seeded is None:
        choice = np.full_like(choice, -1)
        choice[:, span.slot] = span.alternative
    stream = Stream("", 0, op.name, op.count)
    keys = sample_keys(stream, seed=seed, epoch=0, indices=np.arange(count)) if op.keyed else None
    many = image.expand(count, *image.shape).contiguous()
    made = backend(many, [Chosen(choice, params, keys)], dtype=torch.float32)
    return made.clamp(0, 1).mul(255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
