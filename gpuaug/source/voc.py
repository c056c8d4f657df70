"""Data sets in Pascal VOC's format: one XML file of objects for each image."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from xml.etree import ElementTree

import numpy as np

from gpuaug import checks
from gpuaug.errors import ConfigError
from gpuaug.source.base import Classes
from gpuaug.source.classes import class_mapping
from gpuaug.source.files import Files, FileSource, by_stem, listed, open_tree, read_list, texts
from gpuaug.source.filters import IMAGE_EXTENSIONS, Subset, extensions_of
from gpuaug.source.index import Names
from gpuaug.source.objects import Damaged, ObjectTable
from gpuaug.source.paths import absolute, is_safe, join, redact
from gpuaug.source.remote.storage import Remote, Storage

CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog",
    "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip
MOST_MARKS = 1 << 20  # tags and attributes of an XML file; so many take 0.2 GB of memory
LARGEST_PIXEL = 1 << 24  # above this number, float32 cannot represent every whole number


class VocSource(FileSource):
    """Images and boxes in the folders of Pascal VOC.

    In the folder ``<root>/<year>``, the objects of the image ``JPEGImages/1.jpg`` are in ``Annotations/1.xml``. Each
    line of ``ImageSets/Main/<split>.txt`` names one image of the split. A sample is ``(bytes, Target)``.

    VOC counts pixels from 1, and a box includes the pixels of both corners. The box in the Target is therefore
    (xmin - 1, ymin - 1, xmax, ymax), as in detectron2. If an XML file is not valid or has a ``<!DOCTYPE``, reading its
    sample gives a fault.

    Args:
        root: folder or URL of VOCdevkit.
        year: folder in ``root``; None: ``root`` itself contains JPEGImages.
        split: name of a file in ImageSets/Main, without ``.txt``.
        difficult: whether to ``keep`` or ``drop`` the objects that are marked as difficult.
        classes: class names, as in :class:`FolderSource`. None: VOC's 20 classes, in alphabetical order. A sample with
            an object of another class is a fault.
        extensions: file name extensions of images; case is ignored.
        subset, exclude: as in :class:`FolderSource`.
        remote: how to read from a URL.

    Raises:
        SourceError: if a folder or the split cannot be used, or no image has usable annotations.

    >>> source = VocSource("data/VOCdevkit", split="trainval", difficult="drop")
    >>> data, target = source[0]
    >>> boxes, labels = target.boxes, target.labels
    """

    target_kinds = frozenset({"boxes"})

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        year: str | None = "VOC2012",
        split: str = "train",
        difficult: Literal["keep", "drop"] = "keep",
        classes: Classes = None,
        extensions: Sequence[str] = IMAGE_EXTENSIONS,
        subset: Subset = None,
        exclude: str | os.PathLike[str] | None = None,
        remote: Remote | None = None,
    ) -> None:
        endings = extensions_of(extensions)
        checks.one_of("source.difficult", difficult, ("keep", "drop"))
        for key, name in (("year", year), ("split", split)):
            if not (name is None and key == "year") and not (isinstance(name, str) and is_safe(name)):
                raise ConfigError(f"`source.{key}` must be a name, such as VOC2012 or train. Found: {name!r}.")
        folder = absolute(root) if year is None else join(absolute(root), year)
        self.root = join(folder, "JPEGImages")
        self._storage = Storage(remote)
        began = time.monotonic()
        self._set_classes(class_mapping(CLASSES if classes is None else classes))
        tree = open_tree(self.root, self._storage, endings)
        known = by_stem(tree)
        file = join(folder, f"ImageSets/Main/{split}.txt")
        stems = read_list(file, self._storage, key="source.split")
        self._names = Names.of([listed(stems, known, place=file, root=self.root)])
        self._files = Files(self.root, self._names, self._storage, tree.files)
        self._read_annotations([join(folder, f"Annotations/{stem}.xml") for stem in stems], drop=difficult == "drop")
        self._activate(subset, exclude, began=began)

    def _read_annotations(self, paths: Sequence[str], *, drop: bool) -> None:
        mapping = self.class_to_idx or {}
        boxes: list[tuple[float, ...]] = []
        labels: list[int] = []
        counts = np.zeros(len(paths), dtype=np.int64)
        sizes = np.zeros((len(paths), 2), dtype=np.int32)
        reasons: dict[int, str] = {}
        for i, data in enumerate(texts(paths, self._storage)):
            try:
                if isinstance(data, Exception):
                    raise ValueError(f"cannot be read ({data})")
                sizes[i], objects = _parse(data, mapping, drop=drop)
            except ValueError as error:
                reasons[i] = f"{redact(paths[i])!r} {error}"
                continue
            counts[i] = len(objects)
            boxes += [box for box, _ in objects]
            labels += [label for _, label in objects]
        self._objects = ObjectTable(
            counts, boxes=np.array(boxes, dtype=np.float32).reshape(-1, 4), labels=np.array(labels, dtype=np.int64),
            sizes=sizes,
        )  # fmt: skip
        self._damaged = Damaged(reasons, len(paths), place=redact(self.root))


class _Builder(ElementTree.TreeBuilder):
    """Refuses a document type, because its entities can expand without limit."""

    def doctype(self, *_: Any) -> None:
        raise ValueError("has a <!DOCTYPE>, which is refused. Remove it")


def _parse(
    data: bytes, mapping: Mapping[str, int], *, drop: bool
) -> tuple[tuple[int, int], list[tuple[tuple[float, ...], int]]]:
    """Return (height, width) of the image, and (box, class) of each object. An unknown height or width is 0."""
    if (marks := data.count(b"<") + data.count(b"=")) > MOST_MARKS:
        raise ValueError(f"must have at most {MOST_MARKS} tags and attributes. Found: {marks}")
    try:
        root = ElementTree.fromstring(data, ElementTree.XMLParser(target=_Builder()))
    except (ElementTree.ParseError, LookupError) as error:  # LookupError: an encoding that is not known
        raise ValueError(f"is not valid XML ({error})") from error
    if root.tag != "annotation":
        raise ValueError(f"must begin with <annotation>. Found: <{root.tag:.60}>")
    size = _child(root, "size")
    height, width = (max(int(_pixels(size, side, "0")), 0) for side in ("height", "width"))
    objects: list[tuple[tuple[float, ...], int]] = []
    for node in root.iterfind("object"):
        if drop and _text(node, "difficult", "0").strip() == "1":
            continue
        box = _child(node, "bndbox")
        xmin, ymin, xmax, ymax = (_pixels(box, side) for side in ("xmin", "ymin", "xmax", "ymax"))
        if xmax < xmin or ymax < ymin:
            raise ValueError(f"has a box with xmax < xmin or ymax < ymin: {xmin:g}, {ymin:g}, {xmax:g}, {ymax:g}")
        if not (name := _text(node, "name", "").strip()):
            raise ValueError("has an object without a name")
        if name not in mapping:
            raise ValueError(f"has an object of class {name!r:.100}, which is not in `source.classes`")
        objects.append(((xmin - 1, ymin - 1, xmax, ymax), mapping[name]))
    return (height, width), objects


def _child(node: Any, tag: str) -> Any:
    found = [] if node is None else node.findall(tag)
    if len(found) > 1:
        raise ValueError(f"has <{tag}> twice")
    return found[0] if found else None


def _text(node: Any, tag: str, default: str | None = None) -> str:
    child = _child(node, tag)
    if child is None and default is None:
        raise ValueError(f"has no <{tag}>")
    return str(default) if child is None else child.text or ""


def _pixels(node: Any, tag: str, default: str | None = None) -> float:
    text = _text(node, tag, default)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not abs(value) <= LARGEST_PIXEL:
        raise ValueError(f"must have a number in <{tag}>. Found: {text!r:.60}")
    return value
