"""Data sets in Pascal VOC's format: one XML file of objects for each image."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal
from xml.etree import ElementTree

import numpy as np

from gpuaug import checks
from gpuaug.errors import ConfigError, SourceError
from gpuaug.source.base import Classes, ListedSource
from gpuaug.source.classes import class_mapping, shortened
from gpuaug.source.files import Files, Tree, by_stem, listed, read_list, texts
from gpuaug.source.filters import IMAGE_EXTENSIONS, Subset, extensions_of
from gpuaug.source.index import Names
from gpuaug.source.objects import ObjectTable
from gpuaug.source.paths import absolute, is_safe, join, redact
from gpuaug.source.remote.storage import Remote, Storage

log = logging.getLogger("gpuaug")

CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog",
    "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip
MOST_MARKS = 1 << 20  # tags and attributes of an XML file; so many take 0.2 GB of memory
MOST_PROPOSED = 100  # classes that a message lists
LARGEST_PIXEL = 1 << 24  # above this number, float32 cannot represent every whole number


class VocSource(ListedSource):
    """Images and boxes in the folders of Pascal VOC.

    In the folder ``<root>/<year>``, the objects of the image ``JPEGImages/1.jpg`` are in ``Annotations/1.xml``. Each
    line of ``ImageSets/Main/<split>.txt`` names one image of the split. A sample is ``(bytes, Target)``.

    VOC counts pixels from 1, and a box includes the pixels of both corners. The box in the Target is therefore
    (xmin - 1, ymin - 1, xmax, ymax), as in detectron2. If an XML file is not valid or has a ``<!DOCTYPE``, reading its
    sample gives a fault.

    Args:
        root: folder or URL of VOCdevkit.
        year: folder in ``root``; None: ``root`` itself contains JPEGImages.
        split: name of a file in the folder ``lists``, without ``.txt``.
        images, annotations, lists: other names of the folders JPEGImages, Annotations and ImageSets/Main.
        masks: folder of PNG masks, such as ``SegmentationClass`` for a split of ImageSets/Segmentation. None: no masks.
        difficult: whether to ``keep`` or ``drop`` the objects that are marked as difficult.
        classes: class names, as in :class:`FolderSource`. None: VOC's 20 classes, in alphabetical order. A sample with
            an object of another class is a fault, and the log proposes ``source.classes``.
        extensions: file name extensions of images; case is ignored.
        subset, exclude: as in :class:`FolderSource`.
        remote: how to read from a URL.

    Raises:
        SourceError: if a folder or the split cannot be used, or no image has usable annotations.

    >>> source = VocSource("data/VOCdevkit", split="trainval", difficult="drop")
    >>> data, target = source[0]
    >>> boxes, labels = target.boxes, target.labels
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        year: str | None = "VOC2012",
        split: str = "train",
        images: str = "JPEGImages",
        annotations: str = "Annotations",
        lists: str = "ImageSets/Main",
        masks: str | None = None,
        difficult: Literal["keep", "drop"] = "keep",
        classes: Classes = None,
        extensions: Sequence[str] = IMAGE_EXTENSIONS,
        subset: Subset = None,
        exclude: str | os.PathLike[str] | None = None,
        remote: Remote | None = None,
    ) -> None:
        endings = extensions_of(extensions)
        checks.one_of("source.difficult", difficult, ("keep", "drop"))
        names = {"split": split, "images": images, "annotations": annotations, "lists": lists}
        names |= {key: name for key, name in (("year", year), ("masks", masks)) if name is not None}
        for key, name in names.items():
            if not isinstance(name, str) or not is_safe(name):
                raise ConfigError(f"`source.{key}` must be a name, such as VOC2012 or train. Found: {name!r}.")
        folder = absolute(root) if year is None else join(absolute(root), year)
        self.root = join(folder, images)
        self._storage = Storage(remote)
        began = time.monotonic()
        self._set_classes(class_mapping(CLASSES if classes is None else classes))
        tree = Tree(self.root, self._storage, endings)
        known = by_stem(tree)
        file = join(folder, f"{lists}/{split}.txt")
        stems = read_list(file, self._storage, key="source.split")
        self._names = Names.of([listed(stems, known, place=file, root=self.root)])
        self._files = Files(self.root, self._names, self._storage, tree.files)
        if masks is not None:
            pngs = Names.of([[os.fsencode(f"{stem}.png") for stem in stems]])
            self._mask_files = Files(join(folder, masks), pngs, self._storage)
            self.target_kinds = frozenset({"masks"})
        self._read_annotations(
            [join(folder, f"{annotations}/{stem}.xml") for stem in stems], drop=difficult == "drop", given=classes
        )
        self._activate(subset, exclude, began=began)

    def _read_annotations(self, paths: Sequence[str], *, drop: bool, given: Classes) -> None:
        mapping = self.class_to_idx or {}
        boxes: list[tuple[float, ...]] = []
        labels: list[int] = []
        counts = np.zeros(len(paths), dtype=np.int64)
        sizes = np.zeros((len(paths), 2), dtype=np.int32)
        reasons: dict[int, str] = {}
        names: Counter[str] = Counter()  # files that have an object of each class
        for i, data in enumerate(texts(paths, self._storage)):
            try:
                if isinstance(data, Exception):
                    raise ValueError(f"cannot be read ({data})")
                sizes[i], objects = _parse(data, drop=drop)
                names.update({name for _, name in objects})
                if other := [name for _, name in objects if name not in mapping]:
                    raise ValueError(f"has an object of class {other[0]!r:.100}, which is not in `source.classes`")
            except ValueError as error:
                reasons[i] = f"{redact(paths[i])!r} {error}"
                continue
            counts[i] = len(objects)
            boxes += [box for box, _ in objects]
            labels += [mapping[name] for _, name in objects]
        if unknown := sorted(names.keys() - mapping):
            text = f"{len(unknown)} classes of objects are not in `source.classes`: {shortened(unknown)}. "
            proposed = sorted(names) if given is None else [*mapping, *unknown]
            if len(proposed) > MOST_PROPOSED:
                text += f"Set `source.classes` to a FILE with the {len(proposed)} names."
            else:
                text += f"Set source.classes={json.dumps(proposed, ensure_ascii=False)}."
            if len(reasons) == len(paths):
                raise SourceError(f"the objects of {len(paths)} of {len(paths)} samples cannot be used: {text}")
            log.warning("source %s: %s", redact(self.root), text)
        self._set_objects(ObjectTable(
            counts, boxes=np.array(boxes, dtype=np.float32).reshape(-1, 4), labels=np.array(labels, dtype=np.int64),
            sizes=sizes, reasons=reasons,
        ))  # fmt: skip


class _Builder(ElementTree.TreeBuilder):
    """Refuses a document type, because its entities can expand without limit."""

    def doctype(self, *_: Any) -> None:
        raise ValueError("has a <!DOCTYPE>, which is refused. Remove it")


def _parse(data: bytes, *, drop: bool) -> tuple[tuple[int, int], list[tuple[tuple[float, ...], str]]]:
    """Return (height, width) of the image, and (box, class) of each object. An unknown height or width is 0."""
    if (marks := data.count(b"<") + data.count(b"=")) > MOST_MARKS:
        raise ValueError(f"must have at most {MOST_MARKS} tags and attributes. Found: {marks}")
    try:
        root = ElementTree.fromstring(data, ElementTree.XMLParser(target=_Builder()))
    except (ElementTree.ParseError, LookupError) as error:  # LookupError: an encoding that is not known
        raise ValueError(f"is not valid XML ({error})") from error
    if root.tag != "annotation":
        raise ValueError(f"must begin with <annotation>. Found: <{root.tag:.60}>")
    height, width = (max(int(_number(root, f"size/{side}", "0")), 0) for side in ("height", "width"))
    objects: list[tuple[tuple[float, ...], str]] = []
    for node in root.iterfind("object"):
        if drop and node.findtext("difficult", "0").strip() == "1":
            continue
        xmin, ymin, xmax, ymax = (_number(node, f"bndbox/{side}") for side in ("xmin", "ymin", "xmax", "ymax"))
        if xmax < xmin or ymax < ymin:
            raise ValueError(f"has a box with xmax < xmin or ymax < ymin: {xmin:g}, {ymin:g}, {xmax:g}, {ymax:g}")
        if not (name := node.findtext("name", "").strip()):
            raise ValueError("has an object without a name")
        objects.append(((xmin - 1, ymin - 1, xmax, ymax), name))
    return (height, width), objects


def _number(node: Any, path: str, default: str | None = None) -> float:
    text, tag = node.findtext(path, default), path.rpartition("/")[2]
    if text is None:
        raise ValueError(f"has no <{tag}>")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not abs(value) <= LARGEST_PIXEL:
        raise ValueError(f"must have a number in <{tag}>. Found: {text!r:.60}")
    return value
