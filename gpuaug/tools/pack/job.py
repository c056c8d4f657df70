"""The job of `gpuaug pack`: what to write, where, and whether an earlier run left the same job there."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from gpuaug import checks, files
from gpuaug.batch import Interpolation
from gpuaug.decode.decoder import Decode
from gpuaug.errors import ConfigError, SourceError
from gpuaug.source.local import read_file
from gpuaug.source.packed import FULL, MANIFEST, Size, parse_manifest, shard_name
from gpuaug.source.protocol import Source
from gpuaug.tools.store import check_out, digest, read_json, refuse_changes, to_json

Format = Literal["jpeg", "uint8"]
PARTIAL = ".partial"


@dataclass(frozen=True, kw_only=True)
class Pack:
    """What is written.

    Args:
        format: ``jpeg``: WebDataset tar shards, for little space; ``uint8``: pixels, for reading without decoding.
        sizes: shorter sides, one set of files for each; nothing is enlarged. None: one set at the images' own sizes.
        quality: of JPEG, 1..100.
        subsampling: of JPEG's colours: 4:4:4, 4:2:2 or 4:2:0.
        interpolation: ``bilinear`` or ``bicubic``, both antialiased as in Pillow.
        samples: number of samples in one shard. A stopped run repeats at most the unfinished shards.

    A JPEG that is small enough already and not EXIF-rotated is copied unchanged into tar shards.
    """

    format: Format = "jpeg"
    sizes: Sequence[int] | int | None = None
    quality: int = 90
    subsampling: str = "4:2:0"
    interpolation: Interpolation = "bicubic"
    samples: int = 1000

    def __post_init__(self) -> None:
        checks.one_of("format", self.format, get_args(Format))
        sizes = [self.sizes] if type(self.sizes) is int else self.sizes
        if sizes is not None and (
            not isinstance(sizes, Sequence)
            or not sizes
            or any(type(size) is not int or size < 1 for size in sizes)
            or len(set(sizes)) < len(sizes)
        ):
            raise ConfigError(
                f"`sizes` must be shorter sides in pixels, each once, as [128,224]. Found: {self.sizes!r}."
            )
        object.__setattr__(self, "sizes", None if sizes is None else tuple(sorted(sizes)))
        checks.whole_number("quality", self.quality, 1, 100)
        subsampling = ("4:4:4", "4:2:2", "4:2:0")
        checks.one_of("subsampling", self.subsampling, subsampling, hint=" In YAML it needs quotes.")
        checks.one_of("interpolation", self.interpolation, get_args(Interpolation))
        checks.whole_number("samples", self.samples, 1)

    @property
    def names(self) -> list[Size]:
        """The folder names of the sizes, ascending."""
        return [FULL] if self.sizes is None else list(self.sizes)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that a process needs to write a shard. Jobs with equal descriptions write equal bytes."""

    source: Source
    out: Path
    what: Pack
    decode: Decode
    truncated: bool
    drop: bool

    @property
    def work(self) -> Path:
        """The folder of all files until the last one is written."""
        return self.out / PARTIAL

    @property
    def shards(self) -> int:
        """Number of shards."""
        return math.ceil(len(self.source) / self.what.samples)

    def numbers(self, shard: int) -> NDArray[np.int64]:
        """Numbers, in the source, of the shard's samples."""
        first, last = shard * self.what.samples, min((shard + 1) * self.what.samples, len(self.source))
        indices = self.source.indices
        return np.arange(first, last) if indices is None else indices.numpy()[first:last]

    def note_file(self, shard: int) -> Path:
        """The file that lists what is in a shard. It is written after the shard."""
        return self.work / "done" / f"{shard:05d}.json"

    def note(self, shard: int) -> dict[str, Any] | None:
        """The note of a finished shard; None if the shard has to be written."""
        try:
            note: dict[str, Any] = read_json(self.note_file(shard))
            for name in self.what.names:
                file = shard_name(name, shard, self.what.format)
                path = self.work / file if (self.work / file).exists() else self.out / file
                if path.stat().st_size != note["files"][str(name)]["bytes"]:
                    return None
        except (OSError, ValueError, KeyError):
            return None
        return note

    def describe(self) -> dict[str, Any]:
        """Everything that decides the written bytes, as JSON."""
        source = self.source
        what = {**asdict(self.what), "sizes": self.what.names}
        if self.what.format == "uint8":
            del what["quality"], what["subsampling"]
        return {
            "source": source.digest(),
            "images": len(source),
            "numbers": None if source.indices is None else digest(source.indices.numpy().tobytes()),
            "labels": _labels_digest(source),
            "classes": source.classes,
            **what,
            "decode": {
                "backend": self.decode.backend,
                "codecs": sorted(self.decode.codecs),
                "max_pixels": self.decode.max_pixels,
                "truncated": "accept" if self.truncated else "reject",
            },
        }

    def begin(self) -> None:
        """Make the work folder, or go on in that of an earlier run.

        Raises:
            ConfigError: if the folder holds another job.
            SourceError: if the description of the earlier job cannot be read.
        """
        file = self.work / "job.json"
        if file.exists():
            try:
                earlier = read_json(file)
            except (OSError, ValueError) as error:
                raise SourceError(
                    f"{file} cannot be read ({error}). Remove {str(self.work)!r} and pack again."
                ) from error
            self.check_same(earlier)
        else:
            files.write(file, to_json(self.describe()), sync=True)
        for name in self.what.names:
            if not (self.out / str(name)).exists():
                (self.work / str(name)).mkdir(exist_ok=True)
        for part in self.work.rglob("*.part"):  # this run holds the lock, so the writers of these files are dead
            part.unlink()

    def check_same(self, earlier: dict[str, Any]) -> None:
        """Raise ConfigError if the folder holds another job, and name what differs."""
        refuse_changes(self.out, earlier, self.describe(), error=ConfigError)


def finished(out: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The manifest of a finished folder; None if there is no manifest.

    Raises:
        SourceError: if the manifest is damaged, or is a pipe or device.
    """
    file = Path(out) / MANIFEST
    try:
        return parse_manifest(read_file(str(file)))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise SourceError(f"{file} cannot be used: {error}. Remove the folder and pack again.") from error


def _labels_digest(source: Source) -> str | None:
    """A hash of all labels that are known without reading the samples."""
    if source.labels is not None:
        return digest(source.labels.numpy().tobytes())
    label: Any = getattr(source, "label", None)
    if not callable(label):
        return None
    numbers = range(len(source)) if source.indices is None else source.indices.tolist()
    values = [label(i) for i in numbers]  # floats, or several for one sample
    return None if all(value is None for value in values) else digest(repr(values).encode())


def checked_out(out: Path, source: Source) -> Path:
    """The absolute path of ``out``.

    Raises:
        ConfigError: if it lies inside the source, or holds other files.
    """
    place = Path(os.path.abspath(out.expanduser()))
    root: Any = getattr(source, "root", None)
    is_folder = isinstance(root, str) and "://" not in root and os.path.isdir(root)
    if is_folder and Path(os.path.realpath(place)).is_relative_to(os.path.realpath(root)):
        raise ConfigError(
            f"`out` must not be inside `source.root` ({root!r}): it would become part of it. Found: {str(out)!r}."
        )
    check_out(place, MANIFEST, PARTIAL)
    return place
