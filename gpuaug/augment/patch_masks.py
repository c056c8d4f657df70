"""Patch masks for self-supervised training: the patches of a view that a model does not see.

A mask is a function of (seed, epoch, index, repeat, view, copy). patch_masks.cpp has the loops over samples.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug import checks
from gpuaug.augment.crop import pair
from gpuaug.augment.progressive import Recipe
from gpuaug.errors import ConfigError
from gpuaug.native import build
from gpuaug.native.buffers import to_device
from gpuaug.random import keyed
from gpuaug.random.keyed import Stream, uniforms

OP = "patch_masks"  # the name of the random numbers
LARGEST = 6400  # patches of a view: up to ten Philox blocks per patch, and a sample has 65536
Per = Literal["sample", "batch"]
Ratios = NDArray[np.float64]
Pair = tuple[float, float]
ViewCopy = tuple[str, int]  # name of a view, number of the copy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PatchMasks:
    """The patch masks of a batch: V masked views of B samples, each with H x W patches. True means masked.

    The layouts have R = V * B rows of N = H * W patches, in the order of DINO's code: all samples of the first view,
    then all samples of the second view. A sample that could not be read keeps its mask.

    Attributes:
        planes: bool ``[V, B, 1, H, W]``, the masks; of I-JEPA ``[V, B, 2 + T, H, W]``: mask, context, T targets.
        counts: int64 ``[V, B, 1]`` or ``[V, B, 2 + T]``, CPU: how many patches are True.
        views: the positions of the V views in ``batch.images``.

    >>> made = BlockMasks(patch=16)([3, 5], size=(224, 224), seed=1)
    >>> made.masks.shape, made.flat.shape
    (torch.Size([1, 2, 14, 14]), torch.Size([2, 196]))
    >>> layout = made.as_dinov2()
    >>> layout["upperbound"] == int(made.masks.sum()) == len(layout["mask_indices_list"])
    True
    """

    planes: Tensor
    counts: Tensor
    views: tuple[int, ...]

    @property
    def masks(self) -> Tensor:
        """bool ``[V, B, H, W]``, True for masked patches. With I-JEPA, all patches outside the context are masked."""
        return self.planes[:, :, 0]

    @property
    def flat(self) -> Tensor:
        """The masks as rows, bool ``[R, N]``, as BEiT and SimMIM take them."""
        return self.masks.flatten(2).flatten(0, 1)

    @property
    def context(self) -> Tensor | None:
        """bool ``[V, B, H, W]``: the patches that I-JEPA's encoder sees, equally many in each row. None: no I-JEPA."""
        return self.planes[:, :, 1] if self.planes.shape[2] > 1 else None

    @property
    def targets(self) -> Tensor | None:
        """bool ``[V, B, T, H, W]``: the T target blocks of I-JEPA. None: no I-JEPA."""
        return self.planes[:, :, 2:] if self.planes.shape[2] > 1 else None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PatchMasks:
        """Move the masks to ``device``. ``non_blocking`` is the argument of ``Tensor.to``."""
        return replace(self, planes=self.planes.to(device, non_blocking=non_blocking))

    def take(self, rows: Tensor) -> PatchMasks:
        """The masks of some samples. ``rows``: int64 [n], on the CPU."""
        return replace(self, planes=self.planes[:, to_device(rows, self.planes.device)], counts=self.counts[:, rows])

    def as_dinov2(self, *, pad: int | None = None) -> dict[str, Any]:
        """The masks in the layout of the training code of DINOv2 and DINOv3, with the names of its ``collate``.

        ``collated_masks`` bool [R, N]; ``mask_indices_list`` int64 [M], positions of masked patches in the flat
        masks; ``masks_weight`` float32 [M], 1 / (masked patches of the row); ``upperbound`` M as an int;
        ``n_masked_patches`` int64 [1], CPU. The device is not waited for.

        Args:
            pad: length of the lists, and ``upperbound``, so that all batches have equal shapes; None: M. The rest of
                ``mask_indices_list`` is 0, with weight 0.

        Raises:
            ConfigError: the batch has more than ``pad`` masked patches.
        """
        counts, flat = self.counts[..., 0].flatten(), self.flat
        found = int(counts.sum())
        length: int = found if pad is None else checks.whole_number("pad", pad, 0)
        if found > length:
            raise ConfigError(
                f"`pad` must be at least the number of masked patches. Found: {pad}, for {found} patches."
            )
        places = torch.nonzero_static(flat.flatten(), size=length, fill_value=0)[:, 0]
        weights = to_device(counts.clamp(min=1).float().reciprocal(), flat.device)[places // flat.shape[1]]
        weights[found:] = 0
        return {
            "collated_masks": flat,
            "mask_indices_list": places,
            "masks_weight": weights,
            "upperbound": length,
            "n_masked_patches": torch.tensor([found], device="cpu"),
        }

    def as_ijepa(self) -> tuple[list[Tensor], list[Tensor]]:
        """The masks in the layout of I-JEPA's training code: ``(masks_enc, masks_pred)``.

        ``masks_enc`` is a list of one tensor int64 [R, K], the patches of the context. ``masks_pred`` is a list of T
        tensors int64 [R, n], the patches of each target. Numbers are ascending.

        Raises:
            ConfigError: the masks are not of :class:`~gpuaug.MultiBlockMasks`, or the targets differ in size.
        """
        if self.planes.shape[2] == 1:
            raise ConfigError(
                "`as_ijepa` needs context and targets. Found: masks without them. Use gpuaug.MultiBlockMasks "
                "(patch_masks=ijepa)."
            )
        listed = [
            self._listed(self.planes[:, :, plane], self.counts[..., plane], "as_ijepa", "per=batch")
            for plane in range(1, self.planes.shape[2])
        ]
        return listed[:1], listed[1:]

    def as_mae(self) -> dict[str, Tensor]:
        """The masks in the layout of MAE's model: ``ids_keep``, ``ids_restore`` and ``mask``.

        ``ids_keep`` int64 [R, K], the visible patches; ``ids_restore`` int64 [R, N], the place of each patch in the
        list of visible, then masked patches; ``mask`` float32 [R, N], 1 for masked patches. In MAE's code both parts
        are in random order, here they are ascending: a transformer gives the same result.

        Raises:
            ConfigError: the samples have different numbers of masked patches.
        """
        flat, size = self.flat, math.prod(self.planes.shape[-2:])
        keep = self._listed(~self.masks, size - self.counts[..., 0], "as_mae", "patch_masks=mae")
        masked, place = flat.cumsum(1), torch.arange(size, device=flat.device)
        restore = torch.where(flat, keep.shape[1] - 1 + masked, place - masked)
        return {"ids_keep": keep, "ids_restore": restore, "mask": flat.float()}

    def as_tube(self, frames: int) -> Tensor:
        """The same mask for all frames of a clip, bool ``[R, n]`` with n = frames * N, as VideoMAE's tubes.

        Args:
            frames: number of frames, or of groups of frames if the patches of the model span several.
        """
        return self.flat.repeat(1, checks.whole_number("frames", frames, 1))

    def _listed(self, plane: Tensor, counts: Tensor, name: str, remedy: str) -> Tensor:
        """The patches that are True in ``plane`` [V, B, H, W], int64 [R, n]. ``counts``: [V, B] of the plane."""
        least, most = map(int, counts.aminmax())
        if least != most:
            raise ConfigError(
                f"`{name}` needs equally many patches in each sample. Found: {least} to {most}. Use {remedy}."
            )
        places = torch.nonzero_static(plane.flatten(), size=counts.numel() * most)
        return places.view(counts.numel(), most) % math.prod(plane.shape[-2:])


class _Rows(ctypes.Structure):
    """``Rows`` of patch_masks.cpp: the samples of one copy of a view, and their masks."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("key", "indices", "repeats")),
        *((name, ctypes.c_int64) for name in ("batch", "epoch", "height", "width", "planes")),
        *((name, ctypes.c_void_p) for name in ("out", "counts")),
    ]


@cache
def library() -> ctypes.CDLL:
    """The compiled patch_masks.cpp. Raises ConfigError if it cannot be compiled."""
    native = build.load("augment/patch_masks.cpp", name="patch_masks", without="cannot be drawn")
    if native is None:
        raise ConfigError(
            "`patch_masks` needs a C++ compiler. Found: none that works. Install g++, or a wheel of gpuaug."
        )
    rows, number, real = ctypes.POINTER(_Rows), ctypes.c_int64, ctypes.c_double
    native.gpuaug_block_masks.argtypes = [rows, ctypes.c_void_p, real, real, real, real, number, number]
    native.gpuaug_multi_block_masks.argtypes = [rows, ctypes.c_void_p, number, number]
    native.gpuaug_cut_context.argtypes = native.gpuaug_random_masks.argtypes = [rows, number, number]
    return native


@dataclass(frozen=True, kw_only=True)
class _Samples:
    """The samples of a batch, and the views that get masks."""

    indices: NDArray[np.int64]
    repeats: NDArray[np.int64]
    seed: int
    epoch: int
    views: Sequence[ViewCopy]

    def draw(self, count: int, *, per: Per) -> Ratios:
        """Uniforms, float64 [V, B, count]; per batch [1, 1, count], from its first sample as in ``mix``."""
        # copies of operations start at 0, so they have other streams, whatever their names
        streams, rows = [Stream(name, ~copy, OP, count) for name, copy in self.views], slice(None)
        if per == "batch":
            streams, rows = [Stream("", -1, f"{OP} of a batch", count)], slice(1)
        numbers, repeats = self.indices[rows], self.repeats[rows]
        made = uniforms(streams, seed=self.seed, epoch=self.epoch, indices=numbers, repeats=repeats)
        return np.stack([made[s.view, s.copy, s.op] for s in streams]).astype(np.float64)

    def call(self, function: Any, made: PatchMasks, *arguments: Any, op: str = OP) -> None:
        """Call ``function`` for each view. An array [V, ...] among ``arguments`` has the values of each view."""
        batch, planes, height, width = made.planes.shape[1:]
        for v, (name, copy) in enumerate(self.views):
            key = keyed.keys(self.seed, (Stream(name, ~copy, op, 1),))[:2].copy()
            pointers = key.ctypes.data, self.indices.ctypes.data, self.repeats.ctypes.data
            out = made.planes[v].data_ptr(), made.counts[v].data_ptr()
            rows = _Rows(*pointers, batch, self.epoch, height, width, planes, *out)
            function(ctypes.byref(rows), *(a[v].ctypes.data if isinstance(a, np.ndarray) else a for a in arguments))


@dataclass(frozen=True, kw_only=True)
class Generator:
    """Base of the generators of patch masks: the arguments that all of them have."""

    patch: int = 16
    views: Sequence[str] | None = None

    def __post_init__(self) -> None:
        checks.whole_number("patch", self.patch, 1)
        if (named := self.views) is None:
            return
        listed = isinstance(named, Sequence) and not isinstance(named, str) and len(named) > 0
        if not listed or not all(isinstance(name, str) for name in named):
            raise ConfigError(f"`views` must be a list of names of views, or null. Found: {named!r:.200}.")
        object.__setattr__(self, "views", tuple(named))

    def __call__(
        self,
        indices: Sequence[int] | NDArray[np.int64],
        *,
        size: int | tuple[int, int],
        seed: int = 0,
        epoch: int = 0,
        repeats: NDArray[np.int64] | None = None,
        views: Sequence[ViewCopy] = (("", 0),),
    ) -> PatchMasks:
        """Draw the masks of a batch, on the CPU.

        Args:
            indices: int64 [B], sample numbers in the source.
            size: (H, W) of the views in pixels; an int is a square.
            seed: any integer.
            epoch: number of the epoch.
            repeats: int64 [B], how often the epoch has already yielded the index; None: 0.
            views: name and copy of each view that gets masks; the default is the view of an ``Augment``.
        """
        grid = self._grid(pair("size", size))
        checks.whole_number("epoch", epoch, 0, keyed.EPOCHS - 1)
        numbers = np.ascontiguousarray(indices, dtype=np.int64)
        again = np.zeros_like(numbers) if repeats is None else np.ascontiguousarray(repeats, dtype=np.int64)
        if numbers.ndim != 1 or again.shape != numbers.shape:
            raise ConfigError(f"`indices` and `repeats` must be [B]. Found: {numbers.shape} and {again.shape}.")
        shape = len(views), len(numbers), self._planes
        planes = torch.empty((*shape, *grid), dtype=torch.bool, device="cpu")
        counts = torch.empty(shape, dtype=torch.int64, device="cpu")
        made = PatchMasks(planes=planes, counts=counts, views=tuple(range(len(views))))
        if len(numbers):
            self._draw(_Samples(indices=numbers, repeats=again, seed=seed, epoch=epoch, views=views), made, *grid)
        return made

    def _grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """The numbers of patches (H, W) of a view of (H, W) pixels. Raises ConfigError if they do not fit the masks."""
        height, width = size[0] // self.patch, size[1] // self.patch
        if size[0] % self.patch or size[1] % self.patch:
            raise ConfigError(
                f"`patch` must divide the sides of the views. Found: {self.patch}, for views of {size[0]} x {size[1]} "
                f"pixels (H x W). Set another patch, or a crop of {max(1, height) * self.patch} x "
                f"{max(1, width) * self.patch}."
            )
        if height * width > LARGEST:
            raise ConfigError(
                f"`patch` must give at most {LARGEST} patches. Found: {height} x {width}. Set a larger patch."
            )
        self._check(height, width)
        return height, width

    _planes: ClassVar[int] = 1

    def _check(self, height: int, width: int) -> None:
        if min(height, width) < 2:
            raise ConfigError(
                f"`patch` must give at least 2 x 2 patches for blocks. Found: {height} x {width}. Set a smaller patch."
            )

    def _draw(self, samples: _Samples, made: PatchMasks, height: int, width: int) -> None:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class BlockMasks(Generator):
    """Masks rectangles until a share of the patches is masked: BEiT, iBOT, DINOv2, DINOv3.

    Up to ten attempts draw the area (uniform between the smallest area and the patches that are missing), the aspect
    ratio and the place of a rectangle. The first that adds patches, and not too many, is masked. After ten failures the
    mask ends, so it may have fewer patches than wanted. The loop is that of facebookresearch/dinov2,
    ``dinov2/data/masking.py``; BEiT (arXiv:2106.08254), iBOT (arXiv:2111.07832), DINOv2 (arXiv:2304.07193) and DINOv3
    (arXiv:2508.10104) differ in the settings.

    Args:
        patch: side of a patch in pixels. It must divide the sides of the views.
        views: names of the views that get masks, with all their copies; None: all views.
        p: probability that a view of a sample gets a mask.
        ratio: (min, max) of the masked share of the patches, uniform.
        smallest: smallest area of a rectangle, in patches. None: iBOT's rule, (min(H, W) // 3) squared, and the number
            of wanted patches is not rounded down.
        largest: largest share of the view's rows; a rectangle adds at most the patches of so many rows.
        aspect: (min, max) of height / width, log-uniform.
        fill: mask single patches, at random, until the number is reached, as in BEiT v2 and DINOv3.
        shift: roll each mask by a random number of rows and columns. Without this, patches at the border are masked
            less often than those in the middle.
        strata: the ratio is one of so many equally likely values, the upper ends of equal parts of ``ratio``. DINOv3:
            half of the global views of a batch. None: uniform.
        start_epoch: the first epoch with masks, iBOT's ``pred_start_epoch``.
        per: ``sample``: each view of a sample draws for itself. ``batch``: as in the authors' code, exactly the share
            ``p`` of the batch's views gets masks, and their ratios are evenly spread, so that the number of masked
            patches varies little. Then a mask depends on the batch, its size and its first sample, as in ``mix``.

    >>> masks = BlockMasks(ratio=(0.383, 0.383), p=1.0, smallest=16, largest=1.0, fill=True)
    >>> masks([0, 1], size=(224, 224)).counts.flatten().tolist()  # as in BEiT v2
    [75, 75]
    """

    p: float = 0.5
    ratio: Pair = (0.1, 0.5)
    smallest: int | None = 4
    largest: float = 0.5
    aspect: Pair = (0.3, 1 / 0.3)
    fill: bool = False
    shift: bool = False
    strata: int | None = None
    start_epoch: int = 0
    per: Per = "sample"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "p", float(checks.number("p", self.p, 0, 1)))
        object.__setattr__(self, "ratio", checks.pair("ratio", self.ratio, 0, 1))
        object.__setattr__(self, "aspect", checks.pair("aspect", self.aspect, 0.001, 1000))
        checks.whole_number("smallest", self.smallest, 1, LARGEST, optional=True)
        object.__setattr__(self, "largest", float(checks.number("largest", self.largest, 0, 1)))
        for name in ("fill", "shift"):
            checks.flag(name, getattr(self, name))
        checks.whole_number("strata", self.strata, 1, 10**6, optional=True)
        checks.whole_number("start_epoch", self.start_epoch, 0)
        checks.one_of("per", self.per, get_args(Per))

    def _draw(self, samples: _Samples, made: PatchMasks, height: int, width: int) -> None:
        wanted = self._ratios(samples) * (height * width)
        if self.smallest is not None:
            wanted = np.floor(wanted)
        least = (min(height, width) // 3) ** 2 if self.smallest is None else self.smallest
        most = max(int(self.largest * height), 1) * width  # DINOv2 rounds down before it multiplies
        aspect = map(math.log, self.aspect)
        samples.call(library().gpuaug_block_masks, made, wanted, least, most, *aspect, self.fill, self.shift)

    def _ratios(self, samples: _Samples) -> Ratios:
        """The wanted share of masked patches, [V, B]; 0: no mask."""
        (low, high), rows = self.ratio, len(samples.views) * len(samples.indices)
        if samples.epoch < self.start_epoch:
            return np.zeros((len(samples.views), len(samples.indices)))
        if self.per == "sample":
            is_masked, part = np.moveaxis(samples.draw(2, per="sample"), -1, 0)
            if self.strata is not None:
                part = (np.floor(part * self.strata) + 1) / self.strata
            return np.where(is_masked < self.p, low + part * (high - low), 0.0)
        order, part = samples.draw(2 * rows, per="batch").reshape(2, rows)
        made, count = np.zeros(rows), int(rows * self.p)
        strata = self.strata or max(count, 1)
        stratum = np.arange(count) * strata // max(count, 1)
        part = (stratum + (part[:count] if self.strata is None else 1)) / strata
        made[np.argsort(order, kind="stable")[:count]] = low + part * (high - low)
        return made.reshape(len(samples.views), -1)


@dataclass(frozen=True, kw_only=True)
class MultiBlockMasks(Generator):
    """Draws I-JEPA's target blocks, and a context block without the patches of the targets (arXiv:2301.08243).

    The defaults are those of the paper. Targets may overlap each other. After 20 contexts with too few patches, the
    last target is no longer taken out of the context; after 20 more, the target before it.

    Args:
        patch: side of a patch in pixels. It must divide the sides of the views.
        views: names of the views that get masks, with all their copies; None: all views.
        targets: number of target blocks.
        target_scale: (min, max) of a target's share of the patches, uniform.
        target_aspect: (min, max) of a target's height / width, uniform.
        context_scale: (min, max) of the context block's share of the patches, uniform. The block is a square.
        min_keep: the context has more patches than this.
        context: which patches of a larger context the encoder gets. ``first``: as many as the smallest context of the
            batch has, the first in row-major order, as in the authors' code; this removes the bottom of the context.
            ``random``: as many, at random. A number K, at most ``min_keep`` + 1: K patches at random, which do not
            depend on the batch.
        per: ``batch``: the block sizes are drawn once per batch, as in the authors' code, from its first sample as in
            ``mix``. ``sample``: each view of a sample draws its own; ``as_ijepa`` cannot list such targets.
        correct: False: as in the authors' code, no block includes the last row or column, and one random number
            decides both scale and aspect of the targets. True: blocks lie anywhere, and may be as high or wide as the
            view.

    >>> enc, pred = MultiBlockMasks(patch=14)([0, 1, 2], size=(224, 224)).as_ijepa()
    >>> len(enc), len(pred), len(enc[0])
    (1, 4, 3)
    """

    targets: int = 4
    target_scale: Pair = (0.15, 0.2)
    target_aspect: Pair = (0.75, 1.5)
    context_scale: Pair = (0.85, 1.0)
    min_keep: int = 10
    context: str | int = "first"
    per: Per = "batch"
    correct: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole_number("targets", self.targets, 1, 100)
        for name, low, high in (("target_scale", None, 1), ("target_aspect", 0.001, 1000), ("context_scale", None, 1)):
            object.__setattr__(self, name, checks.pair(name, getattr(self, name), low, high))
        checks.whole_number("min_keep", self.min_keep, 0, LARGEST)
        if isinstance(self.context, str):
            checks.one_of("context", self.context, ("first", "random"))
        else:
            checks.whole_number("context", self.context, 1, self.min_keep + 1)
        checks.one_of("per", self.per, get_args(Per))
        checks.flag("correct", self.correct)

    @property
    def _planes(self) -> int:  # type: ignore[override]
        return 2 + self.targets

    def _check(self, height: int, width: int) -> None:
        super()._check(height, width)
        if not min(self._block(self.target_scale[0], aspect, height, width).min() for aspect in self.target_aspect):
            raise ConfigError(
                f"`target_scale` must give targets of at least one patch. Found: {self.target_scale[0]:g} of {height} "
                f"x {width} patches. Set a larger scale, or a smaller patch."
            )
        least = int(self._block(self.context_scale[0], 1.0, height, width).prod())
        if least <= self.min_keep:
            raise ConfigError(
                f"`min_keep` must be below the patches of the smallest context block. Found: {self.min_keep}, and a "
                f"block of {least} of {height} x {width} patches. Set a smaller min_keep or patch."
            )

    def _block(self, scale: Ratios | float, aspect: Ratios | float, height: int, width: int) -> NDArray[np.int64]:
        """Height and width of blocks, int64 [..., 2]."""
        patches, less = np.floor(np.asarray(scale) * (height * width)), 0 if self.correct else 1
        sides = np.stack([np.sqrt(patches * aspect), np.sqrt(patches / aspect)], axis=-1)
        return np.minimum(np.rint(sides).astype(np.int64), (height - less, width - less))

    def _draw(self, samples: _Samples, made: PatchMasks, height: int, width: int) -> None:
        def between(limits: Pair, u: Ratios) -> Ratios:
            return limits[0] + u * (limits[1] - limits[0])

        scale, aspect, context = np.moveaxis(samples.draw(3, per=self.per), -1, 0)
        aspect = between(self.target_aspect, aspect if self.correct else scale)
        target = self._block(between(self.target_scale, scale), aspect, height, width)
        square = self._block(between(self.context_scale, context), 1.0, height, width)
        shape = (*made.planes.shape[:2], 4)
        sizes = np.ascontiguousarray(np.broadcast_to(np.concatenate([target, square], axis=-1), shape))
        samples.call(library().gpuaug_multi_block_masks, made, sizes, self.correct, self.min_keep)
        count = self.context
        if isinstance(count, str):
            count = height * width - int(made.counts[..., 0].max())
        samples.call(library().gpuaug_cut_context, made, count, self.context != "first", op=f"{OP} of the context")


@dataclass(frozen=True, kw_only=True)
class RandomMasks(Generator):
    """Masks a fixed number of patches, all choices equally likely: MAE (arXiv:2111.06377), SimMIM (arXiv:2111.09886).

    Args:
        patch: side of a patch in pixels. It must divide the sides of the views.
        views: names of the views that get masks, with all their copies; None: all views.
        ratio: masked share of the cells; the number of masked cells is rounded up.
        cell: side of a cell in patches. The patches of a cell are masked together. SimMIM: cells of 32 pixels.

    >>> RandomMasks(ratio=0.6, cell=2)([0, 1], size=(224, 224)).counts.flatten().tolist()
    [120, 120]
    """

    ratio: float = 0.75
    cell: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "ratio", float(checks.number("ratio", self.ratio, 0, 1)))
        checks.whole_number("cell", self.cell, 1, LARGEST)

    def _check(self, height: int, width: int) -> None:
        if height % self.cell or width % self.cell:
            raise ConfigError(
                f"`cell` must divide the sides of the grid. Found: {self.cell}, for {height} x {width} patches. Set "
                "another cell, or cell=1."
            )
        if self._visible(height, width) < 1:
            raise ConfigError(
                f"`ratio` must leave a cell visible. Found: {self.ratio:g}, for {height} x {width} patches. Set a "
                "smaller ratio or patch."
            )

    def _visible(self, height: int, width: int) -> int:
        cells = height * width // self.cell**2
        return cells - math.ceil(cells * self.ratio)

    def _draw(self, samples: _Samples, made: PatchMasks, height: int, width: int) -> None:
        samples.call(library().gpuaug_random_masks, made, self.cell, self._visible(height, width))


GENERATORS = (BlockMasks, MultiBlockMasks, RandomMasks)


def for_recipe(masks: Generator, recipe: Recipe, *, seed: int) -> Callable[..., PatchMasks]:
    """The function ``(indices, epoch, repeats)`` that draws the masks of a recipe's views.

    Raises ConfigError if the recipe has no such views, or they do not fit.
    """
    library()
    for one in recipe.schedule.values():
        try:
            masks._grid(_views_of(masks, one)[2])
        except ConfigError as error:
            raise ConfigError(f"`patch_masks.{str(error)[1:]}") from error

    def draw(indices: NDArray[np.int64], *, epoch: int, repeats: NDArray[np.int64]) -> PatchMasks:
        places, views, size = _views_of(masks, recipe.at(epoch))
        made = masks(indices, size=size, seed=seed, epoch=epoch, repeats=repeats, views=views)
        return replace(made, views=places)

    return draw


def _views_of(masks: Generator, recipe: Any) -> tuple[tuple[int, ...], list[ViewCopy], tuple[int, int]]:
    """The positions of the views of a recipe that get masks, these views, and their size in pixels."""
    known = list(dict.fromkeys(view.name for view in recipe.views))
    if absent := [name for name in masks.views or () if name not in known]:
        has = f"It has {', '.join(known)}." if known != [""] else "Its view has no name: set patch_masks.views=null."
        raise ConfigError(f"`views` must name views of the recipe. Found: {absent[0]!r}. {has}")
    places, views = zip(
        *((k, v) for k, v in enumerate(recipe.views) if masks.views is None or v.name in masks.views), strict=True
    )
    crops = {view.name: view.augment.crop for view in views}
    if other := [crop for crop in crops.values() if crop is None or not crop.fixed]:
        raise ConfigError(
            f"`views` must have a crop with a size (H, W), which decides that of the masks. Found: {other[0]!r:.99}."
        )
    sizes: dict[str, Any] = {name: crop.size for name, crop in crops.items()}
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{name} {h} x {w}" for name, (h, w) in sizes.items())
        raise ConfigError(
            f"`views` must name views of one size (H x W). Found: {found}. Name some of them, such as "
            f"patch_masks.views=[{next(iter(sizes))}]."
        )
    return places, [(view.name, view.copy) for view in views], next(iter(sizes.values()))
