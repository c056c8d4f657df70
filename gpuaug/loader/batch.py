"""What a loader yields: batches of augmented images."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpuaug import checks
from gpuaug.batch import Images
from gpuaug.errors import ConfigError
from gpuaug.native.buffers import to_device

if TYPE_CHECKING:  # workers do not need Pillow
    from PIL.Image import Image

    from gpuaug.augment.explain import Explanation


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Augmented images and labels on the device.

    A batch can be unpacked into two values: ``(images, labels)`` without targets, ``(images, masks)`` if masks are the
    only target, else ``(images, targets)``.

    Attributes:
        images: float ``[B, 3, H, W]``; a list of such tensors if the recipe has several views. The list has the order
            of the recipe's ``views``. A view with several copies has several list items, one after the other.
        labels: int64 ``[B]`` (class numbers), float ``[B]`` (other numbers), float ``[B, K]`` (multi-label) or float
            ``[B, C]`` (after mix); None if there are no labels.
        indices: int64 ``[B]``, CPU: the samples' numbers in the source.
        valid: bool ``[B]``, CPU: False if the sample could not be read or decoded, or only fills the batch.
        key_of: maps a sample number to the sample's path or name.
        targets: a :class:`~gpuaug.BatchTargets`; a list of BatchTargets if the recipe has several views; None if the
            loader has no targets.
        extra: a list of B values, such as captions, as the source gave them. A value is None if its sample has no
            extra or could not be read. ``mix`` does not mix the values.
        patch_masks: a :class:`~gpuaug.PatchMasks`; None if the loader draws no patch masks.
        sides: int64 ``[B, 2]``, CPU: height and width of the image, at the top left of the output, for crops whose
            output is as large as the batch's largest image; else None. After the crop and flips: what other operations
            or ``mix`` move is not in it.
        patch, length: of :class:`ResizeToSequence`, for :meth:`patches`; None: the recipe has another crop.
        positions: computes :attr:`matrices`; None: this batch has none.
        explained: computes what :meth:`explain` returns, for each view of a row; None: this batch has no explanations.
        look: normalization and names for ``show``. None: ``show`` takes the pixels as values from 0 to 1.

    >>> numbers, labels = torch.tensor([0, 3]), torch.tensor([5, 6])
    >>> images = torch.zeros(2, 3, 8, 8)
    >>> batch = Batch(images=images, labels=labels, indices=numbers, valid=numbers >= 0, extra=["a cat", "a dog"])
    >>> images, labels = batch
    >>> batch.keys, batch.extra
    (['0', '3'], ['a cat', 'a dog'])
    """

    images: Images
    labels: Tensor | None
    indices: Tensor
    valid: Tensor
    key_of: Callable[[int], str] = field(default=str, repr=False)
    targets: Any = None
    extra: list[Any] = field(default_factory=list)
    patch_masks: Any = None
    sides: Tensor | None = None
    patch: int | None = None
    length: int | None = None
    positions: Callable[[], list[Tensor]] | None = field(default=None, repr=False, compare=False)
    explained: Callable[[int], list[Explanation]] | None = field(default=None, repr=False, compare=False)
    look: Any = field(default=None, repr=False, compare=False)

    def __iter__(self) -> Iterator[Any]:
        yield self.images
        if self.targets is None:
            yield self.labels
        elif isinstance(self.targets, list):
            yield [view.yielded for view in self.targets]
        else:
            yield self.targets.yielded

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def keys(self) -> list[str]:
        """Relative paths or names of the samples."""
        return [self.key_of(i) for i in self.indices.tolist()]

    @property
    def matrices(self) -> Images:
        """float64 ``[B, 3, 3]``, CPU, or a list of them as ``images``: from positions in the image to those in a view.

        Positions are in pixels, (x, y, 1), and pixel i covers i..i+1. The image is as displayed, after EXIF
        orientation. ``b @ a.inverse()`` leads from view a to view b. See :func:`~gpuaug.match_patches`. They are
        computed at each access.

        Raises:
            ConfigError: an operation moves pixels, but not by a matrix, or the batch is not from a loader.
        """
        if self.positions is None:
            raise ConfigError("`matrices` needs a batch from a gpuaug.Loader. Found: another batch.")
        made = self.positions()
        return made if isinstance(self.images, list) else made[0]

    def patches(self) -> dict[str, Tensor]:
        """Sequences of patches, for NaFlex models such as timm's ``naflexvit``, as the model's keyword arguments.

        Returns, on the device of ``images``, with L = ``length`` and p = ``patch``:

        - ``patches``: ``[B, L, p * p * C]``, the channel is the fastest; rows of patches, then zeros
        - ``patch_coord``: int64 ``[B, L, 2]``, (row, column) of each patch in its image; zeros behind
        - ``patch_valid``: bool ``[B, L]``, False behind

        Raises:
            ConfigError: the recipe has another crop than :class:`ResizeToSequence`.
        """
        if self.sides is None or self.patch is None or self.length is None or isinstance(self.images, list):
            raise ConfigError("`patches` needs a batch with the crop gpuaug.ResizeToSequence. Found: another crop.")
        p, device = self.patch, self.images.device
        count, channels, height, width = self.images.shape
        rows, columns = (self.sides // p).T[:, :, None]
        k = torch.arange(self.length, device="cpu")
        valid = k < rows * columns
        coord = torch.stack([k // columns, k % columns], dim=2) * valid[:, :, None]
        at = to_device(coord[:, :, 0] * (width // p) + coord[:, :, 1], device)
        cut = self.images.reshape(count, channels, height // p, p, width // p, p).permute(0, 2, 4, 3, 5, 1)
        cut = cut.reshape(count, -1, p * p * channels)
        valid, coord = to_device(valid, device), to_device(coord, device)
        patches = cut.gather(1, at[:, :, None].expand(-1, -1, cut.shape[2])) * valid[:, :, None]
        return {"patches": patches, "patch_coord": coord, "patch_valid": valid}

    def explain(self, row: int) -> Explanation | list[Explanation]:
        """What the recipe did to the sample at ``row``: its crop window, and each operation with its parameters.

        Returns an :class:`~gpuaug.Explanation`; a list of them, as ``images``, if the recipe has several views. What
        ``mix`` did to the batch is not in it, and nothing of a sample that could not be read. It is computed at each
        call.

        Raises:
            ConfigError: the batch is not from a loader, or is a copy that was pickled.
        """
        if self.explained is None:
            raise ConfigError("`explain` needs a batch from a gpuaug.Loader. Found: another batch, or a copy.")
        made = self.explained(checks.whole_number("row", row, 0, len(self) - 1))
        if self.look is not None and row in (self.look.bad or ()):
            made = [replace(each, steps=[], window=(0, 0, 0, 0)) for each in made]
        return made if isinstance(self.images, list) else made[0]

    def digest(self) -> str:
        """Hash of images, labels and sample numbers, as text: equal for equal bits. It waits for the device.

        >>> numbers = torch.tensor([0, 3])
        >>> Batch(images=torch.zeros(2, 3, 8, 8), labels=None, indices=numbers, valid=numbers >= 0).digest()[:8]
        'f0f2cbc2'
        """
        total = hashlib.blake2b(digest_size=16)
        for each in [*(self.images if isinstance(self.images, list) else [self.images]), self.labels, self.indices]:
            if each is not None:
                total.update(f"{each.dtype} {list(each.shape)}".encode())
                total.update(each.detach().cpu().resolve_neg().contiguous().view(torch.uint8).numpy().data)
        return total.hexdigest()

    def show(
        self,
        rows: int | None = None,
        columns: int | None = None,
        *,
        size: int | None = None,
        bands: Sequence[int] | None = None,
    ) -> Image:
        """Draw the first samples as one picture, with masks, boxes and keypoints. Normalization is undone.

        Masked patches are gray. The views of a sample, or the frames of a clip, are side by side. The text below a
        sample is its number and label. Without labels, or with targets, the text is its number and key. A sample with
        ``valid`` False is marked.

        Args:
            rows: largest number of rows; None: as many as 16 samples need.
            columns: samples in a row; None: 8, or fewer if there are several views or targets.
            size: longer side of the largest image, in pixels; None: 128, or 240 with targets.
            bands: the three channels to draw as red, green and blue; needed if images have neither 1 nor 3 channels.

        >>> numbers = torch.tensor([0, 3])
        >>> batch = Batch(images=torch.rand(2, 3, 8, 8), labels=None, indices=numbers, valid=numbers >= 0)
        >>> batch.show(columns=2, size=64).mode
        'RGB'
        """
        from gpuaug.display.batches import picture

        return picture(self, rows=rows, columns=columns, size=size, bands=bands)

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickle and deepcopy. The copy holds the keys of its samples instead of the source."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        if self.key_of is not str:
            values["key_of"] = partial(getitem, dict(zip(self.indices.tolist(), self.keys, strict=True)))
        if self.positions is not None:
            try:
                values["positions"] = partial(list, self.positions())  # without the recipe
            except ConfigError:
                values["positions"] = None
        values["explained"] = None
        return partial(Batch, **values), ()

    def _repr_png_(self) -> bytes | None:
        from gpuaug.display.batches import picture

        stream = io.BytesIO()
        try:
            picture(self, rows=None, columns=None, size=None, small=True).save(stream, "PNG")
        except Exception:  # the notebook shows the text instead
            return None
        return stream.getvalue()

    def __repr__(self) -> str:
        def text(x: Any) -> str:
            if isinstance(x, list):
                return f"[{', '.join(map(text, x))}]"
            if not isinstance(x, Tensor):
                return "None" if x is None else type(x).__name__
            return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} on {x.device}"

        first = self.targets[0] if isinstance(self.targets, list) else self.targets
        kinds = [k for k in ("masks", "boxes", "keypoints") if getattr(first, k, None) is not None]
        parts = [f"images={text(self.images)}", f"labels={text(self.labels)}"]
        parts += [f"targets={'+'.join(kinds)}"] if kinds else []
        parts += [] if self.patch_masks is None else [f"patch_masks={text(self.patch_masks.masks)}"]
        if isinstance(self.valid, Tensor):
            parts.append(f"{int(self.valid.sum())} of {len(self.valid)} valid")
        return f"Batch({', '.join(parts)})"

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return the batch with images, labels, targets and masks on ``device``; other fields stay on the CPU.

        ``non_blocking`` is the argument of ``Tensor.to``.
        """

        def move(x: Any) -> Any:
            if isinstance(x, list):
                return [move(each) for each in x]
            return None if x is None else x.to(device, non_blocking=non_blocking)

        names = ("images", "labels", "targets", "patch_masks")
        return replace(self, **{name: move(getattr(self, name)) for name in names})
