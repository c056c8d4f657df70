"""Recipes: what happens to an image, as objects. ``Augment`` is one view (or copies of it), ``MultiView`` several.

takes: uint8 images [B, H, W, 3] per view on the device, and draws for (seed, epoch, indices, repeats).
does: the draws of all operations and views in one call, boxes for decoding, then the operations, normalization, and
one cast, by the chosen backend.
gives: float [B, 3, H, W] per view.

A sample's pixels depend on its own draws only: never on which samples share its batch, on other views or on other
operations of the recipe. That holds to the last bit, but for ``backend="kornia"`` on CUDA, where it holds within 2e-6.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import is_
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpuaug import checks
from gpuaug.augment.crop import CROPS
from gpuaug.augment.fingerprint import differences, named, settings
from gpuaug.augment.fused.backend import FusedBackend
from gpuaug.augment.normalize import Normalize
from gpuaug.augment.parameters import Prepared
from gpuaug.augment.policy import OneOf, prepare_all
from gpuaug.augment.reference import ReferenceBackend
from gpuaug.batch import Boxes
from gpuaug.errors import ConfigError, ReadOnlyError
from gpuaug.machine import verdict
from gpuaug.random.keyed import Float, Int, Stream, sample_keys, seed_of_call, uniforms

log = logging.getLogger("gpuaug")

_BACKENDS = ("fused", "kornia")
_READ_ONCE = (
    "settings are read once, when a recipe is made. Build another one, as `Augment.replace` does; "
    "`loader.replace(augment=...)` puts it into a loader."
)
LARGEST_COPIES = 1000  # views of one augment; each is drawn, decoded and augmented for itself


@dataclass(frozen=True, slots=True)
class View:
    """One image that a recipe makes of a sample: its name in a MultiView ("" without one), its copy, its recipe."""

    name: str
    copy: int
    augment: Augment


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """Everything random about a batch, for all views: uniforms float32 [B, n] and keys int64 [B, 2] per stream."""

    uniforms: Mapping[tuple[str, int, str], Float]
    keys: Mapping[tuple[str, int, str], Int]


class _Recipe(nn.Module):
    """Base of Augment and MultiView: everything is done per view."""

    views: list[View]
    _read_once: tuple[str, ...]  # settings that cannot be assigned

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._read_once and "_made" in self.__dict__:
            raise ReadOnlyError(f"`{type(self).__name__}.{name}` cannot be assigned: {_READ_ONCE}")
        super().__setattr__(name, value)

    def check_unchanged(self, *, quick: bool = False) -> None:
        """Compare crop, operations and normalization with what they were when the recipe was made.

        Args:
            quick: compare only where something was assigned since the last time; it does not see inside tensors.

        Raises:
            ReadOnlyError: one of their settings was changed since, which would have no effect.
        """
        for view in (v for v in self.views if v.copy == 0):
            augment, values = view.augment, view.augment._values()
            if quick and len(values) == len(augment._seen) and all(map(is_, values, augment._seen)):
                continue
            prefix = f"augment.views.{view.name}" if view.name else "augment"
            for where, made, now in differences(augment._made, augment._settings()):
                raise ReadOnlyError(
                    f"`{prefix}.{where}` was {made!r} when the recipe was made and is {now!r} now, without effect: "
                    f"{_READ_ONCE}"
                )
            augment._seen = values

    @cached_property
    def streams(self) -> tuple[Stream, ...]:
        """The named rows of random numbers that one batch needs."""
        return tuple(
            Stream(view.name, view.copy, name, count)
            for view in self.views
            for name, count in (
                ("crop", getattr(view.augment.crop, "count", 0)),
                *((p.name, p.count) for p in view.augment.prepared),
            )
        )

    @property
    def main_thread(self) -> bool:
        """Whether an operation draws from torch's global generator, and so must run on the thread that iterates."""
        return any(p.seeded is not None for view in self.views for p in view.augment.prepared)

    def draw(
        self, *, seed: int, epoch: int, indices: Int | Tensor | Sequence[int], repeats: Int | None = None
    ) -> Drawn:
        """All draws of a batch, a function of (seed, epoch, index, repeat, view, operation) for every sample.

        Args:
            seed: any integer.
            epoch: 0 <= epoch < 2**32.
            indices: int64 [B], numbers of the samples in their source.
            repeats: int64 [B], how often the epoch yielded the index before; None: 0.
        """
        numbers = np.asarray(indices, dtype=np.int64)
        values = uniforms(self.streams, seed=seed, epoch=epoch, indices=numbers, repeats=repeats)
        keys = {
            (s.view, s.copy, s.op): sample_keys(s, seed=seed, epoch=epoch, indices=numbers, repeats=repeats)
            for v in self.views
            for s in (Stream(v.name, v.copy, p.name, p.count) for p in v.augment.prepared if p.keyed)
        }
        return Drawn(values, keys)

    def boxes(self, drawn: Drawn, heights: Int, widths: Int) -> list[Boxes]:
        """The boxes that each view reads of the images of a batch.

        Args:
            drawn: the batch's draws.
            heights, widths: int64 [B], of the images as EXIF orients them.

        Raises:
            ConfigError: images of different sizes and no crop, or a crop that does not fit them.
        """
        return [
            _whole_images(heights, widths)
            if (crop := view.augment.crop) is None
            else crop.boxes(drawn.uniforms[view.name, view.copy, "crop"] if crop.count else None, heights, widths)
            for view in self.views
        ]

    def apply(  # type: ignore[override]
        self,
        images: Sequence[Tensor],
        drawn: Drawn | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> Any:
        """Cropped uint8 images [B, H, W, 3], one batch per view, to [B, 3, H, W] of ``dtype``, in the views' order.

        ``drawn`` are the batch's draws, ``memory_format`` is torch's. With a function alone it is ``nn.Module.apply``,
        which reaches a recipe inside a larger model.
        """
        if drawn is None:
            return super().apply(images)  # type: ignore[arg-type]
        return [
            view.augment.run(x, drawn, view, dtype=dtype, memory_format=memory_format)
            for x, view in zip(images, self.views, strict=True)
        ]

    def forward(
        self,
        images: Tensor,
        *,
        seed: int | None = None,
        epoch: int = 0,
        indices: Int | Tensor | Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> Tensor | list[Tensor]:
        """The whole recipe, crop included, on a batch that is already decoded.

        Args:
            images: uint8 [B, 3, H, W] or [B, H, W, 3].
            seed: any integer. None: 0; without ``indices`` a seed from torch's default CPU generator, as torch's own
                random operations take theirs, mixed with the rank and the number of the DataLoader worker.
            epoch: number of the epoch.
            indices: [B], numbers of the samples; None: 0 .. B-1, so calls with one ``seed`` repeat their draws.
            dtype: float32, bfloat16 or float16.
            memory_format: contiguous_format or channels_last.

        Returns:
            [B, 3, h, w], or a list of them where the recipe has several views.

        Raises:
            ConfigError: an argument of the wrong kind.
            ReadOnlyError: settings were changed after the recipe was made.
        """
        if torch.compiler.is_compiling():  # numpy and kernels of our own: nothing that could be traced
            eager = torch.compiler.disable(partial(_Recipe.forward, self))
            return eager(images, seed=seed, epoch=epoch, indices=indices, dtype=dtype, memory_format=memory_format)
        self.check_unchanged(quick=True)
        images = _channels_last(images)
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype.removeprefix("torch."), dtype)
        if not isinstance(dtype, torch.dtype) or dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ConfigError(f"`dtype` must be float32, bfloat16 or float16. Found: {dtype!r}.")
        for name, value in (("seed", seed), ("epoch", epoch)):
            checks.whole_number(name, int(value) if isinstance(value, np.integer) else value, None, optional=True)
        if indices is None:
            indices = range(len(images))
            seed = seed_of_call() if seed is None else seed
        numbers = np.asarray(indices.cpu() if isinstance(indices, Tensor) else indices)
        if numbers.shape != (len(images),) or (numbers.size and numbers.dtype.kind not in "iu"):
            raise ConfigError(
                f"`indices` must be {len(images)} whole numbers, one per image. "
                f"Found: {numbers.dtype} {list(numbers.shape)}."
            )
        drawn = self.draw(seed=seed or 0, epoch=epoch, indices=numbers)
        whole = np.full((2, len(images)), [[images.shape[1]], [images.shape[2]]], dtype=np.int64)
        cut = [_cut(images, boxes) for boxes in self.boxes(drawn, *whole)]
        made = self.apply(cut, drawn, dtype=dtype, memory_format=memory_format)
        return made[0] if len(made) == 1 else made


class Augment(_Recipe):
    """What happens to an image: crop, operations, normalization; with ``copies``, several times with other draws.

    Settings of crop and operations are read once, when this is made; the operations themselves are never changed.
    ``train()`` and ``eval()`` change nothing.

    Args:
        crop: gpuaug.RandomResizedCrop or another of gpuaug's; None: images as they are, all of one size.
        ops: names to operations of ``kornia.augmentation``, applied in this order; None is one switched off.
        normalize: gpuaug.Normalize; None: pixels stay in 0..1.
        copies: views with draws of their own.
        backend: ``fused`` (compiled kernels) or ``kornia`` (Kornia's modules, the reference). Same draws.

    >>> import torch, gpuaug, kornia.augmentation as K
    >>> recipe = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(32), ops={"flip": K.RandomHorizontalFlip()})
    >>> recipe(torch.zeros((8, 3, 60, 80), dtype=torch.uint8), seed=0).shape
    torch.Size([8, 3, 32, 32])
    """

    _read_once = ("crop", "ops", "normalize", "copies", "backend", "prepared", "views")

    def __init__(
        self,
        *,
        crop: Any = None,
        ops: Mapping[str, Any] | None = None,
        normalize: Normalize | None = None,
        copies: int = 1,
        backend: str = "fused",
    ) -> None:
        super().__init__()
        checks.instance("augment.crop", crop, *CROPS, optional=True)
        checks.instance("augment.normalize", normalize, Normalize, optional=True)
        checks.whole_number("augment.copies", copies, 1, LARGEST_COPIES)
        checks.one_of("augment.backend", backend, _BACKENDS)
        # Prepared operations are no submodules: moving a Kornia module would move and convert its samplers.
        self.prepared: tuple[Prepared, ...] = prepare_all(ops, path="augment.ops")
        self.crop, self.normalize, self.copies, self.backend = crop, normalize, copies, backend
        self._executor: ReferenceBackend | FusedBackend | None = None
        self._made = self._settings()
        self._seen: list[Any] = []  # values when they were compared last

    @property
    def ops(self) -> Mapping[str, Any]:
        """The operations as given, without those switched off."""
        return MappingProxyType({p.name: p.op for p in self.prepared})

    @property
    def views(self) -> list[View]:  # type: ignore[override]
        """One per copy."""
        return [View("", copy, self) for copy in range(self.copies)]

    def fingerprint(self) -> dict[str, Any]:
        """Everything that decides draws and pixels, as JSON: settings, not the backend, not what was drawn before."""
        return {**self._made, "ops": named(self._made["ops"]), "copies": self.copies}

    def replace(self, **changes: Any) -> Augment:
        """Another recipe: this one's settings but for ``changes``, as ``replace(normalize=None)``."""
        kept = {name: getattr(self, name) for name in ("crop", "ops", "normalize", "copies", "backend")}
        return Augment(**kept | changes)

    def _settings(self) -> dict[str, Any]:
        normalize = self.normalize
        return {
            "crop": settings(self.crop),
            "ops": {name: settings(op) for name, op in self.ops.items()},
            "normalize": None if normalize is None else normalize.values(),
        }

    def _values(self) -> list[Any]:
        """Attributes of crop and operations, and what is in those that are dictionaries, to compare by identity."""
        choices = [op for op in self.ops.values() if isinstance(op, OneOf)]
        ops = [*self.ops.values(), *(member for choice in choices for member in choice.ops.values())]
        modules = [module for op in ops if isinstance(op, nn.Module) for module in op.modules()]
        values = [v for each in (self.crop, *choices, *modules) for v in getattr(each, "__dict__", {}).values()]
        return values + [inner for value in values if type(value) is dict for inner in value.values()]

    def extra_repr(self) -> str:
        """Crop, operations, copies and backend."""
        policies = [name for name, op in self.ops.items() if isinstance(op, nn.Module) and any(op.children())]
        ops = (f"{k}={type(op).__name__}(...)" if k in policies else f"{k}={op!r}" for k, op in self.ops.items())
        return ",\n".join([f"crop={self.crop!r}", *ops, f"copies={self.copies}", f"backend={self.backend!r}"])

    def run(self, images: Tensor, drawn: Drawn, view: View, **output: Any) -> Tensor:
        """Apply operations and normalization to one view: cropped uint8 images [B, H, W, 3] to [B, 3, H, W].

        ``drawn`` has the batch's random parameters of every ``view``; ``output`` is ``dtype`` and ``memory_format``.
        """
        if self._executor is None:
            kind = ReferenceBackend if self.backend == "kornia" else FusedBackend
            if kind is FusedBackend and images.is_cuda and verdict("fused_cuda") is False:
                log.warning("augment with backend=kornia: `gpuaug doctor` found the compiled kernels broken here")
                kind = ReferenceBackend
            self._executor = kind(self.prepared, self.normalize)
        at, size = (view.name, view.copy), (images.shape[1], images.shape[2])
        chosen = [p.draw(drawn.uniforms[*at, p.name], size, drawn.keys.get((*at, p.name))) for p in self.prepared]
        return self._executor(images, chosen, **output)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_executor": None, "_seen": []}  # compiled functions and caches are made anew


class MultiView(_Recipe):
    """Several recipes for one image, decoded once; views in the order of the mapping, copies next to each other.

    Args:
        views: names to :class:`Augment`; the name keys the draws. None is one switched off.
        backend: ``fused`` or ``kornia`` for all views; None: the backend of each.

    >>> import gpuaug
    >>> large, small = (gpuaug.Augment(crop=gpuaug.RandomResizedCrop(size), copies=2) for size in (224, 96))
    >>> len(gpuaug.MultiView(views={"global": large, "local": small}).views)
    4
    """

    _read_once = ("views", "augments", "backend")

    def __init__(self, *, views: Mapping[str, Augment | None], backend: str | None = None) -> None:
        super().__init__()
        if backend is not None:
            checks.one_of("augment.backend", backend, _BACKENDS)
        if not isinstance(views, Mapping):
            raise ConfigError(
                "`augment.views` must be a mapping of names to gpuaug.Augment, such as {'global': Augment(copies=2)}. "
                f"Found: a {type(views).__name__}."
            )
        self.augments = nn.ModuleList()
        self.views: list[View] = []
        for name, augment in views.items():
            if augment is None:
                continue
            if not isinstance(name, str) or not name or "\0" in name:
                raise ConfigError(f"`augment.views` must have names that are text. Found: {name!r}.")
            checks.instance(f"augment.views.{name}", augment, Augment)
            if backend not in (None, augment.backend):
                augment = augment.replace(backend=backend)  # the caller's keeps its own
            self.augments.append(augment)
            self.views += [View(name, copy, augment) for copy in range(augment.copies)]
        if not self.views:
            raise ConfigError("`augment.views` must have at least one view. Found: none.")
        self._made = True

    def fingerprint(self) -> dict[str, Any]:
        """Everything that decides draws and pixels, as JSON."""
        return {"views": [{"name": v.name, **v.augment.fingerprint()} for v in self.views if v.copy == 0]}


def _whole_images(heights: Int, widths: Int) -> Boxes:
    """The boxes without a crop."""
    sizes = np.stack([heights, widths], axis=1).astype(np.int32)
    if len(sizes) and (sizes != sizes[0]).any():
        other = sizes[(sizes != sizes[0]).any(axis=1)][0]
        raise ConfigError(
            "`augment.crop` is needed to make one batch of images of different sizes. Found: "
            f"{sizes[0].tolist()} and {other.tolist()}. Use gpuaug.Resize((H, W)) or another crop."
        )
    height, width = sizes[0].tolist() if len(sizes) else (1, 1)
    zero = np.zeros_like(sizes)
    return Boxes(np.concatenate([zero, sizes], axis=1), sizes, zero, (height, width))


def _channels_last(images: Any) -> Tensor:
    """uint8 [B, 3, H, W] or [B, H, W, 3] as [B, H, W, 3]."""
    wanted = "`images` must be a uint8 tensor [B, 3, H, W] or [B, H, W, 3]"
    if not isinstance(images, Tensor) or images.dtype != torch.uint8 or images.dim() != 4:
        given = f"{images.dtype} {list(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
        raise ConfigError(f"{wanted}. Found: {given}.")
    if not images.numel() and len(images):
        raise ConfigError(f"{wanted} with pixels. Found: {list(images.shape)}.")
    first, last = images.shape[1] == 3, images.shape[3] == 3
    if first == last:
        what = "could be either; pad the width or crop it" if first else "has no axis of three channels"
        raise ConfigError(f"{wanted}. Found: {list(images.shape)}, which {what}.")
    return images.permute(0, 2, 3, 1) if first else images


def _cut(images: Tensor, boxes: Boxes) -> Tensor:
    """Boxes of uint8 [B, H, W, 3], resized onto their canvas: uint8 [B, h, w, 3]; as decoding does on the CPU."""
    H, W = boxes.size
    placed = np.hstack([boxes.box, boxes.resized, boxes.offset])
    if images.shape[1:3] == (H, W) and (placed == (0, 0, H, W, H, W, 0, 0)).all():
        return images
    out = torch.full((len(images), H, W, 3), boxes.fill, dtype=torch.uint8, device=images.device)
    for i, (top, left, height, width, h, w, y, x) in enumerate(placed.tolist()):
        part = images[i, top : top + height, left : left + width]
        if (h, w) != (height, width):
            part = _resized(part, (h, w), boxes.interpolation)
        y0, x0, y1, x1 = max(y, 0), max(x, 0), min(y + h, H), min(x + w, W)
        if y0 < y1 and x0 < x1:
            out[i, y0:y1, x0:x1] = part[y0 - y : y1 - y, x0 - x : x1 - x]
    return out


def _resized(image: Tensor, size: tuple[int, int], interpolation: str) -> Tensor:
    x = image.contiguous().permute(2, 0, 1)[None]  # whatever the layout given: the same kernel, the same pixels
    x = x.float() if x.is_cuda else x  # torch resizes uint8 on the CPU only
    y = F.interpolate(x, size=size, mode=interpolation, antialias=True)
    return (y.round_().clamp_(0, 255) if x.is_cuda else y)[0].permute(1, 2, 0).to(torch.uint8)
