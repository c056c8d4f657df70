"""A folder of image files, with one class per subfolder or without labels."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from gpuaug import checks
from gpuaug.errors import ConfigError, SourceError
from gpuaug.source.base import Classes, ListedSource
from gpuaug.source.classes import class_mapping, some
from gpuaug.source.filters import IMAGE_EXTENSIONS, Subset, extensions_of
from gpuaug.source.index import Names
from gpuaug.source.local import LARGE, read_file
from gpuaug.source.paths import absolute, is_url, join, redact
from gpuaug.source.remote.storage import Range, Remote, Storage

log = logging.getLogger("gpuaug")

MOST_VISITS = 8  # of one folder, through links in linked folders: n folders that link to each other have n! paths
TOO_LONG = (errno.ENAMETOOLONG, errno.ELOOP)  # paths of more than 4096 bytes or 40 links cannot be opened


class FolderSource(ListedSource):
    """``root/<class>/**/<image>`` in the order of torchvision's ImageFolder: classes, folders and files sorted.

    Every file with an image extension is listed without opening it. So a broken link or an empty file becomes a fault
    of its sample. Names need not be UTF-8. Links to folders are followed, except to a folder above the link. Through
    links inside linked folders, each folder is visited at most eight times per class. Folders whose path is too long
    for the system are skipped. One warning counts the skipped folders.

    Args:
        root: the folder, or its URL (``s3://bucket/train``).
        labels: ``folder``: the first subfolder is the class; ``none``: all images below ``root``, without labels.
        classes: class mapping of another run, for evaluation. Names in the order of their labels, a mapping from name
            to label, or a FILE: .json with names or a mapping, else text with one name per line. A class without a
            folder is allowed; a folder that is not a class is an error.
        subset: a number or a fraction of samples, spread evenly over the sorted files: classes keep their proportions,
            and every run gets the same samples. Or a FILE or sequence of sample numbers.
        exclude: a FILE of samples to leave out: JSON lines with ``key``, as ``faults.file`` writes them. Applied after
            ``subset``.
        extensions: file name extensions of images; case is ignored.
        remote: how to read from a URL.

    ``subset`` and ``exclude`` do not renumber the samples: ``source[i]`` takes the number in the whole folder.

    Raises:
        SourceError: if the folder or a FILE cannot be used, or no image is left.

    >>> source = FolderSource("data/train", subset=0.1)
    >>> data, label = source[0]
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        labels: Literal["folder", "none"] | None = "folder",
        classes: Classes = None,
        subset: Subset = None,
        exclude: str | os.PathLike[str] | None = None,
        extensions: Sequence[str] = IMAGE_EXTENSIONS,
        remote: Remote | None = None,
    ) -> None:
        if labels is not None:
            checks.one_of("source.labels", labels, ("folder", "none"))
        endings = extensions_of(extensions)
        self.root = absolute(root)
        self._storage = Storage(remote)
        self._versions: Names | None = None  # versions of remote files, for the disk cache
        self._large: dict[int, int] = {}  # sizes of large remote files, by sample number
        began = time.monotonic()
        tree = _UrlTree(self.root, self._storage, endings) if is_url(self.root) else _LocalTree(self.root, endings)
        if labels == "folder":
            self._list_classes(None if classes is None else class_mapping(classes), tree, endings)
        elif classes is not None:
            raise ConfigError("`source.classes` numbers the classes, but `source.labels` is none. Remove one of them.")
        else:
            self._names = Names.of(tree.images(None))
            if not len(self._names):
                raise SourceError(f"no images in {redact(self.root)!r}: no file below it ends in {', '.join(endings)}.")
        if isinstance(tree, _LocalTree):
            tree.warn()
        else:  # keep only what reading needs: versions for a disk cache, and the sizes of large files
            files = [tree.files[os.fsdecode(name)] for name in self._names]
            self._large = {i: file.size for i, file in enumerate(files) if file.size > LARGE}
            if self._storage.remote.cache is not None:
                self._versions = Names.of([[file.version.encode() for file in files]])
        self._activate(subset, exclude, began=began)

    def _read(self, numbers: Sequence[int]) -> list[Any]:
        return super()._read(numbers) if is_url(self.root) else [self._read_local(i) for i in numbers]

    def _read_local(self, index: int) -> Any:
        try:
            path = os.path.join(os.fsencode(self.root), self._names[index])
            return read_file(path, image=True), self._label_of(index)
        except OSError as error:
            return error

    def _range(self, index: int) -> Range:
        version = "" if self._versions is None else self._versions[index].decode()
        path = join(self.root, os.fsdecode(self._names[index]))
        return Range(path, version=version, image=self._large.get(index, 0))

    def _list_classes(
        self, given: dict[str, int] | None, tree: _LocalTree | _UrlTree, endings: tuple[str, ...]
    ) -> None:
        folders, beside = tree.classes()
        folders.sort()
        if not folders:
            remedy = "Set `source.labels=none` to read images without labels." if beside else "Check `source.root`."
            raise SourceError(f"no class folders in {self.root!r}. Images directly in this folder: {beside}. {remedy}")
        if beside:
            log.warning("source %s: %d images are ignored, because they are not in a class folder", self.root, beside)
        mapping = {name: label for label, name in enumerate(folders)} if given is None else given
        if unknown := [name for name in folders if name not in mapping]:
            raise SourceError(
                f"`source.classes` has {len(mapping)} classes, but lacks {len(unknown)} of the {len(folders)} folders "
                f"in {self.root!r}: {some(unknown)}. Add them to `source.classes`, or move the folders away."
            )
        counts = dict.fromkeys(folders, 0)

        def blocks() -> Iterator[list[bytes]]:
            for folder in folders:
                for block in tree.images(folder):
                    counts[folder] += len(block)
                    yield block

        self._names = Names.of(blocks())
        empty = [folder for folder, count in counts.items() if not count]
        if not len(self._names):
            raise SourceError(
                f"no images in {self.root!r}: {len(folders)} class folders ({some(folders)}), but no file in them "
                f"ends in {', '.join(endings)}."
            )
        if empty and given is None:
            raise SourceError(
                f"{len(empty)} of the {len(folders)} class folders in {self.root!r} have no images: {some(empty)}. "
                "Remove these folders, or set `source.classes`, which may have classes without images."
            )
        labels = np.array([mapping[folder] for folder in folders], dtype=np.int64)
        self._set_labels(np.repeat(labels, list(counts.values())), classes=mapping)


class _LocalTree:
    """The images below a local folder."""

    def __init__(self, root: str, endings: tuple[str, ...]) -> None:
        self.root, self.endings = root, endings
        self.skipped: Counter[str] = Counter()  # number of skipped folders, by reason
        self._first = ""  # the first skipped folder
        if not os.path.exists(root):
            above = root
            while not os.path.exists(above):
                above = os.path.dirname(above)
            raise SourceError(f"`source.root` does not exist: {root!r}. This part of the path exists: {above!r}.")
        if not os.path.isdir(root):
            raise SourceError(f"`source.root` must be a folder. Found a file: {root!r}.")

    def classes(self) -> tuple[list[str], int]:
        """Names of the folders directly in the root, and number of images directly in it."""
        entries = _scan(self.root)
        folders = [entry.name for entry in entries if _is_folder(entry)]
        images = [e for e in entries if e.name.lower().endswith(self.endings) and not _is_folder(e)]
        return folders, len(images)

    def images(self, folder: str | None) -> Iterator[list[bytes]]:
        """Keys of the images below a class folder (None: root), one list per folder, as in ``sorted(os.walk(...))``."""
        listed: list[tuple[str, list[str]]] = []  # folder, names of its images
        visits: Counter[tuple[int, int]] = Counter()  # through links inside linked folders, by device and inode
        above = frozenset() if folder is None else frozenset([_identity(os.stat(self.root))])
        # breadth first and by name, so that every machine skips the same folders
        waiting = deque([("" if folder is None else f"{folder}/", above, 0)])
        while waiting:
            prefix, above, links = waiting.popleft()
            path = os.path.join(self.root, prefix[:-1]) if prefix else self.root
            try:
                identity = _identity(os.stat(path))
            except OSError as error:
                if error.errno not in TOO_LONG:
                    raise _unlisted(path, error) from error
                self._skip(path, "have a path that is too long to open")
                continue
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
            if names:
                listed.append((prefix, names))
        # sort without the last "/", as torchvision sorts folder paths
        for prefix, names in sorted(listed, key=lambda item: item[0][:-1]):
            yield [os.fsencode(prefix + name) for name in names]

    def warn(self) -> None:
        """Log one line about the skipped folders."""
        if self.skipped:
            log.warning(
                "source %s: %d folders are skipped: %s; the first is %r",
                self.root, self.skipped.total(),
                ", ".join(f"{count} {reason}" for reason, count in self.skipped.items()), self._first,
            )  # fmt: skip

    def _skip(self, path: str, reason: str) -> None:
        self._first = self._first or path
        self.skipped[reason] += 1


class _UrlTree:
    """The images below a URL. Empty folders are ignored, because object stores do not list them."""

    def __init__(self, root: str, storage: Storage, endings: tuple[str, ...]) -> None:
        self.files = {file.path: file for file in storage.find(root) if file.path.lower().endswith(endings)}
        self.by_class: dict[str, dict[str, list[str]]] = {}  # first folder -> folder -> keys
        for key in self.files:
            folder, _, _ = key.rpartition("/")
            self.by_class.setdefault(folder.split("/", 1)[0], {}).setdefault(folder, []).append(key)

    def classes(self) -> tuple[list[str], int]:
        """Names of the folders directly in the root, and number of images directly in it."""
        return [name for name in self.by_class if name], len(self.by_class.get("", {}).get("", []))

    def images(self, folder: str | None) -> Iterator[list[bytes]]:
        """Keys of the images below a class folder (None: root), one list per folder."""
        folders: dict[str, list[str]] = {}
        for first in self.by_class if folder is None else [folder]:
            folders |= self.by_class[first]
        for _, keys in sorted(folders.items()):
            yield [os.fsencode(key) for key in sorted(keys)]


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
    except OSError:  # a link to itself; listed as a file if its name has an image extension
        return False


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
