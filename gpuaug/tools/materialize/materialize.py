"""Augmented epochs, written once: what a loader shows, up to `mix`, as files of a :class:`MaterializedSource`.

takes: a loader, and which of its epochs.
does: iterates them, rounds pixels to uint8 before normalization or keeps the final dtype, and writes chunks.
gives: the folder that `source=materialized` reads; its format is in :mod:`gpuaug.source.materialized`.

A chunk is a file of consecutive samples of one epoch. It appears whole, under its name, and then its note (checksum and
faults), so a killed run goes on with the chunks that have no note and ends in the same bytes. The manifest comes last.
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
from gpuaug.errors import ConfigError, GpuaugError, StateError
from gpuaug.loader.arguments import DTYPES
from gpuaug.loader.faults import Faults
from gpuaug.loader.loader import Loader
from gpuaug.loader.stages import made_of, refuse_others
from gpuaug.loader.state import differences, plain
from gpuaug.random import keyed as draw
from gpuaug.read import order as orders
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

CHUNK = 1 << 27  # bytes: seconds of work, so that little is lost with a killed run, and few files
PROBED = 1000  # samples that may be bad before one is found that shows size and label
RAY_CORES = 4  # of one process on a cluster without GPUs: a loader's stages share them
SPARE = 1 << 24  # bytes left free on the disk: keys, notes, and what the file system takes for itself


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive chunks ``first .. last - 1`` of one stored epoch."""

    slot: int
    first: int
    last: int


class Materialize:
    """Augmented epochs of a loader on disk. Making it looks and plans; :meth:`run` writes.

    Args:
        loader: whose source, recipe, order, seed, decoding and faults; batch size and workers change no byte (with
            ``backend=kornia`` on CUDA the batch size changes pixels by 2e-6). It is not iterated itself. Its `mix` is
            left to the replay.
        out: the folder; one that an earlier run left is gone on with, or grown to more epochs.
        epochs: how many.
        start_epoch: the first of them.
        store: ``uint8``: pixels before normalization, a replay is within half a level; ``final``: the loader's dtype,
            normalized, and a replay is the same bit for bit (``backend=kornia`` on CUDA: within 2e-6 of the pixels).
        chunk: samples per file; None: about 128 MiB of them.
        on: ``local``, or ``ray``: spread over a Ray cluster, whose machines all see ``out``.

    Attributes:
        plan: what will be written, as JSON.
        missing: chunks that are not there yet.

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
        """Bytes of what is not there yet."""
        return sum(self._rows(span) for span in self.missing) * self.record.itemsize

    @property
    def free(self) -> int:
        """Bytes free on the disk of ``out``."""
        place = self.out
        while not place.exists():
            place = place.parent
        return shutil.disk_usage(place).free

    def check_space(self) -> None:
        """Raise GpuaugError where what is missing does not fit onto the disk."""
        if (needed := self.bytes_missing + SPARE) > self.free:
            raise GpuaugError(
                f"{gigabytes(needed)} are needed in {str(self.out)!r}, and {gigabytes(self.free)} are free. "
                + ("Set `store=uint8`, or fewer" if self.plan["store"] != "uint8" else "Set fewer")
                + " `epochs`, or another `out`."
            )

    def run(self) -> int:
        """Write what is missing; gives back how many samples of all have no pixels.

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
                            f"the epochs cannot be written to {str(self.out)!r}: {error}. Run the same command once "
                            "more when that is mended: it goes on where it stopped."
                        ) from error
            return self._finish()

    def verify(self) -> list[str]:
        """Read everything against its checksums; gives back the files that are damaged or missing."""
        chunks = [(slot, n) for slot in range(self.plan["epochs"]) for n in range(chunk_count(self.plan, slot))]
        damaged = []

        def damage(place: tuple[int, int]) -> str | None:
            file, rows = chunk_file(self.out, self.plan, *place), chunk_rows(self.plan, *place)
            try:
                sound = read_marker(file, rows=rows).get("digest") == file_digest(file)[1]
            except (OSError, ValueError):
                sound = False
            return None if sound else str(file)

        with ThreadPoolExecutor(machine.usable_cpus()) as pool:  # hashing lets go of the interpreter's lock
            for found in tqdm(pool.map(damage, chunks), total=len(chunks), desc="verify", unit="file"):
                if found is not None:
                    damaged.append(found)
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
        found = plain({**given, "chunk": chunk or (before["chunk"] if before else max(1, CHUNK // size))})
        if before is not None:
            self._refuse_other_layout(before, found)
            if "seal" in before and before["epochs"] > epochs:
                log.info("%s holds %d epochs already, more than `epochs=%d`", self.out, before["epochs"], epochs)
                epochs = before["epochs"]
        self._orders = [
            orders.ordered(self._order, self._seed, start_epoch + slot, source).indices for slot in range(epochs)
        ]
        return {**found, "epochs": epochs, "rows": [len(indices) for indices in self._orders]}

    def _refuse_other_layout(self, before: dict[str, Any], here: dict[str, Any]) -> None:
        grown = ("epochs", "rows", "seal", "faults")
        found = differences({k: v for k, v in before.items() if k not in grown}, here)
        if found:
            listed = "; ".join(f"{where}: {a!r} there, {b!r} here" for where, a, b in found[:5])
            raise StateError(
                f"`out` holds epochs that were stored otherwise: {str(self.out)!r}. {listed}. Restore what differs, or "
                "set another `out`."
            )

    def _missing(self) -> list[Span]:
        """What has no note yet, in runs."""
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
        """All that is known before a pixel is made, and no rests of a killed run."""
        for rest in [*self.out.glob("*.part"), *self.out.glob("epoch-*/*.part")]:
            rest.unlink()
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
        """The manifest, when every chunk has its note."""
        if left := self._missing():
            raise GpuaugError(f"{len(left)} stretches of chunks are missing in {str(self.out)!r}. Run it once more.")
        self.missing = []
        faults = 0
        for slot in range(self.plan["epochs"]):
            for number in range(chunk_count(self.plan, slot)):
                file, rows = chunk_file(self.out, self.plan, slot, number), chunk_rows(self.plan, slot, number)
                faults += len(read_marker(file, rows=rows)["faults"])
        manifest = {**self.plan, "faults": faults, "seal": _seal(self.out, self.plan)}
        files.write(self.out / MANIFEST, to_json(manifest), sync=True)
        (self.out / PLAN).unlink(missing_ok=True)
        return faults


@dataclass(frozen=True, slots=True)
class Work:
    """What writes chunks, here or on another machine: the arguments of a loader, and where to write."""

    out: Path
    loader: Mapping[str, Any]  # arguments of Loader; the recipe without normalization where uint8 is stored
    final: bool

    @classmethod
    def of(cls, loader: Loader, out: Path, *, final: bool) -> Work:
        """For the samples of a loader, one at a time over all ranks, in order."""
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
        """Who decodes: pixels of DALI and Pillow differ."""
        from gpuaug.decode.dali import choose_backend

        return choose_backend(self.loader["decode"].backend)

    def open(self) -> tuple[Loader, Noted]:
        """The loader, and what it notes of its faults."""
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
            numbers = range(len(source)) if source.indices is None else source.indices[:PROBED].tolist()
            for number in numbers[:PROBED]:
                batch = loader.fetch([number], epoch=0)
                if bool(batch.valid.all()):
                    return batch
        raise GpuaugError(f"none of the first {len(numbers[:PROBED])} samples could be decoded.")

    def write(self, opened: tuple[Loader, Noted], plan: dict[str, Any], span: Span, done: Callable[[int], Any]) -> None:
        """Make and write the chunks of a span; ``done`` is told how many samples were made."""
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
    """Faults that are kept besides, to be stored in the place of pixels."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._noted: dict[int, Fault] = {}  # the last one of each sample, by number

    def handle(
        self, faults: Sequence[Fault], *, indices: Sequence[int], epoch: int, samples: int, key_of: Callable[[int], str]
    ) -> None:
        """As the policy says, and keep them."""
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
    """Pixels [B, 3, H, W] as they are stored: final ones as they are, others as uint8 [B, H, W, 3]."""
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
    """Hash of all files but the chunks, whose own checksums are in their notes."""
    sealed = [root / f"{name}.npy" for name in ("keys", "key_offsets", "labels", "indices")]
    for slot in range(plan["epochs"]):
        sealed.append(epoch_folder(root, plan, slot) / "order.npy")
        sealed += [chunk_file(root, plan, slot, n).with_suffix(".json") for n in range(chunk_count(plan, slot))]
    return digest(*(file_digest(file)[1].encode() if file.exists() else b"none" for file in sealed))


def _earlier(out: Path) -> dict[str, Any] | None:
    """What an earlier run has written or planned here; None where the folder is new.

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
            found = read_json(out / PLAN)
            if isinstance(found, dict) and found.get("version") == VERSION:
                return found
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
    """One loader: its own stages use all cores."""
    opened = work.open()
    with opened[0]:
        for span in spans:
            work.write(opened, plan, span, done)


def _on_ray(work: Work, plan: dict[str, Any], spans: Sequence[Span], done: Callable[[int], Any]) -> None:
    """The same loader in processes of a cluster, each with a GPU where the loader has one, else with some cores."""
    device = work.loader["device"].type
    work = replace(work, loader={**work.loader, "device": device, "cache": None})  # each reads a part only
    with on_ray.cluster() as ray:
        found = on_ray.machines(ray, "CPU")
        cpus = min([RAY_CORES, *found])
        gpus = int(device == "cuda")
        workers = sum(on_ray.machines(ray, "GPU")) if gpus else sum(count // cpus for count in found)
        log.info("materialize on ray: %d processes with %d cores each, on %d machines", workers, cpus, len(found))
        items = list(_pieces(spans, at_most=-(-sum(s.last - s.first for s in spans) // (4 * max(1, workers)))))
        make = partial(_Process, work, plan)
        for _, count in on_ray.results(ray, make, items, workers=max(1, workers), cpus=cpus, gpus=gpus):
            done(count)


class _Process:
    """One loader, on a machine of a cluster."""

    def __init__(self, work: Work, plan: dict[str, Any]) -> None:
        self._work, self._plan, self._opened = work, plan, work.open()

    def __call__(self, span: Span) -> int:
        """Write a span; how many samples it has."""
        counts: list[int] = []
        self._work.write(self._opened, self._plan, span, counts.append)
        return sum(counts)


def _pieces(spans: Sequence[Span], *, at_most: int) -> Iterator[Span]:
    for span in spans:
        for first in range(span.first, span.last, at_most):
            yield Span(span.slot, first, min(span.last, first + at_most))


def _blocks(numbers: Sequence[int], size: int = 1 << 16) -> Iterator[Sequence[int]]:
    return (numbers[i : i + size] for i in range(0, len(numbers), size))


def gigabytes(size: float) -> str:
    """Bytes as text."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size / 1e3:.1f} kB"
