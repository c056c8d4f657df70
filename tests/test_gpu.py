"""The loader on a CUDA device: the same pixels, streams in order while the consumer is busy, and no waiting."""

import io

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from PIL import Image

import gpuaug

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def plain(photos, tmp_path_factory):
    """The photographs without orientation or gray: what the decoder takes without a detour."""
    root = tmp_path_factory.mktemp("plain")
    for path in sorted(photos.rglob("*.jpg")):
        image = Image.open(path)
        out = io.BytesIO()
        Image.fromarray(np.asarray(image.convert("RGB"))).save(out, "JPEG", quality=90)
        target = root / path.relative_to(photos)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(out.getvalue())
    return root


def build(root, device, backend="fused", **settings):
    augment = gpuaug.Augment(
        crop=gpuaug.RandomResizedCrop(64),
        ops={
            "flip": K.RandomHorizontalFlip(p=0.5),
            "jitter": K.ColorJitter(0.3, 0.3, 0.3, 0.1, p=0.8),
            "gray": K.RandomGrayscale(p=0.1),
        },
        normalize=gpuaug.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
        backend=backend,
    )
    settings = {"batch_size": 16, "num_workers": 1, "seed": 2, **settings}
    return gpuaug.Loader(gpuaug.FolderSource(root), augment=augment, device=device, **settings)


@pytest.mark.parametrize("which", ["photos", "plain"])
@pytest.mark.parametrize("backend", ["fused", "kornia"])
def test_pixels_are_the_cpus(request, which, backend):
    root = request.getfixturevalue(which)
    with build(root, "cuda", backend) as on_gpu, build(root, "cpu", backend) as on_cpu:
        for ours, theirs in zip(on_gpu, on_cpu, strict=True):
            assert ours.images.device.type == "cuda"
            assert ours.labels.device.type == "cuda"
            assert torch.equal(ours.indices, theirs.indices)
            difference = (ours.images.cpu() - theirs.images).abs() * 0.229 * 255  # in levels
            # nvJPEG may differ by 4 levels, and the outermost ring of a smaller image by its border
            assert difference.mean() < 1.0
            assert (difference > 6).float().mean() < 0.02


@pytest.mark.parametrize("which", ["photos", "plain"])  # with rows that are turned after decoding, and without
@pytest.mark.parametrize("backend", ["fused", "kornia"])
def test_a_busy_consumer_gets_the_same_batches(request, which, backend):
    plain = request.getfixturevalue(which)
    with build(plain, "cuda", backend, prefetch=0) as calm:
        expected = [batch.images.clone() for batch in calm]
        torch.cuda.synchronize()
    with build(plain, "cuda", backend, prefetch=3) as loader:
        for _ in range(2):
            loader.set_epoch(0)
            found = []
            for batch in loader:
                torch.cuda._sleep(20_000_000)  # the copy below waits in the queue while later batches are made
                found.append(batch.images.clone())
                del batch
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_batch_size_changes_no_pixel(plain):
    with build(plain, "cuda", "kornia", batch_size=16) as one, build(plain, "cuda", "kornia", batch_size=5) as other:
        first = {int(i): image for batch in one for i, image in zip(batch.indices, batch.images.clone(), strict=True)}
        for batch in other:
            for i, image in zip(batch.indices, batch.images, strict=True):
                assert (image - first[int(i)]).abs().max() < 2e-5


@pytest.mark.parametrize("which", ["photos", "plain"])
def test_nothing_waits_for_the_device(request, which):
    with build(request.getfixturevalue(which), "cuda", batch_size=8) as loader:
        list(loader)  # kernels are compiled, pools are filled
        batches = iter(loader)
        next(batches)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(4):
                images, labels = next(batches)
                images.mean() + labels.sum()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_device_memory_does_not_grow(plain):
    with build(plain, "cuda") as loader:
        levels = []
        for _ in range(4):
            for batch in loader:
                del batch
            torch.cuda.synchronize()
            levels.append(torch.cuda.memory_allocated())
        assert levels[-1] <= levels[1] + 2**20


def test_half_precision_and_channels_last(plain):
    with build(plain, "cuda", dtype="bfloat16", memory_format="channels_last") as loader:
        images, _ = next(iter(loader))
    assert images.dtype == torch.bfloat16
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert images.isfinite().all()


def test_another_device_than_the_current_one(plain):
    """Everything is on the loader's device, whichever is current where it is used."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    with build(plain, "cuda:1") as loader, build(plain, "cuda:0") as other, torch.cuda.device(0):
        for ours, theirs in zip(loader, other, strict=True):
            assert ours.images.device == ours.labels.device == torch.device("cuda:1")
            assert (ours.images.cpu() - theirs.images.cpu()).abs().max() < 2e-3


@pytest.mark.parametrize("policy", ["blank", "drop"])
def test_bad_samples_on_the_device(plain, tmp_path, policy):
    """A batch of only bad samples, and some among good ones, which come out unchanged."""
    for k, path in enumerate(sorted(plain.rglob("*.jpg"))[:40]):
        target = tmp_path / path.relative_to(plain)
        target.parent.mkdir(exist_ok=True)
        data = path.read_bytes()
        target.write_bytes(data[: len(data) // 3] if k < 8 or k % 5 == 0 else data)
    faults = gpuaug.Faults(policy=policy, max=100)
    settings = {"order": "sequential", "batch_size": 8, "faults": faults}
    with build(tmp_path, "cuda", **settings) as on_gpu, build(tmp_path, "cpu", **settings) as on_cpu:
        for ours, theirs in zip(on_gpu, on_cpu, strict=True):
            assert torch.equal(ours.valid, theirs.valid)
            assert torch.equal(ours.indices, theirs.indices)
            assert not ours.images.cpu()[~ours.valid].any()
            assert (ours.images.cpu() - theirs.images).abs().mean() * 0.229 * 255 < 1.0


def test_views_of_several_sizes(plain):
    recipe = gpuaug.build(gpuaug.compose("train", ["augment=dino", "source.root=."]).augment)
    with gpuaug.Loader(
        gpuaug.FolderSource(plain), augment=recipe, batch_size=16, device="cuda", dtype="float16"
    ) as ours:
        for images, _ in ours:
            assert [tuple(x.shape[2:]) for x in images] == [(224, 224)] * 2 + [(96, 96)] * 6
            assert all(x.isfinite().all() for x in images)


def test_autocast_of_the_caller_changes_nothing(plain):
    with build(plain, "cuda", prefetch=0) as loader:
        expected = next(iter(loader)).images.clone()
    with build(plain, "cuda", prefetch=0) as loader, torch.autocast("cuda", torch.bfloat16):
        found = next(iter(loader)).images
    assert torch.equal(found, expected)
