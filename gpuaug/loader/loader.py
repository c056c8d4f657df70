"""The stages in order, a few batches ahead: source, read, decode, augment, mix. CUDA streams are touched here only."""

from __future__ import annotations

import copy
import inspect
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from gpuaug import machine, size
from gpuaug import source as sources
from gpuaug.augment.mix import Mix
from gpuaug.augment.recipe import Augment, Drawn, MultiView
from gpuaug.batch import Batch, EncodedBatch, Fault
from gpuaug.decode.decoder import Decode, Decoder, Look
from gpuaug.errors import ConfigError, GpuaugError, ReadOnlyError, StateError
from gpuaug.loader import distributed
from gpuaug.loader.faults import Faults
from gpuaug.loader.state import State, differences, plain
from gpuaug.native.buffers import to_device
from gpuaug.random import keyed as draw
from gpuaug.read import order as orders
from gpuaug.read.order import EpochOrder, Last
from gpuaug.read.prefetch import Ahead
from gpuaug.read.reader import Reader
from gpuaug.source.cache import CachedSource, RamCache
from gpuaug.source.replay import Replay

log = logging.getLogger("gpuaug")

Task = tuple[Tensor, Tensor, Tensor]  # indices, repeats and valid of a batch: int64, int64, bool [B]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MEMORY_FORMATS = {"contiguous_format": torch.contiguous_format, "channels_last": torch.channels_last}


class Loader:
    """Augmented batches of a source on the device, in an order that can be stopped and resumed anywhere.

    Args:
        source: a :class:`~gpuaug.FolderSource`, or any map-style object that yields ``(bytes, label)``; what a
            :class:`~gpuaug.MaterializedSource` has stored is neither decoded nor augmented again.
        augment: the recipe, :class:`~gpuaug.Augment` or :class:`~gpuaug.MultiView`.
        batch_size: samples per batch and rank.
        order: ``"shuffle"`` (what None means), ``"sequential"``, an order of
            :mod:`gpuaug.read.order`, or a torch Sampler.
        shuffle: True and False are other words for the first two orders.
        last: what to do with samples that do not fill a batch on every rank. ``pad`` repeats samples, with ``valid``
            False, so that all ranks have equally many batches. ``drop`` leaves samples out. ``uneven`` keeps every
            sample once; ranks may then differ by a batch, and DDP waits for ever for the missing one. None: ``pad``
            with several ranks, as torch's DistributedSampler does, and ``uneven`` with one.
        drop_last: True means ``last="drop"``.
        mix: MixUp, CutMix and label smoothing of whole batches, or None.
        decode: settings of the decoder.
        cache: where encoded bytes stay after they were read, :class:`~gpuaug.RamCache`; None: nowhere.
        ahead: bytes of encoded batches that wait in memory ahead of the training, as 2147483648 or ``"2GiB"``; None:
            no more than the workers' own.
        faults: what happens to samples that cannot be read or decoded.
        device: ``auto`` (CUDA where there is a device), ``cuda`` (``cuda:$LOCAL_RANK``, or torch's current device where
            that is not set), ``cpu``, or a torch.device. On CUDA a thread of the loader allocates and launches: capture
            CUDA graphs before the loop over it, or with ``capture_error_mode="thread_local"``.
        dtype: of the images; float32, bfloat16 or float16.
        memory_format: of the images; contiguous_format or channels_last.
        num_workers: processes that read bytes; 0 reads in this process; None: half of the cores, at most 4, and 0 for
            sources that are mapped into memory.
        prefetch: batches made ahead in the background; 0 makes each batch when it is asked for.
        timeout: seconds that a batch of bytes may take before :class:`~gpuaug.ReadError`.
        start_method: of the workers: fork, forkserver, spawn; None: Python's default.
        seed: decides order and draws, together with the epoch.
        rank, world_size: this process's share; None: torch.distributed's when iteration starts.
        limit_batches: stop each epoch after so many batches.

    Attributes:
        waited: seconds that the consumer waited for batches in the current pass.

    Iterating gives every :class:`~gpuaug.Batch` of an epoch, and the next pass is the next epoch, also where a pass was
    left early (``break``). To go on inside an epoch use ``load_state_dict`` or ``start_at``, to repeat one
    ``set_epoch``. After an error of the loader itself the next pass goes on with the next sample.

    Settings are fixed: :meth:`replace` makes a loader with others.

    Raises:
        DataError, FaultBudgetError: while iterating, as ``faults`` say.
        ReadError: while iterating, if a worker died or took longer than ``timeout``.
        ConfigError: as the first batch is asked for, if ranks differ in seed, source or recipe.
    """

    def __init__(
        self,
        source: Any,
        *,
        augment: Augment | MultiView,
        batch_size: int = 64,
        order: Any = None,
        shuffle: bool | None = None,
        last: str | None = None,
        drop_last: bool = False,
        mix: Mix | None = None,
        decode: Decode | None = None,
        cache: RamCache | None = None,
        ahead: int | str | None = None,
        faults: Faults | None = None,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = torch.float32,
        memory_format: str | torch.memory_format = torch.contiguous_format,
        num_workers: int | None = None,
        prefetch: int = 2,
        timeout: float = 120.0,
        start_method: str | None = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        limit_batches: int | None = None,
    ) -> None:
        self._given = {name: value for name, value in locals().items() if name not in ("self", "source")}
        if not isinstance(augment, Augment | MultiView):
            raise ConfigError(
                f"`augment` must be a gpuaug.Augment or gpuaug.MultiView. Found: {type(augment).__name__}."
            )
        for name, value, kind in (
            ("mix", mix, Mix), ("decode", decode, Decode), ("cache", getattr(cache, "settings", cache), RamCache),
            ("faults", faults, Faults),
        ):  # fmt: skip
            if value is not None and not isinstance(value, kind):
                raise ConfigError(f"`{name}` must be a gpuaug.{kind.__name__} or None. Found: {value!r:.200}.")
        _at_least("batch_size", batch_size, 1)
        _at_least("prefetch", prefetch, 0)
        if limit_batches is not None:
            _at_least("limit_batches", limit_batches, 1)
        order = _order(order, _flag("shuffle", shuffle))
        self.source = sources.adapt(source)
        self.augment = augment
        self.batch_size = batch_size
        self.order = orders.adapt(order)
        if _flag("drop_last", drop_last):
            if last not in (None, "drop"):
                raise ConfigError(f"`drop_last=true` means `last=drop`, and `last` is {last!r}. Set one of them.")
            last = "drop"
        self._last = None if last is None else orders.check_last(last)
        self.mix = mix
        self.faults = faults or Faults()
        self.device = _device(device)
        self.dtype = _one_of("dtype", dtype, DTYPES)
        self.memory_format = _one_of("memory_format", memory_format, MEMORY_FORMATS)
        self.num_workers = _workers(self.source) if num_workers is None else _at_least("num_workers", num_workers, 0)
        self.prefetch = prefetch
        self.ahead = None if ahead is None else size.parse(ahead, key="ahead")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ConfigError(f"`seed` must be a whole number. Found: {seed!r}.")
        self.seed = seed
        self.limit_batches = limit_batches
        self.waited = 0.0
        self._rank, self._world_size = rank, world_size
        self._epoch, self._position, self._resumes = 0, 0, list[int]()
        self._next_pass: Literal["here", "again", "next epoch"] = "here"  # where it begins, if none has finished
        self._finished = False  # the epoch's last batch was handed out
        self._said_last = False
        self._cached_order: tuple[int, orders.Ordered] | None = None
        self._fingerprint: dict[str, Any] | None = None
        distributed.rank_and_world(rank, world_size)
        self._replay: Replay | None = None
        if (stored := getattr(self.source, "stored", None)) is not None:  # epochs that are augmented already
            self._replay = Replay(stored, augment=augment, seed=self.seed, dtype=self.dtype)
            self.order = self._replay.order(self.order)
        self._rows = getattr(self.source, "by_epoch", None)  # of a source that is read differently from epoch to epoch
        encoded = self.source if self._rows is None else self._rows
        if self._replay is not None:
            encoded = self._replay.rows
        self._cached: CachedSource | None = None
        if cache is not None and self._replay is None:
            # an open one comes from `replace`: what it holds is not read again
            opened = cache if isinstance(cache, CachedSource) else cache.open(sources.adapt(encoded))
            self._cached = encoded = opened
        elif cache is not None:
            log.info("cache ram is not used: stored epochs are mapped into memory as they are")
        reader = Reader(encoded, num_workers=self.num_workers, timeout=timeout, start_method=start_method)
        self._stages = Stages(self, decode or Decode())
        self._live = _Live(reader, self._stages, self._cached)
        weakref.finalize(self, self._live.close)
        self.augment.to(self.device)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_live" in vars(self) and name in SETTINGS:
            raise ReadOnlyError(
                f"`{name}` of a loader cannot be set: what runs already would not follow. "
                f"Use `loader = loader.replace({name}=...)`."
            )
        super().__setattr__(name, value)

    def replace(self, **changes: Any) -> Loader:
        """A loader with other settings, which begins where the next pass of this one would; this one is closed.

        ``loader = loader.replace(augment=larger, mix=None)`` between two epochs, for example. Source, faults and what
        ``cache`` holds are handed on.

        Args:
            changes: arguments of the constructor, except ``source``.

        Raises:
            ConfigError: as the constructor does; this loader is then as it was.
            StateError: if the next pass would go on inside an epoch, which the change makes another one.
        """
        self._live.check_open()
        if "source" in changes:
            raise ConfigError("`replace` keeps the source. Build a new loader for another one.")
        given = {**self._given, "device": self.device, "num_workers": self.num_workers}
        for pair in (("order", "shuffle"), ("last", "drop_last")):  # two names of one setting: what is set anew counts
            if changes.keys() & pair:
                given = {name: value for name, value in given.items() if name not in pair}
        if self._cached is not None:
            given["cache"] = self._cached
        made = type(self)(self.source, **{**given, **changes})
        closed = made
        try:
            self._live.stop()
            self._begin()
            if self._position:
                made.load_state_dict(self.state_dict())
            else:
                made.set_epoch(self._epoch)
            closed = self
        finally:
            if made._cached is self._cached:
                closed._live.cached = None  # it is the other one's
            closed.close()
        return made

    @property
    def epoch(self) -> int:
        """The epoch that is, or is about to be, iterated; after a pass that was left early still the one of that."""
        return self._epoch

    @property
    def last(self) -> Last:
        """What becomes of samples that do not fill a batch on every rank: ``uneven``, ``drop`` or ``pad``."""
        return self._last or ("pad" if distributed.rank_and_world(self._rank, self._world_size)[1] > 1 else "uneven")

    @property
    def num_classes(self) -> int | None:
        """Number of classes of the source, None where it has none."""
        return getattr(self.source, "num_classes", None)

    @property
    def ahead_level(self) -> int:
        """Bytes of encoded batches that wait in memory now, of the ``ahead`` that were asked for."""
        return 0 if self._live.ahead is None else self._live.ahead.level

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank, under the present settings."""
        return self._limited(len(self._plan(0)), 0)

    def __iter__(self) -> Iterator[Batch]:
        """Go through an epoch; an iterator that was left unfinished ends.

        Raises:
            ConfigError: if the ranks of torch.distributed disagree about what the epoch is.
        """
        self._live.check_open()
        self.augment.check_unchanged()
        self._live.stop()
        self._begin()
        plan = self._plan(self._position)
        if self._rank is None:
            shared = {
                "epoch": self._epoch,
                "position": self._position,
                "samples": len(self._ordered()),
                "order of the epoch": self._ordered().digest,
                "batch_size": self.batch_size,
                "last": self.last,
                "limit_batches": self.limit_batches,
                "faults.policy": self.faults.policy,
            }
            distributed.agree({**self.fingerprint(), **shared}, device=self.device)
        self._say_last(plan)
        if self._cached is not None and self._cached.settings.fill == "ahead":
            numbers = self._numbers(self._epoch) or (lambda indices, *_: indices)
            shown = [numbers(*asked) for asked in islice(iter(self._plan(0)), len(self))]
            self._cached.fill(self._live.reader, torch.cat(shown) if shown else torch.zeros(0, dtype=torch.int64))
        return _Pass(self, plan, self._limited(len(plan), self._position))

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of ``epoch``, 0 or larger; naming one that a state was loaded of keeps its position."""
        _epoch(epoch)
        self._advance()
        if epoch != self._epoch:
            self._live.stop()
            self._epoch, self._position, self._resumes, self._next_pass = epoch, 0, [], "here"
        elif self._next_pass == "next epoch":
            self._next_pass = "again"

    def start_at(self, epoch: int, position: int) -> None:
        """Let the next pass begin inside ``epoch``, after ``position`` samples of its order (of all ranks together)."""
        total = len(self._ordered(_epoch(epoch)))
        if isinstance(position, bool) or not isinstance(position, int) or not 0 <= position <= total:
            raise ConfigError(
                f"`position` must lie in 0 .. {total}, the samples of epoch {epoch}. Found: {position!r}."
            )
        self._live.stop()
        self._epoch, self._position, self._resumes = epoch, position, []
        self._next_pass, self._finished = "here", False

    def state_dict(self) -> dict[str, Any]:
        """Where the consumer is, as small JSON: the next sample after the last batch that was handed out."""
        fingerprint, at = self.fingerprint(), self._position
        if self._finished:
            return State(epoch=self._epoch + 1, position=0, fingerprint=fingerprint).to_json()
        ordered = self._ordered() if at else None
        return State(
            epoch=self._epoch,
            position=at,
            after=None if ordered is None else int(ordered.indices[at - 1]),
            order=None if ordered is None else ordered.digest,
            resumes=self._resumes,
            fingerprint=fingerprint,
        ).to_json()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken, with any number of workers and ranks and any batch size.

        Samples that were excluded since, or a smaller or larger subset, move no other sample; where that is not so
        (weights, samplers, repeats) another set of samples is refused inside an epoch.

        Raises:
            StateError: if it is no state, or one taken inside an epoch of another source, seed, order or recipe; the
                loader is then as it was.
        """
        loaded = State.from_json(state)
        if found := differences(loaded.fingerprint, self.fingerprint()):
            listed = "; ".join(f"{where}: {a!r} in the state, {b!r} here" for where, a, b in found[:5])
            if loaded.position:
                raise StateError(
                    f"this state was taken inside epoch {loaded.epoch} of another configuration. {listed}. "
                    "Restore the configuration to finish the epoch, or start the next one with "
                    f"`set_epoch({loaded.epoch + 1})`."
                )
            log.warning("state of another configuration accepted at the start of epoch %d: %s", loaded.epoch, listed)
        self.start_at(loaded.epoch, self._locate(loaded) if loaded.position else 0)
        self._resumes = [*loaded.resumes, self._position] if self._position else []

    def fingerprint(self) -> dict[str, Any]:
        """What an epoch is an epoch of: source keys, seed, order, and all that decides draws and pixels."""
        if self._fingerprint is None:
            self._fingerprint = plain(
                {
                    "source": self.source.digest(),
                    "seed": self.seed,
                    "order": orders.describe(self.order),
                    "augment": self.augment.fingerprint(),
                    "mix": None if self.mix is None else repr(self.mix),
                }
            )
        return self._fingerprint

    def fetch(
        self,
        indices: Sequence[int],
        *,
        epoch: int | None = None,
        repeats: Sequence[int] | None = None,
        mix: bool = False,
    ) -> Batch:
        """One batch of chosen samples, exactly as an epoch shows them, through the same stages.

        Args:
            indices: numbers in the source.
            epoch: whose draws; None: the current one.
            repeats: how often the epoch yielded each index before; None: 0.
            mix: whether to mix the batch.

        Raises:
            DataError, FaultBudgetError: as the loader's faults say.
            GpuaugError: if policy ``drop`` leaves none of the samples.
        """
        self._live.check_open()
        self.augment.check_unchanged()
        epoch = self._epoch if epoch is None else _epoch(epoch)
        number = _integers("indices", indices)
        repeat = torch.zeros_like(number) if repeats is None else _integers("repeats", repeats)
        if not len(number) or len(repeat) != len(number):
            raise ConfigError(
                f"`indices` must name samples, and `repeats` as many. Found: {len(number)}, {len(repeat)}."
            )
        for index in number.tolist():
            try:
                self.source.key(index)
            except IndexError as error:
                raise ConfigError(
                    f"`indices` must be numbers of samples of the source. Found: {index} ({error})."
                ) from error
        asked = [(number, repeat, torch.ones(len(number), dtype=torch.bool, device="cpu"))]
        reader = Reader(self._live.reader.source, num_workers=0)
        encoded = next(iter(reader.batches(asked, numbers=self._numbers(epoch), lend=True)))
        batch = self._stages.finish(self._stages.decode(encoded, epoch), epoch, mix=mix)
        if batch is None:
            raise GpuaugError(f"none of the samples {list(indices)} could be decoded, and `faults.policy` is drop.")
        return self._stages.hand_over(batch)

    def close(self) -> None:
        """End workers, background thread and decoder; a closed loader stays closed."""
        self._live.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _advance(self) -> None:
        """After a finished pass the next epoch begins."""
        if self._finished:
            self._epoch, self._position, self._resumes = self._epoch + 1, 0, []
            self._next_pass, self._finished = "here", False

    def _begin(self) -> None:
        """Go to where the next pass begins."""
        self._advance()
        if self._next_pass == "next epoch":
            left = self._limited(len(self._plan(self._position)), self._position)
            log.info("epoch %d was left %d batches before its end: epoch %d begins", self._epoch, left, self._epoch + 1)
            self._epoch += 1
        if self._next_pass != "here":
            self._position, self._resumes, self._next_pass = 0, [], "here"

    def _ordered(self, epoch: int | None = None) -> orders.Ordered:
        epoch = self._epoch if epoch is None else epoch
        if self._cached_order is None or self._cached_order[0] != epoch:
            self._cached_order = epoch, orders.ordered(self.order, self.seed, epoch, self.source)
        return self._cached_order[1]

    def _locate(self, state: State) -> int:
        """The position in the epoch here that a state inside an epoch means."""
        ordered = self._ordered(state.epoch)
        if ordered.digest == state.order:
            if not 0 < state.position <= len(ordered) or int(ordered.indices[state.position - 1]) != state.after:
                raise StateError(
                    f"the state contradicts itself: sample {state.after} is not number {state.position} of its epoch."
                )
            return state.position
        position = getattr(self.order, "position", None)
        if position is None:
            raise StateError(
                f"this state was taken inside epoch {state.epoch} of another order: {orders.describe(self.order)} "
                "gives other samples here. Restore source and order to finish the epoch, or start the next one with "
                f"`set_epoch({state.epoch + 1})`."
            )
        assert state.after is not None
        found = int(position(self.seed, state.epoch, ordered.indices, state.after))
        log.warning(
            "other samples are active than in the state: epoch %d goes on after sample %d, at %d of %d",
            state.epoch,
            state.after,
            found,
            len(ordered),
        )
        return found

    def _plan(self, start: int) -> EpochOrder:
        rank, world_size = distributed.rank_and_world(self._rank, self._world_size)
        if world_size > 1 and self.faults.policy == "drop" and self.last != "uneven":
            default = "" if self._last else ", which several ranks have by default"
            raise ConfigError(
                "`faults.policy=drop` shortens batches on one rank alone, which contradicts "
                f"`last={self.last}`{default}. Set `faults.policy=blank`, or `last=uneven` where no collective waits."
            )
        return EpochOrder(
            self._ordered(), start=start, rank=rank, world_size=world_size, batch_size=self.batch_size, last=self.last
        )

    def _say_last(self, plan: EpochOrder) -> None:
        """Say once, on rank 0, what `last` does where the samples do not fill a batch on every rank."""
        if self._said_last or plan.rank or plan.world_size == 1:
            return
        most, least = (
            self._limited(len(replace(plan, rank=rank)), self._position) for rank in (0, plan.world_size - 1)
        )
        more = plan.batch_size * plan.world_size * most - plan.remaining
        if most != least:
            log.warning(
                "last=uneven: this epoch has %d batches on rank 0 and %d on rank %d. Where a step waits for all ranks, "
                "as with DDP, the run hangs at the end. Set `last=pad` or `last=drop`, or use torch's `Join`.",
                most, least, plan.world_size - 1,
            )  # fmt: skip
        elif self._last is None and more > 0:
            log.info(
                "last pad: %d samples come again, so that each of %d ranks has %d full batches; `batch.valid` is False "
                "there", more, plan.world_size, most,
            )  # fmt: skip
        else:
            return
        self._said_last = True

    def _numbers(self, epoch: int) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        """What the reader asks the source for, where that is not the samples' numbers."""
        rows = self._replay or self._rows
        return None if rows is None else rows.numbers(epoch)

    def _limited(self, batches: int, position: int) -> int:
        if self.limit_batches is None:
            return batches
        _, world_size = distributed.rank_and_world(self._rank, self._world_size)
        behind = -(-position // (self.batch_size * world_size))
        return max(0, min(batches, self.limit_batches - behind))


SETTINGS = frozenset(inspect.signature(Loader).parameters)


class Inside:
    """What measurements and preparations need of a loader beside its batches; no part of what users touch.

    Attributes:
        reader: takes bytes out of the source.
        stages: decode, augment and mix of one batch.
        cached: the source's bytes in memory; None where they are not kept.
        replay: stored epochs, in the place of decode and augment; None where there are none.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self.reader: Reader = loader._live.reader
        self.stages: Stages = loader._stages
        self.cached: CachedSource | None = loader._cached
        self.replay: Replay | None = loader._replay

    @property
    def ordered(self) -> orders.Ordered:
        """The samples of the loader's epoch, of all ranks."""
        return self._loader._ordered()

    @property
    def numbers(self) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        """What the reader asks the source for in the loader's epoch, where that is not the samples' numbers."""
        return self._loader._numbers(self._loader.epoch)

    @property
    def ranks(self) -> int:
        """How many ranks share the epoch."""
        return distributed.rank_and_world(self._loader._rank, self._loader._world_size)[1]

    @property
    def running(self) -> int | None:
        """Batches that wait in the pass under way; None where none is made ahead."""
        background = self._loader._live.running
        return background.waiting if isinstance(background, _Background) else None

    def tasks(self) -> Iterator[Task]:
        """This rank's batches of the whole epoch, as the reader takes them."""
        return iter(self._loader._plan(0))

    def run(self, tasks: Iterator[Task], *, reader: Any = None, stages: Any = None) -> Run:
        """A pass over other batches than the epoch's.

        Args:
            tasks: what the reader takes; may be without end.
            reader, stages: in the place of the loader's own.
        """
        return Run(self._loader, tasks, reader=reader or self.reader, stages=stages or self.stages)


class Run(Iterator[Batch]):
    """A pass as training makes it, with the loader's threads and workers; no state of the loader changes."""

    def __init__(self, loader: Loader, tasks: Iterator[Task], *, reader: Any, stages: Any) -> None:
        self._shell = copy.copy(loader)  # a pass notes its position in its loader: here in this one
        self._shell._stages = stages
        self._shell._live = copy.copy(loader._live)
        self._shell._live.reader = reader
        self._pass = _Pass(self._shell, _Given(tasks), 2**62)

    def __next__(self) -> Batch:
        return next(self._pass)

    def close(self) -> None:
        """End its threads; the workers stay."""
        self._shell._live.stop()


class _Given:
    """What stands for the plan of an epoch in :class:`Run`."""

    def __init__(self, tasks: Iterator[Task]) -> None:
        self._tasks = tasks

    def __iter__(self) -> Iterator[Task]:
        return self._tasks

    def position(self, _done: int) -> int:
        """Nobody resumes here."""
        return 0


class _Pass(Iterator[Batch]):
    """One way through an epoch; whatever is handed out counts as consumed."""

    def __init__(self, loader: Loader, plan: EpochOrder | _Given, count: int) -> None:
        self._loader, self._plan, self._count, self._done = loader, plan, count, 0
        loader.waited = 0.0
        loader._stages.start_pass()
        numbers = loader._numbers(loader._epoch)
        encoded: Any = loader._live.reader.batches(
            islice(iter(plan), count),
            numbers=numbers,
            lend=loader.ahead is None,  # who keeps batches ahead wants them read
        )
        if loader.ahead is not None:
            encoded = loader._live.ahead = Ahead(encoded, limit=loader.ahead)
        looked: Any = _looked(encoded, loader._stages, loader._epoch)
        before: _Background | None = None
        if loader.prefetch:
            # a thread for each stage: headers are read while the batch before is decoded and the one before augmented
            before = looked = _Background(looked, ahead=0, name="gpuaug-headers", device=loader.device)
        decoded: Any = _decoded(looked, loader._stages)
        if loader.prefetch and not loader._stages.augment.main_thread:
            before = decoded = _Background(
                decoded, ahead=1, before=before, name="gpuaug-decoding", device=loader.device
            )
        items = _made(decoded, loader._stages, loader._epoch)
        if not loader.prefetch:
            self._items = loader._live.running = items
            return
        self._items = _Background(items, ahead=loader.prefetch, before=before, device=loader.device)
        loader._live.running = self._items  # before the first sample is read: who then ends the pass finds it
        self._items.start()

    def __next__(self) -> Batch:
        loader, stages = self._loader, self._loader._stages
        while self._done < self._count:
            if loader._live.running is not self._items:
                raise GpuaugError(
                    "this iterator has ended: after an error, or because its loader was closed or iterated anew. "
                    "Use the newest iterator, or build a second loader."
                )
            begin = time.perf_counter()
            try:
                item: Any = next(self._items, _Background.END)
                if item is _Background.END and loader._live.running is not self._items:
                    continue  # ended from another thread
                if item is _Background.END:
                    raise GpuaugError(f"reading ended after {self._done} of {self._count} batches.")
                if isinstance(item, Decoded):
                    item = stages.finish(item, loader._epoch)
            except BaseException as error:
                loader._live.stop()
                if isinstance(error, Exception) and loader._next_pass == "next epoch":  # not left by the consumer
                    loader._next_pass, loader._resumes = "here", [*loader._resumes, loader._position]
                raise
            loader.waited += time.perf_counter() - begin
            self._done += 1
            loader._position, loader._next_pass = self._plan.position(self._done), "next epoch"
            loader._finished = self._done == self._count
            if loader._cached is not None:
                loader._cached.tell()
            if item is not None:  # None: policy `drop` left nothing of the batch
                return stages.hand_over(item)
        if loader._live.running is self._items:
            loader._live.stop()
            decoder = stages.decoder
            loader.faults.end_of_epoch(loader._epoch, rescued=decoder.rescued, truncated=decoder.truncated)
            loader._finished = True
            loader._advance()
        raise StopIteration

    def __del__(self) -> None:
        loader = getattr(self, "_loader", None)
        if loader is not None and loader._live.running is getattr(self, "_items", loader):
            loader._live.stop()


def _looked(encoded: Any, stages: Stages, epoch: int) -> Iterator[Looked]:
    """Batches whose headers were read.

    No part of it refers to the pass or the loader: the thread that runs it must not keep them alive.
    """
    try:
        for batch in encoded:
            yield stages.look(batch, epoch)
            del batch
    finally:
        encoded.close()


def _decoded(looked: Any, stages: Stages) -> Iterator[Decoded]:
    """Decoded batches."""
    try:
        for batch in looked:
            yield stages.pixels(batch)
            del batch
    finally:
        looked.close()


def _made(decoded: Any, stages: Stages, epoch: int) -> Iterator[Any]:
    """Finished batches, or the decoded ones where augmentation must run on the thread that iterates."""
    try:
        for batch in decoded:
            yield batch if stages.augment.main_thread else stages.finish(batch, epoch)
            del batch
    finally:
        decoded.close()


@dataclass(frozen=True, slots=True)
class Looked:
    """Encoded images with what decoding needs: their headers, the draws, and the boxes of every view."""

    encoded: EncodedBatch
    look: Look
    drawn: Drawn
    boxes: list[Any]


@dataclass(frozen=True, slots=True)
class Decoded:
    """Pixels before augmentation, with everything that it needs and, on CUDA, the event after which they are there."""

    encoded: EncodedBatch
    images: list[Tensor]  # uint8 [B, H, W, 3] per view, device
    drawn: Drawn
    faults: list[Fault]
    ready: torch.cuda.Event | None


@dataclass(frozen=True, slots=True)
class _Made:
    """A finished batch and, on CUDA, the event after which it is there."""

    batch: Batch
    ready: torch.cuda.Event | None


class Stages:
    """Decode, augment and mix of one batch; on CUDA on two streams of the loader's own, one for decoding."""

    def __init__(self, loader: Loader, decode: Decode) -> None:
        # no reference to the loader: a thread that runs these stages must not keep it alive
        self.augment: Augment | MultiView | Replay = loader._replay or loader.augment
        self.mix, self.faults = loader.mix, loader.faults
        self.device, self.dtype, self.memory_format = loader.device, loader.dtype, loader.memory_format
        self.seed, self.num_classes, self.key_of = loader.seed, loader.num_classes, loader.source.key
        self.settings: Decode | Replay = loader._replay or decode
        self._decoder: Decoder | Replay | None = None
        self._lock = threading.Lock()
        self.batch_size = loader.batch_size
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None  # of decoding, of augmenting

    @property
    def decoder(self) -> Decoder | Replay:
        """The decoder, opened at first use."""
        with self._lock:
            if self._decoder is None:
                accept = self.faults.truncated == "accept"
                self._decoder = self.settings.open(self.device, accept_truncated=accept, batch_size=self.batch_size)
            return self._decoder

    def close(self) -> None:
        """Give back the decoder's threads and memory."""
        with self._lock:
            if self._decoder is not None:
                self._decoder.close()
                self._decoder = None

    def start_pass(self) -> None:
        """Order the loader's streams behind what the consumer has queued so far, as the recipe's own tensors.

        Once is enough: torch's allocator gives the memory of a batch back only after its last use on any stream.
        """
        for stream in self.streams or ():
            stream.wait_stream(torch.cuda.current_stream(self.device))

    @contextmanager
    def decoding_by(self, decoder: Decoder) -> Iterator[None]:
        """Another decoder for a while, which stays the caller's to close."""
        own, self._decoder = self.decoder, decoder
        try:
            yield
        finally:
            self._decoder = own

    @property
    def streams(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream] | None:
        """Those of decoding and augmenting; None on a CPU."""
        if self.device.type != "cuda":
            return None
        with self._lock:
            if self._streams is None:
                self._streams = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
            return self._streams

    @contextmanager
    def on_stream(self, *, decoding: bool = False) -> Iterator[torch.cuda.Stream | None]:
        """The loader's device and one of its streams are the current ones within; a CPU has none."""
        if (streams := self.streams) is None:
            yield None
            return
        stream = streams[0 if decoding else 1]
        # the device first: to leave a stream alone opens a context on whichever device was current before
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield stream

    def decode(self, encoded: EncodedBatch, epoch: int) -> Decoded:
        """Look at the headers, draw, and decode every image once, into one uint8 batch per view."""
        return self.pixels(self.look(encoded, epoch))

    def look(self, encoded: EncodedBatch, epoch: int) -> Looked:
        """Look at the headers, draw, and decide what is decoded; all on the host."""
        look = self.decoder.look(encoded)
        drawn = self.augment.draw(
            seed=self.seed, epoch=epoch, indices=encoded.indices.numpy(), repeats=encoded.repeats.numpy()
        )
        return Looked(encoded, look, drawn, self.augment.boxes(drawn, look.height, look.width))

    def pixels(self, looked: Looked) -> Decoded:
        """Decode every image once, into one uint8 batch per view."""
        encoded = looked.encoded
        with self.on_stream(decoding=True) as stream:
            images, found = self.decoder.pixels(encoded, looked.look, looked.boxes)
            ready = None if stream is None else stream.record_event()
        faults = {fault.row: fault for fault in [*found, *looked.look.faults, *encoded.faults]}
        return Decoded(encoded, images, looked.drawn, [faults[row] for row in sorted(faults)], ready)

    def finish(self, decoded: Decoded, epoch: int, *, mix: bool = True) -> _Made | None:
        """Augment and mix; None where policy ``drop`` leaves nothing.

        Raises:
            DataError, FaultBudgetError: as the policy says.
        """
        encoded, faults = decoded.encoded, decoded.faults
        valid, indices, labels = encoded.valid, encoded.indices, encoded.labels
        self.faults.handle(
            [fault for fault in faults if valid[fault.row]],  # what only fills the batch was met in its own place
            indices=indices.tolist() if faults else [],
            epoch=epoch,
            samples=len(encoded),
            key_of=self.key_of,
        )
        with self.on_stream() as stream:
            if stream is not None and decoded.ready is not None:
                stream.wait_event(decoded.ready)
                for view in decoded.images:
                    view.record_stream(stream)  # allocated on the other stream
            images = self.augment.apply(
                decoded.images, decoded.drawn, dtype=self.dtype, memory_format=self.memory_format
            )
            if faults:
                bad = torch.tensor([fault.row for fault in faults])
                valid = valid.index_fill(0, bad, False)
                if self.faults.policy == "blank":
                    images = [view.index_fill(0, to_device(bad, self.device), 0) for view in images]
                else:
                    keep = torch.ones(len(encoded), dtype=torch.bool).index_fill(0, bad, False).nonzero().flatten()
                    if not len(keep):
                        return None
                    images = [
                        view.index_select(0, to_device(keep, self.device)).contiguous(memory_format=self.memory_format)
                        for view in images
                    ]
                    valid, indices = valid[keep], indices[keep]
                    labels = None if labels is None else labels[keep]
            if labels is not None:
                labels = to_device(labels, self.device)
            if self.mix is not None and mix:
                images, labels = self.mix(
                    images,
                    labels,
                    valid=valid,
                    num_classes=self.num_classes,
                    seed=self.seed,
                    epoch=epoch,
                    first_index=int(encoded.indices[0]),
                )
            batch = Batch(
                images=images if len(images) > 1 else images[0],
                labels=labels,
                indices=indices,
                valid=valid,
                key_of=self.key_of,
            )
            return _Made(batch, None if stream is None else stream.record_event())

    def hand_over(self, made: _Made) -> Batch:
        """Order the consumer's stream behind the batch."""
        if made.ready is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(made.ready)
            images = made.batch.images if isinstance(made.batch.images, list) else [made.batch.images]
            for tensor in [*images, made.batch.labels]:
                if tensor is not None:
                    tensor.record_stream(current)  # allocated on the loader's stream, used on this one
        return made.batch


class _Background:
    """Runs an iterator in a thread, a few items ahead; exceptions arrive with their own type, in their turn.

    Args:
        items: what is run.
        ahead: how many items wait at most, beside one that is in the making; with 0 that one waits itself.
        before: another one that `items` takes from, and that ends with this one.
        name: of the thread.
        device: the thread's current one, where it is CUDA: of a new thread that is the first, whoever uses it.

    It begins by :meth:`start`, or when the first item is asked for.
    """

    END = object()

    def __init__(
        self,
        items: Iterator[Any],
        *,
        ahead: int,
        before: _Background | None = None,
        name: str = "gpuaug-loader",
        device: torch.device,
    ) -> None:
        self.before, self._device = before, device
        self._queue: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._room = threading.Semaphore(ahead + 1)  # asked for before an item is made: it has memory from then on
        self._stop = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, args=(items,), name=name, daemon=True)
        self._started = False

    @property
    def waiting(self) -> int:
        """Items that are ready."""
        return self._queue.qsize()

    def start(self) -> None:
        """Begin."""
        self._started = True
        self._thread.start()

    def _run(self, items: Iterator[Any]) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            while self._wait() and self._put(next(items, self.END)):
                pass
        except BaseException as error:
            self._queue.put((self.END, error))
        finally:
            if (close := getattr(items, "close", None)) is not None:
                close()

    def _put(self, item: Any) -> bool:
        """Whether more may follow. Nothing here refers to an item afterwards: whoever takes it, frees it."""
        self._queue.put((item, None))
        return item is not self.END

    def _wait(self) -> bool:
        """For room; False if nobody wants another item."""
        while not self._stop.is_set():
            if self._room.acquire(timeout=0.1):
                return True
        return False

    def __iter__(self) -> _Background:
        return self

    def __next__(self) -> Any:
        while True:
            if self._ended:
                raise StopIteration
            if not self._started:
                self.start()
            try:
                item, error = self._queue.get(timeout=0.2)
                break
            except queue.Empty:  # another thread may have ended it meanwhile
                continue
        if item is self.END:
            self._ended = True
            if error is not None:
                raise error
            raise StopIteration
        self._room.release()
        return item

    def stop(self) -> None:
        """Ask the thread to end after the batch it is making."""
        self._ended = True
        self._stop.set()
        if self.before is not None:
            self.before.stop()

    def close(self) -> None:
        """What an iterator's end calls."""
        self.stop()

    def join(self, timeout: float) -> bool:
        """Wait for the thread, and for the one before it; True once they have ended."""
        deadline = time.monotonic() + timeout
        if self._started and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        before = self.before is None or self.before.join(max(0.0, deadline - time.monotonic()))
        return before and not self._thread.is_alive()


class _Live:
    """What runs and must be ended: the pass under way, the workers, the decoder."""

    def __init__(self, reader: Reader, stages: Stages, cached: CachedSource | None) -> None:
        self.reader, self.stages, self.cached = reader, stages, cached
        self.running: Any = None
        self.ahead: Ahead | None = None
        self.closed = False

    def check_open(self) -> None:
        if self.closed:
            raise GpuaugError("this loader is closed. Build a new one.")

    def stop(self) -> None:
        """End the pass under way, and its thread, within seconds."""
        running, self.running, self.ahead = self.running, None, None
        if isinstance(running, _Background):
            running.stop()
            if not running.join(5.0):
                self.reader.close()  # a read that does not return holds the thread; without workers it ends
                running.join(5.0)
        elif running is not None:
            with suppress(ValueError):  # another thread is inside of it, and ends at its next batch
                running.close()

    def close(self) -> None:
        """End everything, once."""
        if not self.closed:
            self.closed = True
            self.stop()
            self.reader.close()
            self.stages.close()
            if self.cached is not None:
                self.cached.close()


def _at_least(name: str, value: int, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"`{name}` must be a whole number >= {low}. Found: {value!r}.")
    return value


def _epoch(epoch: int) -> int:
    if _at_least("epoch", epoch, 0) >= draw.EPOCHS:
        raise ConfigError(f"`epoch` must be below 2**32. Found: {epoch!r}.")
    return epoch


def _integers(name: str, values: Any) -> Tensor:
    """Whole numbers >= 0 as int64 [n] on the CPU."""
    try:
        found = torch.as_tensor(values, device="cpu")
        whole = found.ndim == 1 and (not len(found) or not (found.is_floating_point() or found.is_complex()))
        if not whole or found.dtype == torch.bool or (len(found) and int(found.min()) < 0):
            raise ValueError(f"{found.dtype} {list(found.shape)}")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ConfigError(f"`{name}` must be whole numbers >= 0. Found: {values!r:.200}.") from error
    return found.to(torch.int64)


def _flag(name: str, value: bool | None) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"`{name}` must be true or false. Found: {value!r}.")
    return value


def _order(order: Any, shuffle: bool | None) -> Any:
    if shuffle is None:
        return "shuffle" if order is None else order
    named = "shuffle" if shuffle else "sequential"
    if order is not None and not (isinstance(order, str) and order == named):
        raise ConfigError(f"`shuffle={str(shuffle).lower()}` means `order={named}`, and `order` is {order!r}. Set one.")
    return named


def _one_of(name: str, value: Any, known: dict[str, Any]) -> Any:
    if isinstance(value, str):
        value = known.get(value.removeprefix("torch."), value)
    if not any(value is one for one in known.values()):
        raise ConfigError(f"`{name}` must be one of {', '.join(known)}. Found: {value!r}.")
    return value


def _device(device: str | torch.device) -> torch.device:
    if not isinstance(device, str | torch.device):
        raise ConfigError(f"`device` must be auto, cpu, cuda or cuda:N. Found: {device!r:.200}.")
    if device == "auto":
        if not torch.cuda.is_available():
            log.info("device cpu: no CUDA device")
            return torch.device("cpu")
        device = "cuda"
        log.info("device cuda:%d", distributed.cuda_device())
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"`device` must be auto, cpu, cuda or cuda:N. Found: {device!r}.") from error
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                f"`device` is {device!r}, and torch finds no CUDA device. Set `device=auto` or `device=cpu`."
            )
        if chosen.index is None:
            chosen = torch.device("cuda", distributed.cuda_device())
    elif chosen.type != "cpu":
        raise ConfigError(f"`device` must be a cpu or cuda device. Found: {device!r}.")
    return chosen


def _workers(source: Any) -> int:
    if getattr(source, "mapped", False):
        log.info("num_workers 0: the source is mapped into memory, and workers would only copy it once more")
        return 0
    cores = machine.usable_cpus()
    # workers only read bytes: one keeps several decoding threads busy
    workers = max(1, min(4, cores // (2 * distributed.local_world_size())))
    log.info("num_workers %d (CPUs: %d, ranks on this machine: %d)", workers, cores, distributed.local_world_size())
    return workers
