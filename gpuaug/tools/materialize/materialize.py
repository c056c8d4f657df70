"""Writes augmented epochs to disk: the batches of a loader, before `mix`, for :class:`gpuaug.MaterializedSource`.

takes: a loader, and which of its epochs.
does: iterates them, rounds pixels to uint8 before normalization or keeps the final dtype, and writes chunks.
gives: the folder that `source=materialized` reads. :mod:`gpuaug.source.materialized` describes its format.

A chunk is a file of consecutive samples of one epoch. First the whole chunk is written, then its note with checksum and
faults. A run that follows a killed one writes the chunks that have no note, and ends in the same bytes. The manifest is
written last.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from gpuaug import checks, files, machine
from gpuaug.augment.recipe import Augment, MultiView
from gpuaug.batch import Batch, Fault
from gpuaug.decode.dali import choose_backend
from gpuaug.errors import ConfigError, GpuaugError, StateError
from gpuaug.files import format_bytes
from gpuaug.loader.arguments import DTYPES
from gpuaug.loader.faults import Faults
from gpuaug.loader.loader import Loader
from gpuaug.loader.stages import made_of, refuse_others
from gpuaug.loader.state import differences, plain
from gpuaug.random import keyed as draw
from gpuaug.read import order as orders
from gpuaug.source.base import checksum
from gpuaug.source.index import Names
from gpuaug.source.materialized import (
    KIND,
    MANIFEST,
    PLAN,
    VERSION,
    chunk_count,
    chunk_file,
    chunk_rows,
    epoch_folder,
    key_of,
    read_manifest,
    read_marker,
    record,
)
from gpuaug.tools import on_ray
from gpuaug.tools.store import digest, file_digest, npy, npy_header, only_writer, read_json, to_json

log = logging.getLogger("gpuaug")

CHUNK_BYTES = 1 << 27  # seconds of work, so that a killed run loses little, and few files
PROBED_SAMPLES = 1000  # tried to find a good one, which shows the sizes of views and labels
RAY_CORES = 4  # of one process on a cluster without GPUs: a loader's stages share them
SPARE_BYTES = 1 << 24  # left free on the disk, for keys, notes and the file system


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive chunks ``first .. last - 1`` of one stored epoch."""

    slot: int
    first: int
    last: int


class Materialize:
    """Augmented epochs of a loader on disk. The constructor decodes one sample and plans; :meth:`run` writes.

    Args:
        loader: gives source, recipe, order, seed, decoding and faults. It is not iterated itself. Its batch size and
            workers change no byte (with ``backend=kornia`` on CUDA the batch size changes pixels by 2e-6). Its `mix` is
            applied at replay.
        out: the folder. If it holds an earlier run of the same job, that is continued, or extended to more epochs.
        epochs: how many.
        start_epoch: the first of them.
        store: ``uint8``: pixels before normalization, so that a replay is within half a level; ``final``: normalized
            pixels of the loader's dtype, so that a replay is equal bit for bit (``backend=kornia`` on CUDA: within
            2e-6).
        chunk: samples per file; None: about 128 MiB of them.
        on: ``local``, or ``ray``: spread over a Ray cluster, whose machines all see ``out``.

    Attributes:
        plan: what will be written, as JSON.
        missing: chunks that are not written yet.

    Raises:
        StateError: if ``out`` holds epochs of another recipe, source or seed, saying what differs.
        GpuaugError: if the disk has too little room, or another run writes there.
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
        if start_epoch + epochs > draw.EPOCHS:
            raise ConfigError(f"`start_epoch` and `epochs` must end below 2**32. Found: {start_epoch} and {epochs}.")
        if not isinstance(out, str | os.PathLike) or not os.fspath(out) or "\0" in str(out):
            raise ConfigError(f"`out` must be the path of a folder. Found: {out!r:.200}.")
        if getattr(loader.source, "stored", None) is not None:
            raise ConfigError("`source` must hold images. Found: epochs that are materialized already.")
        if loader.limit_batches is not None:
            raise ConfigError(
                f"`limit_batches` must be null: whole epochs are stored. Found: {loader.limit_batches}. To store fewer "
                "samples use `source.subset`."
            )
        self.out, self.on = Path(os.path.abspath(Path(out).expanduser())), on
        self._work = Work.of(loader, self.out, final=store == "final")
        self._source, self._order, self._seed = loader.source, loader.order, loader.seed
        before = _earlier(self.out)
        if before is not None:  # before a sample is decoded for the sizes
            refuse_others(
                str(self.out), before["made_of"], made_of(loader.source.digest(), loader.augment, loader.seed)
            )
        self.plan = self._planned(loader, epochs, start_epoch, chunk, store, before)
        self.record = record(self.plan)
        self.missing = self._missing()

    @property
    def samples(self) -> int:
        """Samples of all epochs together."""
        return sum(self.plan["rows"])

    @property
    def bytes(self) -> int:
        """Bytes of all epochs together."""
        return self.samples * self.record.itemsize

    @property
    def bytes_missing(self) -> int:
        """Bytes that are not written yet."""
        return sum(self._rows(span) for span in self.missing) * self.record.itemsize

    @property
    def free(self) -> int:
        """Bytes free on the disk of ``out``."""
        place = self.out
        while not place.exists():
            place = place.parent
        return shutil.disk_usage(place).free

    def check_space(self) -> None:
        """Raise GpuaugError if the missing chunks do not fit onto the disk."""
        if (needed := self.bytes_missing + SPARE_BYTES) > self.free:
            raise GpuaugError(
                f"{format_bytes(needed)} are needed in {str(self.out)!r}, and {format_bytes(self.free)} are free. "
                + ("Set `store=uint8`, or fewer" if self.plan["store"] != "uint8" else "Set fewer")
                + " `epochs`, or another `out`."
            )

    def run(self) -> int:
        """Write the missing chunks. Returns how many samples of all epochs have no pixels.

        Raises:
            DataError, FaultBudgetError: as the loader's faults say.
            GpuaugError: if a pixel does not fit into uint8, or the disk is full.
        """
        self.check_space()
        self._mkdir()
        with only_writer(self.out, out=self.out):
            self._prepare()
            bar = tqdm(
                total=self.samples,
                initial=self.samples - sum(self._rows(span) for span in self.missing),
                desc=f"materialize {self.plan['epochs']} epochs",
                unit="image",
                mininterval=0.5,
                smoothing=0.05,
            )
            with bar:
                if self.missing:
                    try:
                        (_on_ray if self.on == "ray" else _here)(self._work, self.plan, self.missing, bar.update)
                    except OSError as error:
                        raise GpuaugError(
                            f"the epochs cannot be written to {str(self.out)!r}: {error}. Fix that and run the same "
                            "command again: it goes on where it stopped."
                        ) from error
            return self._finish()

    def verify(self) -> list[str]:
        """Compare all files with their checksums. Returns the files that are damaged or missing."""
        chunks = [(slot, n) for slot in range(self.plan["epochs"]) for n in range(chunk_count(self.plan, slot))]
        damaged = []

        def damage(place: tuple[int, int]) -> str | None:
            file, rows = chunk_file(self.out, self.plan, *place), chunk_rows(self.plan, *place)
            try:
                sound = read_marker(file, rows=rows).get("digest") == file_digest(file)[1]
            except (OSError, ValueError):
                sound = False
            return None if sound else str(file)

        with ThreadPoolExecutor(machine.usable_cpus()) as pool:  # hashing releases the GIL
            for file in tqdm(pool.map(damage, chunks), total=len(chunks), desc="verify", unit="file"):
                if file is not None:
                    damaged.append(file)
        if not damaged and (seal := read_manifest(self.out).get("seal")) != _seal(self.out, self.plan):
            damaged.append(f"{self.out / MANIFEST} (its seal {seal} is not that of the files)")
        return damaged

    def _planned(
        self,
        loader: Loader,
        epochs: int,
        start_epoch: int,
        chunk: int | None,
        store: str,
        before: dict[str, Any] | None,
    ) -> dict[str, Any]:
        source = loader.source
        shown = self._work.look()
        views = [
            {"name": v.name, "copy": v.copy, "size": [*x.shape[-2:]], "backend": v.augment.backend}
            for v, x in zip(loader.augment.views, _views(shown), strict=True)
        ]
        label = None
        if shown.labels is not None:
            label = {"dtype": str(shown.labels.dtype).removeprefix("torch."), "shape": [*shown.labels.shape[1:]]}
        dtype = next(name for name, kind in DTYPES.items() if kind is loader.dtype)
        origin = made_of(source.digest(), loader.augment, loader.seed)
        given: dict[str, Any] = {
            "kind": KIND,
            "version": VERSION,
            "key": key_of(origin),
            "made_of": origin,
            "order": repr(loader.order),
            "samples": len(source),
            "store": "uint8" if store == "uint8" else dtype,
            "views": views,
            "label": label,
            "made_by": {"device": loader.device.type, "decode": self._work.decoder},
            "start_epoch": start_epoch,
            "classes": None if source.classes is None else list(source.classes),
            "class_to_idx": source.class_to_idx,
            "num_classes": source.num_classes,
        }
        size = record(given).itemsize
        layout = plain({**given, "chunk": chunk or (before["chunk"] if before else max(1, CHUNK_BYTES // size))})
        if before is not None:
            self._refuse_other_layout(before, layout)
            if "seal" in before and before["epochs"] > epochs:
                log.info("%s holds %d epochs already, more than `epochs=%d`", self.out, before["epochs"], epochs)
                epochs = before["epochs"]
        self._orders = [
            orders.ordered(self._order, self._seed, start_epoch + slot, source).indices for slot in range(epochs)
        ]
        return {**layout, "epochs": epochs, "rows": [len(indices) for indices in self._orders]}

    def _refuse_other_layout(self, before: dict[str, Any], here: dict[str, Any]) -> None:
        grown = ("epochs", "rows", "seal", "faults", "checksum")
        changes = differences({k: v for k, v in before.items() if k not in grown}, here)
        if changes:
            listed = "; ".join(f"{where}: {a!r} there, {b!r} here" for where, a, b in changes[:5])
            raise StateError(
                f"`out` holds epochs that were stored otherwise: {str(self.out)!r}. {listed}. Restore what differs, or "
                "set another `out`."
            )

    def _missing(self) -> list[Span]:
        """Chunks without a note, joined to runs."""
        spans: list[Span] = []
        for slot in range(self.plan["epochs"]):
            for number in range(chunk_count(self.plan, slot)):
                if self._is_done(slot, number):
                    continue
                if spans and (spans[-1].slot, spans[-1].last) == (slot, number):
                    spans[-1] = Span(slot, spans[-1].first, number + 1)
                else:
                    spans.append(Span(slot, number, number + 1))
        return spans

    def _is_done(self, slot: int, number: int) -> bool:
        file, rows = chunk_file(self.out, self.plan, slot, number), chunk_rows(self.plan, slot, number)
        try:
            read_marker(file, rows=rows)
            return file.stat().st_size >= rows * self.record.itemsize
        except (OSError, ValueError):
            return False

    def _rows(self, span: Span) -> int:
        chunk, rows = self.plan["chunk"], self.plan["rows"][span.slot]
        return int(min(rows, span.last * chunk) - span.first * chunk)

    def _mkdir(self) -> None:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"`out` must be a folder that can be written. Found: {str(self.out)!r} ({error})."
            ) from error

    def _prepare(self) -> None:
        """Remove temporary files of a killed run, and write all that is known before the first pixel."""
        for part in [*self.out.glob("*.part"), *self.out.glob("epoch-*/*.part")]:
            part.unlink()
        if not (self.out / MANIFEST).exists():
            files.write(self.out / PLAN, to_json(self.plan), sync=True)
        source = self._source
        numbers = np.arange(len(source)) if source.indices is None else source.indices.numpy()
        names = Names.of([os.fsencode(source.key(i)) for i in block] for block in _blocks(numbers.tolist()))
        known = {"keys": names.blob, "key_offsets": names.offsets, "labels": source.labels, "indices": source.indices}
        for name, values in known.items():
            if values is not None:
                files.write(self.out / f"{name}.npy", npy(values.numpy()), sync=True)
        for slot, indices in enumerate(self._orders):
            folder = epoch_folder(self.out, self.plan, slot)
            folder.mkdir(exist_ok=True)
            files.write(folder / "order.npy", npy(indices.numpy()), sync=True)

    def _finish(self) -> int:
        """Write the manifest, if every chunk has a note. Returns the number of faults."""
        if left := self._missing():
            raise GpuaugError(f"{len(left)} stretches of chunks are missing in {str(self.out)!r}. Run it once more.")
        self.missing = []
        faults = 0
        for slot in range(self.plan["epochs"]):
            for number in range(chunk_count(self.plan, slot)):
                file, rows = chunk_file(self.out, self.plan, slot, number), chunk_rows(self.plan, slot, number)
                faults += len(read_marker(file, rows=rows)["faults"])
        manifest = {**self.plan, "faults": faults, "seal": _seal(self.out, self.plan)}
        files.write(self.out / MANIFEST, to_json({**manifest, "checksum": checksum(manifest)}), sync=True)
        (self.out / PLAN).unlink(missing_ok=True)
        return faults


@dataclass(frozen=True, slots=True)
class Work:
    """Writes chunks, here or on another machine: the arguments of a loader, and where to write."""

    out: Path
    loader: Mapping[str, Any]  # arguments of Loader; for uint8 the recipe has no normalization
    final: bool

    @classmethod
    def of(cls, loader: Loader, out: Path, *, final: bool) -> Work:
        """For all samples of a loader, in order, on one rank."""
        cache, reader, faults = loader.pipeline.cache, loader.pipeline.reader, loader.faults
        arguments = {
            "source": loader.source,
            "augment": loader.augment if final else before_normalization(loader.augment),
            "batch_size": loader.batch_size,
            "order": loader.order,
            "decode": loader.decode,
            "cache": None if cache is None else cache.settings,
            "ahead": loader.ahead,
            "faults": Noted(
                policy="raise" if faults.policy == "raise" else "blank",  # a row that is dropped keeps its place
                max=faults.max,
                window=faults.window,
                truncated=faults.truncated,
                file=faults.file,
            ),
            "device": loader.device,
            "dtype": loader.dtype if final else torch.float32,
            "num_workers": loader.num_workers,
            "prefetch": loader.prefetch,
            "timeout": reader.timeout,
            "start_method": reader.start_method,
            "seed": loader.seed,
            "rank": 0,
            "world_size": 1,
        }
        return cls(out, arguments, final)

    @property
    def decoder(self) -> str:
        """The decoder's backend: pixels of DALI and Pillow differ."""

        return choose_backend(self.loader["decode"].backend)

    def open(self) -> tuple[Loader, Noted]:
        """The loader, and its faults."""
        return Loader(**self.loader), self.loader["faults"]

    def look(self) -> Batch:
        """A batch of one sample, for the sizes of views and labels.

        Raises:
            DataError: under ``faults.policy=raise``, if the first sample is bad.
        """
        quiet = Faults(policy=self.loader["faults"].policy)
        alone = {"faults": quiet, "num_workers": 0, "prefetch": 0, "cache": None, "ahead": None}
        with Loader(**{**self.loader, **alone}) as loader:
            source = loader.source
            numbers = range(len(source)) if source.indices is None else source.indices[:PROBED_SAMPLES].tolist()
            for number in numbers[:PROBED_SAMPLES]:
                batch = loader.fetch([number], epoch=0)
                if bool(batch.valid.all()):
                    return batch
        raise GpuaugError(f"none of the first {len(numbers[:PROBED_SAMPLES])} samples could be decoded.")

    def write(self, opened: tuple[Loader, Noted], plan: dict[str, Any], span: Span, done: Callable[[int], Any]) -> None:
        """Write the chunks of a span. ``done`` is called with the number of samples after each step."""
        loader, noted = opened
        kind, chunk = record(plan), plan["chunk"]
        position, end = span.first * chunk, min(plan["rows"][span.slot], span.last * chunk)
        order = np.load(epoch_folder(self.out, plan, span.slot) / "order.npy", mmap_mode="r")
        epoch = plan["start_epoch"] + span.slot
        loader.start_at(epoch, position)
        writing: Future[None] | None = None
        batches = iter(loader)
        with ThreadPoolExecutor(1) as writer:  # hashes and writes a chunk while the next one is made
            for batch in batches:
                views = [_stored(view, final=self.final) for view in _views(batch)]
                begin = 0
                while begin < len(batch) and position < end:
                    number, at = divmod(position, chunk)
                    if at == 0:
                        samples, faults = np.zeros(chunk_rows(plan, span.slot, number), dtype=kind), list[Any]()
                    rows = slice(begin, begin + min(len(batch) - begin, len(samples) - at))
                    count = rows.stop - begin
                    if (batch.indices[rows].numpy() != order[position : position + count]).any():
                        raise GpuaugError("the order of the epoch is another than when it was planned.")
                    for k, view in enumerate(views):
                        samples[f"view{k}"][at : at + count] = view[rows]
                    if batch.labels is not None:
                        samples["label"][at : at + count] = batch.labels[rows].cpu().numpy()
                    for row in (~batch.valid[rows]).nonzero().flatten().tolist():
                        faults.append(noted.of(int(batch.indices[begin + row]), row=at + row))
                    begin, position = rows.stop, position + count
                    if at + count == len(samples):
                        if writing is not None:
                            writing.result()
                        writing = writer.submit(
                            save_chunk, chunk_file(self.out, plan, span.slot, number), samples, faults
                        )
                    done(count)
                if position >= end:
                    break
            if writing is not None:
                writing.result()
        del batches  # ends what was made ahead


class Noted(Faults):
    """Faults that also keeps the last fault of each sample, to be stored in the place of its pixels."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._noted: dict[int, Fault] = {}  # by number of the sample

    def handle(
        self, faults: Sequence[Fault], *, indices: Sequence[int], epoch: int, samples: int, key_of: Callable[[int], str]
    ) -> None:
        """Keep the faults, and handle them as the policy says."""
        self._noted.update((indices[fault.row], fault) for fault in faults)
        super().handle(faults, indices=indices, epoch=epoch, samples=samples, key_of=key_of)

    def of(self, index: int, *, row: int) -> dict[str, Any]:
        """The fault of a sample as JSON, at its row of a chunk."""
        fault = self._noted[index]
        reason = {"stage": fault.stage, "reason": fault.reason, "size": fault.size, "head": fault.head.hex()}
        return {"row": row, **reason}


def before_normalization(augment: Augment | MultiView) -> Augment | MultiView:
    """The same recipe, with the same draws, whose pixels stay in 0..1."""
    if isinstance(augment, MultiView):
        views = {v.name: v.augment for v in augment.views}
        return MultiView(views={name: one.replace(normalize=None) for name, one in views.items()})
    return augment.replace(normalize=None)


def _views(batch: Batch) -> list[Tensor]:
    return batch.images if isinstance(batch.images, list) else [batch.images]


def _stored(view: Tensor, *, final: bool) -> NDArray[Any]:
    """Convert pixels [B, 3, H, W] to what is stored: final ones unchanged, others as uint8 [B, H, W, 3]."""
    if final:
        view = view.cpu().contiguous()
        return (view.view(torch.int16) if view.dtype == torch.bfloat16 else view).numpy()
    low, high = (float(v) for v in view.aminmax())
    if not (low >= -0.5 / 255 and high <= 1 + 0.5 / 255):
        raise ConfigError(
            f"`store=uint8` holds pixels from 0 to 1. Found: {low:.3f} to {high:.3f} before normalization; noise, for "
            "one, leads out of it. Set `store=final`."
        )
    return view.mul(255).round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1).cpu().contiguous().numpy()


def save_chunk(file: Path, samples: NDArray[Any], faults: list[dict[str, Any]]) -> None:
    """Write a chunk, whole or not at all, and then its note."""
    parts = npy_header(samples), memoryview(samples.view(np.uint8).reshape(-1))  # type: ignore[arg-type]
    files.write(file, *parts, sync=True)
    note = {"rows": len(samples), "digest": digest(*parts), "faults": faults}
    files.write(file.with_suffix(".json"), to_json(note), sync=True)


def _seal(root: Path, plan: dict[str, Any]) -> str:
    """Hash of all files except the chunks, whose checksums are in their notes."""
    sealed = [root / f"{name}.npy" for name in ("keys", "key_offsets", "labels", "indices")]
    for slot in range(plan["epochs"]):
        sealed.append(epoch_folder(root, plan, slot) / "order.npy")
        sealed += [chunk_file(root, plan, slot, n).with_suffix(".json") for n in range(chunk_count(plan, slot))]
    return digest(*(file_digest(file)[1].encode() if file.exists() else b"none" for file in sealed))


def _earlier(out: Path) -> dict[str, Any] | None:
    """The manifest or the plan of an earlier run; None if the folder is new.

    Raises:
        ConfigError: if the folder holds anything else.
    """
    try:
        if not out.exists():
            return None
    except OSError as error:
        raise ConfigError(f"`out` must be a folder that can be written. Found: {str(out)!r} ({error}).") from error
    if (out / MANIFEST).exists():
        return read_manifest(out)
    try:
        if (out / PLAN).exists():
            plan = read_json(out / PLAN)
            if isinstance(plan, dict) and plan.get("version") == VERSION:
                return plan
        elif not out.is_dir() or any(not entry.name.endswith(".part") for entry in out.iterdir()):
            raise ConfigError(
                f"`out` must be a new or empty folder, or one of `gpuaug materialize`. Found: {str(out)!r}."
            )
        else:
            return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"`out` cannot be read: {str(out)!r} ({error}). Set another.") from error
    raise ConfigError(f"`out` was begun by another version of gpuaug: {str(out)!r}. Set another, or remove it.")


def _here(work: Work, plan: dict[str, Any], spans: Sequence[Span], done: Callable[[int], Any]) -> None:
    """Write in this process: the loader's own stages use all cores."""
    opened = work.open()
    with opened[0]:
        for span in spans:
            work.write(opened, plan, span, done)


def _on_ray(work: Work, plan: dict[str, Any], spans: Sequence[Span], done: Callable[[int], Any]) -> None:
    """Write in processes of a cluster, each with a GPU if the loader has one, else with some cores."""
    device = work.loader["device"].type
    work = replace(work, loader={**work.loader, "device": device, "cache": None})  # each process reads a part only
    with on_ray.cluster() as ray:
        cores = on_ray.machines(ray, "CPU")
        cpus = min([RAY_CORES, *cores])
        gpus = int(device == "cuda")
        workers = sum(on_ray.machines(ray, "GPU")) if gpus else sum(count // cpus for count in cores)
        log.info("materialize on ray: %d processes with %d cores each, on %d machines", workers, cpus, len(cores))
        items = list(_pieces(spans, at_most=-(-sum(s.last - s.first for s in spans) // (4 * max(1, workers)))))
        make = partial(_writer, work, plan)
        for _, count in on_ray.results(ray, make, items, workers=max(1, workers), cpus=cpus, gpus=gpus):
            done(count)


def _writer(work: Work, plan: dict[str, Any]) -> Callable[[Span], int]:
    """Open a loader on a machine of a cluster. Returns what writes a span and gives its number of samples."""
    opened = work.open()

    def write(span: Span) -> int:
        counts: list[int] = []
        work.write(opened, plan, span, counts.append)
        return sum(counts)

    return write


def _pieces(spans: Sequence[Span], *, at_most: int) -> Iterator[Span]:
    for span in spans:
        for first in range(span.first, span.last, at_most):
            yield Span(span.slot, first, min(span.last, first + at_most))


def _blocks(numbers: Sequence[int], size: int = 1 << 16) -> Iterator[Sequence[int]]:
    return (numbers[i : i + size] for i in range(0, len(numbers), size))
