"""Hostile image files, generated. `good` ones must decode, `bad` ones must be refused, others may do either."""

import io
import random
import struct
import zlib
from collections.abc import Iterator

import numpy as np
from PIL import Image

GOOD, BAD, EITHER = "good", "bad", "either"


def photograph(height: int = 96, width: int = 128, seed: int = 0) -> Image.Image:
    """A window of a real photograph."""
    from skimage import data

    y, x = 40 + 7 * seed % 100, 60 + 11 * seed % 120
    return Image.fromarray(data.astronaut()[y : y + height, x : x + width])


def encode(image: Image.Image, kind: str, **options) -> bytes:
    """The image as a file of this kind."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


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


def png(width: int, height: int, data: bytes, *, depth: int = 8, color: int = 2, extra: bytes = b"") -> bytes:
    """A PNG with this header and compressed data."""

    def chunk(kind: bytes, payload: bytes) -> bytes:
        return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))

    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + extra + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def bomb(width: int, height: int) -> bytes:
    """A one-bit PNG of this size, all black: kilobytes that become gigabytes as RGB."""
    deflate = zlib.compressobj(9)
    row = b"\0" * (1 + (width + 7) // 8)
    data = b"".join(deflate.compress(row * 64) for _ in range(-(-height // 64)))
    return png(width, height, data + deflate.flush(), depth=1, color=0)


def webp_canvas(width: int, height: int) -> bytes:
    """An extended WebP that claims this canvas and holds a small frame."""
    inner = encode(photograph(32, 32), "WEBP")[12:]
    header = b"\0\0\0\0" + struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    body = b"WEBP" + b"VP8X" + struct.pack("<I", 10) + header + inner
    return b"RIFF" + struct.pack("<I", len(body)) + body


def corpus(share: float = 1.0, seed: int = 0) -> Iterator[tuple[str, bytes, str]]:
    """(file name, bytes, expectation) of more than 400 files; ``share`` of the repeated kinds."""
    rng = random.Random(seed)
    photo = photograph()
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
    jpeg, progressive = bases["jpg444"], bases["jpgprog"]

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
        for k in some(list(range(14))):
            out = bytearray(data)
            for _ in range(1 + k % 4):
                at = rng.randrange(len(out)) if k % 2 else rng.randrange(min(len(out), 700))
                out[at] ^= 1 << rng.randrange(8)
            yield f"flipped_{name}_{k}.{suffix[name]}", bytes(out), EITHER
        for k in some(list(range(4))):
            at, size = rng.randrange(len(data)), rng.randrange(1, 400)
            yield f"cut_out_{name}_{k}.{suffix[name]}", data[:at] + data[at + size :], EITHER
            yield (
                f"zeroed_{name}_{k}.{suffix[name]}",
                data[:at] + bytes(min(size, len(data) - at)) + data[at + size :],
                EITHER,
            )
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
    cmyk = Image.fromarray(np.asarray(photo.convert("CMYK")), "CMYK") if photo.mode != "CMYK" else photo
    cmyk_jpeg = encode(cmyk, "JPEG", quality=90)
    yield "cmyk.jpg", cmyk_jpeg, GOOD
    yield "ycck.jpg", cmyk_jpeg.replace(b"Adobe\0d\0\0\0\0\0", b"Adobe\0d\0\0\0\0\2"), EITHER
    yield "adobe_rgb.jpg", inserted(jpeg, segment(0xEE, b"Adobe\0d\0\0\0\0\0")), EITHER
    for times in some([100, 1000, 4000]):
        yield f"scans_{times}.jpg", many_scans(progressive, times), EITHER
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
    text = zlib.compress(b"a" * 50_000_000, 9)
    chunk = b"zTXt" + b"Comment\0\0" + text
    yield (
        "png_text_bomb.png",
        png(128, 96, good_data, extra=struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))),
        EITHER,
    )
    for size in some([16383, 16384, 2**24]):
        yield f"webp_canvas_{size}.webp", webp_canvas(size, size), BAD
    frames = [photograph(64, 80, seed=k) for k in range(4)]
    yield "animated.gif", encode(frames[0], "GIF", save_all=True, append_images=frames[1:]), GOOD
    yield "animated.webp", encode(frames[0], "WEBP", save_all=True, append_images=frames[1:]), EITHER
    yield "animated.png", encode(frames[0], "PNG", save_all=True, append_images=frames[1:]), EITHER
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
