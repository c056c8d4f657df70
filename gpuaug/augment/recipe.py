"""Recipes: objects that augment images.

A sample's random numbers and pixels do not depend on other samples or other views.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpuaug import checks
from gpuaug.augment.crop import CROPS, Window
from gpuaug.augment.cut import crop_of
from gpuaug.augment.domains import check as check_domains
from gpuaug.augment.fingerprint import differences, settings
from gpuaug.augment.fused.backend import FusedBackend
from gpuaug.augment.images import NotFiniteError
from gpuaug.augment.inputs import not_finite, pixels, same_type
from gpuaug.augment.mosaic import Combine
from gpuaug.augment.normalize import Normalize
from gpuaug.augment.ops.erasing import check_place
from gpuaug.augment.parameters import Chosen, Prepared, Size
from gpuaug.augment.policy import prepare_all
from gpuaug.augment.reference import ReferenceBackend
from gpuaug.augment.sharing import IMAGES, Draws, Rows, Same, by_camera, check_cameras, check_frames, fold
from gpuaug.augment.sizes import Sizes
from gpuaug.batch import CropWindows, Objects
from gpuaug.errors import ConfigError, ReadOnlyError
from gpuaug.machine import verdict
from gpuaug.random.keyed import Float, Int, seed_of_call, uniforms

if TYPE_CHECKING:
    from gpuaug.read.order import Step
    from gpuaug.targets.rules import Targets

log = logging.getLogger("gpuaug")

BACKENDS = ("fused", "kornia")
_READ_ONCE = (
    "a recipe reads its settings only when it is created. Create a new recipe, as `Augment.replace` does, and a new "
    "loader with it."
)
FLIPPED = {"RandomVerticalFlip": 0, "RandomHorizontalFlip": 1}  # the axis that an operation flips
LARGEST_COPIES = 1000  # maximum of `copies`; each copy is cropped and augmented separately


ViewCopy = tuple[str, int]  # name of a view, number of the copy


@dataclass(frozen=True, slots=True)
class View:
    """One of the views that a recipe makes of each sample."""

    name: str  # name of the view in a MultiView; "" in an Augment
    copy: int  # 0 .. `copies` - 1
    augment: Augment
    # pairs of an operation, or `crop`, and the (view, copy) whose random numbers it uses; others use their own
    sources: tuple[tuple[str, ViewCopy], ...] = ()
    outer: int | None = None  # position of the view whose crop window contains that of this view

    def draws(self) -> list[Draws]:
        """What the crop, `combine` and the operations draw, in this order."""
        augment, of = self.augment, dict(self.sources)
        own = [("crop", getattr(augment.crop, "count", 0), False)]
        own += [(name, each.count, False) for name, each in augment.combine.entries.items()]
        own += [(op.name, op.count, op.keyed) for op in augment.prepared]
        frames, cameras = augment.same_on_frame, augment.shared_by_cameras
        return [
            Draws(self.name, self.copy, name, count, keyed, frames.get(name, True), name in cameras, of.get(name))
            for name, count, keyed in own
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """The random numbers of a batch, for all views."""

    uniforms: Mapping[tuple[str, int, str], Float]  # (view, copy, operation or "crop") to float32 [B, n]
    keys: Mapping[tuple[str, int, str], Int]  # (view, copy, operation) to int64 [B, 2]
    seed: int = 0  # from here on: the arguments of `draw`
    epoch: int = 0
    indices: Int = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    repeats: Int | None = None
    rows: Rows = IMAGES

    def first(self, count: int) -> Drawn:
        """The random numbers of the first ``count`` rows."""
        values = {name: value[:count] for name, value in self.uniforms.items()}
        keys = {name: value[:count] for name, value in self.keys.items()}
        repeats = None if self.repeats is None else self.repeats[:count]
        return replace(self, uniforms=values, keys=keys, indices=self.indices[:count], repeats=repeats)

    def again(self, number: int, rows: Int, *, view: View) -> Float:
        """Draw uniforms for the crop of ``view``, float32 [len(rows), count]. Each ``number`` gives other values."""
        draws, frames = view.draws()[0], self.rows.frames
        frame = rows % frames if draws.frames is False else rows * 0
        made = np.empty((len(rows), draws.count), dtype=np.float32)
        for each in np.unique(frame).tolist():
            own = np.flatnonzero(frame == each)
            samples = rows[own] // frames
            repeats = None if self.repeats is None else self.repeats[samples]
            stream = self.rows.stream(draws, each, number)
            values = uniforms(
                (stream,), seed=self.seed, epoch=self.epoch, indices=self.indices[samples], repeats=repeats
            )
            made[own] = values[stream.view, stream.copy, stream.op]
        return made


class ReadOnly(nn.Module):
    """A module with settings that cannot be assigned after ``_made`` was set."""

    _read_once: tuple[str, ...]

    @property
    def schedule(self) -> Mapping[int, Any]:
        """Maps the first epoch of each recipe to the recipe."""
        raise NotImplementedError

    def at(self, epoch: int) -> Any:
        """Return the recipe of ``epoch``: an :class:`Augment` or :class:`MultiView`."""
        checks.whole_number("epoch", int(epoch) if isinstance(epoch, np.integer) else epoch, 0)
        schedule = self.schedule
        return schedule[max(first for first in schedule if first <= epoch)]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._read_once and "_made" in self.__dict__:
            raise ReadOnlyError(f"`{type(self).__name__}.{name}` cannot be assigned: {_READ_ONCE}")
        super().__setattr__(name, value)


class RecipeBase(ReadOnly):
    """Base of Augment and MultiView: recipes with at least one view."""

    views: list[View]
    combine: Any = Combine()
    resized: Size | None = None  # (H, W) of the finished batch; None: it is not resized

    @property
    def schedule(self) -> Mapping[int, Self]:
        """Maps the first epoch of each recipe to the recipe. There are several only if operations have ``epochs``."""
        return self._stages or {0: self}

    @cached_property
    def _stages(self) -> dict[int, Self]:
        return {first: self._of_epoch(first) for first in sorted({0, *changes})} if (changes := self.changes()) else {}

    def for_step(self, *, seed: int, epoch: int, step: Step | None) -> Self:
        """Return the recipe with the size of a step, or the length of its sequences.

        Args:
            seed: of the loader.
            epoch: of the step.
            step: None: the recipe keeps its own size.
        """
        return self

    def changes(self) -> set[int]:
        """The epochs at which the recipe changes."""
        raise NotImplementedError

    def _of_epoch(self, epoch: int) -> Self:
        """The recipe of an epoch, without ``epochs``."""
        raise NotImplementedError

    def check_unchanged(self, *, key: str = "augment") -> None:
        """Raise ReadOnlyError if a setting was changed after the recipe was created. Such a change has no effect.

        ``key``: the configuration key of this recipe, for messages.
        """
        for view in (v for v in self.views if v.copy == 0):
            prefix = f"{key}.views.{view.name}" if view.name else key
            for where, made, now in differences(view.augment._made, view.augment.settings()):
                raise ReadOnlyError(
                    f"`{prefix}.{where}` was {made!r} when the recipe was created and is {now!r} now. "
                    f"The change has no effect: {_READ_ONCE}"
                )

    @cached_property
    def draws(self) -> tuple[Draws, ...]:
        """The random numbers that a batch needs."""
        return tuple(draws for view in self.views for draws in view.draws())

    @property
    def main_thread(self) -> bool:
        """Whether an operation uses global random generators. Such a recipe must run in the iterating thread."""
        return any(p.seeded is not None for view in self.views for p in view.augment.prepared)

    def draw(
        self,
        *,
        seed: int,
        epoch: int,
        indices: Int | Tensor | Sequence[int],
        repeats: Int | None = None,
        rows: Rows = IMAGES,
    ) -> Drawn:
        """Draw the random numbers of a batch. They depend only on seed, epoch, index, repeat, view and operation.

        Args:
            seed: any integer.
            epoch: 0 <= epoch < 2**32.
            indices: int64 [B], sample numbers in the source.
            repeats: int64 [B], how many times the epoch has already yielded the index; None: 0 for all samples.
            rows: what the rows of the batch are, if they are not images: frames of clips, from one of several cameras.
        """
        numbers = np.asarray(indices, dtype=np.int64)
        again = None if repeats is None else np.asarray(repeats, dtype=np.int64)
        values, keys = rows.draw(self.draws, seed=seed, epoch=epoch, indices=numbers, repeats=again)
        return Drawn(values, keys, seed, epoch, numbers, again, rows)

    def windows(
        self,
        drawn: Drawn,
        heights: Int,
        widths: Int,
        *,
        objects: Objects | None = None,
        masks: Sequence[NDArray[Any] | None] | None = None,
        empty: Size = (1, 1),
    ) -> list[CropWindows]:
        """Compute the crop windows of each view.

        Args:
            drawn: the batch's random numbers.
            heights, widths: int64 [B], image sizes after EXIF orientation.
            objects: boxes after EXIF orientation, if a crop needs them.
            masks: B masks [h, w] after EXIF orientation, if a crop needs them.
            empty: (H, W) of views without a crop if the batch has no images.
        """
        windows = []
        for view in self.views:
            if (crop := view.augment.crop) is None:
                windows.append(_whole_images(heights, widths, empty))
                continue
            u = drawn.uniforms[view.name, view.copy, "crop"]
            redraw = partial(drawn.again, view=view)
            if view.outer is not None:
                top, left, *sides = windows[view.outer].window.T
                made = crop.windows(u, *(side.astype(np.int64) for side in sides), redraw=redraw)
                window = made.window + np.stack([top, left, top * 0, left * 0], axis=1)
                windows.append(replace(made, window=window))
                continue
            made = crop.windows(u, heights, widths, objects=objects, masks=masks, redraw=redraw)
            windows.append(_before_flips(made, view, drawn) if crop.pad == "batch" else made)
        return windows

    def render(
        self,
        images: Sequence[Tensor],
        drawn: Drawn,
        *,
        chosen: Sequence[Sequence[Chosen]] | None = None,
        white: float | None = None,
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> list[Tensor]:
        """Augment cropped images [B, H, W, C], one tensor per view. Returns [B, C, H, W] of ``dtype`` per view.

        ``drawn``: the batch's random numbers. ``chosen``: the result of :meth:`choose`; None: computed here.
        ``white``: the images' value that becomes 1; None: 255 for uint8, 65535 for uint16, 1 for floats.
        ``memory_format``: of the result.
        """
        if chosen is None:
            chosen = self.choose(drawn, [(x.shape[1], x.shape[2]) for x in images])
        return [
            view.augment.run(x, choices, white=white, dtype=dtype, memory_format=memory_format)
            for x, view, choices in zip(images, self.views, chosen, strict=True)
        ]

    def choose(self, drawn: Drawn, sizes: Sequence[Size]) -> list[list[Chosen]]:
        """The choices and parameters of every operation, per view.

        ``drawn``: the batch's random numbers; ``sizes``: (H, W) of each view's images.
        """

        views = zip(self.views, sizes, strict=True)
        return [[_choose(drawn, view, op, size) for op in view.augment.prepared] for view, size in views]

    def forward(
        self,
        images: Tensor | Mapping[str, Tensor],
        *,
        masks: Any = None,
        boxes: Any = None,
        labels: Any = None,
        keypoints: Any = None,
        corners: Any = None,
        targets: Targets | None = None,
        seed: int | None = None,
        epoch: int = 0,
        indices: Int | Tensor | Sequence[int] | None = None,
        layout: Any = None,
        white: Any = None,
        nan: Any = "refuse",
        dtype: str | torch.dtype = torch.float32,
        memory_format: str | torch.memory_format = torch.contiguous_format,
    ) -> Any:
        """Apply the whole recipe, including the crop, to a batch that is already on the device.

        Args:
            images: uint8, uint16, float16, bfloat16 or float32 [B, C, H, W]; clips are [B, T, C, H, W]. uint8 may also
                be [B, H, W, 3]. With several cameras, a mapping of their names to images or clips of the same samples.
            masks: integers [B, H, W], one class number per pixel.
            boxes: for each image [n, 4], (x1, y1, x2, y2) in pixels.
            labels: for each image [n], class numbers of the objects; None: 0 for all objects.
            corners: for each image [n, 4, 2], the corners of oriented boxes in pixels, in place of ``boxes``.
            keypoints: for each image [n, K, 3], (x, y, visibility). With clips, masks are [B, T, H, W], and boxes,
                labels and keypoints are lists of T for each clip. With cameras, all of them are mappings as ``images``.
            targets: rules for masks, boxes and keypoints; None: the defaults of :class:`~gpuaug.Targets`.
            seed: any integer. None: 0 if ``indices`` are given, else a new seed from torch's default CPU generator.
            epoch: number of the epoch.
            indices: [B], sample numbers; one for all frames and cameras. None: 0 .. B-1, so calls with the same
                ``seed`` give the same result.
            layout: ``channels_first`` or ``channels_last``, the order of the images' axes; None: channels_first, but
                channels_last for uint8 whose last axis has size 3.
            white: value of the images that becomes 1; None: 255 for uint8, 65535 for uint16, 1 for floats.
            nan: for values that are NaN or infinite: ``refuse`` or ``zero``. On CUDA, ``refuse`` waits for the device.
            dtype: float32, bfloat16 or float16, as a string or torch's constant; ``same``: the images' type, with
                their white, for recipes without ``normalize``.
            memory_format: contiguous_format or channels_last, as a string or torch's constant.

        Returns:
            [B, C, h, w], or a list of such tensors if the recipe has several views. With masks, boxes or keypoints:
            ``(images, targets)``, where ``targets`` is a :class:`~gpuaug.BatchTargets`, or a list of them. Of clips:
            [B, T, C, h, w], and targets of B * T images, frame t of clip b at b * T + t. Of cameras: a dictionary.

        Raises:
            ReadOnlyError: settings were changed after the recipe was created.
            ConfigError: an operation cannot take such images, or an argument is wrong.
        """
        given = {"masks": masks, "boxes": boxes, "labels": labels, "keypoints": keypoints, "corners": corners}
        given["targets"] = targets
        recipe = self.at(epoch)
        call: Any = recipe._of_cameras if isinstance(images, Mapping) else recipe.augment_rows
        if torch.compiler.is_compiling():  # torch.compile cannot trace numpy code and gpuaug's kernels
            call = torch.compiler.disable(call)
        reading = {"layout": layout, "white": white, "nan": nan}
        output = {"dtype": dtype, "memory_format": memory_format}
        return call(images, given, seed=seed, epoch=epoch, indices=indices, **reading, **output)

    def augment_rows(
        self,
        images: Any,
        given: dict[str, Any],
        *,
        seed: int | None,
        epoch: int,
        indices: Any,
        layout: str | None,
        white: float | None,
        nan: str,
        rows: Rows = IMAGES,
        **output: Any,
    ) -> Any:
        """Do what :meth:`forward` does, for the images of one camera.

        Args:
            images: images or clips.
            given: the arguments ``masks``, ``boxes``, ``labels``, ``keypoints``, ``corners`` and ``targets`` of
                ``forward``.
            seed, epoch, indices, layout, white, nan: as in ``forward``.
            rows: the camera.
            output: ``dtype`` and ``memory_format``, as in ``forward``.
        """
        if self.combine:
            raise ConfigError(
                f"`augment.{self.combine.key}` works only in a loader. Found: {self.combine}, and a call with images. "
                "Use gpuaug.Loader, or another crop and `replace(combine=None)`."
            )
        self.check_unchanged()
        images, white, clip, refuses = pixels(images, layout=layout, white=white, nan=nan)
        same = isinstance(output["dtype"], str) and output["dtype"] == "same"
        self.check_images(images, same=same)
        back = partial(same_type, dtype=images.dtype, white=white) if same else None
        output = {name: checks.torch_constant(name, v) for name, v in output.items() if name != "dtype" or not same}
        frames = 1 if clip is None else clip
        samples = len(images) // frames
        checks.whole_number("seed", int(seed) if isinstance(seed, np.integer) else seed, None, optional=True)
        if indices is None:
            indices = range(samples)
            seed = seed_of_call() if seed is None else seed
        numbers = np.asarray(indices.cpu() if isinstance(indices, Tensor) else indices)
        if numbers.shape != (samples,) or (numbers.size and numbers.dtype.kind not in "iu"):
            raise ConfigError(
                f"`indices` must be {samples} whole numbers, one per {'image' if clip is None else 'clip'}. "
                f"Found: {numbers.dtype} {list(numbers.shape)}."
            )
        drawn = self.draw(seed=seed or 0, epoch=epoch, indices=numbers, rows=replace(rows, frames=frames))
        if clip is not None:
            given = {k: v if k == "targets" else fold(k, v, samples, frames) for k, v in given.items()}
            numbers = numbers.repeat(frames)
        size, chosen, moved = (images.shape[1], images.shape[2]), None, None
        if any(given[name] is not None for name in ("masks", "boxes", "keypoints", "corners")):
            from gpuaug.augment.given_targets import augment_targets  # not needed without targets

            windows, chosen, moved = augment_targets(
                self, drawn, given, size=size, indices=numbers.astype(np.int64), device=images.device
            )
        else:
            for name in ("targets", "labels"):
                if given[name] is not None:
                    raise ConfigError(f"`{name}` needs masks, boxes or keypoints. Found: none of them. Give one, too.")
            windows = self.windows(drawn, *np.full((len(images), 2), size, dtype=np.int64).T, empty=size)
        if chosen is None:
            chosen = self.choose(drawn, [each.size for each in windows])
        made: Any = []
        for view, each, choices in zip(self.views, windows, chosen, strict=True):
            try:
                crop = crop_of(images, each)
                made.append(view.augment.run(images, choices, white=white, crop=crop, refuses=refuses, **output))
            except NotFiniteError:
                raise not_finite(images, frames) from None
            refuses = False  # the first view has looked at all values
        if back is not None:
            made = [back(view) for view in made]
        if clip is not None:
            made = [view.unflatten(0, (samples, frames)) for view in made]
        if moved is None:
            return made[0] if len(made) == 1 else made
        return (made[0], moved[0]) if len(made) == 1 else (made, moved)

    def _of_cameras(self, images: Mapping[str, Any], given: dict[str, Any], **more: Any) -> dict[str, Any]:
        """Apply the recipe to the images of each camera."""

        def call(camera: str, batch: Tensor, **own: Any) -> Any:
            return self.augment_rows(batch, rows=Rows(camera=camera), **own)

        return by_camera(images, call, given, **more)

    def check_images(self, images: Tensor, *, same: bool = False) -> None:
        """Raise ConfigError if an operation or the normalization cannot take such images.

        ``images``: [B, H, W, C]; ``same``: whether the result has their type.
        """
        for view in (view for view in self.views if view.copy == 0):
            key, normalize = f"augment.views.{view.name}" if view.name else "augment", view.augment.normalize
            deep, rest = images.dtype == torch.uint16, {"crop": view.augment.crop, "normalize": normalize}
            check_domains(view.augment.prepared, channels=images.shape[3], deep=deep, key=f"{key}.ops", **rest)
            if normalize is not None and same:
                raise ConfigError(
                    f"`{key}.normalize` must be null with dtype='same', because normalized values do not fit into "
                    f"{images.dtype}. Found: {normalize}."
                )


class Augment(RecipeBase):
    """A recipe: crop, operations, normalization. ``copies`` makes several random views of each sample.

    The constructor reads the settings of crop and operations once. ``train()`` and ``eval()`` have no effect.

    Args:
        crop: gpuaug.RandomResizedCrop or another gpuaug crop. None: no crop; all images must have the same size.
        ops: mapping of names to ``kornia.augmentation`` operations, applied in this order. None skips an entry.
        normalize: gpuaug.Normalize; None: pixels stay in 0..1.
        copies: number of views. Each view has its own random numbers.
        backend: ``fused`` (compiled kernels) or ``kornia`` (Kornia's modules, the reference).
        same_on_frame: mapping of names of operations, or ``crop``, to what the frames of a clip share. True, the
            default: all random numbers. False: none. ``field``: all but random fields, such as the noise of each pixel.
        same_on_camera: mapping of names to whether the cameras of a sample share the random numbers; the entry
            ``default`` is for all others. The default is False.
        epochs: mapping of names of operations, or ``crop``, to [first epoch, first epoch without], such as
            ``{"erase": [0, 90]}``; an end of None: there is none. In other epochs the operation is left out, and a
            :class:`RandomIoUCrop` only resizes. Other operations keep their random numbers.
        sizes: a :class:`Sizes`, which draws the size of the output for each step of a loader. None: the crop's size.
        combine: mapping of names to a :class:`Mosaic`, a :class:`CanvasAffine` and a :class:`TileMixUp`, which work in
            this order between crop and ``ops``, and only in a loader. None skips an entry.

    >>> import torch, gpuaug, kornia.augmentation as K
    >>> recipe = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(32), ops={"flip": K.RandomHorizontalFlip()})
    >>> recipe(torch.zeros((8, 3, 60, 80), dtype=torch.uint8), seed=0).shape
    torch.Size([8, 3, 32, 32])
    """

    _read_once = (
        "crop",
        "ops",
        "normalize",
        "copies",
        "backend",
        "same_on_frame",
        "same_on_camera",
        "epochs",
        "sizes",
        "combine",
        "prepared",
        "views",
    )
    cuda_is_wrong: bool | None = None  # True: CUDA's compiled kernels fail a check, so Kornia takes images on CUDA
    _sized_from: tuple[Augment, ...] = ()  # in a tuple, because a module would become a submodule

    def __init__(
        self,
        *,
        crop: Any = None,
        ops: Mapping[str, Any] | None = None,
        normalize: Normalize | None = None,
        copies: int = 1,
        backend: str = "fused",
        same_on_frame: Mapping[str, Same] | None = None,
        same_on_camera: Mapping[str, bool] | None = None,
        epochs: Mapping[str, Sequence[int | None]] | None = None,
        sizes: Sizes | None = None,
        combine: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if crop is not None and not isinstance(crop, (*CROPS, Window)):
            from gpuaug.augment.person_crop import PersonCrop  # other recipes do not need these
            from gpuaug.augment.target_crops import TARGET_CROPS

            checks.instance("augment.crop", crop, *CROPS, *TARGET_CROPS, PersonCrop)
        checks.instance("augment.normalize", normalize, Normalize, optional=True)
        checks.whole_number("augment.copies", copies, 1, LARGEST_COPIES)
        checks.one_of("augment.backend", backend, BACKENDS)
        # the operations are not submodules, because `.to()` would convert Kornia's samplers
        self.prepared: tuple[Prepared, ...] = prepare_all(ops, path="augment.ops")
        check_place(self.prepared, normalize)
        self.same_on_frame = check_frames(same_on_frame, self.prepared, key="augment.same_on_frame")
        names = [op.name for op in self.prepared]
        self.shared_by_cameras = check_cameras(same_on_camera, names, key="augment.same_on_camera")
        self.same_on_camera = dict(same_on_camera or {})
        self.crop, self.normalize, self.copies, self.backend = crop, normalize, copies, backend
        self.combine = Combine.of(combine, names, crop)
        if self.combine and copies > 1:
            raise ConfigError(f"`augment.copies` must be 1 with {self.combine}. Found: {copies}.")
        self.epochs = self._check_epochs(epochs, {**(ops or {}), **(combine or {})})
        self.sizes = checks.instance("augment.sizes", sizes, Sizes, optional=True)
        if sizes is not None and not isinstance(getattr(crop, "__dict__", {}).get("size"), tuple):
            raise ConfigError(f"`augment.sizes` needs a crop with a size (H, W). Found: {crop!r:.99}.")
        if sizes is not None and sizes.how == "crop" and self.combine:
            raise ConfigError(f"`augment.sizes.how` must be resize with {self.combine}. Found: crop.")
        self._by_size: dict[Size | int, Augment] = {}
        self._executor: ReferenceBackend | FusedBackend | None = None
        self._made = self.settings()

    @property
    def ops(self) -> Mapping[str, Any]:
        """The given operations, without the entries that are None."""
        return MappingProxyType({p.name: p.op for p in self.prepared})

    @property
    def views(self) -> list[View]:  # type: ignore[override]
        """One view per copy."""
        return [View("", copy, self) for copy in range(self.copies)]

    @property
    def output_size(self) -> Any:
        """(H, W) of the output. An int: the shorter side. None: that of the image."""
        size = None if self.crop is None else self.crop.size
        return self.combine.size(size) if self.combine else size

    def fingerprint(self) -> dict[str, Any]:
        """All settings that decide random numbers and pixels, as JSON; the backend is not one of them."""
        return {**self._made, "copies": self.copies}

    def replace(self, **changes: Any) -> Augment:
        """Return a new recipe with ``changes`` of the settings, for example ``replace(normalize=None)``."""
        names = ["crop", "ops", "normalize", "copies", "backend", "same_on_frame", "same_on_camera", "epochs", "sizes"]
        own = {name: getattr(self, name) for name in names}
        return Augment(**{**own, "combine": self.combine.entries} | changes)

    def settings(self) -> dict[str, Any]:
        """Crop, operations and normalization with their settings, as JSON."""
        normalize = self.normalize
        return {
            "crop": settings(self.crop),
            # a list, because the order matters
            "ops": [{"name": name, **settings(op)} for name, op in self.ops.items()],
            "normalize": None if normalize is None else normalize.values(),
            **{name: value for name in ("same_on_frame", "same_on_camera", "epochs") if (value := getattr(self, name))},
            **({} if self.sizes is None else {"sizes": self.sizes.settings()}),
            # a name decides the random numbers
            **({"combine": settings(self.combine.entries)} if self.combine.entries else {}),
        }

    def for_step(self, *, seed: int, epoch: int, step: Step | None) -> Augment:
        """As :meth:`RecipeBase.for_step`."""
        number, length = step or (None, None)
        size = None if self.sizes is None or number is None else self.sizes.of(seed=seed, epoch=epoch, step=number)
        if (key := length if size is None else size) is None:
            return self
        if key not in self._by_size:
            crop = copy.copy(self.crop)
            resize = self.sizes is not None and self.sizes.how == "resize"
            if length is not None:
                crop.length = length
            elif not resize:
                crop.size = size
            made = self._by_size[key] = self.replace(crop=crop, sizes=None)
            made._sized_from, made.resized = (self,), size if resize else None
        return self._by_size[key]

    @property
    def checked(self) -> Augment:
        """The recipe that was checked on CUDA: for a copy made by `for_step` the original, otherwise this one."""
        return self._sized_from[0] if self._sized_from else self

    def _check_epochs(self, epochs: Any, ops: Mapping[str, Any]) -> dict[str, list[int | None]]:
        if epochs is not None and not isinstance(epochs, Mapping):
            raise ConfigError(f"`augment.epochs` must be a mapping of names. Found: a {type(epochs).__name__}.")
        names = [*ops, *(["crop"] if hasattr(self.crop, "plain") else [])]
        for name in epochs or {}:
            if name not in names:
                raise ConfigError(
                    "`augment.epochs` must name operations, or `crop` if it is a gpuaug.RandomIoUCrop. "
                    f"Found: {name!r}. The names are {', '.join(names) or 'none'}."
                )
        return {name: [*checks.interval(f"augment.epochs.{name}", each)] for name, each in (epochs or {}).items()}

    def changes(self) -> set[int]:
        return {epoch for each in self.epochs.values() for epoch in each if epoch is not None}

    def _of_epoch(self, epoch: int) -> Augment:
        off = {name for name, each in self.epochs.items() if not checks.within(each, epoch)}
        return self.replace(
            crop=self.crop.plain() if "crop" in off else self.crop,
            ops={name: op for name, op in self.ops.items() if name not in off},
            combine={name: each for name, each in self.combine.entries.items() if name not in off},
            same_on_frame={name: same for name, same in self.same_on_frame.items() if name not in off - {"crop"}},
            same_on_camera={name: same for name, same in self.same_on_camera.items() if name not in off - {"crop"}},
            epochs=None,
        )

    def extra_repr(self) -> str:
        """Crop, operations, what is shared, copies and backend."""
        ops = (f"{name}={op!r}" for name, op in self.ops.items())
        names = ("same_on_frame", "same_on_camera", "epochs")
        same = (f"{name}={value}" for name in names if (value := getattr(self, name)))
        combine = (f"{name}={each!r}" for name, each in self.combine.entries.items())
        last = f"copies={self.copies}", f"backend={self.backend!r}"
        return ",\n".join([f"crop={self.crop!r}", *combine, *ops, *same, *last])

    def run(self, images: Tensor, chosen: Sequence[Chosen], **output: Any) -> Tensor:
        """Augment ``images`` [B, H, W, C] of one view. Returns [B, C, H, W].

        ``chosen`` holds the choices of every operation; ``output``: the options of
        :class:`~gpuaug.augment.reference.ReferenceBackend`.
        """
        checked = self.checked
        if images.is_cuda and checked.cuda_is_wrong is None:
            checked.cuda_is_wrong = verdict("fused_cuda") is False
            if checked.cuda_is_wrong and self.backend == "fused":
                log.warning("using backend=kornia: `gpuaug doctor` found that compiled kernels fail on this machine")
        kornia = self.backend == "kornia" or (images.is_cuda and checked.cuda_is_wrong)
        kind = ReferenceBackend if kornia else FusedBackend
        executor = self._executor
        if not isinstance(executor, kind):
            executor = self._executor = kind(self.prepared, self.normalize)
        return executor(images, chosen, **output)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_executor": None}  # a copied recipe makes its own


def _choose(drawn: Drawn, view: View, op: Prepared, size: Size) -> Chosen:
    at = view.name, view.copy, op.name
    u, keys, same = drawn.uniforms[at], drawn.keys.get(at), view.augment.same_on_frame.get(op.name, True)
    return op.draw(u, size, keys) if drawn.rows.frames == 1 else drawn.rows.choose(op, same, u, size, keys)


def _before_flips(windows: CropWindows, view: View, drawn: Drawn) -> CropWindows:
    """Place images so that they lie at the top left after the flips, as if these came before the padding."""
    moved = np.zeros((len(windows), 2), dtype=bool)  # whether the image lies at the bottom, at the right
    for op in view.augment.prepared:
        if (axis := FLIPPED.get(type(op.op).__name__)) is not None:
            moved[:, axis] ^= _choose(drawn, view, op, windows.size).choice[:, 0] >= 0
    return replace(windows, offset=windows.offset + moved * (windows.size - windows.resized))


def _whole_images(heights: Int, widths: Int, empty: Size) -> CropWindows:
    """The windows of a view without a crop."""
    sizes = np.stack([heights, widths], axis=1).astype(np.int32)
    known = sizes[:, 0] > 0  # a sample that cannot be decoded has size 0
    sizes[~known] = sizes[known.argmax()] if known.any() else 1
    if len(sizes) and (sizes != sizes[0]).any():
        other = sizes[(sizes != sizes[0]).any(axis=1)][0]
        raise ConfigError(
            "`augment.crop` must be set if the images of a batch differ in size. Found: "
            f"{sizes[0].tolist()} and {other.tolist()}. Use gpuaug.Resize((H, W)) or another crop."
        )
    height, width = sizes[0].tolist() if len(sizes) else empty
    zero = np.zeros_like(sizes)
    return CropWindows(np.concatenate([zero, sizes], axis=1), sizes, zero, (height, width))
