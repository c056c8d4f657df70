"""A folder of image files, with one class per subfolder or without labels."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from gpuaug import checks
from gpuaug.errors import ConfigError, SourceError
from gpuaug.source.base import Classes, ListedSource
from gpuaug.source.classes import class_mapping, numbers_of, shortened
from gpuaug.source.files import Files, Tree
from gpuaug.source.filters import IMAGE_EXTENSIONS, Subset, extensions_of
from gpuaug.source.index import Names
from gpuaug.source.paths import absolute, redact
from gpuaug.source.remote.storage import Remote, Storage

log = logging.getLogger("gpuaug")


class FolderSource(ListedSource):
    """Images ``root/<class>/**/<image>``, sorted by class, folder and file name, as in torchvision's ImageFolder.

    Files are listed by their extension and not opened, so a broken link or an empty file is a fault of its sample.
    Links to folders are followed, except to a folder above the link.

    Args:
        root: the folder, or its URL (``s3://bucket/train``).
        labels: ``folder``: the first subfolder is the class; ``none``: all images below ``root``, without labels.
        classes: a list of names in the order of their labels, a mapping from name to label, or a FILE with one of these
            (.json, or text with one name per line). For evaluation, use the mapping of the training run. A class
            without a folder is allowed. A folder that is not a class is an error.
        subset: a count or a fraction of samples, or a FILE or sequence of sample numbers. A count or fraction is spread
            evenly over the sorted files, so classes keep their proportions, and every run gets the same samples.
        exclude: a FILE of samples to leave out after ``subset`` is applied. Each line is JSON with the field ``key``,
            as in ``faults.file``. ``subset`` and ``exclude`` do not change the sample numbers.
        extensions: file name extensions of images; case is ignored.
        remote: how to read from a URL.

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
        began = time.monotonic()
        tree = Tree(self.root, self._storage, endings)
        if labels == "folder":
            self._list_classes(None if classes is None else class_mapping(classes), tree, endings)
        elif classes is not None:
            raise ConfigError("`source.classes` has no effect if `source.labels` is none. Remove one of them.")
        else:
            self._names = Names.of(tree.images(None))
            if not len(self._names):
                raise SourceError(
                    f"no images in {redact(self.root)!r}: no file below it ends in {', '.join(endings)}. "
                    "For other files, set `source.extensions`."
                )
        tree.warn()
        self._files = Files(self.root, self._names, self._storage, tree.files)
        self._activate(subset, exclude, began=began)

    def _list_classes(self, given: dict[str, int] | None, tree: Tree, endings: tuple[str, ...]) -> None:
        place = redact(self.root)
        folders, beside = tree.classes()
        folders.sort()
        if not folders:
            remedy = "Set `source.labels=none` to read images without labels." if beside else "Check `source.root`."
            raise SourceError(f"no class folders in {place!r}. Images directly in this folder: {beside}. {remedy}")
        if beside:
            log.warning("source %s: %d images are ignored, because they are not in a class folder", place, beside)
        mapping = {name: label for label, name in enumerate(folders)} if given is None else given
        remedy = "Add them to `source.classes`, or move the folders away."
        labels = numbers_of(folders, mapping, f"of the {len(folders)} folders in {place!r}", remedy=remedy)
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
                f"no images in {place!r}: {len(folders)} class folders ({shortened(folders)}), but no file in them "
                f"ends in {', '.join(endings)}. For other files, set `source.extensions`."
            )
        if empty and given is None:
            raise SourceError(
                f"{len(empty)} of the {len(folders)} class folders in {place!r} have no images: {shortened(empty)}. "
                "Remove these folders, or set `source.classes`, which may have classes without images."
            )
        self._set_labels(np.repeat(labels, list(counts.values())), classes=mapping)
