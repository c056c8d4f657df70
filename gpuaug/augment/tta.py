"""Test-time augmentation: one prediction from several views of each image."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug import checks
from gpuaug.augment.inputs import is_channels_last
from gpuaug.augment.moves import check_carried
from gpuaug.augment.multi_view import MultiView
from gpuaug.augment.recipe import Augment, RecipeBase
from gpuaug.errors import ConfigError
from gpuaug.targets.batch import BatchTargets
from gpuaug.targets.rules import Boxes, Masks, Targets

DETECTION = {"boxes", "scores", "labels"}


def tta(
    model: Callable[[Tensor], Any], views: RecipeBase | Mapping[str, Augment], *, iou: float = 0.55
) -> Callable[..., Any]:
    """Average a model's predictions over several views of each image (test-time augmentation).

    Args:
        model: takes images [B, C, h, w] of a view, and returns one of these, or a dictionary of the first two:

            - floats [B, K], such as logits of classes: their average;
            - floats [B, C, h', w'] for the whole view, such as logits of a segmentation, also of a lower resolution.
              They are moved back to the pixels of the images, bilinear, and averaged over the views that cover a pixel.
              They are float32, and 0 where no view does;
            - a list of B dictionaries with boxes [n, 4] in pixels of the view, scores [n] and labels [n], as
              torchvision's detectors: boxes are moved back, and those of one object are averaged with their scores as
              weights (weighted boxes fusion, arXiv:1910.13302). They carry no gradient.
        views: a recipe, or a mapping of names to :class:`~gpuaug.Augment`, one for each view. Give operations ``p=1``:
            random ones are drawn with seed 0.
        iou: boxes of one label that overlap by more than this are one object.

    Returns:
        A function of ``images`` [B, C, H, W], as :class:`~gpuaug.Augment` takes them, also with its ``layout``,
        ``white``, ``nan`` and ``dtype``. It returns what the model returns, in the pixels of ``images``. It sets
        neither ``eval()`` nor ``no_grad``.

    Raises:
        ConfigError: wrong arguments, an operation that moves pixels without a matrix, or another output of the model.

    >>> import gpuaug, kornia.augmentation as K
    >>> flip = gpuaug.Augment(ops={"flip": K.RandomHorizontalFlip(p=1.0)})
    >>> predict = tta(lambda images: images[:, :1], {"plain": gpuaug.Augment(), "flip": flip})
    >>> predict(torch.tensor([[[[0.0, 0.2, 0.4, 1.0]]]]))
    tensor([[[[0.0000, 0.2000, 0.4000, 1.0000]]]])
    """
    if not callable(model):
        raise ConfigError(f"`model` must be a module or a function. Found: {model!r:.100}.")
    checks.number("iou", iou, 0, 1)
    recipe = MultiView(views=views) if isinstance(views, Mapping) else views
    if not isinstance(recipe, RecipeBase):
        raise ConfigError(
            "`views` must be a gpuaug.Augment, a gpuaug.MultiView, or a mapping of names to gpuaug.Augment. "
            f"Found: {type(recipe).__name__}. Of a gpuaug.Progressive, take the recipe of an epoch: .at(0)."
        )

    for view in recipe.views:
        check_carried(view.augment.prepared, ("matrices",), path=f"views.{view.name}.ops" if view.name else "ops")

    def predict(images: Tensor, **reading: Any) -> Any:
        last = images.ndim == 4 and is_channels_last(images, reading.get("layout"))
        empty = [torch.zeros(0, 4)] * len(images)  # boxes ask for the matrices, masks for what a view covers
        whole = torch.zeros(len(images), *images.shape[1:3] if last else images.shape[2:4], dtype=torch.uint8)
        rules = Targets(boxes=Boxes(), masks=Masks())
        made, moved = recipe(images, boxes=empty, masks=whole, targets=rules, seed=0, **reading)
        made, moved = (made, moved) if isinstance(made, list) else ([made], [moved])
        return _average([model(view) for view in made], moved, iou)

    return predict


def _average(outputs: list[Any], moved: Sequence[BatchTargets], iou: float) -> Any:
    first = outputs[0]
    if isinstance(first, Mapping):
        return {name: _average([output[name] for output in outputs], moved, iou) for name in first}
    if isinstance(first, Tensor) and first.is_floating_point() and first.ndim == 2:
        return torch.stack(outputs).mean(0)
    if isinstance(first, Tensor) and first.is_floating_point() and first.ndim == 4:
        total = count = torch.zeros((), device=first.device)
        for output, view in zip(outputs, moved, strict=True):
            restored = view.restore(logits=output, masks=view.masks)
            covered = torch.stack([image["masks"] == 0 for image in restored])[:, None]
            total = total + torch.where(covered, torch.stack([x["logits"] for x in restored]), 0.0)
            count = count + covered
        return total / count.clamp(min=1)
    if isinstance(first, list) and all(isinstance(image, Mapping) and image.keys() == DETECTION for image in first):
        for image in (image for output in outputs for image in output):
            if len({len(value) for value in image.values()}) > 1:
                counts = ", ".join(f"{len(value)} {name}" for name, value in image.items())
                raise ConfigError(f"`boxes`, `scores` and `labels` of an image must be equally many. Found: {counts}.")
        boxes = [
            [image["boxes"] for image in view.restore(boxes=[image["boxes"] for image in output])]
            for output, view in zip(outputs, moved, strict=True)
        ]
        return [
            fused(
                torch.cat([of_view[row] for of_view in boxes]),
                torch.cat([output[row]["scores"] for output in outputs]),
                torch.cat([output[row]["labels"] for output in outputs]),
                views=len(outputs),
                iou=iou,
            )
            for row in range(len(first))
        ]
    found = f"{list(first.shape)} of {first.dtype}" if isinstance(first, Tensor) else f"{type(first).__name__}"
    if isinstance(first, list) and first and isinstance(first[0], Mapping):
        found = f"a list of dictionaries with {', '.join(map(str, first[0]))}"
    raise ConfigError(
        "the model must return floats [B, K] or [B, C, h, w], a dictionary of them, or for each image a dictionary "
        f"with boxes, scores and labels. Found: {found}. Give a function that returns one of these."
    )


def fused(boxes: Tensor, scores: Tensor, labels: Tensor, *, views: int, iou: float) -> dict[str, Tensor]:
    """Weighted boxes fusion of one image, arXiv:1910.13302.

    Boxes in the order of their scores join the object of their label that they overlap most, if by more than ``iou``.
    The score of an object is the average of its scores, less if there are fewer of them than ``views``. Boxes and
    scores that are not finite are left out.
    """
    corners, weights = (x.detach().cpu().double().numpy() for x in (boxes, scores))
    good = np.flatnonzero(np.isfinite(corners).all(axis=1) & np.isfinite(weights))
    order = good[np.argsort(-weights[good], kind="stable")]
    corners, weights, kinds = corners[order], weights[order], labels.detach().cpu().numpy()[order]
    members = list[list[int]]()
    objects, label = np.empty((len(corners), 4)), np.empty(len(corners), dtype=np.int64)
    for n in range(len(corners)):
        overlap = np.where(label[: len(members)] == kinds[n], _iou(corners[n], objects[: len(members)]), 0)
        place = int(overlap.argmax()) if len(members) and overlap.max() > iou else len(members)
        if place == len(members):
            members.append([])
            label[place] = kinds[n]
        members[place].append(n)
        own = members[place]
        weight = weights[own] if weights[own].sum() > 0 else np.ones(len(own))
        objects[place] = np.average(corners[own], axis=0, weights=weight)
    score = np.array([weights[own].mean() * min(len(own), views) / views for own in members])
    rank = np.argsort(-score, kind="stable")
    chosen = torch.from_numpy(order[np.array([members[k][0] for k in rank], dtype=np.int64)])
    return {
        "boxes": torch.from_numpy(objects[rank]).to(boxes),
        "scores": torch.from_numpy(score[rank]).to(scores),
        "labels": labels[chosen.to(labels.device)],
    }


def _iou(box: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.float64]:
    """Intersection over union of ``box`` [4] with ``others`` [n, 4]; 0 for two empty boxes."""
    sides = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    common = sides.clip(0).prod(axis=1)
    union = (box[2:] - box[:2]).prod() + (others[:, 2:] - others[:, :2]).prod(axis=1) - common
    return np.divide(common, union, out=np.zeros_like(common), where=union > 0)
