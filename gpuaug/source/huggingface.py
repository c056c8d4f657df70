"""A Hugging Face ``datasets.Dataset`` as a source of its undecoded images."""

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
    """Whether an object is a Dataset, by its attributes: ``datasets`` need not be installed."""
    attributes = ("features", "column_names", "select_columns", "with_format", "__len__", "__getitem__")
    return all(hasattr(candidate, name) for name in attributes)


class DatasetSource(ListedSource):
    """Rows of a ``datasets.Dataset`` with one column of images (``Image(decode=False)``, or binary).

    A Loader wraps a Dataset by itself. Use this class if the label column has another name, or for no labels.

    Args:
        dataset: with one column of images; drop other image columns first.
        label: column of the labels; ``auto``: ``label`` or ``labels``, or the only ClassLabel; ``none``: no labels.

    Raises:
        SourceError: if there is no such column of images or labels, or the images are decoded.

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
                f"a Dataset must have one column of images. Found {len(images)} among {list(features)}. Take the "
                "columns that you want: dataset.select_columns(['image', 'label'])."
            )
        self._image = images[0]
        if getattr(features[self._image], "decode", False):
            raise SourceError(
                f"the images of a Dataset must be undecoded, and its column {self._image!r} decodes them. Cast it: "
                f"dataset.cast_column({self._image!r}, datasets.Image(decode=False))."
            )
        dataset = dataset.with_format(None)
        named = [name for name, feature in features.items() if type(feature).__name__ == "ClassLabel"]
        columns = [name for name in features if name != self._image]
        remedy = "Name one: gpuaug.source.DatasetSource(dataset, label='NAME'), or label='none' for no labels."
        label = label_column(label, columns, with_classes=named, place="the Dataset", remedy=remedy)
        self._names = Names.of([[b"%d" % i for i in range(len(dataset))]])
        if not len(dataset):
            raise SourceError("the Dataset has no rows.")
        if label is not None:
            names = getattr(features[label], "names", None)
            values = list(dataset.select_columns([label])[:][label])
            if any(value is None for value in values):
                raise SourceError(f"column {label!r} of the Dataset has no value in row {values.index(None)}. Fill it.")
            self._set_labels(values, classes=None, names=names if isinstance(names, list) else None)
        self._dataset = dataset.select_columns([self._image])

    def _read(self, numbers: Sequence[int]) -> list[Any]:
        return [self._row(i) for i in numbers]

    def _row(self, index: int) -> Any:
        row = self._dataset[index][self._image]
        data, path = (row.get("bytes"), row.get("path")) if isinstance(row, dict) else (row, None)
        try:
            if data is None and path is not None:  # a Dataset of an image folder holds paths only
                data = self._storage.read_file(path) if is_url(path) else read_file(path, image=True)
        except (OSError, ReadError) as error:
            return error
        return ReadError(f"row {index} has no image bytes") if data is None else (data, self._label_of(index))


def _is_image(feature: Any) -> bool:
    return type(feature).__name__ == "Image" or getattr(feature, "dtype", None) in ("binary", "large_binary")
