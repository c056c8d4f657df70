"""A folder of images and a folder of their masks."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence

from gpuaug import checks
from gpuaug.errors import ConfigError, SourceError
from gpuaug.source.base import Classes, ListedSource
from gpuaug.source.classes import class_mapping, shortened
from gpuaug.source.files import Files, Tree, by_stem, listed, read_list
from gpuaug.source.filters import IMAGE_EXTENSIONS, Subset, extensions_of
from gpuaug.source.index import Names
from gpuaug.source.paths import absolute, redact
from gpuaug.source.remote.storage import Remote, Storage

log = logging.getLogger("gpuaug")


class MaskFolderSource(ListedSource):
    """Images in one folder, and their masks in another folder under the same paths.

    The mask of ``images/a/x<image_suffix>.jpg`` is ``masks/a/x<mask_suffix>.png``. Masks without an image are ignored.
    A sample is ``(bytes, Target(mask=bytes))``.

    Arguments for well-known data sets:

    - ADE20K: ``images="images/training", masks="annotations/training"``
    - Cityscapes: ``images="leftImg8bit/train", masks="gtFine/train", image_suffix="_leftImg8bit",
      mask_suffix="_gtFine_labelIds"``
    - Pascal VOC: ``images="JPEGImages", masks="SegmentationClass", list="ImageSets/Segmentation/train.txt"``

    Args:
        root: folder or URL that contains the two folders; None: ``images`` and ``masks`` are complete paths or URLs.
        images: folder of the images: relative to ``root``, an absolute path, or a URL.
        masks: folder of the masks, in the same form.
        image_suffix: text before the extension of each image. Images without this text are ignored.
        mask_suffix: text before the extension of each mask.
        list: a FILE that lists the samples in order. Its path is relative to ``root``. Each line is the path of an
            image in the folder of images, without suffix and extension. None: all images.
        extensions: file name extensions of images; case is ignored.
        mask_extension: file name extension of masks; case is ignored.
        classes: names of the classes, as in :class:`FolderSource`. They do not change the numbers in the masks.
        subset, exclude: as in :class:`FolderSource`.
        remote: how to read from URLs.

    Raises:
        SourceError: if a folder or a FILE cannot be used, no image is left, or images have no mask.

    >>> source = MaskFolderSource("data/ade20k", images="images/training", masks="annotations/training")
    >>> data, target = source[0]
    >>> mask = target.mask
    """

    target_kinds = frozenset({"masks"})

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        images: str | os.PathLike[str] = "images",
        masks: str | os.PathLike[str] = "masks",
        image_suffix: str = "",
        mask_suffix: str = "",
        list: str | os.PathLike[str] | None = None,
        extensions: Sequence[str] = IMAGE_EXTENSIONS,
        mask_extension: str = ".png",
        classes: Classes = None,
        subset: Subset = None,
        exclude: str | os.PathLike[str] | None = None,
        remote: Remote | None = None,
    ) -> None:
        for key, value in (("image_suffix", image_suffix), ("mask_suffix", mask_suffix)):
            if not isinstance(value, str) or "/" in value:
                raise ConfigError(f"`source.{key}` must be the end of a file name. Found: {value!r}.")
        endings = extensions_of(extensions)
        mask_endings = extensions_of([checks.text("source.mask_extension", mask_extension)])
        self._storage = Storage(remote)
        self.root = absolute(images, key="source.images", below=root)
        self.masks = absolute(masks, key="source.masks", below=root)
        began = time.monotonic()
        tree = Tree(self.root, self._storage, endings, key="source.images")
        mask_tree = Tree(self.masks, self._storage, mask_endings, key="source.masks")
        mask_ending = mask_suffix + mask_endings[0]
        pictures = by_stem(tree, suffix=image_suffix, skip=lambda name: self._is_mask(name, mask_ending))
        known = by_stem(mask_tree, suffix=mask_suffix)
        if list is not None:
            file = absolute(list, key="source.list", below=root)
            stems = read_list(file, self._storage, key="source.list")
            pictures = dict(zip(stems, listed(stems, pictures, place=file, root=self.root), strict=True))
        if not pictures:
            raise SourceError(
                f"no images in {redact(self.root)!r}: no file below it ends in {image_suffix}"
                f"{f', {image_suffix}'.join(endings)}."
            )
        self._check_pairs(pictures, known, mask_ending, is_whole=list is None)
        self._names = Names.of([[*pictures.values()]])
        self._files = Files(self.root, self._names, self._storage, tree.files)
        mask_names = Names.of([[known[stem] for stem in pictures]])
        self._mask_files = Files(self.masks, mask_names, self._storage, mask_tree.files)
        if classes is not None:
            self._set_classes(class_mapping(classes))
        self._activate(subset, exclude, began=began)

    def _is_mask(self, text: str, ending: str) -> bool:
        """Whether a file below the folder of images is a mask. Masks may lie in this folder, or below it."""
        if self.masks == self.root:
            return text.lower().endswith(ending.lower())
        return f"{self.root}/{text}".startswith(f"{self.masks}/") and self.masks.startswith(f"{self.root}/")

    def _check_pairs(self, images: dict[str, bytes], masks: dict[str, bytes], ending: str, *, is_whole: bool) -> None:
        if alone := [stem for stem in images if stem not in masks]:
            raise SourceError(
                f"{len(alone)} of {len(images)} images in {redact(self.root)!r} have no mask: "
                f"{shortened([os.fsdecode(images[stem]) for stem in alone])}. In {redact(self.masks)!r} there is no "
                f"{alone[0] + ending!r}. Check `source.image_suffix`, `source.mask_suffix` and "
                "`source.mask_extension`, or list only the images that have masks, in `source.list`."
            )
        if is_whole and (unused := len(masks) - len(images)):
            log.info("source %s: %d masks are ignored, because they have no image", redact(self.masks), unused)
