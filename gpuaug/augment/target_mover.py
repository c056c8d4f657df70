"""Moves the targets of a batch like its images. Objects move on the host, masks on the host and the device."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.augment.moves import FieldMove, Move, followed, moves
from gpuaug.augment.ops.erasing import RandomErasing
from gpuaug.augment.parameters import Chosen, Size
from gpuaug.augment.target_view import TargetView
from gpuaug.batch import CropWindows, EncodedBatch, Fault, Int64, Objects
from gpuaug.decode.decoder import Decoder
from gpuaug.decode.header import HeaderError
from gpuaug.decode.request import HeaderInfo, decode_fault, split_by_bytes
from gpuaug.errors import ConfigError
from gpuaug.native import buffers
from gpuaug.source.base import Source
from gpuaug.targets import fields, geometry, masks
from gpuaug.targets.batch import BatchTargets, resized
from gpuaug.targets.fields import Field
from gpuaug.targets.geometry import Float64
from gpuaug.targets.masks import Erased, Warp
from gpuaug.targets.objects import by_rules, carry, covered_part, half, output_keypoints
from gpuaug.targets.rules import Masks, Targets

if TYPE_CHECKING:
    from gpuaug.augment.mix_targets import Mixing

log = logging.getLogger("gpuaug")

_SHOWN = 8  # values in a warning


class TargetMover:
    """Moves targets as ``recipe`` moves the images.

    Args:
        rules: which targets the run has, and how they are made.
        recipe: an Augment, MultiView or Progressive. Its type is Any, because recipe.py imports this module.
        source: the source, for its ``flip_pairs``, ``image_ids`` and ``mask_path``; None: it has none.
        quiet: True: log nothing, because another mover logs the same.
    """

    def __init__(self, rules: Targets, recipe: Any, *, source: Source | None = None, quiet: bool = False) -> None:
        self.rules, self.recipe = rules, recipe
        flip = getattr(rules.keypoints, "flip", None)
        source = Source(()) if source is None else source
        flip = source.flip_pairs if flip is None else flip
        self.flip = None if flip is None else tuple(flip)
        self._image_ids: Tensor | None = source.image_ids
        path = source.mask_path
        self._mask_path: Callable[[int], str | None] = path if callable(path) else lambda index: None
        views = [view for each in recipe.schedule.values() for view in each.views]
        self._needs_masks = any("masks" in getattr(view.augment.crop, "needs", ()) for view in views)
        self._as_stored = rules.orientation == "stored"  # what annotations are for, if sizes do not tell
        self._orientation_logged = quiet
        self.instances = rules.masks is not None and rules.masks.kind == "instances"
        self.lookup = None if rules.masks is None else masks.lookup(rules.masks)
        self._unnamed_logged = quiet
        self.fill = 0 if rules.masks is None else rules.masks.fill  # value of mask pixels outside the image
        self._largest = max([self.fill, *(_erasing_values(views, rules.masks) if rules.masks is not None else ())])

    def upright(self, encoded: EncodedBatch, info: HeaderInfo, decoder: Decoder) -> tuple[TargetView, list[Fault]]:
        """Check the annotated sizes, convert fractions to pixels, and decode masks that a crop needs."""
        table = encoded.targets
        assert table is not None
        sizes = np.stack([info.height, info.width], axis=1)
        stored = np.where(info.orientation[:, None] > 4, sizes[:, ::-1], sizes)
        as_stored, faults = self._annotated_as_stored(encoded, info, sizes, stored)
        annotated = np.where(as_stored[:, None], stored, sizes)
        table = _in_pixels(table, annotated)
        matrices = np.tile(np.eye(3), (len(sizes), 1, 1))
        objects = by_rules(replace(table, ids=np.arange(len(table))), self.rules)
        if as_stored.any():
            matrices[as_stored] = geometry.orientation(info.orientation[as_stored], stored[as_stored])
        decoded = self._decode_all(encoded, info, decoder, faults) if self._needs_masks else None
        sizes, annotated = (np.where((each > 0).all(axis=1, keepdims=True), each, 0) for each in (sizes, annotated))
        both: dict[str, Any] = {"sizes": sizes, "annotated": annotated}
        return TargetView(table=table, objects=objects, matrices=matrices, decoded=decoded, **both), faults

    def _annotated_as_stored(
        self, encoded: EncodedBatch, info: HeaderInfo, shown: Int64, stored: Int64
    ) -> tuple[NDArray[np.bool_], list[Fault]]:
        """Whether the annotations of each row are for the stored image, [B], and faults of sizes that fit no image.

        ``shown``, ``stored``: sizes [B, 2] of the displayed and the stored images.
        """
        table, has_masks = encoded.targets, bool(encoded.masks)
        assert table is not None
        turned = (info.orientation > 1) & (shown > 0).all(axis=1)
        given = (table.sizes > 0).all(axis=1) & (shown > 0).all(axis=1)
        fits_shown, fits_stored = (given & (table.sizes == size).all(axis=1) for size in (shown, stored))
        faults = [
            Fault(
                row, "read", f"annotations for {_size(table.sizes[row])} pixels, but the image has {_size(shown[row])}"
            )
            for row in np.flatnonzero(given & ~fits_shown & ~fits_stored).tolist()
        ]
        for row in np.flatnonzero(turned & ~given).tolist() if has_masks else ():
            with suppress(HeaderError):  # decoding the mask gives the fault
                size, _ = masks.size_and_header(encoded.masks[row].tobytes())
                fits_shown[row], fits_stored[row] = size == tuple(shown[row]), size == tuple(stored[row])
        annotated = turned & (fits_shown == fits_stored) & (has_masks | (table.counts > 0))
        if annotated.any() and not self._orientation_logged:
            self._orientation_logged = True
            row, name = int(annotated.argmax()), self.rules.orientation
            log.warning(
                "sample %d has EXIF orientation %d. Where sizes do not tell, annotations of such images are taken as "
                "made for the %s image (targets.orientation=%s; the other choice is %s)",
                int(encoded.indices[row]), info.orientation[row], name, name,
                "displayed" if self._as_stored else "stored",
            )  # fmt: skip
        return turned & np.where(fits_shown != fits_stored, fits_stored, self._as_stored), faults

    def place(
        self,
        upright: TargetView,
        windows: Sequence[CropWindows],
        chosen: Sequence[Sequence[Chosen]],
        *,
        views: Sequence[Any],
    ) -> list[TargetView]:
        """Move the objects of every view. ``chosen``: per view, the choices of each operation."""
        moved = []
        for view, window, choices in zip(views, windows, chosen, strict=True):
            crop = geometry.crop(window) @ upright.matrices
            done = moves(view.augment.prepared, choices, window.size)
            ops, matrices = followed(done, window.size, crop)
            objects = carry(
                upright.objects,
                crop=crop,
                ops=ops,
                covered=covered_part(window),
                size=window.size,
                limits=self.rules.boxes,
                flip=self.flip,
                centres=bool(getattr(view.augment.crop, "centres", False)),
            )
            made: dict[str, Any] = {"matrices": matrices, "moves": self.warps(done, window.size)}
            made["covered"] = covered_by(ops, covered_part(window), window.size)
            moved.append(replace(upright, objects=objects, windows=window, **made))
        return moved

    def tile(self, upright: TargetView, window: CropWindows) -> TargetView:
        """The targets of samples that become tiles: see :mod:`gpuaug.augment.target_tiles`."""
        matrices = geometry.crop(window) @ upright.matrices
        return replace(upright, matrices=matrices, windows=window, is_tile=True)

    def warps(self, done: Sequence[Move], size: Size) -> list[Warp | FieldMove]:
        """Compose the moves between fields, for masks. A sample that a field does not change is sampled only once."""
        found, group = list[Warp | FieldMove](), list[Float64 | Erased]()
        for move in done if self.rules.masks else ():
            if not isinstance(move, FieldMove):
                group.append(move)
                continue
            now = [_of_rows(each, move.rows) for each in group]
            found += [Warp.of(now, size, self.fill), move] if now else [move]
            group = [_of_rows(each, move.rows, others=True) for each in group]
        return [*found, Warp.of(group, size, self.fill)] if group else found

    def decode(
        self, views: Sequence[TargetView], encoded: EncodedBatch, info: HeaderInfo, decoder: Decoder
    ) -> list[Fault]:
        """Decode the masks, sample them for every view, and store them in ``views``. Return the faults."""
        if self.rules.masks is None:
            return []
        faults, held = list[Fault](), views[0].decoded
        for view in views:
            view.decoded = None  # the batch may wait long, and needs only the samples
        parts = self._decoded(encoded, info, decoder, faults) if held is None else iter([held])
        self.sample(views, parts, decoder.device, threads=decoder.num_threads)
        return faults

    def sample(
        self,
        views: Sequence[TargetView],
        parts: Iterator[list[NDArray[Any] | None]],
        device: torch.device,
        *,
        threads: int = 1,
    ) -> None:
        """Crop and resize upright masks for every view.

        On the CPU, or if masks hold object numbers, a view's first warp is applied too. ``parts``: the masks of the
        batch in order, in lists. A list is no longer needed when the next one is taken.
        """
        count, first = len(views[0].sizes), 0
        warps = list[Warp | None]()
        for decoded in parts:
            rows = np.arange(first, first + len(decoded))
            if first == 0:
                small = len(decoded) == count and all(m is None or m.dtype == np.uint8 for m in decoded)
                warps = self._begin(views, count, device, small=small and self._largest <= 255)
            for view, warp in zip(views, warps, strict=True):
                assert view.masks is not None
                out, own = view.masks.numpy()[first : first + len(decoded)], None if warp is None else warp.rows(rows)
                masks.place(decoded, view.windows.take(rows), out, warp=own, fill=self.fill, threads=threads)
            first += len(decoded)
            del decoded
        for view in views if self.instances else ():
            if not view.is_tile:
                self.finish_instances(view)

    def finish_instances(self, view: TargetView) -> None:
        """Move masks of objects on the host, and drop the objects that vanish. They go before samples are mixed."""
        assert view.masks is not None
        view.masks, view.moves = self._moved(view.masks, view.moves), []
        drop_vanished(view)

    def _begin(
        self, views: Sequence[TargetView], count: int, device: torch.device, *, small: bool
    ) -> list[Warp | None]:
        """Allocate the masks of every view. Return the warps that are applied while sampling, and remove them.

        ``small``: whether bytes hold all values.
        """
        on_host, warps = device.type == "cpu" or self.instances, list[Warp | None]()
        for view in views:
            first = view.moves[0] if view.moves and on_host else None
            warps.append(first if isinstance(first, Warp) else None)
            view.moves = view.moves if warps[-1] is None else view.moves[1:]
            dtype = torch.uint8 if small else torch.int32
            if device.type == "cpu" and not view.moves and not self.instances and not view.is_tile:
                dtype = torch.int64  # the last step writes the final dtype
            view.masks = buffers.outputs.take((count, 1, *view.windows.size), dtype, False)[:, 0]
        return warps

    def finish(
        self,
        views: Sequence[TargetView],
        indices: Tensor,
        *,
        bad: Sequence[int],
        keep: Tensor | None,
        device: torch.device,
        mixing: Mixing | None = None,
        size: Size | None = None,
    ) -> list[BatchTargets]:
        """Upload the targets of every view to the device of the images. Apply the remaining moves to the masks.

        ``bad``: rows with a fault; their masks become ``fill``, and their objects are dropped. ``keep``: int64 [n], the
        rows to keep; None: all. ``mixing``: how masks are mixed at last; None: they are not. ``size``: (H, W) to which
        the finished batch is resized; None: it is not.
        """
        rows = np.arange(len(indices)) if keep is None else keep.numpy()
        made = []
        for view in views:
            objects = view.objects
            if len(bad):
                objects = objects.take(~np.isin(objects.sample, bad))
            if len(rows) < len(indices):
                objects = objects.rows(rows)
            corners = None if objects.boxes is None else objects.boxes.astype(np.float32)
            oriented = None
            if objects.corners is not None:  # at the last size, because `resized` has no polygons
                scale = np.divide(size or view.windows.size, view.windows.size)[::-1]
                oriented = geometry.rectangles(objects.corners * scale).astype(np.float32)
            columns = (corners, objects.labels, output_keypoints(objects, self.rules), objects.sample, oriented)
            uploaded: list[Any] = [
                None if column is None else buffers.to_device(torch.from_numpy(column), device) for column in columns
            ]
            boxes, labels, keypoints, sample, oriented = uploaded
            whole = np.array([[0, 0, *view.windows.size]])
            covered = whole.repeat(len(indices), axis=0) if view.covered is None else view.covered
            made.append(
                BatchTargets(
                    masks=self._finished_masks(view, bad, rows, device, mixing),
                    boxes=boxes,
                    oriented=oriented,
                    labels=labels,
                    keypoints=keypoints,
                    sample=sample,
                    counts=torch.from_numpy(objects.counts),
                    ids=torch.from_numpy(view.table.ids[objects.ids]),
                    crowd=torch.from_numpy(objects.crowd),
                    area=torch.from_numpy(objects.area),
                    visible=None if objects.visible is None else torch.from_numpy(objects.visible.astype(np.float32)),
                    indices=indices[rows],
                    image_ids=indices[rows] if self._image_ids is None else self._image_ids[indices[rows]],
                    sizes=torch.from_numpy(view.sizes[rows]),
                    annotated=torch.from_numpy(view.annotated[rows]),
                    covered=torch.from_numpy(covered[rows]),
                    matrices=torch.from_numpy(view.matrices[rows]),
                    size=view.windows.size,
                    instances=self.instances,
                    **_origins(view, objects.ids, rows, device),
                )
            )
        return made if size is None else [resized(each, size, half(self.rules)) for each in made]

    def _finished_masks(
        self, view: TargetView, bad: Sequence[int], rows: Int64, device: torch.device, mixing: Mixing | None
    ) -> Tensor | None:
        if view.masks is None:
            return None
        made = self._moved(buffers.to_device(view.masks, device), view.moves)
        if mixing is not None:
            made = mixing.masks(made)
        if len(bad):
            made = made.index_fill(0, buffers.to_device(torch.from_numpy(np.array(bad)), device), self.fill)
        if len(rows) < len(made):
            made = made.index_select(0, buffers.to_device(torch.from_numpy(rows), device))
        if made.dtype != torch.int64 and device.type == "cpu":  # reused memory, because new memory takes longer
            return buffers.outputs.take((len(made), 1, *made.shape[1:]), torch.int64, False)[:, 0].copy_(made)
        return made.to(torch.int64)

    def _moved(self, made: Tensor, moves: Sequence[Warp | FieldMove]) -> Tensor:
        for move in moves:
            if isinstance(move, FieldMove):
                made = move.apply(made, self.fill)
                continue
            loses = np.isfinite(move.areas[:, :, 9]).any(axis=1)
            moved = np.flatnonzero((move.inverse != np.eye(3)).any(axis=(1, 2)) | loses)
            if len(moved):
                at = buffers.to_device(torch.from_numpy(moved), made.device)
                made = made.index_copy(0, at, masks.gather(made.index_select(0, at), move.rows(moved), self.fill))
        return made

    def _decoded(
        self, encoded: EncodedBatch, info: HeaderInfo, decoder: Decoder, faults: list[Fault]
    ) -> Iterator[list[NDArray[Any] | None]]:
        """Decode a batch's upright masks in parts, each within half of ``decode.max_bytes``; DALI may keep the rest.

        The parts are lists of masks [h, w] of classes or objects, in the order of the batch. A sample without a mask
        or with a fault gets None; the faults are added to ``faults``.
        """
        most, pixels = decoder.settings.max_bytes // 2, (info.height * info.width).tolist()
        changed, pairs = self.lookup is not None, zip(encoded.masks, pixels, strict=True)
        sizes = np.array([masks.peak_bytes(data, count, changed=changed) for data, count in pairs])
        for row in np.flatnonzero(sizes > most).tolist():
            reason = f"decoding takes {sizes[row]} bytes, more than half of `decode.max_bytes` ({2 * most}). Raise it"
            faults.append(self._mask_fault(encoded, row, reason))
        for rows in split_by_bytes(np.arange(len(sizes)), np.where(sizes > most, 0, sizes), most):
            found, bad = self.read_masks(encoded, info, decoder, rows=rows[sizes[rows] <= most].tolist())
            faults += bad
            yield found[rows[0] : rows[-1] + 1]
            del found

    def _decode_all(
        self, encoded: EncodedBatch, info: HeaderInfo, decoder: Decoder, faults: list[Fault]
    ) -> list[NDArray[Any] | None]:
        """Decode all masks of a batch, for crops. ConfigError if they take more than a quarter of the memory."""
        found = list[NDArray[Any] | None]()
        for part in self._decoded(encoded, info, decoder, faults):
            found += part
            size = sum(mask.nbytes for mask in found if mask is not None)
            if 4 * size > decoder.settings.max_bytes:
                raise ConfigError(
                    f"`decode.max_bytes` must hold four times the decoded masks of a batch, because `augment.crop` "
                    f"reads them. {len(found)} masks take {size} bytes. Found: {decoder.settings.max_bytes}. Raise "
                    "`decode.max_bytes`, lower `batch_size`, or set the crop's `cat_max_ratio` to 1."
                )
        return found

    def read_masks(
        self, encoded: EncodedBatch, info: HeaderInfo, decoder: Decoder, *, rows: Sequence[int]
    ) -> tuple[list[NDArray[Any] | None], list[Fault]]:
        """Decode upright masks [h, w] of classes or objects.

        ``rows``: the rows to decode. The other rows, and rows without a mask or with a fault, get None.
        """
        data = encoded.masks
        found: list[NDArray[Any] | None] = [None] * len(data)
        unnamed = [Counter[int]() for _ in data]
        faults: list[Fault] = []

        def one(row: int) -> None:
            height, width, exif = int(info.height[row]), int(info.width[row]), int(info.orientation[row])
            try:
                found[row] = masks.decode(
                    data[row].tobytes(),
                    stored=(width, height) if exif > 4 else (height, width),
                    exif=exif,
                    as_stored=self._as_stored,
                    max_pixels=decoder.settings.max_pixels,
                    table=self.lookup,
                    unnamed=None if self._unnamed_logged else unnamed[row],
                )
            except HeaderError as error:
                faults.append(self._mask_fault(encoded, row, str(error)))

        usable = (row for row in rows if len(data[row]) and info.height[row])
        decoder.each(list(usable), one)
        self._log_unnamed(encoded, unnamed)
        return found, faults

    def _mask_fault(self, encoded: EncodedBatch, row: int, reason: str) -> Fault:
        """The fault of a mask that cannot be used. It names the mask's file, if the mask has one."""
        path = self._mask_path(int(encoded.indices[row]))
        return decode_fault(row, encoded.masks[row], f"its mask{'' if path is None else f' {path!r}'}: {reason}")

    def _log_unnamed(self, encoded: EncodedBatch, unnamed: Sequence[Counter[int]]) -> None:
        """Say once which values of masks have no new value, because a gap in a table raises no error."""
        row = next((row for row, counts in enumerate(unnamed) if counts), None)
        if row is None or self._unnamed_logged:
            return
        self._unnamed_logged = True
        counts, index = unnamed[row], int(encoded.indices[row])
        in_colors = self.lookup is not None and self.lookup.colors
        shown = [
            f"{[value & 255, value >> 8 & 255, value >> 16] if in_colors else value} ({count} pixels)"
            for value, count in counts.most_common(_SHOWN)
        ] + ["..."] * (len(counts) > _SHOWN)
        log.warning(
            "the mask of %s has %d %s without a class: %s. They become %d. %s",
            repr(self._mask_path(index) or f"sample {index}"), len(counts), "colours" if in_colors else "values",
            ", ".join(shown), self.fill,
            "Name them in `targets.masks.colors`, and in `map` if it is set." if in_colors
            else "Name them in `targets.masks.map`, or list them in `targets.masks.ignore`.",
        )  # fmt: skip


def covered_by(ops: Sequence[Float64 | Field], part: Float64, size: Size) -> Int64:
    """What the output shows of the image, as the smallest box around it, (top, left, bottom, right) [B, 4].

    ``ops``: matrices and fields from each canvas to the next. Fields are left out: to compute one takes as long as to
    move the image. ``part``: what the crop's canvas shows, (x1, y1, x2, y2) [B, 4].
    """
    part = np.concatenate([part[:, :2], np.maximum(part[:, :2], part[:, 2:])], axis=1)
    box, _ = geometry.visible(fields.paths(ops, np.arange(len(part))), part, size)
    box = np.nan_to_num(box, nan=0.0)
    box = np.concatenate([np.floor(box[:, :2] + 1e-6), np.ceil(box[:, 2:] - 1e-6)], axis=1)  # rounding errors
    return np.ascontiguousarray(box[:, [1, 0, 3, 2]].astype(np.int64))


def _origins(view: TargetView, ids: Int64, rows: Int64, device: torch.device) -> dict[str, Tensor]:
    """Where the objects come from that are the rows ``ids`` of the view's table, if the view has several tiles."""
    if (origins := view.origins) is None:
        return {}
    made: dict[str, NDArray[Any]] = {"source": origins.source[ids], "tile": origins.tile[ids]}
    made["sources"] = origins.sources[rows]
    made["tile_matrices"] = origins.matrices[rows]
    tensors = {name: torch.from_numpy(each) for name, each in made.items()}
    if origins.weights is not None:
        tensors["weights"] = buffers.to_device(torch.from_numpy(origins.weights[ids]), device)
    return tensors


def _of_rows(move: Float64 | Erased, rows: Int64, *, others: bool = False) -> Float64 | Erased:
    """``move`` for the samples ``rows`` only, or for all others only."""
    count = len(move.boxes if isinstance(move, Erased) else move)
    mine = np.isin(np.arange(count), rows, invert=others)[:, None]
    if isinstance(move, Erased):
        return move._replace(boxes=np.where(mine, move.boxes, 0))
    return np.where(mine[..., None], move, np.eye(3))


def _erasing_values(views: Sequence[Any], rules: Masks) -> list[int]:
    """The values that the recipe's RandomErasing writes into masks. Raise ConfigError if masks cannot have one."""
    values = []
    for key, op in (
        leaf for view in views for p in view.augment.prepared for leaf in p.leaves(f"augment.ops.{p.name}")
    ):
        value = op.op.masks if isinstance(op.op, RandomErasing) else None
        if value and rules.kind == "instances":
            raise ConfigError(f"`{key}.masks` must be 0 or null if `targets.masks.kind` is instances. Found: {value}.")
        values += [] if value is None else [value]
    return values


def _in_pixels(table: Objects, sizes: Int64) -> Objects:
    """Convert annotations from fractions to pixels. ``sizes``: int64 [B, 2], (H, W) of the annotated images."""
    rows = table.fractions
    if rows is None:
        return table
    scale = np.where(rows[:, None], np.maximum(sizes, 1), 1)[table.sample, ::-1]
    boxes, keypoints, corners = table.boxes, table.keypoints, table.corners
    if corners is not None:
        corners = (corners * scale[:, None]).astype(np.float32)
    if boxes is not None:
        boxes = (boxes * np.concatenate([scale, scale], axis=1)).astype(np.float32)
    if keypoints is not None:
        keypoints = keypoints.copy()
        keypoints[..., :2] *= scale[:, None].astype(np.float32)
    return replace(table, boxes=boxes, keypoints=keypoints, corners=corners)


def drop_vanished(view: TargetView) -> None:
    """Drop objects that have no pixel in the view's masks, and number the other objects 1, 2, ... in each mask."""
    assert view.masks is not None
    objects, made = view.objects, view.masks.numpy()
    begins, first = objects.offsets, view.table.offsets
    keep = np.zeros(len(objects.labels), dtype=bool)
    for row, mask in enumerate(made):
        own = objects.ids[begins[row] : begins[row + 1]]
        numbers = own - first[row] + 1  # the objects' values in the mask, ascending
        present = np.zeros(max(int(mask.max(initial=0)), int(numbers.max(initial=0))) + 1, dtype=bool)
        present[mask.reshape(-1)] = True
        kept = present[numbers]
        keep[begins[row] : begins[row + 1]] = kept
        renumbered = np.zeros(len(present), dtype=mask.dtype)
        renumbered[numbers[kept]] = np.arange(1, int(kept.sum()) + 1)
        np.take(renumbered, mask, out=mask)
    view.objects = objects.take(keep)


def _size(size: NDArray[Any]) -> str:
    height, width = size.tolist()
    return f"{width} (width) x {height}"
