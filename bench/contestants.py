"""The contestants of bench/loader.py, each in a process of its own: ours, its stages alone, and the peers.

python bench/contestants.py SPEC        # started by bench/loader.py; one epoch for each line on standard input
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE = 224
DALI_DEFAULT = 0.65  # of `hw_decoder_load`


class CannotRunError(Exception):
    """A contestant cannot run this row. The message says why."""


@dataclass(frozen=True)
class Spec:
    """One contestant on one set with one recipe."""

    who: str
    recipe: str
    root: str  # ImageFolder
    batch: int
    workers: int
    threads: int
    device: str
    dtype: str
    places: dict[str, str] = field(default_factory=dict)  # of what was prepared: packed, ffcv, ffcv_raw, s3

    @property
    def files(self) -> list[str]:
        return sorted(str(p) for p in Path(self.root).rglob("*.jpg"))

    @property
    def engine(self) -> float:
        """Share of the JPEGs for the GPU's JPEG engine."""
        return DALI_DEFAULT if self.who.endswith("_engine") else 0.0


Run = Callable[[], int]  # one epoch: images consumed


# --- ours


def _loader(spec: Spec, *overrides: str) -> Any:
    import gpuaug

    return gpuaug.build(
        gpuaug.compose(
            "train",
            [f"source.root={spec.root}", f"augment={spec.recipe}", f"batch_size={spec.batch}",
             f"num_workers={spec.workers}", f"decode.num_threads={spec.threads}", f"device={spec.device}",
             f"decode.hardware_load={spec.engine}", f"dtype={spec.dtype}", "faults.policy=blank", "faults.max=1",
             *overrides],
        )
    )  # fmt: skip


def _epoch(loader: Any) -> Run:
    def run() -> int:
        seen = sum(int(batch.valid.sum()) for batch in loader)
        _synchronize(loader.device)
        return seen

    return run


def ours(spec: Spec) -> Run:
    loader = _loader(spec)
    if spec.engine and not loader.pipeline.decoder.settings.hardware_load:
        raise CannotRunError("`gpuaug doctor` found the JPEG engine broken here")
    return _epoch(loader)


def ours_reduced(spec: Spec) -> Run:
    return _epoch(_loader(spec, "decode.backend=pillow", "decode.reduced=true"))


def ours_packed(spec: Spec) -> Run:
    # the default: pixels mapped into memory need no worker, and FFCV has none either
    return _epoch(_loader(_at(spec, spec.places["packed"]), "source=packed", "num_workers=null"))


def ours_s3(spec: Spec) -> Run:
    endpoint, root = spec.places["s3"].split(" ")
    os.environ.update(AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="x", AWS_DEFAULT_REGION="us-east-1")
    return _epoch(_loader(_at(spec, root), f"source.remote.options={{endpoint_url:'{endpoint}'}}"))


def _at(spec: Spec, root: str) -> Spec:
    return Spec(**{**asdict(spec), "root": root})


def read(spec: Spec) -> Run:
    """Reading alone: workers send encoded bytes."""
    loader = _loader(spec)

    def run() -> int:
        return sum(len(batch) for batch in loader.pipeline.read(loader.epoch_order, 0))

    return run


def _encoded(loader: Any) -> list[Any]:
    """An epoch's batches in memory."""
    pipeline = loader.pipeline
    batches = list(pipeline.read(loader.epoch_order, 0))
    pipeline.reader.close()
    return batches


def decode(spec: Spec) -> Run:
    """Headers, random values, decoding, cropping and resizing of bytes in memory."""
    loader = _loader(spec)
    batches, pipeline = _encoded(loader), loader.pipeline

    def run() -> int:
        for batch in batches:
            pipeline.decode(pipeline.read_headers(batch, 0))
        _synchronize(loader.device)
        return sum(map(len, batches))

    return run


def augment(spec: Spec) -> Run:
    """The recipe on pixels that are already on the device: eight batches, again and again."""
    loader = _loader(spec)
    batches, pipeline = _encoded(loader), loader.pipeline
    decoded = [pipeline.decode(pipeline.read_headers(batch, 0)) for batch in batches[:8]]

    def run() -> int:
        for k in range(len(batches)):
            pipeline.finish(decoded[k % len(decoded)], 0)
        _synchronize(loader.device)
        return sum(len(decoded[k % len(decoded)].encoded) for k in range(len(batches)))

    return run


def checks(spec: Spec) -> Run:
    """The checks for faults on images without faults: every header, and the policy."""
    loader = _loader(spec)
    batches, pipeline = _encoded(loader), loader.pipeline

    def run() -> int:
        for batch in batches:
            look = pipeline.decoder.read_headers(batch)
            pipeline.faults.handle(list(look.faults), indices=[], epoch=0, key_of=str)
        return sum(map(len, batches))

    return run


def shapes(spec: Spec) -> Run:
    """Headers without any check: only height and width, which random crops need."""
    from nvidia import nvimgcodec

    batches = _encoded(_loader(spec))

    def run() -> int:
        for batch in batches:
            for image in batch.images:
                stream = nvimgcodec.CodeStream(image.tobytes())
                _ = stream.height, stream.width
        return sum(map(len, batches))

    return run


def _synchronize(device: Any) -> None:
    if str(device) != "cpu":
        import torch

        torch.cuda.synchronize()


# --- peers


def torchvision_there() -> None:
    """Import torchvision. PyPI's wheel has compiled operators for CUDA only, and transforms need none of them."""
    import torch

    try:
        import_module("torchvision")
    except RuntimeError:
        for name in [n for n in sys.modules if n.startswith("torchvision")]:
            del sys.modules[name]
        ops = torch.library.Library("torchvision", "DEF")
        ops.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        ops.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(ops)
        import_module("torchvision")


_KEPT: list[Any] = []


def torchvision(spec: Spec) -> Run:
    torchvision_there()
    from torchvision import transforms as T
    from torchvision.transforms import InterpolationMode

    way = InterpolationMode.BICUBIC if spec.recipe == "simclr" else InterpolationMode.BILINEAR
    ops: list[Any] = [T.RandomResizedCrop(SIZE, interpolation=way)]
    if spec.recipe == "standard":
        ops.append(T.RandomVerticalFlip())
    ops.append(T.RandomHorizontalFlip())
    if spec.recipe == "standard":
        ops += [T.ColorJitter(0.3, 0.3, 0.3, 0.1), T.RandomGrayscale(0.1)]
    if spec.recipe == "simclr":
        blur = T.RandomApply([T.GaussianBlur(23, (0.1, 2.0))], p=0.5)
        ops += [T.RandomApply([T.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8), T.RandomGrayscale(0.2), blur]
    ops += [T.ToTensor(), T.Normalize(MEAN, STD)]
    return _data_loader(spec, T.Compose(ops))


def torchvision_v2(spec: Spec) -> Run:
    torchvision_there()
    import torch
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import v2 as T

    way = InterpolationMode.BICUBIC if spec.recipe == "simclr" else InterpolationMode.BILINEAR
    ops: list[Any] = [T.PILToTensor(), T.RandomResizedCrop(SIZE, interpolation=way, antialias=True)]
    if spec.recipe == "standard":
        ops.append(T.RandomVerticalFlip())
    ops.append(T.RandomHorizontalFlip())
    if spec.recipe == "standard":
        ops += [T.ColorJitter(0.3, 0.3, 0.3, 0.1), T.RandomGrayscale(0.1)]
    if spec.recipe == "simclr":
        blur = T.RandomApply([T.GaussianBlur(23, (0.1, 2.0))], p=0.5)
        ops += [T.RandomApply([T.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8), T.RandomGrayscale(0.2), blur]
    ops += [T.ToDtype(torch.float32, scale=True), T.Normalize(MEAN, STD)]
    return _data_loader(spec, T.Compose(ops))


class Pictures:
    """A dataset for a DataLoader: opens files with PIL and applies a transform for each view."""

    def __init__(self, files: list[str], transform: Any, views: int) -> None:
        self.files, self.transform, self.views = files, transform, views

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        with Image.open(self.files[index]) as file:
            image = file.convert("RGB")
        return [self.transform(image) for _ in range(self.views)], 0


class Encoded:
    """Files as uint8 tensors, for a DataLoader of bytes."""

    def __init__(self, files: list[str], then: Any = None) -> None:
        self.files, self.then = files, then

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        import numpy as np

        data = np.fromfile(self.files[index], dtype=np.uint8)
        return data if self.then is None else self.then(data)


def _views(spec: Spec) -> int:
    return 2 if spec.recipe == "simclr" else 1


def _data_loader(spec: Spec, transform: Any) -> Run:
    import torch
    from torch.utils.data import DataLoader

    loader: Any = DataLoader(
        Pictures(spec.files, transform, _views(spec)),  # type: ignore[arg-type]
        batch_size=spec.batch, shuffle=True, num_workers=spec.workers, persistent_workers=True,
        pin_memory=spec.device != "cpu",
    )  # fmt: skip
    dtype = getattr(torch, spec.dtype)

    def run() -> int:
        seen = 0
        for views, _ in loader:
            done = [view.to(spec.device, dtype, non_blocking=True) for view in views]
            seen += len(done[0])
        _synchronize(spec.device)
        return seen

    return run


def kornia_eager(spec: Spec) -> Run:
    import kornia.augmentation as K
    import numpy as np
    import torch
    from nvidia.dali import fn
    from torch.utils.data import DataLoader

    ops: list[Any] = [K.RandomHorizontalFlip()]
    if spec.recipe == "standard":
        ops = [K.RandomVerticalFlip(), *ops, K.ColorJitter(0.3, 0.3, 0.3, 0.1, p=1.0), K.RandomGrayscale(p=0.1)]
    if spec.recipe == "simclr":
        ops += [K.ColorJitter(0.8, 0.8, 0.8, 0.2, p=0.8), K.RandomGrayscale(p=0.2)]
        ops += [K.RandomGaussianBlur((23, 23), (0.1, 2.0), p=0.5)]
    sequence = K.AugmentationSequential(*ops, K.Normalize(torch.tensor(MEAN), torch.tensor(STD)), data_keys=["input"])
    sequence = sequence.to(spec.device)
    views = _views(spec)

    def pipeline() -> Any:
        return tuple(_crop(fn, fn.external_source(name="bytes"), spec, views))

    pipe = _pipeline(spec, pipeline, depth=1)
    loader: Any = DataLoader(
        Encoded(spec.files),  # type: ignore[arg-type]
        batch_size=spec.batch, shuffle=True, num_workers=spec.workers, persistent_workers=True, collate_fn=list,
    )  # fmt: skip
    dtype = getattr(torch, spec.dtype)

    def run() -> int:
        seen = 0
        for encoded in loader:
            pipe.feed_input("bytes", [np.asarray(e) for e in encoded])
            for out in pipe.run():
                images = torch.from_dlpack(out.as_tensor()).permute(0, 3, 1, 2).float().div_(255)
                with torch.no_grad():
                    done = sequence(images).to(dtype)
            seen += len(done)
        _synchronize(spec.device)
        return seen

    return run


def _pipeline(spec: Spec, graph: Any, *, depth: int) -> Any:
    from nvidia.dali import pipeline_def

    device = None if spec.device == "cpu" else 0
    define = pipeline_def(
        batch_size=spec.batch, num_threads=spec.threads, device_id=device, prefetch_queue_depth=depth,
        enable_conditionals=True,
    )  # fmt: skip
    pipe = define(graph)()
    pipe.build()
    return pipe


def _crop(fn: Any, encoded: Any, spec: Spec, views: int) -> list[Any]:
    """DALI's random resized crops. For several views each image is decoded once."""
    from hazards import ask
    from nvidia.dali import types

    gpu = spec.device != "cpu"
    way = types.INTERP_CUBIC if spec.recipe == "simclr" else types.INTERP_LINEAR
    mixed: dict[str, Any] = {"device": "mixed", "hw_decoder_load": spec.engine} if gpu else {"device": "cpu"}
    # some GPUs crash if only parts of images are decoded (nvImageCodec 0.9), so a test decides
    if views == 1 and (not gpu or ask("parts").get("answer")):
        image = fn.decoders.image_random_crop(
            encoded, random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3], **mixed
        )
        return [fn.resize(image, size=[SIZE, SIZE], interp_type=way, antialias=True)]
    image = fn.decoders.image(encoded, **mixed)
    return [
        fn.random_resized_crop(
            image, size=[SIZE, SIZE], random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3], interp_type=way
        )
        for _ in range(views)
    ]


def _dali_operators(fn: Any, image: Any, spec: Spec) -> Any:
    """The recipe by DALI's operators, with DALI's own random values."""
    from nvidia.dali import types

    def uniform(low: float, high: float) -> Any:
        return fn.random.uniform(range=[low, high])

    def coin(p: float) -> Any:
        return fn.cast(fn.random.coin_flip(probability=p), dtype=types.FLOAT)

    gpu = spec.device != "cpu"
    if spec.recipe != "flip":
        s, hue, p, gray = (0.3, 36.0, 1.0, 0.1) if spec.recipe == "standard" else (0.8, 72.0, 0.8, 0.2)
        on = coin(p)
        colour = 1 - coin(gray)
        image = fn.color_twist(
            image,
            brightness=1 + on * uniform(-s, s), contrast=1 + on * uniform(-s, s),
            saturation=colour * (1 + on * uniform(-s, s)), hue=on * uniform(-hue, hue),
        )  # fmt: skip
    if spec.recipe == "standard":
        image = fn.flip(image, vertical=fn.random.coin_flip(), horizontal=0)
    if spec.recipe == "simclr":
        blurred = fn.random.coin_flip(dtype=types.BOOL)
        if blurred:  # DALI's conditionals: the other half of the batch is left alone
            image = fn.gaussian_blur(image, window_size=23, sigma=uniform(0.1, 2.0))
    return fn.crop_mirror_normalize(
        image, mirror=fn.random.coin_flip(), output_layout="CHW", mean=[255 * m for m in MEAN],
        std=[255 * s for s in STD], dtype=types.FLOAT16 if gpu and spec.dtype != "float32" else types.FLOAT,
    )  # fmt: skip


def dali_reader(spec: Spec) -> Run:
    import torch
    from nvidia.dali import fn

    def pipeline() -> Any:
        encoded, _ = fn.readers.file(files=spec.files, random_shuffle=True, name="reader", initial_fill=1024)
        return tuple(_dali_operators(fn, view, spec) for view in _crop(fn, encoded, spec, _views(spec)))

    pipe = _pipeline(spec, pipeline, depth=2)
    batches = math.ceil(len(spec.files) / spec.batch)

    def run() -> int:  # it goes on over the epoch's end; the two batches that it made meanwhile do not count
        for _ in range(2 + batches):
            done = [torch.from_dlpack(out.as_tensor()) for out in pipe.run()]
        _synchronize(spec.device)
        return batches * len(done[0])

    return run


def dali_proxy(spec: Spec) -> Run:
    from nvidia.dali import fn
    from nvidia.dali.plugin.pytorch.experimental import proxy

    if spec.device == "cpu":  # it marks ranges for a profiler that only CUDA builds have
        import torch

        torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: 0  # type: ignore[assignment]

    def pipeline() -> Any:
        encoded = fn.external_source(name="bytes", no_copy=True)
        return tuple(_dali_operators(fn, view, spec) for view in _crop(fn, encoded, spec, _views(spec)))

    server = proxy.DALIServer(_pipeline(spec, pipeline, depth=2 + spec.workers))
    loader = proxy.DataLoader(
        server, Encoded(spec.files, server.proxy), batch_size=spec.batch, shuffle=True, num_workers=spec.workers,
        persistent_workers=True, drop_last=False,
    )  # fmt: skip

    def run() -> int:
        seen = 0
        for views in loader:
            seen += len(views[0] if isinstance(views, tuple | list) else views)
        _synchronize(spec.device)
        return seen

    server.start_thread()
    return run


def ffcv(spec: Spec) -> Run:
    return _ffcv(spec, spec.places["ffcv"])


def ffcv_raw(spec: Spec) -> Run:
    return _ffcv(spec, spec.places["ffcv_raw"])


def _ffcv(spec: Spec, file: str) -> Run:
    import numpy as np
    import torch
    from ffcv.fields.decoders import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, ToDevice, ToTensor, ToTorchImage

    if spec.recipe != "flip":
        raise CannotRunError("it has no colour jitter, grayscale or blur of its own")
    gpu = spec.device != "cpu"
    kind = np.float16 if gpu and spec.dtype != "float32" else np.float32
    normalize = NormalizeImage(255 * np.array(MEAN), 255 * np.array(STD), kind)
    steps = [RandomResizedCropRGBImageDecoder((SIZE, SIZE)), RandomHorizontalFlip()]
    steps += [ToTensor(), ToDevice(torch.device(spec.device)), ToTorchImage(), normalize] if gpu else [
        normalize, ToTensor(), ToTorchImage()
    ]  # fmt: skip
    loader = Loader(
        file, batch_size=spec.batch, num_workers=spec.threads, order=OrderOption.RANDOM, os_cache=True,
        pipelines={"image": steps, "label": None}, drop_last=False,
    )  # fmt: skip

    def run() -> int:
        seen = sum(len(batch[0]) for batch in loader)
        _synchronize(spec.device)
        return seen

    return run


def spdl(spec: Spec) -> Run:
    import spdl.io as io
    import torch
    from spdl.pipeline import PipelineBuilder

    if spec.recipe != "flip":
        raise CannotRunError("it has no colour jitter or grayscale of its own")
    files, draw = spec.files, random.Random(0)
    io.demux_image(files[0])  # where it finds no ffmpeg it says so here, and in its threads to nobody
    mean, std = torch.tensor(MEAN)[:, None, None] * 255, torch.tensor(STD)[:, None, None] * 255
    dtype = getattr(torch, spec.dtype)
    torch.set_num_threads(1)

    def load(path: str) -> Any:
        area, ratio = draw.uniform(0.08, 1.0), math.exp(draw.uniform(math.log(3 / 4), math.log(4 / 3)))
        crop = (
            f"crop=w='min(iw,sqrt(iw*ih*{area * ratio:.5f}))':h='min(ih,sqrt(iw*ih*{area / ratio:.5f}))'"
            f":x='(iw-ow)*{draw.random():.5f}':y='(ih-oh)*{draw.random():.5f}'"
        )
        flip = ",hflip" if draw.random() < 0.5 else ""
        filters = f"format=pix_fmts=rgb24,{crop},scale={SIZE}:{SIZE}:flags=bilinear{flip},format=pix_fmts=rgb24"
        return io.decode_packets(io.demux_image(path), filter_desc=filters)

    def collate(frames: list[Any]) -> Any:
        images = io.to_torch(io.convert_frames(frames)).to(spec.device)
        return images.permute(0, 3, 1, 2).float().sub_(mean).div_(std).to(dtype)

    if spec.device != "cpu":
        mean, std = mean.to(spec.device), std.to(spec.device)

    def run() -> int:
        order = random.sample(files, len(files))
        pipeline = (
            PipelineBuilder().add_source(order).pipe(load, concurrency=spec.threads)
            .aggregate(spec.batch).pipe(collate).add_sink(2).build(num_threads=spec.threads)
        )  # fmt: skip
        with pipeline.auto_stop():
            seen = sum(len(images) for images in pipeline.get_iterator(timeout=60))
        _synchronize(spec.device)
        return seen

    return run


CONTESTANTS: dict[str, Callable[[Spec], Run]] = {
    f.__name__: f
    for f in (ours, ours_reduced, ours_packed, ours_s3, read, decode, augment, checks, shapes, torchvision,
              torchvision_v2, kornia_eager, dali_reader, dali_proxy, ffcv, ffcv_raw, spdl)
}  # fmt: skip


# --- a contestant's process: this file, run by the same or another Python, prints one line per epoch


def serve(spec: Spec, contestants: dict[str, Callable[[Spec], Run]]) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print
    began = time.perf_counter()
    try:
        import torch

        if spec.device == "cpu":
            torch.set_num_threads(spec.threads)
        run = contestants[spec.who.removesuffix("_engine")](spec)
        if not run():
            raise CannotRunError("it gave no images")
    except Exception as error:  # whatever a contestant's libraries raise is a row of the table, and the others go on
        text = str(error) if isinstance(error, CannotRunError) else f"{type(error).__name__}: {error}"
        print(json.dumps({"ok": False, "reason": " ".join(text.split())[-300:]}), file=answers)
        os._exit(0)
    facts = getattr(run, "facts", {})  # of the batches of the first epoch
    print(json.dumps({"ok": True, "seconds": time.perf_counter() - began, "facts": facts}), file=answers)
    for _ in sys.stdin:
        start = time.perf_counter()
        images = run()
        print(json.dumps({"images": images, "seconds": time.perf_counter() - start}), file=answers)
    os._exit(0)  # some keep threads that do not end


if __name__ == "__main__":
    serve(Spec(**json.loads(sys.argv[1])), CONTESTANTS)
