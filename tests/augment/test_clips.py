"""Clips, and several cameras of one sample: what their random numbers share, and what they do not."""

from __future__ import annotations

from typing import Any

import kornia.augmentation as K
import pytest
import torch
from torch import Tensor

import gpuaug
from gpuaug.errors import ConfigError

FRAMES = 4
# every way to draw: uniforms, keys for fields, policies, chains, OneOf, modules with their own generator, crops
OPS: dict[str, Any] = {
    "flip": K.RandomHorizontalFlip(p=0.5),
    "jitter": K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8),
    "noise": K.RandomGaussianNoise(std=0.1, p=0.5),
    "elastic": K.RandomElasticTransform((9, 9), (3.0, 3.0), p=0.7),
    "one": gpuaug.OneOf(ops={"blur": K.RandomGaussianBlur(5, (0.5, 2.0), p=1.0), "invert": K.RandomInvert(p=1.0)}),
    "some": gpuaug.SomeOf(
        2, ops={"gray": K.RandomGrayscale(p=0.5), "vflip": K.RandomVerticalFlip(), "a": K.RandomSolarize()}
    ),
    "policy": gpuaug.RandAugment(),
    "mix": gpuaug.AugMix(),
    "salt": K.RandomSaltAndPepperNoise(p=0.9),
    "user": torch.nn.Dropout(0.3),
    "affine": K.RandomAffine(20.0, translate=(0.1, 0.1), p=0.8),
    "erase": gpuaug.RandomErasing(0.7),
}
FIELDS = ("noise", "elastic", "salt", "erase")


def recipe(*names: str, crop: Any = None, **settings: Any) -> gpuaug.Augment:
    return gpuaug.Augment(crop=crop, ops={name: OPS[name] for name in names or OPS}, **settings)


def clips(samples: int = 5, frames: int = FRAMES, *, size: tuple[int, int] = (40, 48), seed: int = 0) -> Tensor:
    shape = (samples, frames, 3, *size)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def still() -> Tensor:
    """Clips whose frames are equal."""
    return clips(frames=1).expand(-1, FRAMES, -1, -1, -1)


@pytest.mark.parametrize("backend", ["fused", "kornia"])
@pytest.mark.parametrize("name", OPS)
def test_frames_share_all_random_numbers(name: str, backend: str, still: Tensor) -> None:
    made = recipe(name, crop=gpuaug.RandomResizedCrop(32), backend=backend)(still, seed=3)
    assert made.shape == (5, FRAMES, 3, 32, 32)
    assert torch.equal(made, made[:, :1].expand_as(made))


@pytest.mark.parametrize("backend", ["fused", "kornia"])
@pytest.mark.parametrize("name", OPS)
def test_frames_that_share_nothing_differ(name: str, backend: str, still: Tensor) -> None:
    made = recipe(name, backend=backend, same_on_frame={name: False})(still, seed=3)
    assert (made != made[:, :1]).flatten(2).any(2)[:, 1:].any()
    assert torch.equal(made[:, 0], recipe(name, backend=backend)(still[:, 0], seed=3))


@pytest.mark.parametrize("same", [True, False, "field"])
def test_a_frame_depends_only_on_its_place(same: Any) -> None:
    """Not on the other clips, on the length of its clip, or on frames that are added."""
    names = FIELDS if same == "field" else (*OPS, "crop")
    augment = recipe(crop=gpuaug.RandomResizedCrop(32), same_on_frame=dict.fromkeys(names, same))
    images = clips()
    made = augment(images, seed=3, epoch=2, indices=range(10, 15))
    assert torch.equal(made[3:4, :2], augment(images[3:4, :2], seed=3, epoch=2, indices=[13]))
    assert torch.equal(made[:, 0], augment(images[:, 0], seed=3, epoch=2, indices=range(10, 15)))
    assert torch.equal(made[:, :1], augment(images[:, :1], seed=3, epoch=2, indices=range(10, 15)))


@pytest.mark.parametrize("backend", ["fused", "kornia"])
def test_a_fresh_field_keeps_its_parameters(backend: str, still: Tensor) -> None:
    """The frames have noise of the same strength in the same boxes, and other values."""
    erase = recipe("erase", backend=backend, same_on_frame={"erase": "field"})(still, seed=3)
    plain = still.float() / 255
    boxes = (erase != plain).any(2)
    assert torch.equal(boxes, boxes[:, :1].expand_as(boxes))
    inside = boxes[:, :, None].expand_as(erase)
    assert inside.any()
    assert (erase[:, 0] != erase[:, 1])[inside[:, 0]].all()
    noise = recipe("noise", backend=backend, same_on_frame={"noise": "field"})(still, seed=3) - plain
    changed = noise.flatten(2).abs().amax(2) > 0
    assert torch.equal(changed, changed[:, :1].expand_as(changed))
    assert changed.any()
    assert not changed.all()
    assert (noise[:, 0] != noise[:, 1]).flatten(1).any(1).eq(changed[:, 0]).all()


def test_views_of_clips(still: Tensor) -> None:
    small = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(16), copies=2, same_on_frame={"crop": False})
    large = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(32))
    made = gpuaug.MultiView(views={"small": small, "large": large})(still, seed=3)
    assert [list(view.shape[1:]) for view in made] == [[FRAMES, 3, 16, 16]] * 2 + [[FRAMES, 3, 32, 32]]
    differ = [bool((view != view[:, :1]).any()) for view in made]
    assert differ == [True, True, False]


def test_targets_of_clips_follow_their_frames() -> None:
    """A frame's masks, boxes and keypoints equal those of a call with this frame alone."""
    augment = recipe("flip", "affine", crop=gpuaug.RandomResizedCrop(32), same_on_frame={"affine": False})
    images = clips()
    masks = images[:, :, 0] % 7
    boxes = [[[[4.0 + t, 5, 30, 25 + b]] for t in range(FRAMES)] for b in range(5)]
    points = [[[[[10.0 + t, 12, 2]]] for t in range(FRAMES)] for b in range(5)]
    labels = [[[b] for _ in range(FRAMES)] for b in range(5)]
    made, moved = augment(images, masks=masks, boxes=boxes, keypoints=points, labels=labels, seed=3)
    assert torch.equal(made, augment(images, seed=3))
    first = {"masks": masks[:, 0], **{k: [v[0] for v in value] for k, value in
             {"boxes": boxes, "keypoints": points, "labels": labels}.items()}}  # fmt: skip
    _, alone = augment(images[:, 0], seed=3, **first)
    assert torch.equal(moved.masks.unflatten(0, (5, FRAMES))[:, 0], alone.masks)
    rows = torch.arange(0, 5 * FRAMES, FRAMES)
    for row, sample in zip(rows.tolist(), alone.as_torchvision(), strict=True):
        for name, value in moved.as_torchvision()[row].items():
            if name != "image_id":
                assert torch.equal(value, sample[name]), name
    with pytest.raises(ConfigError, match="`boxes` must have 5 clips of 4 frames"):
        augment(images, boxes=[clip[:3] for clip in boxes])
    with pytest.raises(ConfigError, match="`boxes` must have one list of 4 frames per clip"):
        augment(images, boxes=[1] * 5)


def test_a_table_is_made_once_per_clip() -> None:
    """The noise of a clip of 64 frames takes the memory of the noise of one image."""
    from gpuaug.augment.fused.backend import Part

    made: list[int] = []
    real = Part.tables

    def tables(self: Any, *given: Any, **more: Any) -> Any:
        found = real(self, *given, **more)
        made.extend(values.numel() for _, _, values in found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Part, "tables", tables)
        gpuaug.Augment(ops={"noise": K.RandomGaussianNoise(p=1.0)})(clips(2, 64), seed=0)
    assert 0 < sum(made) <= 2 * 3 * 40 * 48


# -- cameras


def test_cameras_draw_apart_and_do_not_change_each_other() -> None:
    augment = recipe(crop=gpuaug.RandomResizedCrop(32))
    images = clips()
    batch = {"top": images[:, 0], "wrist": images[:, 0], "observation.images.side": images}
    made = augment(batch, seed=3)
    assert list(made) == list(batch)
    assert not torch.equal(made["top"], made["wrist"])
    assert torch.equal(made["wrist"], augment({"wrist": batch["wrist"]}, seed=3)["wrist"])
    assert made["observation.images.side"].shape == (5, FRAMES, 3, 32, 32)


@pytest.mark.parametrize("own", [True, False], ids=["of the recipe", "of Cameras"])
def test_cameras_share_what_is_named(own: bool) -> None:
    share = {"default": True, "jitter": False}
    image = clips()[:, 0]
    for names, same in ((("flip", "affine", "jitter"), False), (("flip", "affine"), True)):
        mine = {name: value for name, value in share.items() if name in ("default", *names)}
        augment = recipe(*names, same_on_camera=mine if own else None)
        cameras = augment if own else gpuaug.Cameras(cameras={"a": augment, "b": augment}, same_on_camera=mine)
        made = cameras({"a": image, "b": image}, seed=3)
        assert torch.equal(made["a"], made["b"]) is same


def test_cameras_of_other_sizes_show_the_same_part() -> None:
    """Half the size, the same recipe: each pixel is the mean of four pixels of the larger result."""
    ramp = torch.linspace(0, 255, 64).round().to(torch.uint8)
    large = torch.stack([ramp.expand(64, 64), ramp[:, None].expand(64, 64), ramp.expand(64, 64)]).repeat(6, 1, 1, 1)
    small = torch.nn.functional.avg_pool2d(large.float(), 2).round().to(torch.uint8)
    ops = {"flip": OPS["flip"], "affine": K.RandomAffine(10.0, scale=(1.1, 1.3), p=1.0)}
    cameras = gpuaug.Cameras(
        cameras={"large": gpuaug.Augment(crop=gpuaug.RandomResizedCrop(64), ops=ops),
                 "small": gpuaug.Augment(crop=gpuaug.RandomResizedCrop(32), ops=ops)},
        same_on_camera={"default": True},
    )  # fmt: skip
    made = cameras({"large": large, "small": small}, seed=1)
    halved = torch.nn.functional.avg_pool2d(made["large"], 2)
    inside = slice(4, -4)  # outside, the image is cut off
    difference = (halved - made["small"])[:, :, inside, inside].abs()
    assert difference.mean() < 1 / 64  # both windows have whole pixels
    assert difference.amax() < 4 / 64


def test_each_camera_has_its_recipe() -> None:
    top = recipe("flip", crop=gpuaug.RandomResizedCrop(32))
    images = clips()
    cameras = gpuaug.Cameras(cameras={"top": top, "wrist": recipe("jitter"), "depth": None})
    depth = torch.rand(5, 1, 7, 9)
    made = cameras({"depth": depth, "top": images[:, 0], "wrist": images}, seed=3)
    assert made["depth"] is depth
    assert torch.equal(made["top"], top({"top": images[:, 0]}, seed=3)["top"])
    assert made["wrist"].shape == images.shape
    masks = images[:, 0, 0]
    _, moved = cameras({"top": images[:, 0]}, masks={"top": masks}, seed=3)["top"]
    assert torch.equal(moved.masks, top({"top": images[:, 0]}, masks={"top": masks}, seed=3)["top"][1].masks)
    assert cameras.fingerprint()["cameras"]["depth"] is None


def test_without_a_seed_cameras_still_share() -> None:
    cameras = recipe("affine", same_on_camera={"affine": True})
    image = clips()[:, 0]
    torch.manual_seed(0)
    first, second = (cameras({"a": image, "b": image}) for _ in range(2))
    assert torch.equal(first["a"], first["b"])
    assert not torch.equal(first["a"], second["a"])


FRAME, CAMERA = "augment.same_on_frame", "augment.same_on_camera"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"same_on_frame": {"flop": False}}, f"`{FRAME}` must have names of crop, flip, user. Found: 'flop'"),
        ({"same_on_frame": {"flip": "field"}}, f"`{FRAME}.flip` must be true or false, because"),
        ({"same_on_frame": {"crop": "field"}}, f"`{FRAME}.crop` must be true or false, because"),
        ({"same_on_frame": {"user": "field"}}, f"`{FRAME}.user` must be true or false, because"),
        ({"same_on_frame": {"flip": 2}}, f"`{FRAME}.flip` must be true, false or field. Found: 2"),
        ({"same_on_frame": ["flip"]}, f"`{FRAME}` must be a mapping"),
        ({"same_on_camera": {"flip": "field"}}, f"`{CAMERA}.flip` must be true or false. Found: 'field'"),
    ],
)
def test_wrong_settings_are_named(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe("flip", "user", **settings)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gpuaug.Cameras(cameras={}), "`augment.cameras` must be a mapping of names to gpuaug.Augment"),
        (lambda: gpuaug.Cameras(cameras={"a": 3}), "`augment.cameras.a`"),
        (lambda: recipe("flip")({"a": clips()[:, 0], "b": clips(2)[:, 0]}), "equally many samples from each camera"),
        (lambda: recipe("flip")({"a": clips(), "b": clips(frames=2)}), "clips equally many frames"),
        (lambda: recipe("flip")({"": clips()}), "`images` must have non-empty strings"),
        (lambda: gpuaug.Cameras(cameras={"a": None})({"b": clips()}), "`images` must have names of a as keys"),
        (lambda: recipe("flip")(clips(), indices=range(20)), "`indices` must be 5 whole numbers, one per clip"),
    ],
)
def test_wrong_calls_are_named(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def test_settings_are_part_of_the_fingerprint_and_of_copies() -> None:
    augment = recipe("flip", same_on_frame={"flip": False}, same_on_camera={"flip": True})
    assert augment.fingerprint()["same_on_frame"] == {"flip": False}
    assert augment.replace(copies=2).same_on_frame == {"flip": False}
    assert "same_on_frame" not in recipe("flip", same_on_frame={"flip": True}).fingerprint()
