"""Headers against what Pillow reads, and against bytes made by hand."""

from __future__ import annotations

import io
import re
import struct
import tracemalloc
import zlib
from numbers import Number

import pytest
from hostile import with_frame
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import encode
from PIL import Image, ImageOps

from gpuaug.decode import header
from gpuaug.decode.header import Header, HeaderError
from gpuaug.files import CODECS


def gradient(form: str, size: tuple[int, int] = (37, 21), **options) -> bytes:
    return encode(Image.linear_gradient("L").resize(size).convert("RGB"), form, **options)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "GIF"])
@pytest.mark.parametrize("size", [(1, 1), (37, 21), (300, 2), (2, 1000)])
def test_sizes(form, size):
    found = header.read(gradient(form, size))
    assert found == Header(form.lower(), size[1], size[0], scans=found.scans)


@pytest.mark.parametrize(("options", "scans"), [({}, 1), ({"progressive": True}, 10)])
def test_scans(options, scans):
    assert header.read(gradient("JPEG", **options)).scans == scans


def test_scans_of_arithmetic_coding_count_twice():
    progressive = gradient("JPEG", progressive=True)
    arithmetic = progressive.replace(b"\xff\xc2", b"\xff\xca", 1)
    assert header.read(arithmetic).scans == 2 * header.read(progressive).scans


@pytest.mark.parametrize("form", ["WEBP", "BMP", "PPM", "TIFF", "JPEG2000"])
def test_size_left_to_the_decoder(form):
    assert header.read(gradient(form)) == Header(form.lower(), 0, 0)


def block(order: str, orientation: int, *, kind: int = 3, count: int = 1, others: int = 3) -> bytes:
    """A TIFF block with some other entries before the orientation."""
    mark = {"<": b"II*\0", ">": b"MM\0*"}[order]
    out = mark + struct.pack(order + "IH", 8, others + 1)
    for tag in range(others):
        out += struct.pack(order + "HHII", 0x100 + tag, 4, 1, 7)
    value = struct.pack(order + "HH", orientation, 0) if kind == 3 else struct.pack(order + "I", orientation)
    return out + struct.pack(order + "HHI", 0x0112, kind, count) + value


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("prefix", [b"", b"Exif\0\0", b"Exif\0\0Exif\0\0"])
def test_orientation(order, orientation, prefix):
    assert header.exif_orientation(prefix + block(order, orientation)) == orientation
    assert header.exif_orientation(prefix + block(order, orientation, kind=4)) == orientation


FORMS = {3: "H", 4: "I", 5: "II", 6: "b", 8: "h", 9: "i", 10: "ii", 11: "f", 12: "d", 13: "I", 16: "Q"}


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from("<>"),
    st.lists(st.tuples(st.integers(0, 17), st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=3),
    st.booleans(),
)
def test_every_type_is_read_as_pillow_reads_it(order, entries, xmp):
    """Several entries, of every type and count; one of them counts."""
    table, values = struct.pack(order + "H", len(entries)), b""
    behind = 8 + 2 + 12 * len(entries) + 4
    for kind, count, number in entries:
        form = order + FORMS.get(kind, "B")
        value = struct.pack(form, *((number, 1) if len(form) == 3 else (number,))) * count
        at = struct.pack(order + "I", behind + len(values)) if len(value) > 4 else value.ljust(4, b"\0")
        values += value if len(value) > 4 else b""
        table += struct.pack(order + "HHI", 0x0112, kind, count) + at
    mark = {"<": b"II*\0", ">": b"MM\0*"}[order]
    exif = b"Exif\0\0" + mark + struct.pack(order + "I", 8) + table + bytes(4) + values
    text = b'<x tiff:Orientation="6"/>' if xmp else b""
    data = gradient("JPEG", exif=exif, xmp=text) if text else gradient("JPEG", exif=exif)
    with Image.open(io.BytesIO(data)) as image:
        orientation = image.getexif().get(0x0112, 1)
    valid = isinstance(orientation, Number) and orientation in range(1, 9)
    assert header.read(data).orientation == (orientation if valid else 1)


def test_no_orientation():
    whole = block("<", 6)
    assert all(header.exif_orientation(whole[:n]) is None for n in range(len(whole) - 2))
    assert header.exif_orientation(block("<", 0)) == header.exif_orientation(block("<", 9)) == 1
    assert header.exif_orientation(block("<", 6, kind=2)) == 1
    assert header.exif_orientation(b"Exif\0\0MM\0*\xff\xff\xff\xff" + b"\0" * 20) is None


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "empty"),
        (b"GIF", "known codec"),
        (b"\0\0\0\x1cftypM4A \0\0\0\0", r"jpeg, png, .*: 16 bytes, which begin with .*ftypM4A"),
        (b"\xff\xd8\xff", "truncated"),
        (b"\xff\xd8\xff\xe0\x00\x10", "truncated"),
        (b"\xff\xd8\xff\xd9", "ends before its first scan"),
        (b"\xff\xd8\xff\xda\x00\x02", "without a frame header"),
        (b"\xff\xd8" + b"\xff" * 100_000, "junk"),
        (b"\xff\xd8\xff\xe0\x00\x02" + b"a" * 100_000, "without a scan"),
        (gradient("JPEG")[:-2], "truncated"),
        (b"\x89PNG\r\n\x1a\n" + b"a" * 30, "IHDR"),
        (gradient("PNG")[:33] + b"\0\0\0\0abcdcrc!" * 140_000, "chunks"),
    ],
)
def test_bytes_that_are_refused(data, text):
    with pytest.raises(HeaderError, match=text):
        header.read(data)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["JPEG", "PNG", "GIF"]), st.data())
def test_any_bytes_give_a_header_or_its_own_error(form, data):
    encoded = bytearray(gradient(form, **({} if form == "GIF" else {"exif": block("<", 6)})))
    for _ in range(data.draw(st.integers(1, 6))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    encoded = encoded[: data.draw(st.integers(0, len(encoded)))]
    try:
        found = header.read(bytes(encoded))
    except HeaderError as error:
        with pytest.raises(HeaderError, match=re.escape(str(error))):
            header.read(memoryview(encoded))
        return
    assert header.read(memoryview(encoded)) == found
    assert found.codec in CODECS
    assert 1 <= found.orientation <= 8
    assert found.height >= 0
    assert found.width >= 0


@pytest.mark.parametrize("size", [(1, 1), (21, 37), (300, 2)])
def test_raw_is_its_size_and_its_pixels(size):
    data = header.raw_header(*size) + bytes(size[0] * size[1] * 3)
    assert len(header.raw_header(*size)) == header.RAW_HEADER
    assert header.read(data) == header.read(memoryview(data)) == Header("raw", *size)
    for wrong in (data[:-1], data + b"\0", data[:12]):
        with pytest.raises(HeaderError, match=r"raw of .* \d+ bytes. Found: \d+|raw header is truncated"):
            header.read(wrong)
        with pytest.raises(HeaderError, match="raw"):
            header.read(memoryview(wrong))


@pytest.mark.parametrize("kind", [b"tEXt", b"zTXt"])
@pytest.mark.parametrize("orientation", [1, 6, 8])
def test_orientation_in_imagemagicks_raw_profile(kind, orientation):
    text = b"\nexif\n%8d\n" % len(block("<", orientation)) + block("<", orientation).hex().encode() + b"\n"
    text = b"\0" + zlib.compress(text) if kind == b"zTXt" else text
    payload = b"Raw profile type exif\0" + text
    chunk = struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))
    plain = gradient("PNG")
    data = plain[:33] + chunk + plain[33:]
    assert header.read(data).orientation == orientation
    assert ImageOps.exif_transpose(Image.open(io.BytesIO(data))).size == ((37, 21) if orientation < 5 else (21, 37))
    for at in range(41, 41 + len(payload)):  # damaged: no orientation, or another
        assert 1 <= header.read(data[:at] + b"\xff" + data[at + 1 :]).orientation <= 8


def test_a_raw_profile_is_inflated_only_in_part():
    payload = b"Raw profile type exif\0\0" + zlib.compress(b"\nexif\n 9\n" + b"00" * 50_000_000)
    chunk = struct.pack(">I", len(payload)) + b"zTXt" + payload + b"crc!"
    plain = gradient("PNG")
    tracemalloc.start()
    assert header.read(plain[:33] + chunk + plain[33:]).orientation == 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize(
    ("screen", "at", "size"),
    [
        ((0, 0), (0, 0), (21, 37)),
        ((10, 10), (0, 0), (21, 37)),
        ((37, 21), (5, 3), (24, 42)),
        ((99, 5), (0, 0), (21, 99)),
    ],
)
def test_a_gif_is_as_large_as_its_screen_and_first_frame(screen, at, size):
    data = bytearray(gradient("GIF", comment=b"a comment " * 60))
    data[6:10] = struct.pack("<HH", *screen)
    frame = data.index(b"\x2c" + struct.pack("<HHHH", 0, 0, 37, 21))
    data[frame + 1 : frame + 5] = struct.pack("<HH", *at)
    found = header.read(bytes(data))
    assert (found.height, found.width) == size == Image.open(io.BytesIO(data)).size[::-1]


def test_a_gif_of_extensions_ends():
    with pytest.raises(HeaderError, match="blocks before its first frame"):
        header.read(b"GIF89a\x08\0\x08\0\0\0\0" + b"!\xfe" + b"\x01a" * 500_000)


def test_only_what_dali_is_known_to_decode_is_safe():
    jpeg = gradient("JPEG")
    for marker in (0xC0, 0xC1, 0xC2):
        assert header.read(with_frame(jpeg, marker=marker)).dali_safe
    for marker in (0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF):
        assert not header.read(with_frame(jpeg, marker=marker)).dali_safe
    for precision in (0, 1, 7, 9, 12, 16, 17, 255):
        assert not header.read(with_frame(jpeg, precision=precision)).dali_safe


def test_the_pixels_of_a_png_are_kept():
    data = gradient("PNG", dpi=(99, 99), icc_profile=bytes(3000), exif=block("<", 6))
    found = header.png_pixels(data)
    assert len(found) < len(data)
    assert Image.open(io.BytesIO(found)).tobytes() == Image.open(io.BytesIO(data)).tobytes()
    assert header.read(found).ancillary == 0
    header.png_pixels(data[:50])
    assert header.read(data).ancillary > 50
