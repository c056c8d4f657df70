"""Random erasing as in timm: boxes are filled with normal noise or with the mean."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug import checks
from gpuaug.augment.normalize import Normalize
from gpuaug.augment.ops.codes import Code
from gpuaug.augment.parameters import Entry, Params, Prepared, RecipeOp, Size, Steps, Tensors, steps_of
from gpuaug.errors import ConfigError
from gpuaug.native.buffers import to_device
from gpuaug.random.keyed import Float, Int

_ATTEMPTS = 10  # per box, as in timm
_EACH = 2 * _ATTEMPTS + 2  # uniforms per box: areas, ratios, position


class RandomErasing(RecipeOp):
    """Fills random boxes of an image, as timm's ``RandomErasing``. Use it as the last entry of a recipe's ``ops``.

    timm fills with standard normal values ``n`` after the normalization. gpuaug fills with ``mean + std * n`` before
    the normalization, for the same result. Filled pixels may be outside 0..1. Each box has ten attempts to fit into
    the image.

    Args:
        p: probability that an image is changed.
        scale: range of the total area of an image's boxes, as a share of the image.
        ratio: range of height / width. Its logarithm is uniform.
        mode: ``pixel`` (normal noise per pixel) or ``const`` (the mean).
        count: largest number of boxes. An image gets 1 to ``count``, all equally likely.
        mean, std: one value per channel, or one for all, for pixels in 0..1; the same as in the recipe's ``normalize``.
        masks: new value of the mask inside the boxes, such as 255, which losses ignore. None: masks stay. Boxes and
            keypoints of objects stay, also inside an erased box, as in timm and torchvision.

    >>> import torch, gpuaug
    >>> recipe = gpuaug.Augment(ops={"erase": RandomErasing(p=1.0, mode="const", mean=(0.5, 0.5, 0.5))})
    >>> recipe(torch.zeros((1, 3, 32, 32), dtype=torch.uint8), seed=0).unique()
    tensor([0.0000, 0.5000])
    """

    _noise = 0  # number of the box that this module fills, because each box has its own noise

    def __init__(
        self,
        p: float = 0.25,
        scale: Sequence[float] = (0.02, 1 / 3),
        ratio: Sequence[float] = (0.3, 1 / 0.3),
        mode: str = "pixel",
        count: int = 1,
        mean: float | Sequence[float] = (0.485, 0.456, 0.406),
        std: float | Sequence[float] = (0.229, 0.224, 0.225),
        masks: int | None = None,
    ) -> None:
        super().__init__()
        self.p = float(checks.number("p", p, 0, 1))
        self.scale = checks.pair("scale", scale, None, 1)
        self.ratio = checks.pair("ratio", ratio, None)
        self.mode = checks.one_of("mode", mode, ("const", "pixel"))
        self.count: int = checks.whole_number("count", count, 1, 100)
        try:
            checked = Normalize(mean, std).values()
        except ConfigError as error:
            raise ConfigError(str(error).replace("augment.normalize.", "", 1)) from None
        self.mean, self.std = tuple(checked["mean"]), tuple(checked["std"])
        self.masks: int | None = checks.whole_number("masks", masks, 0, 2**31 - 1, optional=True)

    def forward(self, images: Tensor, params: dict[str, Tensor] | None = None) -> Tensor:
        """Fill one box in each image. A recipe calls this method with the boxes that the recipe draws.

        Args:
            images: float32 [B, C, H, W].
            params: ``xs``, ``ys``, ``widths`` and ``heights`` [B] in pixels. If ``mode`` is ``pixel``, also
                ``gaussian_noise`` [B, n]. Its first C * height * width values fill the box.

        Raises:
            ConfigError: ``params`` is None, as in a direct call.
        """
        if params is None:
            return super().forward(images)
        made, noise, channels = images.clone(), params.get("gaussian_noise"), images.shape[1]
        values = torch.tensor([self.mean, self.std], dtype=images.dtype, device="cpu")
        mean, std = to_device(values, images.device).view(2, -1, 1, 1)
        boxes = torch.stack([params[k] for k in ("xs", "ys", "widths", "heights")], dim=1).long().tolist()
        for row, (x, y, w, h) in enumerate(boxes):
            value = mean if noise is None else mean + std * noise[row, : channels * h * w].view(channels, h, w)
            made[row, :, y : y + h, x : x + w] = value
        return made

    def rectangles(self, params: Params, taken: NDArray[np.bool_]) -> NDArray[np.float64]:
        """The box of each sample, float64 [B, 4], (x1, y1, x2, y2) in pixel edges.

        ``params``: those of B samples. ``taken``: bool [B]; where it is False, the box is zeros.
        """
        x, y, width, height = (params[name].astype(np.float64) for name in ("xs", "ys", "widths", "heights"))
        return np.stack([x, y, x + width, y + height], axis=1) * taken[:, None]

    def prepare(self, name: str) -> Prepared:
        # one slot per box, so that each box has its own noise
        modules = [copy.deepcopy(self) for _ in range(self.count)]
        for box, module in enumerate(modules):
            module._noise = box
        rule = partial(_drawn, op=modules[0])
        slots = tuple((module,) for module in modules)
        return Prepared(name, self, slots, 2 + self.count * _EACH, rule, keyed=self.mode == "pixel")


def check_place(ops: Sequence[Prepared], normalize: Normalize | None) -> None:
    """Raise ConfigError if ``normalize`` has another mean or std, or if a later operation would clamp the noise."""
    wanted = None if normalize is None else {k: tuple(v) for k, v in normalize.values().items()}
    places = [place for op in ops for place in op.places(f"augment.ops.{op.name}")]
    for number, (key, leaf) in ((n, leaf) for n, place in enumerate(places, start=1) for leaf in place):
        if not isinstance(op := leaf.op, RandomErasing):
            continue
        found = {"mean": op.mean, "std": op.std}
        if wanted not in (None, found):
            raise ConfigError(
                f"`{key}` must have the mean and std of `augment.normalize`, {wanted}. Found: {found}. "
                f"Set `{key}.mean` and `.std` too."
            )
        later = [name for place in places[number:] for name, leaf in place if not isinstance(leaf.op, RandomErasing)]
        if op.mode != "const" and later:
            raise ConfigError(
                f"`{key}` must be after all other operations, because they clamp its noise to 0..1. Found: "
                f"`{later[0]}` can come later. Make `{key}` the last entry of `augment.ops`, or use mode=const."
            )


def _drawn(u: Float, size: Size, *, op: RandomErasing) -> tuple[Int, Any]:
    """Draw all boxes. ``u`` holds uniforms for ``p``, the number of boxes, and each box: see :func:`_box`."""
    count = np.floor(u[:, 1].astype(np.float64) * op.count) + 1
    choice = np.full((len(u), op.count), -1, dtype=np.int64)
    slots = []
    for slot in range(op.count):
        own = u[:, 2 + slot * _EACH : 2 + (slot + 1) * _EACH].astype(np.float64)
        params, found = _box(own, size, op, count)
        choice[(u[:, 0] < np.float32(op.p)) & (slot < count) & found, slot] = 0
        slots.append((params,))
    return choice, tuple(slots)


def _box(u: np.ndarray[Any, Any], size: Size, op: RandomErasing, count: np.ndarray[Any, Any]) -> tuple[Params, Any]:
    """Draw one box by timm's formulas; also return whether any attempt fits. ``u``: [B, _EACH]."""
    height, width = size
    (least, most), (low, high) = op.scale, (math.log(v) for v in op.ratio)
    area = (least + u[:, :_ATTEMPTS] * (most - least)) * (height * width) / count[:, None]
    ratio = np.exp(low + u[:, _ATTEMPTS : 2 * _ATTEMPTS] * (high - low))
    h, w = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
    fits = (w < width) & (h < height)
    at, found = (np.arange(len(u)), fits.argmax(axis=1)), fits.any(axis=1)
    h, w = np.where(found, h[at], 0), np.where(found, w[at], 0)
    y, x = (np.floor(u[:, 2 * _ATTEMPTS + k] * (n - m + 1)) for k, n, m in ((0, height, h), (1, width, w)))
    values = {"xs": x, "ys": y, "widths": w, "heights": h}
    return {k: v.astype(np.float32) for k, v in values.items()}, found


def _steps(op: RandomErasing) -> Steps | None:
    if len(op.mean) not in (1, 3):
        return None
    mean, std = (values * (3 // len(values)) for values in (op.mean, op.std))
    std, table = (std, lambda values: values["gaussian_noise"]) if op.mode == "pixel" else ((), None)
    return steps_of(Code.ERASE_NOISE, "xs", "ys", "widths", "heights", *mean, *std, table=table)


def _noise(op: RandomErasing, params: Tensors, keys: Tensor, size: Size, normal: Any, channels: int) -> Tensors:
    """Always draw the noise of the largest possible box, because the values depend on how many are drawn."""
    if op.mode != "pixel":  # a OneOf or SomeOf also gives keys to operations without noise
        return {}
    height, width = size
    # Rounding adds at most 1/2 to each side of a box. The sides are below those of the image, so the box grows by at
    # most (height + width) / 2 + 1/4 pixels.
    largest = min(height * width, int(op.scale[1] * height * width + (height + width) / 2) + 1)
    return {"gaussian_noise": normal(keys, channels * largest)}


def _takes(op: RandomErasing, channels: int) -> tuple[str, str] | None:
    values = len(op.mean)
    return None if values in (1, channels) else ("mean", f"images with {values} channels")


RandomErasing.entry = Entry("pixels", steps=_steps, fields=_noise, takes=_takes)
