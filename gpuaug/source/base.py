"""Base classes of sources, the keys of samples in files, and the checks of manifests."""

from __future__ import annotations

import hashlib
import json
import logging
import operator
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.batch import Target
from gpuaug.errors import ReadError, SourceError
from gpuaug.source.classes import class_mapping, encode, shortened
from gpuaug.source.extra import ExtraNames
from gpuaug.source.files import Files
from gpuaug.source.filters import Subset, active
from gpuaug.source.index import Names, locate, share
from gpuaug.source.object_columns import class_names, column_values, read_objects
from gpuaug.source.objects import ObjectTable, checked
from gpuaug.source.paths import is_url, redact
from gpuaug.source.remote.storage import Range, Storage

log = logging.getLogger("gpuaug")

Classes = Sequence[str] | Mapping[str, int] | str | os.PathLike[str] | None


class Source:
    """A source, made of any object with ``len(object)`` and ``object[i] -> (bytes, label)``. Base of all sources.

    A sample is ``(bytes, label)``, or ``(bytes, label, extra)``. The extra is any value that can be pickled, such as a
    caption. ``batch.extra`` holds the extras unchanged.

    Args:
        samples: the object. It may have any of the attributes and methods below, and torchvision's ``targets``, which
            are labels.
        indices: int64 ``[len]``, numbers of the samples to use, in any order; None: all.

    Attributes:
        indices: int64 ``[len]``, ascending numbers of the active samples (those in use); None: 0 .. len - 1.
        positions: ``indices`` in the given order, if samplers and weights refer to it; else None.
        labels: int64 ``[N]`` by sample number; None if there are no labels, or if a label is known only after reading.
        classes: class names in the order of their labels. ``class_to_idx`` maps them to labels.
        root: the folder or URL of the samples; None: not known.
        remote: the :class:`Remote` with which URLs are read; None: the source reads no URLs.
        extra: the names of the extra fields; None: not known.
        label: ``source.label(i)`` returns the label of a sample without reading its bytes. Samples that cannot be read
            get this label. None: they get their value in ``labels``.
        read_many: ``source.read_many(numbers)`` returns a list of samples or exceptions.
        mapped: True if the bytes are memory-mapped.
        target_kinds: a set of ``masks``, ``boxes``, ``keypoints`` and ``corners`` (of oriented boxes). A sample is then
            ``(bytes, gpuaug.Target)``.
        num_keypoints: number of keypoints of an object.
        flip_pairs: for each keypoint, the number of its mirror image.
        image_ids: int64 ``[N]``, the id of each sample for evaluation, such as COCO's; None: samples have only numbers.
        category_ids: int64 ``[C]``, the id of each label for evaluation; None: labels have only numbers.
        mask_path: ``source.mask_path(i)`` is the path of the mask of a sample, for messages; None if it has no file.
        objects_digest: ``source.objects_digest()`` is a hash of all objects.
        row_count, sample_count: numbers of rows and samples of a source that has other bytes in other epochs, else 0.
        augmented_by: the settings that made the images, if they are already augmented; see :class:`PackedSource`.
        thread_safe: True if several threads may call ``source[i]`` at the same time. A worker then reads up to
            ``read_threads`` samples at a time. Without it, and with ``read_many``, a worker uses one thread.

    >>> source = Source([(b"...", 0), (b"...", 1)])
    >>> source[1], source.key(1)
    ((b'...', 1), '1')
    """

    indices: Tensor | None = None
    labels: Tensor | None = None
    classes: list[str] | None = None
    class_to_idx: dict[str, int] | None = None
    num_classes: Any = None  # int; Any as below
    image_ids: Tensor | None = None
    category_ids: Tensor | None = None
    target_kinds: frozenset[str] | None = None
    num_keypoints: int | None = None
    flip_pairs: tuple[int, ...] | None = None
    mapped = False
    # Any, because a subclass may define these as methods, properties or attributes
    thread_safe: Any = False
    label: Any = None
    read_many: Any = None
    mask_path: Any = None
    objects_digest: Any = None
    row_count = sample_count = 0  # 0: equal to the number of samples
    augmented_by: dict[str, Any] | None = None
    # not taken from the object
    wrapped: Any = None  # the object
    positions: Tensor | None = None
    root: str | None = None
    remote: Any = None
    extra: ExtraNames | None = None

    def __init__(self, samples: Any, *, indices: Tensor | None = None) -> None:
        given = {name: getattr(samples, name) for name in (*OPTIONAL, "targets") if hasattr(samples, name)}
        labels = given.pop("targets", None)
        vars(self).update(given)
        self.wrapped, self.positions = samples, indices
        self.indices = None if indices is None else share(indices.sort().values)
        self.labels = _numbers(labels if self.labels is None else self.labels, len(samples))
        self.image_ids = _numbers(self.image_ids, len(samples))
        if self.num_classes is None and self.classes is not None:
            self.num_classes = len(self.classes)

    def first_row(self, epoch: int) -> int:
        """What is added to sample numbers before they are read in ``epoch``."""
        return 0

    def __len__(self) -> int:
        """Number of active samples."""
        return len(self.wrapped) if self.indices is None else len(self.indices)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """Encoded bytes of sample ``index``, its label, and perhaps an extra.

        A label is an int, a float, a list of floats, or None. An OSError or GpuaugError becomes a fault of this sample.
        Any other exception ends the epoch.
        """
        return self.wrapped[index]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.wrapped).__name__}: {len(self)} samples)"

    def key(self, index: int) -> str:
        """Relative path or name of sample ``index``; its number if the object has no method ``key``.

        Raises:
            IndexError: the object has no ``key`` and no such sample.
        """
        if has_method(self.wrapped, "key"):
            return str(self.wrapped.key(index))
        if not 0 <= (number := operator.index(index)) < self._total:
            raise IndexError(f"the source has {self._total} samples. Found: number {number}.")
        return str(number)

    def digest(self) -> str:
        """Hash of the keys of all samples. It does not depend on where the samples are stored."""
        if has_method(self.wrapped, "digest"):
            return str(self.wrapped.digest())
        return Names.of([[os.fsencode(self.key(i)) for i in range(self._total)]]).digest()

    @property
    def _total(self) -> int:
        """Number of all samples, also of inactive ones."""
        return len(self if self.wrapped is None else self.wrapped)


# members that a Source takes from its object
_OWN = ("key", "digest", "wrapped", "positions", "root", "remote", "extra")
OPTIONAL = tuple(name for name in vars(Source) if name[0] != "_" and name not in _OWN)


def has_method(thing: Any, name: str) -> bool:
    """Whether an object that may be no :class:`Source` has a method of this name."""
    return callable(getattr(thing, name, None))


def _numbers(values: Any, length: int) -> Tensor | None:
    """Labels or ids by sample number as int64; None if a sample's value is not one integer."""
    try:
        numbers = np.asarray(values.cpu() if isinstance(values, Tensor) else values)
    except (TypeError, ValueError):
        return None
    if numbers.ndim != 1 or len(numbers) < length or numbers.dtype.kind not in "iu":
        return None
    return share(torch.from_numpy(numbers.astype(np.int64)))


class ListedSource(Source):
    """Base of gpuaug's own sources, which list their samples once. All processes share the tensors of the list.

    A sample has an image, and perhaps a label, a mask, objects and extras. The constructor of a subclass sets ``root``,
    ``_storage`` and ``_names`` (the keys), calls :meth:`_set_labels`, :meth:`_set_objects` and :meth:`_set_classes` as
    it needs, and last :meth:`_activate`. Where the bytes of a sample are, it says in one of three ways:

    * ``_files``: each sample is a file
    * :meth:`_range`: each sample is a range of bytes in a file
    * :meth:`_read`: anything else. It returns :meth:`_item` for each sample
    """

    root: str
    target_kinds: frozenset[str] = frozenset()
    _names: Names
    _storage: Storage
    _objects: ObjectTable | None = None
    _targets: Tensor | None = None  # float32 [N] or [N, K]: labels that are not one class number per sample
    _digest: str | None = None
    _files: Files | None = None  # the image of each sample
    _mask_files: Files | None = None

    def __len__(self) -> int:
        return len(self._names) if self.indices is None else len(self.indices)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """Encoded bytes and label; then extra fields, such as captions, if there are any."""
        (item,) = self._read([self._check(index)])
        if isinstance(item, Exception):
            raise item
        return item

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return (self[i] for i in (range(len(self)) if self.indices is None else self.indices.tolist()))

    def __repr__(self) -> str:
        parts = [f"{len(self)} images{' with masks' if 'masks' in self.target_kinds else ''}"]
        if self._objects is not None:
            counts = np.diff(self._objects.bounds.numpy())
            parts.append(f"{counts.sum() if self.indices is None else counts[self.indices.numpy()].sum()} objects")
        parts += [] if self.num_classes is None else [f"{self.num_classes} classes"]
        return f"{type(self).__name__}({redact(self.root)!r}: {', '.join(parts)})"

    @property
    def num_classes(self) -> int | None:
        """Number of classes. For labels that are lists: their length. For float labels, or without labels: None."""
        if self.classes is not None:
            return len(self.classes)
        if self._targets is not None:
            return self._targets.shape[1] if self._targets.ndim == 2 else None
        return None if self.labels is None else int(self.labels.max()) + 1

    @property
    def read_many(self) -> Callable[[Sequence[int]], list[Any]] | None:
        """``read_many(numbers)`` returns a list of samples or exceptions. None for local files."""
        return None if self.remote is None else self._read

    def key(self, index: int) -> str:
        """Path of sample ``index`` below ``root``, with ``/`` between folders."""
        return os.fsdecode(self._names[self._check(index)])

    def label(self, index: int) -> Any:
        """Label of sample ``index``: an int, a float or a list of floats; None without labels. Reads no file.

        If samples have targets, the label is a :class:`~gpuaug.Target`. It lacks masks from files.
        """
        return self._target_of(self._check(index))

    def digest(self) -> str:
        """Hash of the sorted keys of all samples. It does not depend on ``root``, ``subset`` or ``exclude``."""
        if self._digest is None:
            self._digest = self._names.digest()
        return self._digest

    def objects_digest(self) -> str | None:
        """Hash of all objects; None if there are none."""
        return None if self._objects is None else self._objects.digest()

    def shapes(self) -> NDArray[np.int32] | None:
        """Height and width of the annotated images, int32 [N, 2]; 0: not known. None if no size is known."""
        sizes = None if self._objects is None else self._objects.sizes
        return None if sizes is None else sizes.numpy()

    def mask_path(self, index: int) -> str | None:
        """Path or URL of the mask of sample ``index``; None if masks are not files."""
        return None if self._mask_files is None else redact(self._mask_files.range(self._check(index)).path)

    def _read(self, numbers: Sequence[int]) -> list[Any]:
        mask_ranges = [] if self._mask_files is None else [self._mask_files.range(i) for i in numbers]
        data = self._storage.read([*map(self._range, numbers), *mask_ranges])
        masks: list[Any] = data[len(numbers) :] or [None] * len(numbers)
        return list(map(self._item, numbers, data, masks))

    def _range(self, index: int) -> Range:
        """The bytes of image ``index``."""
        assert self._files is not None
        return self._files.range(index)

    def _label_of(self, index: int) -> Any:
        if self.labels is not None:
            label: Any = int(self.labels.numpy()[index])
        else:
            label = None if self._targets is None else self._targets.numpy()[index].tolist()
        return label if self._objects is None else self._objects.target(index, label=label)

    def _target_of(self, index: int) -> Any:
        label = self._label_of(index)
        return checked(Target(label=label)) if self.target_kinds and not isinstance(label, Target) else label

    def _item(self, index: int, image: Any, mask: Any = None, extra: Iterable[Any] = (), **objects: Any) -> Any:
        """``(bytes, label or Target)`` and perhaps the extra; or the error of the image, the mask or the objects.

        ``extra``: the values of the extra fields. ``objects``: fields of the Target that ``_objects`` lacks.
        """
        if self._objects is not None and (reason := self._objects.reason(index)) is not None:
            return ReadError(f"the objects of {self.key(index)!r} cannot be used: {reason}")
        for part in (image, mask) if "masks" in self.target_kinds else (image,):
            if isinstance(part, Exception):
                return part
            if part is None:
                return ReadError(f"{self.key(index)!r} has no {'image' if image is None else 'mask'} bytes")
        label = self._target_of(index)
        if mask is not None or objects:
            label = checked(replace(label, mask=mask, **objects))
        return (image, label) if self.extra is None else (image, label, self.extra.value(extra))

    def _set_objects(self, table: ObjectTable) -> None:
        """Set the objects. Log how many samples are damaged; SourceError if all are."""
        self._objects, self.num_keypoints = table, table.num_keypoints
        self.target_kinds |= table.kinds
        if damaged := len(table.damaged):
            first = int(table.damaged[0])
            text = f"the objects of {damaged} of {len(table)} samples cannot be used; sample {first}: "
            text += str(table.reason(first))
            if damaged == len(table):
                raise SourceError(f"{text}. Check the format of the annotations.")
            log.warning("source %s: %s", redact(self.root), text)

    def _check(self, index: int) -> int:
        index = operator.index(index)
        if not 0 <= index < len(self._names):
            raise IndexError(
                f"sample numbers of {redact(self.root)!r} must be 0 .. {len(self._names) - 1}. Found: {index}."
            )
        return index

    def _set_labels(
        self,
        values: Sequence[Any] | NDArray[Any],
        *,
        classes: Classes,
        names: Sequence[str] | None = None,
        place: str | None = None,
    ) -> None:
        """Set one label per sample.

        ``names``: the class names stored in the data, in the order of their labels. ``place``: where the labels are,
        for messages; None: ``root``.
        """
        place = repr(redact(self.root)) if place is None else place
        mapping = None if classes is None else class_mapping(classes)
        if names is not None and mapping is None:
            mapping = {name: label for label, name in enumerate(names)}
        elif names is not None and list(mapping or ()) != list(names):
            if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iu":
                raise SourceError(
                    f"`source.classes` differs from the class names in {place}: {shortened(names)}. Its labels are not "
                    "one class number per sample, so they cannot be converted. Remove `source.classes`."
                )
            encode(values, classes={name: label for label, name in enumerate(names)}, place=place)  # checks the range
            values = [names[i] for i in values.tolist()]  # the given mapping may number the classes differently
        labels, known = encode(values, classes=mapping, place=place)
        tensor = share(torch.from_numpy(labels))
        if labels.dtype == np.int64:
            self.labels = tensor
        else:
            self._targets = tensor
        if known is not None:
            self._set_classes(known)

    def _set_columns(self, table: Any, label: str | None, objects: str | None, classes: Classes) -> None:
        """Set labels and objects from an Arrow table with the :func:`early_columns` of all rows."""
        place = redact(self.root)
        if label is not None:
            where = f"the column {label!r} of {place!r}"
            values = column_values(table.column(label), where, name=self.key)
            names = class_names(table.schema, label)
            self._set_labels(values, classes=classes if objects is None else None, names=names, place=where)
        if objects is not None:
            mapping = None if classes is None else class_mapping(classes)
            read, names = read_objects(table, objects, classes=mapping, place=place)
            self._set_objects(read)
            if names is not None:
                self._set_classes(names)

    def _set_classes(self, names: Iterable[str]) -> None:
        self.classes = list(names)
        self.class_to_idx = {name: label for label, name in enumerate(self.classes)}

    def _activate(self, subset: Subset, exclude: str | os.PathLike[str] | None, *, began: float) -> None:
        self.indices = active(self._names, subset, exclude, root=self.root)
        if is_url(self.root) or (self._mask_files is not None and is_url(self._mask_files.root)):
            self.remote = self._storage.remote
        self.thread_safe = self.thread_safe or self._files is not None
        text = f"{len(self)} images" if self.indices is None else f"{len(self)} of {len(self._names)} images"
        text += "" if self.classes is None else f", {len(self.classes)} classes"
        log.info("source %s: %s, listed in %.1f s", redact(self.root), text, time.monotonic() - began)


class FileKeys(Names):
    """Keys ``file/member``, or ``file/row`` without ``members``. ``bounds``: running sums of samples per file."""

    def __init__(self, files: Names, bounds: Tensor, members: Names | None = None) -> None:
        self.files, self.bounds, self.members = files, bounds, members

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def __getitem__(self, index: int) -> bytes:
        file, row = locate(self.bounds, index)
        return self.files[file] + b"/" + (b"%d" % row if self.members is None else self.members[index])

    def __iter__(self) -> Iterator[bytes]:
        counts = np.diff(self.bounds.numpy()).tolist()
        members = (b"%d" % row for count in counts for row in range(count)) if self.members is None else self.members
        files = (file for file, count in zip(self.files, counts, strict=True) for _ in range(count))
        return (file + b"/" + member for file, member in zip(files, members, strict=True))


def checksum(manifest: Mapping[str, Any]) -> str:
    """Hash of a manifest or a loader's state without its field ``checksum``."""
    text = json.dumps({k: v for k, v in manifest.items() if k != "checksum"}, sort_keys=True)
    return digest(text.encode())


def digest(*parts: bytes | memoryview) -> str:
    """BLAKE2b of bytes, as hex."""
    total = hashlib.blake2b(digest_size=16)
    for data in parts:
        total.update(data)
    return total.hexdigest()
