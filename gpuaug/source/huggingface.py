"""A source that reads undecoded images from a Hugging Face ``datasets.Dataset``."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Any

from gpuaug.errors import ConfigError, ReadError, SourceError
from gpuaug.source.base import Classes, ListedSource
from gpuaug.source.classes import label_column
from gpuaug.source.extra import Extra, fields_of
from gpuaug.source.index import Names
from gpuaug.source.local import read_file
from gpuaug.source.object_columns import bytes_column, early_columns, image_column, is_objects, objects_column
from gpuaug.source.paths import is_url
from gpuaug.source.remote.storage import Storage

log = logging.getLogger("gpuaug")

MASKS = ("annotation", "annotations", "label", "labels", "mask", "masks", "segmentation", "segmentation_mask")


def is_dataset(candidate: Any) -> bool:
    attributes = ("features", "column_names", "select_columns", "with_format", "__len__", "__getitem__")
    return all(hasattr(candidate, name) for name in attributes)


class DatasetSource(ListedSource):
    """Rows of a ``datasets.Dataset`` with a column of images (``Image(decode=False)``, or binary).

    A Loader wraps a Dataset in this class automatically. Create a DatasetSource yourself to name the columns. With a
    mask or objects, a sample is ``(bytes, Target)``.

    Args:
        dataset: a Dataset.
        label: the label column; ``auto``: ``label``, ``labels`` or the only ClassLabel column; ``none``: no labels.
            If ``auto`` finds no such column, a Dataset with masks, objects or ``extra`` has no labels.
        image: the image column; None: the only image column that is neither the mask nor in ``extra``.
        mask: the column of encoded masks; ``auto``: of two image columns, the one named ``annotation``,
            ``label``, ``mask`` or similar; ``none``: no masks.
        objects: the column of objects, as in :class:`ParquetSource`; ``auto``: the only column with boxes, if there is
            no label column; ``none``: no objects.
        extra: column of extras, such as ``caption``. A list of columns gives each sample a dict. With extras, a sample
            is ``(bytes, label, extra)``.
        classes: class mapping of the objects, as in :class:`FolderSource`.

    Raises:
        SourceError: if the image column or label column is missing, or the Dataset decodes its images.

    >>> dataset = datasets.load_dataset("food101", split="train")
    >>> dataset = dataset.cast_column("image", datasets.Image(decode=False))
    >>> source = DatasetSource(dataset)
    >>> source = DatasetSource(dataset, label="none", extra="label")
    """

    def __init__(
        self,
        dataset: Any,
        *,
        label: str | None = "auto",
        image: str | None = None,
        mask: str | None = "auto",
        objects: str | None = "auto",
        extra: Extra = None,
        classes: Classes = None,
    ) -> None:
        self.root = "datasets.Dataset"
        self._storage = Storage()
        features = dataset.features
        schema, place = features.arrow_schema, "datasets.Dataset"
        self.extra = fields_of(extra, features, place="the Dataset")
        more = () if self.extra is None else self.extra.names
        if mask == "auto":
            images = [x.name for x in schema if bytes_column(x) and x.name not in more]
            likely = [name for name in images if name in MASKS and name != image]
            mask = likely[0] if len(images) == 2 and len(likely) == 1 else None
            if mask is not None:
                log.info("source datasets.Dataset: reading masks from the column %r", mask)
        mask = None if mask == "none" else mask
        masks = [] if mask is None else [image_column(schema, mask, place, key="source.mask")]
        remedy = "Name it: gpuaug.source.DatasetSource(dataset, image='NAME', mask='NAME')."
        paths = [image_column(schema, image, place, besides=(mask, *more), remedy=remedy), *masks]
        self._columns = [path if path in features else path.removesuffix(".bytes") for path in paths]
        for name in self._columns:
            if getattr(features[name], "decode", False):
                raise SourceError(
                    f"the images of a Dataset must not be decoded, but the column {name!r} decodes them. Cast it: "
                    f"dataset.cast_column({name!r}, datasets.Image(decode=False))."
                )
        self.target_kinds = frozenset() if mask is None else frozenset({"masks"})
        dataset = dataset.with_format(None)
        named = [name for name, feature in features.items() if type(feature).__name__ == "ClassLabel"]
        columns = [field.name for field in schema if bytes_column(field) is None]
        has_label = label != "auto" or bool({"label", "labels"} & {*columns}) or len(named) == 1
        if objects == "auto":
            known = [] if has_label else [field.name for field in schema if is_objects(field.type)]
            objects = known[0] if len(known) == 1 else None
            if objects is not None:
                log.info("source datasets.Dataset: reading objects from the column %r", objects)
        objects = objects_column(schema, None if objects == "none" else objects, place)
        label = label_column(
            label, [name for name in columns if name != objects], with_classes=named, place="the Dataset",
            optional=bool(self.target_kinds or objects or more),
            remedy="Name it: gpuaug.source.DatasetSource(dataset, label='NAME'), or label='none' for no labels.",
        )  # fmt: skip
        if classes is not None and objects is None:
            raise ConfigError("`classes` is for the classes of objects, but there are no objects. Remove `classes`.")
        self._names = Names.of([[b"%d" % i for i in range(len(dataset))]])
        if not len(dataset):
            raise SourceError("the Dataset has no rows.")
        early = early_columns(schema, label, objects)
        table = dataset.select_columns(early).with_format("arrow")[:] if early else None
        self._set_columns(table, label, objects, classes)
        self._dataset = dataset.select_columns(list(dict.fromkeys([*self._columns, *more])))

    def digest(self) -> str:
        """Hash of the number of rows, and of the rows that ``shuffle``, ``select`` or a split of the Dataset chose.

        Of rows without gaps, such as ``select(range(5, 10))``, only the number is known.
        """
        rows = getattr(self._dataset, "_indices", None)  # a table with one column; None: all rows in order
        if self._digest is None and rows is not None:
            chosen = rows.column(0).to_numpy().astype("<i8").tobytes()
            self._digest = hashlib.blake2b(chosen, digest_size=16).hexdigest()
        return super().digest()

    def _read(self, numbers: Sequence[int]) -> list[Any]:
        items: list[Any] = []
        for i in numbers:
            row = self._dataset[i]
            try:
                images = (self._bytes(row[column]) for column in self._columns)
                extra = () if self.extra is None else map(row.get, self.extra.names)
                items.append(self._item(i, next(images), next(images, None), extra))
            except (OSError, ReadError) as error:
                items.append(error)
        return items

    def _bytes(self, value: Any) -> Any:
        data, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
        if data is None and path is not None:  # a Dataset made from an image folder has only paths
            return self._storage.read_file(path) if is_url(path) else read_file(path, image=True)
        return data
