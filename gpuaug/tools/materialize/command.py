"""`gpuaug materialize`: writes a loader's epochs in the format of :mod:`gpuaug.source.materialized`.

A chunk is a file of consecutive samples of one epoch. After each chunk, a note with the chunk's checksum and faults is
written. If a run is killed, the next run writes the chunks that have no note. The manifest is written last.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from gpuaug import checks, files
from gpuaug.augment.progressive import Progressive
from gpuaug.augment.recipe import Augment, MultiView
from gpuaug.batch import Fault
from gpuaug.decode.dali import choose_backend
from gpuaug.errors import ConfigError, GpuaugError, StateError
from gpuaug.files import format_bytes
from gpuaug.loader.batch import Batch
from gpuaug.loader.faults import Faults
from gpuaug.loader.loader import Loader
from gpuaug.loader.stages import made_of, refuse_others
from gpuaug.loader.state import plain
from gpuaug.random.keyed import EPOCHS
from gpuaug.source.adapt import active_numbers
from gpuaug.source.base import checksum, parse_manifest
from gpuaug.source.index import Names
from gpuaug.source.local import read_file
from gpuaug.source.materialized import (
    KIND,
    MANIFEST,
    PLAN,
    VERSION,
    Chunk,
    chunk_count,
    epoch_folder,
    read_manifest,
    record,
)
from gpuaug.tools.report import Report
from gpuaug.tools.request import Keys, Request
from gpuaug.tools.store import (
    check_out,
    damaged,
    digest,
    file_digest,
    npy,
    only_writer,
    refuse_changes,
    refuse_reduced,
    results,
    to_json,
    write_manifest,
)

log = logging.getLogger("gpuaug")


@dataclass(frozen=True, kw_only=True)
class Settings(Keys):
    """The keys of `gpuaug materialize`."""

    out: str | None = None
    epochs: int = 1
    start_epoch: int = 0
    store: str = "uint8"
    chunk: int | None = None
    verify: bool = False
    on: str = "local"


def main(request: Request) -> int:
    settings = Settings(**request.settings())
    if settings.out is None:
        raise ConfigError("`out`, the output folder, must be given. Set it: out=/fast/standard3.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("`gpuaug materialize` is one process that uses all cores. Start it without torchrun.")
    config = request.loader()
    if config.get("mix"):
        log.info("mix is not stored; training on the stored epochs applies mix")
    report = Report(file=settings.json)
    with logging_redirect_tqdm(loggers=[log]), request.build(config, mix=None, rank=0, world_size=1) as loader:
        job = Materialize(loader, **{k: v for k, v in vars(settings).items() if k not in ("verify", "json")})
        plan, size = job.plan, job.record.itemsize
        report.add("key", plan["key"], f"{plan['key']} (recipe, source and seed)")
        formula = f"{plan['epochs']} x {plan['samples']} x {size} bytes as {plan['store']} = {format_bytes(job.bytes)}"
        report.add("size", job.bytes, formula)
        missing = (count := job.samples_missing) * size
        report.add("to_write", missing, f"{format_bytes(missing)}, {format_bytes(job.free)} free in {job.out}")
        begin = time.perf_counter()
        faults = job.run()
        seconds = time.perf_counter() - begin
        report.add("faults", faults, f"{faults} of {job.samples} samples could not be decoded")
        if count:
            report.add("images_per_second", count / seconds, f"{count / seconds:.0f} ({count} in {seconds:.1f} s)")
        if settings.verify:
            damaged = job.verify()
            report.values["damaged"] = damaged
            if damaged:
                report.write()
                raise GpuaugError(
                    f"{len(damaged)} files do not match their checksums: {', '.join(damaged[:5])}. Remove "
                    "these files and run the same command again. It writes only the missing files."
                )
            report.add(
                "verified", format_bytes(job.bytes), f"{format_bytes(job.bytes)}, all files match their checksums"
            )
        report.add("replay", str(job.out), f"source=materialized source.root={job.out}")
    report.write()
    return 0


CHUNK_BYTES = 1 << 27  # a few seconds of work, so that a killed run loses little
PROBED_SAMPLES = 32  # samples that are decoded first, to learn the sizes of views and labels
RAY_CORES = 4  # cores of each Ray process
RAY_TASKS, RAY_CHUNKS = 64, 8  # aim at 64 tasks on a cluster, with at most 8 chunks each
SPARE_BYTES = 1 << 24  # disk space for keys, notes and the file system


class Materialize:
    """Stores augmented epochs of a loader. The constructor decodes a few samples and makes a plan; :meth:`run` writes.

    Args:
        loader: the loader. It is not iterated, and its `mix` is not stored. Batch size and workers do not change the
            stored bytes. One exception: with ``backend=kornia`` on CUDA, the batch size changes pixels by 2e-6.
        out: the output folder. If this folder holds an earlier run of the same job, only missing files are written.
        epochs: number of epochs.
        start_epoch: the first epoch.
        store: ``uint8``: pixels before normalization, rounded to levels from 0 to 255. ``final``: the loader's pixels,
            bit for bit, or within 2e-6 with ``backend=kornia`` on CUDA.
        chunk: samples per file. None: as many as fit in 128 MiB.
        on: ``local``: this machine. ``ray``: a Ray cluster, where all machines must see ``out``.

    Attributes:
        plan: what will be written, as JSON.
        samples, bytes: totals over all epochs.
        missing: chunks that are not written yet, as (stored epoch, chunk), both counted from 0.

    Raises:
        StateError: if ``out`` holds epochs of another recipe, source or seed.
        ConfigError: if ``out`` holds other files, or the loader's epochs cannot be stored.

    >>> source = gpuaug.FolderSource("data/train")
    >>> with gpuaug.Loader(source, augment=recipe, seed=0) as loader:
    ...     Materialize(loader, out="data/epochs", epochs=3).run()
    0
    """

    def __init__(
        self,
        loader: Loader,
        *,
        out: str | os.PathLike[str],
        epochs: int = 1,
        start_epoch: int = 0,
        store: str = "uint8",
        chunk: int | None = None,
        on: str = "local",
    ) -> None:
        checks.whole_number("epochs", epochs, 1)
        checks.whole_number("start_epoch", start_epoch, 0)
        checks.whole_number("chunk", chunk, 1, optional=True)
        checks.one_of("store", store, ("uint8", "final"))
        checks.one_of("on", on, ("local", "ray"))
        if start_epoch + epochs > EPOCHS:
            raise ConfigError(f"`start_epoch` and `epochs` must end below 2**32. Found: {start_epoch} and {epochs}.")
        if not isinstance(out, str | os.PathLike) or not os.fspath(out) or "\0" in str(out):
            raise ConfigError(f"`out` must be the path of a folder. Found: {out!r:.200}.")
        _check(loader)
        self.out, self.on = Path(os.path.abspath(Path(out).expanduser())), on
        self._loader, source = loader, loader.source
        before = _earlier(self.out)
        here = made_of(source.digest(), loader.augment, loader.seed)
        if before is not None:  # checked before any sample is decoded
            refuse_others(str(self.out), before["made_of"], here)
        plan = {"made_of": here, "key": checksum(here), "start_epoch": start_epoch, **_layout(loader, store == "uint8")}
        default = before["chunk"] if before else max(1, CHUNK_BYTES // record(plan).itemsize)
        plan = plain({**plan, "chunk": chunk or default})
        if before is not None:
            layout = {k: v for k, v in before.items() if k not in ("epochs", "rows", "seal", "faults", "checksum")}
            refuse_changes(self.out, layout, plan, error=StateError)
            if "seal" in before and before["epochs"] > epochs:
                log.info("%s already holds %d epochs, more than `epochs=%d`", self.out, before["epochs"], epochs)
                epochs = before["epochs"]
        self._orders = [loader.order.order(loader.seed, start_epoch + slot, source) for slot in range(epochs)]
        self.plan: dict[str, Any] = {**plan, "epochs": epochs, "rows": [len(indices) for indices in self._orders]}
        self.record = record(self.plan)
        self.samples = sum(self.plan["rows"])
        self.bytes = self.samples * self.record.itemsize
        self._chunks = [(slot, n) for slot in range(epochs) for n in range(chunk_count(self.plan, slot))]
        self.missing = [place for place in self._chunks if self._note(*place) is None]

    @property
    def samples_missing(self) -> int:
        """Samples that are not written yet."""
        return sum(self._chunk(*place).rows for place in self.missing)

    @property
    def free(self) -> int:
        """Free bytes on the disk of ``out``."""
        return shutil.disk_usage(next(place for place in (self.out, *self.out.parents) if place.exists())).free

    def run(self) -> int:
        """Write the missing chunks. Returns the number of samples, over all epochs, that could not be decoded.

        Raises:
            DataError, FaultBudgetError: depending on the loader's `faults`.
            ConfigError: if a pixel does not fit in uint8, or another run writes to ``out``.
            GpuaugError: if the disk has too little space.
        """
        if (needed := self.samples_missing * self.record.itemsize + SPARE_BYTES) > self.free:
            raise GpuaugError(
                f"{str(self.out)!r} needs {format_bytes(needed)}. Free: {format_bytes(self.free)}. "
                + ("Set `store=uint8`, or fewer" if self.plan["store"] != "uint8" else "Set fewer")
                + " `epochs`, or another `out`."
            )
        with only_writer(self.out, out=self.out):
            self._prepare()
            done, title = self.samples - self.samples_missing, f"materialize {self.plan['epochs']} epochs"
            with tqdm(total=self.samples, initial=done, desc=title, unit="image", smoothing=0.05) as bar:
                self._write(bar.update)
            return self._finish()

    def verify(self) -> list[str]:
        """Compare all files with their checksums. Returns the files that are damaged or missing."""
        digests = {self._chunk(*place).file: str((self._note(*place) or {}).get("digest")) for place in self._chunks}
        bad = [str(file) for file in damaged(digests)]
        if not bad and (seal := read_manifest(self.out).get("seal")) != self._seal():
            bad.append(f"{self.out / MANIFEST} (its checksum {seal} does not match the files)")
        return bad

    def _chunk(self, slot: int, number: int) -> Chunk:
        return Chunk.of(self.out, self.plan, slot, number)

    def _note(self, slot: int, number: int) -> dict[str, Any] | None:
        """The note of a written chunk; None if the chunk must be written."""
        chunk = self._chunk(slot, number)
        try:
            note = chunk.note()
            return note if chunk.file.stat().st_size >= chunk.rows * self.record.itemsize else None
        except (OSError, ValueError):
            return None

    def _prepare(self) -> None:
        """Write keys, labels, indices and orders."""
        if not (self.out / MANIFEST).exists():
            write_manifest(self.out / PLAN, self.plan)
        source = self._loader.source
        numbers = active_numbers(source)
        blocks = np.array_split(numbers, 1 + len(numbers) // 65536)
        names = Names.of([os.fsencode(source.key(i)) for i in block.tolist()] for block in blocks)
        known = {"keys": names.blob, "key_offsets": names.offsets, "labels": source.labels, "indices": source.indices}
        for slot, indices in enumerate(self._orders):
            known[f"{epoch_folder(self.out, self.plan, slot).name}/order"] = indices
        for name, values in known.items():
            if values is not None:
                files.write(self.out / f"{name}.npy", *npy(values.numpy()), sync=True)

    def _write(self, progress: Callable[[int], Any]) -> None:
        arguments = _arguments(self._loader, final=self.plan["store"] != "uint8")
        most, gpus = len(self.missing), 0
        if self.on == "ray":  # no cache, because a Ray process reads only a part of the source
            arguments |= {"device": self._loader.device.type, "cache": None}
            most, gpus = min(RAY_CHUNKS, -(-most // RAY_TASKS)), int(self._loader.device.type == "cuda")
        make, tasks = partial(Writer, self.out, self.plan, arguments), _spans(self.missing, most)
        workers = 0 if self.on == "local" else None  # on this machine, the stages of one loader use all cores
        list(results(make, tasks, on=self.on, progress=progress, num_workers=workers, cpus=RAY_CORES, gpus=gpus))

    def _finish(self) -> int:
        """Write the manifest, and return the number of faults."""
        notes = {place: self._note(*place) for place in self._chunks}
        self.missing = [place for place, note in notes.items() if note is None]
        if self.missing:
            raise GpuaugError(
                f"{len(self.missing)} chunks are missing in {str(self.out)!r}. Run the same command again."
            )
        faults = sum(len(note["faults"]) for note in notes.values() if note is not None)
        write_manifest(self.out / MANIFEST, {**self.plan, "faults": faults, "seal": self._seal()})
        (self.out / PLAN).unlink(missing_ok=True)
        return faults

    def _seal(self) -> str:
        """Hash of all files except the chunks, whose checksums are in the notes."""
        sealed = [self.out / f"{name}.npy" for name in ("keys", "key_offsets", "labels", "indices")]
        for slot in range(self.plan["epochs"]):
            sealed.append(epoch_folder(self.out, self.plan, slot) / "order.npy")
            sealed += [self._chunk(slot, n).note_file for n in range(chunk_count(self.plan, slot))]
        return digest(*(file_digest(file).encode() if file.exists() else b"none" for file in sealed))


class Writer:
    """Writes chunks of a plan with its own loader."""

    def __init__(self, out: Path, plan: dict[str, Any], arguments: dict[str, Any]) -> None:
        self.out, self.plan = out, plan
        self.loader, self.noted = Loader(**arguments), arguments["faults"].noted

    def close(self) -> None:
        self.loader.close()

    def write(self, span: tuple[int, int, int], progress: Callable[[int], Any]) -> None:
        """Write the chunks of a span, see :func:`_spans`."""
        (slot, first, stop), plan = span, self.plan
        chunk, final = plan["chunk"], plan["store"] != "uint8"
        position, end = first * chunk, min(plan["rows"][slot], stop * chunk)
        order = np.load(epoch_folder(self.out, plan, slot) / "order.npy", mmap_mode="r")
        self.loader.start_at(plan["start_epoch"] + slot, position)
        writing: Future[None] | None = None
        with ThreadPoolExecutor(1) as writer:  # hashes and writes a chunk while the next chunk is computed
            for batch in self.loader:
                _refuse_extra(batch)
                views, begin = [_stored(view, final=final) for view in _views(batch)], 0
                while begin < len(batch) and position < end:
                    number, at = divmod(position, chunk)
                    if at == 0:
                        target = Chunk.of(self.out, plan, slot, number)
                        samples, faults = np.zeros(target.rows, dtype=record(plan)), list[Any]()
                    count = min(len(batch) - begin, len(samples) - at)
                    rows = slice(begin, begin + count)
                    if (batch.indices[rows].numpy() != order[position : position + count]).any():
                        raise GpuaugError("the order of the epoch has changed since it was planned. Set another `out`.")
                    for k, view in enumerate(views):
                        samples[f"view{k}"][at : at + count] = view[rows]
                    if batch.labels is not None:
                        samples["label"][at : at + count] = batch.labels[rows].cpu().numpy()
                    for row in (~batch.valid[rows]).nonzero().flatten().tolist():
                        faults.append(self.noted[int(batch.indices[begin + row])] | {"row": at + row})
                    begin, position = begin + count, position + count
                    if at + count == len(samples):
                        if writing is not None:
                            writing.result()
                        writing = writer.submit(save_chunk, target, samples, faults)
                    progress(count)
                if position >= end:
                    break
            if writing is not None:
                writing.result()


class Noted(Faults):
    """Keeps the last fault of each sample, for the notes of the chunks."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.noted: dict[int, dict[str, Any]] = {}  # as JSON, by sample number

    def handle(self, faults: Sequence[Fault], *, indices: Sequence[int], **rest: Any) -> None:
        """Keep the faults, then apply the fault policy."""
        for fault in faults:
            self.noted[indices[fault.row]] = asdict(fault) | {"head": fault.head.hex()}
        super().handle(faults, indices=indices, **rest)


def _check(loader: Loader) -> None:
    if getattr(loader.source, "stored", None) is not None:
        raise ConfigError("`source` must hold images. Found: epochs that are already materialized.")
    if loader.targets is not None:
        raise ConfigError(
            "`targets` must be null, because `gpuaug materialize` stores images and labels only. Set "
            "targets=none, or prepare images and targets with `gpuaug pack`."
        )
    if isinstance(loader.augment, Progressive):
        raise ConfigError(
            "`augment` must be one recipe for all epochs, because stored samples have one size. Found: a "
            "gpuaug.Progressive. Materialize one of its stages, or train without `gpuaug materialize`."
        )
    refuse_reduced(loader.decode)
    if loader.limit_batches is not None:
        raise ConfigError(
            f"`limit_batches` must be null, because whole epochs are stored. Found: {loader.limit_batches}. To "
            "store fewer samples, set `source.subset`."
        )


def _layout(loader: Loader, as_uint8: bool) -> dict[str, Any]:
    """The format of the stored samples, as JSON."""
    source = loader.source
    numbers = active_numbers(source)
    probed = numbers[np.unique(np.linspace(0, len(numbers) - 1, PROBED_SAMPLES).astype(np.int64))]
    shown = loader.fetch(probed.tolist(), epoch=0)
    loader.pipeline.stage.close()  # the loader that writes has its own decoder
    if not shown.valid.any():
        raise GpuaugError(f"the first check decodes {len(probed)} of {len(numbers)} samples, and each of these failed.")
    _refuse_extra(shown)
    label = None
    if shown.labels is not None:
        label = {"dtype": str(shown.labels.dtype).removeprefix("torch."), "shape": [*shown.labels.shape[1:]]}
    return {
        "kind": KIND,
        "version": VERSION,
        "order": repr(loader.order),
        "samples": len(source),
        "store": "uint8" if as_uint8 else str(loader.dtype).removeprefix("torch."),
        "views": [
            {"name": v.name, "copy": v.copy, "size": [*x.shape[-2:]], "backend": v.augment.backend}
            for v, x in zip(loader.augment.at(0).views, _views(shown), strict=True)
        ],
        "label": label,
        "made_by": {"device": loader.device.type, "decode": choose_backend(loader.decode.backend)},
        "classes": None if source.classes is None else list(source.classes),
        "class_to_idx": source.class_to_idx,
        "num_classes": source.num_classes,
    }


def _arguments(loader: Loader, *, final: bool) -> dict[str, Any]:
    """Arguments of the loader that makes the pixels to store."""
    cache, reader, faults = loader.pipeline.cache, loader.pipeline.reader, loader.faults
    same = ("source", "batch_size", "order", "decode", "ahead", "device", "num_workers", "prefetch", "seed")
    return {
        **{name: getattr(loader, name) for name in same},
        "augment": loader.augment if final else before_normalization(loader.augment.at(0)),
        "cache": None if cache is None else cache.settings,
        "faults": Noted(
            policy="raise" if faults.policy == "raise" else "blank",  # a bad row keeps its place in the chunk
            **{name: getattr(faults, name) for name in ("max", "window", "truncated", "file")},
        ),
        "dtype": loader.dtype if final else torch.float32,
        "timeout": reader.timeout,
        "start_method": reader.start_method,
        "read_threads": reader.read_threads,
        "rank": 0,
        "world_size": 1,
    }


def before_normalization(augment: Augment | MultiView) -> Augment | MultiView:
    """The same recipe without normalization."""
    if isinstance(augment, MultiView):
        views = {v.name: v.augment for v in augment.views}
        return MultiView(views={name: one.replace(normalize=None) for name, one in views.items()})
    return augment.replace(normalize=None)


def _refuse_extra(batch: Batch) -> None:
    found = [value for value in batch.extra if value is not None]
    if found:
        raise ConfigError(
            f"`source.extra` must be null, because `gpuaug materialize` stores images and labels only. Found: "
            f"{found[0]!r:.100}. Remove `source.extra`, or prepare images and extra values with `gpuaug pack`."
        )


def _views(batch: Batch) -> list[Tensor]:
    return batch.images if isinstance(batch.images, list) else [batch.images]


def _stored(view: Tensor, *, final: bool) -> NDArray[Any]:
    """Pixels [B, 3, H, W] as they are stored: final pixels unchanged, other pixels as uint8 [B, H, W, 3]."""
    if final:
        view = view.cpu().contiguous()
        return (view.view(torch.int16) if view.dtype == torch.bfloat16 else view).numpy()
    low, high = (float(v) for v in view.aminmax())
    if not (low >= -0.5 / 255 and high <= 1 + 0.5 / 255):
        raise ConfigError(
            f"`store=uint8` holds pixels from 0 to 1. Found: {low:.3f} to {high:.3f} before normalization. For "
            "example, noise can give such pixels. Set `store=final`."
        )
    return view.mul(255).round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1).cpu().contiguous().numpy()


def save_chunk(chunk: Chunk, samples: NDArray[Any], faults: list[dict[str, Any]]) -> None:
    """Write a chunk atomically, then its note."""
    parts = npy(samples)
    files.write(chunk.file, *parts, sync=True)
    note = {"rows": chunk.rows, "digest": digest(*parts), "faults": faults}
    files.write(chunk.note_file, to_json(note), sync=True)


def _earlier(out: Path) -> dict[str, Any] | None:
    """The manifest or plan of an earlier run, or None."""
    check_out(out, MANIFEST, PLAN)
    if (out / MANIFEST).exists():
        return read_manifest(out)
    try:
        return parse_manifest(read_file(str(out / PLAN)), KIND, VERSION)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"`out` cannot be read: {str(out)!r} ({error}). Set another `out`, or remove the folder."
        ) from error


def _spans(chunks: Sequence[tuple[int, int]], most: int) -> list[tuple[int, int, int]]:
    """Join consecutive chunks to spans of at most ``most`` chunks. A span is (epoch, first chunk, last chunk + 1)."""
    spans: list[tuple[int, int, int]] = []
    for slot, number in chunks:
        if spans and spans[-1][0] == slot and spans[-1][2] == number and number - spans[-1][1] < most:
            spans[-1] = slot, spans[-1][1], number + 1
        else:
            spans.append((slot, number, number + 1))
    return spans
