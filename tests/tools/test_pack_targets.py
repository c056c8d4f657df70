"""Packing with masks, boxes and keypoints: the same targets as the original, formulas for smaller sizes, faults."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from pathlib import Path

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from pictures import encode, photograph, png
from PIL import Image

import gpuaug
from gpuaug.decode.decoder import Decode
from gpuaug.errors import DataError, SourceError
from gpuaug.loader.faults import Faults
from gpuaug.source import runs
from gpuaug.source.base import digest
from gpuaug.source.packed import MANIFEST, PackedSource
from gpuaug.source.shards import ShardSource
from gpuaug.targets import geometry, masks
from gpuaug.tools.main import main
from gpuaug.tools.pack import shards as writing
from gpuaug.tools.pack.command import pack, write_manifest
from gpuaug.tools.pack.job import Pack
from gpuaug.tools.pack.targets import encode_mask

PILLOW = Decode(backend="pillow")
COUNT, POINTS = 11, 3
SIZES = [(60, 80), (91, 57), (40, 40), (75, 101)]  # (height, width), stored
ALL = gpuaug.Targets(masks=gpuaug.Masks(), boxes=gpuaug.Boxes(crowd="keep"), keypoints=gpuaug.Keypoints())


def palette(values: np.ndarray) -> bytes:
    image, out = Image.fromarray(values).convert("P"), io.BytesIO()
    image.putdata(values.reshape(-1).tolist())
    image.putpalette([(37 * k) % 256 for k in range(768)])
    image.save(out, "PNG")
    return out.getvalue()


class Scenes:
    """Photographs with masks of all kinds; some are turned by EXIF, with targets for the stored image."""

    target_kinds = frozenset({"masks", "boxes", "keypoints"})
    num_keypoints = POINTS
    flip_pairs = (0, 2, 1)
    classes = tuple(f"thing {k}" for k in range(9))

    def __init__(self, change: dict[int, dict] | None = None) -> None:
        rng = np.random.default_rng(1)
        self.items = []
        for i in range(COUNT):
            h, w = SIZES[i % 4]
            count = i % 4
            corner = rng.uniform(0, 0.6, (count, 2)) * (w, h)
            boxes = np.concatenate([corner, corner + rng.uniform(0.1, 0.4, (count, 2)) * (w, h)], axis=1)
            points = np.concatenate(
                [rng.uniform(0, 1, (count, POINTS, 2)) * (w, h), rng.integers(0, 3, (count, POINTS, 1))], axis=2
            )
            values = rng.integers(0, 256, (h, w)).astype(np.uint8)
            forms = [png(values), palette(values), png(values.astype(np.uint16) * 200), runs.encode(values // 64)]
            fields = {"mask": forms[i % 4], "boxes": boxes, "labels": rng.integers(0, 9, count), "keypoints": points,
                      "ids": 50 * i + np.arange(count), "crowd": np.arange(count) == 2, "size": (h, w),
                      "area": rng.uniform(1, 99, count)}  # fmt: skip
            fields |= (change or {}).get(i, {})
            exif = Image.Exif()
            exif[274] = 1 if i < 5 else i - 3  # 2 .. 7
            image = encode(photograph(size=(w, h)), "JPEG", quality=95, exif=exif)
            self.items.append((image, gpuaug.Target(**fields)))

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[bytes, gpuaug.Target]:
        return self.items[index]

    def key(self, index: int) -> str:
        return f"scene/{index}"


def run(source: object, out: Path, *, policy: str = "raise", **what: object) -> dict:
    how = {"decode": PILLOW, "faults": Faults(policy=policy), "num_workers": 0}
    return pack(source, out, what=Pack(**{"samples": 4, **what}), **how)


@pytest.fixture(scope="module", params=["jpeg", "uint8"])
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("targets") / request.param
    run(Scenes(), out, sizes=[24, 400], format=request.param)
    return out


def batches(source: object, targets: gpuaug.Targets = ALL, **settings: object) -> list[gpuaug.Batch]:
    ops = {"flip": K.RandomHorizontalFlip(p=0.5), "turn": K.RandomAffine(degrees=20.0, p=0.7)}
    recipe = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(32, scale=(0.4, 1)), ops=ops)
    usual = {"augment": recipe, "batch_size": 4, "num_workers": 0, "seed": 3, "device": "cpu", "decode": PILLOW}
    with gpuaug.Loader(source, targets=targets, **usual | settings) as loader:
        return list(loader)


def test_training_sees_the_same_targets(packed: Path) -> None:
    """No image is larger than the packed size, so nothing is resized; seven are turned upright."""
    source = PackedSource(packed)
    assert source.target_kinds == Scenes.target_kinds
    assert source.num_keypoints == POINTS
    assert source.flip_pairs == (0, 2, 1)
    assert source.classes == [*Scenes.classes]
    assert all(target._checked for _, target in source)  # not again in each batch
    other = PackedSource(packed, classes=[*reversed(Scenes.classes), "more"])
    assert other.num_classes == 10
    assert (8 - other[3][1].labels == source[3][1].labels).all()
    with pytest.raises(SourceError, match="`source.classes` has 5 classes, but lacks 4"):
        PackedSource(packed, classes=Scenes.classes[:5])
    settings = {"num_workers": 2} if packed.name == "jpeg" else {}
    for a, b in zip(batches(Scenes()), batches(source, **settings), strict=True):
        assert torch.equal(a.indices, b.indices)
        assert torch.equal(a.targets.masks, b.targets.masks)
        assert a.targets.counts.tolist() == b.targets.counts.tolist()
        assert sum(a.targets.counts) > 0
        for name in ("labels", "ids", "crowd", "area", "sample", "sizes"):
            assert torch.equal(getattr(a.targets, name), getattr(b.targets, name)), name
        assert torch.allclose(a.targets.boxes, b.targets.boxes, atol=1e-3)
        assert torch.allclose(a.targets.keypoints, b.targets.keypoints, atol=1e-3)


def test_smaller_sizes_follow_the_formulas(packed: Path) -> None:
    source, whole, original = PackedSource(packed, size=24), PackedSource(packed), Scenes()
    assert (source.shapes().min(axis=1) == 24).all()
    for i in range(COUNT):
        (_, target), (_, large) = source[i], whole[i]
        (h, w), (height, width) = source.shapes()[i], whole.shapes()[i]
        assert target.size == (h, w)
        assert large.size == (height, width)
        scale = np.array([w / width, h / height])
        np.testing.assert_allclose(target.boxes.reshape(-1, 2), large.boxes.reshape(-1, 2) * scale, atol=1e-4)
        seen = large.keypoints[..., 2] > 0
        want = (large.keypoints[..., :2] + 0.5) * scale - 0.5
        np.testing.assert_allclose(target.keypoints[seen][:, :2], want[seen], atol=1e-4)
        np.testing.assert_allclose(target.area, large.area * scale.prod(), rtol=1e-5)
        values = [masks.decode(t.mask, stored=t.size, exif=1, max_pixels=10**6) for t in (target, large)]
        rows = (2 * np.arange(h) + 1) * height // (2 * h)
        columns = (2 * np.arange(w) + 1) * width // (2 * w)
        assert (values[0] == values[1][rows][:, columns]).all()
        if i < 5:  # not turned
            stored = masks.decode(original[i][1].mask, stored=(height, width), exif=1, max_pixels=10**6)
            assert (values[1] == stored).all()
            np.testing.assert_array_equal(large.boxes, original[i][1].boxes.astype(np.float32))


def test_each_epoch_has_the_targets_of_its_size(packed: Path) -> None:
    recipe = gpuaug.Augment(crop=gpuaug.Resize((16, 16)))
    usual = {"augment": recipe, "batch_size": 11, "num_workers": 0, "device": "cpu", "decode": PILLOW, "targets": ALL}
    with gpuaug.Loader(PackedSource(packed, size={0: 24, 1: 400}), **usual) as loader:
        first, second = next(iter(loader)).targets, next(iter(loader)).targets
    for targets, size in ((first, 24), (second, 400)):
        shapes = PackedSource(packed, size=size).shapes()
        assert (targets.sizes.numpy() == shapes[targets.indices.numpy()]).all()


def test_a_url_gives_the_same(packed: Path) -> None:
    pytest.importorskip("fsspec")
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(str(packed), f"/{packed.name}", recursive=True)
    here, there = PackedSource(packed), PackedSource(f"memory://{packed.name}")
    for i in range(COUNT):
        (a, x), (b, y) = here[i], there[i]
        assert bytes(a) == bytes(b)
        assert bytes(x.mask) == bytes(y.mask)
    for a, b in zip(batches(here), batches(there), strict=True):
        assert torch.equal(a.targets.masks, b.targets.masks)


def test_tars_stay_webdataset(tmp_path: Path) -> None:
    run(Scenes(), tmp_path / "out")
    with tarfile.open(tmp_path / "out" / "full" / "00000.tar") as tar:
        assert tar.getnames() == [f"{i:09d}.{end}" for i in range(4) for end in ("jpg", "seg.png")]
        mask = Image.open(io.BytesIO(tar.extractfile("000000001.seg.png").read()))
        assert mask.mode == "L"  # without the palette
    shards, source = ShardSource(str(tmp_path / "out" / "full"), labels="none"), PackedSource(tmp_path / "out")
    assert [shards[i][0] for i in range(COUNT)] == [bytes(source[i][0]) for i in range(COUNT)]


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("largest", [1, 255, 256, 65535, 65536, 2**24 - 1])
def test_masks_are_exact(raw: bool, largest: int) -> None:
    rng = np.random.default_rng(largest)
    for side in (1, 9, 64):
        noise = rng.integers(0, largest + 1, (side, side + 3))
        calm = np.sort(noise.reshape(-1)).reshape(noise.shape)
        for values in (noise, calm, np.full_like(noise, largest)):
            mask = values.astype(np.uint8 if largest < 256 else np.int32)
            data = encode_mask(mask, raw=raw)
            back = masks.decode(data, stored=mask.shape, exif=1, max_pixels=10**6)
            assert (back == mask).all()


BAD = {
    "no mask": {"mask": None},
    "damaged": {"mask": b"x" * 40},
    "other size": {"mask": png(np.zeros((5, 6), np.uint8))},
    "inverted": {"boxes": [[9, 0, 3, 4.0]] * 2},
    "annotated size": {"size": (7, 7)},
}


def test_a_bad_target_is_a_fault_of_its_sample(packed: Path, tmp_path: Path) -> None:
    source = Scenes(dict(enumerate(BAD.values(), 3)))
    with pytest.raises(DataError, match="scene/3"):
        run(source, tmp_path / "raised", sizes=30)
    form = packed.name
    found = run(source, tmp_path / "out", policy="drop", sizes=[24, 400], format=form)
    assert [entry["key"] for entry in found["dropped"]] == [f"scene/{k}" for k in range(3, 8)]
    clean, left = PackedSource(packed), PackedSource(tmp_path / "out")
    for k, i in enumerate([0, 1, 2, 8, 9, 10]):
        (a, x), (b, y) = left[k], clean[i]
        assert bytes(a) == bytes(b)
        assert bytes(x.mask) == bytes(y.mask)
        assert np.array_equal(x.boxes, y.boxes)
        assert np.array_equal(x.keypoints, y.keypoints)
        assert x.ids.tolist() == y.ids.tolist()


def test_an_index_that_no_pack_wrote_is_refused(packed: Path, tmp_path: Path) -> None:
    """With checksums that are right, as another program could write them."""
    shutil.copytree(packed, out := tmp_path / "out")
    manifest = json.loads((out / MANIFEST).read_text())
    for name, change, reason in (
        ("object_bounds", lambda bounds: bounds[::-1], "must ascend from 0"),
        ("24.boxes", lambda boxes: boxes[1:], r"24\.boxes\.npy .* cannot be read"),
        ("24.mask_offsets", lambda begins: begins + 2**40, "points outside its files"),
        ("24.mask_offsets", lambda begins: begins * 0, "must come after their images"),
    ):
        file = out / "index" / f"{name}.npy"
        before = file.read_bytes()
        np.save(file, change(np.load(file)).copy())
        entry = [file.stat().st_size, digest(file.read_bytes())]
        write_manifest(out / MANIFEST, {**manifest, "files": {**manifest["files"], f"index/{name}.npy": entry}})
        with pytest.raises(SourceError, match=reason):
            PackedSource(out, size=24)
        file.write_bytes(before)


def test_sources_that_declare_nothing_and_samples_without_objects(tmp_path: Path) -> None:
    items = [(data, gpuaug.Target(boxes=target.boxes, labels=target.labels)) for data, target in Scenes().items]
    run(items, tmp_path / "boxes", samples=1)
    source = PackedSource(tmp_path / "boxes")
    assert source.target_kinds == {"boxes"}
    for a, (_, b) in zip(source, items, strict=True):
        assert len(a[1].boxes) == len(b.boxes)
    run([(data, gpuaug.Target(mask=target.mask, label=7)) for data, target in Scenes().items], tmp_path / "masks")
    source = PackedSource(tmp_path / "masks")
    assert source.target_kinds == {"masks"}
    assert source[3][1].label == source.label(3).label == 7
    points = [(d, gpuaug.Target(keypoints=t.keypoints, labels=t.labels)) for d, t in Scenes().items]
    run(points, tmp_path / "points")
    only = gpuaug.Targets(keypoints=gpuaug.Keypoints())
    for a, b in zip(batches(points, only), batches(PackedSource(tmp_path / "points"), only), strict=True):
        assert torch.allclose(a.targets.keypoints, b.targets.keypoints, atol=1e-3)


def test_fractions_become_pixels_and_large_images_are_packed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Annotations as YOLO has them; and the same bytes if the images of a batch do not fit beside each other."""
    box = np.array([[0.25, 0.5, 0.75, 1.0]])
    items = [
        (d, gpuaug.Target(mask=t.mask, boxes=box, labels=[k], fractions=True))
        for k, (d, t) in enumerate(Scenes().items)
    ]
    run(items, tmp_path / "a", sizes=[24])
    source = PackedSource(tmp_path / "a")
    assert source.target_kinds == {"masks", "boxes"}
    for i in range(COUNT):
        h, w = source.shapes()[i]
        # from orientation 5 on, the size of the mask tells that the annotations are for the stored image
        turn = geometry.orientation(np.array([i - 3 if i >= 8 and h != w else 1]), np.ones((1, 2)))
        np.testing.assert_allclose(source[i][1].boxes, geometry.hulls(turn, box) * (w, h, w, h), rtol=1e-6)
        assert source[i][1].labels.tolist() == [i]
    monkeypatch.setattr(writing, "_CANVAS_BYTES", 100)
    run(items, tmp_path / "b", sizes=[24])
    names = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i, (data, target) in enumerate(Scenes().items):
        if i % 4 != 3:  # runs are no files
            for name, content in (("images/{}.jpg", data), ("masks/{}.png", target.mask)):
                file = tmp_path / "in" / name.format(i)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
    call = ["pack", "source=masks", f"source.root={tmp_path / 'in'}", f"out={tmp_path / 'out'}", "sizes=[24]"]
    assert main([*call, "num_workers=0", f"json={tmp_path / 'r.json'}"]) == 0
    assert "masks" in capsys.readouterr().out
    assert json.loads((tmp_path / "r.json").read_text())["targets"] == ["masks"]
    words = ["source=packed", f"source.root={tmp_path / 'out'}", "targets=segmentation", "augment=standard"]
    with gpuaug.build(gpuaug.compose("train", [*words, "augment.crop.size=16", "device=cpu"])) as loader:
        _, found = next(iter(loader))
    assert found.shape[1:] == (16, 16)
    assert main([*call, "pixel_centers=maybe"]) == 2
