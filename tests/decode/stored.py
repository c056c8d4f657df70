"""Files of stored values for the tests: every variant that `decode.pixels=raw` reads, and damaged ones."""

import io
import random

import imagecodecs
import numpy as np
import tifffile
import torch

from gpuaug.batch import EncodedBatch
from gpuaug.decode.decoder import Decode

PLANES = {"planarconfig": "separate"}
TIFF = {
    "strips": {"rowsperstrip": 7},
    "one strip": {},
    "tiles": {"tile": (16, 32)},
    "deflate": {"compression": "deflate", "predictor": True, "rowsperstrip": 9},
    "lzw": {"compression": "lzw", "predictor": True},
    "lzw tiles": {"compression": "lzw", "tile": (32, 16)},
    "zstd": {"compression": "zstd"},
    "zstd tiles, big-endian": {"compression": "zstd", "byteorder": ">", "tile": (32, 32), "predictor": True},
    "packbits": {"compression": "packbits"},
    "bigtiff": {"bigtiff": True, "compression": "deflate"},
    "big-endian": {"byteorder": ">"},
    "planes": PLANES,
    "planes, lzw": {"compression": "lzw", **PLANES},
    "planes, zstd tiles": {"compression": "zstd", "tile": (16, 16), **PLANES},
    "lerc": {"compression": "lerc"},
    "jpeg2000": {"compression": "jpeg2000"},
    "planes, jpeg2000 tiles": {"compression": "jpeg2000", "tile": (32, 32), **PLANES},
}
EXTRA = [name for name in TIFF if name.startswith(("planes", "lerc", "jpeg2000"))]  # DALI does not decode them
NPY = ("npy", "npy, big-endian")
VARIANTS = ["png", *NPY, *TIFF]


def picture(dtype: str, channels: int, height: int = 40, width: int = 56) -> np.ndarray:
    """Half noise, half constant: [height, width, channels]."""
    x = np.random.default_rng(0).random((height, width, channels))
    x[:, : width // 2] = x[0, 0]
    return (x - 0.5).astype(dtype) if dtype == "float32" else (x * np.iinfo(dtype).max).astype(dtype)


def encoded(variant: str, x: np.ndarray) -> bytes:
    flat = x[..., 0] if x.shape[2] == 1 else x
    if variant == "png":
        return imagecodecs.png_encode(np.ascontiguousarray(flat))
    out = io.BytesIO()
    if variant in NPY:
        np.save(out, x.astype(x.dtype.newbyteorder(">")) if "big" in variant else x)
        return out.getvalue()
    settings = {"photometric": "rgb" if x.shape[2] in (3, 4) else "minisblack", **TIFF[variant]}
    if settings.get("planarconfig") and flat.ndim == 3:
        flat = np.moveaxis(x, -1, 0)
    else:
        settings["planarconfig"] = "contig" if flat.ndim == 3 else None
    tifffile.imwrite(out, flat, **settings)
    return out.getvalue()


def exists(variant: str, dtype: str, channels: int) -> bool:
    """Whether there are such files."""
    if variant == "png":
        return channels <= 4 and dtype != "float32"
    return not ("jpeg2000" in variant and dtype == "float32") and not (variant.startswith("planes") and channels == 1)


def batch(*files: bytes) -> EncodedBatch:
    rows = torch.arange(len(files))
    images = tuple(np.frombuffer(file, dtype=np.uint8) for file in files)
    return EncodedBatch(images=images, labels=None, indices=rows, repeats=rows * 0, valid=rows >= 0)


def opened(channels: int, **settings):
    return Decode(pixels="raw", channels=channels, num_threads=2, **settings).open("cpu")


def decoded(decoder, file: bytes) -> tuple[np.ndarray | None, str]:
    """The whole image, or the reason why there is none."""
    headers = decoder.read_headers(batch(file))
    if headers.faults:
        return None, headers.faults[0].reason
    image = decoder.whole(headers).numpy()
    return (image, "") if image.size else (None, "refused while it was decoded")


def damaged(file: bytes, rng: random.Random) -> bytes:
    """The file with one kind of damage: flipped bits, an end, odd bytes or sizes in its header, or moved bytes."""
    out, head = bytearray(file), min(len(file), 700)
    kind = rng.randrange(5)
    if kind == 0:
        for _ in range(rng.choice((1, 1, 2, 8))):
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del out[rng.randrange(len(out)) :]
    elif kind == 2:
        for _ in range(rng.choice((1, 2, 4))):
            out[rng.randrange(head)] = rng.choice((0, 1, 2, 127, 255, rng.randrange(256)))
    elif kind == 3:
        at, sizes = rng.randrange(head - 4), (60_000, 2**32 - 1, 2**31 - 1, 0)
        out[at : at + 4] = rng.choice(sizes).to_bytes(4, rng.choice(("big", "little")))
    else:
        at, other, size = rng.randrange(len(out) - 64), rng.randrange(len(out) - 64), rng.randrange(1, 64)
        out[at : at + size] = out[other : other + size]
    return bytes(out)
