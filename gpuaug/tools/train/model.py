"""The small network that `gpuaug train` uses by default."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

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
