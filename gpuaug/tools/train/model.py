"""The model of `gpuaug train` and `gpuaug profile`: the small default network, and what the key `model` describes."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from gpuaug.errors import ConfigError
from gpuaug.tools import peers
from gpuaug.tools.request import Request

_convolution = partial(nn.Conv2d, kernel_size=3, padding=1, bias=False)


class _Block(nn.Module):
    """Basic residual block, pre-activation (arXiv:1603.05027), with half the height and width."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), _convolution(inputs, outputs, stride=2)
        self.norm2, self.conv2 = nn.BatchNorm2d(outputs), _convolution(outputs, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(x))
        return self.shortcut(y) + self.conv2(torch.relu(self.norm2(self.conv1(y))))


class SmallNet(nn.Sequential):
    """A residual network that maps float [B, 3, H, W] to logits [B, num_classes]. H and W must be at least 4.

    ``width`` is the number of channels of the first stage. Each of the two later stages doubles it.
    """

    def __init__(self, *, num_classes: int, width: int = 32) -> None:
        # patches of 4 x 4 pixels; larger first feature maps would take most of the training time at 224 x 224
        stem = nn.Conv2d(3, width, 4, stride=4, bias=False)
        stages = _Block(width, width), _Block(width, 2 * width), _Block(2 * width, 4 * width)
        norm, pool = nn.BatchNorm2d(4 * width), nn.AdaptiveAvgPool2d(1)
        super().__init__(stem, *stages, norm, nn.ReLU(), pool, nn.Flatten(), nn.Linear(4 * width, num_classes))


# arguments that would load weights, and arguments that the command sets itself
_REFUSED = ("pretrained", "weights", "weights_backbone", "checkpoint_path", "num_classes", "model_name", "name")


def build_model(request: Request, config: Any, *, num_classes: int, seed: int) -> nn.Module:
    """Build a model with random weights, which ``seed`` decides. torch's random state does not change.

    ``config`` is ``timm:NAME``, ``torchvision:NAME``, or the path of a class or function. It may also be a mapping with
    one of these as ``_target_``, and further arguments.
    """
    part = {"_target_": config} if isinstance(config, str) else config
    target = part.get("_target_") if isinstance(part, Mapping) else None
    if not isinstance(target, str) or not {".", ":"} & set(target):
        raise ConfigError(
            f"`model` must be timm:NAME, torchvision:NAME, or the path of a class or function. Found: {config!r}. Set "
            "for example `model=timm:resnet18`, or `model._target_=my_pkg.MyNet` and `--trust my_pkg.`"
        )
    library, is_named, name = target.partition(":")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if is_named:
            arguments = {key: value for key, value in part.items() if key != "_target_"}
            model = _named(library, name, arguments, num_classes=num_classes)
        else:
            part = OmegaConf.create({"model": part}).model
            model = request.build(part, trust=("gpuaug.tools.train.model.SmallNet",), num_classes=num_classes)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"`model._target_` must make a torch.nn.Module. Found: {target}, {type(model).__name__}.")
    return model


def _named(library: str, name: str, arguments: Mapping[str, Any], *, num_classes: int) -> Any:
    """Build a classifier of timm or torchvision by its name. Nothing is downloaded."""
    for key in _REFUSED:
        if key in arguments:
            raise ConfigError(
                f"`model.{key}` cannot be set: training begins with random weights, and the source decides the "
                "number of classes. Remove this argument."
            )
    if library == "timm":
        timm = peers.timm()
        known, create = timm.list_models(), timm.create_model  # by default with random weights, as torchvision's
    elif library == "torchvision":
        peers.torchvision()
        from torchvision import models

        known, create = models.list_models(module=models), models.get_model
    else:
        raise ConfigError(f"`model` can name models of timm and torchvision. Found: {library}:{name}.")
    if name not in known:
        near = ", ".join(f"{library}:{other}" for other in get_close_matches(name, known, n=3))
        raise ConfigError(
            f"{library} has no classifier {name!r}. "
            + (f"Did you mean {near}?" if near else f"It has {len(known)} others, such as {known[0]}.")
        )
    try:
        return create(name, num_classes=num_classes, **arguments)
    except Exception as error:  # a model may refuse its arguments in any way
        raise ConfigError(f"{library}:{name} refused its arguments: {type(error).__name__}: {error}") from error
