"""The shards of `gpuaug pack`: read, decode, resize and encode a range of samples, and write one file per size."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from gpuaug import files
from gpuaug.augment.crop import Resize
from gpuaug.batch import Boxes, EncodedBatch, Fault
from gpuaug.decode import header
from gpuaug.decode.decoder import Decoder
from gpuaug.decode.plan import HeaderInfo
from gpuaug.errors import GpuaugError
from gpuaug.read.reader import Reader
from gpuaug.source.packed import Size, shard_name
from gpuaug.tools.pack.job import Job, Pack
from gpuaug.tools.store import DIGEST_BYTES

GO_ON = "What is done is kept: the same command goes on."

_READ_SAMPLES = 32  # read at a time
_CANVAS_BYTES = 1 << 28  # of resized images at a time; a batch that needs more is resized image by image
_LONGEST_JPEG = 65_535  # pixels of a side
_TAR_BLOCK = 512

Encoded = dict[Size, tuple[bytes, tuple[int, int]]]  # per size: the bytes to write, (height, width)


class Packer:
    """Writes shards of a job, one after the other, with one thread."""

    def __init__(self, job: Job) -> None:
        self.job = job

    @cached_property
    def _decoder(self) -> Decoder:
        return self.job.decode.open("cpu", accept_truncated=self.job.truncated)

    @cached_property
    def _reader(self) -> Reader:
        return Reader(self.job.source, num_workers=0)

    def close(self) -> None:
        """Free the decoder's memory."""
        if "_decoder" in self.__dict__:
            self._decoder.close()

    def write(self, shard: int, progress: Callable[[int], Any] = lambda _: None) -> list[list[Any]]:
        """Write a shard at all sizes, and then its note.

        Args:
            shard: its number.
            progress: is called with the number of samples after each batch.

        Returns:
            The bad samples as (row, stage, reason, size, head in hex). If bad samples are not dropped, the first one
            ends the work, and nothing is written.

        Raises:
            GpuaugError: if a file cannot be written.
        """
        job = self.job
        try:
            with ExitStack() as stack:
                shards: dict[Size, _ShardFile] = {}
                for name in job.what.names:
                    file = files.replacing(job.work / shard_name(name, shard, job.what.format), sync=True)
                    shards[name] = _ShardFile(stack.enter_context(file), jpeg=job.what.format == "jpeg")
                note = self._write_samples(job.numbers(shard), shards, progress)
                note["files"] = {name: file.finish() for name, file in shards.items()}
            files.write(job.note_file(shard), json.dumps(note), sync=True)
        except _BadSampleError as error:
            return error.faults
        except OSError as error:
            raise GpuaugError(f"shard {shard} cannot be written to {str(job.work)!r}: {error}. {GO_ON}") from error
        return list(note["faults"])

    def _write_samples(
        self, numbers: NDArray[np.int64], shards: dict[Size, _ShardFile], progress: Callable[[int], Any]
    ) -> dict[str, Any]:
        keys, kept, labels, faults = [], [], [], []
        for first in range(0, len(numbers), _READ_SAMPLES):
            some = numbers[first : first + _READ_SAMPLES]
            batch = self._read(some)
            encoded, bad = self._encode(batch)
            faults += [[first + f.row, f.stage, f.reason, f.size, f.head.hex()] for f in bad]
            if faults and not self.job.drop:
                raise _BadSampleError(faults)
            for row in sorted(encoded):
                number = int(some[row])
                label = None if batch.labels is None else batch.labels[row].tolist()
                for name, (data, shape) in encoded[row].items():
                    shards[name].add(number, data, shape, label)
                keys.append(self.job.source.key(number))
                kept.append(number)
                labels.append(label)
            progress(len(some))
        return {"keys": keys, "numbers": kept, "labels": labels, "faults": faults}

    def _read(self, numbers: NDArray[np.int64]) -> EncodedBatch:
        indices = torch.from_numpy(numbers.astype(np.int64))
        nothing = torch.zeros_like(indices)
        return next(self._reader.batches([(indices, nothing, nothing == 0)]))

    def _encode(self, batch: EncodedBatch) -> tuple[dict[int, Encoded], list[Fault]]:
        """What to write for each good row; and the bad rows."""
        what = self.job.what
        look = self._decoder.read_headers(batch)
        faults = {fault.row: fault for fault in [*look.faults, *batch.faults]}
        rows = [row for row in range(len(batch)) if row not in faults]
        boxes = {
            row: [_whole(int(look.height[row]), int(look.width[row]), size, what) for size in what.names]
            for row in rows
        }
        encoded: dict[int, Encoded] = {}
        for group in self._groups(rows, boxes):
            part = _rows(batch, group)
            views = [_joined([boxes[row][k] for row in group]) for k in range(len(what.names))]
            images, bad = self._decoder.pixels(part, self._decoder.read_headers(part), views)
            for fault in bad:
                faults[group[fault.row]] = replace(fault, row=group[fault.row])
            for at, row in enumerate(group):
                if row in faults:
                    continue
                shapes = [tuple(view.resized[at].tolist()) for view in views]
                pixels = [image[at, :h, :w].numpy() for image, (h, w) in zip(images, shapes, strict=True)]
                data = batch.encoded(row).numpy()
                made = self._encode_row(data, shapes, pixels, original=_shape_to_copy(data, look, row))
                if isinstance(made, str):
                    faults[row] = Fault(row, "encode", made, len(data), data[:16].tobytes())
                else:
                    encoded[row] = made
        return encoded, [faults[row] for row in sorted(faults)]

    def _encode_row(
        self, data: NDArray[np.uint8], shapes: list[Any], pixels: list[Any], *, original: tuple[int, int] | None
    ) -> Encoded | str:
        """What to write for one image, or the reason why it cannot be written."""
        what = self.job.what
        encoded: Encoded = {}
        for name, shape, image in zip(what.names, shapes, pixels, strict=True):
            if what.format == "jpeg" and shape == original:
                encoded[name] = data.tobytes(), shape
            elif what.format == "jpeg" and max(shape) > _LONGEST_JPEG:
                return f"{shape[0]}x{shape[1]} is more than the {_LONGEST_JPEG} pixels of a side of a JPEG"
            else:
                encoded[name] = _bytes_of(np.ascontiguousarray(image), what), shape
        return encoded

    def _groups(self, rows: list[int], boxes: dict[int, list[Boxes]]) -> list[list[int]]:
        """Rows to resize together: all of them if their canvases are small enough, else each alone."""
        if not rows:
            return []
        sides = np.array([[box.size for box in boxes[row]] for row in rows])  # [rows, sizes, 2]
        total = int(sides.max(axis=0).prod(axis=1).sum()) * 3 * len(rows)
        return [rows] if total <= _CANVAS_BYTES else [[row] for row in rows]


class _BadSampleError(Exception):
    """Ends a shard, so that its files are not kept."""

    def __init__(self, faults: list[list[Any]]) -> None:
        super().__init__()
        self.faults = faults


def _rows(batch: EncodedBatch, rows: list[int]) -> EncodedBatch:
    """Some rows of a batch, as a batch."""
    parts = [batch.encoded(row) for row in rows]
    at = torch.tensor(rows)
    return EncodedBatch(
        data=torch.cat(parts),
        offsets=torch.from_numpy(np.cumsum([0, *map(len, parts)])),
        labels=None,
        indices=batch.indices[at],
        repeats=batch.repeats[at],
        valid=batch.valid[at],
    )


def _whole(height: int, width: int, size: Size, what: Pack) -> Boxes:
    """Resize the whole image to a shorter side of ``size``. Nothing is enlarged."""
    to = size if isinstance(size, int) and size < min(height, width) else (height, width)
    return Resize(to, interpolation=what.interpolation).boxes(None, np.array([height]), np.array([width]))


def _joined(boxes: list[Boxes]) -> Boxes:
    """Join the boxes of several images, on a canvas that holds the largest."""
    height, width = np.array([box.size for box in boxes]).max(axis=0).tolist()
    return Boxes(
        box=np.concatenate([box.box for box in boxes]),
        resized=np.concatenate([box.resized for box in boxes]),
        offset=np.concatenate([box.offset for box in boxes]),
        size=(height, width),
        interpolation=boxes[0].interpolation,
    )


def _shape_to_copy(data: NDArray[np.uint8], look: HeaderInfo, row: int) -> tuple[int, int] | None:
    """(height, width) of a JPEG that may be copied as it is; None if the image has to be encoded again."""
    if look.orientation[row] != 1 or row in look.replaced or header.sniff(data[:16].tobytes()) != "jpeg":
        return None
    return int(look.height[row]), int(look.width[row])


def _bytes_of(pixels: NDArray[np.uint8], what: Pack) -> bytes:
    if what.format == "uint8":
        return header.raw_header(*pixels.shape[:2]) + pixels.tobytes()
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=what.quality, subsampling=what.subsampling)
    return out.getvalue()


class _ShardFile:
    """One file of samples: a tar of JPEGs, or headers and pixels.

    Tar headers are made here, because `tarfile.TarFile` cannot say where a member's bytes begin.
    """

    def __init__(self, file: BinaryIO, *, jpeg: bool) -> None:
        self._file, self._jpeg = file, jpeg
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._at = 0
        self._samples: dict[str, list[Any]] = {"offsets": [], "lengths": [], "shapes": [], "checksums": []}

    def add(self, number: int, data: bytes, shape: tuple[int, int], label: Any) -> None:
        """Append a sample. WebDataset's `cls` is a whole number; other labels go into a JSON member."""
        samples = {"lengths": len(data), "shapes": shape, "checksums": zlib.crc32(data)}
        if self._jpeg:
            samples["offsets"] = self._member(f"{number:09d}.jpg", data)
            if isinstance(label, int):
                self._member(f"{number:09d}.cls", b"%d" % label)
            elif label is not None:
                self._member(f"{number:09d}.json", json.dumps({"label": label}).encode())
        else:
            samples["offsets"] = self._at
            self._write(data)
        for name, value in samples.items():
            self._samples[name].append(value)

    def finish(self) -> dict[str, Any]:
        """End the file. Returns its size, its digest, and what the index holds of its samples."""
        if self._jpeg:
            self._write(bytes(2 * _TAR_BLOCK))
            self._write(bytes(-self._at % tarfile.RECORDSIZE))
        return {"bytes": self._at, "hash": self._hash.hexdigest(), **self._samples}

    def _member(self, name: str, data: bytes) -> int:
        """Append a member of a tar; returns where its bytes begin."""
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(data), 0o644  # times and owners would change the bytes of every run
        self._write(info.tobuf(tarfile.USTAR_FORMAT))
        begin = self._at
        self._write(data + bytes(-len(data) % _TAR_BLOCK))
        return begin

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._at += len(data)
