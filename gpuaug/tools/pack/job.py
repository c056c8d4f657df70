"""The job of `gpuaug pack`: what to write, the output folder, and the check against an earlier run."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from gpuaug import checks, files
from gpuaug.augment.fingerprint import differences
from gpuaug.augment.multi_view import MultiView
from gpuaug.augment.recipe import Augment
from gpuaug.batch import Interpolation, Target
from gpuaug.decode.decoder import Decode
from gpuaug.errors import ConfigError, GpuaugError, SourceError
from gpuaug.loader.augmented import made_of
from gpuaug.source.adapt import Source, active_numbers
from gpuaug.source.base import digest
from gpuaug.source.local import read_file
from gpuaug.source.packed import FULL, MANIFEST, Size, parse, shard_name
from gpuaug.targets.colors import color_table
from gpuaug.targets.rules import Orientation

Format = Literal["jpeg", "uint8", "npy"]
PARTIAL = ".partial"
GO_ON = "Finished work is kept. To continue, run the same command again."


@dataclass(frozen=True, kw_only=True)
class Pack:
    """What to write. ``conf/gpuaug/command/pack.yaml`` explains the keys."""

    epochs: int | None = None
    format: Format | None = None
    sizes: Sequence[int] | int | None = None
    quality: int = 90
    interpolation: Interpolation = "bicubic"
    pixel_centers: bool = True
    orientation: Orientation = "displayed"
    colors: Any = None
    samples: int = 1000

    def __post_init__(self) -> None:
        checks.whole_number("epochs", self.epochs, 1, 1000, optional=True)
        checks.one_of("format", self.form, get_args(Format))
        if self.epochs and (self.form != "uint8" or self.sizes is not None):
            raise ConfigError(
                "With `epochs`, `format` must be uint8, and `sizes` null: the crop of `augment` decides the size. "
                f"Found: format={self.format}, sizes={self.sizes!r}."
            )
        if self.sizes is not None:
            sizes = self.sizes if isinstance(self.sizes, Sequence) else [self.sizes]
            if not sizes or any(type(size) is not int or size < 1 for size in sizes) or len(set(sizes)) < len(sizes):
                raise ConfigError(
                    f"`sizes` must be different lengths of the shorter side, such as [128,224]. Found: {self.sizes!r}."
                )
            object.__setattr__(self, "sizes", tuple(sorted(sizes)))
        checks.whole_number("quality", self.quality, 1, 100)
        checks.one_of("interpolation", self.interpolation, get_args(Interpolation))
        checks.flag("pixel_centers", self.pixel_centers)
        checks.one_of("orientation", self.orientation, get_args(Orientation))
        if self.colors is not None:
            object.__setattr__(self, "colors", color_table(self.colors, key="colors"))
        checks.whole_number("samples", self.samples, 1)

    @property
    def form(self) -> Format:
        """``format``, or its default."""
        return ("uint8" if self.epochs else "jpeg") if self.format is None else self.format

    @property
    def names(self) -> list[Size]:
        """The folder names of the sizes, ascending, or of the augmented versions."""
        if self.epochs:
            return [f"epoch-{epoch}" for epoch in range(self.epochs)]
        return [FULL] if self.sizes is None else list(self.sizes)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that a process needs to write a shard. Two jobs with equal :meth:`describe` write equal bytes."""

    source: Source
    out: Path
    what: Pack
    decode: Decode
    truncated: bool
    drop: bool
    targets: dict[str, Any] | None = None  # the source's targets, described as JSON
    augment: Augment | MultiView | None = None  # for `epochs`
    seed: int = 0
    dtype: str | None = None  # of the values, for `decode.pixels=raw`

    @property
    def work(self) -> Path:
        """The folder that holds all files until the last one is written."""
        return self.out / PARTIAL

    @property
    def shards(self) -> int:
        return -(-len(self.source) // self.what.samples)

    def numbers(self, shard: int) -> NDArray[np.int64]:
        """The source's numbers for the samples of a shard."""
        first = shard * self.what.samples
        return active_numbers(self.source)[first : first + self.what.samples]

    def files(self, shard: int) -> dict[Size, Path]:
        """The files of a shard, for each size."""
        return {name: self.work / shard_name(name, shard, self.what.form) for name in self.what.names}

    def note_file(self, shard: int) -> Path:
        """The file of a shard's note. The note lists the shard's content, and is written after the shard."""
        return self.work / "done" / f"{shard:05d}.json"

    def note(self, shard: int) -> dict[str, Any] | None:
        """The note of a finished shard; None if the shard must be written."""
        try:
            note: dict[str, Any] = json.loads(read_file(str(self.note_file(shard))))
            sizes = {str(name): [path.stat().st_size] for name, path in self.files(shard).items()}
            return note if note["files"] == sizes else None
        except (OSError, ValueError, LookupError, TypeError):  # damaged, or not written
            return None

    @property
    def augmented(self) -> dict[str, Any] | None:
        """What the manifest says of augmented versions."""
        if self.augment is None:
            return None
        return {"epochs": self.what.epochs, "made_of": made_of(self.augment, self.seed)}

    def describe(self) -> dict[str, Any]:
        """Everything that decides the written bytes, as JSON."""
        source, extra = self.source, self.source.extra
        what = {field.name: getattr(self.what, field.name) for field in fields(Pack)}
        what |= {"sizes": self.what.names, "format": self.what.form}
        del what["pixel_centers"], what["orientation"], what["colors"]  # stored in `targets`
        if self.augment is not None:
            what["augmented"] = self.augmented
            what["backends"] = [view.augment.backend for view in self.augment.views]
        if self.what.form != "jpeg":
            del what["quality"]
        values = {"channels": self.decode.channels, "dtype": self.dtype} if self.dtype else {}
        return {
            "source": source.digest(),
            "images": len(source),
            "numbers": None if source.indices is None else digest(source.indices.numpy().tobytes()),
            "labels": _labels_digest(source),
            "classes": source.classes,
            **({} if self.targets is None else {"targets": self.targets}),
            **({"extra": extra._asdict() | {"names": [*extra.names]}} if extra is not None else {}),
            **what,
            "decode": {
                "backend": self.decode.backend,
                "codecs": sorted(self.decode.codecs),
                "max_pixels": self.decode.max_pixels,
                "truncated": "accept" if self.truncated else "reject",
                **values,
            },
        }

    def refuse_changes(self, earlier: Any) -> None:
        """Raise ConfigError if ``earlier``, what :meth:`describe` returned in an earlier run, differs from this job."""
        if changes := differences(earlier, json.loads(json.dumps(self.describe()))):
            listed = "; ".join(f"{where}: {a!r:.60} there, {b!r:.60} in this run" for where, a, b in changes[:5])
            raise ConfigError(
                f"`out` holds another job: {str(self.out)!r}. {listed}. Use those settings, or set another `out`."
            )

    @contextmanager
    def only_writer(self) -> Iterator[None]:
        """Create and lock the work folder while the block runs, and record the job in it.

        Raises ConfigError if another run has the lock or the folder holds another job, and GpuaugError if the block
        raises an OSError, such as a full disk.
        """
        try:
            self.work.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _no_folder(self.out, error) from error
        descriptor = os.open(self.work, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"another run is writing `out`, {str(self.out)!r}. Wait until that run ends."
                ) from error
            except OSError:  # the file system has no locks
                pass
            for part in self.work.rglob("*.part"):  # of a killed run
                part.unlink()
            self._record()
            yield
        except OSError as error:
            raise GpuaugError(
                f"the run that writes {str(self.out)!r} has stopped: {error}. Remove the cause. {GO_ON}"
            ) from error
        finally:
            os.close(descriptor)

    def _record(self) -> None:
        file = self.work / "job.json"
        if not file.exists():
            files.write(file, json.dumps(self.describe(), indent=1), sync=True)
            return
        try:
            earlier = json.loads(read_file(str(file)))
        except (OSError, ValueError) as error:
            raise SourceError(f"{file} cannot be read ({error}). Remove {str(self.work)!r} and pack again.") from error
        self.refuse_changes(earlier)


def finished(out: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The manifest of a finished folder, or None. Raises SourceError if the manifest is damaged."""
    file = Path(out) / MANIFEST
    try:
        return parse(read_file(str(file)))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise SourceError(f"{file} cannot be used: {error}. Remove the folder and pack again.") from error


def _labels_digest(source: Source) -> str | None:
    """A hash of the labels, if they are known without reading the samples."""
    if source.labels is not None:
        return digest(source.labels.numpy().tobytes())
    label = source.label
    if not callable(label):
        return None
    found = map(label, active_numbers(source).tolist())
    values = [value.label if isinstance(value, Target) else value for value in found]
    return None if all(value is None for value in values) else digest(repr(values).encode())


def checked_out(out: Path, source: Source) -> Path:
    """The absolute path of ``out``. Raises ConfigError if ``out`` is inside the source or holds other files."""
    place = Path(os.path.abspath(out.expanduser()))
    root = source.root or ""
    is_folder = "://" not in root and os.path.isdir(root)
    if is_folder and Path(os.path.realpath(place)).is_relative_to(os.path.realpath(root)):
        raise ConfigError(
            f"`out` must not be inside `source.root` ({root!r}), because the new files would become samples. Found: "
            f"{str(out)!r}."
        )
    try:
        names = sorted(name for name in os.listdir(place) if not name.endswith(".part")) if place.exists() else []
    except OSError as error:
        raise _no_folder(place, error) from error
    if names and MANIFEST not in names and PARTIAL not in names:
        raise ConfigError(
            f"`out` must be a new or empty folder, or the folder of an earlier run. Found {len(names)} other files in "
            f"{str(place)!r}, such as {names[0]!r}."
        )
    return place


def _no_folder(out: Path, error: OSError) -> ConfigError:
    return ConfigError(f"`out` must be a folder that can be written. Found: {str(out)!r} ({error}).")
