"""Files of masks give their stored numbers, changed by a table; damage of any kind is a HeaderError."""

from __future__ import annotations

import random
import struct
import warnings
import zlib
from collections import Counter
from io import BytesIO
from typing import Any

import hostile
import numpy as np
import pytest
from fuzz import mutated
from pictures import encode, photograph
from PIL import Image, ImageOps
from test_masks import placed, shapes, windows

from gpuaug.decode.header import HeaderError
from gpuaug.errors import ConfigError
from gpuaug.targets import masks
from gpuaug.targets.rules import Masks

Pair = tuple[int, int]
BIG = 10**9


def decoded(data: bytes, size: Pair, **more: Any) -> np.ndarray:
    return masks.decode(data, **{"stored": size, "exif": 1, "max_pixels": BIG, **more})


def gray_png(values: np.ndarray, bits: int) -> bytes:
    """A grey PNG of 1, 2, 4, 8 or 16 bits, written by hand."""
    h, w = values.shape
    planes = (values[:, :, None] >> np.arange(bits - 1, -1, -1)) & 1
    lines = np.packbits(planes.reshape(h, w * bits).astype(np.uint8), axis=1)
    content = b"".join(b"\0" + line.tobytes() for line in lines)
    return hostile.png(w, h, zlib.compress(content), depth=bits, color=0)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_gray_pngs_give_their_stored_values(bits: int) -> None:
    values = np.random.default_rng(bits).integers(0, 1 << bits, (13, 21))
    values[0, :2] = 0, (1 << bits) - 1
    mask = decoded(gray_png(values, bits), (13, 21))
    assert mask.dtype == (np.int32 if bits == 16 else np.uint8)
    np.testing.assert_array_equal(mask, values)


@pytest.mark.parametrize("colors", [2, 4, 16, 256])
@pytest.mark.parametrize("transparency", [None, 0, b"\x00\x80"])
def test_palette_pngs_give_indices(colors: int, transparency: Any) -> None:
    rng = np.random.default_rng(colors)
    values = rng.integers(0, colors, (13, 21)).astype(np.uint8)
    image = Image.fromarray(values, "P")
    image.putpalette(rng.integers(0, 256, 3 * colors, dtype=np.uint8).tobytes())
    for bits in ({2: 1, 4: 2, 16: 4, 256: 8}[colors], 8):
        data = encode(image, "PNG", bits=bits, **({} if transparency is None else {"transparency": transparency}))
        mask = decoded(data, (13, 21))
        assert mask.dtype == np.uint8
        np.testing.assert_array_equal(mask, values)


def test_each_mode_of_pillow() -> None:
    gray = photograph("coffee", (21, 13)).convert("L")
    np.testing.assert_array_equal(decoded(encode(gray, "PNG"), (13, 21)), np.asarray(gray))
    binary = Image.fromarray(np.asarray(gray) > 90)
    assert binary.mode == "1"
    np.testing.assert_array_equal(decoded(encode(binary, "PNG"), (13, 21)), np.asarray(gray) > 90)
    deep = np.asarray(gray).astype(np.uint16) * 257 - 3
    mask = decoded(encode(Image.fromarray(deep), "PNG"), (13, 21))  # I;16; I for older Pillows
    assert mask.dtype == np.int32
    np.testing.assert_array_equal(mask, deep)
    for mode in ("LA", "RGBA", "RGB"):
        with pytest.raises(HeaderError, match=f"mode {mode}"):
            decoded(encode(gray.convert(mode), "PNG"), (13, 21))


def test_colours_of_16_bits_are_refused() -> None:
    data = hostile.png(5, 4, zlib.compress(bytes(4 * 31)), depth=16)
    with pytest.raises(HeaderError, match="colours of 16 bits"):
        decoded(data, (4, 5), table=masks.lookup(Masks(colors={0: [0, 0, 0]})))


@pytest.mark.parametrize("form", ["JPEG", "WEBP", "BMP", "GIF", "TIFF"])
def test_other_formats_are_refused(form: str) -> None:
    data = encode(photograph("coffee", (21, 13)).convert("L"), form)
    with pytest.raises(HeaderError, match=f"mask is a {form.lower()}.*must be PNG"):
        decoded(data, (13, 21))


@pytest.mark.parametrize("exif", range(1, 9))
@pytest.mark.parametrize("deep", [False, True])
def test_masks_of_the_stored_size_turn_with_their_image(exif: int, deep: bool) -> None:
    stored = shapes((21, 13)).astype(np.int32) * (200 if deep else 1)
    data = encode(Image.fromarray(stored.astype(np.uint16 if deep else np.uint8)), "PNG")
    marked = Image.fromarray(stored.astype(np.int32))
    marked.getexif()[274] = exif
    upright = np.asarray(ImageOps.exif_transpose(marked))
    if exif > 4:
        mask = decoded(data, (13, 21), exif=exif)
        np.testing.assert_array_equal(mask, upright)
        assert mask.flags.c_contiguous
        np.testing.assert_array_equal(decoded(data, (21, 13), exif=exif), stored)  # already upright
    else:  # both sizes are equal: the mask is upright
        np.testing.assert_array_equal(decoded(data, (13, 21), exif=exif), stored)


def test_the_masks_own_exif_is_ignored() -> None:
    exif = Image.Exif()
    exif[274] = 6
    mask = shapes((21, 13))
    np.testing.assert_array_equal(decoded(encode(Image.fromarray(mask), "PNG", exif=exif), (13, 21)), mask)


def test_sizes_and_limits() -> None:
    data = encode(Image.fromarray(shapes((21, 13))), "PNG")
    with pytest.raises(HeaderError, match=r"mask of 21 x 13 pixels \(width x height\), but its image has 21 x 14$"):
        decoded(data, (14, 21))
    with pytest.raises(
        HeaderError, match=r"mask of 21 x 13 pixels .*, but its image has 13 x 22 \(stored as 22 x 13\)"
    ):
        decoded(data, (13, 22), exif=6)
    with pytest.raises(HeaderError, match=r"mask of 21 x 13 \(width x height\) is larger .*max_pixels` \(272\)"):
        decoded(data, (13, 21), max_pixels=272)
    assert decoded(data, (13, 21), max_pixels=273).shape == (13, 21)
    huge = bytearray(data)
    huge[16:24] = struct.pack(">II", 2**31 - 1, 2**31 - 1)
    with pytest.raises(HeaderError, match="larger"):
        decoded(bytes(huge), (2**31 - 1, 2**31 - 1))


def test_texts_and_profiles_are_not_inflated() -> None:
    data = encode(Image.fromarray(shapes((21, 13))), "PNG")
    bombs = b"".join(
        hostile.chunk(kind, name + zlib.compress(bytes(20_000_000)))
        for kind, name in (
            (b"zTXt", b"a\0\0"),
            (b"iCCP", b"a\0\0"),
            (b"zTXt", b"b\0\0"),
            (b"zTXt", b"c\0\0"),
            (b"zTXt", b"d\0\0"),
        )
    )
    np.testing.assert_array_equal(decoded(data[:33] + bombs + data[33:], (13, 21)), shapes((21, 13)))


@pytest.mark.parametrize("kind", ["gray", "palette", "deep", "runs"])
def test_a_cut_anywhere_is_an_error(kind: str) -> None:
    data = samples()[kind]
    for end in range(len(data)):
        with pytest.raises(HeaderError):
            decoded(data[:end], (37, 51))


def samples() -> dict[str, bytes]:
    mask = shapes((51, 37))
    palette = Image.fromarray(mask, "P")
    palette.putpalette(bytes(range(256)) * 3)
    return {
        "gray": encode(Image.fromarray(mask), "PNG"),
        "palette": encode(palette, "PNG"),
        "deep": encode(Image.fromarray(mask.astype(np.uint16) * 200), "PNG"),
        "runs": runs(mask),
    }


@pytest.mark.parametrize("kind", ["gray", "palette", "deep"])
def test_a_wrong_byte_changes_no_label(kind: str) -> None:
    data = samples()[kind]
    expected = decoded(data, (37, 51))
    for at in range(0, len(data), 1 + len(data) // 1500):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        try:
            mask = decoded(bytes(damaged), (37, 51))
        except HeaderError:
            continue
        np.testing.assert_array_equal(mask, expected)


@pytest.mark.parametrize("kind", ["gray", "palette", "deep", "runs"])
def test_damage_is_a_header_error_or_a_mask(kind: str) -> None:
    data, others = samples()[kind], [*samples().values()]
    rng = random.Random(kind)
    outcomes = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(1500):
            try:
                mask = decoded(mutated(data, rng.choice(others), rng), (37, 51))
                assert mask.shape == (37, 51)
                assert mask.min() >= 0
                outcomes.add("mask")
            except HeaderError:
                outcomes.add("error")
    assert "error" in outcomes


# -- runs


def runs(mask: np.ndarray, **change: Any) -> bytes:
    """The mask as runs, with wrong fields on demand."""
    flat = mask.ravel()
    starts = np.flatnonzero(np.r_[True, flat[1:] != flat[:-1]]) if flat.size else np.zeros(0, dtype=int)
    lengths = np.diff(np.r_[starts, flat.size])
    fields = {"height": mask.shape[0], "width": mask.shape[1], "count": len(starts), "values": flat[starts], **change}
    lengths = fields.get("lengths", lengths)
    head = struct.pack("<III", *(fields[name] for name in ("height", "width", "count")))
    return b"GPUAUGRL" + head + fields["values"].astype("<i4").tobytes() + lengths.astype("<u4").tobytes()


@pytest.mark.parametrize(("factor", "dtype"), [(1, np.uint8), (300, np.int32)])
def test_runs_are_masks(factor: int, dtype: Any) -> None:
    mask = shapes((51, 37)).astype(np.int64) * factor
    ours = decoded(memoryview(runs(mask)), (37, 51))
    assert ours.dtype == dtype
    np.testing.assert_array_equal(ours, mask)
    np.testing.assert_array_equal(decoded(runs(mask), (37, 51), exif=6), np.rot90(mask, -1))


def test_damaged_runs() -> None:
    mask = shapes((51, 37))
    with pytest.raises(HeaderError, match="must have .* bytes"):
        decoded(runs(mask) + b"\0", (37, 51))
    with pytest.raises(HeaderError, match="must have .* bytes"):
        decoded(runs(mask, count=2**32 - 1), (37, 51))
    with pytest.raises(HeaderError, match=r"runs of 1887 pixels in a mask of 51 x 38 \(width x height\), 1938 pixels"):
        decoded(runs(mask, height=38), (38, 51))
    with pytest.raises(HeaderError, match="runs of 8589934590 pixels"):
        decoded(runs(mask, count=2, values=np.zeros(2), lengths=np.full(2, 2**32 - 1)), (37, 51))
    with pytest.raises(HeaderError, match="negative object number: -4"):
        decoded(runs(mask, count=2, values=np.array([3, -4]), lengths=np.array([1880, 7])), (37, 51))
    with pytest.raises(HeaderError, match="larger than"):
        decoded(runs(mask, height=2**32 - 1, width=2**32 - 1), (2**32 - 1, 2**32 - 1))


# -- table


def test_shipped_tables() -> None:
    assert masks.lookup(Masks()) is None
    every = np.arange(256, dtype=np.uint8)
    cityscapes = masks.lookup(Masks(map="cityscapes")).apply(every, unnamed=(missing := Counter()))
    assert cityscapes[[0, 6, 7, 8, 9, 11, 24, 26, 33]].tolist() == [255, 255, 0, 1, 255, 2, 11, 13, 18]
    assert sorted(cityscapes[cityscapes != 255].tolist()) == list(range(19))
    assert missing == dict.fromkeys(range(34, 255), 1)  # the table leaves out 0 to 33 on purpose
    ade20k = masks.lookup(Masks(map="ade20k", fill=254)).apply(every)
    assert ade20k[[0, 1, 150, 151, 255]].tolist() == [254, 0, 149, 254, 254]


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([5, 4, 3], {0: 5, 1: 4, 2: 3}),
        ({3: 1, "4": 2, "255": 0}, {3: 1, 4: 2, 255: 0}),
        ({1: 70_000}, {1: 70_000}),
        ({300: 1, 0: 0}, {0: 0, 300: 1}),
    ],
)
def test_tables_change_every_value(deep: bool, given: Any, expected: dict) -> None:
    values = np.r_[0:256, [300, 999, 65535] if deep else [0, 1, 2]].reshape(7, 37)
    data = encode(Image.fromarray(values.astype(np.uint16 if deep else np.uint8)), "PNG")
    mask = decoded(data, (7, 37), table=masks.lookup(Masks(map=given, fill=99)))
    assert mask.dtype == (np.int32 if 70_000 in expected.values() else np.uint8)
    np.testing.assert_array_equal(mask, np.vectorize(lambda v: expected.get(v, 99))(values))


@pytest.mark.parametrize(
    "given",
    ["voc", "", b"ab", 3, [], {}, [1, "2"], [True], [-1], [2**31], [1.0], [None], {1.5: 0}, {True: 0}, {"a": 0},
     {"-1": 0}, {-1: 0}, {2**24: 0}, {"²": 0}, {1: 0, "1": 2}, {1: None}, {None: 1}, {"9" * 5000: 1}],
)  # fmt: skip
def test_other_tables_are_errors(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"`targets\.masks\.map` must"):
        masks.lookup(Masks(map=given))


def test_all_the_way_is_what_pillow_does_in_steps() -> None:
    """Palette PNG, table, crop, resize and mirror."""
    mask = shapes()
    image = Image.fromarray(mask, "P")
    image.putpalette(bytes(768))
    buffer = BytesIO(encode(image, "PNG"))
    ours = decoded(buffer.getvalue(), (187, 251), table=masks.lookup(Masks(map={k: 6 - k for k in range(7)})))
    flip = np.array([[[-1, 0, 100], [0, 1, 0], [0, 0, 1.0]]])
    placed_mask = placed([ours], windows((20, 30, 160, 200), (80, 100), (0, 0), (80, 100)), flip)[0]
    steps = Image.fromarray(np.where(mask > 6, 255, 6 - mask.astype(int)).astype(np.uint8)).crop((30, 20, 230, 180))
    steps = steps.resize((100, 80), Image.Resampling.NEAREST).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    assert (placed_mask != np.asarray(steps)).mean() < 0.002
