"""The contestants of bench/targets.py, each in a process of its own: ours and the peers, with masks or boxes.

python bench/target_contestants.py SPEC        # started by bench/targets.py; one epoch for each line on standard input
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from contestants import MEAN, STD, CannotRunError, Run, Spec, serve, torchvision_there

SEG, DET, YOLO, WARP = "seg_torchvision", "det_rtdetr", "det_yolo", "flip_affine_jitter"
RECIPES = (SEG, DET, YOLO, WARP)
SIZE = {SEG: 480, DET: 640, YOLO: 640, WARP: 512}
JITTER = (0.3, 0.3, 0.3, 0.1)
DEGREES, SHIFT, SCALE = 15.0, 0.1, (0.8, 1.2)
IGNORE = 255
LABELS = 4  # of the masks of bench/scenes.py, without IGNORE

Facts = dict[str, float]


@dataclass
class Sums:
    """Statistics of an epoch's batches, to compare the work of the contestants."""

    images: int = 0
    totals: dict[str, float] = field(default_factory=dict)

    def add(self, images: Any, masks: Any = None, boxes: Any = None) -> None:
        """Images [B, 3, H, W], masks [B, H, W], boxes [N, 4] as (x1, y1, x2, y2) in pixels."""
        import torch

        count = len(images)
        found = {"mean": images.float().mean(), "deviation": images.float().std()}
        if masks is not None:
            shares = torch.bincount(masks.reshape(-1).long(), minlength=IGNORE + 1) / masks.numel()
            found |= {"background": shares[0], "things": shares[1:LABELS].sum(), "ignored": shares[IGNORE]}
            found["other labels"] = shares[LABELS:IGNORE].sum()
        if boxes is not None:
            height, width = images.shape[2:]
            areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) / (height * width)
            found |= {"boxes": len(boxes) / count, "covered by boxes": areas.sum() / count}
        self.images += count
        for name, value in found.items():
            self.totals[name] = self.totals.get(name, 0.0) + count * float(value)

    @property
    def facts(self) -> Facts:
        return {name: total / self.images for name, total in self.totals.items()}


def _run(batches: Callable[[], Any]) -> Run:
    """Run epochs of ``(images, masks or None, boxes or None)``. The first is a warm-up that fills the statistics."""
    sums: list[Sums] = []

    def run() -> int:
        first, seen = not sums, 0
        if first:
            sums.append(Sums())
        for images, masks, boxes in batches():
            seen += len(images)
            if first:
                sums[0].add(images, masks, boxes() if callable(boxes) else boxes)
        run.facts = sums[0].facts  # type: ignore[attr-defined]
        return seen

    return run


# --- ours


def recipe(name: str) -> Any:
    """Our recipe: a shipped one, or the one of this benchmark."""
    import kornia.augmentation as K

    import gpuaug

    if name != WARP:
        one_size = ["~augment.sizes"] * (name == DET)  # the others have one
        return gpuaug.build(gpuaug.compose("train", [f"augment={name}", "source.root=.", *one_size]).augment)
    flip = K.RandomHorizontalFlip(p=0.5)
    affine = K.RandomAffine(DEGREES, translate=(SHIFT, SHIFT), scale=SCALE, p=1.0)
    ops = {"flip": flip, "affine": affine, "jitter": K.ColorJitter(*JITTER, p=1.0)}
    return gpuaug.Augment(crop=gpuaug.Resize(SIZE[WARP]), ops=ops, normalize=gpuaug.Normalize(MEAN, STD))


def source(root: str, kinds: tuple[str, ...]) -> Any:
    """The scenes with masks, or with boxes and keypoints."""
    import gpuaug

    if "masks" in kinds:
        return gpuaug.MaskFolderSource(root)
    from gpuaug.source.coco import CocoSource

    return CocoSource(f"{root}/images", annotations=f"{root}/instances.json", split=None)


def loader(spec: Spec, kinds: tuple[str, ...], augment: Any = None) -> Any:
    """Our loader. Without ``kinds``, the same images without targets."""
    import torch

    import gpuaug

    limits = {"min_size": 2, "min_visibility": 0.1} if spec.recipe == YOLO else {}
    rules = {"masks": gpuaug.Masks, "boxes": partial(gpuaug.Boxes, **limits), "keypoints": gpuaug.Keypoints}
    return gpuaug.Loader(
        source(spec.root, kinds),
        augment=augment or recipe(spec.recipe),
        targets=gpuaug.Targets(**{kind: rules[kind]() for kind in kinds}) if kinds else None,
        batch_size=spec.batch,
        num_workers=spec.workers,
        decode=gpuaug.Decode(num_threads=spec.threads),
        device=spec.device,
        dtype=getattr(torch, spec.dtype),
    )


def ours(spec: Spec) -> Run:
    made = loader(spec, ("boxes",) if spec.recipe in (DET, YOLO) else ("masks",))

    def batches() -> Any:
        for batch in made:
            yield batch.images, batch.targets.masks, batch.targets.boxes

    return _run(batches)


def images_only(spec: Spec) -> Run:
    """Our loader with the same crops, without targets."""
    if spec.recipe in (DET, YOLO):
        raise CannotRunError("its crop or its mosaic is for boxes")
    made = loader(spec, ())
    return _run(lambda: ((batch.images, None, None) for batch in made))


# --- peers


class Scenes:
    """A dataset for a DataLoader: a function transforms an image with its mask, or its boxes and labels."""

    def __init__(self, root: str, transform: Callable[[str, str, Any], Any]) -> None:
        self.transform = transform
        self.images = sorted(str(p) for p in Path(root, "images").glob("*.jpg"))
        self.masks = sorted(str(p) for p in Path(root, "masks").glob("*.png"))
        objects = json.loads(Path(root, "instances.json").read_text())
        numbers = {image["id"]: k for k, image in enumerate(objects["images"])}
        found: list[list[list[float]]] = [[] for _ in self.images]
        for each in objects["annotations"]:
            x, y, w, h = each["bbox"]
            found[numbers[each["image_id"]]].append([x, y, x + w, y + h, each["category_id"]])
        self.objects = [np.array(each, dtype=np.float32).reshape(-1, 5) for each in found]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.images[index], self.masks[index], self.objects[index])


def _data_loader(spec: Spec, transform: Callable[[str, str, Any], Any], collate: Any = None) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(
        Scenes(spec.root, transform),  # type: ignore[arg-type]
        batch_size=spec.batch, shuffle=True, num_workers=spec.workers, persistent_workers=True, collate_fn=collate,
    )  # fmt: skip


def torchvision(spec: Spec) -> Run:
    """v2 on tensors: the `tv_tensor` backend of torchvision's reference scripts."""
    return _torchvision(spec, tensors=True)


def torchvision_pil(spec: Spec) -> Run:
    """v2 on PIL images, converted to tensors at the end: the default of torchvision's reference scripts."""
    return _torchvision(spec, tensors=False)


def _torchvision(spec: Spec, *, tensors: bool) -> Run:
    torchvision_there()
    import torch
    from PIL import Image
    from torchvision import tv_tensors
    from torchvision.transforms import v2 as T

    size = SIZE[spec.recipe]
    first, last = ([T.ToImage()], []) if tensors else ([], [T.ToImage()])

    def opened(path: str) -> Any:
        with Image.open(path) as file:
            return file.convert("RGB")

    if spec.recipe == YOLO:
        return _yolo_by_torchvision(spec)
    if spec.recipe == DET:  # RT-DETR's list: configs/rtdetrv2/include/dataloader.yml
        iou = T.RandomApply([T.RandomIoUCrop()], p=0.8)
        steps = [T.RandomPhotometricDistort(p=0.5), T.RandomZoomOut(fill=0), iou]
        steps += [T.SanitizeBoundingBoxes(min_size=1), T.RandomHorizontalFlip(), T.Resize([size, size])]
        steps += [T.SanitizeBoundingBoxes(min_size=1), *last, T.ToDtype(torch.float32, scale=True)]
        composed = T.Compose([*first, *steps])

        def detection(image: str, mask: str, objects: Any) -> Any:
            read = opened(image)
            boxes = tv_tensors.BoundingBoxes(objects[:, :4], format="XYXY", canvas_size=(read.height, read.width))
            return composed(read, {"boxes": boxes, "labels": torch.from_numpy(objects[:, 4]).long()})

        def collate(items: Any) -> Any:
            return torch.stack([image for image, _ in items]), [target for _, target in items]

        batches: Any = _data_loader(spec, detection, collate)
        return _run(lambda: ((x, None, lambda t=t: torch.cat([each["boxes"] for each in t])) for x, t in batches))

    normalize = T.Normalize(MEAN, STD)
    convert = T.ToDtype({tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None}, scale=True)
    pad: dict[Any, Any] = {tv_tensors.Mask: IGNORE, "others": 0}
    if spec.recipe == SEG:  # references/segmentation/presets.py and transforms.py
        steps = [T.RandomResize(min_size=260, max_size=1040), T.RandomHorizontalFlip()]
        steps += [T.RandomCrop(size, pad_if_needed=True, fill=pad)]
    else:
        affine = T.RandomAffine(DEGREES, (SHIFT, SHIFT), SCALE, interpolation=T.InterpolationMode.BILINEAR, fill=pad)
        steps = [T.Resize([size, size]), T.RandomHorizontalFlip(), affine, T.ColorJitter(*JITTER)]
    composed = T.Compose([*first, *steps, *last, convert, normalize, T.ToPureTensor()])

    def segmentation(image: str, mask: str, objects: Any) -> Any:
        with Image.open(mask) as file:
            labels = tv_tensors.Mask(torch.from_numpy(np.array(file)))
        return composed(opened(image), labels)

    batches = _data_loader(spec, segmentation)
    return _run(lambda: ((x, masks, None) for x, masks in batches))


def albumentations(spec: Spec) -> Run:
    """albumentations as in its documentation: OpenCV reads, Compose transforms, ToTensorV2 converts."""
    import albumentations as A
    import cv2
    import torch
    from albumentations.pytorch import ToTensorV2
    from PIL import Image

    size = SIZE[spec.recipe]
    if spec.recipe in (DET, YOLO):
        raise CannotRunError("it has no IoU crop as torchvision has it, and no such mosaic")
    cv2.setNumThreads(0)
    if spec.recipe == SEG:
        # torchvision draws any whole side from 260 to 1040, here it is every 20th; outside the image the mask is 255
        steps: list[Any] = [
            A.SmallestMaxSize(max_size=list(range(260, 1041, 20)), area_for_downscale="image"),
            A.HorizontalFlip(), A.PadIfNeeded(size, size, position="top_left", fill_mask=IGNORE),
            A.RandomCrop(size, size),
        ]  # fmt: skip
    else:
        shift, turn = (-SHIFT, SHIFT), (-DEGREES, DEGREES)
        steps = [
            A.Resize(size, size), A.HorizontalFlip(),
            A.Affine(scale=SCALE, translate_percent=shift, rotate=turn, keep_ratio=True, fill_mask=IGNORE, p=1.0),
            A.ColorJitter(*((1 - x, 1 + x) for x in JITTER[:3]), (-JITTER[3], JITTER[3]), p=1.0),
        ]  # fmt: skip
    composed = A.Compose([*steps, A.Normalize(MEAN, STD), ToTensorV2()])

    def segmentation(image: str, mask: str, objects: Any) -> Any:
        pixels = cv2.cvtColor(cv2.imread(image), cv2.COLOR_BGR2RGB)
        with Image.open(mask) as file:  # OpenCV would give the palette's colours
            done = composed(image=pixels, mask=np.array(file))
        return done["image"], done["mask"]

    batches = _data_loader(spec, segmentation)
    return _run(lambda: ((x, masks.long(), None) for x, masks in batches if isinstance(x, torch.Tensor)))


def kornia(spec: Spec) -> Run:
    """Kornia's AugmentationSequential on whole batches that our loader reads, decodes and resizes."""
    import kornia.augmentation as K
    import torch
    from kornia.constants import DataKey, Resample, SamplePadding

    import gpuaug

    if spec.recipe != WARP:
        raise CannotRunError("its crops have one size for a batch")
    made = loader(spec, ("masks",), gpuaug.Augment(crop=gpuaug.Resize(SIZE[WARP])))
    beside = {"resample": Resample.NEAREST, "padding_mode": SamplePadding.FILL, "fill_value": torch.tensor([255.0])}
    sequence = K.AugmentationSequential(
        K.RandomHorizontalFlip(p=0.5), K.RandomAffine(DEGREES, translate=(SHIFT, SHIFT), scale=SCALE, p=1.0),
        K.ColorJitter(*JITTER, p=1.0), K.Normalize(torch.tensor(MEAN), torch.tensor(STD)),
        data_keys=[DataKey.INPUT, DataKey.MASK], extra_args={DataKey.MASK: beside},
    )  # fmt: skip

    def batches() -> Any:
        for images, masks in made:
            with torch.no_grad():
                done, moved = sequence(images, masks[:, None].float())
            yield done, moved[:, 0].long(), None

    return _run(batches)


class Mosaics:
    """det_yolo for one sample by torchvision v2 and numpy: a mosaic with images of a buffer, as Ultralytics keeps one.

    The worker that runs it has the buffer, so each image is decoded once.
    """

    def __init__(self, size: int, buffer: int) -> None:
        self.size, self.buffer = size, buffer
        self.held: list[tuple[Any, Any]] = []  # images uint8 [h, w, 3] whose longer side is `size`, and their objects

    def __call__(self, image: str, mask: str, objects: Any) -> Any:
        import torch
        from PIL import Image
        from torchvision.transforms.v2 import functional as F

        rng, size = np.random.default_rng(torch.randint(2**62, ()).item()), self.size
        with Image.open(image) as file:
            read = file.convert("RGB")
        factor = size / max(read.size)
        sides = [max(1, round(side * factor)) for side in read.size]
        pixels = np.asarray(read.resize(sides, Image.Resampling.BILINEAR))
        self.held.append((pixels, np.concatenate([objects[:, :4] * factor, objects[:, 4:]], axis=1)))
        del self.held[: -self.buffer]
        tiles = [self.held[-1], *(self.held[k] for k in rng.integers(0, len(self.held), 3))]
        canvas, found = np.full((2 * size, 2 * size, 3), 114, dtype=np.uint8), []
        cx, cy = (int(side) for side in rng.uniform(size / 2, 3 * size / 2, 2))
        for k, (tile, boxes) in enumerate(tiles):
            h, w = tile.shape[:2]
            x, y = (cx if k % 2 else cx - w), (cy if k > 1 else cy - h)
            x1, y1, x2, y2 = max(x, 0), max(y, 0), min(x + w, 2 * size), min(y + h, 2 * size)
            canvas[y1:y2, x1:x2] = tile[y1 - y : y2 - y, x1 - x : x2 - x]
            moved = boxes.copy()
            moved[:, :4] += (x, y, x, y)
            found.append(np.concatenate([moved[:, :4].clip(0, 2 * size), moved[:, 4:]], axis=1))
        scale, shift = rng.uniform(0.5, 1.5), rng.uniform(-0.1, 0.1, 2) * size
        whole = F.to_image(canvas)
        turned = F.affine(whole, 0.0, shift.tolist(), scale, [0.0, 0.0], F.InterpolationMode.BILINEAR, fill=114)
        output = F.center_crop(turned, [size, size])
        corners = (np.concatenate(found)[:, :4].reshape(-1, 2, 2) - size) * scale + shift + size / 2
        boxes = corners.clip(0, size).reshape(-1, 4)
        wide = (boxes[:, 2:] - boxes[:, :2]).min(axis=1, initial=size) > 2
        whole_area = (corners[:, 1] - corners[:, 0]).prod(axis=1)
        boxes = boxes[wide & ((boxes[:, 2:] - boxes[:, :2]).prod(axis=1) > 0.1 * whole_area)]
        hue, saturation, value = rng.uniform(-1, 1, 3) * (0.015, 0.7, 0.4)
        output = F.adjust_brightness(F.adjust_saturation(F.adjust_hue(output, hue), 1 + saturation), 1 + value)
        if rng.random() < 0.5:
            output = F.horizontal_flip(output)
            boxes[:, [0, 2]] = size - boxes[:, [2, 0]]
        return F.to_dtype(output, torch.float32, scale=True), torch.from_numpy(boxes)


def _yolo_by_torchvision(spec: Spec) -> Run:
    import torch

    def collate(items: Any) -> Any:
        return torch.stack([image for image, _ in items]), torch.cat([boxes for _, boxes in items])

    batches = _data_loader(spec, Mosaics(SIZE[YOLO], 8 * spec.batch), collate)
    return _run(lambda: ((x, None, boxes) for x, boxes in batches))


def ultralytics_loader(spec: Spec) -> Any:
    """Ultralytics' own dataset and loader with its default settings. Its iterator has no end."""
    torchvision_there()
    from PIL import Image
    from ultralytics.cfg import get_cfg
    from ultralytics.data.build import build_dataloader, build_yolo_dataset

    made = Scenes(spec.root, lambda *item: item)
    labels = Path(spec.root, "labels")
    labels.mkdir(exist_ok=True)
    for path, _, objects in (made[k] for k in range(len(made))):
        with Image.open(path) as file:
            sides = np.array(file.size * 2)
        lines = []
        for *box, _ in objects.tolist():
            x1, y1, x2, y2 = np.array(box) / sides
            lines.append(f"0 {(x1 + x2) / 2} {(y1 + y2) / 2} {x2 - x1} {y2 - y1}")
        (labels / f"{Path(path).stem}.txt").write_text("\n".join(lines))
    settings = get_cfg(overrides={"imgsz": SIZE[YOLO], "task": "detect", "workers": spec.workers, "seed": 0})
    names = {"names": {0: "thing"}, "nc": 1, "channels": 3}
    dataset = build_yolo_dataset(settings, str(Path(spec.root, "images")), spec.batch, names, mode="train", stride=32)
    return build_dataloader(dataset, spec.batch, spec.workers, shuffle=True, rank=-1)


def ultralytics(spec: Spec) -> Run:
    """Ultralytics' loader, and its conversion to floats."""
    if spec.recipe != YOLO:
        raise CannotRunError("it trains YOLO")
    batches = ultralytics_loader(spec)
    import torch

    def epoch() -> Any:
        for batch in itertools.islice(batches, len(batches)):
            centre, extent = SIZE[YOLO] * batch["bboxes"][:, :2], SIZE[YOLO] * batch["bboxes"][:, 2:]
            yield batch["img"].float() / 255, None, torch.cat([centre - extent / 2, centre + extent / 2], dim=1)

    return _run(epoch)


CONTESTANTS = {
    f.__name__: f for f in (ours, images_only, torchvision, torchvision_pil, albumentations, kornia, ultralytics)
}


if __name__ == "__main__":
    serve(Spec(**json.loads(sys.argv[1])), CONTESTANTS)
