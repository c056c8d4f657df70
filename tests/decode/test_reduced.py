"""`decode.reduced`: JPEGs decoded at 1/2, 1/4 or 1/8, against full decoding and against Pillow's own draft mode."""

import io
import logging

import numpy as np
import pytest
from common import loader
from pictures import encode, photograph, photographs
from PIL import Image, ImageOps
from test_decode import exif, pack, png16

import gpuaug
from gpuaug.batch import CropWindows
from gpuaug.decode import dali
from gpuaug.decode.decoder import Decode, Decoder
from gpuaug.tools.pack.command import pack as gpuaug_pack

CODECS = ("jpeg", "png", "tiff")
KINDS = {
    "4:4:4": {"subsampling": 0},
    "4:2:0": {"subsampling": 2},
    "progressive": {"progressive": True},
    "restart markers": {"restart_marker_blocks": 3},
}
REDUCED = Decode(backend="pillow", num_threads=2, reduced=True)


@pytest.fixture(scope="module")
def pair():
    """A decoder with `reduced`, and one without."""
    both = [Decode(backend="pillow", num_threads=2, reduced=on, codecs=CODECS).open("cpu") for on in (True, False)]
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
    found, faults = decoder.pixels(headers, crops)
    return [x.numpy() for x in found], {f.row: f.reason for f in [*headers.faults, *faults]}


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


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_pixels_are_those_of_pillows_draft_mode(pair, orientation, interpolation):
    """Odd sizes, so that the last pixel of a small image reaches over the edge."""
    rng = np.random.default_rng(orientation)
    width, height = (413, 391)
    data = encode(photograph("coffee", (width, height)), exif=exif(orientation), subsampling=0)
    upright = (width, height) if orientation > 4 else (height, width)
    some = [[0, 0, *upright], *boxes(rng, *upright, 240, 5)]
    resample = Image.Resampling[interpolation.upper()]
    for size, scale in (((29, 28), 8), ((57, 55), 4), ((117, 120), 2)):
        (found,), _ = views(pair[0], [data] * len(some), windows(some, size, interpolation=interpolation))
        for image, box in zip(found, some, strict=True):
            if min(box[2] / size[0], box[3] / size[1]) < scale:
                continue
            gap = np.abs(image.astype(int) - by_draft(data, box, size, scale, resample))
            # Pillow rounds between its two passes, whose order is another one in a turned image
            assert gap.max() <= (0 if orientation == 1 else 6)
            assert gap.mean() < 0.3


@pytest.mark.parametrize("kind", ["L", "CMYK", *KINDS])
def test_every_kind_of_jpeg(pair, kind):
    image = photograph("chelsea", (451, 299))
    data = encode(image.convert(kind)) if kind in ("L", "CMYK") else encode(image, **KINDS[kind])
    for size, scale in (((130, 150), 2), ((70, 80), 4), ((20, 24), 8)):
        crop = windows([[3, 5, 291, 440]], size)
        (small,), (full,) = views(pair[0], [data], crop)[0], views(pair[1], [data], crop)[0]
        assert np.abs(small.astype(float) - full).mean() < 1.5
        assert np.abs(small[0].astype(int) - by_draft(data, [3, 5, 291, 440], size, scale, 2)).max() <= 1


def test_nothing_moves(pair):
    """The centre of a bright spot is where full decoding has it, within a tenth of a pixel of the view."""
    y, x = np.mgrid[:611, :803]
    for row, column, box in ((301.3, 402.8, [11, 7, 593, 790]), (212.0, 555.5, [101, 333, 401, 403])):
        spot = 250 * np.exp(-((y - row) ** 2 + (x - column) ** 2) / (2 * 40.0**2))
        data = encode(Image.fromarray(spot.astype(np.uint8)).convert("RGB"), quality=95)
        for size in ((110, 120), (70, 64), (30, 31)):
            crop, centers = windows([box], size), []
            for decoder in pair:
                image, at = views(decoder, [data], crop)[0][0][0, :, :, 1].astype(float), np.mgrid[: size[0], : size[1]]
                centers.append([(image * axis).sum() / image.sum() for axis in at])
            assert np.abs(np.subtract(*centers)).max() < 0.1


def test_the_view_that_needs_most_pixels_decides_the_size(pair):
    data = encode(photograph(size=(1300, 1300)), quality=60)
    large, small = windows([[0, 0, 1000, 1000]], (100, 100)), windows([[0, 0, 300, 300]], (100, 100))
    (one, _), _ = views(pair[0], [data], large, small)
    assert (one[0] == by_draft(data, [0, 0, 1000, 1000], (100, 100), 2, 2)).all()
    placed = CropWindows(np.array([[0, 0, 600, 900]], np.int32), np.array([[60, 90]]), np.array([[5, -20]]), (70, 40))
    (image,), _ = views(pair[0], [data], placed)
    assert (image[0, 5:65] == by_draft(data, [0, 0, 600, 900], (60, 90), 8, 2)[:, 20:60]).all()
    assert not image[0, :5].any()
    assert not image[0, 65:].any()


def test_other_images_and_small_crops_keep_their_bits(pair):
    photo = photograph(size=(320, 300))
    tiff = encode(photo, "TIFF", compression="jpeg")
    turned = encode(photo, exif=exif(6))
    images = [encode(photo, "PNG"), tiff, png16(np.full((300, 320, 3), 300, np.uint16)), encode(photo), turned]
    crop = windows([[0, 0, 300, 320]] * 3 + [[9, 9, 199, 200], [20, 1, 250, 199]], (100, 100))
    found, want = views(pair[0], images, crop), views(pair[1], images, crop)
    assert (found[0][0] == want[0][0]).all()
    assert found[1] == want[1] == {}


@pytest.mark.parametrize("options", [{}, {"progressive": True}])
def test_damaged_files_are_the_faults_of_full_decoding(pair, options):
    data = encode(photograph("flower", (420, 300)), **options)
    rng = np.random.default_rng(1)
    images = [data[:n] for n in (3, 100, len(data) // 3, len(data) // 2, len(data) - 2)]
    for _ in range(25):
        broken = bytearray(data)
        broken[int(rng.integers(0, 700))] = int(rng.integers(256))
        images.append(bytes(broken))
    sizes = pair[0].read_headers(pack(images))
    crop = windows([[0, 0, max(1, h), max(1, w)] for h, w in zip(sizes.height, sizes.width, strict=True)], (20, 20))
    (small,), reduced = views(pair[0], images, crop)
    assert {0, 1, 2, 3, 4} <= set(reduced)
    assert reduced == views(pair[1], images, crop)[1]
    assert not small[list(reduced)].any()


def test_with_dali_it_changes_no_bit_and_says_so(caplog):
    if dali.choose_backend("auto") != "dali":
        pytest.skip("DALI is missing")
    data, crop = encode(photograph("coffee", (500, 400))), windows([[0, 0, 400, 500]], (50, 50))
    with caplog.at_level(logging.WARNING, "gpuaug"):
        one, other = (Decode(num_threads=2, reduced=on).open("cpu") for on in (True, False))
    assert [r.getMessage() for r in caplog.records] == [
        "decode.reduced=true has no effect with DALI. To use it, set decode.backend=pillow"
    ]
    assert (views(one, [data], crop)[0][0] == views(other, [data], crop)[0][0]).all()
    one.close()
    other.close()


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


def test_a_state_belongs_to_its_setting(large):
    full = Decode(backend="pillow", num_threads=2)
    with loader(large, decode=REDUCED, batch_size=2) as one, loader(large, decode=full, batch_size=2) as other:
        next(iter(one))
        state = one.state_dict()
        with pytest.raises(gpuaug.StateError, match="decode: .*reduced.* in the state, None here"):
            other.load_state_dict(state)
        one.load_state_dict(state)


def test_what_stores_pixels_refuses_it(large, tmp_path):
    with pytest.raises(gpuaug.ConfigError, match="Set decode.reduced=false"):
        gpuaug_pack(gpuaug.FolderSource(large), tmp_path / "packed", decode=REDUCED)
