"""A source that reads undecoded images from a Hugging Face ``datasets.Dataset``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpuaug.errors import ReadError, SourceError
from gpuaug.source.base import ListedSource
from gpuaug.source.classes import label_column
from gpuaug.source.index import Names
from gpuaug.source.local import read_file
from gpuaug.source.paths import is_url
from gpuaug.source.remote.storage import Storage


def is_dataset(candidate: Any) -> bool:
    """Whether an object has the attributes of a Dataset. ``datasets`` need not be installed."""
    attributes = ("features", "column_names", "select_columns", "with_format", "__len__", "__getitem__")
    return all(hasattr(candidate, name) for name in attributes)


class DatasetSource(ListedSource):
    """Rows of a ``datasets.Dataset`` with one column of images (``Image(decode=False)``, or binary).

    A Loader wraps a Dataset automatically. Use this class to name the label column, or to read no labels.

    Args:
        dataset: a Dataset with exactly one image column; remove other image columns first.
        label: the label column; ``auto``: ``label``, ``labels`` or the only ClassLabel column; ``none``: no labels.

    Raises:
        SourceError: if the image column or label column is missing, or the images are decoded.

    >>> dataset = datasets.load_dataset("food101", split="train")
    >>> source = DatasetSource(dataset.cast_column("image", datasets.Image(decode=False)))
    """

    def __init__(self, dataset: Any, *, label: str | None = "auto") -> None:
        self.root = "datasets.Dataset"
        self._storage = Storage()
        features = dataset.features
        images = [name for name, feature in features.items() if _is_image(feature)]
        if len(images) != 1:
            raise SourceError(
                f"a Dataset must have one image column. Found {len(images)} in the columns {list(features)}. Select "
                "the columns to read: dataset.select_columns(['image', 'label'])."
            )
        self._image = images[0]
        if getattr(features[self._image], "decode", False):
            raise SourceError(
                f"the images of a Dataset must not be decoded, but the column {self._image!r} decodes them. Cast it: "
                f"dataset.cast_column({self._image!r}, datasets.Image(decode=False))."
            )
        dataset = dataset.with_format(None)
        named = [name for name, feature in features.items() if type(feature).__name__ == "ClassLabel"]
        columns = [name for name in features if name != self._image]
        remedy = "Name the column: gpuaug.source.DatasetSource(dataset, label='NAME'), or label='none' for no labels."
        label = label_column(label, columns, with_classes=named, place="the Dataset", remedy=remedy)
        self._names = Names.of([[b"%d" % i for i in range(len(dataset))]])
        if not len(dataset):
            raise SourceError("the Dataset has no rows.")
        if label is not None:
            names = getattr(features[label], "names", None)
            values = list(dataset.select_columns([label])[:][label])
            if any(value is None for value in values):
                raise SourceError(f"column {label!r} of the Dataset has no value in row {values.index(None)}. Add one.")
            self._set_labels(values, classes=None, names=names if isinstance(names, list) else None)
        self._dataset = dataset.select_columns([self._image])

    def _read(self, numbers: Sequence[int]) -> list[Any]:
        return [self._row(i) for i in numbers]

    def _row(self, index: int) -> Any:
        row = self._dataset[index][self._image]
        data, path = (row.get("bytes"), row.get("path")) if isinstance(row, dict) else (row, None)
        try:
            if data is None and path is not None:  # a Dataset made from an image folder has only paths
                data = self._storage.read_file(path) if is_url(path) else read_file(path, image=True)
        except (OSError, ReadError) as error:
            return error
        return ReadError(f"row {index} has no image bytes") if data is None else (data, self._label_of(index))


def _is_image(feature: Any) -> bool:
    return type(feature).__name__ == "Image" or getattr(feature, "dtype", None) in ("binary", "large_binary")
