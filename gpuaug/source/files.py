"""Image files below a folder or a URL: lists them, and reads them by number."""

from __future__ import annotations

import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from operator import attrgetter

from gpuaug.errors import GpuaugError, SourceError, printable
from gpuaug.source.classes import shortened
from gpuaug.source.index import Names
from gpuaug.source.local import LARGE
from gpuaug.source.paths import is_url, join, redact
from gpuaug.source.remote.storage import FileInfo, Range, Storage

log = logging.getLogger("gpuaug")

MOST_VISITS = 8  # visits of one folder through links; without a limit, n folders with links to each other have n! paths
LARGEST_TEXT = 1 << 24  # bytes; limit for an annotation file
_identity = attrgetter("st_dev", "st_ino")  # of a folder, from its status
TEXTS_AT_ONCE = 128  # annotation files that are read together, at most 2 GiB


class Files:
    """Image files by number. ``listing`` maps names of remote files to sizes and versions."""

    def __init__(
        self, root: str, names: Names, storage: Storage, listing: Mapping[str, FileInfo] | None = None
    ) -> None:
        self.root, self.names = root, names
        self._versions: Names | None = None  # versions of remote files, for the disk cache
        self._large: dict[int, int] = {}  # sizes of large remote files, by number
        if listing:
            files = [listing[os.fsdecode(name)] for name in names]
            self._large = {i: file.size for i, file in enumerate(files) if file.size > LARGE}
            if storage.remote.cache is not None:
                self._versions = Names.of([[file.version.encode() for file in files]])

    def range(self, index: int) -> Range:
        """The location of file ``index``, for :class:`Storage`."""
        version = "" if self._versions is None else self._versions[index].decode()
        path = join(self.root, os.fsdecode(self.names[index]))
        return Range(path, version=version, image=self._large.get(index, 0))


def texts(paths: Iterable[str], storage: Storage) -> Iterator[bytes | Exception]:
    """The bytes of each annotation file, or the exception that reading it raised."""
    if storage.remote.cache is not None:  # the cache would return old bytes for a changed file
        storage = Storage(replace(storage.remote, cache=None))
    ranges = (Range(path, most=LARGEST_TEXT) for path in paths)
    while together := list(islice(ranges, TEXTS_AT_ONCE)):
        yield from storage.read(together)


def read_text(path: str, storage: Storage) -> str:
    """The text of an annotation file; OSError or ReadError if the file cannot be read."""
    (data,) = texts([path], storage)
    if isinstance(data, Exception):
        raise data
    return data.decode("utf-8-sig", errors="surrogateescape")


def read_list(path: str, storage: Storage, *, key: str) -> list[str]:
    """The non-empty lines of a sample list; SourceError if one is repeated. ``key``: configuration key of ``path``."""
    try:
        lines = [line for line in map(str.strip, read_text(path, storage).split("\n")) if line]
    except (OSError, GpuaugError) as error:
        raise SourceError(
            f"`{key}` must name a FILE with one sample per line. Found: {redact(path)!r} ({error})."
        ) from error
    if not lines:
        raise SourceError(f"`{key}` must name a FILE with one sample per line. {redact(path)!r} is empty.")
    if len(set(lines)) < len(lines):
        twice = next(line for line, count in Counter(lines).items() if count > 1)
        raise SourceError(f"{redact(path)!r} must name each sample once. Found twice: {twice!r}.")
    return lines


def by_stem(tree: Tree, *, suffix: str = "", skip: Callable[[str], bool] = lambda name: False) -> dict[str, bytes]:
    """Map stems to paths. A stem is a path without ``suffix`` and extension. Files without ``suffix`` are left out."""
    found: dict[str, bytes] = {}
    place, ignored = redact(tree.root), 0
    for name in chain.from_iterable(tree.images(None)):
        text = os.fsdecode(name)
        if skip(text):
            continue
        stem = text[: -max(len(ending) for ending in tree.endings if text.lower().endswith(ending))]
        if not stem.endswith(suffix):
            ignored += 1
            continue
        stem = stem.removesuffix(suffix)
        if stem in found:
            raise SourceError(
                f"{os.fsdecode(found[stem])!r} and {text!r} in {place!r} differ only in their extension, so "
                "their annotations would be the same. Remove one of them, or set `source.extensions`."
            )
        found[stem] = name
    tree.warn()
    if ignored:
        log.info("source %s: %d images are ignored, because their names do not end in %r", place, ignored, suffix)
    return found


def listed(stems: Sequence[str], known: Mapping[str, bytes], *, place: str, root: str) -> list[bytes]:
    """The image path of each stem; SourceError if ``known`` lacks a stem. ``place``: the file that lists the stems."""
    if missing := [stem for stem in stems if stem not in known]:
        raise SourceError(
            f"{len(missing)} of the {len(stems)} samples in {redact(place)!r} have no image in {redact(root)!r}: "
            f"{shortened(missing)}. List paths without extension, relative to that folder."
        )
    return [known[stem] for stem in stems]


class Tree:
    """The images below a folder or URL. Below a URL, empty folders are unknown: object stores do not list them."""

    def __init__(self, root: str, storage: Storage, endings: tuple[str, ...], *, key: str = "source.root") -> None:
        self.root, self.endings = root, endings
        self.files: dict[str, FileInfo] = {}  # sizes and versions of remote images
        self.others: Counter[str] = Counter()  # number of files that are no images, by extension
        self.skipped: Counter[str] = Counter()  # number of skipped local folders, by reason
        self._first = ""  # the first skipped folder
        self._remote: dict[str, dict[str, list[str]]] = {}  # paths, by class folder and then by folder
        if not is_url(root):
            _check_folder(root, key)
            return
        for file in storage.find(root, key=key):
            if file.path.lower().endswith(endings):
                self.files[file.path] = file
                folder, _, _ = file.path.rpartition("/")
                self._remote.setdefault(folder.split("/", 1)[0], {}).setdefault(folder, []).append(file.path)
            else:
                self.others[_ending(file.path)] += 1

    def classes(self) -> tuple[list[str], int]:
        """Names of the folders directly in the root, and number of images directly in it."""
        if is_url(self.root):
            return [name for name in self._remote if name], len(self._remote.get("", {}).get("", []))
        entries = _scan(self.root)
        folders = [entry.name for entry in entries if _is_folder(entry)]
        images = [e for e in entries if e.name.lower().endswith(self.endings) and not _is_folder(e)]
        return folders, len(images)

    def images(self, folder: str | None) -> Iterator[list[bytes]]:
        """Yield the images of each folder, as paths relative to the root. ``folder``: a class folder; None: all."""
        if not is_url(self.root):
            yield from self._local_images(folder)
            return
        folders: dict[str, list[str]] = {}
        for first in self._remote if folder is None else [folder]:
            folders |= self._remote[first]
        for _, paths in sorted(folders.items()):
            yield [os.fsencode(path) for path in sorted(paths)]

    def _local_images(self, folder: str | None) -> Iterator[list[bytes]]:
        listed: list[tuple[str, list[str]]] = []  # folders and the names of their images
        visits: Counter[tuple[int, int]] = Counter()  # of each folder (device, inode) on paths with two or more links
        above = frozenset() if folder is None else frozenset([_identity(os.stat(self.root))])
        # breadth first and by name, so that every machine skips the same folders
        waiting = deque([("" if folder is None else f"{folder}/", above, 0)])
        while waiting:
            prefix, above, links = waiting.popleft()
            path = os.path.join(self.root, prefix[:-1]) if prefix else self.root
            try:
                identity = _identity(os.stat(path))
            except OSError as error:
                raise _unlisted(path, error) from error
            if identity in above:
                self._skip(path, "lead back to a folder above them")
                continue
            if links > 1 and visits[identity] == MOST_VISITS:
                self._skip(path, f"were already visited {MOST_VISITS} times through links inside linked folders")
                continue
            visits[identity] += links > 1
            names, below = [], above | {identity}
            for entry in sorted(_scan(path), key=lambda entry: entry.name):
                if _is_folder(entry):
                    waiting.append((f"{prefix}{entry.name}/", below, links + entry.is_symlink()))
                elif entry.name.lower().endswith(self.endings):
                    names.append(entry.name)
                else:
                    self.others[_ending(entry.name)] += 1
            if names:
                listed.append((prefix, names))
        # sort without the last "/", as torchvision sorts folder paths
        for prefix, names in sorted(listed, key=lambda item: item[0][:-1]):
            yield [os.fsencode(prefix + name) for name in names]

    def warn(self) -> None:
        """Log one line about the skipped folders, and one about the files that are no images."""
        if others := self.others:
            most = sorted(others.items(), key=lambda item: (-item[1], item[0]))[:8]
            counts = ", ".join(f"{count} {printable(ending)}" for ending, count in most)
            more = ", ..." if len(others) > 8 else ""
            log.info("source %s: skipped %d files: %s%s", redact(self.root), others.total(), counts, more)
        if self.skipped:
            log.warning(
                "source %s: %d folders are skipped: %s; the first is %r",
                self.root, self.skipped.total(),
                ", ".join(f"{count} {reason}" for reason, count in self.skipped.items()), self._first,
            )  # fmt: skip

    def _skip(self, path: str, reason: str) -> None:
        self._first = self._first or path
        self.skipped[reason] += 1


def _check_folder(root: str, key: str) -> None:
    if not os.path.exists(root):
        above = root
        while not os.path.exists(above):
            above = os.path.dirname(above)
        raise SourceError(f"`{key}` does not exist: {root!r}. This part of the path exists: {above!r}.")
    if not os.path.isdir(root):
        raise SourceError(f"`{key}` must be a folder. Found a file: {root!r}.")


def _ending(name: str) -> str:
    return os.path.splitext(name)[1].lower() or "without extension"


def _scan(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise _unlisted(folder, error) from error


def _unlisted(folder: str, error: OSError) -> SourceError:
    return SourceError(f"folder {folder!r} cannot be listed ({error}). Grant read access, or move the folder away.")


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # for example a link to itself
        return False
