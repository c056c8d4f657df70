"""The loader: the order of epochs over a pipeline, which can be stopped and resumed anywhere."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Literal, get_args

import torch

from gpuaug import checks, machine
from gpuaug import source as sources
from gpuaug.augment.mix import Mix
from gpuaug.augment.recipe import Augment, MultiView
from gpuaug.batch import Batch
from gpuaug.decode.decoder import Decode
from gpuaug.errors import ConfigError, GpuaugError, ReadOnlyError, StateError
from gpuaug.files import parse_bytes
from gpuaug.loader import arguments, distributed
from gpuaug.loader.faults import Faults
from gpuaug.loader.pipeline import Pass, PassEndedError, Pipeline, Resources, Streams
from gpuaug.loader.stages import LiveStage, Stage, StoredStage, stored_order
from gpuaug.loader.state import State, compare, plain
from gpuaug.random import keyed as draw
from gpuaug.read import order as orders
from gpuaug.read.order import EpochOrder, Last
from gpuaug.read.reader import Reader
from gpuaug.source.cache import CachedSource, RamCache
from gpuaug.source.materialized import Rows

log = logging.getLogger("gpuaug")


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
        pipeline: the reader, the stages and their streams, as a :class:`~gpuaug.loader.pipeline.Pipeline`.
        waited: seconds that the consumer waited for batches in the current pass.

    Iterating gives every :class:`~gpuaug.Batch` of an epoch, and the next pass is the next epoch, also where a pass was
    left early (``break``). To go on inside an epoch use ``load_state_dict`` or ``start_at``, to repeat one
    ``set_epoch``. After an error of the loader itself the next pass goes on with the next sample.

    Settings are fixed: :meth:`replace` makes a loader with others.

    >>> import io
    >>> from PIL import Image
    >>> from gpuaug import RandomResizedCrop
    >>> Image.new("RGB", (20, 10)).save(png := io.BytesIO(), "png")
    >>> recipe = Augment(crop=RandomResizedCrop(8))
    >>> with Loader([(png.getvalue(), 3)], augment=recipe, num_workers=0, device="cpu") as loader:
    ...     for images, labels in loader:
    ...         print(tuple(images.shape), labels)
    (1, 3, 8, 8) tensor([3])

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
        distributed.rank_and_world(rank, world_size)
        last = arguments.choose_last(last, drop_last)
        self.augment: Augment | MultiView = checks.instance("augment", augment, Augment, MultiView)
        self.seed: int = checks.whole_number("seed", seed, None)
        self.source = sources.adapt(source)
        self.batch_size: int = checks.whole_number("batch_size", batch_size, 1)
        self.order = orders.adapt(arguments.choose_order(order, shuffle))
        self._last = None if last is None else checks.one_of("last", last, get_args(Last))
        self.mix: Mix | None = checks.instance("mix", mix, Mix, optional=True)
        self.decode: Decode = checks.instance("decode", decode, Decode, optional=True) or Decode()
        self.faults: Faults = checks.instance("faults", faults, Faults, optional=True) or Faults()
        # an open cache comes from `replace`
        checks.instance("cache", getattr(cache, "settings", cache), RamCache, optional=True)
        self.device = machine.choose_device(device)
        self.dtype: torch.dtype = arguments.torch_constant("dtype", dtype, arguments.DTYPES)
        self.memory_format: torch.memory_format = arguments.torch_constant(
            "memory_format", memory_format, arguments.MEMORY_FORMATS
        )
        if num_workers is None:
            num_workers = arguments.default_workers(self.source)
        self.num_workers: int = checks.whole_number("num_workers", num_workers, 0)
        self.prefetch: int = checks.whole_number("prefetch", prefetch, 0)
        self.ahead = None if ahead is None else parse_bytes(ahead, key="ahead")
        self.limit_batches: int | None = checks.whole_number("limit_batches", limit_batches, 1, optional=True)
        self.waited = 0.0
        self._rank, self._world_size = rank, world_size
        self._epoch, self._position = 0, 0
        # The next pass begins here; or in the next epoch, if the last pass was left or handed out its last batch.
        self._next_pass: Literal["here", "left", "finished"] = "here"
        self._stored: Rows | None = None
        self._last_logged = False
        self._cached_order: tuple[int, orders.Ordered] | None = None
        self._fingerprint: dict[str, Any] | None = None
        self.pipeline = self._build(cache, timeout=timeout, start_method=start_method)
        self._resources = Resources(self.pipeline)
        weakref.finalize(self, self._resources.close)
        self.augment.to(self.device)

    def _build(self, cache: Any, *, timeout: float, start_method: str | None) -> Pipeline:
        """The reader and the stages."""
        encoded: Any = self.source
        rows: Any = getattr(self.source, "by_epoch", None)  # of a source that is read differently from epoch to epoch
        stage: Stage
        if (stored := getattr(self.source, "stored", None)) is not None:  # epochs that are augmented already
            rows = self._stored = stored.rows
            stage = StoredStage(
                rows, self.augment, source=stored.digest(), seed=self.seed, device=self.device, dtype=self.dtype
            )
            encoded = rows
            if cache is not None:
                log.info("cache ram is not used: stored epochs are mapped into memory as they are")
        else:
            stage = LiveStage(
                self.augment,
                self.decode,
                device=self.device,
                seed=self.seed,
                accept_truncated=self.faults.truncated == "accept",
                batch_size=self.batch_size,
            )
            encoded = encoded if rows is None else rows
            if cache is not None:  # what an open one holds is not read again
                encoded = cache if isinstance(cache, CachedSource) else cache.open(sources.adapt(encoded))
        return Pipeline(
            reader=Reader(encoded, num_workers=self.num_workers, timeout=timeout, start_method=start_method),
            stage=stage,
            mix=self.mix,
            faults=self.faults,
            device=self.device,
            streams=Streams(self.device),
            dtype=self.dtype,
            memory_format=self.memory_format,
            seed=self.seed,
            num_classes=self.num_classes,
            key_of=self.source.key,
            numbers=None if rows is None else rows.numbers,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if "_resources" in vars(self) and (name == "source" or name in self._given):
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
        self._resources.check_open()
        if "source" in changes:
            raise ConfigError("`replace` keeps the source. Build a new loader for another one.")
        given = {**self._given, "device": self.device, "num_workers": self.num_workers}
        for pair in (("order", "shuffle"), ("last", "drop_last")):  # two names of one setting: what is set anew counts
            if changes.keys() & pair:
                given = {name: value for name, value in given.items() if name not in pair}
        if (cache := self.pipeline.cache) is not None:
            given["cache"] = cache
        made = type(self)(self.source, **{**given, **changes})
        closed = made
        try:
            self._resources.stop()
            self._begin()
            if self._position:
                made.load_state_dict(self.state_dict())
            else:
                made.set_epoch(self._epoch)
            closed = self
        finally:
            closed._resources.close(keep_cache=made.pipeline.cache is cache)  # then it is the other one's
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
        running = self._resources.running()
        return 0 if running is None else running.bytes_waiting

    @property
    def prefetch_level(self) -> int:
        """Batches that are made and wait now, of the ``prefetch`` that were asked for."""
        running = self._resources.running()
        return 0 if running is None else running.waiting

    @property
    def epoch_order(self) -> EpochOrder:
        """This rank's batches of the whole present epoch: ``(indices, repeats, valid)`` of each."""
        return self._plan(0)

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank, under the present settings."""
        return self._count(self._plan(0))

    def __iter__(self) -> Iterator[Batch]:
        """Go through an epoch; an iterator that was left unfinished ends.

        Raises:
            ConfigError: if the ranks of torch.distributed disagree about what the epoch is.
        """
        self._resources.check_open()
        self.augment.check_unchanged()
        self._resources.stop()
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
        self._log_last(plan)
        cache, numbers = self.pipeline.cache, self.pipeline.numbers
        if cache is not None and cache.settings.fill == "ahead":
            of_task = (lambda indices, *_: indices) if numbers is None else numbers(self._epoch)
            shown = [of_task(*task) for task in islice(iter(self.epoch_order), len(self))]
            cache.fill(self.pipeline.reader, torch.cat(shown) if shown else torch.zeros(0, dtype=torch.int64))
        return _Epoch(self, plan, self._count(plan))

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of ``epoch``, 0 or larger; naming one that a state was loaded of keeps its position."""
        _check_epoch(epoch)
        if self._next_pass == "finished":
            self._advance()
        if epoch != self._epoch:
            self._resources.stop()
        if epoch != self._epoch or self._next_pass == "left":
            self._epoch, self._position, self._next_pass = epoch, 0, "here"

    def start_at(self, epoch: int, position: int) -> None:
        """Let the next pass begin inside ``epoch``, after ``position`` samples of its order (of all ranks together)."""
        checks.whole_number("position", position, 0, len(self._ordered(_check_epoch(epoch))))
        self._resources.stop()
        self._epoch, self._position, self._next_pass = epoch, position, "here"

    def state_dict(self) -> dict[str, Any]:
        """Where the consumer is, as small JSON: the next sample after the last batch that was handed out."""
        epoch, position = (self._epoch + 1, 0) if self._next_pass == "finished" else (self._epoch, self._position)
        state = State(epoch=epoch, position=position, fingerprint=self.fingerprint())
        if position:
            ordered = self._ordered()
            state = replace(state, after=int(ordered.indices[position - 1]), order=ordered.digest)
        return state.to_json()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken, with any number of workers and ranks and any batch size.

        Samples that were excluded since, or a smaller or larger subset, move no other sample; where that is not so
        (weights, samplers, repeats) another set of samples is refused inside an epoch.

        Raises:
            StateError: if it is no state, or one taken inside an epoch of another source, seed, order or recipe; the
                loader is then as it was.
        """
        loaded = State.from_json(state)
        if different := compare(loaded.fingerprint, self.fingerprint(), "in the state", "here"):
            if loaded.position:
                raise StateError(
                    f"this state was taken inside epoch {loaded.epoch} of another configuration. {different}. "
                    "Restore the configuration to finish the epoch, or start the next one with "
                    f"`set_epoch({loaded.epoch + 1})`."
                )
            log.warning("state of another configuration accepted at the start of epoch %d: %s", loaded.epoch, different)
        self.start_at(loaded.epoch, self._locate(loaded) if loaded.position else 0)

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
        self._resources.check_open()
        self.augment.check_unchanged()
        epoch = self._epoch if epoch is None else _check_epoch(epoch)
        number = arguments.whole_numbers("indices", indices)
        repeat = torch.zeros_like(number) if repeats is None else arguments.whole_numbers("repeats", repeats)
        if not len(number) or len(repeat) != len(number):
            raise ConfigError(
                f"`indices` must name samples, and `repeats` as many. Found: {len(number)}, {len(repeat)}."
            )
        try:
            for index in number.tolist():
                self.source.key(index)
        except IndexError as error:
            raise ConfigError(
                f"`indices` must be numbers of samples of the source. Found: {index} ({error})."
            ) from error
        task = number, repeat, torch.ones(len(number), dtype=torch.bool, device="cpu")
        pipeline = self.pipeline
        alone = replace(pipeline, reader=Reader(pipeline.reader.source, num_workers=0))
        encoded = next(iter(alone.read([task], epoch)))
        ready = pipeline.finish(pipeline.decode(encoded, epoch), epoch, mix=mix)
        if ready is None:
            raise GpuaugError(f"none of the samples {list(indices)} could be decoded, and `faults.policy` is drop.")
        return pipeline.hand_over(ready)

    def close(self) -> None:
        """End workers, background thread and decoder; a closed loader stays closed."""
        self._resources.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _advance(self) -> None:
        """Go to the beginning of the next epoch."""
        self._epoch, self._position, self._next_pass = self._epoch + 1, 0, "here"

    def _begin(self) -> None:
        """Go to where the next pass begins."""
        if self._next_pass == "left":
            left = self._count(self._plan(self._position))
            log.info("epoch %d was left %d batches before its end: epoch %d begins", self._epoch, left, self._epoch + 1)
        if self._next_pass != "here":
            self._advance()

    def _ordered(self, epoch: int | None = None) -> orders.Ordered:
        epoch = self._epoch if epoch is None else epoch
        if self._cached_order is None or self._cached_order[0] != epoch:
            if self._stored is None:
                indices = self.order.order(self.seed, epoch, self.source)
            else:
                indices = stored_order(self.order, self._stored, self.seed, epoch, self.source)
            self._cached_order = epoch, orders.Ordered(indices)
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
        at = int(position(self.seed, state.epoch, ordered.indices, state.after))
        log.warning(
            "other samples are active than in the state: epoch %d goes on after sample %d, at %d of %d",
            state.epoch, state.after, at, len(ordered),
        )  # fmt: skip
        return at

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

    def _log_last(self, plan: EpochOrder) -> None:
        """Log once, on rank 0, what `last` does where the samples do not fill a batch on every rank."""
        if self._last_logged or plan.rank or plan.world_size == 1:
            return
        most, least = (self._count(replace(plan, rank=rank)) for rank in (0, plan.world_size - 1))
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
        self._last_logged = True

    def _count(self, plan: EpochOrder) -> int:
        """Batches of a plan, of which ``limit_batches`` may leave some out."""
        if self.limit_batches is None:
            return len(plan)
        behind = -(-plan.start // (plan.batch_size * plan.world_size))
        return max(0, min(len(plan), self.limit_batches - behind))


def _check_epoch(epoch: Any) -> int:
    return int(checks.whole_number("epoch", epoch, 0, draw.EPOCHS - 1))


class _Epoch(Pass):
    """One way through an epoch of a loader; whatever is handed out counts as consumed."""

    def __init__(self, loader: Loader, plan: EpochOrder, count: int) -> None:
        self._loader, self._plan, self._count = loader, plan, count
        tasks, epoch = islice(iter(plan), count), loader.epoch
        super().__init__(loader.pipeline, tasks, epoch=epoch, prefetch=loader.prefetch, buffer_bytes=loader.ahead)
        loader.waited = 0.0
        loader._resources.running = weakref.ref(self)  # before it reads: another thread may end it then
        self.start()

    def __next__(self) -> Batch:
        loader = self._loader
        if self.done < self._count:
            try:
                batch = super().__next__()
            except StopIteration:
                batch = None
            except PassEndedError:  # the loader may be in another pass by now
                raise
            except BaseException as error:
                self._note()
                if isinstance(error, Exception) and loader._next_pass == "left":  # not by the consumer
                    loader._next_pass = "here"
                raise
            self._note()
            if batch is not None:
                return batch
            if self.done < self._count:
                raise GpuaugError(f"reading ended after {self.done} of {self._count} batches.")
        if loader._resources.running() is self:
            loader._resources.stop()
            loader.faults.end_of_epoch(loader._epoch, *loader.pipeline.stage.second_chances)
            loader._advance()
        raise StopIteration

    def _note(self) -> None:
        """Note in the loader how far the pass is."""
        loader = self._loader
        loader.waited = self.waited
        if self.done:
            loader._position = self._plan.position(self.done)
            loader._next_pass = "finished" if self.done == self._count else "left"
            if (cache := loader.pipeline.cache) is not None:
                cache.warn_if_full()
