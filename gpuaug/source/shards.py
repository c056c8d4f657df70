"""WebDataset's tar shards with random access: an index says where each image is, so a sample is one range read."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gpuaug import files
from gpuaug.errors import ConfigError, SourceError
from gpuaug.source.base import Classes, FileKeys, ListedSource
from gpuaug.source.classes import some
from gpuaug.source.filters import IMAGE_EXTENSIONS, Subset, extensions_of
from gpuaug.source.index import Names, share
from gpuaug.source.local import LARGEST_FILE, read_file
from gpuaug.source.paths import common_folder, is_url, join, redact, split
from gpuaug.source.remote.disk import locked
from gpuaug.source.remote.storage import FileInfo, Range, Remote, Storage
from gpuaug.source.tar import BLOCK, Member, members

log = logging.getLogger("gpuaug")

INDEX_THREADS = 8  # shards that are indexed at a time
PIECE_BYTES = 8 << 20  # of a remote shard per request while indexing: smaller members are not worth one each
LOCAL_PIECE_BYTES = 1 << 14  # of a local shard, of which little more than the headers is read
_MAGIC = b"gpuaug-shards-1\n"


class ShardSource(ListedSource):
    """Samples of WebDataset: members of a tar with the same name up to the first dot, in the order of the shards.

    The positions of all samples are read once and kept in an index file. Only shards whose size, time or ETag changed
    are read again. DALI's index of a shard (``train-000.idx`` from ``wds2idx``) is used if there is one. Hidden
    members, and samples without image or label, are left out with one warning. If samples of one name are not adjacent
    in a shard, they get different keys: ``a.jpg``, ``a.jpg#2``, ``a.jpg#3``.

    Args:
        root: shards: a path or URL with braces (``data/train-{000..099}.tar``), a list of them, or a folder of .tar.
        labels: extension of the member with the label (``cls``, ``json``, ``txt``), or ``none``. The extension of
            ``a.meta.json`` is ``json`` too.
        label_key: field of a .json label; dots lead into nested fields.
        classes: as in :class:`FolderSource`, if the labels are names; if they are numbers, it gives the number of
            classes.
        subset, exclude: as in :class:`FolderSource`.
        extensions: of the image; if a sample has several, the first one of this list.
        index: a folder for the index file; None: beside local shards if that is writable, else
            ``$XDG_CACHE_HOME/gpuaug``.
        remote: how to read from URLs.

    Raises:
        SourceError: if a shard cannot be read, is compressed or damaged, or has members outside of itself.

    >>> source = ShardSource("data/train-{000..099}.tar", labels="json", label_key="category")
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        labels: str | None = "cls",
        label_key: str = "label",
        classes: Classes = None,
        subset: Subset = None,
        exclude: str | os.PathLike[str] | None = None,
        extensions: Sequence[str] = IMAGE_EXTENSIONS,
        index: str | os.PathLike[str] | None = None,
        remote: Remote | None = None,
    ) -> None:
        if labels is not None and (not isinstance(labels, str) or not labels):
            raise ConfigError(f"`source.labels` must be an extension, as cls or json, or none. Found: {labels!r}.")
        if not isinstance(label_key, str) or not label_key:
            raise ConfigError(f"`source.label_key` must be the name of a field. Found: {label_key!r}.")
        endings = tuple(x[1:] for x in extensions_of(extensions))
        label = None if labels in (None, "none") else str(labels).lower().lstrip(".")
        if label is None and classes is not None:
            raise ConfigError("`source.classes` names the labels, but `source.labels` is none. Drop one.")
        began = time.monotonic()
        self._storage = Storage(remote)
        shards = self._storage.expand(root, ending=".tar")
        self.root, names = common_folder([shard.path for shard in shards])
        rule = _Rule(endings, label)
        parts = _index(shards, root=self.root, names=names, rule=rule, remote=self._storage.remote, folder=index)
        bounds = share(torch.from_numpy(np.cumsum([0, *(len(part.offsets) for part in parts)])))
        self._offsets = share(torch.from_numpy(np.concatenate([part.offsets for part in parts])))  # int64 [N]
        self._sizes = share(torch.from_numpy(np.concatenate([part.sizes for part in parts])))  # int32 [N]
        self._shards = Names.of([[os.fsencode(shard.path) for shard in shards]])
        self._versions = Names.of([[shard.version.encode() for shard in shards]])
        members = Names.of(list(part.keys) for part in parts)
        self._names: FileKeys = FileKeys(Names.of([[os.fsencode(name) for name in names]]), bounds, members)
        if not len(self._names):
            raise SourceError(f"no images in {len(shards)} shards of {redact(self.root)!r}. {_hint(parts, rule)}")
        left_out = [text for part in parts for text in part.left_out]
        if count := sum(part.dropped for part in parts):
            log.warning(
                "source %s: %d samples without an image%s are left out: %s",
                redact(self.root), count, "" if label is None else f" or {label}", some(left_out),
            )  # fmt: skip
        if label is not None:
            values = [_value(text, label, label_key, part, i) for part in parts for i, text in enumerate(part.labels)]
            self._set_labels(values, classes=classes)
        self._activate(subset, exclude, began=began)

    def _range(self, index: int) -> Range:
        shard, _ = self._names.locate(index)
        path, version = os.fsdecode(self._shards[shard]), self._versions[shard].decode()
        return Range(path, int(self._offsets.numpy()[index]), int(self._sizes.numpy()[index]), version, image=0)


class _Rule(NamedTuple):
    """Which members make a sample."""

    extensions: tuple[str, ...]
    label: str | None


@dataclass
class _Part:
    """The samples of one shard."""

    shard: str
    keys: Names = field(default_factory=lambda: Names.of([]))
    offsets: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    sizes: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    labels: Names = field(default_factory=lambda: Names.of([]))
    left_out: list[str] = field(default_factory=list)  # the first few
    dropped: int = 0  # how many were left out
    other: set[str] = field(default_factory=set)  # extensions of those


# -- the index


def _index(
    shards: list[FileInfo], *, root: str, names: list[str], rule: _Rule, remote: Remote, folder: Any
) -> list[_Part]:
    """The samples of each shard. One process of a machine indexes the shards that the index file does not know."""
    if folder is not None and (not isinstance(folder, str | os.PathLike) or is_url(folder)):
        raise ConfigError(f"`source.index` must be a local folder. Found: {folder!r}.")
    cache = files.cache_folder()
    elsewhere = str(cache) if folder is None else os.path.abspath(os.path.expanduser(os.fspath(folder)))
    paths = [os.path.join(elsewhere, _file_name(rule, root, *names))]
    if folder is None and not is_url(root):  # beside the shards its name has no root: they may move together
        paths.insert(0, os.path.join(root, _file_name(rule, *names)))
    storage = Storage(replace(remote, cache=None))  # the disk cache is for samples
    versions = [json.dumps([name, shard.size, shard.version]) for name, shard in zip(names, shards, strict=True)]
    known = _load(paths, rule)
    if all(version in known for version in versions):
        return [known[version] for version in versions]
    with ExitStack() as stack:
        try:  # the other ranks wait, and then find the index file
            os.makedirs(cache, exist_ok=True)
            stack.enter_context(locked(os.path.join(cache, "index.lock")))
        except OSError as error:
            log.debug("index: no lock, so every process makes its own: %s", error)
        known |= _load(paths, rule)
        new = [(shard, version) for shard, version in zip(shards, versions, strict=True) if version not in known]
        if new:
            began = time.monotonic()
            log.info("index: looking at %d of %d shards of %s", len(new), len(shards), redact(root))
            with ThreadPoolExecutor(INDEX_THREADS, thread_name_prefix="gpuaug-index") as pool:
                parts = list(pool.map(lambda item: _index_shard(item[0], rule, storage), new))
            known |= {version: part for (_, version), part in zip(new, parts, strict=True)}
            saved = _save(paths, rule, {version: known[version] for version in versions})
            samples, took = sum(len(part.offsets) for part in parts), time.monotonic() - began
            log.info("index: %d samples found in %.1f s, kept in %s", samples, took, saved or "memory only")
    return [known[version] for version in versions]


def _file_name(*content: Any) -> str:
    word = hashlib.blake2b(repr(content).encode(errors="surrogateescape"), digest_size=10).hexdigest()
    return f".gpuaug-{word}.index"


def _index_shard(shard: FileInfo, rule: _Rule, storage: Storage) -> _Part:
    """The samples of a shard, from DALI's index if it fits, else from the headers of the tar."""
    reader = _ShardReader(shard, storage)
    by_dali = _read_dali_index(shard, reader, storage)
    listed = members(reader.read, shard.size, path=redact(shard.path)) if by_dali is None else iter(by_dali)
    part = _Part(redact(shard.path))
    keys: list[bytes] = []
    images: list[Member] = []
    labels: list[bytes] = []
    label_ranges: list[Range] = []
    times: dict[bytes, int] = {}
    for key, sample in _samples(listed, redact(shard.path)):
        image, label = _chosen(sample, rule)
        if image is None or (label is None and rule.label is not None):
            part.dropped += 1
            part.other |= set(list(sample)[:20])
            part.left_out += [key.decode(errors="surrogateescape")] * (len(part.left_out) < 5)
            continue
        if image.size > LARGEST_FILE or (label is not None and label.size > PIECE_BYTES):
            raise SourceError(f"shard {redact(shard.path)!r}: {image.name!r} or its label is too large to be one.")
        keys.append(_unique(image.name, times))
        images.append(image)
        if label is not None and by_dali is None:
            labels.append(reader.read(label.offset, label.size))  # in the piece that was read for the headers
        elif label is not None:
            label_ranges.append(Range(shard.path, label.offset, label.size))
    if more := [name for name, count in times.items() if count > 1]:
        log.warning(
            "shard %r has %d names more than once, such as %r: the second sample's key is %r",
            redact(shard.path), len(more), os.fsdecode(more[0]), os.fsdecode(more[0] + b"#2"),
        )  # fmt: skip
    for text in storage.read(label_ranges):
        if isinstance(text, Exception):
            raise SourceError(f"shard {redact(shard.path)!r}: a label cannot be read: {text}.") from text
        labels.append(text)
    part.keys = Names.of([keys])
    part.offsets = np.array([image.offset for image in images], dtype=np.int64)
    part.sizes = np.array([image.size for image in images], dtype=np.int32)
    part.labels = Names.of([labels])
    return part


def _chosen(sample: dict[str, Member], rule: _Rule) -> tuple[Member | None, Member | None]:
    """The image and the label of a sample; None if it has none."""
    image = next((sample[x] for x in rule.extensions if x in sample), None)
    if rule.label is None:
        return image, None
    ending = "." + rule.label
    others = (sample[x] for x in sample if x.endswith(ending) and x not in rule.extensions)
    return image, sample.get(rule.label) or next(others, None)


def _unique(name: bytes, times: dict[bytes, int]) -> bytes:
    """A new key for the shard; ``times`` counts the keys that were made from each name."""
    key = name
    while key in times:
        times[name] += 1
        key = b"%b#%d" % (name, times[name])
    times[key] = 1
    return key


def _samples(listed: Iterator[Member], path: str) -> Iterator[tuple[bytes, dict[str, Member]]]:
    """Adjacent members with the same name up to the first dot, by lower-case extension."""
    last, sample = b"", dict[str, Member]()
    for member in listed:
        folder, slash, name = member.name.rpartition(b"/")
        stem, dot, extension = name.partition(b".")
        if not stem or not dot:  # hidden, or without extension: webdataset skips it as well
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


class _ShardReader:
    """Reads a shard in pieces, which are large if it is remote."""

    def __init__(self, shard: FileInfo, storage: Storage) -> None:
        self.shard, self.storage = shard, storage
        self.begin, self.data = 0, b""
        if shard.size < 0:
            raise SourceError(f"shard {redact(shard.path)!r}: its server says no size. Use one that does, or a copy.")
        self.piece = PIECE_BYTES if is_url(shard.path) else LOCAL_PIECE_BYTES

    def read(self, at: int, size: int) -> bytes:
        """At most ``size`` bytes from ``at``; fewer at the end."""
        if not self.begin <= at <= at + size <= self.begin + len(self.data):
            length = max(0, min(max(size, self.piece), self.shard.size - at))
            (data,) = self.storage.read([Range(self.shard.path, at, length, self.shard.version)])
            if isinstance(data, Exception):
                raise SourceError(f"shard {redact(self.shard.path)!r} cannot be read: {data}.") from data
            self.begin, self.data = at, data
        return self.data[at - self.begin : at - self.begin + size]


def _read_dali_index(shard: FileInfo, reader: _ShardReader, storage: Storage) -> list[Member] | None:
    """Members in the index of ``wds2idx`` beside the shard; None if there is none, or it does not fit."""
    if "?" in shard.path:
        return None
    folder, name = split(shard.path)
    path = join(folder, name.split(".", 1)[0] + ".idx")
    if not is_url(path) and not os.path.exists(path):
        return None
    (text,) = storage.read([Range(path)])
    if isinstance(text, Exception):
        if not isinstance(text, FileNotFoundError):
            log.warning("index: %s cannot be read, and is not used: %s", redact(path), text)
        return None
    try:
        listed = _parse_dali(text, shard.size)
        # the first and the last header show whether it belongs to this shard
        for member in (listed[0], listed[-1]):
            start = member.offset - BLOCK
            header = members(lambda at, n, start=start: reader.read(start + at, n),  # type: ignore[misc]
                             shard.size - start, path=redact(shard.path))  # fmt: skip
            there = next(header)
            if (there.name, there.size) != (member.name, member.size):
                raise ValueError(f"{member.name!r} is not where it says")
    except (ValueError, IndexError, StopIteration, SourceError) as error:
        log.warning("index: %s does not fit its shard, and is not used: %s", redact(path), error)
        return None
    log.info("index: %s is used", redact(path))
    return listed


def _parse_dali(text: bytes, size: int) -> list[Member]:
    """Version 1.2: ``v1.2 COUNT``, then a line per sample with ``extension offset size name`` for each member."""
    lines = text.rstrip(b"\n").split(b"\n")
    version, count = lines[0].split(b" ")
    if version != b"v1.2" or int(count) != len(lines) - 1:
        raise ValueError(f"{version.decode(errors='replace')!r:.20}, {len(lines) - 1} samples; v1.2 has names")
    listed = []
    for line in lines[1:]:
        words = line.split(b" ")
        if len(words) % 4:
            raise ValueError("names with spaces in them")
        for extension, offset, length, name in zip(*[iter(words)] * 4, strict=True):
            member = Member(name.removeprefix(b"./"), int(offset), int(length))
            if member.offset % BLOCK or member.offset < BLOCK or member.size < 0 or member.offset + member.size > size:
                raise ValueError(f"{name!r} lies outside of the shard")
            if not name.endswith(b"." + extension) or name.startswith(b"/") or b".." in name.split(b"/"):
                raise ValueError(f"a name that cannot be: {name!r}")
            if len(name) >= 100:
                raise ValueError("a long name, at which wds2idx is off by a header")
            listed.append(member)
    return listed


def _load(paths: list[str], rule: _Rule) -> dict[str, _Part]:
    """The shards in the first index file that can be used; {} if all are missing, damaged, or of another version."""
    for path in paths:
        try:
            data = read_file(path, limit=sys.maxsize)
            if not data.startswith(_MAGIC):
                raise ValueError("it does not begin as one")
            length = int.from_bytes(data[len(_MAGIC) : len(_MAGIC) + 8], "little")
            body = data[len(_MAGIC) + 8 + 16 :]
            if hashlib.blake2b(body, digest_size=16).digest() != data[len(_MAGIC) + 8 : len(_MAGIC) + 24]:
                raise ValueError("its checksum differs")
            header, arrays = json.loads(body[:length]), io.BytesIO(body[length:])
            if header["rule"] != json.loads(json.dumps(rule)):
                raise ValueError("it was made with other extensions")
            return {
                entry["stamp"]: _read_part(entry, arrays, labelled=rule.label is not None) for entry in header["shards"]
            }
        except FileNotFoundError:
            continue
        except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError, MemoryError) as error:
            log.warning("index: %s cannot be used, and is made again: %s", path, error)
    return {}


def _save(paths: list[str], rule: _Rule, parts: dict[str, _Part]) -> str | None:
    """Write the index file into the first folder that is writable, and return its path."""
    arrays, entries = io.BytesIO(), []
    for version, part in parts.items():
        entries.append({
            "stamp": version, "shard": part.shard, "left_out": part.left_out, "dropped": part.dropped,
            "other": sorted(part.other),
            "arrays": [_write_array(arrays, array) for array in (
                part.offsets, part.sizes, part.keys.blob.numpy(), part.keys.offsets.numpy(),
                part.labels.blob.numpy(), part.labels.offsets.numpy(),
            )],
        })  # fmt: skip
    header = json.dumps({"rule": rule, "shards": entries}).encode()
    body = header + arrays.getvalue()
    checksum = hashlib.blake2b(body, digest_size=16).digest()
    for path in paths:
        try:
            files.write(path, _MAGIC + len(header).to_bytes(8, "little") + checksum + body)
            return path
        except OSError as error:
            log.info("index: not kept in %s: %s", os.path.dirname(path), error)
    return None


def _write_array(file: io.BytesIO, array: NDArray[Any]) -> list[int]:
    file.write(array.tobytes())
    return [file.tell() - array.nbytes, len(array)]


def _read_part(entry: dict[str, Any], arrays: io.BytesIO, *, labelled: bool) -> _Part:
    """The samples of a shard; ValueError, TypeError, LookupError or OverflowError if a field is wrong."""

    def array(location: list[int], dtype: Any) -> NDArray[Any]:
        begin, count = location
        if type(begin) is not int or type(count) is not int or begin < 0 or count < 0:
            raise ValueError(f"an array is at {location!r:.100}")
        return np.frombuffer(arrays.getbuffer(), dtype=dtype, count=count, offset=begin).copy()

    def names(blob: list[int], offsets: list[int]) -> Names:
        at = array(offsets, np.int64)
        if not len(at) or at[0] or at[-1] != blob[1] or (np.diff(at) < 0).any():
            raise ValueError("its names are in disorder")
        return Names(torch.from_numpy(array(blob, np.uint8)), torch.from_numpy(at))

    lists = [entry["left_out"], entry["other"], [entry["shard"]]]
    if not all(isinstance(texts, list) and all(isinstance(text, str) for text in texts) for texts in lists):
        raise ValueError("its texts are not strings")
    if type(entry["dropped"]) is not int or entry["dropped"] < 0:
        raise ValueError(f"it counts {entry['dropped']!r:.100} samples left out")
    offsets, sizes, key_blob, key_offsets, label_blob, label_offsets = entry["arrays"]
    part = _Part(
        shard=entry["shard"], left_out=entry["left_out"], dropped=entry["dropped"], other=set(entry["other"]),
        offsets=array(offsets, np.int64), sizes=array(sizes, np.int32),
        keys=names(key_blob, key_offsets), labels=names(label_blob, label_offsets),
    )  # fmt: skip
    labels = len(part.keys) if labelled else 0
    if not len(part.offsets) == len(part.sizes) == len(part.keys) or len(part.labels) != labels:
        raise ValueError("its arrays differ in length")
    _, size, _ = json.loads(entry["stamp"])
    if ((part.offsets < 0) | (part.sizes < 0) | (part.offsets > size - part.sizes)).any():
        raise ValueError("samples lie outside of their shard")
    keys = list(part.keys)
    if any(key.startswith(b"/") or b".." in key.split(b"/") for key in keys):
        raise ValueError("names lead outside")
    if len(set(keys)) < len(keys):
        raise ValueError("two samples have one name")
    return part


# -- labels


def _value(text: bytes, label: str, key: str, part: _Part, i: int) -> Any:
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
        reason = f"no field {error}: set `source.label_key`"
    except (ValueError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
    name = os.fsdecode(part.keys[i])
    raise SourceError(f"shard {part.shard!r}: the {label} of {name!r} is not a label ({reason}).")


def _hint(parts: list[_Part], rule: _Rule) -> str:
    other = sorted({extension for part in parts for extension in part.other})
    if not other:
        return "They are empty."
    wanted = f"{', '.join(rule.extensions)}" + ("" if rule.label is None else f" with {rule.label}")
    return f"Their members end in {some(other)}; wanted: {wanted}. Set `source.extensions` and `source.labels`."
