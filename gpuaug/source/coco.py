"""COCO's datasets: images, and one JSON file with the boxes, keypoints and masks of all images."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any, Literal

import torch

from gpuaug import checks
from gpuaug.errors import ConfigError, GpuaugError, ReadError, SourceError
from gpuaug.source import runs
from gpuaug.source.base import Classes, ListedSource
from gpuaug.source.classes import class_mapping
from gpuaug.source.files import Files
from gpuaug.source.filters import Subset
from gpuaug.source.index import Names, share
from gpuaug.source.objects import ObjectTable
from gpuaug.source.paths import absolute, is_safe, is_url, join, redact
from gpuaug.source.remote.storage import Remote, Storage

LARGEST_JSON = 1 << 36  # bytes; limit for a file of annotations


class CocoSource(ListedSource):
    """Images with boxes, keypoints and masks of objects, in COCO's format: ``root/<split>/*.jpg``.

    Samples are in the order of their image ids. Classes are the file's categories by ascending id, numbered from 0.
    Keypoints are read if categories list keypoint names. If an image's entry or an object is damaged (a number that is
    not finite, a repeated id, a missing width or outline), reading its sample gives a fault. Needs msgspec.

    Args:
        root: the dataset's folder, or its URL.
        annotations: path of the JSON file, or the first part of the file's name. A relative path is below ``root``. The
            first part ``person_keypoints`` means ``annotations/person_keypoints_<split>.json``. None: ``instances``.
        split: subfolder of the images, such as ``train2017``. None: the image paths in the JSON file are relative to
            ``root``, and ``annotations`` must be a path.
        masks: ``instances``: one map of object numbers for each image, drawn from polygons and run lengths (needs
            pycocotools). None: no masks.
        empty: ``drop`` leaves out images without objects, and numbers the other images without gaps.
        unit: ``image``: a sample is an image with all its objects. ``object``: a sample is one object and its image,
            as pose estimation needs it. Only objects with a labelled keypoint count, and no crowds. Samples are in the
            order of the image ids, then of the file. The key is the image's path, ``/``, and the annotation's id (or,
            if an annotation has no id, the number of the object in its image).
        classes: class mapping of another run, as in :class:`FolderSource`. It must name all categories of the file.
        subset, exclude: as in :class:`FolderSource`.
        remote: how to read from a URL.

    Attributes:
        image_ids: int64 [N], ``images[].id`` of each sample.
        category_ids: int64 [C], ``categories[].id`` of each label; -1 for a class of ``classes`` that the file lacks.

    Raises:
        SourceError: if a file cannot be read, is damaged, or contradicts itself.

    >>> source = CocoSource("data/coco", split="train2017")
    >>> data, target = source[0]
    """

    _objects: ObjectTable

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        annotations: str | os.PathLike[str] | None = None,
        split: str | None = None,
        masks: Literal["instances"] | None = None,
        empty: Literal["keep", "drop"] = "keep",
        unit: Literal["image", "object"] = "image",
        classes: Classes = None,
        subset: Subset = None,
        exclude: str | os.PathLike[str] | None = None,
        remote: Remote | None = None,
    ) -> None:
        began = time.monotonic()
        if masks is not None:
            checks.one_of("source.masks", masks, ("instances",))
        checks.one_of("source.empty", empty, ("keep", "drop"))
        checks.one_of("source.unit", unit, ("image", "object"))
        try:
            from gpuaug.source.coco_json import mirror_images, parse
            from gpuaug.source.segmentations import import_pycocotools
        except ImportError as error:
            raise ConfigError(f"`source=coco` needs msgspec ({error}): pip install 'gpuaug[coco]'.") from error
        if masks is not None:
            import_pycocotools()
        mapping = None if classes is None else class_mapping(classes)
        self.masks = masks
        self._storage = Storage(remote)
        place = _annotations_path(absolute(root), annotations, split)
        self.root = absolute(root) if split is None else join(absolute(root), split)
        if not is_url(self.root) and not os.path.isdir(self.root):
            raise SourceError(f"the folder of images does not exist: {self.root!r}. Set `source.root`, `source.split`.")
        kinds: Any = {"masks": masks, "empty": empty, "unit": unit, "classes": mapping}
        parsed = parse(_read_file(place, self._storage), place=place, **kinds)
        self._set_classes(parsed.categories if mapping is None else mapping)
        self.target_kinds = frozenset() if masks is None else frozenset({"masks"})
        self._set_objects(parsed.objects)
        self._names = Names.of([parsed.names])
        self.image_ids = share(torch.from_numpy(parsed.image_ids))
        ids = dict(zip(parsed.categories, parsed.category_ids.tolist(), strict=True))
        self.category_ids = share(torch.tensor([ids.get(name, -1) for name in self.classes or ()], dtype=torch.int64))
        files = self._names if parsed.files is parsed.names else Names.of([parsed.files])
        self._files = Files(self.root, files, self._storage)
        self._outlines, self._place = parsed.outlines, redact(place)
        self.flip_pairs = mirror_images(parsed.points)
        self._activate(subset, exclude, began=began)

    def _item(self, index: int, image: Any, mask: Any = None, extra: Iterable[Any] = (), **objects: Any) -> Any:
        if self._outlines is not None and self._objects.reason(index) is None and not isinstance(image, Exception):
            begin, end = self._objects.bounds.numpy()[index : index + 2].tolist()
            target = self._objects.target(index)
            ids = range(end - begin) if target.ids is None else target.ids
            try:
                drawn = self._outlines.draw(begin, end, size=target.size or (1, 1), crowd=target.crowd, ids=ids)
                mask = runs.encode(drawn)
            except GpuaugError as error:
                mask = GpuaugError(f"the objects of {self.key(index)!r} in {self._place!r} cannot be used: {error}")
        return super()._item(index, image, mask, extra, **objects)


def _annotations_path(root: str, given: Any, split: Any) -> str:
    if split is not None and not (isinstance(split, str) and is_safe(split) and not split.endswith("/")):
        raise ConfigError(f"`source.split` must be a subfolder of `source.root`, or null. Found: {split!r}.")
    name = "instances" if given is None else given
    if not isinstance(name, str | os.PathLike) or not os.fspath(name):
        raise ConfigError(f"`source.annotations` must be a path, a URL, or null. Found: {name!r}.")
    text = os.fspath(name)
    if text.split("?", 1)[0].lower().endswith(".json"):
        return absolute(text, key="source.annotations", below=root)
    if split is None:
        raise ConfigError("`source.split` must be set, or `source.annotations` must be the path of a .json file.")
    return join(root, f"annotations/{text}_{split}.json")


def _read_file(place: str, storage: Storage) -> bytes:
    if not is_url(place) and not os.path.exists(place):
        raise SourceError(f"the annotations do not exist: {place!r}. Set `source.annotations`, or `source.split`.")
    try:
        return storage.read_file(place, limit=LARGEST_JSON)
    except (OSError, ReadError) as error:
        raise SourceError(f"the annotations {redact(place)!r} cannot be read: {error}.") from error
