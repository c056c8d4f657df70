"""The training loop of `gpuaug train`: epochs, speed measurement, stop and resume."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import signal
import sys
import textwrap
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from gpuaug import checks, files
from gpuaug.errors import ConfigError, GpuaugError, ReadError, StateError, shown_size
from gpuaug.loader import distributed
from gpuaug.loader.batch import Batch
from gpuaug.loader.loader import Loader
from gpuaug.random.generators import restore_generators
from gpuaug.tools.report import Report, output
from gpuaug.tools.request import Keys, count_batches
from gpuaug.tools.train.checkpoint import VERSION, digests_in, packed, read_checkpoint

log = logging.getLogger("gpuaug")

SPIKES = 20  # steps in spikes.json
TERMINATED = 143  # exit status after SIGTERM, as a shell reports it
AMP = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Settings(Keys):
    """The keys of `gpuaug train`."""

    epochs: int = 10
    model: Any = None
    optimizer: str = "sgd"
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 5e-4
    warmup: float = 0.1
    amp: str = "auto"
    out: str = "outputs/train"
    resume: str | None = None
    digests: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole_number("epochs", self.epochs, 1, 10**9 - 1)
        checks.one_of("optimizer", self.optimizer, ("sgd", "adamw"))
        checks.one_of("amp", self.amp, ("auto", *AMP))
        for name, high in (("lr", math.inf), ("momentum", 1.0), ("weight_decay", math.inf), ("warmup", 1.0)):
            checks.number(name, getattr(self, name), 0.0, high)


class Stop:
    """Sets ``asked`` on SIGTERM, so that the running step can finish."""

    def __init__(self) -> None:
        self.asked, self._pid = False, os.getpid()

    def __enter__(self) -> Stop:
        self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _note(self, *_: object) -> None:
        if os.getpid() != self._pid:
            os._exit(TERMINATED)  # a forked worker inherits this handler, and must end at once
        self.asked = True


class EachView(nn.Sequential):
    """Applies a model to every view of a batch, as one forward pass that DDP can wrap."""

    def forward(self, views: list[Tensor]) -> list[Tensor]:
        return [self[0](view) for view in views]


class Pace:
    """Counts the seconds of training, and those in which the device waited for a batch.

    On CUDA, the host may wait for a batch while the device still works. So the waiting time on CUDA is the gap between
    two steps on the training's stream. The time before the first batch does not count: workers start then.
    """

    def __init__(self, device: torch.device) -> None:
        self.images, self.waited, self.seconds = 0, 0.0, 0.0
        self._device, self._on_cuda = device, device.type == "cuda"
        self._last = 0.0  # time up to which `seconds` counts
        self._gaps: deque[tuple[Any, Any]] = deque()  # (begin, end) of waits not yet in `waited`

    def measured(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches. The caller adds to ``images``, and calls :meth:`stop` after the epoch."""
        self._last = time.perf_counter()
        iterator = iter(batches)
        while True:
            begin = self._mark()
            batch = next(iterator, None)
            end = self._mark()
            if batch is None:
                return
            if self.images:
                self._gaps.append((begin, end))
                self._settle(2 if self._on_cuda else 0)  # the host runs at most two steps ahead
            else:
                self.seconds = 0.0
            yield batch

    def stop(self) -> None:
        """Call after an epoch. Waits until the device has finished."""
        self._settle(0)
        if self._on_cuda:
            torch.cuda.synchronize(self._device)
        self._mark()

    def _mark(self) -> Any:
        now = time.perf_counter()
        self.seconds += now - self._last
        self._last = now
        if not self._on_cuda:
            return now
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _settle(self, left: int) -> None:
        """Add the oldest gaps to ``waited`` until ``left`` remain."""
        while len(self._gaps) > left:
            begin, end = self._gaps.popleft()
            if self._on_cuda:
                end.synchronize()
            self.waited += begin.elapsed_time(end) / 1000 if self._on_cuda else end - begin


class Training:
    """One training run on the loader's device. The model maps images [B, 3, H, W] to logits [B, classes]."""

    def __init__(
        self,
        loader: Loader,
        *,
        model: nn.Module,
        settings: Settings,
        val: Loader | None = None,
        stop: Stop | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.loader, self.val, self.settings, self.stop = loader, val, settings, stop or Stop()
        self.about = dict(about or {})  # what `gpuaug export` reads in a checkpoint
        self.device = loader.device
        auto = "bfloat16" if self.device.type == "cuda" else "float32"
        self.amp = AMP.get(settings.amp, AMP[auto])  # dtype that the model computes in
        self.model = model.to(self.device, memory_format=loader.memory_format)  # type: ignore[call-overload]
        self.each: nn.Module = EachView(self.model)
        if distributed.active():
            self.each = DistributedDataParallel(self.each, [self.device.index] if self.device.type == "cuda" else None)
        self.optimizer = _optimizer(self.model, settings)
        self.rank, self.ranks = distributed.rank_and_world(None, None)
        self.first = self.rank == 0
        self.pace = Pace(self.device)
        self.steps = 0  # changes of the weights
        self.sums = torch.zeros(3, dtype=torch.float64, device=self.device)  # loss, correct predictions, samples
        self.history: list[dict[str, float | int | None]] = []
        self.classes = loader.source.classes and list(loader.source.classes)
        self.losses: list[tuple[int, Tensor, float]] = []  # step, summed loss of this rank, valid samples of all ranks
        self.spikes: list[dict[str, Any]] = []  # the steps with the largest losses
        self.keeps_digests = False  # whether this process has written a digest

    def run(self, report: Report) -> int:
        """Train to the end and report. Returns 0, or 143 if SIGTERM stopped the training."""
        file = Path(self.settings.out) / "last.pt"
        if self.first:
            output(str(file), "out")
        resume = self.settings.resume
        if resume is not None and (resume != "auto" or file.exists()):
            self.load(file if resume == "auto" else Path(resume))
            if self.loader.epoch >= self.settings.epochs:
                log.info("`epochs=%d` are already done. To train longer, raise `epochs`", self.settings.epochs)
        elif file.exists():
            log.info("%s of an earlier run will be overwritten. To continue that run, set resume=auto", file)
        if self.settings.amp == "auto":
            log.info("amp=auto: %s, because the device is %s", str(self.amp).removeprefix("torch."), self.device.type)
        with logging_redirect_tqdm(loggers=[log]):
            while self.loader.epoch < self.settings.epochs:
                ended = self._epoch()
                self.save(file)
                if not ended:
                    epoch = self.loader.epoch + 1
                    log.info("SIGTERM: stopped in epoch %d. To continue, set resume=%s", epoch, file)
                    return TERMINATED
                self._hold_out()
        self.save(file)  # now with the last held-out accuracy
        self._report(report, file)
        return 0

    def _epoch(self) -> bool:
        """Train on the rest of the loader's epoch. Returns False if SIGTERM came before the end of the epoch."""
        loader, epoch = self.loader, self.loader.epoch
        whole = count_batches(loader)
        done = loader.state_dict()["position"] / (loader.batch_size * self.ranks)  # batches done before a resume
        self.each.train()
        with tqdm(
            total=whole,
            initial=min(whole, round(done)),
            desc=f"epoch {epoch + 1}/{self.settings.epochs}",
            unit="batch",
            disable=not self.first,
            mininterval=0.5 if sys.stderr.isatty() else 10.0,
        ) as bar:
            ended = self._steps(bar)
            self.pace.stop()
            bar.set_postfix_str(self._postfix(), refresh=True)
        if ended:
            self._keep_spikes()
        loss, right, samples = _sum(self.sums.tolist()) if ended else self.sums.tolist()
        if not math.isfinite(loss):  # also after SIGTERM, so that the last good checkpoint stays
            raise GpuaugError(
                f"the loss of epoch {epoch + 1} is {loss}. Lower `lr`, now {self.settings.lr:g}, or set `amp=float32`."
            )
        if not ended:
            return False
        self.sums.zero_()
        loss, right = loss / max(1.0, samples), right / max(1.0, samples)
        self.history.append({"epoch": epoch, "loss": loss, "train_accuracy": right, "held_out_accuracy": None})
        return True

    def _steps(self, bar: Any) -> bool:
        """Train on the rest of the epoch's batches. Returns False if SIGTERM ended the epoch early."""
        loader, epoch = self.loader, self.loader.epoch
        samples = loader.batch_size * self.ranks * bar.total  # as if the last batch were full
        position = loader.state_dict()["position"]
        try:
            for batch in self.pace.measured(loader):
                asked, valid = _sum([float(self.stop.asked), float(batch.valid.sum())])
                progress = (epoch + min(1.0, position / samples)) / self.settings.epochs
                loss = self.train_batch(batch, valid=valid, progress=progress)
                self.pace.images += int(valid)
                if bar.update():
                    bar.set_postfix_str(self._postfix(), refresh=False)
                state = loader.state_dict()
                position, step = state["position"], state["step"] - 1
                self.losses.append((step, loss, valid))
                if self.settings.digests:
                    self._add_digest(step, batch)
                if asked and state["epoch"] == epoch:
                    self.sums = torch.tensor(_sum(self.sums.tolist()), dtype=torch.float64, device=self.device)
                    self._keep_spikes()
                    return False
        except ReadError:  # SIGTERM to the whole process group ends the workers too
            if not self.stop.asked:
                raise
            return False
        return True

    def train_batch(self, batch: Batch, *, valid: float, progress: float) -> Tensor:
        """Train on one batch. Returns the sum of its losses.

        ``valid``: number of valid samples of all ranks. ``progress``: share that is done.
        """
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = self.settings.lr * rate(progress, warmup=self.settings.warmup)
        self.optimizer.zero_grad(set_to_none=True)
        weight = batch.valid.to(self.device, non_blocking=True).float()
        place = f"dropout {self.loader.seed} {self.steps} 0 {self.rank}"  # without the 0, all seeds would change
        seed = int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest(), "little")
        with restore_generators(self.device):
            torch.default_generator.manual_seed(seed)
            if self.device.type == "cuda":
                torch.cuda.default_generators[self.device.index or 0].manual_seed(seed)
            logits = self._logits(self.each, batch)
            losses, right = outcome(logits, batch.labels)
            summed = (losses * weight).sum()
            # DDP averages the gradients over ranks, but the average over all valid samples is needed
            (summed * (self.ranks / max(1.0, valid))).backward()
        self.optimizer.step()
        self.sums += torch.stack([summed.detach(), (right * weight).sum(), weight.sum()])
        self.steps += 1
        return summed.detach()

    def _keep_spikes(self) -> None:
        """Write the steps with the largest losses so far, and forget the others. All ranks must call it."""
        if not self.losses:
            return
        sums = torch.stack([loss for _, loss, _ in self.losses]).double().cpu()
        if distributed.active():
            dist.all_reduce(sums)
        for (step, _, valid), total in zip(self.losses, sums.tolist(), strict=True):
            loss = total / max(1.0, valid)
            self.spikes.append({"step": step, "loss": loss if math.isfinite(loss) else None})
        self.spikes.sort(key=lambda each: -math.inf if each["loss"] is None else -each["loss"])
        del self.spikes[SPIKES:]
        self.losses = []
        if self.first:
            self._write("spikes.json", json.dumps({"steps": self.spikes}, indent=1) + "\n")

    def _add_digest(self, step: int, batch: Batch) -> None:
        file, digest = Path(self.settings.out) / f"digests.rank{self.rank}.jsonl", batch.digest()
        with _written(file):
            if not self.keeps_digests:  # the lines of an earlier run that this one continues stay
                known = digests_in(file.read_text(errors="replace")) if file.exists() else {}
                files.write(file, *(_line(n, each) for n, each in known.items() if n < step))
            self.keeps_digests = True
            with open(file, "a") as lines:
                lines.write(_line(step, digest))

    def _write(self, name: str, data: memoryview | str) -> None:
        with _written(Path(self.settings.out) / name) as file:
            files.write(file, data, sync=True)

    def _logits(self, model: nn.Module, batch: Batch) -> list[Tensor]:
        """Logits [B, classes] of each view, float32."""
        whole, classes = self.amp is torch.float32, self.loader.num_classes
        views = batch.images if isinstance(batch.images, list) else [batch.images]
        try:
            with torch.autocast(self.device.type, dtype=self.amp, enabled=not whole):
                logits = model([view.float() if whole else view for view in views])
        except Exception as error:  # models raise many types
            sizes = ", ".join(dict.fromkeys(shown_size(*view.shape[-2:]) for view in views))
            reason = textwrap.shorten(f"{type(error).__name__}: {error}", 400, placeholder=" ...").rstrip(".!")
            raise ConfigError(
                f"the model refused {len(batch)} images of {sizes}: {reason}. If it needs another size, set "
                "`augment.crop.size`, or give the model this size: `model._target_=timm:NAME +model.img_size=N`, for "
                "torchvision `+model.image_size=N`. Set `last=drop` or another `batch_size` if its batch norm needs "
                "more images. `--debug` shows where the error came from."
            ) from error
        for view in logits:
            is_tensor = isinstance(view, Tensor)
            if not is_tensor or view.ndim != 2 or view.shape[1] != (classes or view.shape[1]):
                found = f"a tensor {list(view.shape)}, num_classes={classes}" if is_tensor else type(view).__name__
                raise ConfigError(
                    f"the model must return logits [B, num_classes]. Found: {found}. If the model has more outputs "
                    "in training, switch them off: torchvision's googlenet and inception_v3 need "
                    "`+model.aux_logits=false`."
                )
        return [view.float() for view in logits]

    def _postfix(self) -> str:
        pace = self.pace
        loss, _, samples = self.sums.tolist()
        text = f"loss {loss / max(1.0, samples):.3f}"
        if not pace.seconds:  # the time before the first batch does not count
            return text
        return f"{pace.images / pace.seconds:.0f} images/s, {text}, waiting {pace.waited / pace.seconds:.0%}"

    def _hold_out(self) -> None:
        """Add the held-out accuracy to the history, and log the epoch."""
        entry, held_out = self.history[-1], ""
        if self.val is not None:
            entry["held_out_accuracy"] = accuracy = self._evaluate(self.val)
            held_out = f", held-out {accuracy:.1%}"
        text = f"loss {entry['loss']:.3f}, train accuracy {entry['train_accuracy']:.1%}{held_out}"
        log.info("epoch %d: %s", self.loader.epoch, text)

    @torch.no_grad()
    def _evaluate(self, loader: Loader) -> float:
        """The accuracy on the samples of all ranks."""
        if self.ranks > 1:
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)  # use the first rank's running statistics, because each rank has its own
        alone = EachView(self.model).eval()  # the model without DDP; with DDP, ranks would wait for each other
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in tqdm(loader, desc="held out", unit="batch", leave=False, disable=None if self.first else True):
            _, right = outcome(self._logits(alone, batch), batch.labels)
            weight = batch.valid.to(self.device).float()
            sums += torch.stack([(right * weight).sum(), weight.sum()])
        correct, samples = _sum(sums.tolist())
        return correct / max(1.0, samples)

    def save(self, file: Path) -> None:
        """Write the checkpoint atomically. Only the first rank writes."""
        if not self.first:
            return
        checkpoint = {
            "version": VERSION,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loader": self.loader.state_dict(),
            "classes": self.classes,
            "sums": self.sums.tolist(),
            "steps": self.steps,
            "history": self.history,
            "spikes": self.spikes,
            "gpuaug": self.about,
        }
        self._write(file.name, packed(checkpoint))

    def load(self, file: Path) -> None:
        """Load a checkpoint, so that training continues with the next sample."""
        checkpoint = read_checkpoint(file)
        if checkpoint["classes"] not in (None, self.classes):
            raise StateError(
                f"{file} was trained on the classes {checkpoint['classes']}. The source now has: {self.classes}. Set "
                "the same source, or start again with resume=null."
            )
        try:
            self.model.load_state_dict(checkpoint["model"])
            own = [dict(group) for group in self.optimizer.param_groups]
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            for group, settings in zip(self.optimizer.param_groups, own, strict=True):
                if group.keys() != settings.keys():
                    raise ValueError(f"the optimizer of the checkpoint has the settings {', '.join(sorted(group))}")
                group.update(settings)  # keep the settings of this run, such as a new `weight_decay`
        except Exception as error:  # torch raises many types
            reason = textwrap.shorten(f"{type(error).__name__}: {error}", 400, placeholder=" ...")
            raise StateError(
                f"{file} belongs to another model or optimizer ({reason}). Set `model` and `optimizer` as in that run, "
                "or start again with resume=null."
            ) from error
        self.loader.load_state_dict(checkpoint["loader"])
        if self.first:  # a checkpoint has the sums of all ranks, so only one rank has them now
            self.sums = torch.tensor(checkpoint["sums"], dtype=torch.float64, device=self.device)
        self.steps, self.history = checkpoint["steps"], checkpoint["history"]
        self.spikes = checkpoint.get("spikes", [])
        log.info("resumed %s: epoch %d, sample %d", file, self.loader.epoch + 1, checkpoint["loader"]["position"])

    def _report(self, report: Report, file: Path) -> None:
        pace, last = self.pace, self.history[-1] if self.history else {}
        waited = _sum([pace.waited / self.ranks])[0] / (pace.seconds or 1.0)
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


def _line(step: int, digest: str) -> str:
    return json.dumps({"step": step, "digest": digest}) + "\n"


@contextmanager
def _written(file: Path) -> Iterator[Path]:
    try:
        yield file
    except OSError as error:
        raise GpuaugError(f"{file} cannot be written: {error}. Free space, or set another `out`.") from error


def rate(progress: float, *, warmup: float) -> float:
    """Factor of the learning rate at ``progress`` in [0, 1]: linear warmup, then cosine decay to 0."""
    if progress < warmup:
        return 0.1 + 0.9 * progress / warmup
    return 0.5 + 0.5 * math.cos(math.pi * (progress - warmup) / max(1e-9, 1.0 - warmup))


def outcome(views: Sequence[Tensor], labels: Tensor | None) -> tuple[Tensor, Tensor]:
    """Cross entropy and accuracy of each sample, both float [B].

    ``views`` are the logits of each view, float [B, C], and ``labels`` are int64 [B] or float [B, C]. With several
    views, the loss is the mean of the views' losses, and the accuracy is that of the views' summed logits.
    """
    if labels is None:
        raise ConfigError("`gpuaug train` needs labels, but a batch has none.")
    if labels.ndim == 1 and labels.is_floating_point():
        raise ConfigError(
            "Cross entropy needs classes, as whole numbers or names. Found: one fraction per image, such as "
            f"{float(labels[0]):g}, which is a regression label."
        )
    losses = torch.stack([cross_entropy(view, labels, reduction="none") for view in views])
    truth = labels if labels.ndim == 1 else labels.argmax(dim=1)
    return losses.mean(dim=0), (torch.stack(list(views)).sum(dim=0).argmax(dim=1) == truth).float()


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
