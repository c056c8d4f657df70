"""PersonCrop equals mmpose's top-down affine, written out here; targets follow; a sample is the same in any batch."""

from __future__ import annotations

import io
import json
from functools import cache
from typing import Any

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage, stats

import gpuaug
from gpuaug.augment.person_crop import truncated

COUNT, SIZE = 40, (64, 48)
RANDOM: dict[str, Any] = {"half_body": 0.5, "shift": 0.16, "scale": 0.5, "rotation": 80}
HALF = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])
RULES: dict[str, Any] = {"boxes": gpuaug.Boxes(min_size=0, min_area=0), "keypoints": gpuaug.Keypoints()}


def encoded(values: np.ndarray, **more: Any) -> bytes:
    data = io.BytesIO()
    Image.fromarray(values).save(data, "PNG", **more)
    return data.getvalue()


def smooth(height: int, width: int, seed: int = 0) -> np.ndarray:
    phase = np.random.default_rng(seed).uniform(0, 6, 3)
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / 9 + p) + np.cos(y / (8 + k) + p) for k, p in enumerate(phase)]
    return np.rint(np.stack(waves, axis=-1) * 50 + 128).astype(np.uint8)


@cache
def persons() -> tuple[tuple[np.ndarray, gpuaug.Target], ...]:
    """Images with one person each, some of it outside; any number of labelled points, also in one half only."""
    rng, made = np.random.default_rng(3), []
    for number in range(COUNT):
        height, width = (int(n) for n in rng.integers(40, 140, 2))
        x, y = rng.uniform(-10, width - 20), rng.uniform(-10, height - 20)
        w, h = rng.uniform(8, 70, 2)
        points = np.stack([rng.uniform(x, x + w, 17), rng.uniform(y, y + h, 17), rng.integers(0, 3, 17)], axis=1)
        points[:, 2] *= rng.random(17) < (0.5, 1, 2)[number % 3]
        points[slice(0, 11) if number % 5 == 1 else slice(11, 17), 2] *= number % 5 not in (1, 2)
        if number % 5 in (1, 2):
            points[:, 2][points[:, 2] > 0] = 2
        target = gpuaug.Target(boxes=[[x, y, x + w, y + h]], labels=[0], keypoints=[points], size=(height, width))
        made.append((smooth(height, width, number), target))
    return tuple(made)


def loader(
    given: Any = None, *, crop: Any = RANDOM, ops: Any = None, targets: Any = RULES, size: Any = SIZE, **more: Any
) -> Any:
    given = persons() if given is None else given
    source = [(encoded(image) if isinstance(image, np.ndarray) else image, target) for image, target in given]
    recipe = gpuaug.Augment(crop=gpuaug.PersonCrop(size, **crop), ops=ops)
    usual = {"batch_size": 8, "num_workers": 0, "seed": 3, "device": "cpu", "shuffle": False}
    return gpuaug.Loader(source, augment=recipe, targets=gpuaug.Targets(**targets), **usual | more)


def mmpose(u: np.ndarray, box: Any, points: Any, crop: gpuaug.PersonCrop, branches: list[str]) -> np.ndarray:
    """From pixel indices of the image to those of the output [3, 3], by mmpose's code, step by step."""
    x1, y1, x2, y2 = np.float32(box).astype(float)
    center, scale = np.array([x1 + x2, y1 + y2]) / 2, np.array([x2 - x1, y2 - y1]) * crop.padding
    visible = [int(p[2] > 0) for p in points]
    upper, lower = [i for i in range(11) if visible[i]], [i for i in range(11, 17) if visible[i]]
    ids = None
    if sum(visible) >= 9 and u[0] < crop.half_body:
        if len(upper) < 2 and len(lower) < 3:
            branches.append("neither")
        elif len(lower) < 3 or len(upper) < 2:
            ids = upper if len(lower) < 3 else lower
            branches.append("other")
        else:
            ids = upper if u[1] < crop.upper_p else lower
            branches.append("upper" if ids is upper else "lower")
    else:
        branches.append("few" if u[0] < crop.half_body else "off")
    if ids is not None:
        chosen = np.float32(points)[ids, :2].astype(float)
        center, scale = chosen.mean(axis=0), (chosen.max(axis=0) - chosen.min(axis=0)) * 1.5
    v = stats.truncnorm.ppf(u[2:6].astype(float), -1, 1)
    center = center + v[:2] * crop.shift * scale * (u[6] < crop.shift_p)
    scale = scale * (1 + v[2] * crop.scale)
    rotation = v[3] * crop.rotation * (u[7] < crop.rotation_p)
    (h, w), aspect = crop.size, crop.size[1] / crop.size[0]
    bw, bh = scale
    bw, bh = (bw, bw / aspect) if bw > bh * aspect else (bh * aspect, bh)
    turn = np.deg2rad(rotation)
    src0, dst0 = center, np.array([w / 2, h / 2])
    src1 = src0 + np.array([np.cos(turn), np.sin(turn)]) * (-bw / 2)
    dst1 = dst0 + np.array([-w / 2, 0])
    third = [b + np.array([-(a - b)[1], (a - b)[0]]) for a, b in ((src0, src1), (dst0, dst1))]
    source = np.stack([np.append(p, 1) for p in (src0, src1, third[0])], axis=1)
    return np.stack([np.append(p, 1) for p in (dst0, dst1, third[1])], axis=1) @ np.linalg.inv(source)


def warped(image: np.ndarray, m: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """cv2.warpAffine with black outside: bilinear, ``m`` from indices to indices."""
    y, x = np.mgrid[: size[0], : size[1]]
    x, y, _ = np.einsum("ij,jhw->ihw", np.linalg.inv(m), np.stack([x, y, np.ones_like(x)]))
    channels = np.moveaxis(image.astype(float), -1, 0)
    return np.stack([ndimage.map_coordinates(c, [y, x], order=1, mode="grid-constant") for c in channels])


def in_edges(m: np.ndarray) -> np.ndarray:
    return HALF @ m @ np.linalg.inv(HALF)


@pytest.mark.parametrize("crop", [RANDOM, {}, {"half_body": 1.0, "upper_p": 0.2}, {**RANDOM, "rotation_p": 1.0}])
def test_matrices_pixels_and_keypoints_equal_mmpose(crop: Any) -> None:
    made, branches = loader(crop=crop), list[str]()
    recipe = made.augment
    u = recipe.draw(seed=3, epoch=0, indices=np.arange(COUNT)).uniforms["", 0, "crop"]
    assert u.shape[1] == (8 if crop else 0)
    u = u if crop else np.full((COUNT, 8), 0.5)
    fine = 0
    for batch in made:
        t = batch.targets
        for row, index in enumerate(batch.indices.tolist()):
            image, target = persons()[index]
            points = np.asarray(target.keypoints)[0]
            m = mmpose(u[index], target.boxes[0], points, recipe.crop, branches)
            assert np.allclose(t.matrices[row], in_edges(m), rtol=1e-6, atol=1e-4)  # float32 boxes and keypoints
            assert np.allclose(t.matrices[row], batch.matrices[row], atol=1e-9)
            theirs = warped(image, m, SIZE)
            difference = np.abs(batch.images[row].numpy() * 255 - theirs)
            if np.hypot(*m[0, :2]) >= 0.5:  # one resampling
                fine += 1
                assert difference.max() < 2
            assert difference.mean() < 1.5
            for k in torch.nonzero(t.sample == row).ravel().tolist():
                moved = m @ np.concatenate([np.float32(points[:, :2]).T, np.ones((1, 17))])
                height, width = image.shape[:2]
                seen = points[:, 2] > 0
                for value, low, high in ((points[:, 0], -0.5, width - 0.5), (points[:, 1], -0.5, height - 0.5),
                                         (moved[0], -0.5, SIZE[1] - 0.5), (moved[1], -0.5, SIZE[0] - 0.5)):  # fmt: skip
                    seen &= (value >= low) & (value < high)
                assert (t.keypoints[k, :, 2].numpy() > 0).tolist() == seen.tolist()
                assert np.allclose(t.keypoints[k, seen, :2], moved[:2, seen].T, atol=1e-3)
    assert fine > COUNT // 2
    if crop is RANDOM:
        assert set(branches) >= {"upper", "other", "few", "off"}


def test_noise_equals_one_bilinear_gather_of_the_image() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (150, 170, 3)).astype(np.uint8)
    target = gpuaug.Target(boxes=[[20, 30, 75, 110]], labels=[0], keypoints=np.zeros((1, 17, 3)), size=(150, 170))
    crop = {**RANDOM, "half_body": 0, "rotation_p": 1.0, "scale": 0.1}
    for batch in loader([(noise, target)] * 8, crop=crop):
        for image, m in zip(batch.images.numpy() * 255, batch.targets.matrices.numpy(), strict=True):
            assert np.hypot(*m[0, :2]) >= 0.5
            theirs = warped(noise, np.linalg.inv(HALF) @ m @ HALF, SIZE)
            assert np.abs(image - theirs).max() < 2


@pytest.mark.parametrize("exif", [1, 3, 6, 8])
def test_a_blob_stays_at_its_keypoint(exif: int) -> None:
    """Also where EXIF turns the image and annotations were made for the stored one."""
    (height, width), at, given = (180, 240), np.array([118.3, 92.6]), []
    y, x = np.mgrid[:height, :width]
    for sigma in np.linspace(6, 9, 8):
        blob = 250 * np.exp(-((x - at[0]) ** 2 + (y - at[1]) ** 2) / (2 * sigma**2))
        image = np.rint(np.repeat(blob[..., None], 3, axis=2)).astype(np.uint8)
        tag = Image.Exif()
        tag[0x0112] = exif
        points = np.concatenate([[[*at, 2]], np.random.default_rng(1).uniform(70, 120, (16, 3))])
        points[1:, 2] = 2
        box = [at[0] - 60, at[1] - 70, at[0] + 60, at[1] + 65]
        target = gpuaug.Target(boxes=[box], labels=[0], keypoints=[points], size=(height, width))
        given.append((encoded(image, exif=tag), target))
    crop = {**RANDOM, "half_body": 0.5, "rotation_p": 1.0, "scale": 0.2, "shift": 0.05}
    batch = next(iter(loader(given, crop=crop, targets={**RULES, "orientation": "stored"}, batch_size=8)))
    j, i = np.mgrid[: SIZE[0], : SIZE[1]]
    found = 0
    for image, points in zip(batch.images[:, 0].double().numpy(), batch.targets.keypoints[:, 0].numpy(), strict=True):
        room = min(points[0], points[1], SIZE[1] - 1 - points[0], SIZE[0] - 1 - points[1])
        if points[2] and room > 14 and not max(image[0].max(), image[-1].max(), image[:, 0].max(), image[:, -1].max()):
            found += 1
            centroid = np.array([(i * image).sum(), (j * image).sum()]) / image.sum()
            assert np.abs(centroid - points[:2]).max() < 0.05
    assert found >= 3


def test_distributions() -> None:
    u = np.random.default_rng(0).random(100_000)
    assert stats.kstest(truncated(u), stats.truncnorm(-1, 1).cdf).pvalue > 1e-3
    crop = gpuaug.PersonCrop(SIZE, **{**RANDOM, "half_body": 0})
    recipe = gpuaug.Augment(crop=crop)
    count = 100_000
    draws = recipe.draw(seed=0, epoch=0, indices=np.arange(count)).uniforms["", 0, "crop"].astype(float)
    m = crop._matrices(draws, np.full((count, 2), 50.0), np.tile([30.0, 40.0], (count, 1)))
    scale = np.hypot(m[:, 0, 0], m[:, 0, 1])
    normal = stats.truncnorm(-1, 1)
    assert stats.kstest((48 / 30 / scale - 1) / 0.5, normal.cdf).pvalue > 1e-3
    angle = np.degrees(np.arctan2(m[:, 0, 1], m[:, 0, 0]))
    turned = angle[angle != 0]
    assert abs(len(turned) / count - 0.6) < 0.006
    assert stats.kstest(turned / 80, normal.cdf).pvalue > 1e-3
    linear, offset = m[:, :2, :2], np.array([48, 64]) / 2
    back = np.linalg.solve(linear, (offset + 0.5 - m[:, :2, 2])[..., None])[..., 0] - 0.5 - 50  # of the centre
    moved = np.abs(back).max(axis=1) > 1e-6
    assert abs(moved.mean() - 0.3) < 0.006
    for axis, side in enumerate((30, 40)):  # both axes have one gate
        assert stats.kstest(back[moved, axis] / (0.16 * side), normal.cdf).pvalue > 1e-3


def rows(made: gpuaug.Loader, *, state: Any = None, first: int = 10**9) -> dict[int, list[torch.Tensor]]:
    if state is not None:
        made.load_state_dict(state)
    found: dict[int, list[torch.Tensor]] = {}
    for number, batch in enumerate(made):
        for row, index in enumerate(batch.indices.tolist()):
            own, t = batch.targets.sample == row, batch.targets
            found[index] = [batch.images[row], t.matrices[row], *(c[own] for c in (t.boxes, t.keypoints, t.labels))]
        if number + 1 == first:
            break
    return found


def equal(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, y) for k in a for x, y in zip(a[k], b[k], strict=True))


def test_a_sample_is_the_same_in_any_batch_worker_and_after_a_resume() -> None:
    whole = rows(loader(ops={"flip": K.RandomHorizontalFlip()}))
    assert len(whole) == COUNT
    for more in ({"batch_size": 1}, {"batch_size": 7}, {"batch_size": 16, "num_workers": 2}, {"prefetch": 0}):
        assert equal(whole, rows(loader(ops={"flip": K.RandomHorizontalFlip()}, **more))), more
    made = loader(ops={"flip": K.RandomHorizontalFlip()})
    begun = rows(made, first=2)
    rest = rows(loader(ops={"flip": K.RandomHorizontalFlip()}), state=made.state_dict())
    assert equal(whole, begun | rest)
    assert not begun.keys() & rest.keys()
    alone = loader(ops={"flip": K.RandomHorizontalFlip()})[5]
    assert torch.equal(alone[0], whole[5][0])


def test_masks_follow_and_predictions_go_back() -> None:
    given = []
    for image, target in persons()[:16]:
        x1, y1, x2, y2 = (max(int(n), 0) for n in target.boxes[0])
        mask = np.zeros(image.shape[:2], dtype=np.uint8)
        mask[y1:y2, x1:x2] = 1
        box = [x1, y1, min(x2, image.shape[1]), min(y2, image.shape[0])]
        more = {"labels": [0], "keypoints": target.keypoints, "size": target.size}
        given.append(
            (np.repeat(mask[..., None] * 255, 3, axis=2), gpuaug.Target(mask=encoded(mask), boxes=[box], **more))
        )
    rules = {**RULES, "masks": gpuaug.Masks(kind="instances")}
    batch = next(iter(loader(given, targets=rules, batch_size=16)))
    t = batch.targets
    disagree = (batch.images[:, 0] > 0.5) != (t.masks > 0)
    assert disagree.float().mean() < 0.03  # borders
    for k, row in enumerate(t.sample.tolist()):
        y, x = torch.nonzero(t.masks[row], as_tuple=True)
        hull = torch.tensor([x.min(), y.min(), x.max() + 1, y.max() + 1])
        assert (hull - t.boxes[k]).abs().max() < 2.5
    counts = t.counts.tolist()
    back = t.restore(keypoints=list(t.keypoints.split(counts)))
    for row, image in enumerate(back):
        points = np.asarray(given[row][1].keypoints)
        own = t.keypoints[t.sample == row]
        seen = own[..., 2].numpy() > 0
        assert np.allclose(image["keypoints"][..., :2].numpy()[seen], points[: len(own), :, :2][seen], atol=1e-3)


def test_hostile_persons() -> None:
    image, far = smooth(60, 80), np.zeros((1, 17, 3))
    same = np.tile([30.0, 20.0, 2.0], (1, 17, 1))

    def person(box: Any, points: Any = far, size: Any = (60, 80)) -> gpuaug.Target:
        return gpuaug.Target(boxes=[box], labels=[0], keypoints=points, size=size)

    tiny = np.full((1, 1, 3), 200, dtype=np.uint8)
    given = [
        (image, person([500, 500, 600, 700])),  # outside
        (image, person([-1e30, -1e30, 1e30, 1e30])),
        (image, person([3e38, 0, 3.1e38, 10])),
        (image, person([20, 20, 20, 20], same)),  # no area, all points at one place
        (tiny, person([0, 0, 1, 1], size=(1, 1))),
        (image, person([float("nan"), 0, 10, 10])),
        (image, gpuaug.Target(boxes=np.zeros((0, 4)), labels=[], keypoints=np.zeros((0, 17, 3)), size=(60, 80))),
        (image, person([0, 0, 80, 60], np.full((1, 17, 3), np.nan))),
    ]
    crop = {**RANDOM, "half_body": 1.0, "rotation_p": 1.0, "shift_p": 1.0}
    for backend in (crop, {}):
        made = loader(given, crop=backend, faults=gpuaug.Faults(policy="blank", max=8))
        batch = next(iter(made))
        assert batch.valid.tolist() == [True] * 5 + [False, True, False]
        assert torch.isfinite(batch.images).all()
        assert torch.isfinite(batch.targets.matrices[batch.valid]).all()
        assert not batch.images[0].any()
        assert batch.images[3].max() > 0
        assert batch.images[4].max() > 0.3
        if not backend:  # a sample without a person shows the whole image
            assert np.allclose(batch.targets.matrices[6, 0, 0], min(48 / 100, 64 / 75))


BAD = [
    (lambda: gpuaug.PersonCrop(8, scale=1), "`scale` must be a number in [0, 0.9]. Found: 1"),
    (lambda: gpuaug.PersonCrop(8, padding=0), "`padding` must be a number in [0.1, 10]"),
    (lambda: gpuaug.PersonCrop(8, upper=[1, 1]), "`upper` must be a list of different numbers"),
    (lambda: gpuaug.PersonCrop(8, upper=[]), "`upper` must be a list of different numbers"),
    (lambda: next(iter(loader(crop={"half_body": 1.0, "upper": [17]}))), "must be numbers of keypoints, 0 to 16"),
    (lambda: loader(crop={"half_body": 1.0}, targets={"boxes": gpuaug.Boxes()}), "needs keypoints, but `targets`"),
    (lambda: next(iter(loader([(smooth(9, 9), gpuaug.Target(boxes=[[0, 0, 5, 5]] * 2, labels=[0, 0],
     keypoints=np.zeros((2, 17, 3))))]))), "(PersonCrop) needs samples of one person. Found: 2 objects in a sample"),
    (lambda: gpuaug.Augment(crop=gpuaug.PersonCrop(8))(torch.zeros(2, 3, 8, 8)), "`augment.crop` works only in"),
    (lambda: gpuaug.Augment(crop=gpuaug.PersonCrop(8), copies=2), "`augment.copies` must be 1 with gpuaug."),
    (lambda: gpuaug.Augment(crop=gpuaug.PersonCrop(8), combine={"a": gpuaug.CanvasAffine(8)}),
     "`augment.combine` must be left out with gpuaug.PersonCrop. Found: a"),
    (lambda: gpuaug.MultiView(views={"a": gpuaug.Augment(crop=gpuaug.PersonCrop(8))}), "have no gpuaug.PersonCrop"),
    (lambda: gpuaug.export(gpuaug.Augment(crop=gpuaug.PersonCrop(8)), "x.onnx"), "`augment.crop` must be Resize"),
    (lambda: loader(decode=gpuaug.Decode(pixels="raw", channels=3)), "`augment.crop` needs images of 8 bits"),
    (lambda: loader(patch_masks=gpuaug.RandomMasks(patch=16)), "must have no gpuaug.PersonCrop with `patch_masks`"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_what_it_refuses(make: Any, message: str) -> None:
    with pytest.raises(gpuaug.ConfigError) as caught:
        make()
    assert message in str(caught.value)


def test_explanation_and_fingerprint() -> None:
    batch = next(iter(loader()))
    for row in range(8):
        m = batch.targets.matrices[row]
        line = next(line for line in str(batch.explain(row)).splitlines() if line.startswith("person: "))
        assert line == f"person: angle {np.degrees(np.arctan2(m[0, 1], m[0, 0])):.3g}, scale {np.hypot(*m[0, :2]):.3g}"
    a, b = (gpuaug.Augment(crop=gpuaug.PersonCrop(SIZE, shift=shift)).fingerprint() for shift in (0.1, 0.2))
    assert a != b
    assert a["crop"]["shift"] == 0.1


@pytest.mark.parametrize("name", ["pose_hrnet", "pose_hrnet_eval", "pose_rtmpose", "pose_rtmpose_eval"])
def test_shipped_recipes_run(name: str, tmp_path: Any) -> None:
    names = ["nose", "left_eye", "right_eye", "left_ear", "right_ear", "left_shoulder", "right_shoulder", "left_elbow",
             "right_elbow", "left_wrist", "right_wrist", "left_hip", "right_hip", "left_knee", "right_knee",
             "left_ankle", "right_ankle"]  # fmt: skip
    images, annotations = [], []
    for number, (image, target) in enumerate(persons()[:6]):
        (tmp_path / f"{number}.png").write_bytes(encoded(image))
        images.append({"id": number, "file_name": f"{number}.png", "height": image.shape[0], "width": image.shape[1]})
        x1, y1, x2, y2 = target.boxes[0]
        points = np.asarray(target.keypoints[0])
        points[0, 2] = 2
        for copy in range(2):
            row = {"id": 10 * number + copy, "image_id": number, "category_id": 1, "bbox": [x1, y1, x2 - x1, y2 - y1]}
            annotations.append({**row, "iscrowd": 0, "area": 9.0, "keypoints": points.ravel().tolist()})
    content = {"images": images, "annotations": annotations}
    content["categories"] = [{"id": 1, "name": "person", "keypoints": names}]
    (tmp_path / "people.json").write_text(json.dumps(content))
    words = [f"source.root={tmp_path}", "source.annotations=people.json", "source.unit=object", "batch_size=12"]
    words += ["source=coco", "targets=pose", f"augment={name}", "device=cpu", "num_workers=0"]
    words += ["targets.boxes.min_size=0", "targets.boxes.min_area=0"]
    with gpuaug.build(gpuaug.compose("train", words)) as made:
        batch = next(iter(made))
        again = made.fetch(batch.indices.tolist())
    assert batch.images.shape == (12, 3, 256, 192)
    assert batch.valid.all()
    assert set(batch.targets.counts.tolist()) <= {0, 1}
    assert sorted(batch.targets.ids.tolist()) == sorted(set(batch.targets.ids.tolist()))
    assert torch.equal(again.images, batch.images)
    if name.endswith("_eval"):
        assert batch.targets.matrices[:, 0, 1].abs().max() == 0


def test_covered_is_what_the_output_shows_of_the_image() -> None:
    points = np.zeros((1, 17, 3))
    points[:, 0] = 5, 5, 2
    boxes = ([0, 0, 40, 40], [60, 60, 100, 100], [-300, 0, -250, 40])
    white = np.full((100, 100, 3), 200, dtype=np.uint8)
    samples = [(white, gpuaug.Target(boxes=[box], labels=[0], keypoints=points)) for box in boxes]
    (batch,) = loader(samples, crop={"padding": 2.0}, ops={}, size=(100, 100))
    # an eighth of the first and last pixels shows the image
    assert batch.targets.covered.tolist() == [[24, 24, 100, 100], [0, 0, 75, 75], [0, 0, 0, 0]]
    different = (batch.targets.pixel_mask() > 0) != (batch.images[:, 0] > 0.3)
    assert not different[:, 25:, 25:].any()
    assert not different[1:].any()
