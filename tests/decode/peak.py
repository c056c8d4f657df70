"""Decodes images with the least ``max_bytes`` that accepts them. Prints {kind: [limit, peak memory, faults]}."""

import ctypes
import json
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import hostile
import numpy as np
from fuzz_child import memory
from pictures import encode
from PIL import Image
from test_decode import pack

from gpuaug.augment.crop import Resize
from gpuaug.decode.decoder import Decode
from gpuaug.files import CODECS

SIDE, THREADS = 2400, 4


@cache
def picture(mode: str = "RGB", side: int = SIDE) -> Image.Image:
    y, x = np.mgrid[:side, :side]
    pixels = np.stack([x // 20, y // 16, (x + y) // 30, x // 9], axis=-1).astype(np.uint8)
    image = Image.fromarray(pixels)
    if mode == "I;16":
        return Image.fromarray(pixels[:, :, 0].astype(np.uint16) * 257)
    return image.convert("RGB").quantize(64) if mode == "P" else image if mode == "RGBA" else image.convert(mode)


def deep_png(color: int, channels: int, *, interlaced: bool = False) -> bytes:
    """A 16-bit PNG. Its rows are equal; an interlaced one has the rows of seven smaller images."""
    steps = [(8, 8, 0, 0), (8, 8, 0, 4), (8, 4, 4, 0), (4, 4, 0, 2), (4, 2, 2, 0), (2, 2, 0, 1), (2, 1, 1, 0)]
    sizes = [(-(-(SIDE - y) // h), -(-(SIDE - x) // w)) for h, w, y, x in steps] if interlaced else [(SIDE, SIDE)]
    rows = b"".join((b"\0" + np.random.default_rng(0).bytes(2 * channels * w)) * h for h, w in sizes)
    return hostile.png(SIDE, SIDE, zlib.compress(rows, 1), depth=16, color=color, interlace=int(interlaced))


def one_strip(mode: str, **options: str) -> bytes:
    return encode(picture(mode), "TIFF", tiffinfo={278: SIDE}, strip_size=1 << 30, **options)


EXIF = hostile.exif(6)
LARGE = {"quality": 90}
KINDS: dict[str, Callable[[], bytes]] = {
    "png of 16-bit RGBA": lambda: deep_png(6, 4),
    "png of 16-bit RGB, interlaced": lambda: deep_png(2, 3, interlaced=True),
    "png of 16-bit gray": lambda: encode(picture("I;16"), "PNG"),
    "png with palette and alpha": lambda: encode(picture("P"), "PNG", transparency=bytes(range(64))),
    "png, turned": lambda: encode(picture(), "PNG", exif=EXIF, compress_level=1),
    "png of gray": lambda: encode(picture("L"), "PNG", compress_level=1),
    "jpeg": lambda: encode(picture(), **LARGE),
    "jpeg, progressive and turned": lambda: encode(picture(), **LARGE, progressive=True, subsampling=0, exif=EXIF),
    "jpeg of CMYK, progressive": lambda: encode(picture("CMYK"), **LARGE, progressive=True, subsampling=0),
    "webp": lambda: encode(picture(), "WEBP", method=0),
    "webp with alpha": lambda: encode(picture("RGBA"), "WEBP", method=0, **LARGE),
    "webp, lossless": lambda: encode(picture(), "WEBP", lossless=True, method=0, quality=0),
    "webp, animated": lambda: encode(
        picture(), "WEBP", method=0, save_all=True, append_images=[picture().rotate(4)] * 3
    ),
    "gif, animated": lambda: encode(picture("P"), "GIF", save_all=True, append_images=[picture("P").rotate(4)]),
    "bmp": lambda: encode(picture(), "BMP"),
    "bmp of run lengths": lambda: hostile.bmp(
        8, compression=1, height=SIDE, width=SIDE, body=(b"\2\7" * (SIDE // 2) + b"\0\0") * SIDE
    ),
    "ppm": lambda: encode(picture(), "PPM"),
    "tiff of CMYK in one strip": lambda: one_strip("CMYK", compression="tiff_lzw"),
    "tiff of YCbCr": lambda: one_strip("YCbCr", compression="jpeg"),
    "tiff, not compressed": lambda: one_strip("RGB"),
    "jpeg2000": lambda: encode(picture("RGBA"), "JPEG2000"),
    "avif": lambda: encode(picture("RGBA"), "AVIF", speed=10, subsampling="4:4:4", **LARGE),
}


def peak(images: list[bytes], backend: str, max_bytes: int) -> tuple[int, list[str]]:
    """By how many bytes a batch raised the peak, and the reasons of faults."""
    decoder = Decode(backend=backend, num_threads=THREADS, max_bytes=max_bytes, codecs=CODECS).open("cpu")
    small = encode(picture().resize((64, 64)))
    batch, warm = pack(images), pack([small] * 3)
    for each in (warm, batch):
        headers = decoder.read_headers(each)
        windows = Resize((64, 64)).windows(None, headers.height, headers.width)
        ctypes.CDLL(None).malloc_trim(0)  # else pixels could lie in memory that was freed before
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # begins the peak of memory anew
        faults = [*headers.faults, *decoder.pixels(headers, [windows])[1]]
        more = memory("VmHWM") - before
    decoder.close()
    return more, [fault.reason for fault in faults]


def main(backend: str) -> None:
    with suppress(ImportError):
        from pillow_heif import register_heif_opener

        register_heif_opener()  # the encoder
        KINDS["heif"] = lambda: encode(picture("RGBA"), "HEIF", **LARGE, enc_params={"preset": "ultrafast"})
    needs = Decode(backend=backend, codecs=CODECS).open("cpu")
    found = {}
    for name, make in KINDS.items():
        if backend == "dali" and not name.startswith("jpeg"):
            continue
        data = make()
        limit = int(needs.read_headers(pack([data])).memory[0]) + 3 * 64 * 64
        if backend == "dali":
            limit = max(limit, 24 * SIDE * SIDE)
        found[name] = limit, *peak([data] * 3, backend, limit)
    if backend == "dali":  # it keeps memory while Pillow decodes the others
        limit, jpeg = 24 * SIDE * SIDE, KINDS["jpeg"]()
        png, large = (encode(picture("RGBA", side), "PNG", compress_level=1) for side in (SIDE, 4380))
        found["jpeg among png"] = limit, *peak([jpeg, png] * 4, backend, limit)
        found["jpeg before a large png"] = limit, *peak([large, *[jpeg] * 4], backend, limit)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
