"""Decode against Pillow (whole images) and torch (crop, then resize), on every codec and on bytes that are none."""

from __future__ import annotations

import io
import json
import logging
import os
import struct
import subprocess
import sys
import zlib
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec

import hostile
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, SHARED
from pictures import encode, photograph
from PIL import Image, ImageOps

import gpuaug
from gpuaug.augment.crop import RandomCrop, RandomResizedCrop, Resize, ResizeCenterCrop
from gpuaug.batch import CropWindows, EncodedBatch, Fault
from gpuaug.decode import header, pillow, request
from gpuaug.decode.dali import CpuPipeline, CudaPipeline
from gpuaug.decode.decoder import Decode, Decoder
from gpuaug.errors import ConfigError, GpuaugError

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CHILD = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, SHARED))}
BACKENDS = ["dali", "pillow"]


# -- images --


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png16(array: np.ndarray) -> bytes:
    """A 16-bit PNG of uint16 [h, w, 1..4], which Pillow cannot write in colour."""
    h, w, channels = array.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in array)
    head = struct.pack(">IIBBBBB", w, h, 16, {1: 0, 2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def exif(orientation: int) -> Image.Exif:
    out = Image.Exif()
    out[0x112] = orientation
    return out


def translucent() -> Image.Image:
    pixels = np.asarray(photograph().convert("RGBA")).copy()
    pixels[..., 3] = np.arange(pixels.shape[1]) % 256
    return Image.fromarray(pixels)


def animation(form: str, **options) -> bytes:
    return encode(
        photograph(), form, save_all=True, append_images=[photograph().rotate(20), photograph().rotate(40)], **options
    )


KINDS = {
    "jpeg 4:4:4": lambda: encode(photograph(), subsampling=0, quality=90),
    "jpeg 4:2:2": lambda: encode(photograph(), subsampling=1),
    "jpeg 4:2:0": lambda: encode(photograph(), subsampling=2),
    "jpeg 4:2:0 progressive": lambda: encode(photograph("flower"), subsampling=2, progressive=True),
    "jpeg grayscale": lambda: encode(photograph().convert("L")),
    "jpeg grayscale progressive": lambda: encode(photograph().convert("L"), progressive=True),
    "jpeg optimized, restarts": lambda: encode(photograph("astronaut"), optimize=True, restart_marker_rows=1),
    "jpeg of two images": lambda: animation("MPO"),
    "jpeg with a thumbnail": lambda: with_thumbnail(),
    "png": lambda: encode(photograph(), "PNG"),
    "png RGBA": lambda: encode(translucent(), "PNG"),
    "png P": lambda: encode(photograph().quantize(60), "PNG"),
    "png P translucent": lambda: encode(photograph().quantize(60), "PNG", transparency=bytes(range(60))),
    "png P one transparent": lambda: encode(photograph().quantize(60), "PNG", transparency=3),
    "png P 4 bits": lambda: encode(photograph().quantize(13), "PNG", bits=4),
    "png L": lambda: encode(photograph().convert("L"), "PNG"),
    "png LA": lambda: encode(translucent().convert("LA"), "PNG"),
    "png 1": lambda: encode(photograph().convert("1"), "PNG"),
    "png RGB one transparent": lambda: encode(photograph(), "PNG", transparency=(1, 2, 3)),
    "png animated": lambda: animation("PNG"),
    "png animated, own first": lambda: animation("PNG", default_image=True),
    "webp": lambda: encode(photograph(), "WEBP", quality=80),
    "webp lossless": lambda: encode(photograph(), "WEBP", lossless=True),
    "webp alpha": lambda: encode(translucent(), "WEBP", quality=80),
    "webp alpha lossless": lambda: encode(translucent(), "WEBP", lossless=True),
    "webp animated": lambda: animation("WEBP"),
    "bmp": lambda: encode(photograph(), "BMP"),
    "bmp L": lambda: encode(photograph().convert("L"), "BMP"),
    "bmp P": lambda: encode(photograph().quantize(200), "BMP"),
    "bmp 1": lambda: encode(photograph().convert("1"), "BMP"),
    "bmp 32": lambda: encode(translucent(), "BMP"),
    "avif": lambda: encode(translucent(), "AVIF"),
    "gif": lambda: encode(photograph(), "GIF"),
    "gif animated": lambda: animation("GIF"),
}
KINDS = {name: cache(make) for name, make in KINDS.items()}


def with_thumbnail() -> bytes:
    """A JPEG whose EXIF block holds another whole JPEG, end marker included."""
    small = encode(photograph().resize((40, 30)))
    block = b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0" + small
    data = encode(photograph())
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block + data[2:]


def by_pillow(data: bytes) -> np.ndarray:
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    image.info.pop("transparency", None)
    return np.asarray(image.convert("RGB"))


# -- batches --


def pack(images: list[bytes], faults: tuple[Fault, ...] = ()) -> EncodedBatch:
    count = len(images)
    return EncodedBatch(
        images=tuple(np.frombuffer(data, dtype=np.uint8) for data in images),
        labels=None,
        indices=torch.arange(count),
        repeats=torch.zeros(count, dtype=torch.int64),
        valid=torch.ones(count, dtype=torch.bool),
        faults=faults,
    )


def uniforms(crop, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((count, crop.count), dtype=np.float32)


def views(decoder: Decoder, images: list[bytes], *crops, seed: int = 0):
    """(one uint8 array per view, faults, boxes per view) of a batch."""
    batch = pack(images)
    look = decoder.read_headers(batch)
    boxes = [c.windows(uniforms(c, len(images), seed + k), look.height, look.width) for k, c in enumerate(crops)]
    found, faults = decoder.pixels(look, boxes)
    assert all(x.dtype == torch.uint8 and x.device == decoder.device for x in found)
    return [x.cpu().numpy() for x in found], [*look.faults, *faults], boxes


def whole(decoder: Decoder, data: bytes) -> np.ndarray:
    return decoder.whole(decoder.read_headers(pack([data]))).cpu().numpy()


def expected(image: np.ndarray, boxes: CropWindows, k: int) -> np.ndarray:
    """The rule of `CropWindows`, with torch's own resize of the cropped pixels."""
    top, left, height, width = boxes.window[k].tolist()
    (h, w), (y, x), (H, W) = boxes.resized[k].tolist(), boxes.offset[k].tolist(), boxes.size
    part = torch.from_numpy(image[top : top + height, left : left + width].copy()).permute(2, 0, 1)[None]
    if (height, width) != (h, w):
        part = F.interpolate(part, (h, w), mode=boxes.interpolation, antialias=True)
    source = part[0].permute(1, 2, 0).numpy()
    out = np.full((H, W, 3), boxes.fill, dtype=np.uint8)
    y0, y1, x0, x1 = max(y, 0), min(y + h, H), max(x, 0), min(x + w, W)
    if y0 < y1 and x0 < x1:
        out[y0:y1, x0:x1] = source[y0 - y : y1 - y, x0 - x : x1 - x]
    return out


@pytest.fixture(scope="module", params=BACKENDS)
def decoder(request):
    out = Decode(backend=request.param, num_threads=2).open("cpu")
    yield out
    out.close()


@pytest.fixture(scope="module")
def dali():
    out = Decode(backend="dali", num_threads=2).open("cpu")
    yield out
    out.close()


# -- whole images --


@pytest.mark.parametrize("kind", KINDS)
def test_full_image_is_pillows(decoder, kind):
    data = KINDS[kind]()
    found, want = whole(decoder, data), by_pillow(data)
    assert found.shape == want.shape
    assert (found == want).all()


@pytest.mark.parametrize("progressive", [False, True])
def test_cmyk_is_pillows_within_one(decoder, progressive):
    data = encode(photograph().convert("CMYK"), progressive=progressive)
    at = data.index(b"\xff\xee\0\x0eAdobe")
    for each in (data, data[:at] + data[at + 16 :]):  # programs that remove metadata remove Adobe's segment too
        assert np.abs(whole(decoder, each).astype(int) - by_pillow(each)).max() <= 1


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied_for_every_codec(decoder, form, orientation):
    data = encode(photograph(), form, exif=exif(orientation), **({"lossless": True} if form == "WEBP" else {}))
    want = by_pillow(data)
    assert want.shape[:2] == ((251, 187) if orientation > 4 else (187, 251))
    found, faults, boxes = views(decoder, [data] * 3, RandomResizedCrop(64), RandomCrop(50), ResizeCenterCrop(70, 80))
    assert not faults
    for view, box in zip(found, boxes, strict=True):
        for k in range(3):
            assert (view[k] == expected(want, box, k)).all()
    assert (whole(decoder, data) == want).all()


def test_orientation_in_xmp_counts_where_exif_is_silent(decoder):
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf tiff:Orientation="6"/></x:xmpmeta>'
    for form in ("JPEG", "WEBP"):
        data = encode(photograph(), form, xmp=xmp)
        assert by_pillow(data).shape[:2] == (251, 187)
        assert (whole(decoder, data) == by_pillow(data)).all()


def test_sixteen_bits_are_scaled(decoder):
    """Full range to full range: gray is rounded, of colours Pillow takes the high byte."""
    values = np.random.default_rng(0).integers(0, 65536, (40, 60, 4)).astype(np.uint16)
    for channels in (1, 2, 3, 4):
        want = np.round(values[..., : channels if channels > 2 else 1] / 257.0).astype(int)[..., :3]
        found = whole(decoder, png16(values[..., :channels])).astype(int)
        assert np.abs(found - want).max() <= (0 if channels == 1 else 1)


def only_fault(decoder: Decoder, data: bytes) -> str:
    """The reason why these bytes are a fault."""
    _, (fault,), _ = views(decoder, [data], Resize((8, 8)))
    return fault.reason


@pytest.mark.parametrize("bits", [16, 32])
def test_bmps_with_masks_are_pillows(decoder, bits):
    body = np.random.default_rng(0).bytes(12 * 10 * bits // 8)
    masks = [(), (0xF800, 0x7E0, 0x1F)] if bits == 16 else [(0xFF0000, 0xFF00, 0xFF), (0xFF000000, 0xFF0000, 0xFF00)]
    for rgb in masks:
        data = hostile.bmp(bits, compression=3 if rgb else 0, masks=rgb, height=12, width=10, body=body)
        assert (whole(decoder, data) == by_pillow(data)).all()
    assert "bitfields layout" in only_fault(decoder, hostile.bmp(bits, compression=3, masks=(0xF0, 0xF00, 0xF)))


def test_ppms_are_scaled_to_their_largest_value(decoder):
    values = np.random.default_rng(0).integers(0, 201, (12, 10, 3))
    for kind, shown in ((b"P5", values[..., :1]), (b"P6", values)):
        for most in (200, 255, 1000, 65535):
            body = (shown * (most // 200)).astype("u1" if most < 256 else ">u2").tobytes()
            data = kind + b"\n# a comment\n10 12\n%d\n" % most + body
            assert np.abs(whole(decoder, data) - shown * (most // 200) * 255 / most).max() <= 0.51
            assert only_fault(decoder, data[:-1])


def tiff(samples: np.ndarray, bits: int, *, kind: int = 1) -> bytes:
    """An uncompressed TIFF of uint8 [h, bytes of a row] packed samples, or of an array [h, w, channels]."""
    h, w = samples.shape[:2]
    channels = samples.shape[2] if samples.ndim == 3 else 1
    w = w * 8 // bits if samples.ndim == 2 else w
    photometric = 2 if channels >= 3 else 1
    wide = struct.pack(f"<{channels}H", *[bits] * channels)
    where = 8 + 2 + 12 * 12 + 4
    data = where + len(wide)
    entries = [
        (256, 4, 1, w), (257, 4, 1, h), (258, 3, channels, bits if channels == 1 else where), (259, 3, 1, 1),
        (262, 3, 1, photometric), (273, 4, 1, data), (277, 3, 1, channels), (278, 4, 1, h),
        (279, 4, 1, samples.nbytes), (284, 3, 1, 1), (338, 3, min(2, max(channels - 3, 0)), 0), (339, 3, 1, kind),
    ]  # fmt: skip
    out = b"II*\0\x08\0\0\0" + struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *e) for e in entries)
    return out + bytes(4) + wide + samples.tobytes()


def test_tiff_and_jpeg2000_on_request(caplog):
    asked = Decode(codecs=["tiff", "png", "jpeg2000"]).open("cpu")
    for data in (
        *(encode(photograph(), form) for form in ("TIFF", "JPEG2000")),
        encode(photograph(), "TIFF", exif=exif(6)),
    ):
        assert (whole(asked, data) == by_pillow(data)).all()
        assert "is not among `decode.codecs`" in only_fault(Decode().open("cpu"), data)
    ramp = np.linspace(0, 1, 40 * 60, dtype=np.float32).reshape(40, 60)
    assert "floating-point" in only_fault(asked, encode(Image.fromarray(ramp), "TIFF"))
    assert "signed or 32-bit" in only_fault(asked, encode(Image.fromarray((ramp * 9999).astype(np.int32)), "TIFF"))
    bands = np.zeros((40, 60, 13), dtype=np.uint8)
    assert "samples per pixel" in only_fault(asked, tiff(bands, 8))
    five = tiff(bands[..., :5].copy(), 8)
    assert Image.open(io.BytesIO(five)).mode.startswith("RGB")
    assert "tiff of 5 channels" in only_fault(asked, five)
    gray = (ramp * 255).astype(np.uint8)
    assert "more than 8 bits" not in caplog.text
    with caplog.at_level(logging.INFO, logger="gpuaug"):
        deep = gray.astype(np.uint16) * 257
        for data in (
            encode(Image.fromarray(deep), "TIFF"),
            png16(deep[..., None]),
            tiff(deep.astype("<u2")[..., None], 16),
        ):
            assert (whole(asked, data) == gray[..., None]).all()
        twelve = (ramp * 4095).astype(np.uint16).reshape(40, 30, 2)
        packed = np.stack(
            [twelve[..., 0] >> 4, (twelve[..., 0] & 15) << 4 | twelve[..., 1] >> 8, twelve[..., 1] & 255], axis=2
        )
        found = whole(asked, tiff(packed.astype(np.uint8).reshape(40, 90), 12))
        assert np.abs(found[..., 0] - ramp * 255).max() <= 1
    assert caplog.text.count("more than 8 bits") == 1


def test_gifs_that_exceed_their_screen(decoder):
    for screen in ((0, 0), (100, 100), (251, 100)):
        data = bytearray(encode(photograph(), "GIF"))
        data[6:10] = struct.pack("<HH", *screen)
        found = whole(decoder, bytes(data))
        assert found.shape == (187, 251, 3)
        assert (found == by_pillow(KINDS["gif"]())).all()


def test_a_lossless_jpeg_is_pillows(decoder):
    """A GPU's decoder gives zeros for some of them, without an error."""
    gray = np.asarray(photograph(size=(56, 40)).convert("L"))
    before = decoder.rescued
    assert (whole(decoder, hostile.lossless_jpeg(gray)) == gray[..., None]).all()
    assert decoder.rescued == before


# -- views --

MIXED = ("jpeg 4:2:0", "png P", "jpeg grayscale", "webp", "gif", "jpeg 4:2:0 progressive", "bmp", "jpeg 4:4:4")


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_a_view_is_torchs_resize_of_the_crop(decoder, interpolation):
    images = [KINDS[k]() for k in MIXED]
    crops = [
        RandomResizedCrop((97, 64), interpolation=interpolation),
        RandomResizedCrop(300, scale=(0.01, 0.1), interpolation=interpolation),
        ResizeCenterCrop(100, (90, 120), interpolation=interpolation),
        Resize((33, 350), interpolation=interpolation),
        RandomCrop((100, 120)),
        RandomCrop((240, 300), padding=(60, 40, 70, 30), fill=9),
        ResizeCenterCrop(30, (50, 60)),
    ]
    found, faults, boxes = views(decoder, images, *crops)
    assert not faults
    for view, box in zip(found, boxes, strict=True):
        for k, data in enumerate(images):
            assert (view[k] == expected(by_pillow(data), box, k)).all()


def raw(data: bytes) -> bytes:
    """The pixels of an encoded image as `gpuaug pack` writes them."""
    image = by_pillow(data)
    return header.raw_header(*image.shape[:2]) + image.tobytes()


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_raw_pixels_give_the_views_that_their_images_give(decoder, interpolation):
    """Bit for bit, alone and among encoded ones; what is cut short or too long is a fault."""
    images = [KINDS[k]() for k in MIXED]
    raws = [raw(data) for data in images]
    mixed = [a if k % 2 else b for k, (a, b) in enumerate(zip(images, raws, strict=True))]
    crops = [
        RandomResizedCrop((97, 64), interpolation=interpolation),
        ResizeCenterCrop(100, (90, 120), interpolation=interpolation),
        RandomCrop((60, 40), padding=3, fill=7),
    ]
    want, _, _ = views(decoder, images, *crops)
    before = decoder.rescued
    for batch in (raws, mixed):
        found, faults, _ = views(decoder, batch, *crops)
        assert not faults
        assert all((a == b).all() for a, b in zip(found, want, strict=True))
    assert decoder.rescued == before
    found, faults, _ = views(decoder, [raws[0], raws[1][:-1], raws[2] + b"\0", header.raw_header(0, 5)], *crops)
    assert [fault.row for fault in faults] == [1, 2, 3]
    assert (found[0][0] == want[0][0]).all()
    assert not found[0][1:].any()
    assert (whole(decoder, raws[0]) == by_pillow(images[0])).all()


def test_raw_images_obey_the_limits():
    data = raw(KINDS["png"]())
    for settings, reason in (({"max_pixels": 1000}, "larger than"), ({"codecs": ["jpeg"]}, "raw is not among")):
        small = Decode(**settings).open("cpu")
        faults = small.read_headers(pack([data])).faults
        small.close()
        assert reason in faults[0].reason


def test_a_column_alone_has_the_pixels_of_its_image(decoder):
    data = encode(photograph().resize((7, 9)))
    for column in range(7):
        box, corner = np.array([[0, column, 9, 1]], dtype=np.int32), np.zeros((1, 2), dtype=np.int32)
        windows = CropWindows(box, box[:, 2:], corner, (9, 1))
        batch = pack([data])
        (found,), _ = decoder.pixels(decoder.read_headers(batch), [windows])
        assert (found[0].numpy() == by_pillow(data)[:, column : column + 1]).all()


def test_padding_has_a_color(decoder, as_on_cuda):
    """On both ways of a decoder and in the module form; a canvas without any pixel of the image too."""
    data = encode(photograph(size=(40, 30)))
    crop = RandomCrop((36, 50), padding=(6, 5, 7, 4), fill=(9, 200, 70))
    (view,), _, (box,) = views(decoder, [data] * 9, crop)
    (other,), _, _ = views(as_on_cuda, [data] * 9, crop)
    image = by_pillow(data)
    module = gpuaug.Augment(crop=crop)
    drawn = module.draw(seed=0, epoch=0, indices=range(9))
    (own,) = module.windows(drawn, np.full(9, 30), np.full(9, 40))
    made = module(torch.from_numpy(image.copy())[None].expand(9, -1, -1, -1), seed=0)
    for k in range(9):
        assert (view[k] == expected(image, box, k)).all()
        assert np.abs(other[k].astype(int) - view[k]).max() <= 1
        whole = (made[k].permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()
        assert (whole == expected(image, own, k)).all()
    batch = pack([data])
    one = np.array([[0, 0, 1, 1]], dtype=np.int32)
    beside = CropWindows(one, one[:, 2:], np.array([[70, -5]], dtype=np.int32), (7, 5), fill=(1, 2, 3))
    (view,), _ = decoder.pixels(decoder.read_headers(batch), [beside])
    assert (torch.as_tensor(view) == torch.tensor([1, 2, 3])).all()


def test_others_in_the_batch_change_nothing(decoder):
    images = [KINDS[k]() for k in MIXED] * 3
    crops = RandomResizedCrop(64), RandomResizedCrop(96, interpolation="bicubic", scale=(0.05, 0.3))
    batch = pack(images)
    look = decoder.read_headers(batch)
    boxes = [c.windows(uniforms(c, len(images)), look.height, look.width) for c in crops]
    together, _ = decoder.pixels(look, boxes)
    for keep in ([0], [5], [3, 1, 4], list(range(7, 23)), list(range(23, -1, -1))):
        part = pack([images[k] for k in keep])
        taken = [CropWindows(b.window[keep], b.resized[keep], b.offset[keep], b.size, b.interpolation) for b in boxes]
        apart, _ = decoder.pixels(decoder.read_headers(part), taken)
        for a, b in zip(apart, together, strict=True):
            assert torch.equal(a, b[keep])
    one_view, _ = decoder.pixels(look, boxes[:1])
    assert torch.equal(one_view[0], together[0])


@pytest.mark.parametrize("seed", range(2))
def test_equal_images_of_a_batch_are_decoded_once(decoder, monkeypatch, seed):
    """Each row has the pixels and the faults that it has alone."""
    rng, jpeg = np.random.default_rng(seed), KINDS["jpeg 4:2:0"]()
    refused = jpeg[:2] + b"\xff\xe2\x00\x0acorrupt!" + b"\x12\x34\x56" + jpeg[2:]  # Pillow decodes it, DALI does not
    kinds = [*(KINDS[k]() for k in MIXED), *turned(), refused, failing_in_decode(), jpeg[:-400], b"none", b""]
    images = [bytes(bytearray(kinds[k])) for k in rng.integers(len(kinds), size=90)]  # copies
    small = Decode(backend=decoder.backend, num_threads=2, max_bytes=1_500_000).open("cpu")
    headers, windows = small.read_headers(pack(images)), []
    for k, crop in enumerate((RandomResizedCrop(40, scale=(0.01, 0.5)), RandomCrop((30, 50), padding=9))):
        windows.append(crop.windows(uniforms(crop, len(images), seed + k), headers.height, headers.width))
    one_wide, needs_memory = rng.random((2, len(images))) < 0.1
    for view in windows:
        view.window[one_wide, 3] = 1
    windows[0].resized[needs_memory] = 800
    calls: list[bytes] = []
    decode, run = pillow.decode, CpuPipeline.run
    with monkeypatch.context() as spy:
        spy.setattr(pillow, "decode", lambda data, *more: calls.append(bytes(data)) or decode(data, *more))
        spy.setattr(CpuPipeline, "run", lambda self, x: calls.extend(map(bytes, x.headers.encoded)) or run(self, x))
        together, faults = small.pixels(headers, windows)
    assert len(set(calls)) == len(calls) > 10
    every = [*headers.faults, *faults]
    for row, data in enumerate(images):
        alone = small.read_headers(pack([data]))
        found, faults = small.pixels(alone, [view.take(np.array([row])) for view in windows])
        assert [replace(fault, row=row) for fault in [*alone.faults, *faults]] == [x for x in every if x.row == row]
        assert all(torch.equal(a[0], b[row]) for a, b in zip(found, together, strict=True))
    assert "decode.max_bytes" in " ".join(fault.reason for fault in every)
    small.close()


def test_incomplete_images_are_decoded_alone(decoder):
    """libjpeg makes up the missing end of a progressive file from the region that it decodes."""
    levels = np.random.default_rng(0).integers(0, 256, (12, 15, 3), dtype=np.uint8)
    image = np.kron(levels, np.ones((8, 8, 1), dtype=np.uint8))
    data = encode(image, "JPEG", quality=85, progressive=True, subsampling=2)
    images = [data[: len(data) * 6 // 10]] * 6
    lenient = Decode(backend=decoder.backend, num_threads=1).open("cpu", accept_truncated=True)
    headers, crop = lenient.read_headers(pack(images)), RandomResizedCrop(32)
    windows = crop.windows(uniforms(crop, len(images), 3), headers.height, headers.width)
    together, faults = lenient.pixels(headers, [windows])
    assert not [*headers.faults, *faults]
    for row, data in enumerate(images):
        alone, _ = lenient.pixels(lenient.read_headers(pack([data])), [windows.take(np.array([row]))])
        assert torch.equal(alone[0][0], together[0][row])
    lenient.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_and_chunks_change_nothing(decoder, threads):
    images = [KINDS[k]() for k in MIXED] * 2
    want, _, _ = views(decoder, images, RandomResizedCrop(64), RandomCrop(50))
    other = Decode(backend=decoder.backend, num_threads=threads, max_bytes=1_500_000).open("cpu")
    found, faults, _ = views(other, images, RandomResizedCrop(64), RandomCrop(50))
    assert not faults
    assert all((a == b).all() for a, b in zip(found, want, strict=True))
    other.close()


def test_results_outlive_the_next_batch(decoder):
    first, _, _ = views(decoder, [KINDS["png"]()] * 4, RandomResizedCrop(64))
    copy = first[0].copy()
    for seed in range(5):
        views(decoder, [KINDS["jpeg 4:2:0"]()] * 4, RandomResizedCrop(64), seed=seed)
    assert (first[0] == copy).all()


def test_boxes_outside_the_image_are_refused(decoder):
    batch = pack([encode(photograph())])
    box = np.array([[0, 0, 400, 100]], dtype=np.int32)
    with pytest.raises(ConfigError, match=r"inside the image.*251 x 187 \(width x height\)"):
        windows = CropWindows(box, box[:, 2:], np.zeros_like(box[:, :2]), (8, 8))
        decoder.pixels(decoder.read_headers(batch), [windows])


def test_an_empty_batch(decoder):
    batch = pack([])
    look = decoder.read_headers(batch)
    (view,), faults = decoder.pixels(look, [Resize((4, 5)).windows(None, look.height, look.width)])
    assert view.shape == (0, 4, 5, 3)
    assert faults == []


# -- bytes that are no images --


def bomb(height: int = 65535, width: int = 65535) -> bytes:
    """A JPEG of 200 bytes that claims to be large."""
    data = bytearray(encode(Image.new("RGB", (8, 8))))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(data)


HOPELESS = {
    "empty": b"",
    "one byte": b"\xff",
    "text": b"hello, this is no image at all\n" * 20,
    "html": b"<!DOCTYPE html><html><body>404</body></html>",
    "jpeg marker only": b"\xff\xd8\xff",
    "jpeg, two markers": b"\xff\xd8\xff\xd9",
    "jpeg of ff": b"\xff\xd8" + b"\xff" * 200_000,
    "jpeg of zeros": b"\xff\xd8\xff" + b"\0" * 100_000,
    "jpeg bomb": bomb(),
    "jpeg of no height": bomb(0, 100),
    "png signature only": b"\x89PNG\r\n\x1a\n",
    "png bomb": b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 2**31 - 1, 2**31 - 1, 8, 2, 0, 0, 0)),
    "webp cut": b"RIFF\x10\0\0\0WEBPVP8 ",
    "bmp cut": b"BM\0\0",
    "gif cut": b"GIF89a\x01",
    "gif without frame": b"GIF89a\x08\0\x08\0\0\0\0;",
}


def test_hopeless_bytes_are_faults_and_hurt_nobody(decoder):
    good = KINDS["jpeg 4:2:0"]()
    images = [data for bad in HOPELESS.values() for data in (good, bad)]
    (want,), _, _ = views(decoder, [good] * len(images), RandomResizedCrop(48))
    (view,), faults, _ = views(decoder, images, RandomResizedCrop(48))
    assert [fault.row for fault in faults] == list(range(1, len(images), 2))
    for fault, data in zip(faults, HOPELESS.values(), strict=True):
        assert (fault.stage, fault.size, fault.head) == ("decode", len(data), data[:16])
        assert fault.reason
        assert "\n" not in fault.reason
    assert not view[1::2].any()
    assert (view[::2] == want[::2]).all()


def test_a_large_claim_allocates_nothing(decoder):
    import tracemalloc

    batch = pack([bomb(), HOPELESS["png bomb"], bomb(65535, 3000)])
    tracemalloc.start()
    look = decoder.read_headers(batch)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [f.row for f in look.faults] == [0, 1, 2]
    assert all("`decode.max_pixels`" in f.reason for f in look.faults)
    assert peak < 2**20


def test_a_long_thin_image_cannot_be_blown_up(decoder):
    data = encode(Image.new("RGB", (60_000, 1)), "PNG")
    (view,), faults, _ = views(decoder, [data, KINDS["png"]()], ResizeCenterCrop(256, 224))
    assert [f.row for f in faults] == [0]
    assert "resizing 60000 x 1 (width x height)" in faults[0].reason
    assert (view[0] == 0).all()
    assert view[1].any()


def test_truncated_images_are_faults(decoder):
    """Cut anywhere: a fault whatever the box, or, where nothing that matters is missing, the whole image."""
    generator = np.random.default_rng(0)
    for kind in ("jpeg 4:2:0", "jpeg 4:2:0 progressive", "png", "png P", "webp", "webp alpha lossless", "bmp", "gif"):
        data = KINDS[kind]()
        cuts = [*generator.integers(1, len(data), 12).tolist(), len(data) // 2, len(data) - 2]
        want = by_pillow(data)
        for interlude in (Resize((32, 40)), RandomCrop(20)):
            (view,), faults, (box,) = views(decoder, [data[:n] for n in cuts], interlude)
            bad = {f.row for f in faults}
            assert len(bad) >= len(cuts) - 2, kind
            for k in set(range(len(cuts))) - bad:
                assert cuts[k] > len(data) - 40, (kind, cuts[k], len(data))
                assert (view[k] == expected(want, box, k)).all()


def test_a_truncated_run_length_bmp_is_a_fault(decoder):
    head = struct.pack("<IiiHHIIIIII", 40, 100, 80, 1, 8, 1, 0, 0, 0, 256, 0)
    data = b"BM" + struct.pack("<IHHI", 0, 0, 0, 54 + 1024) + head + bytes(1024) + b"\x20\x01" * 30
    _, faults, _ = views(decoder, [data], Resize((8, 8)))
    assert "cannot be decoded" in faults[0].reason


def test_faults_of_reading_are_left_alone(decoder):
    good = KINDS["jpeg 4:2:0"]()
    batch = pack([good, b"", good], (Fault(1, "read", "gone"),))
    look = decoder.read_headers(batch)
    assert look.faults == []
    assert look.height.tolist() == [187, 0, 187]
    boxes = Resize((8, 8)).windows(None, look.height, look.width)
    (view,), faults = decoder.pixels(look, [boxes])
    assert faults == []
    assert not view[1].any()


@cache
def failing_in_decode() -> bytes:
    """Passes every parser, and fails in the middle of its pixels: a PNG whose compressed data is broken."""
    data = bytearray(encode(photograph(), "PNG"))
    at = data.index(b"IDAT") + 4
    (length,) = struct.unpack(">I", data[at - 8 : at - 4])
    data[at + length // 2 : at + length // 2 + 40] = b"\0" * 40
    data[at + length : at + length + 4] = struct.pack(">I", zlib.crc32(data[at - 4 : at + length]))
    return bytes(data)


@pytest.mark.parametrize("bad", [[0, 7], list(range(16))])
def test_failures_while_decoding_name_their_rows(decoder, bad):
    good = [KINDS[k]() for k in MIXED] * 2
    want, _, _ = views(decoder, good, RandomResizedCrop(48))
    images = [failing_in_decode() if k in bad else x for k, x in enumerate(good)]
    (view,), faults, _ = views(decoder, images, RandomResizedCrop(48))
    assert sorted(f.row for f in faults) == bad
    assert not view[bad].any()
    # where a bad image is of another size than what it stands for, only its own box differs
    rest = [k for k in range(16) if k not in bad]
    assert (view[rest] == want[0][rest]).all()


def test_the_second_chance(dali):
    """What DALI refuses and Pillow decodes to its end is no fault, and is counted."""
    jpeg = KINDS["jpeg 4:2:0"]()
    junk = jpeg[:2] + b"\xff\xe2\x00\x0acorrupt!" + b"\x12\x34\x56" + jpeg[2:]  # bytes between two segments
    broken = jpeg[:2] + b"\xff\xe1\x00\x04Ex" + b"\xff\xe1\x00\x02" + jpeg[2:]  # APP1 too short for what it claims
    before = dali.rescued
    for data in (junk, broken):
        assert (whole(dali, data) == by_pillow(data)).all()
    rescued = dali.rescued - before
    assert rescued >= 1
    before = dali.rescued
    whole(dali, KINDS["gif"]())  # Pillow's by design
    whole(dali, jpeg)
    assert dali.rescued == before


def claims(form: str, side: int, mode: str = "RGB", **options) -> bytes:
    """A file of one colour that says to be as large, and holds as many pixels."""
    return encode(Image.new(mode, (side, side)), form, **options)


@pytest.mark.parametrize(
    ("make", "least"),
    [
        (lambda: claims("WEBP", 8000, lossless=True), "every 64"),
        (lambda: claims("PNG", 8000, "1"), "every 64"),
        (lambda: claims("GIF", 8000, "P"), "every 64"),
        (
            lambda: hostile.png(4000, 4000, zlib.compress(bytes(4000 * (1 + 4000 * 8)), 9), depth=16, color=6),
            "every 16",
        ),
        (lambda: hostile.bmp(8, compression=1, height=10, width=2**24, body=b"\0\2\xff\xff" * 1500), "every 8 "),
        (lambda: hostile.bmp(4, compression=2, height=4000, width=4000, body=b"\0\0" * 4000), "every 8 "),
    ],
)
def test_few_bytes_cannot_make_much_work(make, least):
    """Some of these took 5 s, for every epoch; a larger `max_pixels` allows them all but run lengths."""
    data, decoder = make(), Decode().open("cpu")
    reason = only_fault(decoder, data)
    assert f"{len(data)} bytes" in reason
    assert least in reason
    assert "`decode.max_pixels` to " in reason
    wanted = int(reason.rsplit(" ", 1)[1])
    larger = Decode(max_pixels=wanted).open("cpu")
    assert not larger.read_headers(pack([data])).faults
    larger.close()


def test_images_of_one_colour_are_shown():
    """A white 24-megapixel photograph, a 600-dpi page and a 134-megapixel JPEG are no bombs."""
    images = claims("JPEG", 4900), claims("WEBP", 4900), claims("PNG", 5900, "1"), claims("JPEG", 11580)
    assert not Decode().open("cpu").read_headers(pack(list(images))).faults


@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt", b"iCCP"])
def test_texts_and_profiles_are_not_inflated(decoder, kind):
    """DALI inflates each of them, a file of 1 MB to 1 GB; Pillow refuses the file."""
    long = zlib.compress(bytes(2_000_000), 9)
    head = {b"zTXt": b"k\0\0", b"iTXt": b"k\0\1\0\0\0", b"iCCP": b"k\0\0"}[kind]
    plain = KINDS["png"]()
    data = plain[:33] + chunk(kind, head + long) * 60 + plain[33:]
    batch = pack([data])
    look = decoder.read_headers(batch)
    assert len(look.encoded[0]) <= len(plain)
    assert (decoder.whole(look).numpy() == by_pillow(plain)).all()
    oriented = encode(photograph(), "PNG", exif=exif(6))
    data = oriented[:33] + chunk(b"iTXt", b"k\0\0\0\0\0" + b"history " * 20_000) + oriented[33:]
    assert (whole(decoder, data) == by_pillow(data)).all()


@pytest.mark.parametrize("backend", ["pillow", "dali"])
def test_decoding_takes_at_most_max_bytes(backend):
    """Three images in four threads, and a limit that one of them just needs: they are decoded one after the other."""
    command = [sys.executable, ROOT / "tests" / "decode" / "peak.py", backend]
    found = json.loads(subprocess.run(command, env=CHILD, capture_output=True, text=True, check=True).stdout)
    assert found
    for name, (limit, peak, faults) in found.items():
        assert not faults, name
        assert peak < 1.25 * limit, name


def test_an_image_that_needs_more_than_max_bytes_is_a_fault(decoder):
    data = encode(photograph(), "WEBP", exif=hostile.exif(6))
    small = Decode(backend="pillow", max_bytes=15 * 187 * 251).open("cpu")
    images, faults, _ = views(small, [KINDS["jpeg 4:2:0"](), data], Resize((8, 8)))
    assert [fault.row for fault in faults] == [1]
    assert "decoding 251 x 187 (width x height) pixels takes" in faults[0].reason
    assert "`decode.max_bytes`" in faults[0].reason
    assert images[0][0].any()
    assert not images[0][1].any()
    small.close()


def test_many_scans_are_refused(decoder):
    data = encode(photograph(), progressive=True)
    first = data.index(b"\xff\xda")
    last = data.rindex(b"\xff\xda")
    scan = data[last:-2]
    many = data[:-2] + scan * 300 + b"\xff\xd9"
    assert first < last
    _, faults, _ = views(decoder, [many], Resize((8, 8)))
    assert "scans" in faults[0].reason
    few = Decode(backend=decoder.backend, max_pixels=187 * 251).open("cpu")
    _, faults, _ = views(few, [data[:-2] + scan * 20 + b"\xff\xd9"], Resize((8, 8)))
    assert "too much work" in faults[0].reason


# -- the pipeline for CUDA, on the CPU --


@pytest.fixture
def as_on_cuda(dali):
    """A decoder that runs the CUDA pipeline's graph, with DALI's CPU operators."""
    out = Decode(backend="dali", num_threads=2).open("cpu")
    out._dali = CudaPipeline(out.device, num_threads=2, operators="cpu")
    yield out
    out.close()


def close_enough(found: np.ndarray, want: np.ndarray) -> None:
    """DALI's resize is torch's within 1 inside; at the outermost ring it repeats the edge, where torch renormalises."""
    difference = np.abs(found.astype(int) - want.astype(int))
    assert difference.mean() < 0.5
    assert (difference > 2).mean() < 0.02
    assert difference.max() <= 40


def compared(decoder: Decoder, reference: Decoder, images: list[bytes], *counts: int):
    """Require that views of the first images, repeated, are close to the reference's; both views without a resize."""
    crops = RandomResizedCrop((64, 80)), RandomCrop((90, 60), padding=5, fill=7), ResizeCenterCrop(70, (90, 60))
    for count in counts:
        some = (images * (1 + count // len(images)))[:count]
        want, _, _ = views(reference, some, *crops)
        found, faults, _ = views(decoder, some, *crops)
        assert not faults
        for a, b in zip(found, want, strict=True):
            close_enough(a, b)
        yield found[1], want[1]


def turned() -> list[bytes]:
    return [encode(photograph(), form, exif=exif(o)) for form in ("JPEG", "PNG") for o in range(1, 9)]


def test_cuda_graph_agrees_with_the_cpu(dali, as_on_cuda):
    kinds = [k for k in MIXED if k not in ("gif",)]
    images = [KINDS[k]() for k in kinds]
    for found, want in compared(as_on_cuda, dali, images, len(images), 3, 40):  # 40: another capacity
        assert (found == want).all()  # nothing resized, so nothing differs
    bicubic = RandomResizedCrop(64, interpolation="bicubic")
    close_enough(views(as_on_cuda, images, bicubic)[0][0], views(dali, images, bicubic)[0][0])


def test_cuda_graph_with_orientations_faults_and_rescues(dali, as_on_cuda):
    images = turned()
    images[3:3] = [b"rubbish", KINDS["gif"](), failing_in_decode(), KINDS["png animated, own first"]()]
    images.append(raw(images[0]))  # resized on the host and uploaded
    crops = RandomCrop((100, 70)), ResizeCenterCrop(187, (170, 120))
    want, faults_want, _ = views(dali, images, *crops)
    found, faults, _ = views(as_on_cuda, images, *crops)
    assert sorted(f.row for f in faults) == sorted(f.row for f in faults_want) == [3, 5]
    for a, b in zip(found, want, strict=True):
        assert (a == b).all()
    assert all((whole(as_on_cuda, data) == whole(dali, data)).all() for data in images)


def test_views_of_the_cuda_graph_are_torchs_own_memory(as_on_cuda):
    """So that its allocator knows who still reads them, and DALI has its own back at once."""
    batch = pack([KINDS["jpeg 4:2:0"]()] * 3)
    look = as_on_cuda.read_headers(batch)
    boxes = [Resize((20, 30)).windows(None, look.height, look.width)] * 2
    found, _ = as_on_cuda.pixels(look, boxes)
    assert all(view.untyped_storage().resizable() for view in found)


def test_the_cuda_graph_is_built_once_for_the_usual_batch(dali, monkeypatch):
    decoder = Decode(backend="dali", num_threads=2).open("cpu", batch_size=80)
    decoder._dali = graph = CudaPipeline(decoder.device, num_threads=2, batch_size=80, operators="cpu")
    built, build = [], graph._build
    monkeypatch.setattr(graph, "_build", lambda count, windows: (built.append(count), build(count, windows))[1])
    for count in (1, 80, 3, 33):
        views(decoder, [KINDS["jpeg 4:2:0"]()] * count, Resize((8, 8)))
    assert built == [80]
    decoder.close()


def test_an_error_of_the_device_is_no_sample_s(as_on_cuda, monkeypatch):
    """After one everything fails, and every sample would look bad: torch is asked first."""

    def raising(text):
        def call(*_):
            raise RuntimeError(text)

        return call

    monkeypatch.setattr(torch.cuda, "synchronize", raising("CUDA error: an illegal memory access was encountered"))
    monkeypatch.setattr(as_on_cuda, "device", torch.device("cuda", 0))
    monkeypatch.setattr(as_on_cuda._dali, "run", raising("decoders.image: CUDA_ERROR_ILLEGAL_ADDRESS"))
    batch = pack([KINDS["jpeg 4:2:0"]()] * 3)
    look = as_on_cuda.read_headers(batch)
    rows = request.DecodeRequest.of(look, [Resize((20, 30)).windows(None, look.height, look.width)])
    failed: list[int] = []
    with pytest.raises(RuntimeError, match="illegal memory access"):
        list(as_on_cuda._by_dali(rows, failed))
    assert not failed


ON_CPU = """
import os
import sys
from pathlib import Path
import torch
from gpuaug.augment.crop import Resize
from gpuaug.decode.decoder import Decode
from test_decode import KINDS, pack

batch = pack([KINDS[kind]() for kind in ("jpeg 4:2:0", "png", "webp", "bmp")])
decoder = Decode(backend="dali", num_threads=2).open("cpu")
look = decoder.read_headers(batch)
images, faults = decoder.pixels(look, [Resize((20, 30)).windows(None, look.height, look.width)])
assert not faults and not decoder.rescued and images[0].any()
print([line for line in Path("/proc/self/maps").read_text().splitlines() if "libnvjpeg" in line])
print(os.environ["NVIMGCODEC_EXTENSIONS_PATH"])
"""
AS_EVER = """
from pathlib import Path
import gpuaug.decode.dali
import nvidia.nvimgcodec
print(any("libnvjpeg_ext" in line for line in Path("/proc/self/maps").read_text().splitlines()))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_decoding_on_the_cpu_loads_no_codec_of_the_gpu(dali):
    """nvJPEG's opens a CUDA context as it is loaded, on a device that nobody asked for. Also from folders that the user
    has set. Others who load nvImageCodec in this process get all its codecs."""

    def run(code, **changed):
        environment = {k: v for k, v in CHILD.items() if k != "NVIMGCODEC_EXTENSIONS_PATH"} | changed
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT / "tests", env=environment, capture_output=True, text=True
        )
        assert not done.returncode, done.stderr
        return done.stdout.splitlines()

    (package,) = find_spec("nvidia.nvimgcodec").submodule_search_locations
    folders = f"/none:{package}/extensions:{package}/extensions"
    assert run(ON_CPU, NVIMGCODEC_EXTENSIONS_PATH=folders) == ["[]", folders]
    assert run(ON_CPU) == ["[]", ""]
    assert run(AS_EVER) == ["True"]


# -- CUDA --


@pytest.mark.gpu
@gpu
def test_mixed_agrees_with_the_cpu(dali):
    cuda = Decode(backend="dali").open("cuda")
    images = [KINDS[k]() for k in KINDS]
    for found, want in compared(cuda, dali, images, len(images), 3, 80):
        assert np.abs(found.astype(int) - want).max() <= 4  # decode alone
    cuda.close()


@pytest.mark.gpu
@gpu
def test_mixed_repeats_itself_and_survives_faults():
    cuda = Decode(backend="dali").open("cuda")
    good = [KINDS[k]() for k in MIXED] * 2
    (first,), _, _ = views(cuda, good, RandomResizedCrop(48))
    (alone,), _, _ = views(cuda, good[:1], RandomResizedCrop(48))
    assert (first[0] == alone[0]).all()
    bad = [failing_in_decode() if k in (2, 5) else x for k, x in enumerate(good)]
    (view,), faults, _ = views(cuda, bad, RandomResizedCrop(48))
    assert sorted(f.row for f in faults) == [2, 5]
    rest = [k for k in range(16) if k not in (2, 5)]
    assert (view[rest] == first[rest]).all()
    cuda.close()


@pytest.mark.gpu
@gpu
def test_mixed_orientation_and_full_images(dali):
    cuda = Decode(backend="dali").open("cuda")
    for data in turned():
        assert np.abs(whole(cuda, data).astype(int) - whole(dali, data)).max() <= 4
    cuda.close()


# -- settings --


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"num_threads": 0}, "`num_threads`.*Found: 0"),
        ({"num_threads": True}, "`num_threads`.*Found: True"),
        ({"backend": "opencv"}, "`backend`.*Found: 'opencv'"),
        ({"hardware_load": 1.5}, "`hardware_load`.*Found: 1.5"),
        ({"hardware_load": "all"}, "`hardware_load`.*Found: 'all'"),
        ({"max_pixels": 0}, "`max_pixels`.*Found: 0"),
        ({"max_bytes": -1}, "`max_bytes`.*Found: -1"),
        ({"reduced": 2}, "`reduced` must be"),
        ({"codecs": ["jxl"]}, r"`codecs`.*Found: \['jxl'\]"),
        ({"codecs": "jpeg"}, "`codecs`.*Found: 'jpeg'"),
    ],
)
def test_settings_say_what_was_found(settings, text):
    with pytest.raises(ConfigError, match=text):
        Decode(**settings)


def test_devices_that_are_not_there():
    with pytest.raises(ConfigError, match="`device` must be .*cpu.*cuda"):
        Decode().open("mps")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            Decode().open("cuda")


def test_choices_are_logged(caplog, monkeypatch):
    with caplog.at_level(logging.INFO, logger="gpuaug"):
        Decode().open().close()
        if not torch.cuda.is_available():
            assert "device cpu: no CUDA device" in caplog.text
        assert "decode with num_threads=" in caplog.text
        monkeypatch.setitem(sys.modules, "nvidia.dali", None)
        found = Decode().open("cpu")
        assert found.backend == "pillow"
        assert "decode with pillow: DALI cannot be imported" in caplog.text
        with pytest.raises(ConfigError, match="nvidia-dali-cuda120"):
            Decode(backend="dali").open("cpu")
        data = KINDS["jpeg 4:2:0"]()
        assert (whole(found, data) == by_pillow(data)).all()


def test_a_closed_decoder_says_so():
    closed = Decode().open("cpu")
    closed.close()
    closed.close()
    with pytest.raises(GpuaugError, match="closed"):
        views(closed, [KINDS["png"]()], Resize((8, 8)))


def test_nothing_global_is_touched(decoder):
    from PIL import ImageFile

    def state():
        return (
            torch.get_rng_state().tolist(),
            np.random.get_state()[1].tolist(),
            torch.get_num_threads(),
            Image.MAX_IMAGE_PIXELS,
            ImageFile.LOAD_TRUNCATED_IMAGES,
        )

    before = state()
    views(decoder, [KINDS["jpeg 4:2:0"](), KINDS["gif"](), b"rubbish"], RandomResizedCrop(32))
    assert state() == before


@pytest.mark.parametrize("failures", [1, 3, 4])
def test_a_pipeline_that_failed_is_built_again(failures, monkeypatch, caplog):
    """The failure is planted, as a device error cannot be had on request; the pipelines before and after are real."""
    images = pack([encode(photograph(name), quality=90) for name in ("china", "flower", "china")])
    decoder = Decode(num_threads=1, backend="dali").open("cpu")
    left, real = [failures], CpuPipeline.run

    def failing(self, part):
        if left[0]:
            left[0] -= 1
            raise RuntimeError("CUDA runtime API error cudaErrorLaunchFailure (719)")
        return real(self, part)

    look = decoder.read_headers(images)
    expected, _ = decoder.pixels(look, [Resize((64, 48)).windows(None, look.height, look.width)])
    monkeypatch.setattr(CpuPipeline, "run", failing)
    first = decoder._dali
    boxes = Resize((64, 48)).windows(None, look.height, look.width)
    if failures > 3:
        with pytest.raises(GpuaugError, match="LaunchFailure"):
            decoder.pixels(look, [boxes])
        return
    found, faults = decoder.pixels(look, [boxes])
    assert not faults
    assert torch.equal(found[0], expected[0])
    assert decoder._dali is not first
    assert caplog.text.count("pipeline failed") == failures


@pytest.mark.parametrize("lasts", [False, True])
@pytest.mark.parametrize("graph", [CpuPipeline, partial(CudaPipeline, torch.device("cpu"), operators="cpu")])
def test_a_pipeline_that_fails_after_a_bad_image_is_built_again_once(graph, lasts, monkeypatch, caplog):
    """DALI says that it is no longer valid. Planted: what DALI then says of a run; the bad image and its error are
    real. If a new pipeline fails as well, Pillow decodes the images, as for any error that names no image."""
    good = [encode(photograph(name), quality=90) for name in ("china", "flower", "astronaut")]
    tables, bad = hostile.find(good[1], 0xDB), []
    images = [good[0], good[1][: tables[0]] + good[1][tables[1] :], good[2]]  # passes DALI's parser
    decoder = Decode(num_threads=1, backend="dali").open("cpu")
    monkeypatch.setattr(decoder, "_new_pipeline", lambda: graph(num_threads=1))
    decoder._renew_pipeline()
    kind, want = type(decoder._dali), views(decoder, good, Resize((64, 48)))[0][0]
    real = kind.run

    def failing(self, part):
        if self in bad or (bad and lasts):
            raise RuntimeError(
                "in operator `nvidia.dali.fn.decoders.image`: Current pipeline object is no longer valid."
            )
        try:
            return real(self, part)
        except RuntimeError:
            bad.append(self)
            raise

    monkeypatch.setattr(kind, "run", failing)
    (view,), faults, _ = views(decoder, images, Resize((64, 48)))
    assert [fault.row for fault in faults] == [1]
    assert decoder.rescued == (2 if lasts else 0)
    close_enough(view[[0, 2]], want[[0, 2]])
    assert caplog.text.count("pipeline failed and is rebuilt") == 1
    decoder.close()
