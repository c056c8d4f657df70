"""The table of colours of colour-coded masks, from a mapping or a file."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpuaug.errors import ConfigError
from gpuaug.source.local import open_text

Color = tuple[int, int, int]  # red, green, blue; 0..255

_LARGEST_CLASS = 2**31 - 1
_HEADS = (("r", "g", "b"), ("red", "green", "blue"))


def color_table(given: Any, *, key: str = "targets.masks.colors") -> dict[int, Color]:
    """The colour of each class, from the value of the configuration key ``key``. Raises ConfigError.

    ``given``: a mapping from class numbers to (red, green, blue), or the path of a CSV file with one class per line.
    Its first line names the columns r, g, b or red, green, blue. The column ``id`` numbers the classes; without it, the
    first class is 0. Other columns are ignored.
    """
    if isinstance(given, str | os.PathLike):
        place = f" in {os.fspath(given)!r}"
        try:
            lines = [line for line in open_text(os.path.expanduser(given)).read().splitlines() if line.strip()]
            pairs: list[tuple[Any, Any]] = list(_parsed(lines))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"`{key}` must be a mapping, or a CSV FILE with the columns r, g, b. "
                f"Found: {os.fspath(given)!r} ({error})."
            ) from error
    elif isinstance(given, Mapping):
        place, pairs = "", list(given.items())
    else:
        raise ConfigError(f"`{key}` must be a mapping or a FILE. Found: {given!r:.200}.")
    table: dict[int, Color] = {}
    owners: dict[Color, int] = {}
    for name, color in pairs:
        number = int(name) if str(name).isdecimal() and len(str(name)) < 11 else -1
        whole = isinstance(color, Sequence) and not isinstance(color, str) and len(color) == 3
        if not 0 <= number <= _LARGEST_CLASS or not whole or not all(type(c) is int and 0 <= c <= 255 for c in color):
            raise ConfigError(
                f"`{key}` must give three whole numbers from 0 to 255 for each class number, such as "
                f"{{1: [128, 0, 0]}}. Found{place}: {name!r:.50}: {color!r:.100}."
            )
        red, green, blue = color
        other = owners.setdefault((red, green, blue), number)
        if number in table or other != number:
            what = f"class {number} twice" if number in table else f"{[*color]} for the classes {other} and {number}"
            raise ConfigError(f"`{key}` must name each class and colour once. Found{place}: {what}.")
        table[number] = red, green, blue
    if not table:
        raise ConfigError(f"`{key}` must name at least one class. Found{place}: none.")
    return dict(sorted(table.items()))


def _parsed(lines: Sequence[str]) -> Iterator[tuple[int, list[int]]]:
    """Class number and colour of each line. Raises ValueError."""
    head = [cell.strip().lower() for cell in lines[0].split(",")] if lines else []
    names = next((names for names in _HEADS if {*names} <= {*head}), None)
    if names is None:
        raise ValueError(f"line 1 must name the columns, such as id,name,r,g,b: {','.join(head)!r:.100}")
    for number, row in enumerate(csv.DictReader(lines[1:], fieldnames=head)):
        cells = [row.get("id", str(number)), *(row[name] for name in names)]
        if not all(cell and cell.strip().isdecimal() for cell in cells):
            raise ValueError(f"{', '.join(names)} of line {number + 2} must be whole numbers: {cells}")
        yield int(cells[0]), [int(cell) for cell in cells[1:]]
