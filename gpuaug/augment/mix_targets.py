"""Mixing of images together with their masks, boxes and keypoints, after all operations.

The mate of a sample is another sample of its batch. All other decisions depend on the sample alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug import checks
from gpuaug.augment.mix import LARGEST_ALPHA, symmetric_beta
from gpuaug.augment.target_view import Origins, TargetView, with_mates
from gpuaug.batch import Int64
from gpuaug.errors import ConfigError
from gpuaug.native.buffers import to_device
from gpuaug.random.keyed import Float, Stream, pick, uniforms
from gpuaug.targets.geometry import Float64
from gpuaug.targets.masks import paste
from gpuaug.targets.rules import Targets

CLASSES = 256  # classes that ClassMix knows
_LARGEST_REPEAT = 0xFFFF  # objects above it share a random number


class Mixing:
    """How one batch is mixed.

    Attributes:
        mates: int64 [B], the row that each row is mixed with.
        mixed: bool [B], whether it is.
        u: uniforms float32 [B, count] of each sample.
        keys: arguments of :func:`uniforms` for more of them.
        own: bool [B, H, W] on the device: pixels that stay those of the sample.
        pasted: bool [B, H, W] on the host: pixels of pasted objects.
    """

    def __init__(self, mix: TargetMix, mates: Int64, mixed: NDArray[np.bool_], u: Float, keys: dict[str, Any]) -> None:
        self.mix, self.mates, self.mixed, self.u, self.keys = mix, mates, mixed, u, keys
        self.own: Tensor | None = None
        self.pasted: NDArray[np.bool_] | None = None

    def objects(self, view: TargetView) -> TargetView:
        """Mix the objects of a view, on the host. The pipeline calls this first."""
        return self.mix._mix_objects(view, self)

    def masks(self, masks: Tensor) -> Tensor:
        """Mix masks [B, H, W] on the device. The pipeline calls this second."""
        return self.mix._mix_masks(masks, self)

    def images(self, images: Tensor) -> Tensor:
        """Mix images [B, C, H, W] on the device. The pipeline calls this last."""
        return self.mix._mix_images(images, self)

    def with_mates(self, view: TargetView, weights: Float64 | None) -> TargetView:
        """A view whose rows also have the objects of their mates. ``weights``: [B, 2], the shares of both images."""
        if view.origins is None:
            alone, indices = view.table.sample * 0, self.keys["indices"]
            origins = Origins(indices[view.table.sample], alone, indices[:, None], view.matrices[:, None])
            view = replace(view, origins=origins)
        return with_mates(view, view, self.mates, self.mixed, weights)

    def of_mates(self, values: Tensor) -> Tensor:
        """The rows of the mates, on the device of ``values`` [B, ...]."""
        return values.index_select(0, on_device(self.mates, values.device))


def on_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """A copy of numpy values [...] on a device."""
    return to_device(torch.from_numpy(np.ascontiguousarray(values)), device)


def check_targets(mix: TargetMix, targets: Targets | None) -> None:
    """Raise ConfigError if ``mix`` cannot mix these targets."""
    mix._check(targets)


@dataclass(frozen=True, kw_only=True)
class TargetMix:
    """Base of what mixes images and targets."""

    count: ClassVar[int] = 1  # uniforms of each sample: whether it is mixed, then others
    takes: ClassVar[frozenset[str]] = frozenset()  # targets that it can mix
    p: float = 1.0
    epochs: Sequence[int | None] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", float(checks.number("p", self.p, 0, 1)))
        if self.epochs is not None:
            object.__setattr__(self, "epochs", checks.interval("epochs", self.epochs))

    def _check(self, targets: Targets | None) -> None:
        name, names = type(self).__name__, () if targets is None else targets.names
        others = {*names} - self.takes
        if targets is None or others:
            remedy = "the others to null" if others != {"corners"} else "`targets.boxes.oriented` to false"
            remedy = "`targets`" if targets is None else remedy
            raise ConfigError(
                f"`mix` ({name}) needs targets, of these kinds: {', '.join(sorted(self.takes))}. "
                f"Found: {', '.join(names) or 'none'}. Set {remedy}, or use another mix."
            )

    def mixing(
        self, *, good: NDArray[np.bool_], seed: int, epoch: int, indices: Int64, repeats: Int64
    ) -> Mixing | None:
        """How a batch is mixed; None in epochs without.

        Args:
            good: bool [B], the samples that could be read. Others are neither mixed nor mates.
            seed, epoch, indices, repeats: of the random numbers, as for :func:`uniforms`.
        """
        count = len(indices)
        if not checks.within(self.epochs, epoch):
            return None
        order = Stream("", -1, "mix.order", count)  # copies start at 0, so no other stream has copy -1
        own = Stream("", -1, "mix.sample", self.count)
        of_batch = uniforms([order], seed=seed, epoch=epoch, indices=indices[:1])["", -1, "mix.order"][0]
        u = uniforms([own], seed=seed, epoch=epoch, indices=indices, repeats=repeats)["", -1, "mix.sample"]
        cycle, mates = np.argsort(of_batch, kind="stable"), np.empty(count, dtype=np.int64)
        mates[cycle] = np.roll(cycle, -1)  # one cycle, so no sample is mixed with itself
        mixed = (u[:, 0] < self.p) & good & good[mates] & (count > 1)
        keys = {"seed": seed, "epoch": epoch, "indices": indices, "repeats": repeats}
        return Mixing(self, mates, mixed, u, keys)

    def _mix_objects(self, view: TargetView, mixing: Mixing) -> TargetView:
        return view

    def _mix_masks(self, masks: Tensor, mixing: Mixing) -> Tensor:
        return masks

    def _mix_images(self, images: Tensor, mixing: Mixing) -> Tensor:
        assert mixing.own is not None
        return torch.where(mixing.own[:, None], images, mixing.of_mates(images))


@dataclass(frozen=True, kw_only=True)
class MixObjects(TargetMix):
    """MixUp for detection and pose (arXiv:1710.09412): images are blended, and all objects of both images stay.

    ``targets.weights`` has the share of each object's image. A mask of class numbers takes the class of the image with
    the larger share.

    Args:
        alpha: the share of a sample's own image has the distribution Beta(alpha, alpha). Ultralytics: 32.
        lam: a fixed share in place of ``alpha``; RTMDet: 0.5. None: random.
        p: probability for each sample.
        epochs: (first epoch, first epoch without); an end of None: there is none. None: all epochs.

    >>> MixObjects(lam=0.5).p
    1.0
    """

    count: ClassVar[int] = 3
    takes: ClassVar[frozenset[str]] = frozenset({"boxes", "keypoints", "masks", "corners"})
    alpha: float = 32.0
    lam: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not checks.number("alpha", self.alpha, 0, LARGEST_ALPHA):
            raise ConfigError("`alpha` must be above 0. Found: 0. To mix nothing, use `p: 0`.")
        object.__setattr__(self, "alpha", float(self.alpha))
        checks.number("lam", self.lam, 0, 1, optional=True)

    def _check(self, targets: Targets | None) -> None:
        super()._check(targets)
        if targets is not None and targets.masks is not None and targets.masks.kind == "instances":
            raise ConfigError(
                "`mix` (MixObjects) cannot mix masks of objects, because a pixel can then belong to two. Found: "
                "targets.masks.kind=instances. Use gpuaug.CopyPaste, or `targets.masks=null`."
            )

    def _shares(self, mixing: Mixing) -> Float64:
        """The share of each sample's own image, float64 [B]; 1 if it is not mixed."""
        if self.lam is not None:
            made = np.full(len(mixing.u), float(self.lam))
        else:
            made = np.array([symmetric_beta(self.alpha, float(u), float(v)) for _, u, v in mixing.u])
        return np.where(mixing.mixed, made, 1.0)

    def _mix_objects(self, view: TargetView, mixing: Mixing) -> TargetView:
        shares = self._shares(mixing)
        return mixing.with_mates(view, np.stack([shares, 1 - shares], axis=1))

    def _mix_masks(self, masks: Tensor, mixing: Mixing) -> Tensor:
        own = on_device(self._shares(mixing) >= 0.5, masks.device)[:, None, None]
        return torch.where(own, masks, mixing.of_mates(masks))

    def _mix_images(self, images: Tensor, mixing: Mixing) -> Tensor:
        share = on_device((1 - self._shares(mixing)).astype(np.float32), images.device).to(images.dtype)
        return torch.lerp(images, mixing.of_mates(images), share[:, None, None, None])


@dataclass(frozen=True, kw_only=True)
class CutMixMasks(TargetMix):
    """CutMix for segmentation (arXiv:1906.01916): a rectangle of half of the area comes from the mate, with its mask.

    The logarithm of the rectangle's height is uniform, from half of the image's height to the whole, as in
    Britefury/cutmix-semisup-seg. Its place is uniform inside the image.

    Args:
        p: probability for each sample.
        epochs: (first epoch, first epoch without); an end of None: there is none. None: all epochs.

    >>> CutMixMasks(p=0.5).p
    0.5
    """

    count: ClassVar[int] = 4
    takes: ClassVar[frozenset[str]] = frozenset({"masks"})

    def _rectangles(self, u: Float, size: tuple[int, int]) -> Int64:
        """The rectangles, int64 [B, 4], (top, left, bottom, right).

        Args:
            u: uniforms [B, count].
            size: (H, W) of the images.
        """
        values, sides = u.astype(np.float64), np.array(size)
        height = np.exp(values[:, 1] * np.log(0.5))
        extent = np.rint(np.stack([height, 0.5 / height], axis=1) * sides).astype(np.int64)
        corner = (values[:, 2:4] * (sides - extent + 1)).astype(np.int64)
        return np.concatenate([corner, corner + extent], axis=1)

    def _mix_masks(self, masks: Tensor, mixing: Mixing) -> Tensor:
        _, height, width = masks.shape
        box = on_device(self._rectangles(mixing.u, (height, width)) * mixing.mixed[:, None], masks.device)
        top, left, bottom, right = box.T[:, :, None, None]
        y, x = torch.arange(height, device=masks.device)[:, None], torch.arange(width, device=masks.device)
        mixing.own = ~((y >= top) & (y < bottom) & (x >= left) & (x < right))
        return torch.where(mixing.own, masks, mixing.of_mates(masks))


@dataclass(frozen=True, kw_only=True)
class ClassMix(TargetMix):
    """ClassMix (arXiv:2007.07936): the pixels of half of a sample's classes stay, all others come from its mate.

    Of n classes in a mask, n / 2, rounded down, are drawn. Class numbers must be below 256: pixels of others come from
    the mate. For predicted labels see :func:`class_mix`.

    Args:
        ignore: a value that is no class; its pixels come from the mate.
        p: probability for each sample.
        epochs: (first epoch, first epoch without); an end of None: there is none. None: all epochs.

    >>> ClassMix().ignore
    255
    """

    takes: ClassVar[frozenset[str]] = frozenset({"masks"})
    ignore: int = 255

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole_number("ignore", self.ignore, 0, 2**31 - 1)

    def _mix_masks(self, masks: Tensor, mixing: Mixing) -> Tensor:
        stay = _half_of_classes(masks, on_device(_ranks(mixing.keys), masks.device), self.ignore)
        mixing.own = stay | on_device(~mixing.mixed, masks.device)[:, None, None]
        return torch.where(mixing.own, masks, mixing.of_mates(masks))


def _ranks(keys: dict[str, Any]) -> Float:
    """Uniforms [B, CLASSES]: for each sample and class."""
    return uniforms([Stream("", -1, "mix.classes", CLASSES)], **keys)["", -1, "mix.classes"]


def _half_of_classes(labels: Tensor, ranks: Tensor, ignore: int) -> Tensor:
    """Pixels [B, H, W] of the floor(n / 2) classes with the smallest ranks, of the n classes of each image."""
    flat = labels.flatten(1).long()
    known = (flat != ignore) & (flat >= 0) & (flat < CLASSES)
    at = flat.clamp(0, CLASSES - 1)
    there = torch.zeros((len(labels), CLASSES), dtype=torch.int32, device=labels.device)
    there = there.scatter_add_(1, at, known.int()) > 0  # unlike `unique`, it does not wait for the device
    order = ranks.masked_fill(~there, 2.0).argsort(dim=1, stable=True).argsort(dim=1)
    stays = there & (order < there.sum(1, keepdim=True) // 2)
    return (stays.gather(1, at) & known).view(labels.shape)


def class_mix(images: Tensor, labels: Tensor, *, seed: int = 0, ignore: int = 255) -> tuple[Tensor, Tensor]:
    """Mix a batch by ClassMix (arXiv:2007.07936), for example with labels that a teacher has predicted.

    The mate of image i is image i + 1; that of the last is the first.

    Args:
        images: floats [B, C, H, W].
        labels: integers [B, H, W], class numbers below 256.
        seed: any integer; give each step its own.
        ignore: a value that is no class.

    Returns:
        The mixed images and labels, of the same shapes.

    Raises:
        ConfigError: the images and labels do not fit.

    >>> images, labels = torch.rand(2, 3, 4, 4), torch.arange(32).view(2, 4, 4) % 4
    >>> class_mix(images, labels, seed=1)[1].shape
    torch.Size([2, 4, 4])
    """
    tensors = isinstance(images, Tensor) and isinstance(labels, Tensor) and images.ndim == 4 and labels.ndim == 3
    if not tensors or (len(images), *images.shape[2:]) != labels.shape or labels.is_floating_point():
        found = [
            f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            for x in (images, labels)
        ]
        raise ConfigError(
            f"`images` must be [B, C, H, W], and `labels` integers [B, H, W]. Found: {found[0]} and {found[1]}."
        )
    checks.whole_number("seed", seed, None)
    checks.whole_number("ignore", ignore, 0, 2**31 - 1)
    ranks = _ranks({"seed": seed, "epoch": 0, "indices": np.arange(len(images))})
    stay = _half_of_classes(labels, on_device(ranks, labels.device), ignore)
    mates = torch.arange(1, len(images) + 1, device=images.device) % max(len(images), 1)
    return torch.where(stay[:, None], images, images[mates]), torch.where(stay, labels, labels[mates])


@dataclass(frozen=True, kw_only=True)
class CopyPaste(TargetMix):
    """Simple copy-paste (arXiv:2012.07177): objects of the mate are pasted at their place, without blending.

    Masks lose what is covered, and boxes the sides that are covered. An object goes if it keeps at most ``min_area``
    pixels and covering moved a side of its mask by more than ``moved`` pixels, as in mmdetection; so does an object
    without a pixel. A covered keypoint gets visibility 1. Use it with ``targets=instances`` and, for the paper's
    large-scale jitter, with ``augment=det_lsj``.

    Args:
        objects: how many objects are pasted: ``random``, each number from 0 to all of them is equally likely; or
            ``all``. Annotations that cover many objects are never pasted.
        max: the largest number of objects.
        min_area: pixels of the output.
        moved: pixels of the output.
        p: probability for each sample.
        epochs: (first epoch, first epoch without); an end of None: there is none. None: all epochs.

    >>> CopyPaste(max=20).objects
    'random'
    """

    count: ClassVar[int] = 2
    takes: ClassVar[frozenset[str]] = frozenset({"boxes", "keypoints", "masks"})
    objects: str = "random"
    max: int = 100
    min_area: int = 300
    moved: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of("objects", self.objects, ("random", "all"))
        for name in ("max", "min_area", "moved"):
            checks.whole_number(name, getattr(self, name), 0)

    def _check(self, targets: Targets | None) -> None:
        super()._check(targets)
        if targets is None or targets.masks is None or targets.masks.kind != "instances" or targets.boxes is None:
            raise ConfigError(
                "`mix` (CopyPaste) needs boxes and masks of objects. Found: "
                f"{', '.join(() if targets is None else targets.names)}. Set `targets=instances`."
            )

    def _chosen(self, row: int, candidates: Int64, mixing: Mixing) -> Int64:
        """Which of a mate's objects ``candidates`` are pasted into a sample, ascending."""
        count = len(candidates)
        some = count if self.objects == "all" else int(pick(mixing.u[row : row + 1, 1], count + 1)[0])
        keys = {name: value for name, value in mixing.keys.items() if name in ("seed", "epoch")}
        numbers = np.minimum(np.arange(count), _LARGEST_REPEAT)
        stream, index = Stream("", -1, "mix.objects", 1), np.full(count, mixing.keys["indices"][row])
        ranks = uniforms([stream], **keys, indices=index, repeats=numbers)["", -1, "mix.objects"][:, 0]
        return np.sort(candidates[np.argsort(ranks, kind="stable")[: min(some, self.max)]])

    def _mix_objects(self, view: TargetView, mixing: Mixing) -> TargetView:
        assert view.masks is not None
        assert not view.moves  # with boxes, no random field moves masks
        numbers, objects = view.masks.numpy().astype(np.int32, copy=False), view.objects
        begins, own_counts = objects.offsets, objects.counts
        made = mixing.with_mates(view, None)
        both, starts = made.objects, made.objects.offsets
        keep, boxes = np.ones(len(both), dtype=bool), both.boxes
        assert boxes is not None
        assert both.visible is not None
        boxes, keypoints = boxes.copy(), None if both.keypoints is None else both.keypoints.copy()
        visible = both.visible.copy()
        masks, pasted = numbers.copy(), np.zeros(numbers.shape, dtype=np.bool_)
        for row in np.flatnonzero(mixing.mixed).tolist():
            mate, count = int(mixing.mates[row]), int(own_counts[row])
            of_mate = np.flatnonzero(~objects.crowd[begins[mate] : begins[mate + 1]])
            chosen, first = self._chosen(row, of_mate, mixing), int(starts[row])
            keep[first + count : starts[row + 1]] = False
            keep[first + count + chosen] = True
            renumber = np.zeros(int(own_counts[mate]) + 1, dtype=np.int32)
            renumber[chosen + 1] = count + 1 + np.arange(len(chosen))
            masks[row], pasted[row], extents = paste(numbers[row], numbers[mate], renumber, count + 1)
            before, after = extents[:, 1:]
            shift = np.abs(after[:, 1:] - before[:, 1:]).max(axis=1, initial=0)
            covered, gone = after[:, 0] < before[:, 0], after[:, 0] == 0
            gone |= covered & (after[:, 0] <= self.min_area) & (shift > self.moved)
            low, high = after[:, 1:3] > before[:, 1:3], after[:, 3:] < before[:, 3:]
            own = slice(first, first + count)
            boxes[own, :2] = np.where(low, np.maximum(after[:, 1:3], boxes[own, :2]), boxes[own, :2])
            boxes[own, 2:] = np.where(high, np.minimum(after[:, 3:], boxes[own, 2:]), boxes[own, 2:])
            gone |= covered & (boxes[own, 2:] <= boxes[own, :2]).any(axis=1)
            keep[own] = ~gone
            visible[own] *= after[:, 0] / np.maximum(before[:, 0], 1)
            if keypoints is not None and count:
                points = keypoints[own]
                places = points[..., :2].astype(np.int64).clip(0, np.array(masks.shape[:0:-1]) - 1)
                x, y = np.moveaxis(places, -1, 0)
                hidden = (points[..., 2] > 0) & pasted[row, y, x]
                points[..., 2] = np.where(hidden, 1, points[..., 2])
            left = np.concatenate([~gone, np.ones(len(chosen), dtype=bool)])
            table = np.concatenate([[0], np.cumsum(left) * left]).astype(np.int32)
            masks[row] = table[masks[row]]
        made.objects = replace(both, boxes=boxes, keypoints=keypoints, visible=visible).take(keep)
        made.masks = torch.from_numpy(masks)
        mixing.pasted = pasted
        return made

    def _mix_masks(self, masks: Tensor, mixing: Mixing) -> Tensor:
        assert mixing.pasted is not None
        mixing.own = on_device(~mixing.pasted, masks.device)
        return masks
