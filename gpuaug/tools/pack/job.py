"""The job of `gpuaug pack`: what to write, the check against an earlier run, and the writing of shards."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from gpuaug import checks, files
from gpuaug.augment.crop import ResizeCenterCrop
from gpuaug.augment.recipe import Augment, MultiView
from gpuaug.batch import CropWindows, EncodedBatch, Fault, Interpolation, Target
from gpuaug.decode import header
from gpuaug.decode.decoder import Decode
from gpuaug.decode.request import HeaderInfo
from gpuaug.errors import ConfigError, GpuaugError, SourceError
from gpuaug.loader.augmented import made_of
from gpuaug.read.reader import Reader
from gpuaug.source import runs
from gpuaug.source.adapt import Source
from gpuaug.source.extra import Fields
from gpuaug.source.local import read_file
from gpuaug.source.packed import FULL, MANIFEST, Size, parse, sample_checksum, shard_name
from gpuaug.targets.colors import color_table
from gpuaug.targets.rules import Orientation
from gpuaug.tools.pack.targets import TargetPacker
from gpuaug.tools.pack.versions import Versions
from gpuaug.tools.store import GO_ON, check_out, digest, file_digest, read_json, refuse_changes, to_json

Format = Literal["jpeg", "uint8"]
PARTIAL = ".partial"
_READ_SAMPLES = 32  # samples per read
_CANVAS_BYTES = 1 << 28  # if the resized images of a batch need more memory, they are resized one by one
_LONGEST_JPEG = 65_535  # pixels per side

# columns of the index; a column that differs between the sizes has a name such as `224.offsets`
COLUMNS: dict[str, Any] = {
    "numbers": np.int64, "offsets": np.int64, "lengths": np.int32, "checksums": np.int64, "shapes": np.int32,
    "mask_offsets": np.int64, "mask_lengths": np.int32, "object_bounds": np.int64, "object_labels": np.int64,
    "object_crowd": np.bool_, "object_ids": np.int64, "area": np.float32, "boxes": np.float32, "keypoints": np.float32,
}  # fmt: skip

Encoded = list[tuple[bytes, tuple[int, int]]]  # for each size: the bytes to write, and (height, width)


@dataclass(frozen=True, kw_only=True)
class Pack:
    """What to write. ``conf/gpuaug/command/pack.yaml`` explains the keys."""

    epochs: int | None = None
    format: Format | None = None
    sizes: Sequence[int] | int | None = None
    quality: int = 90
    subsampling: str = "4:2:0"
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
        sizes = [self.sizes] if type(self.sizes) is int else self.sizes
        if sizes is not None and (
            not isinstance(sizes, Sequence)
            or not sizes
            or any(type(size) is not int or size < 1 for size in sizes)
            or len(set(sizes)) < len(sizes)
        ):
            raise ConfigError(
                f"`sizes` must be different lengths of the shorter side, such as [128,224]. Found: {self.sizes!r}."
            )
        object.__setattr__(self, "sizes", None if sizes is None else tuple(sorted(sizes)))
        checks.whole_number("quality", self.quality, 1, 100)
        subsampling = ("4:4:4", "4:2:2", "4:2:0")
        checks.one_of("subsampling", self.subsampling, subsampling, hint=" In YAML it needs quotes.")
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

    @property
    def work(self) -> Path:
        """The folder that holds all files until the last one is written."""
        return self.out / PARTIAL

    @property
    def shards(self) -> int:
        return -(-len(self.source) // self.what.samples)

    def numbers(self, shard: int) -> NDArray[np.int64]:
        """The source's numbers for the samples of a shard."""
        first, last = shard * self.what.samples, min((shard + 1) * self.what.samples, len(self.source))
        indices = self.source.indices
        return np.arange(first, last) if indices is None else indices.numpy()[first:last]

    def note_file(self, shard: int) -> Path:
        """The file of a shard's note. The note lists the shard's content, and is written after the shard."""
        return self.work / "done" / f"{shard:05d}.json"

    def note(self, shard: int) -> dict[str, Any] | None:
        """The note of a finished shard; None if the shard must be written."""
        try:
            note: dict[str, Any] = read_json(self.note_file(shard))
            for name in self.what.names:
                path = self.work / shard_name(name, shard, self.what.form)
                if path.stat().st_size != note["files"][str(name)][0]:
                    return None
        except (OSError, ValueError, LookupError, TypeError):  # damaged, or not written
            return None
        return note

    @property
    def augmented(self) -> dict[str, Any] | None:
        """What the manifest says of augmented versions."""
        if self.augment is None:
            return None
        return {"epochs": self.what.epochs, "made_of": made_of(self.augment, self.seed)}

    def describe(self) -> dict[str, Any]:
        """Everything that decides the written bytes, as JSON."""
        source, extra = self.source, getattr(self.source, "extra", None)
        what = {field.name: getattr(self.what, field.name) for field in fields(Pack)}
        what |= {"sizes": self.what.names, "format": self.what.form}
        del what["pixel_centers"], what["orientation"], what["colors"]  # stored in `targets`
        if self.augment is not None:
            what["augmented"] = self.augmented
            what["backends"] = [view.augment.backend for view in self.augment.views]
        if self.what.form == "uint8":
            del what["quality"], what["subsampling"]
        return {
            "source": source.digest(),
            "images": len(source),
            "numbers": None if source.indices is None else digest(source.indices.numpy().tobytes()),
            "labels": _labels_digest(source),
            "classes": source.classes,
            **({} if self.targets is None else {"targets": self.targets}),
            **({"extra": extra._asdict() | {"names": [*extra.names]}} if isinstance(extra, Fields) else {}),
            **what,
            "decode": {
                "backend": self.decode.backend,
                "codecs": sorted(self.decode.codecs),
                "max_pixels": self.decode.max_pixels,
                "truncated": "accept" if self.truncated else "reject",
            },
        }

    def begin(self) -> None:
        """Record the job in the work folder. Raises ConfigError if the folder holds another job."""
        file = self.work / "job.json"
        if file.exists():
            try:
                earlier = read_json(file)
            except (OSError, ValueError) as error:
                raise SourceError(
                    f"{file} cannot be read ({error}). Remove {str(self.work)!r} and pack again."
                ) from error
            refuse_changes(self.out, earlier, self.describe())
        else:
            files.write(file, to_json(self.describe()), sync=True)


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
    numbers = range(len(source)) if source.indices is None else source.indices.tolist()
    values = [value.label if isinstance(value, Target) else value for value in map(label, numbers)]
    return None if all(value is None for value in values) else digest(repr(values).encode())


def checked_out(out: Path, source: Source) -> Path:
    """The absolute path of ``out``. Raises ConfigError if ``out`` is inside the source or holds other files."""
    place = Path(os.path.abspath(out.expanduser()))
    root: Any = getattr(source, "root", None)
    is_folder = isinstance(root, str) and "://" not in root and os.path.isdir(root)
    if is_folder and Path(os.path.realpath(place)).is_relative_to(os.path.realpath(root)):
        raise ConfigError(
            f"`out` must not be inside `source.root` ({root!r}), because the new files would become samples. Found: "
            f"{str(out)!r}."
        )
    check_out(place, MANIFEST, PARTIAL)
    return place


class Packer:
    """Writes shards of a job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._decoder = job.decode.open("cpu", accept_truncated=job.truncated)
        raw = job.what.form == "uint8"
        self._targets = None if job.targets is None else TargetPacker(job.targets, job.source, self._decoder, raw=raw)
        self._versions = None if job.augment is None else Versions(job.augment, job.seed, count=len(job.what.names))
        self._reader = Reader(job.source, num_workers=0, targets=() if self._targets is None else self._targets.kinds)

    def close(self) -> None:
        self._decoder.close()

    def write(self, shard: int, progress: Callable[[int], Any]) -> list[list[Any]]:
        """Write a shard at all sizes, then its note. Returns the faults as [number, stage, reason, size, head in hex].

        If bad samples are not dropped, the first batch with a bad sample stops the work, and the shard gets no note.
        """
        job, numbers = self.job, self.job.numbers(shard)
        paths = {name: job.work / shard_name(name, shard, job.what.form) for name in job.what.names}
        columns, faults = defaultdict[str, list[Any]](list), list[list[Any]]()
        columns |= {"keys": [], "extra": [], "labels": []}  # also if all samples of the shard are bad
        try:
            with ExitStack() as stack:
                outs = {name: _opened(stack, path) for name, path in paths.items()}
                for first in range(0, len(numbers), _READ_SAMPLES):
                    some = numbers[first : first + _READ_SAMPLES]
                    faults += self._write_batch(some, outs, columns)
                    if faults and not job.drop:
                        raise _BadSampleError
                    progress(len(some))
            written = {name: [path.stat().st_size, file_digest(path)] for name, path in paths.items()}
            note = {"files": written, "faults": faults, "columns": columns}
            files.write(job.note_file(shard), json.dumps(note), sync=True)
        except _BadSampleError:
            return faults
        except OSError as error:
            raise GpuaugError(f"shard {shard} cannot be written to {str(job.work)!r}: {error}. {GO_ON}") from error
        return faults

    def _write_batch(
        self, numbers: NDArray[np.int64], outs: dict[Size, _Out], columns: dict[str, list[Any]]
    ) -> list[list[Any]]:
        """Append samples to the shard and to the columns of its note. Returns the faults."""
        indices = torch.from_numpy(numbers.astype(np.int64))
        batch = next(self._reader.batches([(indices, indices * 0, indices >= 0)]))
        headers, windows = self._plan(batch)
        targets = None if self._targets is None else self._targets.encode(batch, headers, windows)
        faults = {} if targets is None else {fault.row: fault for fault in targets.faults}
        kept = []
        for row, encoded in enumerate(self._encode(batch, headers, windows)):
            if isinstance(encoded, Fault):
                faults[row] = encoded
                continue
            if row in faults:
                continue
            kept.append(row)
            number, label = int(numbers[row]), None if batch.labels is None else batch.labels[row].tolist()
            masks = None if targets is None else targets.masks.get(row)
            key, extra = self.job.source.key(number), None if batch.extra is None else batch.extra[row]
            if label is not None and not np.isfinite(label).all():  # a packed source would refuse it
                raise SourceError(f"labels must be finite. Found: {label!r:.100} of {key!r}. Replace this label.")
            _write_sample(outs, columns, f"{number:09d}", encoded, masks, label)
            for name, value in {"numbers": number, "keys": key, "labels": label, "extra": _json(extra, key)}.items():
                columns[name].append(value)
        for name, column in {} if targets is None else targets.columns(kept, [*outs]).items():
            columns[name] += column.tolist()
        return [[int(numbers[row]), f.stage, f.reason, f.size, f.head.hex()] for row, f in sorted(faults.items())]

    def _plan(self, batch: EncodedBatch) -> tuple[HeaderInfo, list[CropWindows]]:
        """Read the headers of a batch, and make the windows of each size, or of each view in each version."""
        headers = self._decoder.read_headers(batch)
        if self._versions is not None:
            return headers, self._versions.windows(batch, headers)
        sizes = np.stack([headers.height, headers.width], axis=1).astype(np.int32)
        return headers, [_whole(sizes, name, self.job.what) for name in self.job.what.names]

    def _encode(self, batch: EncodedBatch, headers: HeaderInfo, windows: list[CropWindows]) -> list[Encoded | Fault]:
        """The bytes to write for each row, or the row's fault."""
        faults = {fault.row: fault for fault in [*headers.faults, *batch.faults]}
        rows = range(len(batch))
        if len(batch) > 1 and sum(3 * len(batch) * h * w for h, w in (each.size for each in windows)) > _CANVAS_BYTES:
            alone = (_single(batch, row) for row in rows)
            return [faults.get(row) or self._encode(one, *self._plan(one))[0] for row, one in enumerate(alone)]
        images, bad = self._decoder.pixels(batch, headers, windows)
        faults |= {fault.row: fault for fault in bad if fault.row not in faults}
        if self._versions is not None:
            made = self._versions.augment(batch, images)  # K arrays [B, H, W, 3]
            shape = made[0].shape[1:3]
            head = header.raw_header(*shape)
            return [faults.get(row) or [(head + each[row].tobytes(), shape) for each in made] for row in rows]
        return [
            faults.get(row) or self._encode_row(row, batch, headers, zip(windows, images, strict=True)) for row in rows
        ]

    def _encode_row(
        self, row: int, batch: EncodedBatch, headers: HeaderInfo, views: Iterable[tuple[CropWindows, Tensor]]
    ) -> Encoded | Fault:
        """The bytes to write for one image. ``views``: for each size, the batch's windows and resized images."""
        what, data = self.job.what, batch.encoded(row).numpy()
        begin = data[:16].tobytes()
        upright = headers.orientation[row] == 1 and row not in headers.replaced
        original = (headers.height[row], headers.width[row]) if upright and header.sniff(begin) == "jpeg" else None
        encoded: Encoded = []
        for windows, canvases in views:
            height, width = windows.resized[row].tolist()
            pixels = canvases[row, :height, :width].numpy()
            if what.form == "uint8":
                made = header.raw_header(height, width) + pixels.tobytes()
            elif (height, width) == original:
                made = data.tobytes()
            elif max(height, width) > _LONGEST_JPEG:
                reason = f"{height}x{width} pixels: a side of a JPEG has at most {_LONGEST_JPEG}"
                return Fault(row, "encode", reason, len(data), begin)
            else:
                stream = io.BytesIO()
                Image.fromarray(pixels).save(stream, "JPEG", quality=what.quality, subsampling=what.subsampling)
                made = stream.getvalue()
            encoded.append((made, (height, width)))
        return encoded


def _json(value: Any, key: str) -> str:
    """An extra value as JSON. Raises ConfigError if JSON would change it."""
    with suppress(TypeError, ValueError, RecursionError):
        if _same(json.loads(text := json.dumps(value)), value):
            return text
    raise ConfigError(
        f"`source.extra` must give text, numbers, lists or dictionaries, because `gpuaug pack` stores the values as "
        f"JSON. Found: {value!r:.100} of {key!r}. Remove `source.extra`, or choose other fields."
    )


def _same(read: Any, value: Any) -> bool:
    """Whether JSON kept a value. JSON turns tuples into lists, and keys of dictionaries into text."""
    if isinstance(read, dict):
        return read.keys() == value.keys() and all(_same(read[key], value[key]) for key in read)
    if isinstance(read, list):
        return isinstance(value, list) and all(map(_same, read, value))
    return bool(read == value) or read != read  # NaN differs from itself


class _BadSampleError(Exception):
    """Stops the writing of a shard, so that its files are removed."""


def _single(batch: EncodedBatch, row: int) -> EncodedBatch:
    data = batch.encoded(row)
    rows = {name: getattr(batch, name)[row : row + 1] for name in ("indices", "repeats", "valid")}
    return EncodedBatch(data=data, offsets=torch.tensor([0, len(data)]), labels=None, **rows)


def _whole(sizes: NDArray[np.int32], size: Size, what: Pack) -> CropWindows:
    """Windows that resize whole images of ``sizes`` [B, 2] to a shorter side of at most ``size``."""
    box = np.maximum(sizes, 1)  # bad rows are 0x0
    resized = box.copy()
    if isinstance(size, int) and (larger := box.min(axis=1) > size).any():
        resized[larger] = ResizeCenterCrop(size, size).windows(None, *box[larger].T).resized
    zero = np.zeros_like(box)
    canvas = int(resized[:, 0].max()), int(resized[:, 1].max())
    return CropWindows(np.concatenate([zero, box], axis=1), resized, zero, canvas, what.interpolation)


_Out = tarfile.TarFile | BinaryIO  # an open shard file: a tar of JPEGs, or pixels with a header before each image


def _opened(stack: ExitStack, path: Path) -> _Out:
    file = stack.enter_context(files.replacing(path, sync=True))
    if path.suffix != ".tar":
        return file
    return stack.enter_context(tarfile.TarFile(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT))


def _write_sample(
    outs: dict[Size, _Out], columns: dict[str, list[Any]], name: str, encoded: Encoded, masks: Any, label: Any
) -> None:
    """Append a sample at every size: the image, then its mask, then its label.

    A tar stores a whole-number label as WebDataset's ``cls``, and any other label as JSON.
    """
    for k, (size, out) in enumerate(outs.items()):
        data, shape = encoded[k]
        begin = _append(out, f"{name}.jpg", data)
        own = [] if masks is None else [masks[k]]
        values = {"offsets": begin, "lengths": len(data), "checksums": sample_checksum(data, *own), "shapes": shape}
        for mask in own:
            begin = _append(out, f"{name}.seg.{'runs' if mask.startswith(runs.MAGIC) else 'png'}", mask)
            values |= {"mask_offsets": begin, "mask_lengths": len(mask)}
        for field, value in values.items():
            columns[f"{size}.{field}"].append(value)
        if isinstance(out, tarfile.TarFile) and isinstance(label, int):
            _append(out, f"{name}.cls", b"%d" % label)
        elif isinstance(out, tarfile.TarFile) and label is not None:
            _append(out, f"{name}.json", json.dumps({"label": label}).encode())


def _append(out: _Out, name: str, data: bytes) -> int:
    """Append ``data``; in a tar, as the member ``name``. Returns the position of the first byte."""
    if not isinstance(out, tarfile.TarFile):
        begin = out.tell()
        out.write(data)
        return begin
    info = tarfile.TarInfo(name)  # times and owners are left out, because they differ between runs
    info.size = len(data)
    begin = out.offset + tarfile.BLOCKSIZE  # after the member's header
    out.addfile(info, io.BytesIO(data))
    return begin
