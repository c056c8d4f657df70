"""Data sets in YOLO's format: a label file for each image, and a YAML file that names classes and splits."""

from __future__ import annotations

import logging
import math
import os
import posixpath
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuaug import checks
from gpuaug.errors import ConfigError, GpuaugError, SourceError
from gpuaug.source.base import Classes, ListedSource
from gpuaug.source.classes import class_mapping, numbers_of, shortened
from gpuaug.source.files import Files, Tree, read_list, read_text, texts
from gpuaug.source.filters import IMAGE_EXTENSIONS, Subset, extensions_of
from gpuaug.source.index import Names
from gpuaug.source.objects import MOST_KEYPOINTS, ObjectTable
from gpuaug.source.paths import absolute, is_safe, is_url, join, redact
from gpuaug.source.remote.storage import FileInfo, Remote, Storage

log = logging.getLogger("gpuaug")

LARGEST_YAML = 1 << 20  # characters; the parser needs about 10 s for so many
MOST_CLASSES = 1 << 20
BORDER = 0.01  # how far a coordinate may lie outside 0..1, as in ultralytics


class YoloSource(ListedSource):
    """Images with YOLO's label files, as ultralytics reads them. A sample is ``(bytes, Target)``.

    The labels of ``images/train/a/1.jpg`` are in ``labels/train/a/1.txt``: the last ``/images/`` of the full path
    becomes ``/labels/``. An image without such a file has no objects. A line of a label file is one object:

    * ``class cx cy w h``: a box
    * ``class x1 y1 x2 y2 x3 y3 ...``: a polygon, which becomes the smallest upright box around it. If every polygon of
      all files has four points, these are also the corners of oriented boxes (see :class:`Boxes`)
    * ``class cx cy w h``, then ``x y`` or ``x y visibility`` for each keypoint, if the YAML file has ``kpt_shape``

    Coordinates in label files and Targets are fractions of the upright image's width and height. A coordinate may be
    at most 0.01 outside 0..1. If a line is not valid, reading its sample gives a fault.

    Args:
        root: folder or URL of the data set.
        data: the YAML file, relative to ``root``. None: ``data.yaml``, if there is one. The file may have ``names`` (a
            list, or a mapping from numbers), ``nc``, ``kpt_shape`` and ``flip_idx``. ``train``, ``val`` and ``test``
            are folders of images, or text files that list images. If the file's ``path`` names a folder below a
            local ``root``, these paths start in that folder. All images must be below ``root``.
        split: name of the split. Without a YAML file: the folder ``images/<split>`` or (local only) ``<split>/images``.
        classes: class mapping of another run, as in :class:`FolderSource`. It must have all classes of the YAML file.
        extensions: file name extensions of images; case is ignored.
        subset, exclude: as in :class:`FolderSource`.
        remote: how to read from a URL.

    Raises:
        SourceError: if the YAML file or a split cannot be used, no image is left, or no image has usable labels.

    >>> source = YoloSource("data/coco8", split="val")
    >>> data, target = source[0]
    >>> boxes, labels = target.boxes, target.labels
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        data: str | os.PathLike[str] | None = None,
        split: str = "train",
        classes: Classes = None,
        extensions: Sequence[str] = IMAGE_EXTENSIONS,
        subset: Subset = None,
        exclude: str | os.PathLike[str] | None = None,
        remote: Remote | None = None,
    ) -> None:
        endings = extensions_of(extensions)
        checks.text("source.split", split)
        self.root = absolute(root)
        self._storage = Storage(remote)
        began = time.monotonic()
        described = _read_data(self.root, data, self._storage)
        self.flip_pairs = described.flip
        names, listing = self._list_images(described, split, endings)
        self._names = Names.of([names])
        self._files = Files(self.root, self._names, self._storage, listing)
        self._read_labels(described, None if classes is None else class_mapping(classes))
        self._activate(subset, exclude, began=began)

    def _list_images(
        self, described: _Data, split: str, endings: tuple[str, ...]
    ) -> tuple[list[bytes], dict[str, FileInfo]]:
        """Paths of the split's images, relative to the root, and the listing of remote images."""
        names: list[bytes] = []
        listing: dict[str, FileInfo] = {}
        for place in self._places(described, split):
            if place.endswith(".txt"):
                names += self._listed(place, endings)
                continue
            tree = Tree(join(self.root, place) if place else self.root, self._storage, endings, key="source.split")
            prefix = place and f"{place}/"
            names += [os.fsencode(prefix) + name for block in tree.images(None) for name in block]
            listing |= {prefix + name: file for name, file in tree.files.items()}
            tree.warn()
        if not names:
            raise SourceError(
                f"no images for `source.split={split}` in {redact(self.root)!r}: no file ends in {', '.join(endings)}."
            )
        if len(set(names)) < len(names):
            raise SourceError(
                f"the paths of `source.split={split}` in {described.place!r} overlap. Name each image once."
            )
        return names, listing if len(listing) == len(names) else {}

    def _places(self, described: _Data, split: str) -> list[str]:
        """Folders and lists of the split, relative to the root."""
        if described.splits is None:
            choices = [f"images/{split}", f"{split}/images"]
            if not is_safe(split):
                raise ConfigError(f"`source.split` must be a name. Found: {split!r}.")
            if is_url(self.root):
                return choices[:1]
            return [next((x for x in choices if os.path.isdir(os.path.join(self.root, x))), choices[0])]
        if split not in described.splits:
            raise SourceError(
                f"`source.split` must be in {described.place!r}, which has {shortened([*described.splits]) or 'none'}. "
                f"Found: {split!r}. Add the key to the file, or name another split."
            )
        return [
            _below(self.root, described.folder, text, place=described.place, is_split=True)
            for text in described.splits[split]
        ]

    def _listed(self, place: str, endings: tuple[str, ...]) -> list[bytes]:
        """Image paths in a text file, relative to the root."""
        file = join(self.root, place)
        lines = read_list(file, self._storage, key="source.split")
        for line in lines:
            if not line.lower().endswith(endings):
                raise SourceError(
                    f"{redact(file)!r} must list files that end in {', '.join(endings)}. Found: {line!r}."
                )
        folder = posixpath.dirname(place)
        return [os.fsencode(_below(self.root, folder, line, place=redact(file))) for line in lines]

    def _label_file(self, name: bytes) -> str:
        folder, inside, rest = join(self.root, os.fsdecode(name)).rpartition("/images/")
        return posixpath.splitext(f"{folder}/labels/{rest}" if inside else rest)[0] + ".txt"

    def _read_labels(self, described: _Data, given: dict[str, int] | None) -> None:
        count, missing = len(self._names), 0

        def files() -> Iterator[bytes | Exception]:
            nonlocal missing
            for data in texts(map(self._label_file, self._names), self._storage):
                is_missing = isinstance(data, FileNotFoundError | NotADirectoryError)
                missing += is_missing
                yield b"" if is_missing else data

        names = described.names
        numbers = None
        if names is not None and given is not None:
            numbers = numbers_of(names, given, f"of the classes in {described.place!r}")
        table, polygons = parse_labels(
            files(), num_classes=len(names or given or ()) or None, points=described.points,
            name=lambda i: redact(self._label_file(self._names[i])), numbers=numbers,
        )  # fmt: skip
        if missing == count:
            raise SourceError(
                f"none of the {count} images in {redact(self.root)!r} has a label file. The first would be "
                f"{redact(self._label_file(self._names[0]))!r}. Check `source.root` and `source.split`."
            )
        if missing:
            log.info("source %s: %d of %d images have no label file, so no objects", redact(self.root), missing, count)
        if polygons[4] and polygons[4] == polygons.total():
            log.warning(
                "source %s: %d lines have nine numbers (a class and 4 corners), as oriented boxes have. Each becomes "
                "the upright box around its corners, unless targets.boxes.oriented is true",
                redact(self.root), polygons[4],
            )  # fmt: skip
        if (known := given or names) is not None:
            self._set_classes(known)
        self._set_objects(table)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Data:
    """Content of the YAML file."""

    place: str  # the file, or the root if there is none; for messages
    folder: str = ""  # the splits' paths start in this folder below the root
    splits: dict[str, list[str]] | None = None  # None: no file
    names: list[str] | None = None
    points: tuple[int, int] | None = None
    flip: tuple[int, ...] | None = None


def _read_data(root: str, data: Any, storage: Storage) -> _Data:
    import yaml  # workers do not need yaml

    class Loader(yaml.SafeLoader):
        """Refuses a key that is there twice. PyYAML would take the last one."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = set()
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if (key.tag, key.value) in keys:
                    text = f"found duplicate key {key.value!r:.100}"
                    raise yaml.constructor.ConstructorError(None, None, text, key.start_mark)
                keys.add((key.tag, key.value))
            return super().construct_mapping(node, deep=deep)

    file = absolute("data.yaml" if data is None else data, key="source.data", below=root)
    try:
        text = read_text(file, storage)
    except (FileNotFoundError, NotADirectoryError) as error:
        if data is None:
            return _Data(place=redact(root))
        raise SourceError(f"`source.data` does not exist: {redact(file)!r}.") from error
    except (OSError, GpuaugError) as error:
        raise SourceError(f"`source.data` cannot be read: {redact(file)!r} ({error}).") from error
    try:
        if len(text) > LARGEST_YAML:
            raise ValueError(f"it has {len(text)} characters, more than {LARGEST_YAML}")
        fields = yaml.load(text, Loader=Loader)
        if not isinstance(fields, dict):
            raise ValueError(f"it holds {type(fields).__name__}, not keys and values")
        points, flip = _keypoints(fields)
        return _Data(
            place=redact(file), folder=_folder(root, fields.get("path")), splits=_splits(fields),
            names=_class_names(fields), points=points, flip=flip,
        )  # fmt: skip
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        shown = "it is nested too deeply" if isinstance(error, RecursionError) else str(error) or type(error).__name__
        if (mark := getattr(error, "problem_mark", None)) is not None:
            shown = f"line {mark.line + 1}: {getattr(error, 'problem', error)}"
        raise SourceError(f"`source.data` {redact(file)!r} cannot be used: {shown:.500}.") from error


def _folder(root: str, path: Any) -> str:
    if not isinstance(path, str) or not is_safe(short := posixpath.normpath(path)) or is_url(root):
        return ""
    return short if os.path.isdir(os.path.join(root, short)) else ""


def _splits(fields: Mapping[Any, Any]) -> dict[str, list[str]]:
    splits = {}
    for key, value in fields.items():
        places = [value] if isinstance(value, str) else value
        if key in ("train", "val", "test") and value:
            if not isinstance(places, list) or not all(isinstance(place, str) and place for place in places):
                raise ValueError(f"`{key}` must be a path or a list of paths")
            splits[key] = places
    return splits


def _class_names(fields: Mapping[Any, Any]) -> list[str] | None:
    names, count = fields.get("names"), fields.get("nc")
    if count is not None and (type(count) is not int or not 1 <= count <= MOST_CLASSES):
        raise ValueError(f"`nc` must be a whole number from 1 to {MOST_CLASSES}")
    if names is None:
        return None if count is None else [f"class_{i}" for i in range(count)]
    if isinstance(names, dict):
        numbers = {int(k) if isinstance(k, str) and k.isdecimal() else k: name for k, name in names.items()}
        if any(type(number) is not int for number in numbers) or sorted(numbers) != [*range(len(names))]:
            raise ValueError(f"the numbers in `names` must be 0 .. {len(names) - 1}, each once")
        names = [numbers[i] for i in range(len(numbers))]
    if not isinstance(names, list) or not names or not all(isinstance(name, str | int | float) for name in names):
        raise ValueError("`names` must be a list of class names, or a mapping from numbers to names")
    names = [str(name) for name in names]
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(f"`names` must name each class once. Found twice: {twice!r:.100}")
    if count is not None and count != len(names):
        raise ValueError(f"`nc` is {count}, but `names` has {len(names)} classes")
    return names


def _keypoints(fields: Mapping[Any, Any]) -> tuple[tuple[int, int] | None, tuple[int, ...] | None]:
    """``kpt_shape`` and ``flip_idx``."""
    shape, flip = fields.get("kpt_shape"), fields.get("flip_idx")
    if shape is None:
        return None, None
    whole = isinstance(shape, list) and len(shape) == 2 and all(type(number) is int for number in shape)
    if not whole or not 1 <= shape[0] <= MOST_KEYPOINTS or shape[1] not in (2, 3):
        raise ValueError(f"`kpt_shape` must be [K, 2] or [K, 3] with 1 <= K <= {MOST_KEYPOINTS}")
    count = shape[0]
    if flip is None:
        return (count, shape[1]), None
    whole = isinstance(flip, list) and all(type(number) is int for number in flip)
    if not whole or sorted(flip) != [*range(count)] or any(flip[k] != i for i, k in enumerate(flip)):
        raise ValueError(
            f"`flip_idx` must list the mirror image of each of the {count} keypoints. If entry i is k, entry k is i"
        )
    return (count, shape[1]), tuple(flip)


def _below(root: str, folder: str, text: str, *, place: str, is_split: bool = False) -> str:
    """A path from the YAML file or from a list of images, relative to the root."""
    if text.startswith("/") or is_url(text):
        short = text.removeprefix(f"{root.rstrip('/')}/")
    else:
        short = posixpath.normpath(posixpath.join(folder, text))
        short = short.removeprefix("../") if is_split else short  # as in ultralytics, for Roboflow's files
    if short == "." and is_split:
        return ""
    if not is_safe(short):
        raise SourceError(f"paths in {place!r} must stay inside `source.root`, {redact(root)!r}. Found: {text!r:.200}.")
    return short


# -- label files


def parse_labels(
    files: Iterable[bytes | Exception],
    *,
    num_classes: int | None,
    points: tuple[int, int] | None,
    name: Callable[[int], str],
    numbers: NDArray[np.int64] | None,
) -> tuple[ObjectTable, Counter[int]]:
    """The objects of label files as :class:`YoloSource` describes them, and counts of polygons by number of points.

    ``points``: number of keypoints, and 2 or 3 numbers per keypoint. ``name(i)`` is the name of file i, for messages.
    ``numbers``: the label of each class number; None: the same number.
    """
    labels, boxes, keypoints, turned, corners = array("q"), array("d"), array("d"), array("q"), array("d")
    counts, reasons, polygons = list[int](), dict[int, str](), Counter[int]()
    for i, data in enumerate(files):
        objects, number = [], 0
        if isinstance(data, Exception):
            reasons[i], data = f"{name(i)!r} cannot be read ({data})", b""
        try:
            for line in data.removeprefix(b"\xef\xbb\xbf").splitlines():
                number += 1
                objects += [_object(line, num_classes, points)] if line.strip() else []
        except ValueError as error:
            reasons[i], objects = f"line {number} of {name(i)!r} {error}", []
        counts.append(len(objects))
        for label, box, visible, polygon in objects:
            if polygon:
                polygons[len(polygon) // 2] += 1
            if len(polygon) == 8:
                turned.append(len(labels))
                corners.extend(polygon)
            labels.append(label)
            boxes.extend(box)
            keypoints.extend(visible)
    upright, all_corners = np.array(boxes).reshape(-1, 4), None
    if polygons[4] == polygons.total() and (turned or not labels):
        all_corners = upright[:, [0, 1, 2, 1, 2, 3, 0, 3]]
        all_corners[turned] = np.array(corners).reshape(-1, 8)
    table = ObjectTable(
        counts,
        boxes=upright,
        corners=None if all_corners is None else all_corners.reshape(-1, 4, 2),
        labels=np.array(labels) if numbers is None else numbers[np.array(labels)],
        keypoints=None if points is None else np.array(keypoints).reshape(-1, points[0], 3),
        fractions=True,
        reasons=reasons,
    )
    return table, polygons


def _object(
    line: bytes, num_classes: int | None, points: tuple[int, int] | None
) -> tuple[int, Sequence[float], Sequence[float], Sequence[float]]:
    """Class, box, keypoints (x, y, visibility, ...) and polygon (x, y, ...) of a line.

    ValueError if the line is not valid.
    """
    if b"_" in line:  # Python's float accepts 1_0
        raise ValueError("must hold only numbers. Found: _")
    try:
        label, *values = map(float, line.split())
    except ValueError as error:
        raise ValueError(f"must hold only numbers: {error!s:.80}") from None
    count = len(values)
    if points is None:
        is_box, fits = count == 4, count >= 4 and count % 2 == 0
    else:
        is_box, fits = True, count == 4 + points[0] * points[1]
    if not fits:
        wanted = "5 numbers (class, cx, cy, w, h), or a class and at least 3 points"
        if points is not None:
            number, each = points
            wanted = f"{5 + number * each} numbers: class, cx, cy, w, h, and {number} keypoints of {each} numbers"
        raise ValueError(f"must have {wanted}. Found {1 + count} numbers")
    if not (math.isfinite(label) and all(map(math.isfinite, values))):
        raise ValueError("must hold finite numbers")
    most = 2**31 if num_classes is None else num_classes
    if not 0 <= label < most or label != int(label):
        names = "0, 1, ..." if num_classes is None else f"0 .. {most - 1}, because there are {most} classes"
        raise ValueError(f"must begin with a class number {names}. Found: {label:g}")
    seen = values[6::3] if points is not None and points[1] == 3 else []
    coordinates = [*values[:4], *values[4::3], *values[5::3]] if seen else values
    if min(coordinates) < -BORDER or max(coordinates) > 1 + BORDER:
        found = f"Found: {min(coordinates)} .. {max(coordinates)}"
        raise ValueError(f"must hold coordinates 0 .. 1, in units of the image's size. {found}")
    if not is_box:
        xs, ys = values[::2], values[1::2]
        return int(label), (min(xs), min(ys), max(xs), max(ys)), (), values
    x, y, width, height = values[:4]
    if width < 0 or height < 0:
        raise ValueError(f"must have a width and a height of at least 0. Found: {width:g}, {height:g}")
    if not {0, 1, 2}.issuperset(seen):
        raise ValueError("must have visibilities 0, 1 or 2")
    box = x - width / 2, y - height / 2, x + width / 2, y + height / 2
    return int(label), box, _points(values[4:], seen) if count > 4 else (), ()


def _points(values: list[float], seen: list[float]) -> list[float]:
    """Keypoints as x, y, visibility. An invisible point is (0, 0, 0)."""
    each = 3 if seen else 2
    points: list[float] = []
    for at in range(0, len(values), each):
        x, y = values[at : at + 2]
        # without visibilities, a point is visible unless it is (0, 0) or has a negative coordinate
        visibility = values[at + 2] if seen else 2.0 * (x >= 0 and y >= 0 and (x, y) != (0, 0))
        points += [x, y, visibility] if visibility else [0.0, 0.0, 0.0]
    return points
