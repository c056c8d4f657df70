"""The peers of bench/augment.py that run in a process of their own, with the same pixels and random values.

python bench/augment_peers.py PEER VARIANT FOLDER DEVICE THREADS     # started by bench/augment.py

FOLDER/in.npz has the images and the random values of every view (see `given` in bench/augment.py). The process reads
lines from standard input and answers each with a line of JSON. `run` returns the seconds of a batch, and `save` writes
FOLDER/out.npz.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
STEPS = ("brightness", "contrast", "saturation", "hue")  # as Kornia numbers them

Does = dict[str, Callable[..., Any]]  # what an operation does to one image
Run = Callable[[], list[Any]]  # one batch: [B, 3, H, W] per view


@dataclass(frozen=True)
class Given:
    """One view: its operations in order, and the random values of every sample.

    Attributes:
        sequence: names of the operations.
        gate: bool [B] per name, whether the operation changes a sample.
        order: int [B, 4], the order of the jitter's steps in each sample.
        value: float [B] per step of the jitter, and for ``blur`` (sigma) and ``solarize`` (threshold).
        taps: size of the blur's kernel.
        policy: the operations of RandAugment per sample, as (operation, magnitude); None: there is no policy.
    """

    sequence: tuple[str, ...]
    gate: dict[str, Any]
    order: Any
    value: dict[str, Any]
    taps: int
    policy: list[list[tuple[str, float]]] | None = None

    @property
    def one_order(self) -> bool:
        return bool((self.order == np.arange(4)).all())


def read(folder: Path) -> tuple[Any, list[Given]]:
    data = dict(np.load(folder / "in.npz"))
    views = []
    for v in range(int(data["views"])):
        own = {k.removeprefix(f"{v}."): x for k, x in data.items() if k.startswith(f"{v}.")}
        names = tuple(str(n) for n in own["sequence"])
        values = {k.removeprefix("value."): x for k, x in own.items() if k.startswith("value.")}
        gates = {n: own[f"gate.{n}"] for n in names}
        policy = None
        if "policy.name" in own:
            pairs = zip(own["policy.name"].tolist(), own["policy.magnitude"].tolist(), strict=True)
            policy = [list(zip(*pair, strict=True)) for pair in pairs]
        views.append(Given(names, gates, own["order"], values, int(own["taps"]), policy))
    return data["images"], views


def through(x: Any, view: Given, k: int, does: Does) -> Any:
    """Apply the operations to one image."""
    for name in view.sequence:
        if not view.gate[name][k]:
            continue
        if name == "jitter":
            for step in view.order[k]:
                x = does[STEPS[step]](x, float(view.value[STEPS[step]][k]))
        elif name == "randaugment":
            for op, magnitude in (view.policy or [])[k]:
                x = does[name](x, op, magnitude)
        elif name in ("blur", "solarize"):
            x = does[name](x, float(view.value[name][k]), view.taps)
        else:
            x = does[name](x)
    return x


# --- image by image, as in a dataset: on threads or in processes, whichever is faster here


def torchvision(images: Any, views: list[Given], variant: str, device: str, workers: int) -> tuple[Run, str]:
    """torchvision v2's functions."""
    from contestants import torchvision_there

    torchvision_there()
    from torchvision.transforms import InterpolationMode, v2
    from torchvision.transforms.v2 import functional as V

    floating = variant == "float32"
    if floating and any(view.policy for view in views):
        raise RuntimeError("its RandAugment takes uint8")
    rand = v2.RandAugment(interpolation=InterpolationMode.BILINEAR)

    def policy(x: Any, name: str, magnitude: float) -> Any:
        """One operation of its RandAugment. The library has no public function for it that takes the random values."""
        theirs = "".join(word.capitalize() for word in name.split("_"))
        magnitude -= theirs in ("Brightness", "Color", "Contrast", "Sharpness")
        magnitude /= 255 if theirs == "Solarize" else 1
        return rand._apply_image_or_video_transform(x, theirs, magnitude, rand.interpolation, rand._fill)

    source = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous().to(device)
    full = 1.0 if floating else 255.0
    does: Does = {
        "vflip": V.vertical_flip,
        "flip": V.horizontal_flip,
        "brightness": V.adjust_brightness,
        "contrast": V.adjust_contrast,
        "saturation": V.adjust_saturation,
        "hue": V.adjust_hue,
        "gray": lambda x: V.rgb_to_grayscale(x, 3),
        "randaugment": policy,
        "blur": lambda x, sigma, taps: V.gaussian_blur(x, [taps, taps], [sigma, sigma]),
        "solarize": lambda x, threshold, _: V.solarize(x, threshold * full),
    }

    def one(view: Given, k: int) -> torch.Tensor:
        x = V.to_dtype(source[k], torch.float32, scale=True) if floating else source[k]
        x = through(x, view, k, does)
        return V.normalize(V.to_dtype(x, torch.float32, scale=True), list(MEAN), list(STD))

    if device != "cpu":
        return lambda: [torch.stack([one(view, k) for k in range(len(source))]) for view in views], "image by image"
    torch.set_num_threads(1)
    return _fastest(one, views, images.shape, workers)


def albumentations(images: Any, views: list[Given], variant: str, device: str, workers: int) -> tuple[Run, str]:
    """The functions behind albumentations' transforms, without the time of its Compose."""
    import albucore
    import albumentations.augmentations.pixel.functional as fp
    import cv2
    from albumentations.augmentations.blur.functional import create_gaussian_kernel_1d

    if any(view.policy for view in views):
        raise RuntimeError("its operations and ranges are others")
    cv2.setNumThreads(0)  # one thread per image, as in a loader's worker
    floating = variant == "float32"
    full = 1.0 if floating else 255.0
    mean = np.array(MEAN, dtype=np.float32) * full
    scale = 1 / (np.array(STD, dtype=np.float32) * full)
    does: Does = {
        "vflip": lambda x: cv2.flip(x, 0),
        "flip": lambda x: cv2.flip(x, 1),
        "brightness": fp.adjust_brightness_torchvision,
        "contrast": fp.adjust_contrast_torchvision,
        "saturation": fp.adjust_saturation_torchvision,
        "hue": fp.adjust_hue_torchvision,
        "gray": lambda x: fp.to_gray(x, 3, "weighted_average"),
        "blur": lambda x, sigma, taps: fp.separable_convolve(x, kernel=create_gaussian_kernel_1d(sigma, taps)),
        "solarize": lambda x, threshold, _: fp.solarize(x, threshold),
    }

    def one(view: Given, k: int) -> Any:
        x = images[k].astype(np.float32) / np.float32(255) if floating else images[k]
        return torch.from_numpy(albucore.normalize(through(x, view, k, does), mean, scale).transpose(2, 0, 1))

    torch.set_num_threads(1)
    return _fastest(one, views, images.shape, workers)


def _fastest(one: Callable[[Given, int], Any], views: list[Given], shape: Any, workers: int) -> tuple[Run, str]:
    """Augments the batch on ``threads`` threads or as many processes: the faster of both in three batches."""
    batch, height, width, _ = shape
    count = len(views) * batch * 3 * height * width
    out = torch.frombuffer(mmap.mmap(-1, 4 * count), dtype=torch.float32).view(len(views), batch, 3, height, width)

    def part(start: int) -> None:
        for v, view in enumerate(views):
            for k in range(start, batch, workers):
                out[v, k] = one(view, k)

    forked = [_Forked(part, start) for start in range(workers)]  # before there are threads
    pool = ThreadPoolExecutor(workers)

    def in_processes() -> None:
        for process in forked:
            process.begin()
        for process in forked:
            process.end()

    ways = {f"{workers} threads": lambda: list(pool.map(part, range(workers))), f"{workers} processes": in_processes}
    took = {}
    for name, way in ways.items():
        took[name] = math.inf
        for _ in range(3):
            start = time.perf_counter()
            way()
            took[name] = min(took[name], time.perf_counter() - start)
    best = min(took, key=lambda name: took[name])

    def run() -> list[Any]:
        ways[best]()
        return list(out)

    return run, best


class _Forked:
    """A process that augments its part of a batch on request."""

    def __init__(self, part: Callable[[int], None], start: int) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=self._serve, args=(there, part, start), daemon=True)
        self.process.start()

    @staticmethod
    def _serve(pipe: Any, part: Callable[[int], None], start: int) -> None:
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            while pipe.recv():
                try:
                    part(start)
                    pipe.send(None)
                except Exception as error:
                    pipe.send(f"{type(error).__name__}: {error}")

    def begin(self) -> None:
        self.pipe.send(True)

    def end(self) -> None:
        failed = self.pipe.recv()
        if failed:
            raise RuntimeError(failed)


# --- whole batches on CUDA


def triton_augment(images: Any, views: list[Given], variant: str, device: str, workers: int) -> tuple[Run, str]:
    """`fused_augment` of triton-augment 0.3: one kernel, without hue and vertical flips, contrast around 0.5."""
    from triton_augment.functional import fused_augment

    (view,) = views
    if set(view.sequence) - {"vflip", "flip", "jitter", "gray"} or not view.one_order:
        raise RuntimeError("it has no such operations")
    source = torch.from_numpy(images).to(device)
    height, width = source.shape[1:3]
    f = {k: torch.from_numpy(np.asarray(view.value[k])).to(device) for k in ("brightness", "contrast", "saturation")}
    gates = {n: torch.from_numpy(_gate(view, n)).to(device) for n in ("vflip", "flip", "gray")}

    def run() -> list[torch.Tensor]:
        x = source.permute(0, 3, 1, 2).contiguous().float().div_(255)
        if "vflip" in view.sequence:
            x = torch.where(gates["vflip"][:, None, None, None], x.flip(2), x)
        return [
            fused_augment(
                x, top=0, left=0, height=height, width=width, flip_horizontal=gates["flip"],
                brightness_factor=f["brightness"], contrast_factor=f["contrast"], saturation_factor=f["saturation"],
                grayscale=gates["gray"], mean=MEAN, std=STD,
            )
        ]  # fmt: skip

    return run, "without hue"


def cvcuda(images: Any, views: list[Given], variant: str, device: str, workers: int) -> tuple[Run, str]:
    """CV-CUDA's operators on a batch of images: contrast around the mean gray, saturation and hue as one matrix."""
    import cvcuda as cv

    (view,) = views
    if set(view.sequence) - {"vflip", "flip", "jitter", "gray"} or not view.one_order:
        raise RuntimeError("its operators take no such draws")
    source = torch.from_numpy(images).to(device)
    batch, height, width, _ = source.shape
    vertical, mirrored, gray = (_gate(view, n) for n in ("vflip", "flip", "gray"))
    codes = np.select([vertical & mirrored, vertical, mirrored], [-1, 0, 1], 2).astype(np.int32)[:, None]

    def upload(values: Any, layout: str) -> Any:
        return cv.as_tensor(torch.from_numpy(np.ascontiguousarray(values)).to(device), layout)

    flip_code = upload(codes, "NC")
    rect = upload(np.broadcast_to(np.array([0, 0, width, height], np.int32), (batch, 1, 1, 4)), "NHWC")
    base, scale = (upload(np.array(v, np.float32).reshape(1, 1, 1, 3), "NHWC") for v in (MEAN, STD))
    brightness, contrast = (upload(np.asarray(view.value[n], np.float32), "N") for n in ("brightness", "contrast"))
    twist = upload(color_matrices(np.where(gray, 0, view.value["saturation"]), view.value["hue"]), "NHW")
    luma = torch.tensor([0.299, 0.587, 0.114], device=device)

    def run() -> list[torch.Tensor]:
        x = source.float().div_(255)
        many = cv.ImageBatchVarShape(batch)
        many.pushback([cv.as_image(x[k], cv.Format.RGBf32) for k in range(batch)])
        center = cv.as_tensor((x @ luma).mean((1, 2)), "N")
        many = cv.brightness_contrast(many, brightness, contrast, None, center)
        many = cv.color_twist(many, twist)
        out = cv.crop_flip_normalize_reformat(
            many, (batch, 3, height, width), np.float32, "NCHW", rect, flip_code, base, scale,
            1.0, 0.0, 0.0, cv.NormalizeFlags.SCALE_IS_STDDEV, cv.Border.REPLICATE, 0.0,
        )  # fmt: skip
        return [torch.as_tensor(out.cuda(), device=device)]

    return run, "hue in YIQ, no clamp between"


def color_matrices(saturation: Any, turns: Any) -> Any:
    """float32 [B, 3, 4]: saturation around the luma, and a rotation of the hue in YIQ, as in DALI."""
    to_yiq = np.array([[0.299, 0.587, 0.114], [0.595716, -0.274453, -0.321263], [0.211456, -0.522591, 0.311135]])
    angle, zero = 2 * np.pi * np.asarray(turns, np.float64), np.zeros(len(turns))
    s, one = np.asarray(saturation, np.float64), np.ones(len(turns))
    rows = [
        [one, zero, zero],
        [zero, s * np.cos(angle), s * np.sin(angle)],
        [zero, -s * np.sin(angle), s * np.cos(angle)],
    ]
    middle = np.moveaxis(np.array(rows), 2, 0)
    return np.pad(np.linalg.inv(to_yiq) @ middle @ to_yiq, ((0, 0), (0, 0), (0, 1))).astype(np.float32)


def _gate(view: Given, name: str) -> Any:
    return view.gate[name] if name in view.gate else np.zeros(len(view.order), dtype=bool)


SERVED = {f.__name__: f for f in (torchvision, albumentations, triton_augment, cvcuda)}


def main() -> None:
    peer, variant, where, device, threads = sys.argv[1:]
    folder = Path(where)
    try:
        images, views = read(folder)
        with torch.no_grad():
            run, how = SERVED[peer](images, views, variant, device, int(threads))
    except (ImportError, RuntimeError, OSError) as error:
        print(json.dumps({"ok": False, "reason": f"{type(error).__name__}: {error}"}), flush=True)
        return
    print(json.dumps({"ok": True, "how": how}), flush=True)
    torch.set_grad_enabled(False)
    for line in sys.stdin:
        start = time.perf_counter()
        out = run()
        if device != "cpu":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        if line.strip() == "save":
            np.savez(folder / "out.npz", *(x.float().cpu().numpy() for x in out))
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
