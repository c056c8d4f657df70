"""Targets against other implementations, fed with the same parameters: torchvision, Kornia and Pillow."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from kornia.augmentation.container.params import ParamItem
from kornia.constants import DataKey, Resample
from pictures import encode, png
from PIL import Image
from test_moves import ELASTIC
from truth import CROPS, SIZES, batch_of, gaussian, measured, targets_loader

import gpuaug
from gpuaug.augment.parameters import tensors

SIZE = (90, 122)  # (height, width); an odd difference would make every pixel of a quarter turn a tie
COUNT = 12  # images
RULES = gpuaug.Targets(
    masks=gpuaug.Masks(),
    boxes=gpuaug.Boxes(min_size=0, min_area=0),
    keypoints=gpuaug.Keypoints(pixel_centers=False),
)
OPS: dict[str, Any] = {
    "hflip": lambda: K.RandomHorizontalFlip(p=1.0),
    "vflip": lambda: K.RandomVerticalFlip(p=1.0),
    "affine": lambda: K.RandomAffine(50.0, (0.2, 0.1), (0.6, 1.5), (-15.0, 15.0, -9.0, 9.0), p=1.0),
    "translate": lambda: K.RandomTranslate((-0.3, 0.3), (-0.2, 0.2), p=1.0),
    "shear": lambda: K.RandomShear((-20.0, 20.0, -15.0, 15.0), p=1.0),
    "rotation": lambda: K.RandomRotation(180.0, p=1.0),
    "rotation 90": lambda: K.RandomRotation90((-2, 3), p=1.0),
    "perspective": lambda: K.RandomPerspective(0.4, p=1.0),
}


@pytest.fixture(scope="module")
def functional(v2: ModuleType) -> Any:
    """``torchvision.transforms.v2.functional``."""
    return v2.functional


def given(seed: int, size: tuple[int, int] = SIZE) -> dict[str, Any]:
    """Masks of noise, and boxes and points that may reach beyond the image."""
    rng = np.random.default_rng(seed)
    corners = np.sort(rng.uniform(-0.1, 1.1, (COUNT, 5, 2, 2)), axis=2) * size[::-1]
    points = rng.uniform(0, 1, (COUNT, 5, 3, 2)) * size[::-1]
    return {
        "masks": torch.from_numpy(rng.integers(0, 255, (COUNT, *size)).astype(np.uint8)),
        "boxes": list(corners.reshape(COUNT, 5, 4).astype(np.float32).clip(0, size[::-1] * 2)),
        "labels": [np.arange(5) + 5 * k for k in range(COUNT)],
        "keypoints": list(np.concatenate([points, np.full((COUNT, 5, 3, 1), 2.0)], axis=3).astype(np.float32)),
    }


def moved(ops: dict[str, Any], what: dict[str, Any], *, crop: Any = None, seed: int = 0) -> tuple[Any, list[Any], Any]:
    """Our targets, the choices of each operation, and the windows."""
    recipe = gpuaug.Augment(crop=crop, ops=ops)
    size = tuple(what["masks"].shape[1:])
    images = torch.zeros((len(what["masks"]), 3, *size), dtype=torch.uint8)
    _, targets = recipe(images, **what, targets=RULES, seed=seed)
    drawn = recipe.draw(seed=seed, epoch=0, indices=np.arange(len(images)))
    objects = None
    if "boxes" in getattr(crop, "needs", ()):
        rows = [np.full(len(b), k) for k, b in enumerate(what["boxes"])]
        objects = type("Table", (), {"boxes": np.concatenate(what["boxes"]), "sample": np.concatenate(rows)})
    sides = np.full((2, len(images)), np.array(size)[:, None])
    (windows,) = recipe.windows(drawn, *sides, objects=objects, masks=list(what["masks"].numpy()))
    return targets, recipe.choose(drawn, [windows.size])[0], windows


def theirs(F: Any, name: str, params: dict[str, np.ndarray], row: int, thing: Any, **more: Any) -> Any:
    """torchvision's functional for one operation of :data:`OPS`; ``more`` is for masks."""
    p = {k: v[row].astype(np.float64).tolist() for k, v in params.items()}
    if name in ("hflip", "vflip"):
        return F.horizontal_flip(thing) if name == "hflip" else F.vertical_flip(thing)
    if name == "perspective":  # corners as pixel indices to edges
        ends = ([[x + 0.5, y + 0.5] for x, y in p[key]] for key in ("start_points", "end_points"))
        return F.perspective(thing, *ends, **more)
    if name.startswith("rotation"):
        angle = p["degrees"] if name == "rotation" else 90 * round(p["times"])
        return F.rotate(thing, angle, **more)
    settings = {"angle": p.get("angle", 0.0), "scale": p.get("scale", [1.0])[0]}
    shift = p.get("translations", [p.get("translate_x", 0.0), p.get("translate_y", 0.0)])
    return F.affine(thing, translate=shift, shear=[p.get("shear_x", 0.0), p.get("shear_y", 0.0)], **settings, **more)


def boxes_of(F: Any, boxes: np.ndarray, size: tuple[int, int]) -> Any:
    from torchvision import tv_tensors

    return F.clamp_bounding_boxes(
        tv_tensors.BoundingBoxes(torch.from_numpy(boxes.astype(np.float64)), format="XYXY", canvas_size=size)
    )


def check_boxes(targets: Any, row: int, expected: np.ndarray, least: float = 1e-3, *, turned: bool = False) -> int:
    """Ours of a row against theirs, one row per object; objects without any area are left out by us.

    ``turned``: a box that torchvision has clipped is not smaller than ours. torchvision clips the hull of the moved
    corners; we clip the polygon, and its hull is smaller or equal.
    """
    own = {int(k) % 5: box for k, box in zip(targets.labels, targets.boxes.numpy(), strict=True) if int(k) // 5 == row}
    size = targets.size[::-1]
    for k, box in enumerate(expected):
        if turned and ((box[:2] <= 1e-4).any() or (box[2:] >= np.array(size) - 1e-4).any()):
            outward = (own.get(k, box) - box) * [1, 1, -1, -1]
            assert (outward >= -1e-4).all()
            continue
        if (box[2:] - box[:2]).min() > least:
            assert k in own, f"object {k} of row {row} is missing: {box}"
        if k in own:
            np.testing.assert_allclose(own[k], box, atol=1e-4)
    return len(own)


# --- 3: torchvision


@pytest.mark.parametrize("name", OPS)
def test_boxes_and_masks_are_torchvisions(name: str, functional: ModuleType) -> None:
    F, seen, differing = functional, 0, []
    for seed in range(3):
        what = given(seed)
        targets, (chosen,), _ = moved({name: OPS[name]()}, what, seed=seed)
        params = chosen.params[0][0]
        for row in range(COUNT):
            boxes = theirs(F, name, params, row, boxes_of(F, what["boxes"][row], SIZE))
            seen += check_boxes(targets, row, F.clamp_bounding_boxes(boxes).numpy(), turned="flip" not in name)
            how: dict[str, Any] = (
                {} if "flip" in name else {"interpolation": F.InterpolationMode.NEAREST, "fill": [255.0]}
            )
            mask = theirs(F, name, params, row, what["masks"][row][None], **how)[0]
            differing.append((mask != targets.masks[row]).float().mean().item())
    assert seen >= 50
    assert np.mean(differing) <= (0 if "flip" in name else 0.002), "masks differ by more than ties"


@pytest.mark.parametrize("crop", [name for name in CROPS if name != "none"])
def test_crops_are_torchvisions_crop_resize_and_pad(crop: str, functional: ModuleType) -> None:
    F, seen, differing = functional, 0, []
    exact = F.InterpolationMode.NEAREST_EXACT
    for seed in range(3):
        what = given(seed)
        if crop == "padded":
            what = given(seed, (110, 131))
        size = tuple(what["masks"].shape[1:])
        targets, _, windows = moved({}, what, crop=CROPS[crop](), seed=seed)
        H, W = windows.size
        placed = np.hstack([windows.window, windows.resized, windows.offset]).tolist()
        for row, (top, left, height, width, h, w, y, x) in enumerate(placed):
            boxes = F.resize(F.crop(boxes_of(F, what["boxes"][row], size), top, left, height, width), [h, w])
            boxes = F.crop(F.pad(boxes, [x, y, 0, 0]), 0, 0, H, W) if x >= 0 and y >= 0 else F.crop(boxes, -y, -x, H, W)
            if (x >= 0) == (y >= 0) and crop != "iou":  # ours has the objects with their centre inside only
                seen += check_boxes(targets, row, F.clamp_bounding_boxes(boxes).numpy())
            cut = F.resize(F.crop(what["masks"][row][None], top, left, height, width), [h, w], interpolation=exact)
            part = np.full((H, W), 255, np.uint8)
            y1, x1 = min(y + h, H), min(x + w, W)
            if y1 > max(y, 0) and x1 > max(x, 0):
                part[max(y, 0) : y1, max(x, 0) : x1] = cut[0].numpy()[max(-y, 0) : y1 - y, max(-x, 0) : x1 - x]
            differing.append((part != targets.masks[row].numpy()).mean())
    assert seen >= 40 or crop == "iou"
    assert np.mean(differing) <= 0.002, "masks differ by more than ties"


@pytest.mark.parametrize(("name", "theirs_is_off"), [("turn", 0.9), ("turns", 0.9), ("rotate", 0.2), ("scale", 0.2)])
def test_where_torchvisions_keypoints_are_off_ours_are_at_the_centroid(
    name: str, theirs_is_off: float, functional: ModuleType
) -> None:
    """torchvision flips points as indices, but turns and scales them about the edges' middle."""
    from torchvision import tv_tensors

    F, size, place = functional, (121, 121), np.array([66.3, 57.8])
    calls = {
        "turn": (K.RandomRotation((90.0, 90.0), p=1.0), lambda t: F.rotate(t, 90)),
        "turns": (K.RandomRotation((180.0, 180.0), p=1.0), lambda t: F.rotate(t, 180)),
        "rotate": (K.RandomRotation((30.0, 30.0), p=1.0), lambda t: F.rotate(t, 30)),
        "scale": (
            K.RandomAffine(0.0, scale=(1.5, 1.5), p=1.0),
            lambda t: F.affine(t, angle=0, translate=[0, 0], scale=1.5, shear=[0, 0]),
        ),
    }
    op, call = calls[name]
    image = torch.from_numpy(gaussian(size, place)).permute(2, 0, 1)[None]
    point = [*(place - 0.5), 2.0]
    out, targets = gpuaug.Augment(ops={name: op})(image, keypoints=[[[point]]], seed=0)
    at, _ = measured(out[0, 0].double().numpy(), np.ones(size))
    ours = targets.keypoints[0, 0, :2].numpy()
    np.testing.assert_allclose(ours, at - 0.5, atol=0.05)
    their_image = call(image.float())[0, 0].double().numpy() / 255
    interpolated, _ = measured(their_image, np.ones(size))
    np.testing.assert_allclose(interpolated, at, atol=1.0)  # their default for images is the nearest pixel
    their_point = call(tv_tensors.KeyPoints([point[:2]], canvas_size=size))[0].numpy()
    assert np.abs(their_point - (at - 0.5)).max() > theirs_is_off


# --- 4: Kornia and Pillow


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("name", OPS)
def test_masks_are_those_of_kornias_nearest(name: str, align_corners: bool) -> None:
    """But for ties: Kornia computes places in float32, so a place between two pixels may be either."""
    what = given(1)
    op = OPS[name]()
    if "align_corners" in op.flags:
        op.flags["align_corners"] = align_corners
    targets, (chosen,), _ = moved({name: op}, what, seed=1)
    masks = what["masks"].clamp(max=250)
    ours = torch.where(targets.masks == 255, 255, targets.masks.clamp(max=250))
    flags: dict[str, Any] = {"resample": Resample.NEAREST, "align_corners": align_corners}
    if "flip" in name:
        flags = {}
    sequence = K.AugmentationSequential(op, data_keys=["input", "mask"], extra_args={DataKey.MASK: flags})
    params = tensors(chosen.params[0][0])
    params |= {"batch_prob": torch.ones(COUNT), "forward_input_shape": torch.tensor((COUNT, 3, *SIZE))}
    item = ParamItem(f"{type(op).__name__}_0", params)
    _, expected = sequence(torch.zeros((COUNT, 3, *SIZE)), (masks[:, None] + 1.0), params=[item])
    expected = torch.where(expected[:, 0] == 0, 255, expected[:, 0].long() - 1)
    differing = (expected != ours).float().mean().item()
    assert differing <= (0 if "flip" in name or "90" in name else 0.002)


def clear(at: np.ndarray, scale: float, start: float) -> np.ndarray:
    """The output rows or columns whose centre is not on the border of two source pixels, which is a tie."""
    place = (at + 0.5 - start) / scale
    return at[np.abs(place - np.rint(place)) > 0.003]  # Pillow's affine has 16 bits behind the point


@pytest.mark.parametrize("crop", [name for name in CROPS if name != "none"])
def test_cropped_masks_are_pillows_nearest(crop: str) -> None:
    """A mask in a file, cropped and resized by the loader: Pillow's crop, resize and paste."""
    rng = np.random.default_rng(0)
    source, values = [], []
    for k in range(12):
        size = SIZES[k % 3]
        values.append(rng.integers(0, 255, size).astype(np.uint8))
        boxes = np.array([[10.0, 10, 60, 70]])
        pixels = np.repeat(values[-1][:, :, None], 3, axis=2)
        target = {"mask": png(values[-1]), "boxes": boxes, "labels": [0], "keypoints": np.ones((1, 1, 3))}
        source.append((encode(pixels, "BMP"), target))
    targets = batch_of(source, gpuaug.Augment(crop=CROPS[crop]())).targets
    same = total = 0
    for row, mask in enumerate(targets.masks.numpy()):
        (sx, _, tx), (_, sy, ty), _ = targets.matrices[row].tolist()
        top, left, bottom, right = targets.covered[row].tolist()
        assert (np.delete(mask, np.s_[top:bottom], axis=0) == 255).all()
        assert (np.delete(mask, np.s_[left:right], axis=1) == 255).all()
        if bottom <= top or right <= left:
            continue
        # output pixel (x, y) shows source pixel ((x + .5 - tx) / sx): Pillow's affine with these numbers
        shown = Image.fromarray(values[row]).transform(
            mask.shape[::-1],
            Image.Transform.AFFINE,
            (1 / sx, 0, -tx / sx, 0, 1 / sy, -ty / sy),
            Image.Resampling.NEAREST,
        )
        rows, columns = clear(np.arange(top, bottom), sy, ty), clear(np.arange(left, right), sx, tx)
        same += (np.asarray(shown)[rows][:, columns] == mask[rows][:, columns]).sum()
        total += len(rows) * len(columns)
        h, w = values[row].shape
        if (round(w * sx), round(h * sy)) == (right - left, bottom - top) and (left, top) == (round(tx), round(ty)):
            whole = Image.fromarray(values[row]).resize((right - left, bottom - top), Image.Resampling.NEAREST)
            found = np.asarray(whole)[rows - top][:, columns - left]
            assert (found == mask[rows][:, columns]).all()
    assert total > 40_000
    assert same / total >= 0.998


@pytest.mark.parametrize("backend", ["fused", "kornia"])
def test_elastic_masks_move_as_their_images(backend: str) -> None:
    """Masks alone may bend. The image shows the mask, and everything is sampled at the nearest pixel."""
    rng = np.random.default_rng(0)
    source = []
    for _ in range(9):
        mask = np.kron(rng.integers(1, 255, (12, 14)), np.ones((8, 8))).astype(np.uint8)
        source.append((encode(np.repeat(mask[:, :, None], 3, axis=2), "BMP"), gpuaug.Target(mask=png(mask))))
    bend = ELASTIC["some"]()
    bend.flags["resample"] = Resample.NEAREST
    ops = {"h": K.RandomHorizontalFlip(), "bend": bend, "v": K.RandomVerticalFlip(), "last": ELASTIC["uneven"]()}
    ops["last"].flags["resample"] = Resample.NEAREST
    crop = gpuaug.RandomCrop((80, 90), padding=3)
    rules = gpuaug.Targets(masks=gpuaug.Masks(fill=0))
    augment = gpuaug.Augment(crop=crop, ops=ops, backend=backend)
    want = None
    for batch_size in (9, 1, 4):
        with targets_loader(source, augment, targets=rules, batch_size=batch_size, last="uneven") as made:
            batches = list(made)
        images, masks = (torch.cat(parts) for parts in zip(*batches, strict=True))
        assert torch.equal(images[:, 0].mul(255).round().long(), masks)
        want = masks if want is None else want
        assert torch.equal(want, masks)
