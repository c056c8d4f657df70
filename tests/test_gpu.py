"""The loader on a device: pixels, order while the consumer is busy, memory, and no waiting.

What needs no device runs on the CPU too, by the same lines.
"""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from conftest import ROOT, SHARED
from hostile import lossless_jpeg
from pictures import encode, photograph
from PIL import Image
from test_decode import by_pillow, close_enough, failing_in_decode, pack, uniforms, views
from test_distributed import run, seen
from test_loader_targets import ALL, MASKS, Pairs

import gpuaug
from gpuaug.augment.crop import ResizeCenterCrop
from gpuaug.decode.decoder import Decode
from gpuaug.tools.pack.command import pack as pack_source
from gpuaug.tools.pack.job import Pack

HAVE = torch.cuda.is_available()
ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not HAVE, reason="needs a CUDA device")]
cuda = pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_CUDA)])
everywhere = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_CUDA)])
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
STD = 0.229
MIB = 2**20


def synchronize(device):
    if device != "cpu":
        torch.cuda.synchronize()


def busy(device, cycles=20_000_000):
    """What the consumer queues next waits; nothing on a CPU."""
    if device != "cpu":
        torch.cuda._sleep(cycles)


@contextlib.contextmanager
def no_waiting(device):
    """Whatever makes the host wait for the device raises within."""
    if device == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="module")
def plain(photos, tmp_path_factory):
    """The photographs without orientation or gray: what the decoder takes without a detour."""
    root = tmp_path_factory.mktemp("plain")
    for path in sorted(photos.rglob("*.jpg")):
        target = root / path.relative_to(photos)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(encode(Image.open(path).convert("RGB"), quality=90))
    return root


def recipe(backend="fused"):
    return gpuaug.Augment(
        crop=gpuaug.RandomResizedCrop(64),
        ops={
            "flip": K.RandomHorizontalFlip(p=0.5),
            "jitter": K.ColorJitter(0.3, 0.3, 0.3, 0.1, p=0.8),
            "gray": K.RandomGrayscale(p=0.1),
            "blur": K.RandomGaussianBlur((5, 5), (0.1, 2.0), p=0.3),
        },
        normalize=gpuaug.Normalize(mean=(0.485, 0.456, 0.406), std=(STD, 0.224, 0.225)),
        backend=backend,
    )


def build(source, device, backend="fused", **settings):
    source = gpuaug.FolderSource(source) if isinstance(source, Path) else source
    settings = {"batch_size": 16, "num_workers": 1, "seed": 2, "augment": recipe(backend), **settings}
    return gpuaug.Loader(source, device=device, **{"self_check": False, **settings})


def images_of(batches):
    """Index to image, copied."""
    found = {}
    for batch in batches:
        found |= {int(i): image for i, image in zip(batch.indices, batch.images.clone(), strict=True)}
    return found


def equal(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[i], expected[i]) for i in expected)


# --- pixels and targets


@pytest.mark.parametrize("kind", ["all", "masks with a field"])
@cuda
def test_targets_are_the_cpus(kind, device):
    """Masks, boxes and keypoints are bit-equal, except where the field of an elastic transform rounds otherwise."""
    still = [K.RandomHorizontalFlip(p=0.5), K.RandomAffine(20.0, scale=(0.8, 1.2), p=0.7)]
    ops = {"flip": still[0], "affine": still[1]}
    if kind != "all":
        ops |= {"elastic": K.RandomElasticTransform(p=0.7), "turn": K.RandomRotation(20.0, p=0.7)}
    augment = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(64), ops=ops)
    targets = ALL if kind == "all" else MASKS
    found = []
    for where in ("cpu", device):
        with build(Pairs(), where, augment=augment, targets=targets, order="sequential", batch_size=5) as loader:
            found.append([batch.targets.to("cpu") for batch in loader])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a.counts, b.counts)
        for name in ("boxes", "labels", "keypoints", "sample", "matrices"):
            if getattr(a, name) is not None:
                assert torch.equal(getattr(a, name), getattr(b, name)), name
        different = (a.masks != b.masks).float().mean().item()
        assert different <= (0 if kind == "all" else 0.002)


@pytest.mark.parametrize("which", ["photos", "plain"])
@pytest.mark.parametrize("backend", ["fused", "kornia"])
@cuda
def test_pixels_are_the_cpus(request, which, backend, device):
    root = request.getfixturevalue(which)
    with build(root, device, backend) as on_gpu, build(root, "cpu", backend) as on_cpu:
        for ours, theirs in zip(on_gpu, on_cpu, strict=True):
            assert ours.images.device.type == device
            assert ours.labels.device.type == device
            assert torch.equal(ours.indices, theirs.indices)
            difference = (ours.images.cpu() - theirs.images).abs() * STD * 255  # in levels
            # nvJPEG may differ by 4 levels, and the outermost ring of a smaller image by its border
            assert difference.mean() < 1.0
            assert (difference > 6).float().mean() < 0.02


@pytest.mark.parametrize("augment", ["standard", "simclr", "dino", "randaugment_torchvision", "timm"])
@cuda
def test_the_self_check_finds_no_difference(plain, augment, tmp_path, monkeypatch, device):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    augment = gpuaug.build(gpuaug.compose("train", [f"augment={augment}", "source.root=."]).augment)
    with build(plain, device, augment=augment, self_check=True) as loader:
        next(iter(loader))
        assert repr(loader).count("8 images agree with") == 2, loader


@pytest.mark.parametrize("which", ["photos", "plain"])
@pytest.mark.parametrize(("backend", "most"), [("fused", 0.0), ("kornia", 2e-6)])
@everywhere
def test_batch_size_changes_no_pixel(request, which, backend, most, device):
    """Bit for bit; but for Kornia's modules on CUDA, where torch sums in an order that depends on the batch."""
    root = request.getfixturevalue(which)
    with build(root, device, backend, batch_size=16) as one:
        expected = images_of(one)
    for batch_size in (5, 64):
        with build(root, device, backend, batch_size=batch_size) as other:
            found = images_of(other)
        assert found.keys() == expected.keys()
        worst = max(float((found[i] - expected[i]).abs().max()) * STD for i in expected)
        assert worst <= (0 if device == "cpu" else most)


@everywhere
def test_chunks_change_no_pixel(photos, device):
    """A batch whose decoded images take more than `max_bytes` is decoded in several parts."""
    with build(photos, device) as whole, build(photos, device, decode=Decode(max_bytes=1_200_000)) as chunked:
        assert equal(images_of(chunked), images_of(whole))


def kinds():
    """Images that take ways of their own in nvJPEG, or past it."""
    large = photograph("flower", (1600, 1100)).convert("RGB")
    return {
        "more than a megapixel": encode(large, quality=85),  # Huffman decoding on the GPU
        "more than a megapixel, progressive": encode(large, quality=85, progressive=True),
        "CMYK": encode(large.resize((300, 200)).convert("CMYK"), quality=90),
        "lossless (SOF3)": lossless_jpeg(np.asarray(large.resize((120, 90)).convert("L"))),
        "restart intervals": encode(large.resize((300, 200)), quality=85, restart_marker_rows=1),
    }


@pytest.mark.parametrize("kind", kinds())
@everywhere
def test_odd_jpegs_are_pillows_or_a_fault(kind, device):
    """Never other pixels without a word; with and without ordinary ones in the batch."""
    data = kinds()[kind]
    decoder = Decode(backend="dali", num_threads=2).open(device)
    truth = by_pillow(data)
    for batch in ([data], [data, kinds()["restart intervals"], data]):
        whole = decoder.whole(decoder.read_headers(pack([data]))).cpu().numpy()
        assert whole.shape == truth.shape
        difference = np.abs(whole.astype(int) - truth.astype(int))
        assert difference.max() <= (1 if device == "cpu" else 4)
        crop = ResizeCenterCrop(70, (60, 60))
        (view,), faults, _ = views(decoder, batch, crop)
        assert not faults
        close_enough(view[0], by_cpu(data, crop))
    decoder.close()


def by_cpu(data, crop):
    decoder = Decode(backend="pillow").open("cpu")
    batch = pack([data])
    look = decoder.read_headers(batch)
    (view,), _ = decoder.pixels(look, [crop.windows(uniforms(crop, 1), look.height, look.width)])
    return view[0].numpy()


@everywhere
def test_autocast_of_the_caller_changes_nothing(plain, device):
    with build(plain, device, prefetch=0) as loader:
        expected = next(iter(loader)).images.clone()
    with build(plain, device, prefetch=0) as loader, torch.autocast(device, torch.bfloat16):
        found = next(iter(loader)).images
    assert torch.equal(found, expected)


# --- order, while others keep the device busy


@everywhere
def test_the_jpeg_engine_under_load(plain, device):
    """Its pixels differ by a level or so, whatever else the device does; without an engine DALI decodes as ever."""
    engine = Decode(hardware_load=0.65)
    with build(plain, device, decode=engine, prefetch=3) as ours, build(plain, "cpu") as on_cpu:
        a = torch.randn(2048, 2048, device=device, dtype=torch.float32 if device == "cpu" else torch.float16)
        found = []
        for batch in ours:
            for _ in range(0 if device == "cpu" else 200):
                a @ a
            found.append(batch.images.clone())
        for ours, theirs in zip(found, on_cpu, strict=True):
            difference = (ours.cpu() - theirs.images).abs() * STD * 255
            assert difference.mean() < 1.0
            assert (difference > 6).float().mean() < 0.02


@everywhere
def test_two_loaders_in_turns(plain, photos, device):
    """As training and validation are."""
    with build(plain, device) as train, build(photos, device, order="sequential") as val:
        expected = images_of(train), images_of(val)
    with build(plain, device) as train, build(photos, device, order="sequential") as val:
        pairs = [(a.indices, a.images.clone(), b.indices, b.images.clone()) for a, b in zip(train, val, strict=True)]
    synchronize(device)
    for a, images, b, others in pairs:
        assert all(torch.equal(image, expected[0][int(i)]) for i, image in zip(a, images, strict=True))
        assert all(torch.equal(image, expected[1][int(i)]) for i, image in zip(b, others, strict=True))


@everywhere
def test_stopped_in_the_middle_and_iterated_anew(plain, device):
    with build(plain, device, prefetch=0) as calm:
        expected = images_of(calm)
    with build(plain, device, prefetch=3) as loader:
        for k in range(4):
            loader.set_epoch(0)
            for count, _batch in enumerate(loader):
                busy(device)
                if count == k:
                    break
        loader.set_epoch(0)
        assert equal(images_of(loader), expected)


@cuda
def test_cuda_graphs_of_the_consumer(plain, device):
    """A step captured before the first batch is replayed on every batch; one may be captured while batches are made."""
    still = torch.zeros(16, 3, 64, 64, device=device)

    def capture():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = still.mean((1, 2, 3)) * 2
        return graph, out

    still.mean((1, 2, 3)) * 2  # what is loaded at the first call
    torch.cuda.synchronize()
    graph, out = capture()
    with build(plain, device, prefetch=3, last="drop") as loader:
        for k, batch in enumerate(loader):
            if k == 2:
                graph, out = capture()
            still.copy_(batch.images)
            graph.replay()
            assert torch.allclose(out, batch.images.mean((1, 2, 3)) * 2, atol=1e-5)


# --- nothing waits, nothing grows


@pytest.fixture(scope="module")
def places(photos, plain, tmp_path_factory):
    """The photographs in every form that a loader reads."""
    root = tmp_path_factory.mktemp("places")
    pack_source(gpuaug.FolderSource(plain), root / "raw", what=Pack(format="uint8"), num_workers=0)
    with build(plain, "cpu") as live:
        augmented = {"augment": live.augment, "seed": live.seed, "num_workers": 0}
    pack_source(gpuaug.FolderSource(plain), root / "augmented", what=Pack(epochs=2), **augmented)
    packed = {name: gpuaug.PackedSource(root / name) for name in ("raw", "augmented")}
    return {"photos": photos, "plain": plain, **packed}


PLACES = ("photos", "plain", "raw", "augmented")


@pytest.mark.parametrize("which", PLACES)
@everywhere
def test_nothing_waits_for_the_device(places, which, device):
    with build(places[which], device, batch_size=8) as loader:
        list(loader)  # kernels are compiled, pools are filled
        loader.set_epoch(0)
        batches = iter(loader)
        next(batches)
        with no_waiting(device):
            for _ in range(4):
                images, labels = next(batches)
                images.mean() + labels.sum()


@pytest.mark.parametrize(
    ("which", "backend"), [*((which, "fused") for which in PLACES), ("photos", "kornia"), ("plain", "kornia")]
)
@everywhere
def test_a_busy_consumer_gets_the_same_batches(places, which, backend, device):
    with build(places[which], device, backend, prefetch=0, batch_size=8) as calm:
        expected = images_of(calm)
        synchronize(device)
    with build(places[which], device, backend, prefetch=3, batch_size=8) as loader:
        for _ in range(2):
            loader.set_epoch(0)
            found = {}
            for batch in loader:
                busy(device)  # the copy below waits in the queue while later batches are made
                found |= {int(i): image for i, image in zip(batch.indices, batch.images.clone(), strict=True)}
                del batch
            synchronize(device)
            assert equal(found, expected)


@pytest.mark.parametrize("which", ["plain", "photos"])
@cuda
def test_device_memory_does_not_grow(request, which, device):
    """Not torch's, and not what DALI holds beside it."""
    with build(request.getfixturevalue(which), device) as loader:
        levels = []
        for _ in range(8):
            for batch in loader:
                del batch
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            levels.append((torch.cuda.memory_allocated(), total - free))
        for before, after in zip(levels[3], levels[-1], strict=True):
            assert after <= before + 32 * MIB
        assert levels[-1][0] <= levels[1][0] + MIB


@cuda
def test_a_closed_loader_gives_its_memory_back(plain, device):
    used = []
    for _ in range(5):
        with build(plain, device) as loader:
            list(loader)
        del loader
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        used.append(total - free)
    assert used[-1] <= used[1] + 64 * MIB


# --- devices


CONTEXTS = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
import hazards, test_gpu
from pathlib import Path
if __name__ == "__main__":
    with test_gpu.build(Path(sys.argv[2]), sys.argv[3], prefetch=2) as loader:
        for batch in loader:
            batch.images.mean().item()
        loader.fetch([0, 1])
    print(json.dumps(hazards.contexts()))
"""


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        pytest.param("cpu", [], marks=pytest.mark.long),
        pytest.param("cuda:0", [0], marks=ON_CUDA),
        pytest.param("cuda:1", [1], marks=[*ON_CUDA, TWO]),
    ],
)
def test_a_context_is_opened_on_the_loaders_device_alone(plain, device, expected):
    command = [sys.executable, "-c", CONTEXTS, json.dumps([*map(str, SHARED)]), str(plain), device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == expected or (found is None and device == "cpu")  # None: no driver


@pytest.mark.gpu
@TWO
def test_another_device_than_the_current_one(plain):
    """Everything is on the loader's device, whichever is current where it is used."""
    with build(plain, "cuda:1") as loader, build(plain, "cuda:0") as other, torch.cuda.device(0):
        for ours, theirs in zip(loader, other, strict=True):
            assert ours.images.device == ours.labels.device == torch.device("cuda:1")
            assert (ours.images.cpu() - theirs.images.cpu()).abs().max() < 2e-3


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.long), pytest.param("cuda", marks=ON_CUDA)])
def test_two_ranks_share_a_device(plain, device, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    run(1, plain, tmp_path / "one", "--device", device, "--backend", "fused", "--batch-size", 16)
    run(2, plain, tmp_path / "two", "--device", device if device == "cpu" else "cuda:0", "--backend", "fused")
    assert seen(tmp_path / "two") == seen(tmp_path / "one")
    assert seen(tmp_path / "one").total() == 65


# --- bad samples


@pytest.mark.parametrize("policy", ["blank", "drop"])
@everywhere
def test_bad_samples_on_the_device(plain, tmp_path, policy, device):
    """A batch of only bad samples, and some among good ones, which come out unchanged."""
    for k, path in enumerate(sorted(plain.rglob("*.jpg"))[:40]):
        target = tmp_path / path.relative_to(plain)
        target.parent.mkdir(exist_ok=True)
        data = path.read_bytes()
        target.write_bytes(data[: len(data) // 3] if k < 8 or k % 5 == 0 else data)
    faults = gpuaug.Faults(policy=policy, max=100)
    settings = {"order": "sequential", "batch_size": 8, "faults": faults}
    with build(tmp_path, device, **settings) as on_gpu, build(tmp_path, "cpu", **settings) as on_cpu:
        for ours, theirs in zip(on_gpu, on_cpu, strict=True):
            assert torch.equal(ours.valid, theirs.valid)
            assert torch.equal(ours.indices, theirs.indices)
            assert not ours.images.cpu()[~ours.valid].any()
            assert (ours.images.cpu() - theirs.images).abs().mean() * STD * 255 < 1.0


@pytest.mark.parametrize("policy", ["blank", "drop"])
@everywhere
def test_a_sample_that_fails_while_it_is_decoded(plain, tmp_path, policy, device):
    """No header shows it. It alone is lost: the others come out as without it, bit for bit, on a busy device too."""
    files = sorted(plain.rglob("*.jpg"))
    bad = {3, 16, 17, 40}
    for k, path in enumerate(files):
        target = tmp_path / path.relative_to(plain)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(failing_in_decode() if k in bad else path.read_bytes())
    with build(plain, device, order="sequential") as whole:
        expected = images_of(whole)
    faults = gpuaug.Faults(policy=policy, max=100, file=tmp_path / "bad.jsonl")
    with build(tmp_path, device, order="sequential", faults=faults) as loader:
        found, valid = {}, {}
        for batch in loader:
            busy(device)
            found |= {int(i): image for i, image in zip(batch.indices, batch.images.clone(), strict=True)}
            valid |= dict(zip(batch.indices.tolist(), batch.valid.tolist(), strict=True))
    assert {i for i in valid if not valid[i]} == (bad if policy == "blank" else set())
    assert {i for i in range(len(files)) if i not in found} == (bad if policy == "drop" else set())
    assert all(torch.equal(found[i], expected[i]) for i in expected if i not in bad)
    assert all(not found[i].any() for i in bad & found.keys())
    named = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert {line["index"] for line in named} == bad


@everywhere
def test_batches_on_the_device_show_themselves(device, photos):
    augment = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(64), ops={"flip": K.RandomHorizontalFlip()})
    settings = {"dtype": "bfloat16", "memory_format": "channels_last", "batch_size": 6, "num_workers": 0}
    with gpuaug.Loader(gpuaug.FolderSource(photos), augment=augment, device=device, **settings) as loader:
        batch = next(iter(loader))
        assert batch.show().tobytes() == batch.to("cpu").show().tobytes()
        image, _ = loader[int(batch.indices[4])]
        assert torch.equal(image, batch.images[4])
