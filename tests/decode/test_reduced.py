"""`decode.reduced`: JPEGs decoded at 1/2, 1/4 or 1/8, against full decoding and against Pillow's own draft mode."""

import io

import numpy as np
import pytest
import torch
from common import loader, recipe
from pictures import encode, photograph, photographs
from PIL import Image, ImageOps
from test_decode import exif, failing_in_decode, pack, png16

import gpuaug
from gpuaug.batch import CropWindows
from gpuaug.decode.dali import CudaPipeline
from gpuaug.decode.decoder import Decode, Decoder
from gpuaug.decode.plan import Plan
from gpuaug.tools.pack.command import pack as gpuaug_pack

CODECS = ("jpeg", "png", "tiff")
KINDS = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "progressive": {"progressive": True},
    "restart markers": {"restart_marker_blocks": 3},
}


@pytest.fixture(scope="module", params=["dali", "pillow"])
def pair(request: pytest.FixtureRequest):
    """A decoder with `reduced`, and one without."""
    both = [Decode(backend=request.param, num_threads=2, reduced=on, codecs=CODECS).open("cpu") for on in (True, False)]
    yield both
    for one in both:
        one.close()


def windows(boxes: list[list[int]], size: tuple[int, int], **more: object) -> CropWindows:
    """Each box of its image, resized to fill the view."""
    sizes = np.full((len(boxes), 2), size, dtype=np.int32)
    return CropWindows(np.array(boxes, dtype=np.int32), sizes, np.zeros_like(sizes), size, **more)


def views(decoder: Decoder, images: list[bytes], *crops: CropWindows) -> tuple[list[np.ndarray], dict[int, str]]:
    """uint8 [B, H, W, 3] per view, and the reasons of the faults."""
    batch = pack(images)
    headers = decoder.read_headers(batch)
    found, faults = decoder.pixels(batch, headers, crops)
    return [x.numpy() for x in found], {f.row: f.reason for f in [*headers.faults, *faults]}


def scales(decoder: Decoder, images: list[bytes], *crops: CropWindows) -> list[int]:
    batch = pack(images)
    return Plan.of(batch, decoder.read_headers(batch), crops).scale.tolist()


def by_draft(data: bytes, box: list[int], size: tuple[int, int], scale: int, filter: int) -> np.ndarray:
    """Pillow's draft mode, turned upright, and its resize of the box.

    The last pixel of the small image may reach over the edge. In a mirrored image it comes first.
    """
    with Image.open(io.BytesIO(data)) as image:
        width, height = image.size
        orientation = image.getexif().get(0x112, 1)
        image.draft(None, (width // scale, height // scale))
        small = ImageOps.exif_transpose(image).convert("RGB")
    over = [-side % scale for side in (height, width)]  # pixels of the large image
    down, right = {1: (0, 0), 2: (0, 1), 3: (1, 1), 4: (1, 0), 5: (0, 0), 6: (1, 0), 7: (1, 1), 8: (0, 1)}[orientation]
    shift = [over[0] * down, over[1] * right]
    if orientation > 4:
        shift.reverse()
    top, left, h, w = box
    y0, x0 = (top + shift[0]) / scale, (left + shift[1]) / scale
    y1, x1 = y0 + h / scale, x0 + w / scale
    corner = int(x0), int(y0)
    part = small.crop((*corner, int(np.ceil(x1)), int(np.ceil(y1))))
    edges = x0 - corner[0], y0 - corner[1], x1 - corner[0], y1 - corner[1]
    return np.asarray(part.resize(size[::-1], filter, box=edges))


def boxes(rng: np.random.Generator, height: int, width: int, least: int, count: int) -> list[list[int]]:
    """Random boxes with sides of at least ``least``."""
    sides = [(int(rng.integers(least, height + 1)), int(rng.integers(least, width + 1))) for _ in range(count)]
    return [[int(rng.integers(0, height - h + 1)), int(rng.integers(0, width - w + 1)), h, w] for h, w in sides]


def test_photographs_differ_by_less_than_a_level(pair):
    rng, images, crops = np.random.default_rng(0), [], []
    for k, photo in enumerate(photographs().values()):
        for options in (*KINDS.values(), {"quality": 95, "subsampling": 0}):
            images.append(encode(Image.fromarray(photo), **{"quality": 80 + k, **options}))
            crops += boxes(rng, *photo.shape[:2], 80, 1)
    crop = windows(crops, (40, 40))
    assert set(scales(pair[0], images, crop)) == {2, 4}
    (small,), (full,) = views(pair[0], images, crop)[0], views(pair[1], images, crop)[0]
    difference = np.abs(small.astype(float) - full).mean(axis=(1, 2, 3))
    assert 0 < difference.mean() <= 1.0
    assert difference.max() <= 3.5


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_pixels_are_those_of_pillows_draft_mode(pair, orientation, interpolation):
    """Odd sizes, so that the last pixel of a small image reaches over the edge; all boxes, all orientations."""
    rng = np.random.default_rng(orientation)
    width, height = (413, 391)
    data = encode(photograph("coffee", (width, height)), exif=exif(orientation), subsampling=0)
    upright = (width, height) if orientation > 4 else (height, width)
    some = [[0, 0, *upright], *boxes(rng, *upright, 60, 5)]
    resample = Image.Resampling[interpolation.upper()]
    for size in ((29, 30), (57, 40), (150, 140)):
        crop = windows(some, size, interpolation=interpolation)
        (found,), _ = views(pair[0], [data] * len(some), crop)
        used = scales(pair[0], [data] * len(some), crop)
        for image, box, scale in zip(found, some, used, strict=True):
            if scale > 1:
                gap = np.abs(image.astype(int) - by_draft(data, box, size, scale, resample))
                # Pillow rounds between its two passes, whose order is another one in a turned image
                assert gap.max() <= (0 if orientation == 1 else 4)
                assert gap.mean() < 0.3


@pytest.mark.parametrize("kind", ["L", "CMYK", *KINDS])
def test_every_kind_of_jpeg(pair, kind):
    image = photograph("chelsea", (451, 299))
    data = encode(image.convert(kind)) if len(kind) < 5 and kind in ("L", "CMYK") else encode(image, **KINDS[kind])
    whole, top = [3, 5, 291, 440], [3, 5, 150, 440]  # decoding stops below the second
    for box, size, scale in ((whole, (130, 150), 2), (whole, (50, 50), 4), (whole, (20, 24), 8), (top, (70, 150), 2)):
        crop = windows([box], size)
        assert scales(pair[0], [data], crop) == [scale]
        (small,), (full,) = views(pair[0], [data], crop)[0], views(pair[1], [data], crop)[0]
        assert np.abs(small.astype(float) - full).mean() < 1.0
        assert np.abs(small[0].astype(int) - by_draft(data, box, size, scale, Image.Resampling.BILINEAR)).max() <= 1


def test_nothing_moves(pair):
    """The centre of a bright spot is where full decoding has it, within a tenth of a pixel of the view."""
    y, x = np.mgrid[:611, :803]
    for row, column, box in ((301.3, 402.8, [11, 7, 593, 790]), (212.0, 555.5, [101, 333, 401, 403])):
        spot = 250 * np.exp(-((y - row) ** 2 + (x - column) ** 2) / (2 * 40.0**2))
        data = encode(Image.fromarray(spot.astype(np.uint8)).convert("RGB"), quality=95)
        for size in ((110, 120), (70, 64), (30, 31)):
            (small,), _ = views(pair[0], [data], windows([box], size))
            (full,), _ = views(pair[1], [data], windows([box], size))
            centers = []
            for image in (small[0, :, :, 1].astype(float), full[0, :, :, 1].astype(float)):
                at = np.mgrid[: size[0], : size[1]]
                centers.append([(image * axis).sum() / image.sum() for axis in at])
            assert np.abs(np.subtract(*centers)).max() < 0.1


def test_the_size_is_a_rule_of_the_crop_alone(pair):
    data = encode(photograph(size=(1300, 1300)), quality=60)
    for side, scale in ((199, 1), (200, 2), (499, 2), (500, 4), (1199, 4), (1200, 8)):
        for box in ([0, 0, side, 1250], [31, 17, 1250, side]):  # the shorter side decides
            assert scales(pair[0], [data], windows([box], (100, 100))) == [scale]
            assert scales(pair[1], [data], windows([box], (100, 100))) == [1]
    large, small = windows([[0, 0, 600, 600]], (100, 100)), windows([[0, 0, 300, 300]], (100, 100))
    assert scales(pair[0], [data], large, small) == [2]  # the view that needs most pixels
    placed = CropWindows(np.array([[0, 0, 600, 900]], np.int32), np.array([[60, 90]]), np.array([[5, -20]]), (70, 40))
    assert scales(pair[0], [data], placed) == [4]
    (image,), _ = views(pair[0], [data], placed)
    want = by_draft(data, [0, 0, 600, 900], (60, 90), 4, Image.Resampling.BILINEAR)
    assert (image[0, 5:65] == want[:, 20:60]).all()
    assert not image[0, :5].any()
    assert not image[0, 65:].any()


def test_other_images_and_small_crops_keep_their_bits(pair):
    photo = photograph(size=(320, 300))
    tiff = encode(photo, "TIFF", compression="jpeg")
    images = [encode(photo, "PNG"), tiff, png16(np.full((300, 320, 3), 300, np.uint16)), encode(photo), encode(photo)]
    crop = windows([[0, 0, 300, 320]] * 3 + [[9, 9, 199, 200], [20, 1, 250, 199]], (100, 100))
    assert scales(pair[0], images, crop) == [1] * 5
    found, want = views(pair[0], images, crop), views(pair[1], images, crop)
    assert (found[0][0] == want[0][0]).all()
    assert found[1] == want[1] == {}


def test_others_in_the_batch_change_nothing(pair):
    """Small, large and damaged images, PNGs: each gives alone what it gives among the others."""
    photo = photograph("astronaut", (500, 400))
    good = encode(photo)
    images = [good, encode(photo, "PNG"), b"rubbish", encode(photo, progressive=True), failing_in_decode(), good]
    size = [[0, 0, 400, 500]] * 6
    size[4] = [0, 0, 60, 60]
    size[5] = [10, 20, 120, 120]
    one, two = windows(size, (64, 80)), windows(size, (40, 40), interpolation="bicubic")
    found, faults = views(pair[0], images, one, two)
    assert 2 in faults
    for k, data in enumerate(images):
        rows = np.array([k])
        alone, fault = views(pair[0], [data], one.take(rows), two.take(rows))
        assert all((a[0] == b[k]).all() for a, b in zip(alone, found, strict=True))
        assert fault.get(0) == faults.get(k)


@pytest.mark.parametrize("options", [{}, {"progressive": True}])
def test_damaged_files_are_the_faults_of_full_decoding(pair, options):
    data = encode(photograph("flower", (420, 300)), **options)
    rng = np.random.default_rng(1)
    images = [data[:n] for n in (3, 100, len(data) // 3, len(data) // 2, len(data) - 2)]
    for _ in range(25):
        broken = bytearray(data)
        broken[int(rng.integers(0, 700))] = int(rng.integers(256))
        images.append(bytes(broken))
    batch = pack(images)
    sizes = pair[0].read_headers(batch)
    crop = windows([[0, 0, max(1, h), max(1, w)] for h, w in zip(sizes.height, sizes.width, strict=True)], (20, 20))
    (small,), reduced = views(pair[0], images, crop)
    _, full = views(pair[1], images, crop)
    assert {0, 1, 2, 3, 4} <= set(reduced)
    assert reduced == full
    assert not small[list(reduced)].any()


def test_a_broken_marker_below_the_crop_is_no_fault(pair):
    data = encode(photograph("flower", (420, 300)), restart_marker_rows=1)
    at = len(data) * 3 // 4
    broken = data[:at] + b"\xff\x19" + data[at + 2 :]  # full decoding goes on at the next restart marker
    crop = windows([[0, 0, 60, 420]] * 2, (20, 140))
    assert scales(pair[0], [broken], crop.take(np.array([0]))) == [2]
    (small,), reduced = views(pair[0], [broken, data], crop)
    _, full = views(pair[1], [broken, data], crop)
    assert reduced == full == {}
    assert (small[0] == small[1]).all()


def test_truncated_files_can_be_accepted():
    data = encode(photograph("flower", (420, 300)))
    crop = windows([[0, 0, 300, 420]], (30, 42))
    found = []
    for on in (True, False):
        decoder = Decode(num_threads=1, reduced=on).open("cpu", accept_truncated=True)
        images, faults = views(decoder, [data[: len(data) * 2 // 3]], crop)
        assert not faults
        assert decoder.truncated == 1
        found.append(images[0].astype(float))
        decoder.close()
    assert np.abs(found[0][:, :18] - found[1][:, :18]).mean() < 1.0  # the part that is there


def test_limits_hold():
    data = encode(photograph(size=(640, 480)))
    crop = windows([[0, 0, 480, 640]] * 3, (48, 64))
    decoder = Decode(num_threads=2, reduced=True, max_pixels=640 * 480 - 1).open("cpu")
    assert "larger than `decode.max_pixels`" in views(decoder, [data] * 3, crop)[1][0]
    usual, tight = (Decode(num_threads=2, reduced=True, max_bytes=n).open("cpu") for n in (2**30, 200_000))
    assert (views(usual, [data] * 3, crop)[0][0] == views(tight, [data] * 3, crop)[0][0]).all()


def test_beside_the_cuda_graph(pair):
    """Reduced rows are made on the host and join the device's views."""
    if pair[0].backend != "dali":
        pytest.skip("only DALI has a graph for CUDA")
    photo = photograph("coffee", (500, 400))
    images = [encode(photo), encode(photo, "BMP"), encode(photo, exif=exif(6)), encode(photo)]
    crop = windows([[0, 0, 400, 500], [0, 0, 400, 500], [0, 0, 500, 400], [5, 5, 90, 90]], (90, 90))
    decoder = Decode(backend="dali", num_threads=2, reduced=True, codecs=(*CODECS, "bmp")).open("cpu")
    decoder._dali = CudaPipeline(decoder.device, num_threads=2, operators="cpu")
    (found,), faults = views(decoder, images, crop)
    (want,), _ = views(pair[0], images[:1] + images[2:], crop.take(np.array([0, 2, 3])))
    assert not faults
    assert (found[[0, 2, 3]] == want).all()
    decoder.close()


# -- loaders --


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory):
    """A folder of ten JPEGs of 600 x 450."""
    root = tmp_path_factory.mktemp("large")
    for k in range(10):
        file = root / "ab"[k % 2] / f"{k}.jpg"
        file.parent.mkdir(exist_ok=True)
        image = photograph(sorted(photographs())[k % 5], (600, 450 + k))
        file.write_bytes(encode(image, exif=exif(1 + k % 8)))
    return root


REDUCED = Decode(num_threads=2, reduced=True)


def two_views() -> gpuaug.MultiView:
    return gpuaug.MultiView(views={"global": recipe(size=48), "local": recipe(size=24)})


def epoch(source: object, **settings: object) -> dict[int, list[torch.Tensor]]:
    """Sample number to its views."""
    with loader(source, **settings) as made:
        return {
            int(number): [view[row] for view in (batch.images if isinstance(batch.images, list) else [batch.images])]
            for batch in made
            for row, number in enumerate(batch.indices)
        }


def test_workers_and_batches_change_nothing(large):
    first = epoch(large, augment=two_views(), decode=REDUCED, batch_size=10)
    for more in ({"num_workers": 2, "batch_size": 3}, {"batch_size": 1}):
        again = epoch(large, augment=two_views(), decode=REDUCED, **more)
        for number, images in first.items():
            for a, b in zip(images, again[number], strict=True):
                assert torch.allclose(a, b, atol=2e-5)  # Kornia's modules round differently in other batches
    full = epoch(large, augment=two_views(), batch_size=10)
    assert any(not torch.equal(a, b) for number in first for a, b in zip(first[number], full[number], strict=True))


class Boxed:
    """Photographs of 600 x 450 with a box and a mask."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int):
        mask = np.zeros((450, 600), np.uint8)
        mask[100 : 200 + index, 300:500] = 3
        box = [[300, 100, 500, 200 + index]]
        target = gpuaug.Target(mask=encode(Image.fromarray(mask), "PNG"), boxes=box, labels=[3], size=(450, 600))
        return encode(photograph("china", (600, 450))), target

    def key(self, index: int) -> str:
        return str(index)


def test_targets_are_those_of_full_decoding():
    crop = gpuaug.RandomResizedCrop(40, scale=(0.5, 1.0))
    settings = {
        "augment": gpuaug.Augment(crop=crop, normalize=None, backend="fused"),
        "targets": gpuaug.Targets(masks=gpuaug.Masks(), boxes=gpuaug.Boxes()),
        "batch_size": 6,
    }
    with loader(Boxed(), decode=REDUCED, **settings) as one, loader(Boxed(), **settings) as other:
        (small,), (full,) = list(one), list(other)
    assert not torch.equal(small.images, full.images)
    assert torch.equal(small.targets.masks, full.targets.masks)
    assert len(full.targets.boxes)
    assert torch.equal(small.targets.boxes, full.targets.boxes)


def test_a_state_belongs_to_its_setting(large):
    with loader(large, decode=REDUCED, batch_size=2) as one, loader(large, batch_size=2) as other:
        next(iter(one))
        state = one.state_dict()
        with pytest.raises(gpuaug.StateError, match="decode: .*reduced.* in the state, None here"):
            other.load_state_dict(state)
        one.load_state_dict(state)


def test_what_stores_pixels_refuses_it(large, tmp_path):
    with pytest.raises(gpuaug.ConfigError, match="Set decode.reduced=false"):
        gpuaug_pack(gpuaug.FolderSource(large), tmp_path / "packed", decode=REDUCED)


def test_the_setting_is_checked():
    with pytest.raises(gpuaug.ConfigError, match="`reduced` must be"):
        Decode(reduced=2)
    assert not gpuaug.compose("train", ["source.root=x"]).decode.reduced
