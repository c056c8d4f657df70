"""WebDataset tar shards with random access. An index file stores the position of each image."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpuaug import checks, files
from gpuaug.errors import ConfigError, GpuaugError, SourceError
from gpuaug.files import LARGEST_FILE
from gpuaug.source.base import Classes, FileKeys, ListedSource, digest
from gpuaug.source.classes import class_mapping, shortened
from gpuaug.source.extra import Extra, decoded, fields_of
from gpuaug.source.filters import IMAGE_EXTENSIONS, Subset, extensions_of
from gpuaug.source.index import NO_ARRAY, Names, bounds_of, locate, share
from gpuaug.source.local import LARGE, read_file
from gpuaug.source.object_json import parse
from gpuaug.source.objects import MOST_KEYPOINTS
from gpuaug.source.paths import common_folder, is_url, redact
from gpuaug.source.remote.disk import locked
from gpuaug.source.remote.storage import FileInfo, Range, Remote, Storage, joined
from gpuaug.source.tar import Member, members

log = logging.getLogger("gpuaug")

_ADJACENT = "Members of a sample must stand next to each other, with the same name up to its first dot."
INDEX_THREADS = 8  # shards that are indexed at the same time
PIECE_BYTES = 8 << 20  # per request while a remote shard is indexed; one request per member would be slow
LOCAL_PIECE_BYTES = 1 << 14  # per read while a local shard is indexed; larger reads would include more image bytes


class ShardSource(ListedSource):
    """Samples of WebDataset shards, in stored order.

    Adjacent members with the same name up to the first dot are one sample. Hidden members are ignored. Samples that
    lack the image, label, mask or objects are left out, with one warning. An index file stores the positions of all
    samples. The shards are indexed again if one of them changes.

    With ``masks`` or ``objects``, a sample is ``(bytes, Target)``. The objects are JSON: a list of annotations as in
    COCO, or a mapping that has this list in the field ``objects`` or ``annotations``::

        {"width": 640, "height": 480, "objects": [{"bbox": [x, y, width, height], "category_id": 3}]}

    The objects may also be columns: ``{"bbox": [[x, y, width, height], ...], "category_id": [3, ...]}``.

    An object needs ``bbox`` with x, y, width, height, or ``boxes`` with x1, y1, x2, y2. These fields are optional:

    - ``category_id``, ``category``, ``label`` or ``labels``: a number, or a name in ``classes``
    - ``keypoints``: x, y and visibility of each point
    - ``iscrowd`` or ``crowd``, ``area``, and ``id`` or ``ids``

    Coordinates refer to an image of ``width`` x ``height`` pixels. If the JSON of a sample cannot be used, the sample
    becomes a fault when it is read.

    Args:
        root: path or URL of a shard, such as ``data/train-{000..099}.tar``; a list of them; or a folder.
        labels: extension of the member with the label (``cls``, ``json``, ``txt``), or ``none``. If ``a.json`` is
            missing, ``json`` finds ``a.meta.json``. ``auto``: ``none`` with ``masks`` or ``objects``, else ``cls``.
        label_key: field of a .json label; ``a.b`` for a nested field.
        masks: extension of the member with the mask, such as ``png`` or ``seg.png``.
        objects: extension of the member with the objects, such as ``json``.
        num_keypoints: number of keypoints of an object, at most 4096; None: keypoints are not read.
        extra: extension of the member with the extra, such as ``txt``. A sample is then ``(bytes, label, extra)``. The
            extra is text for ``.txt``, the parsed content for ``.json``, bytes for other members, and None for a
            missing member. With a list of extensions, the extra is a dict.
        classes: as in :class:`FolderSource`; with ``objects``, the classes of the objects. Labels that are
            numbers are not changed, but must be below the number of classes.
        subset, exclude: as in :class:`FolderSource`.
        extensions: extensions of images. If a sample has several images, the first extension in this list is used.
        index: folder of the index file; None: the folder of local shards if it is writable, else
            ``$XDG_CACHE_HOME/gpuaug``.
        remote: how to read from URLs.

    Raises:
        SourceError: if a shard cannot be read, is compressed or damaged, or has a member whose name is absolute or has
            a part ``..``.

    >>> source = ShardSource("data/train-{000..099}.tar", labels="json", label_key="category")
    >>> source = ShardSource("data/scenes-{000..099}.tar", masks="seg.png", objects="json")
    >>> source = ShardSource("data/laion-{000..099}.tar", labels="none", extra="txt")
    """

    thread_safe = True

    def __init__(
        self,
        root: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        labels: str | None = "auto",
        label_key: str = "label",
        masks: str | None = None,
        objects: str | None = None,
        num_keypoints: int | None = None,
        extra: Extra = None,
        classes: Classes = None,
        subset: Subset = None,
        exclude: str | os.PathLike[str] | None = None,
        extensions: Sequence[str] = IMAGE_EXTENSIONS,
        index: str | os.PathLike[str] | None = None,
        remote: Remote | None = None,
    ) -> None:
        if labels is not None and (not isinstance(labels, str) or not labels):
            raise ConfigError(f"`source.labels` must be an extension, such as cls or json, or none. Found: {labels!r}.")
        checks.text("source.label_key", label_key)
        self._set_kinds(masks, objects, extra, num_keypoints)
        endings = tuple(x for y in extensions_of(extensions) if (x := y[1:]) not in (*self._members, *self._extras))
        if labels == "auto":
            labels = "none" if self._members else "cls"
        label = None if labels in (None, "none") else str(labels).lower().lstrip(".")
        if label is None and classes is not None and self.objects is None:
            raise ConfigError("`source.classes` has no effect if `source.labels` is none. Remove one of them.")
        began = time.monotonic()
        self._storage = Storage(remote)
        shards = self._storage.expand(root, ending=".tar")
        self.root, names = common_folder([shard.path for shard in shards])
        rule = _Rule(endings, label, self._members, self._extras)
        found = _index(shards, root=self.root, names=names, rule=rule, remote=self._storage.remote, folder=index)
        bounds, keys, texts, self._places = found
        self._shards, self._count = shards, rule.per_sample
        shard_names = Names.of([[os.fsencode(name) for name in names]])
        self._names: FileKeys = FileKeys(shard_names, bounds, keys)
        if label is not None:
            values = [self._value(i, text, label, label_key) for i, text in enumerate(texts)]
            self._set_labels(values, classes=None if self.objects else classes)
        if self.objects is not None and classes is not None:
            self._set_classes(class_mapping(classes))
        self._activate(subset, exclude, began=began)

    def _set_kinds(self, masks: Any, objects: Any, extra: Extra, num_keypoints: Any) -> None:
        self.masks, self.objects = (
            None if checks.text(f"source.{key}", value, optional=True) is None else value.lower().lstrip(".")
            for key, value in (("masks", masks), ("objects", objects))
        )
        self.num_keypoints = checks.whole_number(
            "source.num_keypoints", num_keypoints, 1, MOST_KEYPOINTS, optional=True
        )
        if self.num_keypoints is not None and self.objects is None:
            raise ConfigError("`source.num_keypoints` needs the member with the keypoints. Set `source.objects`.")
        if self.masks is not None and self.masks == self.objects:
            raise ConfigError(f"`source.masks` and `source.objects` must be two members. Found twice: {self.masks!r}.")
        self._members = tuple(x for x in (self.masks, self.objects) if x is not None)
        if self._members:
            kinds = {"masks": self.masks, "boxes": self.objects, "keypoints": self.num_keypoints}
            self.target_kinds = frozenset(name for name, value in kinds.items() if value is not None)
        self.extra = fields_of(extra)
        self._extras = tuple(name.lower().lstrip(".") for name in self.extra.names) if self.extra else ()

    def _value(self, index: int, text: bytes, label: str, key: str) -> Any:
        """The label in a member: a field of JSON, else a number or a name."""
        try:
            if label.split(".")[-1] == "json":
                value = json.loads(text)
                for word in key.split("."):
                    value = value[word]
                if value is None or isinstance(value, dict):
                    raise ValueError(f"`{key}` is {value!r:.50}")
                return value
            word = text.decode().strip()
            if not word:
                raise ValueError("it is empty")
            return int(word) if re.fullmatch(r"[+-]?\d{1,18}", word) else word
        except KeyError as error:
            reason = f"it has no field {error}: set `source.label_key`"
        except (ValueError, TypeError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"
        raise SourceError(f"the {label} of {self.key(index)!r} in {redact(self.root)!r} is not valid ({reason}).")

    def _places_of(self, index: int) -> list[tuple[int, int]]:
        """First byte and number of bytes of each member of a sample; (0, 0) for a missing extra."""
        return [*map(tuple, self._places.numpy()[index * self._count : (index + 1) * self._count].tolist())]

    def _parts(self, index: int) -> list[Range]:
        """The ranges to read for a sample. Adjacent members are one range."""
        shard, places = self._shards[locate(self._names.bounds, index)[0]], self._places_of(index)
        images = places[: 1 if self.masks is None else 2]  # only image and mask are checked as images
        ranges = (
            Range(shard.path, *place, shard.version, image=0 if place in images else None)
            for place in {*places}  # a set, because one member may be both extra and objects
            if place[1]
        )
        return joined(ranges, most=LARGE)

    def _read(self, numbers: Sequence[int]) -> list[Any]:
        samples = [self._parts(i) for i in numbers]
        pieces = iter(self._storage.read([part for parts in samples for part in parts]))
        results: list[Any] = []
        for i, parts in zip(numbers, samples, strict=True):
            data: list[Any] = [(part.begin, next(pieces)) for part in parts]
            error = next((piece for _, piece in data if isinstance(piece, Exception)), None)
            results.append(error or self._parsed(i, [_member(data, *place) for place in self._places_of(i)]))
        return results

    def _parsed(self, index: int, members: list[Any]) -> Any:
        """The sample or its error, from the bytes of its members."""
        extras = members[1 + len(self._members) :]
        given = dict(zip(self._members, members[1:], strict=False))
        what, objects = self.objects, dict[str, Any]()
        try:
            if self.objects is not None:
                objects = parse(
                    given[self.objects], num_keypoints=self.num_keypoints, classes=self.class_to_idx,
                )  # fmt: skip
            what = "extra"
            extra = [*map(decoded, self._extras, extras)]
        except ValueError as error:
            return GpuaugError(f"the {what} of {self.key(index)!r} cannot be used: {error}")
        return self._item(index, members[0], given.get(self.masks or ""), extra, **objects)


def _member(data: list[tuple[int, bytes]], begin: int, size: int) -> bytes | None:
    """Cut a member out of ranges, given as (first byte, bytes); None if the sample lacks the member."""
    if not size:
        return b"" if begin else None
    at, piece = next((at, piece) for at, piece in data if at <= begin and begin + size <= at + len(piece))
    return piece[begin - at : begin - at + size]


class _Rule(NamedTuple):
    """Extensions of the members of a sample: image, label, ``members`` (masks and objects), extras."""

    extensions: tuple[str, ...]
    label: str | None
    members: tuple[str, ...]
    extras: tuple[str, ...]

    @property
    def needed(self) -> tuple[str, ...]:
        return (*(() if self.label is None else (self.label,)), *self.members)

    @property
    def per_sample(self) -> int:
        """Number of members of a sample that are read."""
        return 1 + len(self.members) + len(self.extras)


class _ShardIndex(NamedTuple):
    """The samples of one shard. `_Index` describes the columns."""

    keys: list[bytes]
    labels: list[bytes]
    places: array[int]
    left_out: list[str]  # names of samples without image, label, mask or objects
    extensions: set[str]  # of the first samples


# running sums of samples per shard; keys; labels, empty without labels; int64 [N * members, 2], where each member of a
# sample begins and its bytes: image, mask, objects and extras, (0, 0) for a missing extra
_Index = tuple[Tensor, Names, Names, Tensor]


# -- the index file: a line with a checksum, then arrays in numpy's format


def _index(shards: list[FileInfo], *, root: str, names: list[str], rule: _Rule, remote: Remote, folder: Any) -> _Index:
    """The samples of all shards. If there is no index file for them, only one process per machine reads the shards."""
    if folder is not None and (not isinstance(folder, str | os.PathLike) or is_url(folder)):
        raise ConfigError(f"`source.index` must be a local folder. Found: {folder!r}.")
    cache = files.cache_folder()
    elsewhere = str(cache) if folder is None else os.path.abspath(os.path.expanduser(os.fspath(folder)))
    paths = [os.path.join(elsewhere, _file_name(rule, root, *names))]
    # a file beside the shards is named without the root, because the folder may be moved
    if folder is None and not is_url(root):
        paths.insert(0, os.path.join(root, _file_name(rule, *names)))
    if (known := _load(paths, shards, rule)) is not None:
        return known
    with ExitStack() as stack:
        try:  # other ranks wait here, then read the index file
            os.makedirs(cache, 0o700, exist_ok=True)  # compiled code is stored here, too
            stack.enter_context(locked(os.path.join(cache, "index.lock")))
        except OSError as error:
            log.debug("index: its lock file cannot be used, so every process builds the index: %s", error)
        if (known := _load(paths, shards, rule)) is not None:
            return known
        began = time.monotonic()
        log.info("index: reading %d shards of %s", len(shards), redact(root))
        storage = Storage(replace(remote, cache=None))  # the disk cache is only for samples
        with ThreadPoolExecutor(INDEX_THREADS, thread_name_prefix="gpuaug-index") as pool:
            parts = list(pool.map(lambda shard: _index_shard(shard, rule, storage), shards))
        _check_samples(parts, rule, redact(root))
        body = _packed(parts)
        for path in paths:
            try:
                files.write(path, _checksum(body, shards), b"\n", body)
                break
            except OSError as error:
                log.info("index: cannot be stored in %s: %s", os.path.dirname(path), error)
        log.info("index: made in %.1f s", time.monotonic() - began)
        return _parse(body, shards, rule)


def _file_name(*content: Any) -> str:
    word = hashlib.blake2b(repr(content).encode(errors="surrogateescape"), digest_size=10).hexdigest()
    return f".gpuaug-{word}.index"


def _load(paths: list[str], shards: list[FileInfo], rule: _Rule) -> _Index | None:
    """The first usable index file."""
    for path in paths:
        try:
            checksum, _, body = read_file(path, limit=sys.maxsize).partition(b"\n")
            if checksum != _checksum(body, shards):
                raise ValueError("a shard changed, or the file is damaged")
            return _parse(body, shards, rule)
        except FileNotFoundError:
            continue
        except (*NO_ARRAY, LookupError) as error:
            log.warning("index: %s is built again: %s", path, error)
    return None


def _checksum(body: bytes, shards: list[FileInfo]) -> bytes:
    """The first line of an index file. It also depends on the versions of the shards."""
    versions = repr([(shard.size, shard.version) for shard in shards])
    return b"gpuaug-shards-3 " + digest(versions.encode(), body).encode()


def _packed(parts: list[_ShardIndex]) -> bytes:
    """The arrays of an index file."""
    keys, labels = (Names.of(column) for column in ([part.keys for part in parts], [part.labels for part in parts]))
    bounds = bounds_of([len(part.keys) for part in parts])
    places = np.concatenate([part.places for part in parts]).reshape(-1, 2)
    columns = [x.numpy() for x in (bounds, keys.blob, keys.offsets, labels.blob, labels.offsets)]
    file = io.BytesIO()
    for column in (*columns, places):
        np.lib.format.write_array(file, column)
    return file.getvalue()


def _parse(body: bytes, shards: list[FileInfo], rule: _Rule) -> _Index:
    """Check the arrays of an index file. `_load` catches all errors."""
    file = io.BytesIO(body)
    arrays = [np.lib.format.read_array(file, allow_pickle=False) for _ in range(6)]
    bounds, keys, key_ends, labels, label_ends, places = arrays
    count = len(key_ends) - 1
    for ends, number, texts, last in (
        (bounds, len(shards), keys, count),
        (key_ends, count, keys, len(keys)),
        (label_ends, count * (rule.label is not None), labels, len(labels)),
    ):
        if ends.dtype != np.int64 or ends.shape != (number + 1,) or texts.dtype != np.uint8 or texts.ndim != 1:
            raise ValueError("an array has the wrong type or shape")
        if ends[0] != 0 or ends[-1] != last or (ends[1:] < ends[:-1]).any():
            raise ValueError("its arrays do not fit together")
    if places.dtype != np.int64 or places.shape != (count * rule.per_sample, 2):
        raise ValueError("an array has the wrong type or shape")
    begin, size = places.T
    room = np.repeat([shard.size for shard in shards], np.diff(bounds) * rule.per_sample)
    if ((begin < 0) | (size < 0) | (size > LARGEST_FILE) | (begin > room - size)).any():
        raise ValueError("samples lie outside their shard")
    shared = [share(torch.from_numpy(column)) for column in arrays]
    names = Names(*shared[1:3])
    dotted = b".." in keys.tobytes() and any(b".." in name.split(b"/") for name in names)
    if dotted or (keys[key_ends[:-1]] == ord("/")).any():
        raise ValueError("keys lead outside the folder")
    return shared[0], names, Names(*shared[3:5]), shared[5]


# -- the samples of a shard


def _index_shard(shard: FileInfo, rule: _Rule, storage: Storage) -> _ShardIndex:
    place, read = redact(shard.path), _reader(shard, storage)
    part = _ShardIndex([], [], array("q"), [], set())
    known = set[bytes]()
    for key, sample in _samples(members(read, shard.size, path=place), place):
        if len(part.extensions) < 20:
            part.extensions.update(list(sample)[:20])
        image, label = _chosen(sample, rule)
        found = [image, *map(sample.get, rule.members)]
        if image is None or None in found or (label is None and rule.label is not None):
            part.left_out.append(os.fsdecode(key))
            continue
        found += map(sample.get, rule.extras)
        for member in (*found, label):
            most = PIECE_BYTES if member is label else LARGEST_FILE
            if member is not None and member.size > most:
                raise SourceError(
                    f"shard {place!r}: {os.fsdecode(member.name)!r} has {member.size} bytes. Members must have at most "
                    f"{LARGEST_FILE} bytes, and labels at most {PIECE_BYTES}. Write a smaller member, or leave it out."
                )
        if image.name in known:
            name = os.fsdecode(image.name)
            raise SourceError(f"shard {place!r} has two samples of the name {name!r}. Rename one of them.")
        known.add(image.name)
        part.keys.append(image.name)
        for member in found:
            part.places.extend((0, 0) if member is None else member[1:])
        if label is not None:  # the piece with the headers usually has the label, so `read` rarely reads again
            part.labels.append(read(label.offset, label.size))
    return part


def _check_samples(parts: list[_ShardIndex], rule: _Rule, place: str) -> None:
    extensions = shortened(sorted(set[str]().union(*(part.extensions for part in parts)))) or "none"
    left_out = [name for part in parts for name in part.left_out]
    if not any(part.keys for part in parts):
        wanted = ", ".join(rule.extensions) + (f" with {' and '.join(rule.needed)}" if rule.needed else "")
        raise SourceError(
            f"no images in {len(parts)} shards of {place!r}. Extensions found: {extensions}. Needed: {wanted}. Check "
            f"`source.extensions`, `source.labels`, `source.masks` and `source.objects`. {_ADJACENT}"
        )
    if left_out:
        needed = "".join(f" or {x}" for x in rule.needed)
        text = "source %s: %d samples without an image%s are left out: %s"
        log.warning(text, place, len(left_out), needed, shortened(left_out))
    for i, name in enumerate(rule.extras, start=rule.per_sample - len(rule.extras)):
        if not any(any(part.places[2 * i :: 2 * rule.per_sample]) for part in parts):
            raise SourceError(
                f"`source.extra` must name members beside the images of {place!r}. Found: {name!r}, which no sample "
                f"has. {_ADJACENT} Extensions found: {extensions}."
            )


def _chosen(sample: dict[str, Member], rule: _Rule) -> tuple[Member | None, Member | None]:
    image = next((sample[x] for x in rule.extensions if x in sample), None)
    if rule.label is None:
        return image, None
    ending = "." + rule.label
    others = (sample[x] for x in sample if x.endswith(ending) and x not in rule.extensions)
    return image, sample.get(rule.label) or next(others, None)


def _samples(listed: Iterator[Member], path: str) -> Iterator[tuple[bytes, dict[str, Member]]]:
    """Group adjacent members with the same name up to the first dot. A group maps lower-case extensions to members."""
    last, sample = b"", dict[str, Member]()
    for member in listed:
        folder, slash, name = member.name.rpartition(b"/")
        stem, dot, extension = name.partition(b".")
        if not stem or not dot:  # webdataset also skips hidden members and members without extension
            continue
        key = folder + slash + stem
        if key != last:
            if sample:
                yield last, sample
            last, sample = key, {}
        kind = extension.decode(errors="surrogateescape").lower()
        if kind in sample:
            raise SourceError(f"shard {path!r} has {member.name.decode(errors='replace')!r} twice in one sample.")
        sample[kind] = member
    if sample:
        yield last, sample


def _reader(shard: FileInfo, storage: Storage) -> Callable[[int, int], bytes]:
    """Return a function ``read(at, size)`` that keeps the latest piece in memory."""
    piece = PIECE_BYTES if is_url(shard.path) else LOCAL_PIECE_BYTES
    begin, data = 0, b""

    def read(at: int, size: int) -> bytes:
        nonlocal begin, data
        if not begin <= at <= at + size <= begin + len(data):
            length = max(0, min(max(size, piece), shard.size - at))
            (answer,) = storage.read([Range(shard.path, at, length, shard.version)])
            if isinstance(answer, Exception):
                raise SourceError(f"shard {redact(shard.path)!r} cannot be read: {answer}.") from answer
            begin, data = at, answer
        return data[at - begin : at - begin + size]

    return read
