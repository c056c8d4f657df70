"""A Hugging Face ``datasets.Dataset`` as a source: its images as they stand in the files, undecoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gpuaug.errors import ReadError, SourceError
from gpuaug.source.classes import label_column
from gpuaug.source.filters import Listed
from gpuaug.source.index import Names
from gpuaug.source.remote.storage import Storage, is_url, read_file


def is_dataset(candidate: Any) -> bool:
    """Whether it is one: by what it offers, as ``datasets`` need not be installed."""
    return all(hasattr(candidate, name) for name in ("features", "column_names", "select_columns", "with_format")) and (
        hasattr(candidate, "__len__") and hasattr(candidate, "__getitem__")
    )


class DatasetSource(Listed):
    """Rows of a ``datasets.Dataset`` with one column of images (``Image(decode=False)``, or binary), by their number.

    A Loader makes one of a Dataset by itself; for a label of another name, or none, make it here.

    Args:
        dataset: with one column of images; select others away first.
        label: the column of the labels; ``auto``: ``label`` or ``labels``, or the only ClassLabel; ``none``: no labels.

    Raises:
        SourceError: if there is no such column of images or labels, or the images are decoded.
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
        plain = dataset.with_format(None)
        named = [name for name, feature in features.items() if type(feature).__name__ == "ClassLabel"]
        columns = [name for name in features if name != self._image]
        remedy = "Name one: gpuaug.source.DatasetSource(dataset, label='NAME'), or label='none' for no labels."
        label = label_column(label, columns, with_classes=named, place="the Dataset", remedy=remedy)
        self._names = _Numbers(len(dataset))
        if not len(dataset):
            raise SourceError("the Dataset has no rows.")
        if label is not None:
            names = getattr(features[label], "names", None)
            values = list(plain.select_columns([label])[:][label])
            if any(value is None for value in values):
                raise SourceError(f"column {label!r} of the Dataset has no value in row {values.index(None)}. Fill it.")
            self._label(values, classes=None, names=names if isinstance(names, list) else None)
        self._dataset = plain.select_columns([self._image])
        self.indices = None

    def _items(self, numbers: Sequence[int]) -> list[Any]:
        return [self._item(i) for i in numbers]

    def _item(self, index: int) -> Any:
        row = self._dataset[index][self._image]
        data, path = (row.get("bytes"), row.get("path")) if isinstance(row, dict) else (row, None)
        try:
            if data is None and path is not None:  # of a folder of images: the dataset holds only its paths
                data = self._storage.whole(path) if is_url(path) else read_file(path, image=True)
        except (OSError, ReadError) as error:
            return error
        return ReadError(f"row {index} has no bytes of an image") if data is None else (data, self._label_of(index))


class _Numbers:
    """Keys of rows: their numbers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> bytes:
        return b"%d" % index

    def __iter__(self) -> Iterator[bytes]:
        return (b"%d" % i for i in range(self.count))

    def digest(self) -> str:
        """As of Names."""
        return Names.of([list(self)]).digest()


def _is_image(feature: Any) -> bool:
    return type(feature).__name__ == "Image" or getattr(feature, "dtype", None) in ("binary", "large_binary")
