"""COCO's datasets: images, and one JSON file with boxes, keypoints and masks of all of them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from gpuaug import checks
from gpuaug.batch import Target
from gpuaug.errors import ConfigError, GpuaugError, ReadError, SourceError
from gpuaug.files import LARGEST_FILE
from gpuaug.source import runs
from gpuaug.source.base import Classes, ListedSource
from gpuaug.source.classes import class_mapping, some
from gpuaug.source.coco_json import Annotations, mirror_images, parse, refused
from gpuaug.source.filters import Subset
from gpuaug.source.index import Names, share
from gpuaug.source.objects import ObjectTable
from gpuaug.source.paths import absolute, is_safe, is_url, join, redact
from gpuaug.source.paths import split as split_path
from gpuaug.source.remote.storage import Range, Remote, Storage
from gpuaug.source.segmentations import Segmentations, import_pycocotools

PART_BYTES = 1 << 28  # bytes per read of a file above 1 GiB


class CocoSource(ListedSource):
    """Images with boxes, keypoints and masks of objects, in COCO's format: ``root/<split>/*.jpg``.

    Samples are in the order of their image ids. Classes are the file's categories by ascending id, numbered from 0.
    Keypoints are read if the file's categories name them. Crowds are read and marked; ``gpuaug.Boxes`` drops them.
    A sample with a damaged box or outline is a fault when it is read; its message names the annotation.

    Args:
        root: the dataset's folder, or its URL.
        annotations: the JSON file: a path, below ``root`` if it is relative, or the first part of its name, such as
            ``person_keypoints`` for ``root/annotations/person_keypoints_<split>.json``. None: ``panoptic`` for
            panoptic masks, else ``instances``.
        split: subfolder of the images, such as ``train2017``; the name of the JSON file ends in it too. None: paths in
            the file are relative to ``root``, and ``annotations`` must be a path.
        masks: ``instances``: one map of object numbers for each image, drawn from polygons and run lengths; needs
            pycocotools. ``panoptic``: PNG files of segment ids, in the folder that has the name of the JSON file
            without ``.json``. None: no masks.
        empty: ``drop`` leaves out images without objects, and the others are numbered without gaps. ``keep`` keeps
            them.
        classes: class mapping of another run, as in :class:`FolderSource`. It must name all categories of the file.
        subset, exclude: as in :class:`FolderSource`.
        remote: how to read from a URL.

    Raises:
        SourceError: if a file cannot be read, is damaged, or contradicts itself.

    >>> source = CocoSource("data/coco", split="train2017")
    >>> data, target = source[0]
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        annotations: str | os.PathLike[str] | None = None,
        split: str | None = None,
        masks: Literal["instances", "panoptic"] | None = None,
        empty: Literal["keep", "drop"] = "keep",
        classes: Classes = None,
        subset: Subset = None,
        exclude: str | os.PathLike[str] | None = None,
        remote: Remote | None = None,
    ) -> None:
        began = time.monotonic()
        if masks is not None:
            checks.one_of("source.masks", masks, ("instances", "panoptic"))
        checks.one_of("source.empty", empty, ("keep", "drop"))
        if masks == "instances":
            import_pycocotools()
        mapping = None if classes is None else class_mapping(classes)
        self.masks = masks
        self.panoptic = masks == "panoptic"  # masks hold annotation ids
        self._storage = Storage(remote)
        place = _annotations_path(absolute(root), annotations, split, masks)
        self.root = absolute(root) if split is None else join(absolute(root), split)
        if not is_url(self.root) and not os.path.isdir(self.root):
            raise SourceError(f"the folder of images does not exist: {self.root!r}. Set `source.root`, `source.split`.")
        parsed = parse(_read_file(place, self._storage), masks=masks, place=place)
        self._set_classes(parsed.categories, mapping, place)
        self._set_objects(parsed, empty, place)
        self._activate(subset, exclude, began=began)

    @property
    def target_kinds(self) -> frozenset[str]:
        """Boxes, and also masks and keypoints if the files have them."""
        kinds = {"masks": self.masks is not None, "keypoints": self.num_keypoints is not None}
        return frozenset({"boxes", *(name for name, has in kinds.items() if has)})

    def objects_digest(self) -> str:
        """Hash of all objects."""
        return self._table.digest()

    @property
    def nbytes(self) -> int:
        """Bytes of the index, which all processes of a machine share."""
        tensors = [self._names.blob, self._names.offsets, self.image_ids]
        tensors += [] if self._pngs is None else [self._pngs.blob, self._pngs.offsets]
        outlines = 0 if self._outlines is None else self._outlines.nbytes
        return sum(tensor.nbytes for tensor in tensors) + self._table.nbytes + outlines

    def label(self, index: int) -> Target:
        """Objects of sample ``index``, without its mask and without checks. Reads nothing."""
        return self._table.target(self._check(index))

    def _set_classes(self, names: list[str], mapping: dict[str, int] | None, place: str) -> None:
        mapping = {name: label for label, name in enumerate(names)} if mapping is None else mapping
        if unknown := [name for name in names if name not in mapping]:
            raise SourceError(
                f"`source.classes` has {len(mapping)} classes, but lacks {len(unknown)} of the {len(names)} categories "
                f"in {redact(place)!r}: {some(unknown)}. Add them to `source.classes`."
            )
        self.classes, self.class_to_idx = list(mapping), mapping

    def _set_objects(self, parsed: Annotations, empty: str, place: str) -> None:
        kept = np.flatnonzero(parsed.counts) if empty == "drop" else np.arange(len(parsed.names))
        if not len(kept):
            raise SourceError(f"no image in {redact(place)!r} has objects, and `source.empty` is drop.")
        self._names = Names.of([[parsed.names[i] for i in kept.tolist()]])
        self.image_ids = share(torch.from_numpy(parsed.image_ids[kept]))  # int64 [N]
        self._outlines = self._pngs = None
        if self.masks == "instances":
            try:
                self._outlines = Segmentations(parsed.outlines)
            except (ValueError, RecursionError) as error:
                raise refused(place, f"`segmentation` of an object {error}") from error
        elif parsed.masks is not None:
            names = [parsed.masks[i] for i in kept.tolist()]
            if b"" in names:
                first = parsed.image_ids[kept[names.index(b"")]]
                raise refused(place, f"image {first} has no mask, and `source.empty` is keep")
            self._pngs, self._png_folder = Names.of([names]), _png_folder(place, self.root)
        assert self.class_to_idx is not None
        numbers = np.array([self.class_to_idx[name] for name in parsed.categories], dtype=np.int64)
        self.num_keypoints = None if parsed.keypoints is None else parsed.keypoints.shape[1]
        self.flip_pairs, self.skeleton = mirror_images(parsed.points), parsed.skeleton
        self._table = ObjectTable(
            parsed.counts[kept], boxes=parsed.boxes, labels=numbers[parsed.labels], keypoints=parsed.keypoints,
            crowd=parsed.crowd, area=parsed.area, ids=parsed.ids, sizes=parsed.sizes[kept],
        )  # fmt: skip

    def _range(self, index: int) -> Range:
        return Range(join(self.root, os.fsdecode(self._names[index])), image=0)

    def _ranges(self, numbers: Sequence[int]) -> list[Range]:
        """Locations of the images. If masks are files, their locations follow."""
        ranges = [self._range(i) for i in numbers]
        if self._pngs is not None:
            ranges += [Range(join(self._png_folder, os.fsdecode(self._pngs[i])), image=0) for i in numbers]
        return ranges

    def _read(self, numbers: Sequence[int]) -> list[Any]:
        results = self._storage.read(self._ranges(numbers))
        masks: list[Any] = results[len(numbers) :] or [None] * len(numbers)
        return [self._sample(i, *parts) for i, *parts in zip(numbers, results, masks, strict=False)]

    def _prefetch(self, numbers: Sequence[int]) -> None:
        self._storage.prefetch(self._ranges(numbers))

    def _sample(self, index: int, image: Any, mask: Any) -> Any:
        """Bytes and target, or the exception if the sample cannot be used."""
        for part in (image, mask):
            if isinstance(part, Exception):
                return part
        target = self._table.target(index, mask=mask)
        ids = range(len(target.boxes)) if target.ids is None else target.ids
        try:
            _check_objects(target, ids)
            if self._outlines is not None:
                begin, end = self._table.bounds.numpy()[index : index + 2].tolist()
                drawn = self._outlines.draw(begin, end, size=target.size or (1, 1), crowd=target.crowd, ids=ids)
                return image, replace(target, mask=runs.encode(drawn))
        except GpuaugError as error:
            return error
        return image, target


def _check_objects(target: Target, ids: Sequence[int]) -> None:
    """GpuaugError if a box is inverted or not finite, or a keypoint is damaged."""
    boxes = target.boxes
    valid = np.isfinite(boxes).all(1) & (boxes[:, 2:] >= boxes[:, :2]).all(1)
    if not valid.all():
        at = int(valid.argmin())
        x1, y1, x2, y2 = boxes[at].tolist()
        raise GpuaugError(
            f"the box of annotation {ids[at]} must be finite, with sides >= 0. Found: x {x1:g} .. {x2:g}, y {y1:g} .. "
            f"{y2:g}"
        )
    if target.keypoints is None:
        return
    points = target.keypoints
    valid = (np.isfinite(points).all(2) & np.isin(points[..., 2], (0, 1, 2))).all(1)
    if not valid.all():
        raise GpuaugError(
            f"the keypoints of annotation {ids[int(valid.argmin())]} must be finite, with visibility 0, 1 or 2"
        )


def _annotations_path(root: str, given: Any, split: Any, masks: str | None) -> str:
    """Path of the JSON file."""
    if split is not None and not (isinstance(split, str) and is_safe(split) and not split.endswith("/")):
        raise ConfigError(f"`source.split` must be a subfolder of `source.root`, or null. Found: {split!r}.")
    name = ("panoptic" if masks == "panoptic" else "instances") if given is None else given
    if not isinstance(name, str | os.PathLike) or not os.fspath(name):
        raise ConfigError(f"`source.annotations` must be a path, a URL, or null. Found: {name!r}.")
    text = os.fspath(name)
    if text.split("?", 1)[0].lower().endswith(".json"):
        rooted = is_url(text) or os.path.isabs(os.path.expanduser(text))
        return absolute(text if rooted else join(root, text), key="source.annotations")
    if split is None:
        raise ConfigError("`source.split` must be set, or `source.annotations` must be the path of a .json file.")
    return join(root, f"annotations/{text}_{split}.json")


def _read_file(place: str, storage: Storage) -> bytes | bytearray:
    """All bytes of the file, also above the limit of :meth:`Storage.read_file`."""
    if not is_url(place) and not os.path.exists(place):
        raise SourceError(f"the annotations do not exist: {place!r}. Set `source.annotations`, or `source.split`.")
    try:
        (info,) = storage.stat([place])
        if info.size <= LARGEST_FILE:
            return storage.read_file(place)
        text = bytearray()
        for begin in range(0, info.size, PART_BYTES):
            part = Range(place, begin, min(PART_BYTES, info.size - begin), info.version)
            (data,) = storage.read([part])
            if isinstance(data, Exception):
                raise data
            text += data
        return text
    except (OSError, ReadError) as error:
        raise SourceError(f"the annotations {redact(place)!r} cannot be read: {error}.") from error


def _png_folder(place: str, images: str) -> str:
    """The folder of panoptic masks: beside the JSON file, or for local files also beside the folder of images."""
    beside, name = split_path(place)
    name = os.path.splitext(name)[0]
    folders = [join(beside, name), join(split_path(images)[0], name)]
    folder = next((path for path in folders if is_url(path) or os.path.isdir(path)), None)
    if folder is None:
        raise SourceError(f"the folder of panoptic masks must be one of {some(folders)}. Neither exists.")
    return folder
