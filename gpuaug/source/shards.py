"""WebDataset tar shards with random access. An index file stores the position of each image."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from gpuaug import checks, files
from gpuaug.errors import ConfigError, GpuaugError, SourceError
from gpuaug.files import LARGEST_FILE
from gpuaug.source.base import Classes, FileKeys, ListedSource
from gpuaug.source.classes import class_mapping, shortened
from gpuaug.source.extra import Extra, decoded, fields_of
from gpuaug.source.filters import IMAGE_EXTENSIONS, Subset, extensions_of
from gpuaug.source.index import Names, bounds_of, locate, share
from gpuaug.source.local import LARGE, read_file
from gpuaug.source.object_json import BoxFormat, parse
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
    samples. Later, only new and changed shards are indexed.

    With ``masks`` or ``objects``, a sample is ``(bytes, Target)``. The objects are JSON: a list of annotations as in
    COCO, or a mapping that has this list in the field ``objects`` or ``annotations``::

        {"width": 640, "height": 480, "objects": [{"bbox": [x, y, width, height], "category_id": 3}]}

    The objects may also be columns: ``{"bbox": [[x, y, width, height], ...], "category_id": [3, ...]}``.

    An object needs ``bbox``, or ``boxes`` with x1, y1, x2, y2. These fields are optional:

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
        box_format: what a field ``bbox`` holds: ``xywh`` (x, y, width, height) or ``xyxy`` (x1, y1, x2, y2).
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
        box_format: BoxFormat = "xywh",
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
        self._set_kinds(masks, objects, extra, num_keypoints, box_format)
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
        parts = _index(shards, root=self.root, names=names, rule=rule, remote=self._storage.remote, folder=index)
        self._offsets = share(torch.from_numpy(np.concatenate([part.offsets for part in parts])))  # int64 [N * members]
        self._sizes = share(torch.from_numpy(np.concatenate([part.sizes for part in parts])))  # int32 [N * members]
        self._shards = shards
        bounds = bounds_of([len(part.keys) for part in parts])
        shard_names = Names.of([[os.fsencode(name) for name in names]])
        self._names: FileKeys = FileKeys(shard_names, bounds, Names.of(list(part.keys) for part in parts))
        self._check_samples(parts, rule, extensions)
        if label is not None:
            values = [
                _value(text, label, label_key, shard.path, part.keys, i)
                for shard, part in zip(shards, parts, strict=True)
                for i, text in enumerate(part.labels)
            ]
            self._set_labels(values, classes=None if self.objects else classes)
        if self.objects is not None and classes is not None:
            self._set_classes(class_mapping(classes))
        self._activate(subset, exclude, began=began)

    def _set_kinds(self, masks: Any, objects: Any, extra: Extra, num_keypoints: Any, box_format: Any) -> None:
        self.masks, self.objects = (
            None if checks.text(f"source.{key}", value, optional=True) is None else value.lower().lstrip(".")
            for key, value in (("masks", masks), ("objects", objects))
        )
        self.num_keypoints = checks.whole_number(
            "source.num_keypoints", num_keypoints, 1, MOST_KEYPOINTS, optional=True
        )
        self.box_format: BoxFormat = checks.one_of("source.box_format", box_format, get_args(BoxFormat))
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
        self._count = 1 + len(self._members) + len(self._extras)  # number of members of a sample that are read

    def _check_samples(self, parts: list[_Part], rule: _Rule, extensions: Sequence[str]) -> None:
        place, other = redact(self.root), sorted({extension for part in parts for extension in part.other})
        if not len(self._names):
            raise SourceError(f"no images in {len(parts)} shards of {place!r}. {_hint(other, rule, extensions)}")
        if count := sum(part.dropped for part in parts):
            needed, first = "".join(f" or {x}" for x in rule.needed), [x for part in parts for x in part.left_out]
            log.warning(
                "source %s: %d samples without an image%s are left out: %s", place, count, needed, shortened(first)
            )
        offsets = self._offsets.numpy().reshape(-1, self._count)[:, 1 + len(self._members) :]
        for name, column in zip(self._extras, offsets.T, strict=True):
            if not column.any():
                reason = "only left-out samples have" if name in other else "no sample has"
                raise SourceError(
                    f"`source.extra` must name members beside the images of {place!r}. "
                    f"Found: {name!r}, which {reason}. {_ADJACENT} Extensions found: {shortened(other)}."
                )

    def _places(self, index: int) -> list[tuple[int, int]]:
        """First byte and number of bytes of each member of a sample; (0, 0) for a missing extra."""
        rows = slice(index * self._count, (index + 1) * self._count)
        return list(zip(self._offsets.numpy()[rows].tolist(), self._sizes.numpy()[rows].tolist(), strict=True))

    def _parts(self, index: int) -> list[Range]:
        """The ranges to read for a sample. Adjacent members are one range."""
        shard, places = self._shards[locate(self._names.bounds, index)[0]], self._places(index)
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
            results.append(error or self._parsed(i, [_member(data, *place) for place in self._places(i)]))
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
                    box_format=self.box_format,
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


class _Part(NamedTuple):
    """The samples of one shard."""

    line: bytes  # this shard's line in the index file
    keys: Names
    offsets: NDArray[np.int64]  # per sample: image, then mask, objects and extras; 0 for a missing extra
    sizes: NDArray[np.int32]
    labels: Names
    dropped: int  # number of samples without image, label, mask or objects
    left_out: list[str]  # names of the first few dropped samples
    other: list[str]  # extensions in samples that are dropped or lack an extra


# -- the index file: a line with a checksum, then one line of JSON per shard


def _index(
    shards: list[FileInfo], *, root: str, names: list[str], rule: _Rule, remote: Remote, folder: Any
) -> list[_Part]:
    """The samples of each shard. If the index file lacks a shard, only one process per machine reads the shard."""
    if folder is not None and (not isinstance(folder, str | os.PathLike) or is_url(folder)):
        raise ConfigError(f"`source.index` must be a local folder. Found: {folder!r}.")
    cache = files.cache_folder()
    elsewhere = str(cache) if folder is None else os.path.abspath(os.path.expanduser(os.fspath(folder)))
    paths = [os.path.join(elsewhere, _file_name(rule, root, *names))]
    # a file beside the shards is named without the root, because the folder may be moved
    if folder is None and not is_url(root):
        paths.insert(0, os.path.join(root, _file_name(rule, *names)))
    storage = Storage(replace(remote, cache=None))  # the disk cache is only for samples
    versions = [(name, shard.size, shard.version) for name, shard in zip(names, shards, strict=True)]
    known = _load(paths, rule)
    if not all(version in known for version in versions):
        with ExitStack() as stack:
            try:  # other ranks wait here, then read the index file
                os.makedirs(cache, 0o700, exist_ok=True)  # compiled code is stored here, too
                stack.enter_context(locked(os.path.join(cache, "index.lock")))
            except OSError as error:
                log.debug("index: its lock file cannot be used, so every process builds the index: %s", error)
            known |= _load(paths, rule)
            new = [(shard, version) for shard, version in zip(shards, versions, strict=True) if version not in known]
            if new:
                began = time.monotonic()
                log.info("index: reading %d of %d shards of %s", len(new), len(shards), redact(root))
                with ThreadPoolExecutor(INDEX_THREADS, thread_name_prefix="gpuaug-index") as pool:
                    parts = list(pool.map(lambda item: _index_shard(item[0], item[1], rule, storage), new))
                known |= {version: part for (_, version), part in zip(new, parts, strict=True)}
                saved = _save(paths, b"\n".join(known[version].line for version in versions))
                samples, took = sum(len(part.keys) for part in parts), time.monotonic() - began
                log.info("index: %d new samples in %.1f s, stored in %s", samples, took, saved or "memory only")
    return [known[version] for version in versions]


def _file_name(*content: Any) -> str:
    word = hashlib.blake2b(repr(content).encode(errors="surrogateescape"), digest_size=10).hexdigest()
    return f".gpuaug-{word}.index"


def _load(paths: list[str], rule: _Rule) -> dict[tuple[str, int, str], _Part]:
    """The shards in the first usable index file, by (name, size, version)."""
    for path in paths:
        try:
            checksum, _, body = read_file(path, limit=sys.maxsize).partition(b"\n")
            if checksum != _checksum(body):
                raise ValueError("its content does not match its checksum")
            return dict(_parse(line, rule) for line in body.split(b"\n"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError, MemoryError) as error:
            log.warning("index: %s cannot be used and is built again: %s", path, error)
    return {}


def _save(paths: list[str], body: bytes) -> str | None:
    """Write the index file to the first writable path, and return this path."""
    for path in paths:
        try:
            files.write(path, _checksum(body), b"\n", body)
            return path
        except OSError as error:
            log.info("index: cannot be stored in %s: %s", os.path.dirname(path), error)
    return None


def _checksum(body: bytes) -> bytes:
    return b"gpuaug-shards-2 " + hashlib.blake2b(body, digest_size=16).hexdigest().encode()


def _parse(line: bytes, rule: _Rule) -> tuple[tuple[str, int, str], _Part]:
    """Return a shard's (name, size, version) and samples. `_load` catches errors of an invalid line."""
    entry = json.loads(line)
    name, size, version = entry["stamp"]
    texts, numbers = [entry[c] for c in ("keys", "labels", "left_out", "other")], [entry["offsets"], entry["sizes"]]
    are_texts = all(isinstance(column, list) and set(map(type, column)) <= {str} for column in texts)
    if not are_texts or not all(set(map(type, column)) <= {int} for column in [*numbers, [entry["dropped"]]]):
        raise ValueError("a field has the wrong type")
    keys, labels = texts[:2]
    # not shared: shared memory would need a file descriptor for each shard
    names = (Names.of([[text.encode(errors="surrogateescape") for text in x]], shared=False) for x in (keys, labels))
    offsets, sizes = (np.array(column, dtype=np.int64) for column in numbers)
    count = len(keys) * (1 + len(rule.members) + len(rule.extras))
    fits = len(offsets) == len(sizes) == count and len(set(keys)) == len(keys)
    if not fits or len(labels) != len(keys) * bool(rule.label):
        raise ValueError("its columns differ in length, or two samples have the same key")
    if ((offsets < 0) | (sizes < 0) | (sizes > LARGEST_FILE) | (offsets > size - sizes)).any():
        raise ValueError("samples lie outside their shard")
    joined = "\0".join(["", *keys])
    if "\0/" in joined or (".." in joined and any(".." in key.split("/") for key in keys)):
        raise ValueError("keys lead outside the folder")
    part = _Part(line, next(names), offsets, sizes.astype(np.int32), next(names), entry["dropped"], *texts[2:])
    return (name, size, version), part


def _index_shard(shard: FileInfo, version: tuple[str, int, str], rule: _Rule, storage: Storage) -> _Part:
    place, read = redact(shard.path), _reader(shard, storage)
    entry: dict[str, Any] = {"stamp": version, "dropped": 0, "left_out": [], "keys": [], "offsets": [], "sizes": [],
                             "labels": []}  # fmt: skip
    other: set[str] = set()
    known = set[bytes]()
    for key, sample in _samples(members(read, shard.size, path=place), place):
        image, label = _chosen(sample, rule)
        found = [image, *map(sample.get, rule.members)]
        wanted = [member for member in found if member is not None]
        extras = [sample.get(extension) for extension in rule.extras]
        is_usable = image is not None and len(wanted) == len(found) and (label is not None or rule.label is None)
        if (not is_usable or None in extras) and len(other) < 20:
            other |= set(list(sample)[:20])
        if not is_usable:
            entry["dropped"] += 1
            entry["left_out"] += [os.fsdecode(key)] * (len(entry["left_out"]) < 5)
            continue
        for member in (*wanted, *extras, label):
            most = PIECE_BYTES if member is label else LARGEST_FILE
            if member is not None and member.size > most:
                raise SourceError(
                    f"shard {place!r}: {os.fsdecode(member.name)!r} has {member.size} bytes. Members must have at most "
                    f"{LARGEST_FILE} bytes, and labels at most {PIECE_BYTES}. Write a smaller member, or leave it out."
                )
        if (name := wanted[0].name) in known:
            raise SourceError(f"shard {place!r} has two samples of the name {os.fsdecode(name)!r}. Rename one of them.")
        known.add(name)
        entry["keys"].append(os.fsdecode(name))
        entry["offsets"] += [0 if member is None else member.offset for member in (*wanted, *extras)]
        entry["sizes"] += [0 if member is None else member.size for member in (*wanted, *extras)]
        if label is not None:  # the piece with the headers usually has the label, so `read` rarely reads again
            entry["labels"].append(os.fsdecode(read(label.offset, label.size)))
    return _parse(json.dumps({**entry, "other": sorted(other)}).encode(), rule)[1]


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


# -- labels


def _value(text: bytes, label: str, key: str, shard: str, names: Names, i: int) -> Any:
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
    raise SourceError(f"shard {redact(shard)!r}: the {label} of {os.fsdecode(names[i])!r} is not valid ({reason}).")


def _hint(other: list[str], rule: _Rule, extensions: Sequence[str]) -> str:
    """Why no sample is complete, and what to set. ``other``: extensions that the shards have."""
    if not other:
        return "The shards are empty."
    endings = [y[1:] for y in extensions_of(extensions)]
    if taken := [x for x in rule.extras if x in other and x in endings and not {*other} & {*rule.extensions}]:
        return f"`source.extra` must name other members than the images. Found: {taken[0]!r}, the ending of the images."
    wanted = ", ".join(rule.extensions) + (f" with {' and '.join(rule.needed)}" if rule.needed else "")
    keys = "`source.extensions` and `source.labels`"
    if rule.members:
        keys = "`source.extensions`, `source.labels`, `source.masks` and `source.objects`"
    return f"Extensions found: {shortened(other)}. Needed: {wanted}. Set {keys}. {_ADJACENT}"
