"""Points and boxes that a field moves. For each output pixel, a field has the input position that the pixel shows.

Positions are pixel edges, as in geometry.py. Between the centres of pixels, a field is bilinear. Where it folds, it
shows an input position several times. A point then goes to one of its places, and a box to the hull of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from gpuaug.batch import Int64
from gpuaug.targets import geometry
from gpuaug.targets.geometry import Bool, Float64, both

# A solution must have this residual, in pixels of the input. Annotations are not as exact. Newton's method either comes
# to 1e-6 in a few rounds, or does not come near at all, so that the number hardly matters.
RESIDUAL = 0.01
_ROUNDS, _LONGEST = 32, 16.0  # of Newton's method, and its longest step in pixels
_NEAR = 1e-7  # how far inside their box its outermost points are, so that they belong to its piece of a jigsaw
_SIDE = np.linspace(_NEAR, 1 - _NEAR, 65)  # places of points on the side of a box
_INNER = (np.arange(16) + 0.5) / 16  # places of points that measure which part of a box is visible


class Field:
    """A field of some samples of a batch.

    Args:
        rows: int64 [n], the samples that it moves, ascending.
        positions: computes the input positions (x, y) of all pixels of these samples, [n, H, W, 2].
        pieces: (height, width) of the pieces that it exchanges; None: it is continuous.
    """

    def __init__(
        self, rows: Int64, positions: Callable[[], NDArray[np.float32]], *, pieces: tuple[int, int] | None = None
    ) -> None:
        self.rows, self.pieces = rows, pieces
        self._positions, self._offsets = cache(positions), dict[int, NDArray[np.float32]]()

    def points(self, xy: Float64, sample: Int64) -> Float64:
        """Move points [N, K, 2] of the samples ``sample`` [N]. Points without a place in the output become NaN."""
        moved = xy.copy()
        for row in np.intersect1d(self.rows, sample).tolist():
            moved[sample == row] = self.forward(xy[sample == row], row, search=True)
        return moved

    def forward(self, xy: Float64, row: int, *, search: bool = False) -> Float64:
        """The output positions that show the input positions ``xy`` [..., 2]; NaN if none is found.

        ``search``: whether Newton's method, if it finds nothing on the canvas, starts again from the nearest pixel.
        """
        wanted = xy.reshape(-1, 2)
        if self.pieces is not None:
            offsets = self._of(row)[1:-1, 1:-1]
            cells, last = np.indices(offsets.shape[:2])[::-1].transpose(1, 2, 0), np.array(offsets.shape[1::-1]) - 1
            back = np.empty_like(offsets)
            x, y = (cells + np.rint(offsets).astype(np.int64)).transpose(2, 0, 1)
            back[y, x] = offsets
            x, y = np.clip(np.floor(np.nan_to_num(wanted)), 0, last).astype(np.int64).T
            return (wanted - back[y, x]).reshape(xy.shape)
        found = self._solved(wanted, wanted, row)
        if search:
            height, width, _ = self._of(row).shape
            shown = both((found >= 0) & (found < (width - 2, height - 2)))
            again = np.flatnonzero(~shown & ~np.isnan(wanted[:, 0]))
            if len(again):
                y, x = np.indices((height - 2, width - 2)).reshape(2, -1) + 0.5
                places = np.stack([x, y], axis=1)
                seen = places + self._of(row)[1:-1, 1:-1].reshape(-1, 2)
                start = [places[((seen - point) ** 2).sum(axis=1).argmin()] for point in wanted[again]]
                found[again] = self._solved(wanted[again], np.array(start), row)
        return found.reshape(xy.shape)

    def back(self, xy: Float64, row: int) -> Float64:
        """The input positions that output positions ``xy`` [..., 2] show."""
        return xy + self._offset(xy.reshape(-1, 2), row)[0].reshape(xy.shape)

    def grid(self, lines: Sequence[Float64], row: int) -> Float64:
        """:meth:`back` of the points at x and y, [Y, X, 2], of which most are centres of pixels."""
        xy = np.stack(np.meshgrid(*lines), axis=-1)
        x, y = (line % 1 == 0.5 for line in lines)
        shown, centres = np.empty_like(xy), np.ix_(y, x)
        shown[centres] = xy[centres] + self._of(row)[1:-1, 1:-1]
        for others in (np.ix_(~y, np.ones_like(x)), np.ix_(y, ~x)):
            shown[others] = self.back(xy[others], row)
        return shown

    def _solved(self, wanted: Float64, start: Float64, row: int) -> Float64:
        """Newton's method for points [n, 2]. What does not reach RESIDUAL becomes NaN."""
        found, going = start.copy(), np.arange(len(wanted))
        with np.errstate(all="ignore"):
            for _ in range(_ROUNDS):
                offset, (a, b), (c, d) = self._offset(found[going], row)
                rest = found[going] + offset - wanted[going]
                left = np.hypot(*rest.T) > 1e-6
                going, rest, a, b, c, d = going[left], rest[left], 1 + a[left], b[left], c[left], 1 + d[left]
                if not len(going):
                    break
                step = np.stack([d * rest[:, 0] - b * rest[:, 1], a * rest[:, 1] - c * rest[:, 0]], axis=1)
                step /= (a * d - b * c)[:, None]
                found[going] -= np.clip(np.nan_to_num(step), -_LONGEST, _LONGEST)
        rest = self.back(found, row) - wanted
        return np.where((np.hypot(*rest.T) < RESIDUAL)[:, None], found, np.nan)

    def _offset(self, xy: Float64, row: int) -> tuple[Float64, Float64, Float64]:
        """What the field adds to output positions [n, 2], and the derivatives of its x and its y, each [2, n]."""
        offsets = self._of(row)
        height, width, _ = offsets.shape
        at = np.nan_to_num(xy, posinf=0, neginf=0) + 0.5
        cell = np.clip(np.floor(at), 0, (width - 2, height - 2)).astype(np.int64)
        if self.pieces is not None:  # the piece that the position is in
            cell = np.clip(np.floor(at + 0.5), 1, (width - 2, height - 2)).astype(np.int64)
            return offsets[cell[:, 1], cell[:, 0]].astype(np.float64), *np.zeros((2, 2, len(at)))
        fx, fy = (at - cell).T[..., None]
        first, flat = cell[:, 1] * width + cell[:, 0], offsets.reshape(-1, 2)
        a, b, c, d = (flat.take(first + step, axis=0).astype(np.float64) for step in (0, 1, width, width + 1))
        top, bottom = a + (b - a) * fx, c + (d - c) * fx
        across, down = (b - a) * (1 - fy) + (d - c) * fy, bottom - top
        return top + down * fy, np.stack([across[:, 0], down[:, 0]]), np.stack([across[:, 1], down[:, 1]])

    def _of(self, row: int) -> NDArray[np.float32]:
        """Input position minus output position of each pixel, [H + 2, W + 2, 2]: a pixel beyond each border repeats."""
        if row not in self._offsets:
            positions = self._positions()[np.searchsorted(self.rows, row)]
            y, x = np.indices(positions.shape[:2]) + 0.5
            offsets = (np.nan_to_num(positions, nan=1e6) - np.stack([x, y], axis=-1)).astype(np.float32)
            self._offsets[row] = np.pad(offsets, ((1, 1), (1, 1), (0, 0)), mode="edge")
        return self._offsets[row]


def visible(
    steps: Sequence[Float64 | Field], boxes: Float64, sample: Int64, size: tuple[int, int]
) -> tuple[Float64, Float64]:
    """What canvas after canvas leaves of boxes, as :func:`gpuaug.targets.geometry.visible` for matrices alone.

    Args:
        steps: matrices [B, 3, 3] and fields from each canvas to the next.
        boxes: [N, 4], on the first canvas.
        sample: [N], the number of the sample of each box.
        size: (H, W) of each canvas.
    """
    hulls, area = geometry.visible(paths(steps, sample), boxes, size)
    moved = [row for step in steps if isinstance(step, Field) for row in step.rows]
    bent = np.flatnonzero(np.isin(sample, moved) & both(boxes[:, :2] <= boxes[:, 2:]))
    hulls[bent], area[bent] = _bent(steps, boxes[bent], sample[bent], size)
    return hulls, area


def paths(steps: Sequence[Float64 | Field], sample: Int64) -> list[Float64]:
    """The products of the first matrix, the first two, and so on, [N, 3, 3] for objects of the samples ``sample``."""
    matrices = [step for step in steps if not isinstance(step, Field)]
    return [path[sample] for path in accumulate(matrices, lambda path, step: step @ path)]


def _bent(
    steps: Sequence[Float64 | Field], boxes: Float64, sample: Int64, size: tuple[int, int]
) -> tuple[Float64, Float64]:
    """:func:`visible` of boxes that fields move.

    A box is the hull of two sets of points of the last canvas. One has the points of its outline that are on every
    canvas. The other has the pixel centres and the points of the border that show something of the box. So the hull
    can be too small by about a pixel where a canvas or a fold cuts the box, but it is never too large. With pieces, the
    other set has centres alone, and the first one may add one pixel to it: a sliver of a piece that no pixel shows must
    not enlarge the box.
    """
    hulls, area = np.full((len(boxes), 4), np.nan), (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    inner = np.stack(np.meshgrid(_INNER, _INNER), axis=-1).reshape(-1, 2)
    ends = np.full_like(_SIDE, _NEAR), np.full_like(_SIDE, 1 - _NEAR)
    outline = np.concatenate([np.stack(pair, axis=1) for end in ends for pair in ((_SIDE, end), (end, _SIDE))])
    for row in np.unique(sample).tolist():
        own = np.flatnonzero(sample == row)
        path = [step if isinstance(step, Field) else step[row] for step in steps]
        path = [step for step in path if not isinstance(step, Field) or row in step.rows]
        sides = _moved(boxes[own], outline, path, row, size)
        whole = np.isfinite(sides[..., 0]).all(axis=1)  # a continuous field leaves the inside where it leaves the sides
        pieces = any(isinstance(step, Field) and step.pieces for step in path)
        cut = own if pieces else own[~whole]
        area[cut] *= np.isfinite(_moved(boxes[cut], inner, path, row, size)[..., 0]).mean(axis=1)
        lines = [_lines(size, axis, borders=not pieces) for axis in (1, 0)]
        x, y = _shown(path, lines, row, size)
        left, right, top, bottom = (np.fmin.reduce(x), np.fmax.reduce(x), np.fmin.reduce(y, 1), np.fmax.reduce(y, 1))
        for k, seen, (x1, y1, x2, y2) in zip(own.tolist(), sides, boxes[own].tolist(), strict=True):
            columns, rows = _span((left <= x2) & (right >= x1)), _span((top <= y2) & (bottom >= y1))
            near_x, near_y = x[rows, columns], y[rows, columns]
            there = (near_x >= x1) & (near_x <= x2) & (near_y >= y1) & (near_y <= y2)
            seen = seen[np.isfinite(seen[:, 0])]
            if there.any():
                spans = [lines[axis][at][there.any(axis)][[0, -1]] for axis, at in enumerate((columns, rows))]
                pixels = np.stack(spans, axis=1)  # the first and the last one in x and y
                seen = np.concatenate([seen.clip(pixels[0] - 1, pixels[1] + 1) if pieces else seen, pixels])
            if len(seen):
                hulls[k] = *seen.min(axis=0), *seen.max(axis=0)
    area[np.isnan(hulls[:, 0])] = np.nan
    return hulls, area


def _moved(
    boxes: Float64, places: Float64, path: Sequence[Float64 | Field], row: int, size: tuple[int, int]
) -> Float64:
    """Points at ``places`` [K, 2] of boxes on the last canvas, [N, K, 2]; NaN: a canvas does not show the point."""
    at = boxes[:, None, :2] + places * (boxes[:, None, 2:] - boxes[:, None, :2])
    for step in path:
        at = step.forward(at, row) if isinstance(step, Field) else _mapped(step, at)
        at[~_inside(at, size)] = np.nan
    return at


def _span(true: Bool) -> slice:
    """From the first true value to the last one."""
    return slice(int(true.argmax()), len(true) - int(true[::-1].argmax()) if true.any() else 0)


def _shown(path: Sequence[Float64 | Field], lines: Sequence[Float64], row: int, size: tuple[int, int]) -> Float64:
    """What the points at ``lines``, x and y, of the last canvas show of the first one: [2, Y, X]."""
    shown = np.stack(np.meshgrid(*lines), axis=-1)
    for number, step in enumerate(reversed(path)):
        if isinstance(step, Field):
            shown = step.back(shown, row) if number else step.grid(lines, row)
        else:
            shown = _mapped(geometry.inverse(step), shown)
        shown[~_inside(shown, size)] = np.nan
    return np.ascontiguousarray(shown.transpose(2, 0, 1))


def _mapped(m: Float64, xy: Float64) -> Float64:
    return geometry.points(m[None], xy.reshape(1, -1, 2)).reshape(xy.shape)


def _inside(xy: Float64, size: tuple[int, int]) -> Bool:
    return both((xy >= 0) & (xy <= size[::-1]))


def _lines(size: tuple[int, int], axis: int, *, borders: bool) -> Float64:
    """Centres of pixels along an axis, and the borders of the canvas."""
    side = size[axis]
    ends = [_NEAR * side, side - _NEAR * side] if borders else []
    return np.sort(np.append(np.arange(side) + 0.5, ends))
