"""`decode.pixels=raw`: the values of PNG, TIFF and npy files, exactly; damaged and other files are faults."""

from __future__ import annotations

import io
import logging
import os
import struct
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("imagecodecs")  # the extra gpuaug[tiff], in the extra dev too

import tifffile
from conftest import SHARED
from fuzz_child import Child
from stored import EXTRA, TIFF, VARIANTS, batch, decoded, encoded, exists, opened, picture
from test_decode import chunk, png16

import gpuaug
from gpuaug.batch import CropWindows
from gpuaug.decode import values
from gpuaug.decode.decoder import Decode
from gpuaug.errors import ConfigError

BACKENDS = ("dali", "pillow")
TYPES = ("uint8", "uint16", "float32")


def windows(*box: int, size: tuple[int, int], interpolation: str = "bilinear", fill: int = 0) -> CropWindows:
    """The window ``box`` (top, left, height, width), resized to ``size``."""
    rows = [np.array([x], dtype=np.int32) for x in (box, size, (0, 0))]
    return CropWindows(*rows, size, interpolation, fill)


def view(file: bytes, channels: int, window: CropWindows, **settings: object) -> np.ndarray:
    decoder = opened(channels, **settings)
    images, faults = decoder.pixels(decoder.read_headers(batch(file)), [window])
    decoder.close()
    assert not faults
    return images[0][0].numpy()


# -- exact --


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5, 13])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_values_are_those_that_were_stored(backend: str, dtype: str, channels: int) -> None:
    x, decoder = picture(dtype, channels), opened(channels, backend=backend)
    window = windows(3, 1, 20, 31, size=(20, 31))
    for variant in (v for v in VARIANTS if exists(v, dtype, channels)):
        file = encoded(variant, x)
        image, reason = decoded(decoder, file)
        assert image is not None, (variant, reason)
        assert image.dtype == dtype
        assert np.array_equal(image, x), variant
        (part,), faults = decoder.pixels(decoder.read_headers(batch(file)), [window])
        assert not faults
        assert np.array_equal(part[0].numpy(), x[3:23, 1:32]), variant


def rows(x: np.ndarray) -> bytes:
    return b"".join(b"\0" + row.astype(">u2").tobytes() for row in x)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [(40, 56), (5, 3), (1, 1), (9, 4)])
def test_interlaced_png_is_exact(size: tuple[int, int], backend: str) -> None:
    x = picture("uint16", 3, *size)
    steps = ((0, 8, 0, 8), (0, 8, 4, 8), (4, 8, 0, 4), (0, 4, 2, 4), (2, 4, 0, 2), (0, 2, 1, 2), (1, 2, 0, 1))
    passes = [x[top::down, left::right] for top, down, left, right in steps]
    data = zlib.compress(b"".join(rows(part) for part in passes if part.size))
    head = struct.pack(">IIBBBBB", size[1], size[0], 16, 2, 0, 0, 1)
    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    image, reason = decoded(opened(3, backend=backend), file)
    assert image is not None, reason
    assert np.array_equal(image, x)


def test_gamma_transparency_and_texts_of_png_change_nothing() -> None:
    x = picture("uint16", 3)
    file = png16(x)
    extra = chunk(b"gAMA", struct.pack(">I", 200_000)) + chunk(b"tRNS", struct.pack(">3H", *x[0, 0]))
    extra += chunk(b"sBIT", b"\5\5\5") + chunk(b"tEXt", b"Comment\0" + b"a" * 100_000)
    image, reason = decoded(opened(3), file[:33] + extra + file[33:])
    assert image is not None, reason
    assert np.array_equal(image, x)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied(orientation: int) -> None:
    x = picture("uint16", 3)
    turned = {
        1: x, 2: x[:, ::-1], 3: x[::-1, ::-1], 4: x[::-1], 5: x.transpose(1, 0, 2), 6: np.rot90(x, -1),
        7: x[::-1, ::-1].transpose(1, 0, 2), 8: np.rot90(x),
    }[orientation]  # fmt: skip
    out, file = io.BytesIO(), png16(x)
    tifffile.imwrite(out, x, photometric="rgb", extratags=[(274, 3, 1, orientation, True)])
    exif = b"II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0" + bytes([orientation, 0, 0, 0, 0, 0, 0, 0])
    for each in (out.getvalue(), file[:33] + chunk(b"eXIf", exif) + file[33:]):
        image, reason = decoded(opened(3), each)
        assert image is not None, reason
        assert np.array_equal(image, turned)


def test_smaller_copies_in_a_tiff_are_left_out() -> None:
    x, out = picture("uint16", 4), io.BytesIO()
    with tifffile.TiffWriter(out) as writer:
        writer.write(x, photometric="rgb")
        writer.write(x[::2, ::2], photometric="rgb", subfiletype=1)
    assert np.array_equal(decoded(opened(4), out.getvalue())[0], x)


# -- views --


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("variant", ["npy, big-endian", "tiles", "planes"])
def test_resizing_is_torchs_in_float(variant: str, interpolation: str) -> None:
    for dtype in TYPES:
        x = picture(dtype, 5, 90, 80)
        got = view(encoded(variant, x), 5, windows(4, 6, 70, 60, size=(23, 31), interpolation=interpolation))
        part = torch.from_numpy(x[4:74, 6:66].astype(np.float32)).permute(2, 0, 1)[None]
        want = F.interpolate(part, size=(23, 31), mode=interpolation, antialias=True)[0].permute(1, 2, 0).numpy()
        want = want if dtype == "float32" else np.rint(want).clip(0, np.iinfo(dtype).max)
        # torch's kernel for uint8 rounds after each axis
        tolerance = {"uint8": 1, "uint16": 0, "float32": 1e-6}[dtype]
        assert got.dtype == dtype
        assert np.abs(got.astype(np.float64) - want).max() <= tolerance, dtype


def test_a_batch_has_one_type_and_blank_rows_are_zero() -> None:
    x = picture("uint16", 4)
    decoder = opened(4)
    files = [encoded("npy", x), b"garbage", encoded("lzw", x), encoded("png", x), encoded("planes", x)]
    headers = decoder.read_headers(batch(*files))
    each = windows(0, 0, 40, 56, size=(40, 56))
    repeated = CropWindows(*(np.repeat(a, 5, axis=0) for a in (each.window, each.resized, each.offset)), each.size)
    (images,), faults = decoder.pixels(headers, [repeated])
    assert images.dtype == torch.uint16
    assert not faults
    assert [fault.row for fault in headers.faults] == [1]
    for row in range(5):
        assert np.array_equal(images[row].numpy(), x * (row != 1))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("variant", ["npy", "lzw", "planes"])
def test_values_that_are_not_finite_are_faults(variant: str, value: float) -> None:
    x = picture("float32", 4)
    x[30, 40, 2] = value
    decoder = opened(4)
    headers = decoder.read_headers(batch(encoded(variant, x)))
    for box, count in (((0, 0, 40, 56), 1), ((0, 0, 20, 20), 0)):
        (images,), faults = decoder.pixels(headers, [windows(*box, size=box[2:])])
        assert [fault.reason[:15] for fault in faults] == ["NaN or infinity"] * count
        assert images.any() == (not count)


@pytest.mark.parametrize(("white", "level"), [(None, 65535), (4095, 4095)])
def test_fill_is_in_the_unit_of_the_values(white: float | None, level: int) -> None:
    zero, size = np.zeros((1, 2), dtype=np.int32), np.array([[40, 56]], dtype=np.int32)
    window = CropWindows(np.hstack([zero, size]), size, zero, (44, 56), fill=255)
    got = view(encoded("npy", picture("uint16", 2)), 2, window, white=white)
    assert (got[40:] == level).all()


# -- faults --


def reason_of(file: bytes, channels: int = 3, **settings: object) -> str:
    image, reason = decoded(opened(channels, **settings), file)
    assert image is None
    return reason


def saved(x: np.ndarray, **options: object) -> bytes:
    np.save(out := io.BytesIO(), x, **options)
    return out.getvalue()


def tiff(x: np.ndarray, **options: object) -> bytes:
    tifffile.imwrite(out := io.BytesIO(), x, photometric="rgb", **options)
    return out.getvalue()


X = picture("uint16", 3)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (tiff(X.astype("int16")), "tiff of signed 16-bit numbers. Only uint8, uint16 and float32"),
        (tiff(X.astype("uint32")), "tiff of unsigned 32-bit numbers"),
        (tiff((X / 65536).astype("float16")), "tiff of floating-point 16-bit numbers"),
        (tiff(X.astype("uint8"), compression="jpeg"), "tiff with compression 7"),
        (tiff(np.stack([X, X])), "tiff with several images"),
        (saved(X.astype("float64")), "npy of type '<f8'. Only uint8, uint16 and float32"),
        (saved(np.asfortranarray(X)), "npy must be in C order"),
        (saved(X[None]), "npy must have the axes"),
        (saved(np.array([{"a": 1}]), allow_pickle=True), "npy of type '|O'"),
        (
            saved(np.moveaxis(X, -1, 0).copy()),
            "npy of 56 channels (40 x 3 (width x height)), but `decode.channels` is 3",
        ),
        (
            encoded("tiles", picture("uint16", 13)),
            "tiff of 13 channels (56 x 40 (width x height)), but `decode.channels` is 3",
        ),
        (b"\xff\xd8\xff\xe0" + bytes(100), "jpeg has no stored values"),
        (b"", "not a file of stored values (png, tiff, npy): 0 bytes"),
        (b"GIF89a", "gif has no stored values"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_other_files_are_faults(file: bytes, said: str) -> None:
    assert reason_of(file).startswith(said)


def test_palette_is_a_fault() -> None:
    from PIL import Image

    Image.fromarray(picture("uint8", 3)).quantize(8).save(out := io.BytesIO(), "png")
    assert reason_of(out.getvalue()).startswith("png with a palette")


def test_one_type_per_run(caplog: pytest.LogCaptureFixture) -> None:
    decoder = opened(3)
    with caplog.at_level(logging.INFO, logger="gpuaug"):
        first, *others = (decoded(decoder, encoded("png", picture(dtype, 3))) for dtype in ("uint16", "uint8"))
    assert first[0] is not None
    assert "decode raw: uint16 values with 3 channels" in caplog.text
    assert others[0][0] is None
    assert "png of uint8 values, but the first file of the run has uint16" in others[0][1]
    assert "npy of float32 values" in decoded(decoder, encoded("npy", picture("float32", 3)))[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_truncation_is_a_fault(backend: str) -> None:
    x, decoder = picture("uint16", 4), opened(4, backend=backend)
    for variant in VARIANTS:
        file = encoded(variant, x)
        lengths = {*range(0, 64, 7), *np.linspace(64, len(file) - 1, 25).astype(int).tolist(), len(file) - 2}
        for length in sorted(lengths):
            image, reason = decoded(decoder, file[:length])
            assert image is None, (variant, length)
            assert reason
        assert np.array_equal(decoded(decoder, file)[0], x), variant


def test_flipped_bits_in_a_png_are_faults() -> None:
    x, rng = picture("uint16", 4), np.random.default_rng(0)
    file, decoder = encoded("png", x), opened(4)
    for at in (*range(8, 60), *rng.integers(60, len(file), 60).tolist()):
        image, _ = decoded(decoder, file[:at] + bytes([file[at] ^ 4]) + file[at + 1 :])
        assert image is None or np.array_equal(image, x), at  # in a name of a chunk without pixels


def test_a_png_that_inflates_to_more_than_its_pixels_is_a_fault() -> None:
    head = struct.pack(">IIBBBBB", 100, 100, 16, 2, 0, 0, 0)
    data = zlib.compress(bytes(64 << 20))
    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    assert reason_of(file) == "png of 100 x 100 (width x height) is damaged or truncated: it has more values"


@pytest.mark.parametrize("backend", BACKENDS)
def test_sizes_are_checked_before_anything_is_decoded(backend: str) -> None:
    big = struct.pack(">IIBBBBB", 60_000, 60_000, 16, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", big) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    claims = {"max_pixels": 10**12}  # so that only the memory is the limit
    assert "60000 x 60000 (width x height), with 3 channels, takes" in reason_of(png, backend=backend, **claims)
    assert "`decode.max_pixels`" in reason_of(png, backend=backend)
    for variant in TIFF:
        file = bytearray(encoded(variant, X))
        with tifffile.TiffFile(io.BytesIO(bytes(file))) as read:
            tags = [read.pages[0].tags[name] for name in ("ImageWidth", "ImageLength")]
            order, places = read.byteorder, [tag.valueoffset for tag in tags]
            forms = ["H" if tag.dtype == 3 else "I" for tag in tags]
        for place, form in zip(places, forms, strict=True):
            struct.pack_into(order + form, file, place, 60_000)
        assert "60000 x 60000 (width x height), with 3 channels, takes" in reason_of(
            bytes(file), backend=backend, **claims
        ), variant
    npy = saved(X).replace(b"(40, 56, 3)", b"(60000, 60000, 3)").replace(b" " * 12, b" " * 6, 1)
    assert "must have 21600000000 bytes of values. Found: 13440" in reason_of(npy, backend=backend, **claims)
    tile = bytearray(encoded("tiles", X))
    with tifffile.TiffFile(io.BytesIO(bytes(tile))) as read:
        place = read.pages[0].tags["TileWidth"].valueoffset
    struct.pack_into("<H", tile, place, 60_000)
    struct.pack_into("<H", tile, place + 12, 60_000)
    assert "is damaged" in reason_of(bytes(tile), backend=backend)


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<u2', 'fortran_order': False, 'shape': (40, 56, -3)}",
        b"{'descr': '<u2', 'fortran_order': False, 'shape': (40, 56.0, 3)}",
        b"{'descr': '<u2', 'fortran_order': False, 'shape': [40, 56, 3]}",
        b"{'descr': '<u2', 'fortran_order': False, 'shape': (True, 56, 3)}",
        b"{'descr': [('a', '<u2')], 'fortran_order': False, 'shape': (40, 56, 3)}",
        b"{'descr': '<u2', 'fortran_order': True, 'shape': (40, 56, 3)}",
        b"{'descr': '<u2', 'shape': (40, 56, 3)}",
        b"__import__('os').abort()",
        b"(" * 9000,
        b"-" * 9000 + b"1",
        b"{'descr': '<u2', 'fortran_order': False, 'shape': (9" + b"9" * 8000 + b",)}",
        b"\xff\xfe\0",
        b"",
        b" " * 10_001,
    ],
    ids=lambda header: repr(header[:12]),
)
@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_headers_of_npy_are_read_as_literals_only(header: bytes, version: int) -> None:
    length = struct.pack("<H" if version == 1 else "<I", len(header))
    file = b"\x93NUMPY" + bytes([version, 0]) + length + header + X.tobytes()
    assert reason_of(file).startswith("npy")


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_versions_of_npy(version: tuple[int, int]) -> None:
    np.lib.format.write_array(out := io.BytesIO(), X, version=version)
    assert np.array_equal(decoded(opened(3), out.getvalue())[0], X)


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_libraries", lambda: ImportError("No module named 'imagecodecs'"))
    for variant in EXTRA:
        said = reason_of(encoded(variant, X))
        assert "needs tifffile and imagecodecs (No module named 'imagecodecs')" in said, variant
        assert "pip install 'gpuaug[tiff]'" in said
    assert "png without DALI needs tifffile" in reason_of(encoded("png", X), backend="pillow")
    for variant in ("png", "npy", "lzw"):
        assert decoded(opened(3), encoded(variant, X))[0] is not None


@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.long)])
def test_damaged_files_end_no_process_and_take_no_memory(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*map(str, SHARED), os.environ.get("PYTHONPATH", "")]))
    child = Child(str(Path(__file__).with_name("stored_child.py")), hang_cpu=60.0)
    counts = Counter[str]()
    for variant in VARIANTS:
        for backend in BACKENDS if variant not in EXTRA else ("dali",):
            answer = child.ask(range(count), settings=f"{variant};{backend};150;170")
            assert not answer["error"], (variant, backend, answer)  # a death, a hang, or more memory than `max_bytes`
            counts.update(answer["verdicts"].values())
            if variant == "png":
                assert "values" not in answer["verdicts"].values()
    child.close()
    assert child.started == 1
    assert counts.keys() <= {"fault", "same", "values"}
    assert counts["fault"] > counts.total() / 4


def test_batches_of_large_files_take_at_most_max_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*map(str, SHARED), os.environ.get("PYTHONPATH", "")]))
    child = Child(str(Path(__file__).with_name("stored_child.py")), hang_cpu=60.0)
    for variant in ("png", "npy", "lzw", "zstd tiles, big-endian", "planes, lzw", "jpeg2000", "lerc"):
        answer = child.ask(range(12), settings=f"{variant};dali;560;660", alone=True)
        assert not answer["error"], (variant, answer)
        assert set(answer["verdicts"].values()) == {"same"}, variant
    child.close()


# -- settings --


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pixels": "raw"}, "`decode.pixels=raw` needs `decode.channels`"),
        ({"channels": 4}, "rgb8 has neither"),
        ({"white": 4095}, "rgb8 has neither"),
        ({"pixels": "raw", "channels": 0}, "`channels` must be"),
        ({"pixels": "raw", "channels": 4, "white": 0}, "`white` must be"),
        ({"pixels": "raw", "channels": 4, "reduced": True}, "are for JPEG"),
        ({"pixels": "raw", "channels": 4, "codecs": ["jpeg"]}, "`codecs` must be a list of names from png, tiff, npy"),
        ({"codecs": ["npy"]}, "`codecs` must be a list of names from jpeg, png"),
        ({"pixels": "rgb16"}, "`pixels` must be"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match="decode|codecs|channels|white|pixels") as caught:
        Decode(**settings)
    assert said in str(caught.value)


def test_codecs_can_be_fewer() -> None:
    said = reason_of(encoded("npy", X), codecs=["png"])
    assert said == "npy is not among `decode.codecs`: png"


def test_rgb8_reads_no_npy() -> None:
    headers = gpuaug.Decode().open("cpu").read_headers(batch(encoded("npy", X)))
    assert headers.faults[0].reason == "npy has stored values, which only `decode.pixels=raw` reads"
