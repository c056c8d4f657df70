"""Extra fields of samples, such as captions."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from gpuaug.errors import ConfigError, SourceError
from gpuaug.source.classes import shortened
from gpuaug.source.index import Names

Extra = str | Sequence[str] | None


class ExtraNames(NamedTuple):
    """The names of the fields. If ``single``, an extra is the value of the only field. Otherwise an extra is a dict."""

    names: tuple[str, ...]
    single: bool

    def value(self, values: Iterable[Any]) -> Any:
        made = dict(zip(self.names, values, strict=True))
        return made[self.names[0]] if self.single else made


def fields_of(extra: Extra, columns: Iterable[str] | None = None, *, place: str = "") -> ExtraNames | None:
    """Check the argument ``extra`` of a source and return its fields.

    ``columns``: all columns of the source; None: the names are not checked. ``place``: the source, for messages.
    """
    if extra is None:
        return None
    single = isinstance(extra, str)
    names = (extra,) if isinstance(extra, str) else tuple(extra) if isinstance(extra, Sequence) else ()
    if not names or not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise ConfigError(f"`source.extra` must be a name, a list of different names, or null. Found: {extra!r:.200}.")
    known = names if columns is None else list(columns)
    for name in names:
        if known.count(name) != 1:
            raise SourceError(
                f"`source.extra` must name columns that {place} has exactly once. Found: {name!r}. "
                f"Columns: {shortened(known)}."
            )
    return ExtraNames(names, single)


def decoded(name: str, data: bytes | None) -> Any:
    """The value of a member of a tar shard: text, parsed JSON, or bytes. Raises ValueError."""
    kind = name.rpartition(".")[2]
    if data is None or kind not in ("txt", "json"):
        return data
    try:
        return json.loads(data) if kind == "json" else data.decode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its {name} is not valid ({type(error).__name__}: {error})") from error


class ExtraValues:
    """Holds the extras of all samples in tensors, because workers would copy Python objects.

    ``columns`` has one column per field, with one value per sample.
    """

    def __init__(self, columns: Iterable[Iterable[Any]]) -> None:
        self._columns = [Names.of([[pickle.dumps(value) for value in column]]) for column in columns]

    def __getitem__(self, index: int) -> Iterator[Any]:
        # safe: this class has pickled the values
        return (pickle.loads(column[index]) for column in self._columns)
