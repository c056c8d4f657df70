"""What a command prints, kept so that `json=FILE` can write the same."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from gpuaug.errors import ConfigError


class Report:
    """Named values, printed as aligned lines as they come, and written to a file at the end.

    Args:
        file: JSON file to write, or None.
        quiet: print nothing and write nothing (every rank but the first).
    """

    def __init__(self, *, file: str | None = None, quiet: bool = False) -> None:
        self.values: dict[str, Any] = {}
        self._file, self._quiet = None if file is None else Path(file), quiet
        if self._file is not None and not quiet:
            _writable(self._file, "json")

    def add(self, name: str, value: Any, text: str) -> None:
        """Print ``name  text`` and keep ``value``, which must be plain JSON."""
        self.values[name] = value
        if not self._quiet:
            print(f"{name.replace('_', ' '):<18} {text}", flush=True)

    def write(self) -> None:
        """Write the values, whole or not at all."""
        if self._file is not None and not self._quiet:
            part = self._file.with_name(f".{self._file.name}.part")
            part.write_text(json.dumps(self.values, indent=1) + "\n", encoding="utf-8")
            os.replace(part, self._file)


def _writable(file: Path, key: str) -> None:
    """Find out before the work, not after it, that a result cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"`{key}` must name a file that can be written. Found: {str(file)!r} ({error}).") from error
    if file.is_dir() or not os.access(file.parent, os.W_OK):
        found = "a folder" if file.is_dir() else f"no right to write in {str(file.parent)!r}"
        raise ConfigError(f"`{key}` must name a file that can be written. Found: {str(file)!r}, {found}.")


def output(file: str, key: str) -> Path:
    """The path of a file that a command will write, its folder made.

    Raises:
        ConfigError: if it cannot be written there.
    """
    path = Path(file)
    _writable(path, key)
    return path


def check_text(settings: Any, *names: str, optional: bool = False) -> None:
    """Raise ConfigError where a field is no text: Hydra reads 2024 as a number. ``optional`` ones may be None."""
    for name in names:
        value = getattr(settings, name)
        if not (value is None and optional) and not (isinstance(value, str) and value):
            quoted = f" Quote it: \"{name}='{value}'\"." if isinstance(value, int | float) else ""
            raise ConfigError(f"`{name}` must be text{' or null' if optional else ''}. Found: {value!r}.{quoted}")
