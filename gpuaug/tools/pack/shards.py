"""Writes the shards of `gpuaug pack`: reads, decodes, resizes and encodes samples, in processes or on Ray."""

from __future__ import annotations

import io
import json
import logging
import multiprocessing
import pickle
import signal
import tarfile
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from gpuaug import files, machine
from gpuaug.augment.crop import ResizeCenterCrop, side_by_side
from gpuaug.augment.multi_view import MultiView
from gpuaug.augment.recipe import Augment
from gpuaug.batch import CropWindows, EncodedBatch, Fault
from gpuaug.decode import header
from gpuaug.decode.request import HeaderInfo
from gpuaug.errors import ConfigError, GpuaugError, SourceError, shown_size
from gpuaug.files import sniff
from gpuaug.loader.augmented import before_normalization
from gpuaug.read.reader import Reader
from gpuaug.source import runs
from gpuaug.source.adapt import active_numbers
from gpuaug.source.packed import Size, sample_checksum
from gpuaug.tools.pack.job import GO_ON, Job, Pack
from gpuaug.tools.pack.targets import TargetPacker

_READ_SAMPLES = 32  # samples per read
_CANVAS_BYTES = 1 << 28  # if the resized images of a batch need more memory, they are resized one by one
_LONGEST_JPEG = 65_535  # pixels per side

Encoded = list[tuple[bytes, tuple[int, int]]]  # for each size: the bytes to write, and (height, width)
Written = tuple[int, list[list[Any]]]  # a shard, and its faults as [number, stage, reason, size, head in hex]


class Packer:
    """Writes shards of a job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._decoder = job.decode.open("cpu", accept_truncated=job.truncated, dtype=job.dtype)
        raw = job.what.form != "jpeg"
        self._targets = None if job.targets is None else TargetPacker(job.targets, job.source, self._decoder, raw=raw)
        self._versions = None if job.augment is None else Versions(job.augment, job.seed, count=len(job.what.names))
        self._pixel_bytes = 4 * job.decode.channels if job.decode.channels else 3
        self._reader = Reader(job.source, num_workers=0, targets=() if self._targets is None else self._targets.kinds)

    def close(self) -> None:
        self._decoder.close()

    def write(self, shard: int) -> Written:
        """Write a shard at all sizes, then its note.

        If bad samples are not dropped, the first batch with a bad sample stops the work, and the shard gets no note.
        """
        job, numbers = self.job, self.job.numbers(shard)
        columns, faults = defaultdict[str, list[Any]](list), list[list[Any]]()
        columns |= {"keys": [], "extra": [], "labels": []}  # also if all samples of the shard are bad
        try:
            with ExitStack() as stack:
                outs = {name: _opened(stack, path) for name, path in job.files(shard).items()}
                for first in range(0, len(numbers), _READ_SAMPLES):
                    faults += self._write_batch(numbers[first : first + _READ_SAMPLES], outs, columns)
                    if faults and not job.drop:
                        return shard, faults
            written = {name: [path.stat().st_size] for name, path in job.files(shard).items()}
            note = {"files": written, "faults": faults, "columns": columns}
            files.write(job.note_file(shard), json.dumps(note), sync=True)
        except OSError as error:
            raise GpuaugError(f"shard {shard} cannot be written to {str(job.work)!r}: {error}. {GO_ON}") from error
        return shard, faults

    def first_type(self) -> str | None:
        """The type of the first image whose stored values can be read; None if there is none."""
        stored = self._decoder.stored
        assert stored is not None
        for number in active_numbers(self.job.source).tolist():
            self._decoder.read_headers(self._read(np.array([number])))
            if stored.dtype is not None:
                break
        return stored.dtype

    def _read(self, numbers: NDArray[np.int64]) -> EncodedBatch:
        indices = torch.from_numpy(numbers.astype(np.int64))
        return next(self._reader.batches([(indices, indices * 0, indices >= 0)]))

    def _write_batch(
        self, numbers: NDArray[np.int64], outs: dict[Size, _Out], columns: dict[str, list[Any]]
    ) -> list[list[Any]]:
        """Append samples to the shard and to the columns of its note. Returns the faults."""
        batch = self._read(numbers)
        headers, windows = self._headers(batch)
        bad, masks, objects = ([], {}, []) if self._targets is None else self._targets.encode(batch, headers, windows)
        faults, kept = {fault.row: fault for fault in bad}, []
        for row, encoded in enumerate(self._encode(batch, headers, windows)):
            if isinstance(encoded, Fault):
                faults[row] = encoded
                continue
            if row in faults:
                continue
            kept.append(row)
            number, label = int(numbers[row]), None if batch.labels is None else batch.labels[row].tolist()
            key, extra = self.job.source.key(number), None if batch.extra is None else batch.extra[row]
            if label is not None and not np.isfinite(label).all():  # a packed source would refuse it
                raise SourceError(f"labels must be finite. Found: {label!r:.100} of {key!r}. Replace this label.")
            _write_sample(outs, columns, f"{number:09d}", encoded, masks.get(row), label)
            for name, value in {"numbers": number, "keys": key, "labels": label, "extra": _json(extra, key)}.items():
                columns[name].append(value)
        for name, column in {} if self._targets is None else self._targets.columns(objects, kept, [*outs]).items():
            columns[name] += column.tolist()
        return [[int(numbers[row]), f.stage, f.reason, f.size, f.head.hex()] for row, f in sorted(faults.items())]

    def _headers(self, batch: EncodedBatch) -> tuple[HeaderInfo, list[CropWindows]]:
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
        canvas_bytes = self._pixel_bytes * len(batch) * sum(h * w for h, w in (each.size for each in windows))
        if len(batch) > 1 and canvas_bytes > _CANVAS_BYTES:
            needed = {name: getattr(batch, name) for name in ("images", "indices", "repeats", "valid")}
            alone = (EncodedBatch(labels=None, **{k: v[r : r + 1] for k, v in needed.items()}) for r in rows)
            return [faults.get(row) or self._encode(one, *self._headers(one))[0] for row, one in enumerate(alone)]
        images, bad = self._decoder.pixels(headers, windows)
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
        what, data = self.job.what, batch.images[row]
        begin = data[:16].tobytes()
        upright = headers.orientation[row] == 1 and headers.encoded[row] is data
        original = (headers.height[row], headers.width[row]) if upright and sniff(begin) == "jpeg" else None
        encoded: Encoded = []
        for windows, canvases in views:
            height, width = windows.resized[row].tolist()
            pixels = canvases[row, :height, :width].numpy()
            if what.form == "uint8":
                made = header.raw_header(height, width) + pixels.tobytes()
            elif what.form == "npy":
                stream = io.BytesIO()
                np.lib.format.write_array(stream, np.ascontiguousarray(pixels), version=(1, 0))
                made = stream.getvalue()
            elif (height, width) == original:
                made = data.tobytes()
            elif max(height, width) > _LONGEST_JPEG:
                reason = f"{shown_size(height, width)} pixels: a side of a JPEG has at most {_LONGEST_JPEG}"
                return Fault(row, "encode", reason, len(data), begin)
            else:
                stream = io.BytesIO()
                Image.fromarray(pixels).save(stream, "JPEG", quality=what.quality)
                made = stream.getvalue()
            encoded.append((made, (height, width)))
        return encoded


def first_type(job: Job) -> str | None:
    """The type of all values that are stored, decided before the work is divided among processes."""
    with closing(Packer(job)) as packer:
        return packer.first_type()


def _json(value: Any, key: str) -> str:
    """An extra value as JSON. Raises ConfigError if JSON would change it."""
    with suppress(TypeError, ValueError, RecursionError):
        if json.loads(text := json.dumps(value)) == value:
            return text
    raise ConfigError(
        f"`source.extra` must give text, numbers (not NaN), lists or dictionaries, because `gpuaug pack` stores the "
        f"values as JSON. Found: {value!r:.100} of {key!r}. Remove `source.extra`, or choose other fields."
    )


def _whole(sizes: NDArray[np.int32], size: Size, what: Pack) -> CropWindows:
    """Windows that resize whole images of ``sizes`` [B, 2] to a shorter side of at most ``size``."""
    box = np.maximum(sizes, 1)  # bad rows are 0x0
    resized = box.copy()
    if isinstance(size, int) and (larger := box.min(axis=1) > size).any():
        resized[larger] = ResizeCenterCrop(size, size).windows(None, *box[larger].T).resized
    zero = np.zeros_like(box)
    canvas = int(resized[:, 0].max()), int(resized[:, 1].max())
    return CropWindows(np.concatenate([zero, box], axis=1), resized, zero, canvas, what.interpolation)


_Out = tarfile.TarFile | BinaryIO  # an open shard file: a tar of JPEGs, or images with a header each


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


class Versions:
    """Makes ``count`` versions of images. Version e has the random parameters of epoch e."""

    def __init__(self, augment: Augment | MultiView, seed: int, *, count: int) -> None:
        self._recipe, self._seed, self._count = before_normalization(augment), seed, count
        self._places, self._size = side_by_side([view.augment.crop.size for view in augment.views])

    def windows(self, batch: EncodedBatch, headers: HeaderInfo) -> list[CropWindows]:
        """The windows of each view in each version: the views of version 0, then those of version 1, ..."""
        each = (self._recipe.draw(seed=self._seed, epoch=e, indices=batch.indices) for e in range(self._count))
        return [window for drawn in each for window in self._recipe.windows(drawn, headers.height, headers.width)]

    def augment(self, batch: EncodedBatch, images: Sequence[Tensor]) -> list[NDArray[np.uint8]]:
        """The versions, each uint8 [B, H, W, 3], with all views side by side. ``images``: one tensor per window."""
        views, versions = len(self._places), []
        for epoch in range(self._count):
            drawn = self._recipe.draw(seed=self._seed, epoch=epoch, indices=batch.indices)
            made = self._recipe.render(images[epoch * views : (epoch + 1) * views], drawn)
            canvas = np.zeros((len(batch), *self._size, 3), dtype=np.uint8)
            for place, view in zip(self._places, made, strict=True):
                (top, left), (height, width) = place.corner, place.size
                canvas[:, top : top + height, left : left + width] = _levels(view)
            versions.append(canvas)
        return versions


def _levels(view: Tensor) -> NDArray[np.uint8]:
    """Pixels float32 [B, 3, H, W] in 0..1, rounded to uint8 [B, H, W, 3]."""
    low, high = (float(value) for value in view.aminmax())
    if not (low >= -0.5 / 255 and high <= 1 + 0.5 / 255):
        raise ConfigError(
            f"`epochs` stores pixels from 0 to 1. Found: {low:.3f} to {high:.3f} before normalization. For example, "
            "RandomGaussianNoise can give such pixels. Leave out such an operation, or pack without `epochs`."
        )
    levels: NDArray[np.uint8] = view.mul(255).round_().clamp_(0, 255).byte().permute(0, 2, 3, 1).numpy()
    return levels


# -- processes


log = logging.getLogger("gpuaug")

_packer: Packer  # set in each worker process


def write_shards(
    job: Job, shards: Sequence[int], *, on: str, num_workers: int | None
) -> Generator[Written, None, None]:
    """Yield each shard as soon as it is written.

    ``on``: ``local`` or ``ray``. ``num_workers``: number of processes; None: one for each CPU; 0 with ``local``: only
    this process.
    """
    if on == "ray":
        yield from _on_ray(job, shards, num_workers)
    elif num_workers == 0:
        with closing(Packer(job)) as packer:
            yield from map(packer.write, shards)
    else:
        yield from _in_processes(job, shards, num_workers)


def _start(job: Job) -> None:
    global _packer
    machine.exit_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    torch.set_num_threads(1)
    _packer = Packer(job)


def _write(shard: int) -> Written:
    return _packer.write(shard)


def _in_processes(job: Job, shards: Sequence[int], num_workers: int | None) -> Generator[Written, None, None]:
    workers = min(num_workers or machine.usable_cpus(), len(shards))
    log.info("%d processes for %d shards on %d cores", workers, len(shards), machine.usable_cpus())
    context = multiprocessing.get_context("spawn")  # DALI's and torch's threads do not survive a fork
    before, finished = {*multiprocessing.active_children()}, False
    pool = ProcessPoolExecutor(workers, context, _start, (job,))
    try:
        try:
            writing = [pool.submit(_write, shard) for shard in shards]
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise SourceError(
                f"the source cannot be sent to other processes: {error}. Define its class in a module, and keep no "
                "open files or functions in its attributes. Or set `num_workers=0`."
            ) from error
        for future in as_completed(writing):
            yield future.result()
        finished = True
    except BrokenProcessPool as error:
        raise GpuaugError(
            "a worker process died. If it printed an error above, fix that. Otherwise memory probably ran out: lower "
            f'`num_workers`. A script must start its work under `if __name__ == "__main__":`. {GO_ON}'
        ) from error
    finally:
        for process in () if finished else {*multiprocessing.active_children()} - before:
            process.terminate()  # running tasks could take minutes to end
        pool.shutdown(cancel_futures=True)


def _on_ray(job: Job, shards: Sequence[int], num_workers: int | None) -> Generator[Written, None, None]:
    try:
        import ray
        from ray.util import ActorPool
    except ImportError as error:
        raise ConfigError(
            f"`on=ray` needs Ray, which cannot be imported ({error}). Install it: pip install 'gpuaug[ray]'"
        ) from error
    mine, actors = not ray.is_initialized(), list[Any]()
    if mine:
        ray.init(logging_level=logging.WARNING, log_to_driver=False)
    try:
        cores = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        workers = max(1, min(sum(cores) if num_workers is None else num_workers, len(shards)))
        log.info("Ray: %d processes on %d machines", workers, sum(map(bool, cores)))
        shared, actor = ray.put(job), ray.remote(num_cpus=1, num_gpus=0)(Packer)
        actors += [actor.remote(shared) for _ in range(workers)]
        pool: Any = ActorPool(actors)
        yield from pool.map_unordered(lambda packer, shard: packer.write.remote(shard), shards)
    except ray.exceptions.RayError as error:
        if isinstance(cause := getattr(error, "cause", None), GpuaugError):
            raise cause from error
        raise GpuaugError(f"the work on Ray failed: {error}. {GO_ON}") from error
    finally:
        for each in actors:
            ray.kill(each)
        if mine:
            ray.shutdown()
