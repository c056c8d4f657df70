"""The loader on pretended CUDA devices: no wait is missing, and none is unneeded. See pretended_cuda.py.

The consumer uses a stream of its own on cuda:1. Its current device is cuda:0 while it asks for batches.
"""

import gc
import inspect
import re
import textwrap
from functools import cache, partial
from pathlib import Path

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from common import NORMALIZE
from pictures import encode, photograph
from PIL import Image
from pretended_cuda import PACKAGE, pretended_cuda
from test_decode import pack
from test_loader_targets import ALL, Pairs
from test_parameters import OPS

import gpuaug
from gpuaug import machine
from gpuaug.augment import reference
from gpuaug.augment.fused import cuda_steps
from gpuaug.augment.fused.backend import FusedBackend
from gpuaug.augment.policy import entry_of
from gpuaug.decode.decoder import Decode, Decoder
from gpuaug.loader.pipeline import Pipeline, Streams
from gpuaug.native import buffers

DEVICE = torch.device("cuda", 1)


@cache
def photographs():
    """Photographs with targets and labels. EXIF turns one, and one cannot be read."""
    source, turned = Pairs({k: {"label": k} for k in range(100)}), Image.Exif()
    turned[274] = 6
    source.items[2] = encode(photograph(size=(60, 60)), exif=turned), gpuaug.Target(label=1, size=(60, 60))
    source.items[3] = b"no image", source.items[3][1]
    source.num_classes = 100
    return source


def recipe(backend="fused", **ops):
    return gpuaug.Augment(crop=gpuaug.RandomResizedCrop(32), ops=ops, normalize=NORMALIZE, backend=backend)


def found(recorder):
    gc.collect()
    recorder.check_copies()
    # the first batch of a recipe reads `normalize` from the device
    return [text for text in recorder.found if "_affine" not in text]


def use(batch):
    """The consumer's work on a batch."""
    images = batch.images if isinstance(batch.images, list) else [batch.images]
    with torch.cuda.device(DEVICE):
        for tensor in (*images, batch.labels, *(batch.targets.on_device if batch.targets else ())):
            tensor.sum()


def iterate(augment, targets=None, **more):
    """Two batches of a pass that is left, a change of the recipe by the consumer, and a whole pass: the messages."""
    settings = {"batch_size": 4, "order": "sequential", "limit_batches": 3, "num_workers": 0, "prefetch": 0}
    settings |= {"targets": targets, "faults": gpuaug.Faults(policy="drop"), "self_check": False, **more}
    with pretended_cuda() as recorder:
        loader = gpuaug.Loader(photographs(), augment=augment, device=DEVICE, **settings)
        for stream, name in zip(loader.pipeline.streams._pair, ("decoding", "augmenting"), strict=True):
            stream.name = name
        torch.cuda.set_stream(recorder.new_stream(DEVICE, name="consumer"))
        torch.cuda.set_device(0)
        recorder.found.clear()  # building a loader may wait
        with loader:
            for number, batch in enumerate(loader):
                use(batch)
                if number == 1:
                    break
            if settings["prefetch"] == 0 and getattr(augment, "normalize", None) is not None:
                with torch.cuda.device(DEVICE):
                    augment.normalize.mean.mul_(0.5)
            for batch in loader:
                use(batch)
            del batch
        return found(recorder)


def plain(backend="fused", **more):
    return iterate(recipe(backend, flip=K.RandomHorizontalFlip()), ALL, **more)


def direct():
    """A recipe and a decoder without a loader, while another device is current: the messages, but for torch's."""
    with pretended_cuda() as recorder:
        augment, decoder = recipe(flip=K.RandomHorizontalFlip()).to(DEVICE), Decode(backend="dali").open(DEVICE)
        images = torch.zeros((3, 40, 50, 3), dtype=torch.uint8, device=DEVICE)
        recorder.found.clear()
        augment(images, indices=np.arange(3))
        decoder.whole(decoder.read_headers(pack([photographs().items[0][0]])))
        decoder.close()
        return [text for text in found(recorder) if "not current" not in text or re.search("DALI|_kernel", text)]


# --- nothing is found

FIELD = {"affine": K.RandomAffine(20.0, p=0.7), "elastic": K.RandomElasticTransform((9, 9), (4.0, 4.0), p=0.7)}
RECIPES = {
    "flip": (["crop.size=48"], {}),
    "standard": (["crop.size=48"], {"mix": gpuaug.Mix(mixup_alpha=0.2, cutmix_alpha=1.0, p=1.0)}),
    "simclr": (["crop.size=48"], {}),
    "det_hflip": (["crop.size=64", "crop.shorter=48"], {"targets": ALL}),
    "seg_voc": (["crop.size=48"], {"targets": ALL}),
    "mosaic": (
        gpuaug.Augment(
            crop=gpuaug.Letterbox(48, centre=False),
            combine={"mosaic": gpuaug.Mosaic(window=8), "affine": gpuaug.CanvasAffine(size=48)},
            ops={"flip": K.RandomHorizontalFlip()},
        ),
        {"targets": ALL},
    ),
    "mixup of objects": (
        recipe(flip=K.RandomHorizontalFlip()),
        {"targets": gpuaug.Targets(boxes=gpuaug.Boxes(), masks=gpuaug.Masks()), "mix": gpuaug.MixObjects()},
    ),
    "copy-paste": (
        recipe(flip=K.RandomHorizontalFlip()),
        {
            "targets": gpuaug.Targets(boxes=gpuaug.Boxes(), masks=gpuaug.Masks(kind="instances")),
            "mix": gpuaug.CopyPaste(),
        },
    ),
    "classes": (
        recipe(flip=K.RandomHorizontalFlip()),
        {"targets": gpuaug.Targets(masks=gpuaug.Masks()), "mix": gpuaug.ClassMix()},
    ),
    "masks and a field": (recipe(**FIELD), {"targets": gpuaug.Targets(masks=gpuaug.Masks())}),
}


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("name", RECIPES)
def test_nothing_is_found(name, prefetch):
    augment, settings = RECIPES[name]
    if isinstance(augment, list):
        overrides = ["source.root=.", f"augment={name}", *(f"augment.{text}" for text in augment)]
        augment = gpuaug.build(gpuaug.compose("train", overrides).augment)
    assert iterate(augment, prefetch=prefetch, **settings) == []


@pytest.mark.parametrize(("backend", "policy"), [("fused", "blank"), ("kornia", "drop")])
def test_nothing_is_found_with_bad_samples_and_without_dali(backend, policy):
    ops = {"blur": K.RandomGaussianBlur(3, (0.1, 2.0)), "noise": K.RandomGaussianNoise(), "specks": OPS["specks"]()}
    ops |= {"plasma": OPS["plasma shadow"](), "own": gpuaug.PhotometricDistort(), "chains": gpuaug.AugMix()}
    augment = recipe(backend, **ops, last=gpuaug.RandomErasing(p=0.6))
    texts = iterate(augment, faults=gpuaug.Faults(policy=policy), decode=Decode(backend="pillow"), limit_batches=2)
    assert [text for text in texts if "calls" not in text] == []  # Kornia's own code may wait


def test_the_self_check_waits_and_nothing_else_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine.verdicts.cache_clear()
    texts = iterate(recipe(flip=K.RandomHorizontalFlip()), ALL, prefetch=2, self_check=True)
    machine.verdicts.cache_clear()
    assert texts
    assert [text for text in texts if not text.startswith("waits")] == []


def test_of_the_fused_steps_only_jpeg_waits():
    ops = {name: make(p=0.6) for name, make in OPS.items()}
    ops = {name: op for name, op in ops.items() if entry_of(op).steps(op) is not None}
    assert len(ops) > 40
    texts = iterate(recipe(**ops, chains=gpuaug.AugMix(), last=gpuaug.RandomErasing(p=0.6)), limit_batches=1)
    assert [text for text in texts if "jpeg.py" not in text] == []


def test_direct_calls_wait_for_nothing_and_use_the_device_of_the_images():
    assert direct() == []


# --- each line that waits, records, pins or selects a device is deleted in turn


def race(later, on, earlier, before):
    return f"race: `{later}` on stream {on} .* which `{earlier}` on stream {before} "


def freed(what, of, by, on):
    return rf"freed too early: {what} \[.* of stream {of} while `{by}` on stream {on} "


CURRENT = "not current: `{}` .* runs on cuda:1 while cuda:0 is current"
AUGMENT = "augmenting", "DALI", "decoding"
AUGMENT_READS = "decoding", "_points_kernel", "augmenting"
CONSUME = "sum", "consumer", "_points_kernel", "augmenting"
LINES = [  # what is deleted from a function, its replacement, the message
    (Streams.on, "torch.cuda.device(self.device), ", "", "new context: cuda:0 gets one from loader/pipeline.py"),
    (Streams.on, ", torch.cuda.stream(stream)", "", race(*CONSUME[:3], "default of cuda:1")),
    (
        *(Streams.follow_consumer, "stream.wait_stream(torch.cuda.current_stream(self.device))", "pass"),
        race("sub", "augmenting", "mul_", "consumer"),
    ),
    (Pipeline.decode, "stream.record_event()", "None", race("_points_kernel", *AUGMENT)),
    (Pipeline._wait_for, "stream.wait_event(decoded.ready)", "pass", race("_points_kernel", *AUGMENT)),
    (
        Pipeline._wait_for,
        "view.record_stream(stream)",
        "pass",
        freed("uint8", "decoding", "_points_kernel", "augmenting"),
    ),
    (Pipeline.finish, "stream.record_event()", "None", race(*CONSUME)),
    (Pipeline.hand_over, "current.wait_event(event)", "pass", race(*CONSUME)),
    (Pipeline.hand_over, "tensor.record_stream(current)", "pass", freed("float32", "augmenting", "sum", "consumer")),
    (Pipeline.hand_over, "*images, ", "", freed("float32", "augmenting", "sum", "consumer")),
    (Pipeline.hand_over, "batch.labels, ", "", freed("int64", "augmenting", "sum", "consumer")),
    (Pipeline.hand_over, ", *moved", "", freed("float32", "augmenting", "sum", "consumer")),  # boxes
    (buffers.to_device, "tensor = tensor.pin_memory()", "pass", "not pinned: .*`_to_copy` on stream augmenting"),
    (buffers.to_device, "non_blocking=True", "", r"waits: .* \(native/buffers.py:\d+ to_device\)"),
    (cuda_steps.pack, 'device.type == "cuda"', "False", r"not pinned: .*cuda_steps.py:\d+ pack\)"),
    (cuda_steps.pack, ", non_blocking=True", "", r"waits: .*cuda_steps.py:\d+ pack\)"),
    (FusedBackend.__call__, "torch.cuda.device(images.device)", "nullcontext()", CURRENT.format("_points_kernel")),
    (Decoder.pixels, "torch.cuda.device(self.device)", "nullcontext()", CURRENT.format("DALI")),
]
OTHERS = [  # lines that no message can name
    ("decode/decoder.py", "pin_memory=True"),  # `to_device` would copy again
    ("decode/decoder.py", "torch.cuda.synchronize("),  # after an error
    ("augment/fused/cuda.py", "torch.cuda.synchronize("),  # after an error
    ("read/prefetch.py", "torch.cuda.set_device("),  # the streams select the device again
    ("read/workers.py", "pin_memory=False"),  # a worker has no device
    ("loader/distributed.py", "torch.cuda.device("),  # for NCCL
]
SYNC = re.compile(
    r"\.(wait_event|wait_stream|record_event|record_stream|pin_memory|synchronize|set_device)\(|"
    r"torch\.cuda\.(device|stream)\(|pin_memory=|non_blocking=True"
)


def test_every_line_about_streams_is_in_the_tables():
    named = [(inspect.getsourcefile(inspect.unwrap(function)), text) for function, text, *_ in LINES]
    named += [(PACKAGE + name, text) for name, text in OTHERS]
    for path in Path(PACKAGE).rglob("*.py"):
        for line in path.read_text().splitlines() if "tools" not in path.parts else ():
            assert not SYNC.search(line) or any(str(path) == file and text in line for file, text in named), line


@pytest.mark.parametrize(("function", "text", "instead", "message"), LINES, ids=[line[1] for line in LINES])
def test_a_deleted_line_is_named(monkeypatch, function, text, instead, message):
    function, made = inspect.unwrap(function), {}
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(text) == 1
    source = source.replace(text, instead)[source.index("def ") :]
    lines = "\n" * (function.__code__.co_firstlineno + source.count("@contextmanager"))
    head = "from __future__ import annotations" + lines
    exec(compile(head + source, function.__code__.co_filename, "exec"), function.__globals__, made)
    monkeypatch.setattr(function, "__code__", made[function.__name__].__code__)
    if message.startswith("not current"):
        texts = direct()
    elif function is inspect.unwrap(Streams.on):
        texts = plain(prefetch=2 if "stream(" in text else 0)  # without threads, all would run on the consumer's stream
    else:
        texts = plain("kornia" if "consumer" in function.__name__ else "fused")
    print(*texts, sep="\n")
    assert any(re.match(message, each) for each in texts)


# --- planted mistakes of an operation


class Planted(torch.nn.Module):
    uniforms = 1

    def __init__(self, mistake):
        super().__init__()
        self.mistake = mistake

    def forward(self, images, uniforms):
        self.mistake(images)
        return images


def beside(images, *, waits, recorded):
    """Use a copy of the images on another stream."""
    copied, current, other = images.clone(), torch.cuda.current_stream(), torch.cuda.Stream(name="other")
    if waits:
        other.wait_stream(current)
    with torch.cuda.stream(other):
        copied.sum()
    if recorded:
        copied.record_stream(other)


def overwrite(images):
    pinned = torch.ones(4, pin_memory=True)
    pinned.to(images.device, non_blocking=True)
    pinned.numpy()[:] = 2


MISTAKES = {
    "item": (lambda x: x.sum().item(), "waits: the host, in `_local_scalar_dense`"),
    "synchronize": (lambda x: torch.cuda.current_stream().synchronize(), "waits: the host, in `Stream.synchronize`"),
    "mask": (lambda x: x[x > 0], "waits: the host, in `index`"),
    "cpu": (lambda x: x.cpu(), "waits: the host, in `_to_copy`"),
    "number": (lambda x: torch.tensor([1.0], device=x.device), "waits: the host, in `_to_copy from the host`"),
    "not pinned": (lambda x: torch.ones(2).to(x.device, non_blocking=True), "not pinned: the source of `_to_copy`"),
    "overwritten": (overwrite, "overwritten: pinned memory that `_to_copy` on stream augmenting"),
    "two devices": (lambda x: x[:, 0, 0] * torch.ones(32), r"two devices: `mul` .* takes \[32\] from the host"),
    "other device": (lambda x: torch.zeros(2, device="cuda:0"), "not current: `zeros` .* runs on cuda:0 while cuda:1"),
    "race": (partial(beside, waits=False, recorded=True), race("sum", "other", "clone", "augmenting")),
    "freed": (partial(beside, waits=True, recorded=False), freed("float32", "augmenting", "sum", "other")),
    "none": (partial(beside, waits=True, recorded=True), None),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_named(monkeypatch, name):
    mistake, message = MISTAKES[name]
    monkeypatch.setattr(reference, "CHECKED_BATCHES", 0)  # these checks wait
    texts = iterate(recipe(planted=Planted(mistake)))
    print(*texts, sep="\n")
    assert len(texts) == (message is not None)
    assert all(re.match(message, text) for text in texts)
