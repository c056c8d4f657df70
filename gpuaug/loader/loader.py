"""The loader."""

from __future__ import annotations

import logging
import math
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

import torch
from torch import Tensor

from gpuaug import checks, machine
from gpuaug import source as sources
from gpuaug.augment.mix import Mix
from gpuaug.augment.multi_view import MultiView
from gpuaug.augment.progressive import Progressive, Recipe, views_of
from gpuaug.augment.recipe import Augment
from gpuaug.decode.decoder import Decode
from gpuaug.display.annotations import Style
from gpuaug.display.batches import Appearance
from gpuaug.display.sheet import table
from gpuaug.errors import ConfigError, GpuaugError, ReadOnlyError, StateError
from gpuaug.loader import arguments, augmented, describe, distributed
from gpuaug.loader.batch import Batch
from gpuaug.loader.faults import Faults
from gpuaug.loader.partners import Partners
from gpuaug.loader.passes import Pass, PassEndedError
from gpuaug.loader.pipeline import LazyDecoders, Pipeline, Streams
from gpuaug.loader.self_check import SelfCheck
from gpuaug.loader.state import VERSION, Row, check_rows, check_state, compare, locate, plain
from gpuaug.random import keyed as draw
from gpuaug.read import order as orders
from gpuaug.read.ends import finalize
from gpuaug.read.order import EpochOrder, Last, Step, Task
from gpuaug.read.reader import Reader
from gpuaug.read.tokens import Tokens
from gpuaug.source.base import checksum

if TYPE_CHECKING:  # runs without targets or patch masks do not import them
    from gpuaug.augment.mix_targets import TargetMix
    from gpuaug.augment.patch_masks import BlockMasks, MultiBlockMasks, RandomMasks
    from gpuaug.targets.rules import Targets

log = logging.getLogger("gpuaug")


class Loader:
    """Yields augmented batches of a source on the device. A run can resume after any batch of an epoch.

    Args:
        source: a :class:`~gpuaug.FolderSource`, or any map-style object that yields ``(bytes, label)`` or
            ``(bytes, label, extra)``.
        augment: :class:`~gpuaug.Augment`, :class:`~gpuaug.MultiView` or :class:`~gpuaug.Progressive`.
        batch_size: samples per batch and rank; or a :class:`~gpuaug.Tokens`, for sequences of patches.
        order: ``"shuffle"`` (the default), ``"sequential"``, an order such as :class:`~gpuaug.Weighted`, a list or
            array of positions, or an object with the method ``order(seed, epoch, source)``.
        shuffle: True means ``order="shuffle"``, False means ``order="sequential"``. ``shuffle`` replaces an ``order``
            that is a :class:`~gpuaug.Shuffle` or :class:`~gpuaug.Sequential`.
        last: what to do with samples that do not fill a batch on every rank. ``pad`` adds repeated samples, whose
            ``valid`` is False, until all ranks have equally many full batches. ``drop`` leaves samples out. ``uneven``
            yields every sample once. Then a rank may have one batch less than another rank, and DDP hangs. None:
            ``pad`` with several ranks, ``uneven`` with one rank.
        drop_last: True means ``last="drop"``.
        targets: a :class:`~gpuaug.Targets`, which selects the masks, boxes and keypoints that are transformed with the
            images; None: the loader yields only images and labels.
        mix: a :class:`Mix` of images and labels; with targets, one of :class:`MixObjects`, :class:`CutMixMasks`,
            :class:`ClassMix` and :class:`CopyPaste`; or None.
        patch_masks: a :class:`~gpuaug.BlockMasks`, :class:`~gpuaug.MultiBlockMasks` or :class:`~gpuaug.RandomMasks`,
            which draws ``batch.patch_masks``; None: no masks.
        decode: settings of the decoder.
        faults: a :class:`~gpuaug.Faults`, which decides what happens to samples that cannot be read or decoded.
        device: ``auto``, ``cuda``, ``cpu`` or a torch.device. ``auto`` means CUDA if there is a CUDA device, else the
            CPU. ``cuda`` means ``cuda:$LOCAL_RANK``, or torch's current device if LOCAL_RANK is not set. On CUDA the
            loader allocates memory and launches kernels in background threads. So capture your own CUDA graphs before
            the iteration starts, or with ``capture_error_mode="thread_local"``.
        dtype: float32, bfloat16 or float16.
        memory_format: contiguous_format or channels_last.
        num_workers: number of processes that read bytes. 0: this process reads. None: 0 for memory-mapped sources, else
            half of this rank's share of the cores, limited to 1..4, or to 2..4 for URLs.
        read_threads: maximum number of reads at a time in each of these processes. Threads are used only if the source
            is ``thread_safe`` (see :class:`gpuaug.source.base.Source`), from a read on that waits for its storage.
        prefetch: number of finished batches that may wait while the next batch is made; 0: each batch is made when it
            is requested.
        timeout: seconds to wait for one batch of bytes; then :class:`~gpuaug.ReadError` is raised.
        start_method: how workers start: fork, forkserver or spawn; None: Python's default.
        seed: together with the epoch, decides the order and all random parameters.
        rank, world_size: rank of this process and number of ranks; None: torch.distributed's values.
        limit_batches: maximum number of batches per epoch.
        name: stands at the beginning of the loader's log lines, such as ``train``; None: nothing does.
        self_check: on CUDA, compare eight images of the first batch with Kornia's, and eight decoded JPEGs with
            Pillow's. If they differ, the loader logs an error and uses ``augment.backend=kornia`` or
            ``decode.backend=pillow``. The result is stored: on this machine, the same recipe is not checked again.

    Attributes:
        source: the given source, or a wrapper of the given dataset.
        device: the torch.device that the argument selects.
        pipeline: the :class:`~gpuaug.loader.pipeline.Pipeline` that makes the batches.
        waited: seconds that the consumer waited for batches in the current pass.

    A pass is one iteration over the loader. A pass yields the :class:`~gpuaug.Batch` objects of one epoch. The next
    pass runs the next epoch, even after a ``break``. To continue inside an epoch, use ``load_state_dict`` or
    ``start_at``. To repeat an epoch, use ``set_epoch``. If the loader itself raises an error, the next pass continues
    after the last batch that was handed out.

    Settings cannot be changed. For other settings, build a new loader, and give it this loader's ``state_dict()``.

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
        DataError, FaultBudgetError: while iterating, depending on ``faults``.
        ReadError: while iterating, if a worker died or took longer than ``timeout``.
        ConfigError: when iteration starts, if ranks differ in seed, source or recipe.
    """

    waited = 0.0
    _epoch = _position = 0
    # Where the next pass begins. "here": at `_epoch` and `_position`. "left" and "finished": in the next epoch, because
    # the last pass stopped inside `_epoch`, or handed out the last batch of `_epoch`.
    _next_pass: Literal["here", "left", "finished"] = "here"
    _last_logged = _left_logged = False
    _step = 0  # number of batches that this rank got, also in earlier runs
    _cached_order: tuple[int, orders.Ordered] | None = None  # an epoch and its order

    def __init__(
        self,
        source: Any,
        *,
        augment: Recipe,
        batch_size: int | Tokens = 64,
        order: Any = None,
        shuffle: bool | None = None,
        last: str | None = None,
        drop_last: bool = False,
        targets: Targets | None = None,
        mix: Mix | TargetMix | None = None,
        patch_masks: BlockMasks | MultiBlockMasks | RandomMasks | None = None,
        decode: Decode | None = None,
        faults: Faults | None = None,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = torch.float32,
        memory_format: str | torch.memory_format = torch.contiguous_format,
        num_workers: int | None = None,
        read_threads: int = 16,
        prefetch: int = 2,
        timeout: float = 120.0,
        start_method: str | None = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        limit_batches: int | None = None,
        name: str | None = None,
        self_check: bool = True,
    ) -> None:
        self._settings = frozenset(locals()) - {"self"}
        self._passes: list[Row] = []  # what leads from a step to its samples
        self.name: str | None = checks.text("name", name, optional=True)
        self._log = arguments.NamedLog(log, {"name": name})
        distributed.rank_and_world(rank, world_size)
        last = arguments.choose_last(last, drop_last)
        mix = None if isinstance(mix, Mapping) and not mix else mix  # `mix=none` gives an empty mapping
        targets = None if isinstance(targets, Mapping) and not targets else targets
        patch_masks = None if isinstance(patch_masks, Mapping) and not patch_masks else patch_masks
        self.augment: Recipe = checks.instance("augment", augment, Augment, MultiView, Progressive)
        self.seed: int = checks.whole_number("seed", seed, None)
        self.source = sources.adapt(source)
        self.tokens: Tokens | None = batch_size if isinstance(batch_size, Tokens) else None
        most = batch_size if self.tokens is None else self.tokens.most
        self.batch_size: int = checks.whole_number("batch_size", most, 1)
        self.order = orders.adapt(arguments.choose_order(order, shuffle))
        self._last = None if last is None else checks.one_of("last", last, get_args(Last))
        self.mix: Mix | TargetMix | None = arguments.check_mix(mix, self.augment, targets)
        self.targets = arguments.check_targets(targets, self.source, self.augment, self.mix)
        self.decode: Decode = checks.instance("decode", decode, Decode, optional=True) or Decode()
        arguments.check_recipe(self.augment, self.decode.channels or 3, raw=self.decode.pixels == "raw")
        arguments.check_tokens(self.tokens, self.augment, {"mix": mix, "patch_masks": patch_masks})
        self.patch_masks = patch_masks
        self.faults: Faults = checks.instance("faults", faults, Faults, optional=True) or Faults()
        self.device = machine.choose_device(device)
        self.dtype: torch.dtype = checks.torch_constant("dtype", dtype)
        self.memory_format: torch.memory_format = checks.torch_constant("memory_format", memory_format)
        self.num_workers = arguments.choose_workers(num_workers, self.source, self._log)
        self.prefetch: int = checks.whole_number("prefetch", prefetch, 0)
        self.limit_batches: int | None = checks.whole_number("limit_batches", limit_batches, 1, optional=True)
        self._rank, self._world_size = rank, world_size
        self.self_check: bool = checks.flag("self_check", self_check)
        self.pipeline = self._build(
            num_workers=self.num_workers, timeout=timeout, start_method=start_method, read_threads=read_threads
        )
        finalize(self, self.pipeline.close)
        self.augment.to(self.device)

    def _build(self, **reading: Any) -> Pipeline:
        accepted = self.faults.truncated == "accept"
        opened = partial(self.decode.open, self.device, accept_truncated=accepted, batch_size=self.batch_size)
        targets = None
        if self.targets is not None:
            from gpuaug.augment.target_mover import TargetMover

            targets = TargetMover(self.targets, self.augment, source=self.source)
        on_cuda = self.device.type == "cuda"
        recipe, style = self.augment, Style.of(self.source, self.targets)  # the pipeline must not refer to the loader
        remaining = augmented.remaining(self.augment, self.source, self.seed)
        two = on_cuda and self.prefetch and self.decode.pixels != "raw" and not remaining.main_thread
        return Pipeline(
            reader=Reader(self.source, targets=getattr(self.targets, "names", ()), **reading),
            decoders=LazyDecoders(opened, 2 if two else 1),
            recipe=remaining,
            targets=targets,
            mix=partial(self.mix, num_classes=self.num_classes, seed=self.seed) if isinstance(self.mix, Mix) else None,
            mix_targets=None
            if self.mix is None or isinstance(self.mix, Mix)
            else partial(self.mix.mixing, seed=self.seed),
            patch_masks=arguments.check_patch_masks(self.patch_masks, recipe, self.seed),
            faults=self.faults,
            device=self.device,
            streams=Streams(self.device),
            seed=self.seed,
            dtype=self.dtype,
            memory_format=self.memory_format,
            key_of=self.source.key,
            appearance_at=lru_cache(maxsize=1)(lambda epoch: Appearance.of(recipe.at(epoch).views, style)),
            first_row=self.source.first_row,
            self_check=SelfCheck(self.source.key, self._log) if self.self_check and on_cuda else None,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if "pipeline" in vars(self) and name in self._settings:
            raise ReadOnlyError(
                f"`{name}` of a loader cannot be set: the running workers and stages would not see the new value. "
                "Build a new loader, and give it the position of this one: `new.load_state_dict(old.state_dict())`."
            )
        super().__setattr__(name, value)

    @property
    def epoch(self) -> int:
        """The current epoch. It grows by 1 when a pass is complete; after a ``break``, when the next pass begins."""
        return self._epoch

    @property
    def last(self) -> Last:
        """The setting ``last``, or its default."""
        return self._last or ("pad" if distributed.rank_and_world(self._rank, self._world_size)[1] > 1 else "uneven")

    @property
    def num_classes(self) -> int | None:
        """Number of classes of the source; None if the source has no classes."""
        return self.source.num_classes

    @property
    def prefetch_level(self) -> int:
        """Number of finished batches that wait for the consumer."""
        running = self.pipeline.newest_pass()
        return 0 if running is None else running.waiting

    @property
    def epoch_order(self) -> EpochOrder:
        """``(indices, repeats, valid)`` of each batch of this rank in the current epoch. Ignores ``limit_batches``."""
        return replace(self._tasks_from(0), limit=None)

    def __len__(self) -> int:
        """Number of batches of an epoch on this rank, at most ``limit_batches``."""
        return len(self._tasks_from(0))

    def __iter__(self) -> Iterator[Batch]:
        """Start a pass over an epoch. An earlier unfinished iterator of this loader is stopped.

        Raises:
            ConfigError: if the ranks of torch.distributed have different settings, sources or positions.
        """
        self.pipeline.check_open()
        self.augment.check_unchanged()
        self.pipeline.stop()
        self._begin()
        tasks = self._tasks_from(self._position)
        if self._rank is None:
            shared = {
                "epoch": self._epoch,
                "position": self._position,
                "samples": len(self._ordered()),
                "order of the epoch": self._ordered().digest,
                "batch_size": self.batch_size,
                "tokens": self.tokens and self.tokens.row,
                "last": self.last,
                "limit_batches": self.limit_batches,
                "faults.policy": self.faults.policy,
            }
            distributed.agree({**self.fingerprint(), **shared}, device=self.device)
        self._log_last(tasks)
        row = self._row()
        self._passes = [each for each in self._passes if each.step < row.step or each.leads_to(row, seed=self.seed)]
        if not self._passes or not self._passes[-1].leads_to(row, seed=self.seed):
            self._passes.append(row)
        return _Epoch(self, tasks)

    def _row(self) -> Row:
        """What the pass that begins here adds to ``_passes``."""
        world_size = distributed.rank_and_world(self._rank, self._world_size)[1]
        place = self._step, self._epoch, self._position, len(self._ordered())
        size = self.batch_size if self.tokens is None else self.tokens.row
        return Row(*place, size, world_size, self.last, self.limit_batches)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of ``epoch``. If a state of this epoch was just loaded, the loaded position stays."""
        _check_epoch(epoch)
        if self._next_pass == "finished":
            self._finish()
        if epoch != self._epoch:
            self.pipeline.stop()
        if epoch != self._epoch or self._next_pass == "left":
            self._epoch, self._position, self._next_pass = epoch, 0, "here"

    def _finish(self) -> None:
        """End a pass whose batches were all handed out. Without `stop`, its iterator would come here again."""
        self.pipeline.stop()
        self.faults.end_of_epoch(self._epoch, log=self._log)
        self._advance()

    def start_at(self, epoch: int, position: int) -> None:
        """Let the next pass begin in ``epoch``, after the first ``position`` samples of all ranks together."""
        checks.whole_number("position", position, 0, len(self._ordered(_check_epoch(epoch))))
        self.pipeline.stop()
        self._epoch, self._position, self._next_pass = epoch, position, "here"

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was handed out, as a dictionary of JSON values."""
        # with `last=uneven`, rank 0 may have one more batch than this rank
        finished = self._next_pass == "finished" and not len(replace(self._tasks_from(self._position), rank=0))
        epoch, position = (self._epoch + 1, 0) if finished else (self._epoch, self._position)
        state = {
            "version": VERSION,
            "draw": draw.VERSION,
            "epoch": epoch,
            "position": position,  # number of samples of the epoch that all ranks together have consumed
            "after": int(self._ordered().indices[position - 1]) if position else None,  # the sample consumed last
            "order": self._ordered().digest if position else None,
            "step": self._step,
            "passes": [list(row) for row in self._passes],
            "fingerprint": plain(self.fingerprint()),  # a copy, which the caller may change
        }
        return {**state, "checksum": checksum(state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken, with any number of workers and ranks and any batch size.

        With the orders Shuffle and Sequential, the subset and the excluded samples may differ from those of the state.

        Raises:
            StateError: if ``state`` is not a state, or was taken inside an epoch of another source, seed, order or
                recipe. The loader stays unchanged.
        """
        check_state(state)
        epoch, position = state["epoch"], state["position"]
        if different := compare(state["fingerprint"], self.fingerprint(), "in the state", "here"):
            if position:
                raise StateError(
                    f"this state was taken inside epoch {epoch} of another configuration. {different}. Restore the "
                    f"configuration to finish the epoch, or start the next epoch with `set_epoch({epoch + 1})`."
                )
            self._log.warning("epoch %d starts from a state of another configuration: %s", epoch, different)
        at = locate(state, self._ordered(epoch), self.order, self.seed) if position else 0
        self.start_at(epoch, at)
        self._step, self._passes = state.get("step", 0), check_rows(state.get("passes", []))

    def fingerprint(self) -> dict[str, Any]:
        """Everything that decides the content of an epoch, as JSON values."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> dict[str, Any]:
        made = {
            "source": self.source.digest(),
            "seed": self.seed,
            "order": orders.describe(self.order),
            "augment": self.augment.fingerprint(),
            "mix": None if self.mix is None else repr(self.mix),
            **({} if self.patch_masks is None else {"patch_masks": repr(self.patch_masks)}),
            **({"decode": {"reduced": True}} if self.decode.reduced else {}),
            **(
                {"decode": {k: getattr(self.decode, k) for k in ("pixels", "channels", "white")}}
                if self.decode.pixels == "raw"
                else {}
            ),
        }
        if self.targets is not None:
            digest = self.source.objects_digest
            # Only a crop can make images depend on the source's boxes, masks and keypoints.
            reads = any(getattr(view.augment.crop, "needs", ()) for _, view in views_of(self.augment))
            objects = digest() if reads and callable(digest) else None
            made["targets"] = {"rules": repr(self.targets), "objects": objects}
        return dict(plain(made))

    def fetch(
        self, indices: Sequence[int], *, epoch: int | None = None, mix: bool = False, faults: Faults | None = None
    ) -> Batch:
        """Make one batch of chosen samples, with the same stages and the same pixels as in an epoch.

        Args:
            indices: sample numbers in the source.
            epoch: the epoch whose random parameters are used; None: the current epoch.
            mix: whether to mix the batch.
            faults: decides what happens to bad samples of this batch; None: the loader's.

        If the order repeats samples, this is the first occurrence of each sample.

        Raises:
            DataError, FaultBudgetError: depending on ``faults``.
            GpuaugError: if policy ``drop`` removes all samples.
        """
        self.pipeline.check_open()
        self.augment.check_unchanged()
        epoch = self._epoch if epoch is None else _check_epoch(epoch)
        faults = checks.instance("faults", faults, Faults, optional=True) or self.faults
        numbers = arguments.whole_numbers("indices", indices)
        if not len(numbers):
            raise ConfigError("`indices` must not be empty.")
        try:
            for index in numbers.tolist():
                self.source.key(index)
                # a packed source also has keys for its rows of other sizes
                if index >= (self.source.sample_count or math.inf):
                    raise IndexError("it has fewer samples")
        except IndexError as error:
            raise ConfigError(f"`indices` must be sample numbers of the source. Found: {index} ({error}).") from error
        task: Task = numbers, torch.zeros_like(numbers), torch.ones(len(numbers), dtype=torch.bool, device="cpu")
        if (partners := self._partners(epoch)) is not None:
            task = partners.task(task)
        batch = self._make(task, epoch, mix=mix, faults=faults)
        if batch is None:
            raise GpuaugError(f"none of the samples {list(indices)} could be decoded, and `faults.policy` is drop.")
        return batch

    def _make(self, task: Task, epoch: int, *, mix: bool, faults: Faults, step: Step | None = None) -> Batch | None:
        """Make one batch in this process; None if policy ``drop`` removes all samples."""
        reader = Reader(self.source, targets=self.pipeline.reader.targets)
        pipeline = replace(self.pipeline, reader=reader, faults=faults)
        if not mix:
            pipeline = replace(pipeline, mix=None, mix_targets=None)
        (encoded,) = pipeline.read([task], epoch)
        pipeline.streams.follow_consumer()
        ready = pipeline.finish(pipeline.decode(pipeline.read_headers(encoded, epoch, step)), epoch)
        return None if ready is None else pipeline.hand_over(ready)

    def _partners(self, epoch: int) -> Partners | None:
        """Chooses the other tiles of an epoch's samples; None if the recipe has no `combine`."""
        recipe = self.augment.at(epoch)
        if not recipe.combine:
            return None
        crop = recipe.views[0].augment.crop.size
        return Partners(combine=recipe.combine, crop=crop, ordered=self._ordered(epoch), seed=self.seed, epoch=epoch)

    def tasks(self, order: orders.EpochOrder) -> Iterator[Task]:
        """What a pass over ``order``, of the current epoch, has to read."""
        partners = self._partners(self._epoch)
        return iter(order) if partners is None else partners.tasks(order)

    def replay(self, step: int) -> list[Batch]:
        """The batches of a step of this run, one for each rank of the run, with the pixels that training saw.

        The run may have used other numbers of ranks, workers and samples per batch, and may have been resumed: load its
        state first. The position of this loader does not change, and no worker starts. With decoding on the same kind
        of device, the pixels are equal bit for bit.

        Args:
            step: number of the step, from 0: how many batches each rank had got before, in all runs that led to the
                state. A step after the state is one of the future, with the settings of the last pass.

        A rank is missing if it has no batch in this step, or if policy ``drop`` removed all its samples. Bad samples
        do not count towards ``faults.max``.

        Raises:
            ConfigError: no batch has this number.
            StateError: an epoch of the run had another number of samples.
            DataError: depending on ``faults``.
        """
        return list(self.by_rank(step).values())

    def by_rank(self, step: int) -> dict[int, Batch]:
        """Like :meth:`replay`, but by rank.

        Args:
            step: number of the step.

        Raises:
            ConfigError, StateError, DataError: as :meth:`replay`.
        """
        checks.whole_number("step", step, 0)
        self.pipeline.check_open()
        self.augment.check_unchanged()
        rows = [row for row in self._passes or [self._row()] if row.step <= step]
        if not rows:
            raise ConfigError(f"`step` must be {self._passes[0].step} or more, where this run began. Found: {step}.")
        epoch, start, number = rows[-1].place(step, seed=self.seed)
        ordered, batches = self._ordered(_check_epoch(epoch)), dict[int, Batch]()
        if rows[-1].samples != len(ordered):
            raise StateError(
                f"an epoch of the run had {rows[-1].samples} samples, and has {len(ordered)} here. Use the same files, "
                "and the same `subset` and `exclude` of the source."
            )
        for rank in range(rows[-1].world_size):
            tasks = rows[-1].split(ordered, start=start, rank=rank, seed=self.seed, number=epoch)
            if number < len(tasks):
                in_epoch, task = tasks.step(number), tasks[number]
                if (partners := self._partners(epoch)) is not None:
                    task = partners.task(task, tasks.positions(number).numpy())
                batch = self._make(task, epoch, mix=True, faults=self._uncounted, step=in_epoch)
                batches |= {} if batch is None else {rank: batch}
        if not batches:
            raise ConfigError(
                f"`step` must be one with a batch. Found: {step}, in epoch {epoch}, where no sample is left."
            )
        return batches

    def __getitem__(self, index: int) -> Sample:
        """One augmented sample of the current epoch, with the same pixels as in a batch: ``(image, label)``.

        ``loader[index].explain()`` says what the recipe did to it: see :meth:`gpuaug.Batch.explain`.

        ``image`` is [3, H, W], or a list of such tensors if the recipe has several views. ``label`` is an int, a float
        tensor [], a multi-label tensor [K], or None. With targets, ``label`` is a :class:`~gpuaug.BatchTargets`, or
        a mask [H, W] if masks are the only target. Targets of several views are a list of these.

        Args:
            index: number of the sample in the source; -1 is the last of the samples that the loader uses.

        If the order repeats samples, this is the first occurrence of the sample. ``len(loader)`` is the number of
        batches, not of samples. So ``DataLoader(loader, batch_size=None)`` yields only the first ``len(loader)``
        samples, one at a time: iterate over the loader itself.
        A bad sample does not count towards ``faults.max``, and is not written to ``faults.file``.

        Raises:
            IndexError: there is no such sample.
        """
        try:
            number = operator.index(index)
        except TypeError as error:
            raise ConfigError(
                f"`loader[index]` needs the number of one sample. Found: {index!r:.100}. "
                "For several samples, use `loader.fetch([...])` or `loader.fetch(range(...))`."
            ) from error
        source, count = self.source, len(self.source)
        if not -count <= number < (count if source.indices is None else math.inf):
            raise IndexError(f"the source has {count} samples. Found: number {number}. Use one from 0 to {count - 1}.")
        if number < 0:
            number = count + number if source.indices is None else int(source.indices[number])
        source.key(number)  # raises IndexError for an unknown number
        batch = self.fetch([number], faults=self._uncounted)
        images, second = batch
        is_class = isinstance(second, Tensor) and second.ndim == 1 and not second.is_floating_point()
        sample = Sample((_first(images), int(second[0]) if is_class else _first(second)))
        sample.explain = partial(batch.explain, 0)
        return sample

    @property
    def _uncounted(self) -> Faults:
        """The same policy, without a limit and a file."""
        return Faults(policy=self.faults.policy, truncated=self.faults.truncated)

    __reversed__ = __contains__ = None  # else Python would implement `reversed` and `in` with indices

    def __getitems__(self, indices: Any) -> NoReturn:  # torch's DataLoader reads a dataset by this method
        raise ConfigError(f"a gpuaug.Loader is not a dataset: {arguments.NOT_A_DATASET}")

    @property
    def dataset(self) -> NoReturn:  # `accelerate.skip_first_batches` asks for it
        """Raises an error, because a loader has no dataset."""
        text = "To continue inside an epoch, use `loader.load_state_dict(state)` in place of `skip_first_batches`."
        raise ReadOnlyError(f"a gpuaug.Loader has no `dataset`: {arguments.NOT_A_DATASET} {text}")

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            f"a gpuaug.Loader cannot be copied or sent to another process: {arguments.NOT_A_DATASET} For a second "
            "loader, build another. To save the loader's position, use `state_dict`."
        )

    def __repr__(self) -> str:
        return describe.text(self)

    def _repr_html_(self) -> str:
        return table(describe.facts(self))

    def close(self) -> None:
        """Stop the workers and threads, and close the decoder. A closed loader cannot be opened again."""
        self.pipeline.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _advance(self) -> None:
        self._epoch, self._position, self._next_pass = self._epoch + 1, 0, "here"

    def _begin(self) -> None:
        """Go to the position at which the next pass begins."""
        # with `order=sequential`, the next pass begins with the same samples, as after Lightning's sanity check
        if self._next_pass == "left" and not self._left_logged and not isinstance(self.order, orders.Sequential):
            self._left_logged = True
            self._log.warning(
                "epoch %d was left %d batches before its end; epoch %d begins, with other samples. To repeat the same "
                "batches, set `limit_batches` and `order=sequential`",
                self._epoch, len(self._tasks_from(self._position)), self._epoch + 1,
            )  # fmt: skip
        if self._next_pass != "here":
            self._advance()

    def _ordered(self, epoch: int | None = None) -> orders.Ordered:
        epoch = self._epoch if epoch is None else epoch
        if self._cached_order is None or self._cached_order[0] != epoch:
            self._cached_order = epoch, orders.Ordered(self.order.order(self.seed, epoch, self.source))
        return self._cached_order[1]

    def _tasks_from(self, start: int) -> EpochOrder:
        rank, world_size = distributed.rank_and_world(self._rank, self._world_size)
        if world_size > 1 and self.faults.policy == "drop" and self.last != "uneven":
            default = "" if self._last else " (the default with several ranks)"
            raise ConfigError(
                "`faults.policy=drop` can shorten the batches of a single rank. This does not work with "
                f"`last={self.last}`{default}. Set `faults.policy=blank`, or `last=uneven` if your training has no "
                "collective operation (such as DDP's) that waits for every rank."
            )
        share: dict[str, Any] = {"rank": rank, "world_size": world_size, "last": self.last, "limit": self.limit_batches}
        last = self._passes[-1] if self._passes and start else None  # its rounds go on
        origin = last.position if last is not None and last.epoch == self._epoch else 0
        share |= {"tokens": self.tokens, "seed": self.seed, "number": self._epoch, "origin": origin}
        return EpochOrder(self._ordered(), start=start, batch_size=self.batch_size, **share)

    def _log_last(self, tasks: EpochOrder) -> None:
        """Log once, on rank 0, what `last` does with samples that do not fill a batch on every rank; and of buckets."""
        together, order = tasks.batch_size * tasks.world_size, self.order
        first = self.tokens is None and not tasks.rank and not self._passes
        if isinstance(order, orders.Buckets) and order.samples % together and first:
            self._log.warning(
                "order.samples=%d: batches show images of several shapes, because it is no multiple of the %d samples "
                "of a step (batch_size times ranks)", order.samples, together,
            )  # fmt: skip
        if self._last_logged or tasks.rank or tasks.world_size == 1:
            return
        most, least = len(tasks), len(replace(tasks, rank=tasks.world_size - 1))
        more = tasks.world_size * tasks.before(most) - tasks.remaining
        self._last_logged = most != least or (self._last is None and more > 0)
        if most != least:
            self._log.warning(
                "last=uneven: this epoch has %d batches on rank 0 and %d on rank %d. If each step waits for all ranks, "
                "as in DDP, the run will hang at the end. Set `last=pad` or `last=drop`, or use torch's `Join`.",
                most, least, tasks.world_size - 1,
            )  # fmt: skip
        elif self._last_logged:
            self._log.info(
                "last pad: %d samples are repeated, so that each of %d ranks has %d full batches; `batch.valid` is "
                "False for the repeats", more, tasks.world_size, most,
            )  # fmt: skip


class Sample(tuple[Any, Any]):
    """``(image, label)`` of one sample. ``explain()`` is that of the sample's batch."""

    explain: Callable[[], Any]


def _check_epoch(epoch: Any) -> int:
    return int(checks.whole_number("epoch", epoch, 0, 10**9 - 1))


def _first(value: Any) -> Any:
    """The first row of each tensor in ``value``."""
    if isinstance(value, list):
        return [_first(view) for view in value]
    return value[0] if isinstance(value, Tensor) else value


class _Epoch(Pass):
    """A pass that stores its progress in the loader."""

    def __init__(self, loader: Loader, tasks: EpochOrder) -> None:
        self._loader, self._tasks, self._first_step = loader, tasks, loader._step
        steps = map(tasks.step, count())
        to_read = loader.tasks(tasks)
        super().__init__(loader.pipeline, to_read, epoch=loader.epoch, prefetch=loader.prefetch, steps=steps)
        loader.waited = 0.0
        loader.pipeline.running = weakref.ref(self)  # before `start`, because another thread may stop this pass
        self.start()

    def __next__(self) -> Batch:
        loader, count = self._loader, len(self._tasks)
        if self.done < count:
            try:
                return super().__next__()
            except StopIteration:
                if self.done < count:
                    raise GpuaugError(f"reading ended after {self.done} of {count} batches.") from None
            except PassEndedError:  # the loader may be in another pass by now
                raise
            except Exception:  # the loader failed, and the consumer did not `break`
                if loader._next_pass == "left":
                    loader._next_pass = "here"
                raise
        if loader.pipeline.newest_pass() is self:
            loader._finish()
        raise StopIteration

    def _note(self) -> None:
        loader = self._loader
        loader.waited = self.waited
        loader._position, loader._step = self._tasks.position(self.done), self._first_step + self.done
        loader._next_pass = "finished" if self.done == len(self._tasks) else "left"
