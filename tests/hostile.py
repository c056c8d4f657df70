"""Hostile image files, generated. `good` ones must decode, `bad` ones must be refused, others may do either."""

import random
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, lru_cache

import numpy as np
from pictures import encode
from PIL import Image
from PIL.PngImagePlugin import PngInfo

GOOD, BAD, EITHER = "good", "bad", "either"


@cache
def photograph() -> np.ndarray:
    """A real one."""
    from skimage import data

    return data.astronaut()


def window(height: int = 96, width: int = 128, seed: int = 0) -> Image.Image:
    """A window of the photograph."""
    y, x = 40 + 7 * seed % 100, 60 + 11 * seed % 120
    return Image.fromarray(photograph()[y : y + height, x : x + width])


def segments(jpeg: bytes) -> list[tuple[int, int, int]]:
    """(marker, start, end) of the segments before and including the first SOS header."""
    found, at = [], 2
    while at + 4 <= len(jpeg):
        marker, length = jpeg[at + 1], struct.unpack(">H", jpeg[at + 2 : at + 4])[0]
        found.append((marker, at, at + 2 + length))
        at += 2 + length
        if marker == 0xDA:
            break
    return found


def find(jpeg: bytes, *markers: int) -> tuple[int, int]:
    """Start and end of the first segment with one of these markers."""
    return next((start, end) for marker, start, end in segments(jpeg) if marker in markers)


def with_size(jpeg: bytes, height: int, width: int) -> bytes:
    """The same JPEG claiming another size."""
    start, _ = find(jpeg, 0xC0, 0xC1, 0xC2)
    return jpeg[: start + 5] + struct.pack(">HH", height, width) + jpeg[start + 9 :]


def with_frame(jpeg: bytes, marker: int | None = None, precision: int | None = None) -> bytes:
    """The same JPEG claiming another coding process or sample precision."""
    start, _ = find(jpeg, 0xC0, 0xC1, 0xC2)
    out = bytearray(jpeg)
    if marker is not None:
        out[start + 1] = marker
    if precision is not None:
        out[start + 4] = precision
    return bytes(out)


def lossless_jpeg(gray: np.ndarray) -> bytes:
    """uint8 [H, W] as a lossless JPEG (SOF3): differences to the left neighbour, Huffman codes of five bits."""
    height, width = gray.shape
    bits = []
    for y in range(height):
        for x in range(width):
            above = int(gray[y - 1, x]) if y else 128
            before = int(gray[y, x - 1]) if x else above
            value = int(gray[y, x]) - before
            count = abs(value).bit_length()
            bits.append(f"{count:05b}")
            if count:
                bits.append(f"{value if value > 0 else value + (1 << count) - 1:0{count}b}")
    text = "".join(bits)
    text += "1" * (-len(text) % 8)
    data = bytes(int(text[k : k + 8], 2) for k in range(0, len(text), 8)).replace(b"\xff", b"\xff\0")
    table = segment(0xC4, bytes([0, 0, 0, 0, 0, 10, *[0] * 11, *range(10)]))  # ten codes of length 5
    frame = segment(0xC3, struct.pack(">BHHB", 8, height, width, 1) + bytes([1, 0x11, 0]))
    scan = segment(0xDA, bytes([1, 1, 0, 1, 0, 0]))  # predictor 1
    return b"\xff\xd8" + table + frame + scan + data + b"\xff\xd9"


def segment(marker: int, payload: bytes) -> bytes:
    """A marker segment with its length."""
    return bytes([0xFF, marker]) + struct.pack(">H", len(payload) + 2) + payload


def inserted(jpeg: bytes, extra: bytes, before: int | None = None) -> bytes:
    """Bytes put behind SOI, or before the first segment with a marker."""
    at = 2 if before is None else find(jpeg, before)[0]
    return jpeg[:at] + extra + jpeg[at:]


def exif(
    orientation: int, *, order: str = "<", offset: int = 8, count: int = 1, entries: int = 1, kind: int = 3
) -> bytes:
    """An EXIF payload with one orientation entry, its fields free to lie."""
    mark = b"II*\0" if order == "<" else b"MM\0*"
    entry = struct.pack(order + "HHI", 274, kind, count) + struct.pack(order + "HH", orientation & 0xFFFF, 0)
    return mark + struct.pack(order + "I", offset) + struct.pack(order + "H", entries) + entry + b"\0\0\0\0"


def many_scans(jpeg: bytes, times: int) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    at = jpeg.rindex(b"\xff\xda")
    body = jpeg[:-2]
    return body + body[at:] * times + b"\xff\xd9"


def wide_tables(jpeg: bytes) -> bytes:
    """The same JPEG with 16-bit quantisation tables, as an extended sequential frame."""
    out, at = bytearray(jpeg[:2]), 2
    for marker, start, end in segments(jpeg):
        if marker == 0xDB:
            payload, tables, k = jpeg[start + 4 : end], b"", 0
            while k < len(payload):
                tables += bytes([0x10 | payload[k] & 15]) + b"".join(bytes([0, v]) for v in payload[k + 1 : k + 65])
                k += 65
            out += segment(0xDB, tables)
        elif marker == 0xC0:
            out += b"\xff\xc1" + jpeg[start + 2 : end]
        else:
            out += jpeg[start:end]
        at = end
    return bytes(out) + jpeg[at:]


def chunk(kind: bytes, payload: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))


def png(
    width: int, height: int, data: bytes, *, depth: int = 8, color: int = 2, extra: bytes = b"", interlace: int = 0
) -> bytes:
    """A PNG with this header and compressed data."""
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlace)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + extra + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@lru_cache(maxsize=8)
def zeros(size: int) -> bytes:
    """About so many zeros as a zlib stream, of which no more than 8 MiB are compressed."""
    deflate = zlib.compressobj(9)
    first, again = (deflate.compress(bytes(1 << 22)) + deflate.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    count = max(1, -(-size >> 22))
    adler = 1 | (count << 22) % 65521 << 16
    return first + again * (count - 1) + b"\x03\0" + struct.pack(">I", adler)


def bomb(width: int, height: int) -> bytes:
    """A one-bit PNG of this size, all black: kilobytes that become gigabytes as RGB."""
    return png(width, height, zeros(height * (1 + (width + 7) // 8)), depth=1, color=0)


def bmp(
    bits: int,
    *,
    size: int = 40,
    compression: int = 0,
    masks: tuple[int, ...] = (),
    colors: int = 0,
    entries: int | None = None,
    height: int = 11,
    width: int = 20,
    body: bytes | None = None,
) -> bytes:
    """A BMP of noise: bits per pixel, bytes of its header, colours that it claims and that it has."""
    rng = random.Random(bits)
    entries = (1 << bits if 0 < bits <= 8 else 0) if entries is None else entries
    if size == 12:
        head = struct.pack("<IHHHH", 12, width, height, 1, bits)
    else:
        head = struct.pack("<IiiHHIIiiII", size, width, height, 1, bits, compression, 0, 2835, 2835, colors, 0)
    mask = b"".join(struct.pack("<I", value) for value in masks)
    head += mask + bytes(max(0, size - len(head) - len(mask)))
    palette = rng.randbytes(entries * (3 if size == 12 else 4))
    if body is None:
        body = rng.randbytes((width * bits + 31) // 32 * 4 * abs(height))
    offset = 14 + len(head) + len(palette)
    return b"BM" + struct.pack("<IHHI", (offset + len(body)) & 0xFFFFFFFF, 0, 0, offset) + head + palette + body


def webp_canvas(width: int, height: int) -> bytes:
    """An extended WebP that claims this canvas and holds a small frame."""
    inner = encode(window(32, 32), "WEBP")[12:]
    header = b"\0\0\0\0" + struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    body = b"WEBP" + b"VP8X" + struct.pack("<I", 10) + header + inner
    return b"RIFF" + struct.pack("<I", len(body)) + body


def corpus(share: float = 1.0, seed: int = 0) -> Iterator[tuple[str, bytes, str]]:
    """(file name, bytes, expectation) of more than 300 files; ``share`` of the repeated kinds."""
    rng = random.Random(seed)
    photo = window()
    bases = {
        "jpg444": encode(photo, "JPEG", quality=90, subsampling=0),
        "jpg420": encode(photo, "JPEG", quality=85, subsampling=2),
        "jpgprog": encode(photo, "JPEG", quality=85, progressive=True),
        "jpggray": encode(photo.convert("L"), "JPEG", quality=85),
        "png": encode(photo, "PNG"),
        "webp": encode(photo, "WEBP", quality=80),
        "bmp": encode(photo, "BMP"),
        "gif": encode(photo, "GIF"),
    }
    suffix = {name: name[:3] if name.startswith("jpg") else name for name in bases}
    jpeg = bases["jpg444"]

    def some(items: list) -> list:
        return items if share >= 1 else rng.sample(items, max(1, round(len(items) * share)))

    yield "empty.jpg", b"", BAD
    for byte in some([0x00, 0x0A, 0x42, 0x47, 0x52, 0x89, 0xD8, 0xFF]):
        yield f"one_byte_{byte:02x}.jpg", bytes([byte]), BAD
    for k in some(list(range(24))):
        yield f"random_{k}.{rng.choice(['jpg', 'png', 'webp', 'gif', 'bmp'])}", rng.randbytes(2 ** (k % 12 + 1)), BAD
    texts = {
        "text": b"not an image\n" * 40,
        "html": b"<!DOCTYPE html><html><head><title>404 Not Found</title></head><body>nginx</body></html>",
        "xml": b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>',
        "json": b'{"error": "rate limited"}',
        "svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10"/>',
        "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n",
        "zeros": bytes(4096),
        "ones": b"\xff" * 4096,
        "gzip": b"\x1f\x8b\x08\0" + bytes(64),
        "pickle": b"\x80\x04\x95\x05\0\0\0\0\0\0\0\x8c\x01a.",
    }
    for name, data in texts.items():
        yield f"{name}.jpg", data, BAD
    for name, magic in {"jpg": b"\xff\xd8\xff", "png": b"\x89PNG\r\n\x1a\n", "webp": b"RIFF\x20\0\0\0WEBPVP8 "}.items():
        yield f"magic_only.{name}", magic, BAD
        for k in some(list(range(4))):
            yield f"magic_random_{k}.{name}", magic + rng.randbytes(200 << k), BAD
    for name, data in bases.items():
        step = 1024 if len(data) > 3000 else 512
        for size in some(list(range(step, len(data) - 2, step))):
            verdict = EITHER if name in ("bmp", "gif") else BAD
            yield f"truncated_{name}_{size}.{suffix[name]}", data[:size], verdict
    for name in ("jpg444", "jpgprog"):
        data = bases[name]
        yield f"no_end_marker_{name}.jpg", data[:-2], BAD
        yield f"junk_after_end_{name}.jpg", data + rng.randbytes(300), GOOD
        yield f"zeros_after_end_{name}.jpg", data + bytes(1000), GOOD
        for h, w in some(
            [(65535, 65535), (65535, 1), (1, 65535), (40000, 40000), (0, 128), (96, 0), (97, 128), (3000, 4000)]
        ):
            yield f"claims_{h}x{w}_{name}.jpg", with_size(data, h, w), EITHER if h * w < 178e6 and h * w else BAD
    for precision in (0, 2, 12, 16):
        yield f"precision_{precision}.jpg", with_frame(jpeg, precision=precision), BAD
    for marker in (0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD):
        # arithmetic decoding (c9) has no codes that cannot occur: Huffman data come out as noise
        yield f"frame_{marker:02x}.jpg", with_frame(jpeg, marker=marker), EITHER if marker == 0xC9 else BAD
    yield "extended.jpg", with_frame(jpeg, marker=0xC1), GOOD
    yield "wide_tables.jpg", wide_tables(jpeg), EITHER
    yield "adobe_rgb.jpg", inserted(jpeg, segment(0xEE, b"Adobe\0d\0\0\0\0\0")), EITHER
    for orientation in some(list(range(0, 10))):
        payload = exif(orientation)
        yield f"orientation_{orientation}.jpg", inserted(jpeg, segment(0xE1, b"Exif\0\0" + payload)), GOOD
        yield (
            f"orientation_be_{orientation}.jpg",
            inserted(jpeg, segment(0xE1, b"Exif\0\0" + exif(orientation, order=">"))),
            GOOD,
        )
        yield f"orientation_{orientation}.png", encode(photo, "PNG", exif=payload), GOOD
        yield f"orientation_{orientation}.webp", encode(photo, "WEBP", exif=payload), GOOD
    lies = {
        "offset": exif(6, offset=0xFFFFFF00),
        "offset_self": exif(6, offset=0),
        "count": exif(6, count=0xFFFFFFFF),
        "entries": exif(6, entries=0xFFFF),
        "kind": exif(6, kind=99),
        "long": exif(6, kind=4),
        "short": exif(6)[:11],
        "garbage": rng.randbytes(64),
        "empty": b"",
    }
    for name, payload in lies.items():
        yield f"exif_{name}.jpg", inserted(jpeg, segment(0xE1, b"Exif\0\0" + payload)), GOOD
        yield f"exif_{name}.png", encode(photo, "PNG", exif=payload) if payload else bases["png"], EITHER
    yield "exif_length.jpg", inserted(jpeg, b"\xff\xe1\xff\xff" + b"Exif\0\0" + exif(6)), EITHER
    yield "icc_garbage.jpg", inserted(jpeg, segment(0xE2, b"ICC_PROFILE\0\1\1" + rng.randbytes(300))), GOOD
    yield "icc_empty.jpg", inserted(jpeg, segment(0xE2, b"ICC_PROFILE\0\1\1")), GOOD
    yield "icc_short.jpg", inserted(jpeg, segment(0xE2, b"ICC_PROFILE\0\1")), EITHER
    for k, junk in enumerate([b"\0", b"junk", rng.randbytes(40).replace(b"\xff", b"\0"), b"\xff\xff\xff"]):
        yield f"junk_between_markers_{k}.jpg", inserted(jpeg, junk, before=0xDB), EITHER
    for length in (0, 1, 2, 60000):
        yield f"app_length_{length}.jpg", inserted(jpeg, b"\xff\xe5" + struct.pack(">H", length)), EITHER
    yield "two_images.jpg", jpeg + jpeg, GOOD
    yield "no_huffman.jpg", b"".join([jpeg[:2], *(jpeg[s:e] for m, s, e in segments(jpeg) if m != 0xC4)]), BAD
    yield "no_quantisation.jpg", jpeg[:2] + b"".join(jpeg[s:e] for m, s, e in segments(jpeg) if m != 0xDB), BAD
    raw = b"".join(b"\0" + np.asarray(photo)[y].tobytes() for y in range(96))
    good_data = zlib.compress(raw)
    yield "plain.png", png(128, 96, good_data), GOOD
    yield "png_bomb_1.png", bomb(60000, 60000), BAD
    yield "png_bomb_2.png", bomb(30000, 12000), BAD
    yield "png_huge_header.png", png(2**31 - 1, 2**31 - 1, good_data), BAD
    yield "png_zero.png", png(0, 96, good_data), BAD
    yield "png_taller.png", png(128, 500, good_data), EITHER  # a complete stream of too few rows: accepted by decoders
    yield "png_bad_depth.png", png(128, 96, good_data, depth=7), BAD
    yield "png_bad_color.png", png(128, 96, good_data, color=5), BAD
    yield "png_bad_zlib.png", png(128, 96, good_data[:50] + b"\xff" * 50 + good_data[100:]), BAD
    yield "png_long_zlib.png", png(128, 96, zlib.compress(raw * 40)), EITHER
    for size in some([16383, 16384, 2**24]):
        yield f"webp_canvas_{size}.webp", webp_canvas(size, size), BAD
    for name, data in bases.items():
        for other in some(["jpg", "png", "webp", "gif", "bmp"]):
            if other != suffix[name]:
                yield f"misnamed_{name}.{other}", data, GOOD
    modes = {"1": "PNG", "L": "PNG", "LA": "PNG", "P": "PNG", "RGBA": "PNG", "I;16": "PNG"}
    for mode, kind in modes.items():
        image = (
            Image.fromarray(np.asarray(photo.convert("L")).astype(np.uint16) * 257)
            if mode == "I;16"
            else photo.convert(mode)
        )
        yield f"mode_{mode.replace(';', '')}.png", encode(image, kind), GOOD
    for h, w in [(1, 1), (1, 300), (300, 1), (2, 3), (7, 5)]:
        yield f"tiny_{h}x{w}.jpg", encode(photo.resize((w, h)), "JPEG"), GOOD
        yield f"tiny_{h}x{w}.png", encode(photo.resize((w, h)), "PNG"), GOOD


# -- classes of files: what encoders write, field by field, and what decoders were never tried with


def runs(bits: int, *, size: tuple[int, int] = (24, 40)) -> bytes:
    """An RLE8 or RLE4 bitmap: runs, literals, a skip and ends of lines."""
    height, width = size
    line = b"\x05\x12\x03\x34\0\x05" + (b"\x01\x02\x03\x04\x05\0" if bits == 8 else b"\x12\x34\x50\0")
    line += bytes([width - 13, 0x56]) + b"\0\0"
    pixels = line * (height - 2) + b"\0\x02\x03\x01" + bytes([width - 3, 0x11]) + b"\0\x01"
    return bmp(bits, height=height, width=width, compression=1 if bits == 8 else 2, body=pixels)


def idle_lines(height: int = 10, width: int = 16_777_472) -> bytes:
    """A small RLE8 bitmap of long lines, each of them ended before it begins."""
    lines = b"\x01\x01\0\0" * height
    return bmp(8, height=height, width=width, compression=1, body=lines + b"\0" * 5000 + b"\0\x01")


def plain_webp(height: int = 13_300, width: int = 13_300) -> bytes:
    """A lossless WebP of 34 bytes, all of one colour: each of its codes has one symbol, of no bits."""
    bits = width - 1 | (height - 1) << 14  # no alpha, version 0
    codes = sum(0b0001 << 3 + 4 * k for k in range(5))  # no transform, no cache, one group; five codes of one symbol
    body = b"\x2f" + (bits | codes << 32).to_bytes(13, "little")
    return b"RIFF" + struct.pack("<I", 12 + len(body)) + b"WEBPVP8L" + struct.pack("<I", len(body)) + body


def png_of(color: int, depth: int, *, interlaced: bool = False, size: tuple[int, int] = (20, 27)) -> bytes:
    """A PNG of any colour type, depth and interlacing; its pixels are noise."""
    height, width = size
    bits = depth * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}.get(color, 1)
    passes = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]
    rng, raw = random.Random(16 * color + depth), b""
    for y, x, dy, dx in passes if interlaced else [(0, 0, 1, 1)]:
        rows, columns = len(range(y, height, dy)), len(range(x, width, dx))
        raw += b"".join(b"\0" + rng.randbytes(-(-columns * bits // 8)) for _ in range(rows if columns else 0))
    palette = chunk(b"PLTE", rng.randbytes(3 << min(depth, 8))) if color == 3 else b""
    return png(width, height, zlib.compress(raw), depth=depth, color=color, extra=palette, interlace=int(interlaced))


def tiff(channels: int, bits: int = 8, *, sample: int = 1, size: tuple[int, int] = (20, 27), **lies: int) -> bytes:
    """An uncompressed TIFF; ``sample`` 1: unsigned, 3: float; ``lies``: ``compression``, ``photometric``, ``rows``."""
    height, width = size
    pixels = random.Random(channels).randbytes(height * width * channels * bits // 8)
    if sample == 3:
        pixels = np.linspace(0, 1, height * width * channels, dtype=f"<f{bits // 8}").tobytes()
    entries = [
        (256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, bits), (259, 3, 1, lies.get("compression", 1)),
        (262, 3, 1, lies.get("photometric", 2 if channels > 2 else 1)), (273, 4, 1, 8), (277, 3, 1, channels),
        (278, 4, 1, lies.get("rows", height)), (279, 4, 1, len(pixels)), (284, 3, 1, 1), (339, 3, 1, sample),
    ]  # fmt: skip
    table = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *entry) for entry in entries) + bytes(4)
    return b"II*\0" + struct.pack("<I", 8 + len(pixels)) + pixels + table


@cache
def originals() -> dict[str, bytes]:
    """Valid files, the first word their codec: what encoders write, and what they do differently."""
    photo, small = window(), window(40, 56, seed=3)
    gray, turned = small.convert("L"), Image.Exif()
    turned[274] = 6
    frames = [window(24, 32, seed=k) for k in range(3)]
    animated = {"save_all": True, "append_images": frames[1:]}
    deep = Image.fromarray(np.asarray(gray).astype(np.uint16) * 257)
    texts = PngInfo()
    texts.add_text("Comment", "a photograph " * 9, zip=True)
    texts.add_itxt("Title", "a photograph", zip=True)
    cmyk = encode(small.convert("CMYK"), "JPEG", quality=85)
    files = {
        "jpeg 444": encode(small, "JPEG", quality=90, subsampling=0),
        "jpeg 420": encode(photo, "JPEG", quality=85, subsampling=2, exif=turned),
        "jpeg progressive": encode(small, "JPEG", quality=85, progressive=True),
        "jpeg gray": encode(gray, "JPEG", quality=85),
        "jpeg cmyk": cmyk,
        "jpeg ycck": cmyk.replace(b"Adobe\0d\0\0\0\0\0", b"Adobe\0d\0\0\0\0\2"),
        "jpeg restarts": encode(photo, "JPEG", quality=60, restart_marker_blocks=2),
        "png exif texts": encode(small, "PNG", exif=turned, pnginfo=texts),
        "png palette": encode(small.convert("P"), "PNG"),
        "png 16 bits": encode(deep, "PNG"),
        "png animated": encode(frames[0], "PNG", **animated),
        "webp": encode(photo, "WEBP", quality=80, exif=turned),
        "webp lossless": encode(small, "WEBP", lossless=True),
        "webp alpha": encode(small.convert("RGBA"), "WEBP"),
        "webp animated": encode(frames[0], "WEBP", **animated),
        "bmp": encode(small, "BMP"),
        "bmp OS/2": bmp(24, size=12),
        "bmp OS/2 palette": bmp(8, size=12),
        "bmp 565": bmp(16, compression=3, masks=(0xF800, 0x7E0, 0x1F)),
        "bmp BITFIELDS": bmp(32, size=56, compression=3, masks=(0xFF0000, 0xFF00, 0xFF, 0)),
        "bmp V4": bmp(32, size=108, compression=3, masks=(0xFF0000, 0xFF00, 0xFF, 0xFF000000)),
        "bmp V5 top down": bmp(24, size=124, height=-11),
        "bmp RLE8": runs(8),
        "bmp RLE4": runs(4),
        "gif": encode(small, "GIF"),
        "gif animated": encode(frames[0], "GIF", **animated),
        "tiff group4": encode(small.convert("1"), "TIFF", compression="group4"),
        "tiff 16 bits": encode(deep, "TIFF"),
        "tiff cmyk": encode(small.convert("CMYK"), "TIFF"),
        "jpeg2000": encode(small, "JPEG2000"),
        "avif": encode(small, "AVIF", exif=turned),
        "avif alpha": encode(small.convert("RGBA"), "AVIF", subsampling="4:4:4"),
    }
    with suppress(ImportError):
        from pillow_heif import register_heif_opener

        register_heif_opener()  # the encoder
        files |= {"heif": encode(small, "HEIF", exif=turned.tobytes()), "heif gray": encode(gray, "HEIF")}
    files |= {f"bmp {bits}": bmp(bits) for bits in (1, 4, 8, 16, 24, 32)}
    for color, depths in {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}.items():
        files |= {
            f"png type {color} of {d} bits{' interlaced' * i}": png_of(color, d, interlaced=i)
            for d in depths
            for i in (False, True)
        }
    for how in ("raw", "tiff_lzw", "packbits", "tiff_adobe_deflate", "jpeg"):
        files[f"tiff {how.removeprefix('tiff_')}"] = encode(small, "TIFF", compression=None if how == "raw" else how)
    return files


@cache
def odd() -> dict[str, bytes]:
    """Files that are pixels or faults: fields with every value, other codecs' files, and small files of much work."""
    jpeg, small = encode(window(40, 56), "JPEG", quality=90), window(40, 56, seed=3)
    files = {f"jpeg precision {p}": with_frame(jpeg, precision=p) for p in range(256)}
    files |= {
        f"jpeg extended of 12 bits, {k}": with_frame(jpeg, marker=m, precision=12)
        for k, m in (("SOF1", 0xC1), ("SOF2", 0xC2))
    }
    files |= {f"jpeg SOF{m - 0xC0}": with_frame(jpeg, marker=m) for m in range(0xC0, 0xD0)}
    at, _ = find(jpeg, 0xC0)
    for number in (0, 1, 2, 4, 5, 255):
        files[f"jpeg of {number} components"] = jpeg[: at + 9] + bytes([number]) + jpeg[at + 10 :]
    for sampling in (0x00, 0x11, 0x14, 0x31, 0x44, 0x51, 0xFF):
        files[f"jpeg sampling {sampling:02x}"] = jpeg[: at + 11] + bytes([sampling]) + jpeg[at + 12 :]
    for bits in (0, 1, 2, 3, 4, 8, 15, 16, 24, 32, 48, 64, 65535):
        for compression in (0, 1, 2, 3, 4, 5, 6, 11, 12, 13):
            files[f"bmp {bits} bits, compression {compression}"] = bmp(
                bits, compression=compression, masks=(0x7C00, 0x3E0, 0x1F), body=bytes(range(256)) * 20
            )
    for header in (0, 12, 16, 40, 52, 56, 64, 108, 124, 2**31, 2**32 - 1):
        for bits in (8, 16, 32):
            whole = bmp(bits, size=header if 12 <= header <= 124 else 40)
            files[f"bmp {bits} bits, header {header}"] = whole[:14] + struct.pack("<I", header) + whole[18:]
    masks = {
        "swapped": (0xFF, 0xFF00, 0xFF0000), "10 bits": (0x3FF00000, 0xFFC00, 0x3FF), "all": (2**32 - 1,) * 3,
        "one bit": (1, 2, 4), "none": (0, 0, 0), "overlapping": (0xFFFF,) * 3, "holes": (0xF0F0F0F0, 0x0F0F0F0F, 0xFF),
    }  # fmt: skip
    for name, mask in masks.items():
        for bits in (16, 24, 32):
            files[f"bmp {bits} bits, masks {name}"] = bmp(bits, compression=3, masks=mask)
    for colors in (0, 1, 2, 3, 257, 65536, 2**31 - 1, 2**32 - 1):
        files[f"bmp palette of {colors} for 8 bits"] = bmp(8, colors=colors)
        files[f"bmp palette of {colors} that is missing"] = bmp(4, colors=colors, entries=0)
    for color in range(8):
        for depth in (0, 1, 2, 3, 4, 8, 16, 32):
            files[f"png type {color}, depth {depth}"] = png(9, 9, zlib.compress(bytes(2000)), color=color, depth=depth)
    files |= {f"tiff of {c} channels": tiff(c) for c in (2, 4, 5, 13, 300)}
    files |= {f"tiff float{bits} of {c}": tiff(c, bits, sample=3) for bits in (16, 32, 64) for c in (1, 3)}
    files |= {
        f"tiff compression {k}": tiff(3, compression=k) for k in (2, 3, 4, 6, 7, 34661, 34712, 50000, 50001, 65535)
    }
    files |= {f"tiff photometric {k}": tiff(3, photometric=k) for k in (0, 3, 4, 5, 6, 8, 32803)}
    files |= {"tiff 12 bits": tiff(1, 12), "tiff 1 bit": tiff(1, 1), "tiff no rows": tiff(3, rows=0)}
    gif = bytearray(encode(small, "GIF"))
    for name, screen in {"small": (8, 8), "empty": (0, 0), "huge": (65535, 65535)}.items():
        files[f"gif on a {name} screen"] = bytes(gif[:6]) + struct.pack("<HH", *screen) + bytes(gif[10:])
    netpbm = {
        "P1": b"4 2\n0 1 0 1 1 0 1 0\n", "P2": b"2 2\n255\n1 2 3 4\n", "P3": b"1 1\n255\n1 2 3\n",
        "P4": b"8 2\n\x55\xaa", "P5": b"2 2\n65535\n" + bytes(8), "P6": b"3 2\n255\n" + bytes(18),
    }  # fmt: skip
    files |= {f"ppm {kind}": kind.encode() + b"\n" + rest for kind, rest in netpbm.items()}
    return files | with_lengths() | {f"bomb {name}": data for name, data in bombs().items()}


def with_lengths() -> dict[str, bytes]:
    """Valid files of which four bytes, in front or at the end, say three gigabytes."""
    valid, files = originals(), {}
    names = ("png palette", "webp", "webp lossless", "webp alpha", "bmp 8", "bmp 24", "gif", "jpeg 420", "tiff raw")
    for name in names:
        data = valid[name]
        for at in [*range(2, 48), *range(len(data) - 16, len(data) - 3)]:
            for order, value in (("big", b"\xc0\0\0\x10"), ("little", b"\x10\0\0\xc0")):
                files[f"{name} with 3 GB, {order} endian, at {at}"] = data[:at] + value + data[at + 4 :]
    return files


def many_entries(count: int, each: int) -> bytes:
    """A block of EXIF, or a TIFF, of so many entries that share ``each`` bytes of data."""
    entries = b"".join(struct.pack("<HHII", 40_000 + k, 7, each, 10 + 12 * count) for k in range(count))
    return b"II*\0" + struct.pack("<IH", 8, count) + entries + bytes(each)


def sized_bombs(side: int) -> dict[str, bytes]:
    """Small files that claim ``side`` x ``side`` pixels."""
    square, lines = {"height": side, "width": side}, b"\x01\x01\0\0" * min(side, 10_000) + b"\0\x01"
    jpeg, progressive = (encode(window(40, 56), "JPEG", quality=90, progressive=how) for how in (False, True))
    scans = 12 * 178_000_000 // side**2 - 10
    files = {
        "bmp RLE8 of lines": bmp(8, **square, compression=1, body=lines),
        "bmp RLE4 of lines": bmp(4, **square, compression=2, body=lines),
        "bmp RLE8 of skips": bmp(8, **square, compression=1, body=b"\0\x02\xff\xff" * 60),
        "bmp RLE8 of nothing": bmp(8, **square, compression=1, body=b"\0\x01"),
        "webp of 34 bytes": plain_webp(side, side),
        "webp with a tail": plain_webp(side, side) + b"JUNK" + struct.pack("<I", 1_040_000) + bytes(1_040_000),
        "png of 1 bit": bomb(side, side),
        "png of RGB": png(side, side, zeros(side * (3 * side + 1))),
        "png of RGB, interlaced": png(side, side, zeros(side * (3 * side + 20)), interlace=1),
        "png of RGBA of 16 bits": png(side, side, zeros(min(1 << 30, side * (8 * side + 1))), depth=16, color=6),
        "jpeg that is all missing": with_size(jpeg, side, side),
        "jpeg progressive that is all missing": with_size(progressive, side, side),
        "jpeg progressive of many scans": with_size(many_scans(progressive, max(0, scans)), side, side),
        "jpeg arithmetic that is all missing": with_frame(with_size(jpeg, side, side), marker=0xC9),
        "jpeg arithmetic of many scans": with_frame(
            with_size(many_scans(progressive, max(0, scans)), side, side), marker=0xCA
        ),
        "jpeg lossless that is all missing": with_frame(with_size(jpeg, side, side), marker=0xC3),
        "jpeg of CMYK that is all missing": with_size(encode(window(40, 56).convert("CMYK"), "JPEG"), side, side),
    }
    if side < 8_000:
        flat = Image.new("L", (side, side))
        files |= {
            "gif of one colour": encode(flat, "GIF"),
            "tiff of one strip": encode(flat, "TIFF", compression="tiff_adobe_deflate"),
            "tiff of lzw": encode(flat, "TIFF", compression="tiff_lzw"),
            "tiff of group 4": encode(flat.convert("1"), "TIFF", compression="group4"),
        }
    return files


def bombs() -> dict[str, bytes]:
    """Small files, each below 1 MiB, that ask for much work or memory."""
    jpeg, progressive = (encode(window(40, 56), "JPEG", quality=90, progressive=how) for how in (False, True))
    pixels, half = zlib.compress(bytes(200)), zeros(960 << 20)
    text = chunk(b"zTXt", b"Comment\0\0" + zeros(16 << 20))
    small_text = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(1 << 18), 9))
    long_title = chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zeros(16 << 20))
    gif = encode(window(40, 56), "GIF")
    exif = b"".join(
        segment(0xE1, b"Exif\0\0" + piece)
        for data in (many_entries(20_000, 600_000),)
        for piece in (data[k : k + 65_000] for k in range(0, len(data), 65_000))
    )
    at, _ = find(jpeg, 0xC0)
    return {
        "bmp RLE8 of idle lines": idle_lines(),
        "bmp of 1 bit": bmp(1, height=13_300, width=600, body=bytes(76 * 13_300)),
        "webp, wide": plain_webp(2_700, 16_384),
        "png with too many pixels": png(8, 8, half),
        "png with a profile": png(8, 8, pixels, extra=chunk(b"iCCP", b"p\0\0" + half)),
        "png with texts": png(8, 8, pixels, extra=text * 60),
        "png with three texts": png(8, 8, pixels, extra=text * 3),
        "png with many texts": png(8, 8, pixels, extra=small_text * 3000),
        "png with international texts": png(8, 8, pixels, extra=long_title * 60),
        "png with small chunks": png(8, 8, pixels, extra=chunk(b"tEXt", b"a\0b") * 60_000),
        "png of empty IDATs": png(8, 8, pixels, extra=chunk(b"IDAT", b"") * 80_000),
        "png of nothing but a long end": png(8, 8, pixels)[:33] + b"\xc9\x6e\0\0IEND\xae\x42\x60\x82",
        "png animated": png(8, 8, pixels, extra=chunk(b"acTL", struct.pack(">II", 2**31 - 1, 0))),
        "png of exif that shares data": png(8, 8, pixels, extra=chunk(b"eXIf", many_entries(5_000, 900_000))),
        "jpeg of markers": inserted(jpeg, b"\xff\xfe\0\2" * 200_000),
        "jpeg of tables": inserted(jpeg, jpeg[slice(*find(jpeg, 0xDB))] * 7_000),
        "jpeg of exif that shares data": inserted(jpeg, segment(0xE1, b"Exif\0\0" + many_entries(2_000, 40_000))),
        "jpeg arithmetic of exif that shares data": inserted(with_frame(jpeg, marker=0xC9), exif),
        "jpeg of small scans": with_size(many_scans(progressive, 240), 3_000, 3_000),
        "jpeg of 4 x 4 sampling": with_size(jpeg[: at + 11] + b"\x44" + jpeg[at + 12 :], 6_650, 6_650),
        "gif of extensions": gif[:13] + b"\x21\xfe\x01a\0" * 150_000 + gif[13:],
        "gif of many frames": gif[:-1] + gif[gif.index(b"\x2c") : -1] * (900_000 // len(gif)) + b";",
        "tiff that shares data": many_entries(5_000, 900_000),
        "tiff of directories": b"II*\0" + b"".join(struct.pack("<IHI", 8 + 6 * k, 0, 0)[:6] for k in range(100_000)),
    } | {f"{side} {name}": data for side in (13_300, 6_650, 2_350) for name, data in sized_bombs(side).items()}
