"""A folder of image files, with one class per subfolder or without labels."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gpuaug.errors import ConfigError, SourceError
from gpuaug.source.classes import class_mapping, some
from gpuaug.source.filters import Listed, extensions_of
from gpuaug.source.index import Names, share
from gpuaug.source.remote.storage import LARGE, Found, Range, Remote, Storage, is_url, join, locate, read_file, shown

log = logging.getLogger("gpuaug")

# torchvision's IMG_EXTENSIONS, and gif
IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")

LINKED = 8  # times that a folder is entered through links in links: n folders that all link to each other have n! paths
TOO_LONG = (errno.ENAMETOOLONG, errno.ELOOP)  # more than 4096 bytes or 40 links: nothing below could be opened


class FolderSource(Listed):
    """``root/<class>/**/<image>`` in the order of torchvision's ImageFolder: classes, folders and files sorted.

    Every name with an image extension is listed, unread; a broken link or an empty file becomes that sample's fault.
    Names need not be UTF-8. Links to folders are followed, each as often as it is there, but a folder is never entered
    below itself; and where what a link leads to has links in turn, what these lead to is entered at most eight times
    per class. Folders whose path the system finds too long are left out. One warning counts what was not entered.

    Args:
        root: the folder, or its URL (``s3://bucket/train``).
        labels: ``folder``: the first subfolder is the class; ``none``: images anywhere below ``root``, no labels.
        classes: the mapping of another run, for evaluation: names in the order of their labels, a mapping from name to
            label, or a FILE: .json with either of them, else text with one name per line. Its classes need no folder
            here; a folder that it does not know is an error.
        subset: an int takes so many samples and a float that share of them, evenly spread over the sorted files (so
            that classes keep their proportions; the same ones every time); else a FILE or sequence of sample numbers.
        exclude: a FILE of samples to leave out: JSON lines with ``key``, as ``faults.file`` holds them. Left out after
            ``subset`` is taken.
        extensions: what a name must end in, in any case of letters.
        remote: how to read from a URL.

    Samples keep their numbers under ``subset`` and ``exclude``; ``source[i]`` takes that number.

    Raises:
        SourceError: if the folder or a file cannot be used, or no images are left.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        labels: Literal["folder", "none"] | None = "folder",
        classes: Sequence[str] | Mapping[str, int] | str | os.PathLike[str] | None = None,
        subset: int | float | Sequence[int] | Tensor | str | os.PathLike[str] | None = None,
        exclude: str | os.PathLike[str] | None = None,
        extensions: Sequence[str] = IMAGE_EXTENSIONS,
        remote: Remote | None = None,
    ) -> None:
        if labels is not None and (not isinstance(labels, str) or labels not in ("folder", "none")):
            raise ConfigError(f"`source.labels` must be folder or none. Found: {labels!r}.")
        endings = extensions_of(extensions)
        self.root = locate(root)
        self._storage = Storage(remote)
        self._stamps: Names | None = None
        self._large: dict[int, int] = {}  # bytes of remote files, by number
        began = time.monotonic()
        tree: _Folder | _Url = (
            _Url(self.root, self._storage, endings) if is_url(self.root) else _Folder(self.root, endings)
        )
        if labels == "folder":
            self._list_classes(None if classes is None else class_mapping(classes), tree, endings)
        elif classes is not None:
            raise ConfigError("`source.classes` names the folders' labels, but `source.labels` is none. Drop one.")
        else:
            self._names = Names.of(_encode(block) for block in tree.images(None))
            if not len(self._names):
                raise SourceError(f"no images in {shown(self.root)!r}: no file below it ends in {', '.join(endings)}.")
        if isinstance(tree, _Url):
            self._note(tree.files)
        else:
            tree.tell()
        self._activate(subset, exclude, began=began)

    def _items(self, numbers: Sequence[int]) -> list[Any]:
        if is_url(self.root):
            return super()._items(numbers)
        return [self._local(i) for i in numbers]

    def _local(self, index: int) -> Any:
        try:
            path = os.path.join(os.fsencode(self.root), self._names[index])
            return read_file(path, image=True), self._label_of(index)
        except OSError as error:
            return error

    def _range(self, index: int) -> Range:
        stamp = "" if self._stamps is None else self._stamps[index].decode()
        place = join(self.root, os.fsdecode(self._names[index]))
        return Range(place, stamp=stamp, image=self._large.get(index, 0))

    def _note(self, files: Mapping[str, Found]) -> None:
        """Keep of a remote listing what reading needs; without a disk cache that is next to nothing per sample."""
        keys = [os.fsdecode(name) for name in self._names]
        self._large = {i: files[key].size for i, key in enumerate(keys) if files[key].size > LARGE}
        if self._storage.remote.cache is not None:
            self._stamps = Names.of([[files[key].stamp.encode() for key in keys]])

    def _list_classes(self, given: dict[str, int] | None, tree: _Folder | _Url, endings: tuple[str, ...]) -> None:
        folders, beside = tree.classes()
        folders.sort()
        if not folders:
            remedy = "Set `source.labels=none` to read them without labels." if beside else "Is `source.root` right?"
            raise SourceError(f"no class folders in {self.root!r}, and {beside} images directly in it. {remedy}")
        if beside:
            log.warning("source %s: %d images beside the class folders are left out", self.root, beside)
        mapping = {name: label for label, name in enumerate(folders)} if given is None else given
        if unknown := [name for name in folders if name not in mapping]:
            raise SourceError(
                f"`source.classes` has {len(mapping)} classes and knows nothing of {len(unknown)} of the "
                f"{len(folders)} folders in {self.root!r}: {some(unknown)}. Add them to it, or move them away."
            )
        counts: list[int] = []

        def blocks() -> Iterator[list[bytes]]:
            for folder in folders:
                counts.append(0)
                for block in tree.images(folder):
                    counts[-1] += len(block)
                    yield _encode(block)

        self._names = Names.of(blocks())
        empty = [folder for folder, count in zip(folders, counts, strict=True) if not count]
        if not len(self._names):
            raise SourceError(
                f"no images in {self.root!r}: {len(folders)} class folders ({some(folders)}), but no file in them "
                f"ends in {', '.join(endings)}."
            )
        if empty and given is None:
            raise SourceError(
                f"{len(empty)} of the {len(folders)} class folders in {self.root!r} have no images: {some(empty)}. "
                "Remove them, or give `source.classes`, where a class may be without images."
            )
        self.labels = share(
            torch.from_numpy(np.repeat(np.array([mapping[f] for f in folders], dtype=np.int64), counts))
        )
        self.class_to_idx = dict(sorted(mapping.items(), key=lambda item: item[1]))
        self.classes = list(self.class_to_idx)


class _Folder:
    """The images of a local folder."""

    def __init__(self, root: str, endings: tuple[str, ...]) -> None:
        self.root, self.endings = root, endings
        self.skipped: Counter[str] = Counter()  # folders that are not entered, by reason
        self._first = ""  # of them
        if not os.path.exists(root):
            above = root
            while not os.path.exists(above):
                above = os.path.dirname(above)
            raise SourceError(f"`source.root` does not exist: {root!r}. The part that exists is {above!r}.")
        if not os.path.isdir(root):
            raise SourceError(f"`source.root` must be a folder. Found a file: {root!r}.")

    def classes(self) -> tuple[list[str], int]:
        """Folders directly in the root, and how many images are beside them."""
        folders, beside = [], 0
        for entry in _scan(self.root):
            if _is_folder(entry):
                folders.append(entry.name)
            else:
                beside += entry.name.lower().endswith(self.endings)
        return folders, beside

    def images(self, folder: str | None) -> Iterator[list[str]]:
        """Keys of the images below one of these folders, or of all, in the order of ``sorted(os.walk(...))``."""
        top = [] if folder is None else [folder]
        found: list[tuple[str, list[str]]] = []
        entered: Counter[tuple[int, int]] = Counter()  # through links in links, by device and inode
        above = frozenset() if folder is None else frozenset(filter(None, [self._identity(self.root)]))
        # the shortest paths first and by name, so that what is left out is the same on every machine
        waiting = deque([("".join(f"{name}/" for name in top), above, 0)])
        while waiting:
            prefix, above, links = waiting.popleft()
            path = os.path.join(self.root, prefix[:-1]) if prefix else self.root
            identity = self._identity(path)
            if identity is None:
                continue
            if identity in above:
                self._skip(path, "lead back to a folder above them")
                continue
            if links > 1:
                if entered[identity] == LINKED:
                    self._skip(path, f"were reached {LINKED} times through links in links")
                    continue
                entered[identity] += 1
            names, below = [], above | {identity}
            for entry in sorted(_scan(path), key=lambda entry: entry.name):
                if _is_folder(entry):
                    waiting.append((f"{prefix}{entry.name}/", below, links + entry.is_symlink()))
                elif entry.name.lower().endswith(self.endings):
                    names.append(entry.name)
            if names:
                found.append((prefix, names))
        # without the last "/": torchvision sorts the folders' paths
        for prefix, names in sorted(found, key=lambda item: item[0][:-1]):
            yield [prefix + name for name in names]

    def tell(self) -> None:
        """Say once what was not entered."""
        if self.skipped:
            log.warning(
                "source %s: %d folders are not entered: %s; the first is %r",
                self.root, self.skipped.total(),
                ", ".join(f"{count} {reason}" for reason, count in self.skipped.items()), self._first,
            )  # fmt: skip

    def _identity(self, path: str) -> tuple[int, int] | None:
        """Device and inode; None where the path is too long to be used."""
        try:
            status = os.stat(path)
        except OSError as error:
            if error.errno in TOO_LONG:
                self._skip(path, "have a path too long to be opened")
                return None
            raise _unlisted(path, error) from error
        return status.st_dev, status.st_ino

    def _skip(self, path: str, reason: str) -> None:
        self._first = self._first or path
        self.skipped[reason] += 1


class _Url:
    """The images below a URL. Folders without files are unknown to object stores, and have no part in it."""

    def __init__(self, root: str, storage: Storage, endings: tuple[str, ...]) -> None:
        self.files = {file.key: file for file in storage.find(root) if file.key.lower().endswith(endings)}
        self.by_folder: dict[str, dict[str, list[str]]] = {}
        for key in self.files:
            above, _, _ = key.rpartition("/")
            first = above.split("/", 1)[0]
            self.by_folder.setdefault(first, {}).setdefault(above, []).append(key)

    def classes(self) -> tuple[list[str], int]:
        """As of :class:`_Folder`."""
        return [name for name in self.by_folder if name], len(self.by_folder.get("", {}).get("", []))

    def images(self, folder: str | None) -> Iterator[list[str]]:
        """As of :class:`_Folder`."""
        found: dict[str, list[str]] = {}
        for first in self.by_folder if folder is None else [folder]:
            found |= self.by_folder[first]
        for above in sorted(found):
            yield sorted(found[above])


def _scan(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise _unlisted(folder, error) from error


def _unlisted(folder: str, error: OSError) -> SourceError:
    return SourceError(f"folder {folder!r} cannot be listed ({error}). Give read access, or move it away.")


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself: listed as a name, if it has an image's
        return False


def _encode(block: list[str]) -> list[bytes]:
    return [os.fsencode(key) for key in block]
