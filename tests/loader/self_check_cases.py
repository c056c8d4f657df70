"""Wrong kernels and wrong decoders are found by the self-check; run by test_self_check.py.

The device is that of pretended_cuda.py. Its kernels run in Triton's interpreter, and its DALI runs on the CPU.
"""

import logging
import random

import kornia.augmentation as K
import numpy as np
import pytest
import torch
import triton
import triton.language as tl  # the interpreter looks for it  # noqa: F401
import triton_cases  # replaces what Triton's interpreter does not know  # noqa: F401
from common import NORMALIZE
from pictures import encode, photograph, photographs
from pretended_cuda import DeviceTensor, pretended_cuda

import gpuaug
from gpuaug import machine
from gpuaug.augment import reference
from gpuaug.augment.fused import backend, cuda, cuda_kernels
from gpuaug.decode import dali
from gpuaug.decode.decoder import Decode
from gpuaug.loader.self_check import IMAGES, _varied

PILLOW = Decode(backend="pillow")


@triton.jit
def _forgotten(code, x, own, a0, around):  # brightness, contrast and saturation do nothing
    return x


class Photographs:
    """JPEGs of several sizes, the first ``pngs`` as PNG."""

    def __init__(self, pngs=0):
        names = [*photographs()]
        sizes = [(60, 40), (40, 60), (52, 52)]
        images = [photograph(names[k % len(names)], sizes[k % 3]).convert("RGB") for k in range(24)]
        self.items = [(encode(image, "PNG" if k < pngs else "JPEG"), k) for k, image in enumerate(images)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]

    def key(self, index):
        return f"photo/{index}.jpg"


def recipe(backend="fused", **ops):
    ops = ops or {"flip": K.RandomHorizontalFlip(), "jitter": K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8)}
    return gpuaug.Augment(crop=gpuaug.RandomResizedCrop(16), ops=ops, normalize=NORMALIZE, backend=backend)


def build(augment=None, source=None, device="cuda:0", **settings):
    settings = {"batch_size": 9, "num_workers": 0, "prefetch": 0, "order": "sequential", "name": "train", **settings}
    return gpuaug.Loader(source or Photographs(), augment=augment or recipe(), device=device, **settings)


def on_host(batch):
    images = batch.images.inner if isinstance(batch.images, DeviceTensor) else batch.images
    return images.clone()


def first(*args, **settings):
    """The first batch of a loader, and the loader's text."""
    with build(*args, **settings) as loader:
        return on_host(next(iter(loader))), repr(loader)


def expected(augment, source=None, **settings):
    """The first batch on the CPU."""
    return first(augment, source, device="cpu", decode=PILLOW, **settings)[0]


@pytest.fixture
def device():
    """Yields the names of the kernels that ran, and a list to which a test adds what DALI adds to its pixels."""
    launched, added, graphs, run = [], [], {}, dali.CudaPipeline.run

    def queue(kernel, grid, device, *args, **constants):
        launched.append(kernel.__name__)
        kernel[grid](*(x.inner if isinstance(x, DeviceTensor) else x for x in args), **constants)

    def decode(self, request):
        if self not in graphs:
            graphs[self] = dali.CudaPipeline(torch.device("cpu"), num_threads=1, operators="cpu")
        views = run(graphs[self], request)
        return [(view + sum(added)).to(self._device) for view in views]

    with pretended_cuda(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "_queue", queue)
        patch.setattr(dali.CudaPipeline, "run", decode)
        yield launched, added


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    machine.verdicts.cache_clear()
    yield tmp_path / "cache" / "gpuaug"
    machine.verdicts.cache_clear()


@pytest.fixture
def logged(caplog):
    """The warnings and errors so far."""
    return lambda: [(r.levelname, r.getMessage()) for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_wrong_kernel_is_found_and_kornia_takes_its_place(device, cache, monkeypatch, logged):
    right = expected(recipe("kornia"))
    monkeypatch.setattr(cuda_kernels, "_linear", _forgotten)
    found, text = first(decode=PILLOW)
    assert torch.equal(found, right)
    ((level, message),) = logged()
    assert level == "ERROR"
    for part in (
        "train: self-check: augment (RandomResizedCrop, flip, jitter): wrong pixels on this GPU: ",
        " of 8 images differ from Kornia; in the worst one, the largest difference is ",
        "This run uses augment.backend=kornia, which is slower. ",
        "The worst image is photo/",
    ):
        assert part in message
    assert "of 8 images differ from Kornia" in text
    # the next run asks nothing
    device[0].clear()
    found, text = first(decode=PILLOW)
    assert torch.equal(found, right)
    assert not device[0]
    assert "of 8 images differ from Kornia" in text
    assert [level for level, _ in logged()] == ["ERROR", "WARNING"]
    assert "run `gpuaug doctor fresh=true`" in logged()[1][1]
    # a recipe object that was found wrong stays so, also where nothing can be stored
    machine.store(dict.fromkeys(machine.verdicts()))
    with build(same := recipe(), decode=PILLOW), build(same, decode=PILLOW, dtype="bfloat16") as second:
        same.cuda_is_wrong = True
        next(iter(second))
        assert "another loader" in repr(second)
    assert not machine.verdicts()
    # without the check, the wrong kernel runs
    found, text = first(decode=PILLOW, self_check=False)
    assert not torch.equal(found, right)
    assert "self-check: off" in " ".join(text.split())
    assert len(logged()) == 2


@pytest.mark.parametrize("prefetch", [0, 2])
def test_all_sizes_of_steps_share_one_verdict(device, monkeypatch, logged, prefetch):
    def with_sizes(backend="fused"):
        return recipe(backend).replace(sizes=gpuaug.Sizes(choose=[12, 16, 20]))

    def batches(augment, **settings):
        with build(augment, decode=PILLOW, batch_size=3, **settings) as loader:
            return [on_host(batch) for batch in loader], repr(loader)

    right, _ = batches(with_sizes("kornia"), device="cpu")
    assert len({batch.shape for batch in right}) == 3
    _, text = batches(with_sizes(), prefetch=prefetch)
    assert " ".join(text.split()).count("8 images agree with Kornia") == 1
    assert len(machine.verdicts()) == 1
    assert not logged()
    device[0].clear()
    batches(with_sizes(), prefetch=prefetch)
    assert device[0]  # the stored verdict is good: the kernels run
    machine.store(dict.fromkeys(machine.verdicts()))
    monkeypatch.setattr(cuda_kernels, "_linear", _forgotten)
    batches(with_sizes(), prefetch=prefetch)
    assert [level for level, _ in logged()] == ["ERROR"]
    device[0].clear()
    found, _ = batches(with_sizes(), prefetch=prefetch)  # Kornia takes every size
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, right, strict=True))
    assert not device[0]


def test_one_wrong_pixel_is_found_where_nothing_jumps(device, monkeypatch, logged):
    queue = cuda._queue

    def spoil(kernel, grid, on, *args, **constants):
        queue(kernel, grid, on, *args, **constants)
        if kernel.__name__ == "_points_kernel":
            args[1].inner[:, :, 0, -1] = 0.0  # the mean color: less than 1 % of the pixels, and less than a level each

    monkeypatch.setattr(cuda, "_queue", spoil)
    jitter, flip = K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=1.0), K.RandomHorizontalFlip()
    for dtype in ("float32", "bfloat16"):
        assert "images differ from Kornia" in first(recipe(flip=flip, jitter=jitter), decode=PILLOW, dtype=dtype)[1]
    assert len(logged()) == 2
    # a level that is rounded to the other side may change a pixel as much
    assert "8 images agree" in first(recipe(flip=flip, posterize=K.RandomPosterize(p=1.0)), decode=PILLOW)[1]


def test_right_kernels_and_decoders_are_checked_once_per_recipe(device, cache, monkeypatch, logged):
    """The check changes no pixel, no random state and no state of the loader."""
    bare, _ = first(self_check=False)
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    with build() as loader:
        assert "not run yet" in repr(loader)
        batches = iter(loader)
        found = on_host(next(batches))
        state, text = loader.state_dict(), repr(loader)
        checked = len(device[0])
        next(batches)
        assert len(device[0]) - checked < checked  # the second batch launches the kernels once
    assert torch.equal(found, bare)
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(states[0], after[0])
    assert states[1:] == after[1:]
    assert text.count("8 images agree with") == 2
    with build(self_check=False) as other:
        next(iter(other))
        assert other.state_dict() == state
    # stored: Kornia's modules and Pillow are not asked again
    monkeypatch.setattr(reference.ReferenceBackend, "__call__", None)
    monkeypatch.setattr("gpuaug.decode.pillow.decode", None)
    found, text = first()
    assert torch.equal(found, bare)
    assert text.count("8 images agree with") == 2
    monkeypatch.undo()
    assert not logged()


def test_recipes_have_verdicts_of_their_own(device):
    flip, turn = recipe(flip=K.RandomHorizontalFlip()), recipe(turn=K.RandomVerticalFlip())
    for augment in (flip, turn, recipe("kornia")):
        first(augment, decode=PILLOW)
    first(flip, decode=PILLOW, dtype="bfloat16")
    views = {"a": flip, "b": turn.replace(backend="kornia")}
    progressive = gpuaug.Progressive(schedule={0: turn.replace(copies=2), 1: flip.replace(copies=2)})
    for augment, epochs in ((gpuaug.MultiView(views=views), 1), (progressive, 2)):
        with build(augment, decode=PILLOW, limit_batches=1) as loader:
            for epoch in range(epochs):
                next(iter(loader))
                assert len(loader.pipeline.self_check.checks) == epoch + 1
    assert all(entry["good"] for entry in machine.verdicts().values())
    assert sorted(name.rpartition(" ")[0] for name in machine.verdicts()) == [
        "augment (2 views: RandomResizedCrop, flip)",
        "augment (2 views: RandomResizedCrop, turn)",
        *["augment (RandomResizedCrop, flip)"] * 2,
        "augment (RandomResizedCrop, turn)",
        "augment (a: RandomResizedCrop, flip; b: RandomResizedCrop, turn)",
    ]


def test_wrong_pixels_of_dali_are_found_and_pillow_takes_its_place(device, logged):
    device[1].append(20)
    right = expected(recipe("kornia"))
    found, _ = first(recipe("kornia"))
    assert torch.equal(found, right)
    ((level, message),) = logged()
    assert level == "ERROR"
    assert "self-check: decode: wrong pixels on this GPU: 8 of 8 images differ from Pillow; " in message
    assert "This run uses decode.backend=pillow" in message
    found, _ = first(recipe("kornia"), prefetch=2)  # headers of later batches are read for DALI
    assert torch.equal(found, right)
    assert [level for level, _ in logged()] == ["ERROR", "WARNING"]


def test_doctors_verdict_counts(device, logged):
    machine.store({"stream": {"good": False, "text": "planted"}})
    found, text = first(recipe("kornia"))
    assert torch.equal(found, expected(recipe("kornia")))
    assert "planted. This run uses decode.backend=pillow" in text
    assert [level for level, _ in logged()] == ["WARNING"]


def test_small_batches_and_other_formats(device, monkeypatch):
    """The check takes several batches until it has eight images. PNG is not for DALI."""
    with build(source=Photographs(pngs=3), batch_size=3) as loader:
        counts = []
        for _ in loader:
            counts.append([check.images for check in loader.pipeline.self_check.checks.values()])
    assert counts[:5] == [[0, 3], [3, 6], [6, 8], [8, 8], [8, 8]]


def test_a_cache_that_cannot_be_written(device, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        _, text = first(recipe(flip=K.RandomHorizontalFlip()))
        assert text.count("8 images agree with") == 2


def test_what_cannot_be_compared(device, cache, monkeypatch, logged):
    def fail(*args, **given):
        raise RuntimeError("planted")

    class Impure(torch.nn.Module):
        uniforms = 1

        def forward(self, images, uniforms):
            return torch.rand_like(images)

    with monkeypatch.context() as patch:
        patch.setattr(reference.ReferenceBackend, "__call__", fail)
        assert "Kornia fails: RuntimeError: planted" in first(decode=PILLOW)[1]
    assert "an operation gives different pixels" in first(recipe(noise=Impure()), decode=PILLOW)[1]
    assert [level for level, _ in logged()] == ["WARNING"]  # about `noise`
    monkeypatch.setattr(backend, "_no_triton", [])
    monkeypatch.setattr(cuda, "_queue", _cannot_run)
    assert "Triton cannot run (planted)" in first(decode=PILLOW)[1]
    assert not machine.verdicts()


def _cannot_run(*args, **given):
    raise cuda.CannotRunError("planted")


def test_an_error_of_the_kernels_stays_an_error(device, monkeypatch):
    monkeypatch.setattr(cuda, "_queue", lambda *args, **given: len(3))
    with build(decode=PILLOW) as loader, pytest.raises(TypeError):
        next(iter(loader))


def test_the_chosen_images_have_rare_operations():
    augment = recipe(rare=K.RandomSolarize(p=0.02), common=K.RandomHorizontalFlip(p=0.5), never=K.RandomInvert(p=0.0))
    drawn = augment.draw(seed=0, epoch=0, indices=range(400))
    chosen = augment.choose(drawn, [(24, 24)])
    rows = _varied(np.arange(100, 400), chosen)[:IMAGES]
    rare = np.flatnonzero(chosen[0][0].choice[100:, 0] == 0) + 100
    assert len(set(rows)) == IMAGES
    assert set(rows) >= set(rare[: IMAGES // 2]) if len(rare) <= IMAGES else set(rows) <= set(rare)
    assert (chosen[0][1].choice[rows] == 0).any()


def test_nothing_is_checked_on_the_cpu(cache):
    with build(recipe("kornia"), device="cpu") as loader:
        next(iter(loader))
        assert loader.pipeline.self_check is None
        assert "self-check" not in repr(loader)
    assert not machine.verdicts()
