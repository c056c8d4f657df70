"""Data sets in Pascal VOC's format: one XML file of objects for each image."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from xml.parsers import expat

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
DEEPEST = 16  # levels of an XML file; VOC has 5
LARGEST_PIXEL = 1 << 24  # above it, float32 has no half pixels


class VocSource(FileSource):
    """Images and boxes in the folders of Pascal VOC.

    The image ``<root>/<year>/JPEGImages/1.jpg`` has the objects in ``Annotations/1.xml``. The images of a split are the
    lines of ``ImageSets/Main/<split>.txt``. Corners in the file count pixels from 1 and are inclusive, so a box is
    (xmin - 1, ymin - 1, xmax, ymax), as in detectron2. A sample is ``(bytes, Target)``.

    A damaged XML file, or one with another structure, makes its sample a fault when it is read. Files with a document
    type (``<!DOCTYPE``) are refused, because entities can expand without limit.

    Args:
        root: folder or URL of VOCdevkit.
        year: folder in ``root``; None: ``root`` itself contains JPEGImages.
        split: name of a file in ImageSets/Main, without ``.txt``.
        difficult: ``keep`` or ``drop`` the objects that are marked as difficult.
        classes: class names, as in :class:`FolderSource`. None: the 20 of VOC, in alphabetical order. An object of
            another class makes its sample a fault.
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
                size, objects = _parse(data)
                found = [(o.box(), _number(o.name, mapping)) for o in objects if not (drop and o.is_difficult())]
                sizes[i] = size
            except ValueError as error:
                reasons[i] = f"{redact(paths[i])!r} {error}"
                continue
            counts[i] = len(found)
            boxes += [box for box, _ in found]
            labels += [label for _, label in found]
        self._objects = ObjectTable(
            counts, boxes=np.array(boxes, dtype=np.float32).reshape(-1, 4), labels=np.array(labels, dtype=np.int64),
            sizes=sizes,
        )  # fmt: skip
        self._damaged = Damaged(reasons, len(paths), place=redact(self.root))


@dataclass(slots=True)
class _Object:
    """The text of an object's elements."""

    fields: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        if not (name := self.fields.get("name", "").strip()):
            raise ValueError("has an object without a name")
        return name

    def is_difficult(self) -> bool:
        return self.fields.get("difficult", "0").strip() == "1"

    def box(self) -> tuple[float, float, float, float]:
        xmin, ymin, xmax, ymax = (_pixels(self.fields, f"bndbox/{key}") for key in ("xmin", "ymin", "xmax", "ymax"))
        if xmax < xmin or ymax < ymin:
            raise ValueError(f"has a box with xmax < xmin or ymax < ymin: {xmin:g}, {ymin:g}, {xmax:g}, {ymax:g}")
        return xmin - 1, ymin - 1, xmax, ymax


def _number(name: str, mapping: dict[str, int]) -> int:
    if name not in mapping:
        raise ValueError(f"has an object of class {name!r:.100}, which is not in `source.classes`")
    return mapping[name]


def _pixels(fields: dict[str, str], key: str) -> float:
    text = fields.get(key)
    if text is None:
        raise ValueError(f"has no <{key.rpartition('/')[2]}>")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not abs(value) <= LARGEST_PIXEL:
        raise ValueError(f"must have a number in <{key.rpartition('/')[2]}>. Found: {text!r:.60}")
    return value


_OBJECT = "annotation/object"
_WANTED = ("name", "difficult", "bndbox/xmin", "bndbox/ymin", "bndbox/xmax", "bndbox/ymax")
_TEXTS = {f"{_OBJECT}/{name}": name for name in _WANTED}  # full paths: <part> has the same names
_TEXTS |= {f"annotation/size/{name}": name for name in ("width", "height")}


def _parse(data: bytes) -> tuple[tuple[int, int], list[_Object]]:
    """(height, width) and objects of an XML file; (0, 0) without a size. ValueError if it cannot be used."""
    parser = expat.ParserCreate()
    parser.buffer_text = True
    above: list[str] = []  # path of each open element
    size: dict[str, str] = {}
    objects: list[_Object] = []
    words: list[str] = []

    def start(name: str, _: Any) -> None:
        path = f"{above[-1]}/{name}" if above else name
        if path == _OBJECT:
            objects.append(_Object())
        elif len(above) == 0 and name != "annotation":
            raise ValueError(f"must begin with <annotation>. Found: <{name[:60]}>")
        elif len(above) >= DEEPEST:
            raise ValueError(f"has more than {DEEPEST} levels")
        above.append(path)
        words.clear()

    def end(_: str) -> None:
        if (path := above.pop()) in _TEXTS:
            fields = objects[-1].fields if path.startswith(_OBJECT) else size
            if _TEXTS[path] in fields:
                raise ValueError(f"has <{_TEXTS[path]}> twice")
            fields[_TEXTS[path]] = "".join(words)
        words.clear()

    def refuse(*_: Any) -> None:
        raise ValueError("has a <!DOCTYPE>, which is refused. Remove it")

    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler = words.append
    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = refuse
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, LookupError) as error:  # LookupError: an encoding that is not known
        raise ValueError(f"is not valid XML ({error})") from error
    height, width = (_pixels({"height": "0", "width": "0"} | size, key) for key in ("height", "width"))
    return (max(int(height), 0), max(int(width), 0)), objects
