"""Output of the commands: named values, JSON reports, result files."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from gpuaug import files
from gpuaug.errors import ConfigError, GpuaugError


class Report:
    """Named values. :meth:`add` prints a value. :meth:`write` writes all values to a file.

    Args:
        file: JSON file to write, or None.
        quiet: print and write nothing.
    """

    def __init__(self, *, file: str | None = None, quiet: bool = False) -> None:
        self.values: dict[str, Any] = {}
        self._file, self._quiet = None if file is None or quiet else output(file, "json"), quiet

    def add(self, name: str, value: Any, text: str) -> None:
        """Print ``name  text`` and keep ``value``, which must be plain JSON."""
        self.values[name] = value
        if not self._quiet:
            print(f"{name.replace('_', ' '):<18} {text}", flush=True)

    def write(self) -> None:
        """Write the values to the file, completely or not at all."""
        if self._file is not None:
            save(self._file, "json", json.dumps(self.values, indent=1) + "\n")


def save(file: Path, key: str, data: bytes | str) -> None:
    """Write a result file, completely or not at all. A symbolic link stays a link."""
    try:
        files.write(file.resolve(), data)
    except OSError as error:
        raise GpuaugError(f"the file of `{key}`, {str(file)!r}, could not be written: {error}.") from error


def output(file: str, key: str) -> Path:
    """Return the path of a file to write, and create its folder. ConfigError if the file cannot be written."""
    path = Path(file)
    place = path.absolute()
    try:
        if place.is_relative_to("/dev") and not place.is_relative_to("/dev/shm"):
            raise FileExistsError("a system file")  # otherwise root could replace /dev/stdout with a regular file
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise FileExistsError("a folder" if path.is_dir() else "not a regular file")
        tempfile.TemporaryFile(dir=path.parent).close()  # os.access is not enough: for root it allows everything
    except OSError as error:
        raise ConfigError(
            f"`{key}` must be the path of a file that can be written. Found: {file!r} ({error})."
        ) from error
    return path
