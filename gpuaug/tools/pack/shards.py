"""The shards of `gpuaug pack`: read, decode, resize and encode a range of samples, and write one file per size."""

from __future__ import annotations

import io
import json
import tarfile
import zlib
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from gpuaug import files
from gpuaug.augment.crop import Resize
from gpuaug.batch import Boxes, EncodedBatch, Fault
from gpuaug.decode import header
from gpuaug.decode.plan import HeaderInfo
from gpuaug.errors import GpuaugError
from gpuaug.read.reader import Reader
from gpuaug.source.packed import Size, shard_name
from gpuaug.tools.on_ray import GO_ON
from gpuaug.tools.pack.job import Job, Pack
from gpuaug.tools.store import file_digest

_READ_SAMPLES = 32  # read at a time
_CANVAS_BYTES = 1 << 28  # of resized images at a time; a batch that needs more is resized image by image
_LONGEST_JPEG = 65_535  # pixels of a side

Encoded = list[tuple[bytes, tuple[int, int]]]  # per size: the bytes to write, (height, width)


class Packer:
    """Writes shards of a job, one after the other, with one thread."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._decoder = job.decode.open("cpu", accept_truncated=job.truncated)
        self._reader = Reader(job.source, num_workers=0)

    def close(self) -> None:
        """Free the decoder's memory."""
        self._decoder.close()

    def write(self, shard: int, progress: Callable[[int], Any]) -> list[list[Any]]:
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
        paths = {name: job.work / shard_name(name, shard, job.what.format) for name in job.what.names}
        try:
            with ExitStack() as stack:
                jpeg = job.what.format == "jpeg"
                shards = [_ShardFile(stack, path, jpeg=jpeg) for path in paths.values()]
                note = self._write_samples(job.numbers(shard), shards, progress)
            note["files"] = {
                name: {"bytes": path.stat().st_size, "hash": file_digest(path), **shard.index}
                for (name, path), shard in zip(paths.items(), shards, strict=True)
            }
            files.write(job.note_file(shard), json.dumps(note), sync=True)
        except _BadSampleError as error:
            return error.faults
        except OSError as error:
            raise GpuaugError(f"shard {shard} cannot be written to {str(job.work)!r}: {error}. {GO_ON}") from error
        return list(note["faults"])

    def _write_samples(
        self, numbers: NDArray[np.int64], shards: list[_ShardFile], progress: Callable[[int], Any]
    ) -> dict[str, Any]:
        keys, kept, labels, faults = [], [], [], []
        for first in range(0, len(numbers), _READ_SAMPLES):
            some = numbers[first : first + _READ_SAMPLES]
            indices = torch.from_numpy(some.astype(np.int64))
            batch = next(self._reader.batches([(indices, indices * 0, indices >= 0)]))
            for row, encoded in enumerate(self._encode(batch)):
                if isinstance(encoded, Fault):
                    faults.append([first + row, encoded.stage, encoded.reason, encoded.size, encoded.head.hex()])
                    continue
                number = int(some[row])
                label = None if batch.labels is None else batch.labels[row].tolist()
                for shard, (data, shape) in zip(shards, encoded, strict=True):
                    shard.add(number, data, shape, label)
                keys.append(self.job.source.key(number))
                kept.append(number)
                labels.append(label)
            if faults and not self.job.drop:
                raise _BadSampleError(faults)
            progress(len(some))
        return {"keys": keys, "numbers": kept, "labels": labels, "faults": faults}

    def _encode(self, batch: EncodedBatch) -> list[Encoded | Fault]:
        """What to write for each row, or why it is bad."""
        what, headers = self.job.what, self._decoder.read_headers(batch)
        sizes = np.stack([headers.height, headers.width], axis=1).astype(np.int32)
        boxes = [_whole(sizes, name, what) for name in what.names]
        if len(batch) > 1 and sum(3 * len(batch) * h * w for h, w in (box.size for box in boxes)) > _CANVAS_BYTES:
            return [one for row in range(len(batch)) for one in self._encode(_single(batch, row))]
        images, bad = self._decoder.pixels(batch, headers, boxes)
        faults = {fault.row: fault for fault in [*headers.faults, *bad, *batch.faults]}
        return [
            faults.get(row) or self._encode_row(row, batch, headers, zip(boxes, images, strict=True))
            for row in range(len(batch))
        ]

    def _encode_row(
        self, row: int, batch: EncodedBatch, headers: HeaderInfo, views: Iterable[tuple[Boxes, Tensor]]
    ) -> Encoded | Fault:
        """What to write for an image, given the batch's boxes and canvases of each size."""
        what, data = self.job.what, batch.encoded(row).numpy()
        begin = data[:16].tobytes()
        upright = headers.orientation[row] == 1 and row not in headers.replaced
        original = (headers.height[row], headers.width[row]) if upright and header.sniff(begin) == "jpeg" else None
        encoded: Encoded = []
        for boxes, canvases in views:
            height, width = boxes.resized[row].tolist()
            pixels = canvases[row, :height, :width].numpy()
            if what.format == "uint8":
                made = header.raw_header(height, width) + pixels.tobytes()
            elif (height, width) == original:
                made = data.tobytes()
            elif max(height, width) > _LONGEST_JPEG:
                reason = f"{height}x{width} is more than the {_LONGEST_JPEG} pixels of a side of a JPEG"
                return Fault(row, "encode", reason, len(data), begin)
            else:
                stream = io.BytesIO()
                Image.fromarray(pixels).save(stream, "JPEG", quality=what.quality, subsampling=what.subsampling)
                made = stream.getvalue()
            encoded.append((made, (height, width)))
        return encoded


class _BadSampleError(Exception):
    """Ends a shard, so that its files are not kept."""

    def __init__(self, faults: list[list[Any]]) -> None:
        super().__init__()
        self.faults = faults


def _single(batch: EncodedBatch, row: int) -> EncodedBatch:
    """One row of a batch, as a batch."""
    data, at = batch.encoded(row), slice(row, row + 1)
    return EncodedBatch(
        data=data,
        offsets=torch.tensor([0, len(data)]),
        labels=None,
        indices=batch.indices[at],
        repeats=batch.repeats[at],
        valid=batch.valid[at],
    )


def _whole(sizes: NDArray[np.int32], size: Size, what: Pack) -> Boxes:
    """Resize whole images [B, 2] to a shorter side of ``size``, on a canvas for the largest. Nothing is enlarged."""
    box = np.maximum(sizes, 1)  # bad rows are 0x0
    resized = box.copy()
    for row, (height, width) in enumerate(box.tolist()):
        if isinstance(size, int) and size < min(height, width):
            resized[row] = Resize(size).boxes(None, np.array([height]), np.array([width])).size
    zero = np.zeros_like(box)
    canvas = int(resized[:, 0].max()), int(resized[:, 1].max())
    return Boxes(np.concatenate([zero, box], axis=1), resized, zero, canvas, what.interpolation)


class _ShardFile:
    """One file of samples: a tar of JPEGs, or headers and pixels. ``index`` says where each sample is."""

    def __init__(self, stack: ExitStack, path: Path, *, jpeg: bool) -> None:
        self._file = stack.enter_context(files.replacing(path, sync=True))
        tar = tarfile.TarFile(fileobj=self._file, mode="w", format=tarfile.USTAR_FORMAT) if jpeg else None
        self._tar = tar and stack.enter_context(tar)
        self.index: dict[str, list[Any]] = {"offsets": [], "lengths": [], "shapes": [], "checksums": []}

    def add(self, number: int, data: bytes, shape: tuple[int, int], label: Any) -> None:
        """Append a sample. WebDataset's `cls` is a whole number; other labels go into a JSON member."""
        offset = self._file.tell() + (0 if self._tar is None else tarfile.BLOCKSIZE)  # of a member's header
        values = {"offsets": offset, "lengths": len(data), "shapes": shape, "checksums": zlib.crc32(data)}
        for name, value in values.items():
            self.index[name].append(value)
        if self._tar is None:
            self._file.write(data)
            return
        self._add_member(f"{number:09d}.jpg", data)
        if isinstance(label, int):
            self._add_member(f"{number:09d}.cls", b"%d" % label)
        elif label is not None:
            self._add_member(f"{number:09d}.json", json.dumps({"label": label}).encode())

    def _add_member(self, name: str, data: bytes) -> None:
        info = tarfile.TarInfo(name)  # without times and owners, which would change the bytes of every run
        info.size = len(data)
        assert self._tar is not None
        self._tar.addfile(info, io.BytesIO(data))
