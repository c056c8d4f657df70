"""`gpuaug train`: a small, honest training run on the loader."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from gpuaug.cli import plan, profile
from gpuaug.cli.report import Report
from gpuaug.cli.request import Request
from gpuaug.cli.training import Settings, Stop, Training, build_model, step_memory
from gpuaug.errors import ConfigError
from gpuaug.loader import Loader

log = logging.getLogger("gpuaug")


def main(request: Request) -> int:
    """Train as asked; 0, or 143 after a checkpoint on SIGTERM."""
    settings = Settings(**request.settings())
    train = request.loader()
    under_torchrun = int(os.environ.get("WORLD_SIZE", "1")) > 1
    rule: dict[str, Any] = {}
    if under_torchrun and train.get("last") is None and not train.get("drop_last"):
        rule = {"last": "pad"}
        log.info("last=pad: under DDP every rank needs as many batches as the others")
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(Stop())
        first: Loader = stack.enter_context(request.build(train, **rule))
        if first.num_classes is None:
            raise ConfigError("`gpuaug train` needs labels, and this source has none.")
        model = build_model(request, settings.model, num_classes=first.num_classes, seed=first.seed)
        step = step_memory(model, settings, first)
        loader: Loader = stack.enter_context(plan.fitted(request, train, first, also=step, **rule))
        if settings.profiling:
            profile.inside(request, train, loader, settings, **rule)
        if under_torchrun:
            if loader.last == "uneven":
                raise ConfigError(
                    "`last=uneven` gives the ranks unequal numbers of batches, and DDP would wait for ever for the "
                    "missing one. Set `last=pad` or `last=drop`."
                )
            stack.enter_context(_process_group(loader.device))
        held_out = request.held_out(train, at=settings.val)
        val: Loader | None = None
        if held_out is None:
            log.info("no held-out images: val.source.root is not set")
        else:
            built = request.build_held_out(held_out, classes=loader.source.classes)
            val = stack.enter_context(plan.fitted(request, held_out, built, beside=(loader,), also=step))
            if val.source.classes != loader.source.classes:
                raise ConfigError(
                    f"the held-out images must have the training's classes, {loader.source.classes}. "
                    f"Found: {val.source.classes}."
                )
        training = Training(loader, model=model, val=val, settings=settings, stop=stop)
        return training.run(Report(file=settings.json, quiet=not training.first))


@contextlib.contextmanager
def _process_group(device: torch.device) -> Iterator[None]:
    """torch.distributed as torchrun describes it: gloo for what is on the CPU, nccl for what is on a GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()
