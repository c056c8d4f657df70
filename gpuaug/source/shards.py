"""WebDataset's tar shards, read at any place: an index says where each image is, so that a sample is one range read."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gpuaug.errors import ConfigError, SourceError
from gpuaug.source.classes import some
from gpuaug.source.filters import Classes, Listed, Subset, extensions_of
from gpuaug.source.index import Names, share
from gpuaug.source.paths import common_folder, places_of
from gpuaug.source.remote.disk import locked
from gpuaug.source.remote.storage import (
    LARGEST_FILE,
    Found,
    Range,
    Remote,
    Storage,
    is_url,
    join,
    read_file,
    shown,
    split,
)
from gpuaug.source.tar import BLOCK, Member, members

log = logging.getLogger("gpuaug")

SHARD_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")
AT_ONCE = 8  # shards that are indexed at a time
PIECE = 8 << 20  # bytes of a remote shard that are asked for at once; smaller members are not worth a request each
_MAGIC = b"gpuaug-shards-1\n"


class ShardSource(Listed):
    """Samples of WebDataset: members of a tar with the same name up to the first dot, in the order of the shards.

    Where its bytes are is found once and kept in an index file; a shard whose size, time or ETag differs is looked at
    again, and only this one. An index file of DALI's ``wds2idx`` beside a shard (``train-000.idx``) is used where there
    is one. Members that are hidden, and samples without image or label, are left out with one warning. Samples of one
    name that are apart from each other in a shard have keys of their own: ``a.jpg``, ``a.jpg#2``, ``a.jpg#3``.

    Args:
        root: shards: a path or URL with braces (``data/train-{000..099}.tar``), a list of them, or a folder of .tar.
        labels: the extension of the member that holds the label (``cls``, ``json``, ``txt``), or ``none``. A name of
            several dots ends in the extension ``json`` too.
        label_key: the field of a .json label; dots lead into nested ones.
        classes: as in :class:`FolderSource`, for labels that are names; for numbers it says how many classes there are.
        subset, exclude: as in :class:`FolderSource`.
        extensions: of the image; where a sample has several, the first one of this list.
        index: a folder for the index file; None: beside local shards where it can be written, else
            ``$XDG_CACHE_HOME/gpuaug``.
        remote: how to read from URLs.

    Raises:
        SourceError: if a shard cannot be read, is compressed or damaged, or has members outside of itself.
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
        extensions: Sequence[str] = SHARD_EXTENSIONS,
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
        shards = places_of(root, self._storage, ending=".tar")
        self.root, names = common_folder([shard.key for shard in shards])
        rule = _Rule(endings, label)
        parts = _indexed(shards, root=self.root, names=names, rule=rule, remote=self._storage.remote, index=index)
        self._bounds = share(torch.from_numpy(np.cumsum([0, *(len(part.offsets) for part in parts)])))
        self._offsets = share(torch.from_numpy(np.concatenate([part.offsets for part in parts])))  # int64 [N]
        self._sizes = share(torch.from_numpy(np.concatenate([part.sizes for part in parts])))  # int32 [N]
        self._places = Names.of([[os.fsencode(shard.key) for shard in shards]])
        self._stamps = Names.of([[shard.stamp.encode() for shard in shards]])
        self._names: Any = _Keys(Names.of([os.fsencode(name) for name in names] for _ in (0,)), self._bounds, parts)
        if not len(self._names):
            raise SourceError(f"no images in {len(shards)} shards of {shown(self.root)!r}. {_hint(parts, rule)}")
        left_out = [text for part in parts for text in part.left_out]
        if count := sum(part.dropped for part in parts):
            log.warning(
                "source %s: %d samples without an image%s are left out: %s",
                shown(self.root), count, "" if label is None else f" or {label}", some(left_out),
            )  # fmt: skip
        if label is not None:
            values = [_value(text, label, label_key, part, i) for part in parts for i, text in enumerate(part.labels)]
            self._label(values, classes=classes)
        self._activate(subset, exclude, began=began)

    def _range(self, index: int) -> Range:
        shard = int(np.searchsorted(self._bounds.numpy(), index, side="right")) - 1
        place, stamp = os.fsdecode(self._places[shard]), self._stamps[shard].decode()
        return Range(place, int(self._offsets.numpy()[index]), int(self._sizes.numpy()[index]), stamp, image=0)


class _Rule(NamedTuple):
    """What decides which members make a sample."""

    extensions: tuple[str, ...]
    label: str | None


class _Part:
    """The samples of one shard."""

    def __init__(self, shard: str, *, left_out: list[str], dropped: int) -> None:
        self.shard, self.left_out, self.dropped = shard, left_out, dropped
        self.keys = Names.of([])
        self.offsets: NDArray[np.int64] = np.zeros(0, np.int64)
        self.sizes: NDArray[np.int32] = np.zeros(0, np.int32)
        self.labels = Names.of([])
        self.other: set[str] = set()  # extensions of samples that were left out


class _Keys:
    """Keys of all samples as ``shard/member``, without a copy of the shard's name for each."""

    def __init__(self, shards: Names, bounds: torch.Tensor, parts: list[_Part]) -> None:
        self.shards, self.bounds = shards, bounds
        self.members = Names.of(list(part.keys) for part in parts)

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, index: int) -> bytes:
        shard = int(np.searchsorted(self.bounds.numpy(), index, side="right")) - 1
        return self.shards[shard] + b"/" + self.members[index]

    def __iter__(self) -> Iterator[bytes]:
        counts = np.diff(self.bounds.numpy()).tolist()
        above = (shard for shard, count in zip(self.shards, counts, strict=True) for _ in range(count))
        return (shard + b"/" + name for shard, name in zip(above, self.members, strict=True))

    def digest(self) -> str:
        """As of Names."""
        return hashlib.blake2b(b"\0".join(sorted(self)), digest_size=16).hexdigest()


# -- the index


def _indexed(
    shards: list[Found], *, root: str, names: list[str], rule: _Rule, remote: Remote, index: Any
) -> list[_Part]:
    """The samples of each shard, from the index file as far as it knows them; one process of a machine makes it."""
    if index is not None and (not isinstance(index, str | os.PathLike) or is_url(index)):
        raise ConfigError(f"`source.index` must be a local folder. Found: {index!r}.")
    home = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "gpuaug")
    elsewhere = home if index is None else os.path.abspath(os.path.expanduser(os.fspath(index)))
    files = [os.path.join(elsewhere, _file_name(rule, root, *names))]
    if index is None and not is_url(root):  # beside the data it knows no root: they may move together
        files.insert(0, os.path.join(root, _file_name(rule, *names)))
    storage = Storage(replace(remote, cache=None))  # that is for samples
    stamps = [json.dumps([name, shard.size, shard.stamp]) for name, shard in zip(names, shards, strict=True)]
    known = _load(files, rule)
    if all(stamp in known for stamp in stamps):
        return [known[stamp] for stamp in stamps]
    with ExitStack() as stack:
        try:  # other ranks wait, and find it done
            os.makedirs(home, exist_ok=True)
            stack.enter_context(locked(os.path.join(home, "index.lock")))
        except OSError as error:
            log.debug("index: no lock, so every process makes its own: %s", error)
        known |= _load(files, rule)
        new = [(shard, stamp) for shard, stamp in zip(shards, stamps, strict=True) if stamp not in known]
        if new:
            began = time.monotonic()
            log.info("index: looking at %d of %d shards of %s", len(new), len(shards), shown(root))
            with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="gpuaug-index") as pool:
                parts = list(pool.map(lambda item: _look(item[0], rule, storage), new))
            known |= {stamp: part for (_, stamp), part in zip(new, parts, strict=True)}
            kept = _save(files, rule, {stamp: known[stamp] for stamp in stamps})
            samples, took = sum(len(part.offsets) for part in parts), time.monotonic() - began
            log.info("index: %d samples found in %.1f s, kept in %s", samples, took, kept or "memory only")
    return [known[stamp] for stamp in stamps]


def _file_name(*made_from: Any) -> str:
    word = hashlib.blake2b(repr(made_from).encode(errors="surrogateescape"), digest_size=10).hexdigest()
    return f".gpuaug-{word}.index"


def _look(shard: Found, rule: _Rule, storage: Storage) -> _Part:
    """The samples of a shard, from DALI's index where it has one that fits, else from its headers."""
    reader = _Reader(shard, storage)
    found = _dali(shard, reader, storage)
    listed = members(reader.read, shard.size, place=shown(shard.key)) if found is None else iter(found)
    part = _Part(shown(shard.key), left_out=[], dropped=0)
    keys: list[bytes] = []
    images: list[Member] = []
    labels: list[bytes | Member] = []
    times: dict[bytes, int] = {}
    for key, sample in _samples(listed, shown(shard.key)):
        chosen = next((sample[x] for x in rule.extensions if x in sample), None)
        label = None
        if rule.label is not None:
            label = sample.get(rule.label) or next(
                (sample[x] for x in sample if x.endswith("." + rule.label) and x not in rule.extensions), None
            )
        if chosen is None or (label is None and rule.label is not None):
            part.dropped += 1
            part.other |= set(list(sample)[:20])
            part.left_out += [key.decode(errors="surrogateescape")] * (len(part.left_out) < 5)
            continue
        if chosen.size > LARGEST_FILE or (label is not None and label.size > PIECE):
            raise SourceError(f"shard {shown(shard.key)!r}: {chosen.name!r} or its label is too large to be one.")
        keys.append(_unique(chosen.name, times))
        images.append(chosen)
        if label is not None:
            labels.append(label if found is not None else reader.read(label.offset, label.size))
    if more := [name for name, count in times.items() if count > 1]:
        log.warning(
            "shard %r has %d names more than once, such as %r: the second sample's key is %r",
            shown(shard.key), len(more), os.fsdecode(more[0]), os.fsdecode(more[0] + b"#2"),
        )  # fmt: skip
    if found is not None and labels:  # nothing of the images needs to be transferred
        ranges = [Range(shard.key, label.offset, label.size) for label in labels if isinstance(label, Member)]
        texts = storage.read(ranges)
        for text in texts:
            if isinstance(text, Exception):
                raise SourceError(f"shard {shown(shard.key)!r}: a label cannot be read: {text}.") from text
        labels = [text for text in texts if isinstance(text, bytes)]
    part.keys = Names.of([keys])
    part.offsets = np.array([image.offset for image in images], dtype=np.int64)
    part.sizes = np.array([image.size for image in images], dtype=np.int32)
    part.labels = Names.of([[text for text in labels if isinstance(text, bytes)]])
    return part


def _unique(name: bytes, times: dict[bytes, int]) -> bytes:
    """A key that no sample of the shard has yet; ``times`` says how often each name was given one."""
    key = name
    while key in times:
        times[name] += 1
        key = b"%b#%d" % (name, times[name])
    times[key] = 1
    return key


def _samples(listed: Iterator[Member], place: str) -> Iterator[tuple[bytes, dict[str, Member]]]:
    """Members next to each other with one name up to the first dot, by the lower-case extension behind it."""
    last, sample = b"", dict[str, Member]()
    for member in listed:
        above, slash, name = member.name.rpartition(b"/")
        stem, dot, extension = name.partition(b".")
        if not stem or not dot:  # hidden, or without extension: webdataset passes over it as well
            continue
        key = above + slash + stem
        if key != last:
            if sample:
                yield last, sample
            last, sample = key, {}
        kind = extension.decode(errors="surrogateescape").lower()
        if kind in sample:
            raise SourceError(f"shard {place!r} has {member.name.decode(errors='replace')!r} twice in one sample.")
        sample[kind] = member
    if sample:
        yield last, sample


class _Reader:
    """Bytes of a shard, in large pieces where it is remote."""

    def __init__(self, shard: Found, storage: Storage) -> None:
        self.shard, self.storage = shard, storage
        self.begin, self.data = 0, b""
        if shard.size < 0:
            raise SourceError(f"shard {shown(shard.key)!r}: its server says no size. Use one that does, or a copy.")
        # of a local shard little more than the headers is read
        self.piece = PIECE if is_url(shard.key) else 1 << 14

    def read(self, at: int, size: int) -> bytes:
        """At most ``size`` bytes from ``at``; fewer at the end."""
        if not self.begin <= at <= at + size <= self.begin + len(self.data):
            length = max(0, min(max(size, self.piece), self.shard.size - at))
            (found,) = self.storage.read([Range(self.shard.key, at, length, self.shard.stamp)])
            if isinstance(found, Exception):
                raise SourceError(f"shard {shown(self.shard.key)!r} cannot be read: {found}.") from found
            self.data = found
            self.begin = at
        return self.data[at - self.begin : at - self.begin + size]


def _dali(shard: Found, reader: _Reader, storage: Storage) -> list[Member] | None:
    """Members as an index file of ``wds2idx`` beside the shard lists them; None where there is none that fits."""
    if "?" in shard.key:
        return None
    folder, name = split(shard.key)
    place = join(folder, name.split(".", 1)[0] + ".idx")
    if not is_url(place) and not os.path.exists(place):
        return None
    (text,) = storage.read([Range(place)])
    if isinstance(text, Exception):
        if not isinstance(text, FileNotFoundError):
            log.warning("index: %s cannot be read, and is not used: %s", shown(place), text)
        return None
    try:
        found = _parse_dali(text, shard.size)
        # the first and the last header tell whether it belongs to this shard
        for member in (found[0], found[-1]):
            head = next(members(lambda at, n, o=member.offset: reader.read(o - BLOCK + at, n), # type: ignore[misc]
                                shard.size - member.offset + BLOCK, place=shown(shard.key)))  # fmt: skip
            if (head.name, head.size) != (member.name, member.size):
                raise ValueError(f"{member.name!r} is not where it says")
    except (ValueError, IndexError, StopIteration, SourceError) as error:
        log.warning("index: %s does not fit its shard, and is not used: %s", shown(place), error)
        return None
    log.info("index: %s is used", shown(place))
    return found


def _parse_dali(text: bytes, size: int) -> list[Member]:
    """Version 1.2: ``v1.2 samples``, and one line of ``extension offset size name`` for each member of a sample."""
    lines = text.rstrip(b"\n").split(b"\n")
    version, count = lines[0].split(b" ")
    if version != b"v1.2" or int(count) != len(lines) - 1:
        raise ValueError(f"{version.decode(errors='replace')!r:.20}, {len(lines) - 1} samples; v1.2 has names")
    found = []
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
            found.append(member)
    return found


def _load(files: list[str], rule: _Rule) -> dict[str, _Part]:
    """Shards that an index file knows; nothing where it is missing, of another version, or damaged."""
    for path in files:
        try:
            data = read_file(path, most=sys.maxsize)
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


def _save(files: list[str], rule: _Rule, parts: dict[str, _Part]) -> str | None:
    """Write the index file at the first place that takes it: whole, or not at all."""
    arrays, entries = io.BytesIO(), []
    for stamp, part in parts.items():
        entries.append({
            "stamp": stamp, "shard": part.shard, "left_out": part.left_out, "dropped": part.dropped,
            "other": sorted(part.other),
            "arrays": [_write_array(arrays, array) for array in (
                part.offsets, part.sizes, part.keys.blob.numpy(), part.keys.offsets.numpy(),
                part.labels.blob.numpy(), part.labels.offsets.numpy(),
            )],
        })  # fmt: skip
    header = json.dumps({"rule": rule, "shards": entries}).encode()
    body = header + arrays.getvalue()
    for path in files:
        folder = os.path.dirname(path)
        try:
            os.makedirs(folder, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".gpuaug-", suffix=".part", delete=False) as file:
                try:
                    file.write(_MAGIC + len(header).to_bytes(8, "little"))
                    file.write(hashlib.blake2b(body, digest_size=16).digest() + body)
                    file.flush()
                    os.fchmod(file.fileno(), 0o644)
                    os.replace(file.name, path)
                except BaseException:
                    os.unlink(file.name)
                    raise
            return path
        except OSError as error:
            log.info("index: not kept in %s: %s", folder, error)
    return None


def _write_array(file: io.BytesIO, array: NDArray[Any]) -> list[int]:
    file.write(array.tobytes())
    return [file.tell() - array.nbytes, len(array)]


def _read_part(entry: dict[str, Any], arrays: io.BytesIO, *, labelled: bool) -> _Part:
    """The samples of a shard; ValueError, TypeError, LookupError or OverflowError where a field is wrong."""

    def array(place: list[int], dtype: Any) -> NDArray[Any]:
        begin, count = place
        if type(begin) is not int or type(count) is not int or begin < 0 or count < 0:
            raise ValueError(f"an array is at {place!r:.100}")
        return np.frombuffer(arrays.getbuffer(), dtype=dtype, count=count, offset=begin).copy()

    def names(blob: list[int], offsets: list[int]) -> Names:
        at = array(offsets, np.int64)
        if not len(at) or at[0] or at[-1] != blob[1] or (np.diff(at) < 0).any():
            raise ValueError("its names are in disorder")
        return Names(torch.from_numpy(array(blob, np.uint8)), torch.from_numpy(at))

    lists = [entry["left_out"], entry["other"], [entry["shard"]]]
    if not all(isinstance(texts, list) and all(isinstance(text, str) for text in texts) for texts in lists):
        raise ValueError("its texts are none")
    if type(entry["dropped"]) is not int or entry["dropped"] < 0:
        raise ValueError(f"it counts {entry['dropped']!r:.100} samples left out")
    part = _Part(entry["shard"], left_out=entry["left_out"], dropped=entry["dropped"])
    offsets, sizes, key_blob, key_offsets, label_blob, label_offsets = entry["arrays"]
    part.offsets, part.sizes = array(offsets, np.int64), array(sizes, np.int32)
    part.keys, part.labels = names(key_blob, key_offsets), names(label_blob, label_offsets)
    part.other = set(entry["other"])
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
    """What a member says: a field of JSON; else a number, a name."""
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
        found = f"no field {error}: set `source.label_key`"
    except (ValueError, TypeError, RecursionError) as error:
        found = f"{type(error).__name__}: {error}"
    raise SourceError(f"shard {part.shard!r}: the {label} of {os.fsdecode(part.keys[i])!r} is no label ({found}).")


def _hint(parts: list[_Part], rule: _Rule) -> str:
    found = sorted({extension for part in parts for extension in part.other})
    if not found:
        return "They are empty."
    wanted = f"{', '.join(rule.extensions)}" + ("" if rule.label is None else f" with {rule.label}")
    return f"Their members end in {some(found)}; wanted: {wanted}. Set `source.extensions` and `source.labels`."
