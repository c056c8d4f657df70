"""`gpuaug train`: a small training run on the loader."""

from __future__ import annotations

import contextlib
import logging
import os

import torch
import torch.distributed as dist
from omegaconf import OmegaConf

import gpuaug
from gpuaug.errors import ConfigError
from gpuaug.loader.loader import Loader
from gpuaug.tools.report import Report
from gpuaug.tools.request import Request
from gpuaug.tools.train.model import build_model
from gpuaug.tools.train.training import Settings, Stop, Training

log = logging.getLogger("gpuaug")


def main(request: Request) -> int:
    """Train. Returns 0, or 143 if SIGTERM stopped the training. In both cases a checkpoint is written first."""
    settings = Settings(**request.settings())
    train = request.loader()
    under_torchrun = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if under_torchrun and train.get("last") == "uneven":
        raise ConfigError(
            "with `last=uneven` some ranks have fewer batches, and DDP would wait forever for the missing batches. "
            "Set `last=pad` or `last=drop`."
        )
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(Stop())
        loader: Loader = stack.enter_context(request.build(train))
        if loader.device.type == "cuda":
            # this must be the first use of CUDA, because the default device belongs to another rank
            torch.cuda.set_device(loader.device)
        _refuse_targets(loader, "targets")
        if loader.num_classes is None:
            raise ConfigError("`gpuaug train` needs labels, but this source has none.")
        model = build_model(request, settings.model, num_classes=loader.num_classes, seed=loader.seed)
        classes = loader.source.classes
        val: Loader | None = request.build_held_out(train, classes=classes)
        if val is None:
            log.info("no held-out accuracy, because val.source.root is not set")
        else:
            stack.enter_context(val)
            _refuse_targets(val, "val.targets")
            if val.source.classes != classes:
                raise ConfigError(
                    f"the held-out images must have the training classes {classes}. Found: {val.source.classes}."
                )
        if under_torchrun:
            # gloo for CPU tensors, nccl for GPU tensors
            dist.init_process_group("cpu:gloo,cuda:nccl" if loader.device.type == "cuda" else "gloo")
            stack.callback(dist.destroy_process_group)
        parts = {"train": train, "eval": request.held_out}
        recipes = {name: part.get("augment") for name, part in parts.items() if part is not None}
        about = {
            "version": gpuaug.__version__,
            "model": settings.model,
            "num_classes": loader.num_classes,
            "recipes": {k: OmegaConf.to_container(x, resolve=True) for k, x in recipes.items() if OmegaConf.is_dict(x)},
            "fingerprint": None if val is None else val.augment.fingerprint(),
        }
        training = Training(loader, model=model, val=val, settings=settings, stop=stop, about=about)
        return training.run(Report(file=settings.json, quiet=not training.first))


def _refuse_targets(loader: Loader, key: str) -> None:
    if loader.targets is not None:
        raise ConfigError(
            f"`{key}` must be null, because `gpuaug train` trains image classification. Set {key}=none, or use "
            "gpuaug.Loader in a training loop of your own."
        )
