"""The training loop of `gpuaug train`: epochs, speed measurement, stop and resume."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from gpuaug import checks, files
from gpuaug.batch import Batch
from gpuaug.errors import ConfigError, GpuaugError, ReadError, StateError
from gpuaug.files import check_regular
from gpuaug.loader import distributed
from gpuaug.loader.loader import Loader
from gpuaug.tools.report import Report, output
from gpuaug.tools.request import Keys, Request

log = logging.getLogger("gpuaug")

VERSION = 1  # checkpoint format
TERMINATED = 143  # exit status after SIGTERM, as a shell reports it
AMP = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OPTIMIZERS = ("sgd", "adamw")
LOSSES = ("cross_entropy", "binary_cross_entropy")


@dataclass(frozen=True, kw_only=True)
class Settings(Keys):
    """How to train."""

    epochs: int = 10
    model: Any = None
    optimizer: str = "sgd"
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 5e-4
    warmup: float = 0.1
    loss: str = "cross_entropy"
    amp: str = "auto"
    out: str = "outputs/train"
    resume: str | None = None
    val: str | None = None
    check_memory: bool = True
    profiling: bool | int = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.profiling, bool) and not (type(self.profiling) is int and self.profiling >= 1):
            raise ConfigError(
                f"`profiling` must be true, false, or a number of batches >= 1. Found: {self.profiling!r}."
            )
        checks.whole_number("epochs", self.epochs, 1)
        for name, known in (("optimizer", OPTIMIZERS), ("loss", LOSSES), ("amp", ("auto", *AMP))):
            checks.one_of(name, getattr(self, name), known)
        for name, high in (("lr", math.inf), ("momentum", 1.0), ("weight_decay", math.inf), ("warmup", 1.0)):
            checks.number(name, getattr(self, name), 0.0, high)


class Stop(contextlib.AbstractContextManager["Stop"]):
    """Sets ``asked`` on SIGTERM, so that the running step can finish."""

    def __init__(self) -> None:
        self.asked = False
        self._pid = os.getpid()
        self._before: Any = None

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            os._exit(TERMINATED)  # a forked worker inherits this handler, and must end at once
        self.asked = True


class Pace:
    """Counts images, seconds, and the seconds in which the device waited for a batch, during training.

    On the CPU, the waiting time is the time to get the next batch. On CUDA it is the gap between two steps on the
    training's stream, because the host may wait for a batch while the device still works on the previous one. The time
    before the very first batch is not counted, because workers start and kernels are compiled then.
    """

    def __init__(self, device: torch.device) -> None:
        self.images, self.waited, self.seconds = 0, 0.0, 1e-9
        self._device = device
        self._last: float | None = None  # time of the last count; None: between two epochs
        self._asked: Any = None  # time of the request for the next batch
        self._gaps: deque[tuple[Any, Any]] | None = None  # None: before the first batch

    def ask(self) -> None:
        """Call before requesting the next batch."""
        self._asked = self._mark()

    def have(self) -> None:
        """Call when the batch has arrived."""
        there = self._mark()
        if self._gaps is None:
            self._gaps, self.seconds = deque(), 1e-9
            return
        self._gaps.append((self._asked, there))
        self._take(2 if self._device.type == "cuda" else 0)  # the host runs at most two steps ahead

    def stop(self) -> None:
        """Call after an epoch. Waits for its last step."""
        self._take(0)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._mark()
        self._last = None

    def _mark(self) -> Any:
        now = time.perf_counter()
        self.seconds += now - (self._last or now)
        self._last = now
        if self._device.type != "cuda":
            return now
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _take(self, left: int) -> None:
        while self._gaps and len(self._gaps) > left:
            asked, there = self._gaps.popleft()
            if self._device.type == "cuda":
                there.synchronize()
            self.waited += asked.elapsed_time(there) / 1000 if self._device.type == "cuda" else there - asked


class EachView(nn.Sequential):
    """Applies a model to every view of a batch, as one forward pass that DDP can wrap."""

    def forward(self, views: list[Tensor]) -> list[Tensor]:
        """Logits of each view."""
        return [self[0](view) for view in views]


class Training:
    """One training run on the loader's device. The model maps images [B, 3, H, W] to logits [B, classes].

    Each epoch ends with a checkpoint and the accuracy on the held-out images of ``val``.
    """

    def __init__(
        self,
        loader: Loader,
        *,
        model: nn.Module,
        settings: Settings,
        val: Loader | None = None,
        stop: Stop | None = None,
    ) -> None:
        self.loader, self.val, self.settings, self.stop = loader, val, settings, stop or Stop()
        self.device = loader.device
        auto = "bfloat16" if self.device.type == "cuda" else "float32"
        self.amp = AMP[auto if settings.amp == "auto" else settings.amp]  # dtype that the model computes in
        self.model = model.to(self.device, memory_format=loader.memory_format)  # type: ignore[call-overload]
        self.each: nn.Module = EachView(self.model)
        if distributed.active():
            self.each = DistributedDataParallel(self.each, [self.device.index] if self.device.type == "cuda" else None)
        self.optimizer = _optimizer(self.model, settings)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.amp is torch.float16)
        self.ranks = dist.get_world_size() if distributed.active() else 1
        self.first = not distributed.active() or dist.get_rank() == 0
        self.pace = Pace(self.device)
        self.steps = 0
        self.sums = torch.zeros(3, dtype=torch.float64, device=self.device)  # loss, correct, samples
        self.history: list[dict[str, float | int | None]] = []

    def run(self, report: Report) -> int:
        """Train to the end and report. Returns 0, or 143 if SIGTERM stopped it after a checkpoint."""
        file = Path(self.settings.out) / "last.pt"
        if self.first:
            output(str(file), "out")
        resume = self.settings.resume
        if resume is not None and (resume != "auto" or file.exists()):
            self.load(file if resume == "auto" else Path(resume))
            if self.loader.epoch >= self.settings.epochs:
                log.info("`epochs=%d` are already done. To train longer, raise `epochs`", self.settings.epochs)
        elif self.first and file.exists():
            log.info("%s of an earlier run will be overwritten. To continue that run, set resume=auto", file)
        if self.settings.amp == "auto":
            log.info("amp %s: %s device", str(self.amp).removeprefix("torch."), self.device.type)
        with logging_redirect_tqdm(loggers=[log]):
            while self.loader.epoch < self.settings.epochs:
                ended = self._epoch()
                self.save(file)
                if not (ended and self._hold_out()):
                    if self.first:
                        log.info(
                            "SIGTERM: stopped in epoch %d. To continue, set resume=%s", self.loader.epoch + 1, file
                        )
                    return TERMINATED
        self.save(file)  # again, with the last held-out accuracy
        self._report(report, file)
        return 0

    def _epoch(self) -> bool:
        """Train on the rest of the loader's epoch. Returns False if SIGTERM came before its end."""
        loader, epoch = self.loader, self.loader.epoch
        whole = len(loader)
        if not whole:
            raise ConfigError(
                f"an epoch has no batches: {len(loader.source)} samples, `batch_size={loader.batch_size}` on "
                f"{self.ranks} ranks, `last={loader.last}`. Make `batch_size` smaller or set `last=pad`."
            )
        done = loader.state_dict()["position"] / (loader.batch_size * self.ranks)  # in batches; not 0 after a resume
        self.each.train()
        with tqdm(
            total=whole,
            initial=min(whole, round(done)),
            desc=f"epoch {epoch + 1}/{self.settings.epochs}",
            unit="batch",
            disable=not self.first,
            mininterval=0.5 if sys.stderr.isatty() else 10.0,
        ) as bar:
            ended = self._steps(bar, done=done, whole=whole)
            self.pace.stop()
            bar.set_postfix_str(self._postfix(), refresh=True)
        if not ended:
            return False
        loss, right, samples = _sum(self.sums.tolist())
        self.sums.zero_()
        if not math.isfinite(loss):
            raise GpuaugError(
                f"the loss of epoch {epoch + 1} is {loss}. Lower `lr`, now {self.settings.lr:g}, or set `amp=float32`."
            )
        loss, right = loss / max(1.0, samples), right / max(1.0, samples)
        self.history.append({"epoch": epoch, "loss": loss, "train_accuracy": right, "held_out_accuracy": None})
        return True

    def _steps(self, bar: Any, *, done: float, whole: int) -> bool:
        """Run an epoch's steps from batch ``done``. Returns False if SIGTERM came before the end."""
        batches, pace, epoch = iter(self.loader), self.pace, self.loader.epoch
        while True:
            pace.ask()
            try:
                batch = next(batches, None)
            except ReadError:
                if not self.stop.asked:
                    raise
                return False  # the same SIGTERM may have ended the workers first
            if batch is None:
                return True
            pace.have()
            asked, valid = _sum([float(self.stop.asked), float(batch.valid.sum())])
            self.step(batch, valid=valid, progress=(epoch + min(1.0, done / whole)) / self.settings.epochs)
            pace.images += int(valid)
            done += 1
            if bar.update():
                bar.set_postfix_str(self._postfix(), refresh=False)
            if asked and self.loader.state_dict()["epoch"] == epoch:
                self.sums = torch.tensor(_sum(self.sums.tolist()), dtype=torch.float64, device=self.device)
                return False

    def step(self, batch: Batch, *, valid: float, progress: float) -> None:
        """Train on one batch. ``valid`` is its number of valid samples over all ranks; all have equal weight."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * rate(progress, warmup=self.settings.warmup)
        weight = batch.valid.to(self.device, non_blocking=True).float()
        self.optimizer.zero_grad(set_to_none=True)
        try:
            logits = self._logits(self.each, batch)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise ConfigError(
                f"the model's batch norm cannot train on a batch of {len(batch)}. Set `last=drop` or another "
                "`batch_size`."
            ) from error
        losses, right = outcome(logits, batch.labels, self.settings.loss)
        summed = (losses * weight).sum()
        # DDP averages the gradients over ranks, but we need the average over all valid samples
        self.scaler.scale(summed * (self.ranks / max(1.0, valid))).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.steps += 1
        self.sums += torch.stack([summed.detach(), (right * weight).sum(), weight.sum()])

    def _logits(self, model: nn.Module, batch: Batch) -> list[Tensor]:
        whole = self.amp is torch.float32
        views = batch.images if isinstance(batch.images, list) else [batch.images]
        with torch.autocast(self.device.type, dtype=self.amp, enabled=not whole):
            return model([view.float() if whole else view for view in views])

    def _postfix(self) -> str:
        pace = self.pace
        loss, _, samples = self.sums.tolist()
        speed, waiting = pace.images / pace.seconds, pace.waited / pace.seconds
        return f"{speed:.0f} images/s, loss {loss / max(1.0, samples):.3f}, waiting {waiting:.0%}"

    def _hold_out(self) -> bool:
        """Add the held-out accuracy to the history. Returns False if SIGTERM came before its end."""
        entry = self.history[-1]
        accuracy = None if self.val is None else self.evaluate(self.val)
        (asked,) = _sum([float(self.stop.asked)])
        if self.first:
            held_out = "" if accuracy is None else f", held-out {accuracy:.1%}"
            text = f"loss {entry['loss']:.3f}, train accuracy {entry['train_accuracy']:.1%}{held_out}"
            log.info("epoch %d: %s", self.loader.epoch, text)
        entry["held_out_accuracy"] = accuracy
        return not asked

    @torch.no_grad()
    def evaluate(self, loader: Loader) -> float | None:
        """Accuracy over all ranks; None if SIGTERM came before the end."""
        if self.ranks > 1:
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)  # the ranks have different running statistics
        alone = EachView(self.model).eval()  # without DDP, because ranks would wait for each other
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        hidden = not (self.first and sys.stderr.isatty())
        for batch in tqdm(loader, desc="held out", unit="batch", leave=False, disable=hidden):
            _, right = outcome(self._logits(alone, batch), batch.labels, self.settings.loss)
            weight = batch.valid.to(self.device).float()
            sums += torch.stack([(right * weight).sum(), weight.sum()])
            if self.stop.asked:
                break
        asked, right_all, samples = _sum([float(self.stop.asked), *sums.tolist()])
        return None if asked else right_all / max(1.0, samples)

    def save(self, file: Path) -> None:
        """Write the checkpoint atomically. Only the first rank writes."""
        if not self.first:
            return
        classes = self.loader.source.classes
        parts = {
            "version": VERSION,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "loader": self.loader.state_dict(),
            "classes": None if classes is None else list(classes),
            "sums": self.sums.tolist(),
            "steps": self.steps,
            "history": self.history,
        }
        try:
            with files.replacing(file, sync=True) as stream:
                torch.save(parts, stream)
        except (OSError, RuntimeError) as error:  # on a full disk torch raises RuntimeError
            raise GpuaugError(f"the checkpoint {file} cannot be written: {error}. Set another `out`.") from error

    def load(self, file: Path) -> None:
        """Continue from a checkpoint with the next sample. Batch size, workers and ranks may change."""
        parts = read_checkpoint(file)
        classes = self.loader.source.classes
        if parts["classes"] is not None and parts["classes"] != (None if classes is None else list(classes)):
            raise StateError(f"{file} was trained on the classes {parts['classes']}. The source now has: {classes}.")
        try:
            self.model.load_state_dict(parts["model"])
            self.optimizer.load_state_dict(parts["optimizer"])
            for parameter, state in self.optimizer.state.items():
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.ndim and value.shape != parameter.shape:
                        raise ValueError(
                            f"`{name}` has shape {list(value.shape)}, its parameter {list(parameter.shape)}"
                        )
            if parts["scaler"]:
                self.scaler.load_state_dict(parts["scaler"])
        except Exception as error:  # torch raises many types
            raise StateError(f"{file} belongs to another model or optimizer: {error}") from error
        self.loader.load_state_dict(parts["loader"])
        if self.first:  # the first rank holds the sums of all ranks
            self.sums += torch.tensor(parts["sums"], dtype=torch.float64, device=self.device)
        self.steps, self.history = parts["steps"], parts["history"]
        log.info("resumed %s: epoch %d, sample %d", file, self.loader.epoch + 1, parts["loader"]["position"])

    def _report(self, report: Report, file: Path) -> None:
        pace, last = self.pace, self.history[-1] if self.history else {}
        waited = _sum([pace.waited / self.ranks])[0] / pace.seconds
        if pace.images:
            ranks = "" if self.ranks == 1 else f" on {self.ranks} ranks"
            speed = pace.images / pace.seconds
            report.add("images_per_second", speed, f"{speed:.0f} ({pace.images} in {pace.seconds:.1f} s{ranks})")
            report.add("waiting_for_data", waited, f"{waited:.1%} of the time")
        for name, note in (("train_accuracy", " on augmented images, last epoch"), ("held_out_accuracy", "")):
            if (value := last.get(name)) is not None:
                report.add(name, value, f"{value:.1%}{note}")
        report.add("checkpoint", str(file), str(file))
        report.values["history"] = self.history
        report.write()


def build_model(request: Request, config: Any, *, num_classes: int, seed: int) -> nn.Module:
    """Build the model ``model._target_``. ``seed`` decides its weights. torch's random state is restored."""
    from omegaconf import OmegaConf

    if not isinstance(config, Mapping) or config.get("_target_") is None:
        raise ConfigError(
            f"`model` must be a mapping whose `_target_` names a class. Found: {config!r}. "
            "Set `model._target_=my_pkg.MyNet`, and allow it with `--trust my_pkg.`"
        )
    part = OmegaConf.create({"model": config}).model
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = request.build(part, trust=("gpuaug.tools.train.model.SmallNet",), num_classes=num_classes)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"`model._target_` must name a torch.nn.Module. Found: {type(model).__name__}.")
    return model


def rate(progress: float, *, warmup: float) -> float:
    """Factor of the learning rate at ``progress`` in [0, 1]: linear warmup, then cosine decay to 0."""
    if progress < warmup:
        return 0.1 + 0.9 * progress / warmup
    return 0.5 + 0.5 * math.cos(math.pi * (progress - warmup) / max(1e-9, 1.0 - warmup))


def outcome(logits: Sequence[Tensor], labels: Tensor | None, loss: str) -> tuple[Tensor, Tensor]:
    """Loss and accuracy of each sample, float [B]. Several views: their mean loss, and accuracy of their summed logits.

    ``logits`` are float [B, C] per view, ``labels`` int64 [B] or float [B, C]. Mixed labels: their largest class.
    """
    if labels is None:
        raise ConfigError("`gpuaug train` needs labels, but a batch has none.")
    views = [view.float() for view in logits]
    if loss == "cross_entropy":
        if labels.ndim == 1 and labels.is_floating_point():
            raise ConfigError(
                "`loss=cross_entropy` needs classes, as whole numbers or names. Found: one fraction per image, "
                f"such as {float(labels[0]):g}, which is a regression label."
            )
        losses = [cross_entropy(view, labels, reduction="none") for view in views]
        truth = labels if labels.ndim == 1 else labels.argmax(dim=1)
        right = (sum(views[1:], views[0]).argmax(dim=1) == truth).float()
    else:
        if labels.shape != views[0].shape:
            shapes = f"labels {tuple(labels.shape)}, logits {tuple(views[0].shape)}"
            raise ConfigError(f"`loss=binary_cross_entropy` needs one label per image and class. Found: {shapes}.")
        truth = labels.float()
        losses = [binary_cross_entropy_with_logits(view, truth, reduction="none").mean(dim=1) for view in views]
        right = ((sum(views[1:], views[0]) > 0) == (truth > 0.5)).float().mean(dim=1)
    return torch.stack(losses).mean(dim=0), right


def _optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=settings.lr)
    return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, nesterov=settings.momentum > 0)


def _sum(values: list[float]) -> list[float]:
    """Sum values over all ranks on the CPU, so that no rank waits for its device."""
    if not distributed.active():
        return values
    summed = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(summed)
    return summed.tolist()


def read_checkpoint(file: Path) -> dict[str, Any]:
    """Read a checkpoint without executing its content. StateError if it is invalid or damaged."""
    try:
        check_regular(os.stat(file), file)  # torch would read a pipe or device forever
        parts = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises IndexError, KeyError, ... for files that are not checkpoints
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise StateError(
            f"`resume` must name a checkpoint of `gpuaug train`. Found: {str(file)!r} ({reason})."
        ) from error
    version = parts.get("version") if isinstance(parts, dict) else type(parts).__name__
    if version != VERSION:
        raise StateError(f"`resume` must name a checkpoint of version {VERSION}. Found: {str(file)!r}, {version}.")
    for name, (expected, holds) in _PARTS.items():
        if name not in parts or not holds(parts[name]):
            what = f"`{name}` = {str(parts[name])[:60]!r}" if name in parts else f"no `{name}`"
            raise StateError(
                f"{file} is damaged: `{name}` of a checkpoint must be {expected}. Found: {what}. Resume from "
                "another checkpoint, or start again with resume=null."
            )
    return parts


def _numbers(values: Iterable[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _is_epoch(entry: Any) -> bool:
    if not isinstance(entry, dict) or not _EPOCH >= entry.keys() >= {"epoch", "loss"}:
        return False
    return _numbers(v for k, v in entry.items() if v is not None or k != "held_out_accuracy")


_EPOCH = {"epoch", "loss", "train_accuracy", "held_out_accuracy"}
_MAPPING: tuple[str, Callable[[Any], bool]] = ("a mapping", lambda v: isinstance(v, dict))
# parts of a checkpoint besides the version: description and check of each
_PARTS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "model": _MAPPING,
    "optimizer": _MAPPING,
    "scaler": (
        "a mapping of names to numbers",
        lambda v: isinstance(v, dict) and all(isinstance(k, str) for k in v) and _numbers(v.values()),
    ),
    "loader": _MAPPING,
    "classes": (
        "a list of names or null",
        lambda v: v is None or (isinstance(v, list) and all(isinstance(name, str) for name in v)),
    ),
    "sums": (
        "three numbers (loss, correct predictions, samples)",
        lambda v: isinstance(v, list) and len(v) == 3 and _numbers(v),
    ),
    "steps": ("a whole number >= 0", lambda v: type(v) is int and v >= 0),
    "history": (
        "a list of one mapping of numbers per epoch",
        lambda v: isinstance(v, list) and all(map(_is_epoch, v)),
    ),
}
