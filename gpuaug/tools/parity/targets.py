"""Compares masks and boxes with torchvision's (masks also with Pillow's and Kornia's), for the crop and each operation.

Both sides get the same upright masks and boxes and the same random parameters. Boxes are compared before any rule drops
some of them. Differences of boxes are in pixels of the output.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from gpuaug.augment.ops import entry_of
from gpuaug.augment.ops.kornia_private import forget
from gpuaug.augment.parameters import Chosen, Prepared, tensors
from gpuaug.augment.recipe import Augment, MultiView, View
from gpuaug.augment.target_stage import Given, augment_targets
from gpuaug.batch import CropWindows
from gpuaug.loader.loader import Loader
from gpuaug.targets.batch import BatchTargets
from gpuaug.targets.rules import Boxes, Masks, Targets
from gpuaug.tools.parity.counterpart import Call, calls_of, why
from gpuaug.tools.peers import torchvision

TORCHVISION, PILLOW, KORNIA = "torchvision", "Pillow", "Kornia"
EPOCHS = 32  # how many epochs are searched for samples to which an operation is applied
EQUAL, NEAR = 0.01, 0.5  # pixels; float32 compared with float64
TIES = 0.002  # share of mask pixels: two pixels are equally near, or an edge falls on the other side in float32
MOVES = ("horizontal_flip", "vertical_flip", "rotate", "affine", "perspective", "elastic")  # torchvision's
FILLED = MOVES[2:]  # take a fill value
_OLD_NEAREST = (
    "torchvision resizes masks by `nearest`, which takes a pixel that is up to one pixel too far up and left; gpuaug "
    "takes the nearest pixel, as Pillow does"
)
_TIES = "where two pixels are equally near, rounding decides which one is taken"
_HULLS = (
    "after several operations that rotate or shear, torchvision's boxes are larger: it puts a box around the box of "
    "the previous operation; gpuaug puts one box around the moved corners"
)
_SAMPLED = "torchvision samples a mask in every operation, gpuaug once for all of them"


@dataclass(eq=False)
class TargetDifference:
    """One comparison of masks or boxes over all images."""

    name: str  # crop, an operation's key in the recipe, or everything
    kind: str  # masks or boxes
    reference: str
    view: str = ""
    why: str = ""
    images: int = 0
    count: int = 0  # pixels or boxes
    largest: float = 0.0  # of boxes: pixels between two edges
    mean: float = 0.0  # of boxes: pixels, of the largest difference of each box
    off: float = 0.0  # share of mask pixels that differ, or of boxes that differ by more than half a pixel
    worst: str = ""  # key of the sample with the largest difference

    @property
    def verdict(self) -> str:
        """``equal``, ``rounding``, ``close`` (half a pixel; one mask pixel in 100) or ``other``."""
        if self.kind == "boxes":
            return "equal" if self.largest <= EQUAL else "close" if self.largest <= NEAR else "other"
        limits = (("equal", 0.0), ("rounding", TIES), ("close", 0.01))
        return next((name for name, limit in limits if self.off <= limit), "other")

    @property
    def title(self) -> str:
        """Step, view and kind."""
        return ", ".join(filter(None, (self.name, self.view, self.kind)))

    def add(self, gaps: NDArray[Any], key: str) -> None:
        """Add one image: for each box its largest difference in pixels, or for each mask pixel whether it differs."""
        gaps = np.asarray(gaps, dtype=np.float64).reshape(-1)
        self.images += 1
        if not len(gaps):
            return
        part = len(gaps) / (self.count + len(gaps))
        share, largest = float((gaps > NEAR).mean()), float(gaps.max())
        if largest > self.largest or (self.kind == "masks" and share > self.off):
            self.worst = key
        self.count += len(gaps)
        self.off += (share - self.off) * part
        if self.kind == "boxes":
            self.largest, self.mean = max(largest, self.largest), self.mean + (float(gaps.mean()) - self.mean) * part

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {**vars(self), "verdict": self.verdict}


@dataclass(frozen=True, eq=False)
class _Placed:
    """Mask and boxes of one image."""

    mask: NDArray[np.int32] | None  # [h, w]
    boxes: NDArray[np.float32] | None  # [n, 4]
    numbers: NDArray[np.int64]  # [n], row of each box in the original
    size: tuple[int, int]


@dataclass(eq=False)
class _Step:
    """One crop, operation or pipeline, on both sides."""

    name: str
    recipe: Augment | MultiView
    differences: dict[tuple[str, str], TargetDifference] = field(default_factory=dict)

    def at(self, kind: str, reference: str, reason: str, view: str) -> TargetDifference:
        new = TargetDifference(self.name, kind, reference, view, reason)
        return self.differences.setdefault((kind, reference), new)


def compare(
    loader: Loader,
    view: View,
    samples: Sequence[tuple[int, str, BatchTargets]],
    *,
    epoch: int,
    note: Callable[[str], None],
) -> list[TargetDifference]:
    """Compare crop, operations and both together for one view.

    Args:
        loader: it has targets.
        view: one of its views.
        samples: number, key and upright targets of each sample.
        epoch: its random parameters are used. If an operation is not applied in it, later epochs are searched.
        note: called with what is not compared, and why.
    """
    assert loader.targets is not None
    asked = loader.targets
    rules = Targets(
        masks=None if asked.masks is None else Masks(fill=asked.masks.fill, dtype="int32"),
        boxes=None if asked.boxes is None else Boxes(min_size=0, min_area=0, crowd="keep"),
    )
    if asked.keypoints is not None:
        note("keypoints are not compared: torchvision's are up to a pixel off; ours move by the boxes' matrices")
    originals = [(index, key, _placed(targets, rules)) for index, key, targets in samples]
    crop = _Step("crop", _recipe(view, view.augment.replace(ops=None, copies=1, normalize=None)))
    everything = _Step("everything", _recipe(view, view.augment.replace(copies=1, normalize=None)))
    steps = [crop, *_operations(loader, view, crop, originals, rules, epoch=epoch, note=note), everything]
    for index, key, original in originals:
        for step in (crop, everything):
            _compare(step, loader, view, (index, key, original), rules, epoch=epoch, note=note)
    if getattr(view.augment.crop, "centres", False):
        note("boxes with their centre outside the crop are not compared: gpuaug drops them, as RandomIoUCrop says")
    return [d for step in steps for d in step.differences.values() if step is not everything or len(steps) > 2]


def table(differences: Sequence[TargetDifference]) -> list[str]:
    """The lines to print."""
    wide = max(24, *(len(d.title) for d in differences))
    lines = ["", "masks and boxes, from the same input; boxes in pixels:"]
    lines.append(f"  {'':{wide}}  {'against':11}  {'largest':>8} {'mean':>8} {'differ':>9}  verdict")
    for d in differences:
        sizes = f"{d.largest:8.3f} {d.mean:8.3f}" if d.kind == "boxes" else f"{'':8} {'':8}"
        verdict = "DIFFERENT" if d.verdict == "other" else d.verdict
        lines.append(f"  {d.title:{wide}}  {d.reference:11}  {sizes} {d.off:9.3%}  {verdict}")
    for reason in dict.fromkeys(d.why for d in differences if d.why):
        names = dict.fromkeys(d.title for d in differences if d.why == reason)
        lines += textwrap.wrap(f"{'; '.join(names)}: {reason}.", 112, initial_indent="    ", subsequent_indent="    ")
    return lines


def summary(differences: Sequence[TargetDifference]) -> str:
    """One sentence for each kind of target; "" without targets."""
    text = ""
    boxes = [d for d in differences if d.kind == "boxes" and d.count]
    masks = [d for d in differences if d.kind == "masks" and d.reference == TORCHVISION and d.count]
    if boxes:
        worst = max(boxes, key=lambda d: d.largest)
        text += f" Boxes differ from torchvision's by at most {worst.largest:.2f} pixels ({worst.name})."
    if masks:
        worst = max(masks, key=lambda d: d.off)
        text += f" Up to {worst.off:.2%} of the mask pixels differ from torchvision's ({worst.name})."
    return text


def _recipe(view: View, augment: Augment) -> Augment | MultiView:
    """A recipe that draws the random numbers of the view."""
    return MultiView(views={view.name: augment}) if view.name else augment


def _placed(targets: BatchTargets, rules: Targets) -> _Placed:
    mask = None if targets.masks is None or rules.masks is None else targets.masks[0].to(torch.int32).cpu().numpy()
    boxes = None if targets.boxes is None or rules.boxes is None else targets.boxes.cpu().numpy()
    return _Placed(mask, boxes, np.arange(0 if boxes is None else len(boxes)), targets.size)


def _operations(
    loader: Loader,
    view: View,
    crop: _Step,
    originals: Sequence[tuple[int, str, _Placed]],
    rules: Targets,
    *,
    epoch: int,
    note: Callable[[str], None],
) -> list[_Step]:
    """Compare each operation alone, on cropped targets."""
    moving = [op for op in view.augment.prepared if any(_moves(m) for modules in op.slots for m in modules)]
    if still := [f"`{op.name}`" for op in view.augment.prepared if op not in moving]:
        note(f"{', '.join(still)}: only pixel values change, so masks and boxes stay the same")
    cropped = []
    for index, key, original in originals:
        made, _, _ = _ours(crop.recipe, loader, index, original, rules, epoch=epoch)
        # numbered again, because each step looks up its boxes in its own input
        cropped.append((index, key, replace(made, numbers=np.arange(len(made.numbers)))))
    steps, applied = [], Counter[str]()
    for op in moving:
        augment = view.augment.replace(crop=None, ops={op.name: op.op}, copies=1, normalize=None)
        steps.append(_Step(op.name, _recipe(view, augment)))
        for now in range(epoch, epoch + EPOCHS):
            for sample in cropped:
                if applied[op.name] < len(cropped):
                    applied[op.name] += _compare(steps[-1], loader, view, sample, rules, epoch=now, note=note)
        if not applied[op.name]:
            note(f"`{op.name}` moved no target of these images in {EPOCHS} epochs")
    return steps


def _compare(
    step: _Step,
    loader: Loader,
    view: View,
    sample: tuple[int, str, _Placed],
    rules: Targets,
    *,
    epoch: int,
    note: Callable[[str], None],
) -> bool:
    """Compare a step on one sample. Return whether it changes the sample; for crops, True."""
    index, key, given = sample
    ours, window, chosen = _ours(step.recipe, loader, index, given, rules, epoch=epoch)
    (now,) = (each.augment for each in step.recipe.views)
    taken = [(op, c, _slots(op, c)) for op, c in zip(now.prepared, chosen, strict=True)]
    if now.crop is None and not any(slots for _, _, slots in taken):
        return False
    calls: list[Call] = []
    kinds: set[str] = set()
    for op, c, slots in taken:
        found, names = calls_of(op, c, slots, ours.size)
        if isinstance(found, str):
            note(f"masks and boxes: `{op.name}` is not compared, so neither is `everything`: {found}")
            return True
        calls += [call for call in found if call[0] in MOVES]
        kinds |= names
    fill = 0 if rules.masks is None else rules.masks.fill
    resized = bool((window.resized[0] != window.window[0, 2:]).any())
    reasons = [why(kinds & {"RandomPerspective"}, "float")]  # torchvision's perspective uses pixel centers
    several = sum(name in FILLED for name, _ in calls) > 1
    if given.boxes is not None and ours.boxes is not None:
        theirs, dropped = _boxes(given, window, calls)
        reason = "; ".join(filter(None, [*reasons, _HULLS * several]))
        kept = np.isin(given.numbers, ours.numbers)
        gaps = np.zeros(len(theirs))
        gaps[kept] = np.abs(theirs[kept] - ours.boxes).max(axis=1, initial=0)
        gaps[~kept] = np.where(dropped, 0, (theirs[:, 2:] - theirs[:, :2]).min(axis=1, initial=np.inf))[~kept]
        step.at("boxes", TORCHVISION, reason, view.name).add(
            gaps[kept] if getattr(now.crop, "centres", False) else gaps, key
        )
    if given.mask is not None and ours.mask is not None:
        reason = "; ".join(filter(None, [*reasons, _OLD_NEAREST * resized, _SAMPLED * several])) or _TIES
        differs = _mask(given.mask, window, calls, fill) != ours.mask
        step.at("masks", TORCHVISION, reason, view.name).add(differs, key)
        if now.crop is not None and not now.prepared:
            step.at("masks", PILLOW, _TIES, view.name).add(_by_pillow(given.mask, window, fill) != ours.mask, key)
        if now.crop is None and (by_kornia := _by_kornia(given.mask, taken, fill)) is not None:
            step.at("masks", KORNIA, _TIES, view.name).add(by_kornia != ours.mask, key)
    return True


def _ours(
    recipe: Augment | MultiView, loader: Loader, index: int, given: _Placed, rules: Targets, *, epoch: int
) -> tuple[_Placed, CropWindows, list[Chosen]]:
    """Masks and boxes after the recipe, its crop window, and the choices of its operations."""
    asked = Given(
        masks=None if given.mask is None else torch.from_numpy(given.mask)[None],
        boxes=None if given.boxes is None else [given.boxes],
        labels=None if given.boxes is None else [given.numbers],
        keypoints=None,
        targets=rules,
    )
    drawn = recipe.draw(seed=loader.seed, epoch=epoch, indices=[index])
    indices = np.array([index], dtype=np.int64)
    device = torch.device("cpu")
    (window,), (chosen,), (made,) = augment_targets(
        recipe, drawn, asked, size=given.size, indices=indices, device=device
    )
    boxes = None if made.boxes is None else made.boxes.numpy()
    mask = None if made.masks is None else made.masks[0].numpy()
    return _Placed(mask, boxes, made.labels.numpy(), window.size), window, chosen


def _moves(module: Any) -> bool:
    entry = entry_of(module)
    return entry is not None and entry.affects != "pixels"


def _slots(op: Prepared, chosen: Chosen) -> list[int]:
    """The slots whose chosen module moves pixels."""
    choices = chosen.choice[0].tolist()
    return [slot for slot, choice in enumerate(choices) if choice >= 0 and _moves(op.slots[slot][choice])]


# --- the other side


def _boxes(given: _Placed, window: CropWindows, calls: Sequence[Call]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Boxes [n, 4] by torchvision, in float64; and whether the crop or an operation left nothing of a box.

    torchvision keeps a box without area at the border, and the next rotation gives it an area again.
    """
    from torchvision.tv_tensors import BoundingBoxes

    assert given.boxes is not None
    boxes = torch.from_numpy(given.boxes.astype(np.float64))
    steps = [*_called(BoundingBoxes(boxes, format="XYXY", canvas_size=given.size), window, calls, {})]
    made = [np.asarray(step.as_subclass(torch.Tensor).numpy()) for step in steps]
    empty = [(step[:, 2:] <= step[:, :2]).any(axis=1) for step in made]
    return made[-1], np.logical_or.reduce(empty)


def _mask(mask: NDArray[np.int32], window: CropWindows, calls: Sequence[Call], fill: int) -> NDArray[Any]:
    """A mask by torchvision."""
    from torchvision.tv_tensors import Mask

    *_, x = _called(Mask(torch.from_numpy(mask)[None]), window, calls, {"fill": fill})
    return np.asarray(x.as_subclass(torch.Tensor)[0].numpy())


def _called(x: Any, window: CropWindows, calls: Sequence[Call], fill: dict[str, int]) -> Iterator[Any]:
    """Crop, resize and pad, then each operation, by torchvision's functions."""
    F = torchvision()[0].functional
    (h, w), (top, left), (H, W) = window.resized[0].tolist(), window.offset[0].tolist(), window.size
    x = F.crop(x, *window.window[0].tolist())
    if (h, w) != tuple(window.window[0, 2:]):
        x = F.resize(x, [h, w])
    x = F.pad(x, [max(left, 0), max(top, 0), max(W - left - w, 0), max(H - top - h, 0)], **fill)
    x = F.crop(x, max(-top, 0), max(-left, 0), H, W)
    yield x
    for name, given in calls:
        x = getattr(F, name)(x, **given, **(fill if name in FILLED else {}))
        yield x


def _by_pillow(mask: NDArray[np.int32], window: CropWindows, fill: int) -> NDArray[Any]:
    """Crop, resize and place a mask with Pillow's NEAREST."""
    top, left, height, width = window.window[0].tolist()
    (h, w), (y, x) = window.resized[0].tolist(), window.offset[0].tolist()
    part = Image.fromarray(np.ascontiguousarray(mask[top : top + height, left : left + width]))
    canvas = Image.new("I", window.size[::-1], fill)
    canvas.paste(part.resize((w, h), Image.Resampling.NEAREST), (x, y))
    return np.asarray(canvas)


def _by_kornia(
    mask: NDArray[np.int32], taken: Sequence[tuple[Prepared, Chosen, list[int]]], fill: int
) -> NDArray[Any] | None:
    """A mask by Kornia's own module with nearest sampling. None unless exactly one module with a matrix is applied."""
    from kornia.constants import Resample

    applied = [(op, c, slot) for op, c, slots in taken for slot in slots]
    if len(applied) != 1:
        return None
    ((op, c, slot),) = applied
    choice = int(c.choice[0, slot])
    module, params = op.slots[slot][choice], c.params[slot][choice]
    entry = entry_of(module)
    if entry is None or entry.matrix is None:
        return None
    values = {**tensors(params, np.array([0])), "batch_prob": torch.ones(1)}
    labels = torch.from_numpy(mask - fill).float()[None, None]  # Kornia fills with 0
    moved = module(labels, params=values, resample=Resample.NEAREST)
    forget(module)
    return np.asarray(moved[0, 0].round().to(torch.int32).numpy() + fill)
