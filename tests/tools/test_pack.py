"""Packing: pixels against Pillow and torch, tars against tarfile, and whatever can stop or damage a run."""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import tarfile
import time
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import PROGRAM, ended, tree
from conftest import ROOT, window
from pictures import photographs
from PIL import Image, ImageOps

import gpuaug
from gpuaug.decode import header
from gpuaug.decode.decoder import Decode
from gpuaug.errors import ConfigError, DataError, FaultBudgetError, GpuaugError, SourceError
from gpuaug.loader.faults import Faults
from gpuaug.read.reader import Reader
from gpuaug.source.base import digest
from gpuaug.source.folder import FolderSource
from gpuaug.source.packed import MANIFEST, PackedSource
from gpuaug.source.shards import ShardSource
from gpuaug.tools.main import main
from gpuaug.tools.pack.command import pack, write_manifest
from gpuaug.tools.pack.job import Pack, finished

PILLOW = Decode(backend="pillow")  # starts at once
DROP = {"policy": "drop"}


def save(path: Path, image: Image.Image, **options: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)


def oriented(value: int) -> Image.Exif:
    out = Image.Exif()
    out[274] = value
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs of odd sizes, forms and colours, small ones, extreme ones, and names that are no ASCII."""
    root = tmp_path_factory.mktemp("odd") / "images"
    rng = np.random.default_rng(3)
    photos = list(photographs().values())
    for k in range(9):
        image = window(photos[k % 5], rng)
        save(root / "jpeg" / f"{k}.jpg", image, quality=85 + k, subsampling=k % 3, progressive=k % 4 == 1)
        save(root / "turned" / f"{k}.jpg", image.resize((90, 61 + k)), exif=oriented(k % 8 + 1), quality=95)
    image = window(photos[0], rng)
    save(root / "ödd" / "gray.jpg", image.convert("L"))
    save(root / "ödd" / "cmyk.jpg", image.convert("CMYK"))
    save(root / "ödd" / "alpha.png", Image.merge("RGBA", (*image.split(), image.split()[0])))
    save(root / "ödd" / "palette.gif", image.quantize(60))
    save(root / "ödd" / "sämall.webp", image.resize((33, 21)), lossless=True)
    save(root / "ödd" / "small.jpg", image.resize((40, 30)), quality=80)
    save(root / "ödd" / "small turned.jpg", image.resize((40, 30)), quality=80, exif=oriented(6))
    save(root / "ödd" / "pixel.png", image.resize((1, 1)))
    save(root / "ödd" / "thin.png", image.resize((700, 3)))
    save(root / "ödd" / "tall.jpg", image.resize((41, 600)))
    return root


def by_pillow(file: Path) -> np.ndarray:
    image = ImageOps.exif_transpose(Image.open(file))
    image.info.pop("transparency", None)
    return np.asarray(image.convert("RGB"))


def resized(pixels: np.ndarray, size: int, interpolation: str = "bicubic") -> np.ndarray:
    """The shorter side resized as torchvision does it, never enlarged."""
    height, width = pixels.shape[:2]
    short, long = min(height, width), max(height, width)
    if size >= short:
        return pixels
    longer = int(size * long / short)
    to = (size, longer) if height <= width else (longer, size)
    data = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None]
    return F.interpolate(data, to, mode=interpolation, antialias=True)[0].permute(1, 2, 0).numpy()


class Labelled:
    """The first JPEGs of a folder, with any labels. ``known``: the source gives labels without reading samples."""

    def __init__(self, folder: Path, labels: list, *, known: bool = False) -> None:
        self.folder, self.values = folder, labels
        if known:
            self.label = labels.__getitem__

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, i: int) -> tuple[bytes, object]:
        return (self.folder / "jpeg" / f"{i}.jpg").read_bytes(), self.values[i]


def content(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}


def run(source: object, out: Path, *, faults: dict[str, object] | None = None, **what: object) -> dict:
    return pack(
        source, out, what=Pack(**{"samples": 8, **what}), decode=PILLOW, faults=Faults(**(faults or {})), num_workers=0
    )


@pytest.fixture(scope="module")
def arrays(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "arrays"
    run(FolderSource(folder), out, format="uint8", sizes=[96, 40])
    return out


@pytest.fixture(scope="module")
def tars(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "tars"
    run(FolderSource(folder), out, sizes=[40, 96], quality=92)
    return out


def pixels_of(data: bytes | memoryview) -> np.ndarray:
    found = header.read(bytes(data))
    assert found.codec == "raw"
    return np.frombuffer(data, np.uint8, offset=header.RAW_HEADER).reshape(found.height, found.width, 3)


# -- what is written --


@pytest.mark.parametrize("size", [40, 96])
def test_arrays_hold_the_resized_pixels(folder: Path, arrays: Path, size: int) -> None:
    original, packed = FolderSource(folder), PackedSource(arrays, size=size)
    assert len(packed) == len(original) == 28
    assert packed.classes == original.classes
    assert packed.class_to_idx == original.class_to_idx
    assert packed.num_classes == 3
    assert (packed.labels == original.labels).all()
    assert packed.digest() == original.digest()
    for i in range(len(original)):
        data, label = packed[i]
        assert packed.key(i) == original.key(i)
        assert label == original[i][1]
        want = resized(by_pillow(folder / original.key(i)), size)
        assert pixels_of(data).shape == want.shape == (*packed.shapes()[i], 3)
        bound = 1 if "cmyk" in original.key(i) else 0
        assert np.abs(pixels_of(data).astype(int) - want).max() <= bound, original.key(i)
    assert json.loads((arrays / "40" / "classes.json").read_text()) == original.classes


def test_bilinear_is_pillows_within_one_level(folder: Path, tmp_path: Path) -> None:
    run(FolderSource(folder, subset=9), tmp_path / "out", format="uint8", sizes=50, interpolation="bilinear")
    packed = PackedSource(tmp_path / "out")
    for i in range(9):
        found = pixels_of(packed[i][0]).astype(int)
        whole = Image.fromarray(by_pillow(folder / packed.key(i)))
        want = np.asarray(whole.resize(found.shape[1::-1], Image.Resampling.BILINEAR))
        assert np.abs(found - want).max() <= 1


@pytest.mark.parametrize("backend", ["dali", "pillow"])
def test_without_sizes_pixels_are_the_decoders(photos: Path, tmp_path: Path, backend: str) -> None:
    source = FolderSource(photos, subset=12)
    decode = Decode(backend=backend, num_threads=1)
    pack(source, tmp_path / "out", what=Pack(format="uint8"), decode=decode, num_workers=0)
    packed = PackedSource(tmp_path / "out")
    assert packed.sizes == ["full"]
    decoder = decode.open("cpu")
    tasks = [(index, index * 0, index >= 0) for index in source.indices.split(1)]
    for i, batch in enumerate(Reader(source).batches(tasks)):
        assert (pixels_of(packed[i][0]) == decoder.whole(decoder.read_headers(batch)).numpy()).all()
        assert packed.key(i) == source.key(int(source.indices[i]))
    decoder.close()


def test_tars_are_webdataset(folder: Path, tars: Path) -> None:
    original, packed = FolderSource(folder), PackedSource(tars, size=40)
    unchanged = 0
    members = []
    for shard in sorted((tars / "40").glob("*.tar")):
        with tarfile.open(shard) as tar:
            members += [(m.name, tar.extractfile(m).read()) for m in tar.getmembers()]
    assert [name for name, _ in members] == [f"{i:09d}.{end}" for i in range(28) for end in ("jpg", "cls")]
    for i in range(28):
        (_, data), (_, label) = members[2 * i : 2 * i + 2]
        assert int(label) == original[i][1] == packed[i][1]
        assert data == packed[i][0]
        image = Image.open(io.BytesIO(data))
        assert image.format == "JPEG"
        assert image.getexif().get(274, 1) == 1
        if data == original[i][0]:
            unchanged += 1
            continue
        want = io.BytesIO()
        pixels = resized(by_pillow(folder / original.key(i)), 40)
        Image.fromarray(pixels).save(want, "JPEG", quality=92)
        assert data == want.getvalue() or "cmyk" in original.key(i)
    assert unchanged == 1  # small.jpg, but neither the turned one nor the ones that are no JPEG
    webdataset = pytest.importorskip("webdataset")
    names = [str(path) for path in sorted((tars / "40").glob("*.tar"))]
    read = [(s["__key__"], s["jpg"], s["cls"]) for s in webdataset.WebDataset(names, shardshuffle=False)]
    assert read == [(a[:-4], b, c) for (a, b), (_, c) in zip(members[::2], members[1::2], strict=True)]
    shards = ShardSource(str(tars / "96"), classes=tars / "96" / "classes.json")
    assert shards.classes == original.classes
    large = PackedSource(tars)
    assert large.size == 96
    assert [shards[i] for i in range(28)] == [(bytes(large[i][0]), large[i][1]) for i in range(28)]


def test_labels_of_other_kinds(folder: Path, tmp_path: Path) -> None:
    for k, labels in enumerate(([[0.0, 1.0], [0.5, 0.25], [1.0, 0.0]], [0.5, 1.5, -2.0], [None] * 3, [7, 2, 2])):
        out = tmp_path / str(k)
        run(Labelled(folder, labels), out, sizes=30)
        packed = PackedSource(out)
        assert [packed[i][1] for i in range(3)] == labels
        assert packed.key(1) == "1"
        want = "json" if isinstance(labels[0], list | float) else "none" if labels[0] is None else "cls"
        shards = ShardSource(str(out / "30"), labels=want)
        assert [shards[i][1] for i in range(3)] == labels
    with pytest.raises(SourceError, match="labels must be finite. Found: nan of '1'"):
        run(Labelled(folder, [0.5, float("nan"), 1.0]), tmp_path / "nan", sizes=30)


def test_a_side_too_long_for_jpeg_is_a_fault(tmp_path: Path) -> None:
    save(tmp_path / "in" / "a.png", Image.new("RGB", (66_000, 2)))
    save(tmp_path / "in" / "b.png", Image.new("RGB", (660, 20)))
    source = FolderSource(tmp_path / "in", labels="none")
    found = run(source, tmp_path / "out", faults=DROP)
    assert found["samples"] == 1
    assert "65535" in found["dropped"][0]["reason"]
    assert run(source, tmp_path / "arrays", format="uint8")["samples"] == 2


# -- in training --


def test_batches_are_what_the_same_pixels_give(arrays: Path, tmp_path: Path) -> None:
    """Every epoch of every recipe, bit for bit: once from the arrays, once from PNGs of them."""
    packed = PackedSource(arrays, size=96)
    for i in range(len(packed)):
        save(tmp_path / "png" / packed.key(i).split("/")[0] / f"{i:03d}.png", Image.fromarray(pixels_of(packed[i][0])))
    pngs = FolderSource(tmp_path / "png")
    crops = [gpuaug.RandomResizedCrop(48), gpuaug.RandomResizedCrop((60, 44), scale=(0.5, 1), interpolation="bicubic")]
    for crop in crops:
        views = []
        for source in (packed, pngs):
            augment = gpuaug.Augment(crop=crop, copies=2)
            with gpuaug.Loader(source, augment=augment, batch_size=8, num_workers=0, device="cpu", seed=5) as loader:
                views.append([(x, y) for _ in range(2) for x, y in loader])
        for (a, y), (b, z) in zip(*views, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(a, b, strict=True))
            assert torch.equal(y, z)


def test_nothing_is_copied_out_of_the_mapped_files(arrays: Path) -> None:
    packed = PackedSource(arrays, size=40)
    indices = torch.tensor([3, 0, 17])
    (batch,) = Reader(packed).batches([(indices, indices * 0, indices >= 0)])
    files = [np.frombuffer(packed._open(f"40/0000{k}.bin"), dtype=np.uint8) for k in range(4)]
    for image, index in zip(batch.images, indices.tolist(), strict=True):
        assert any(np.shares_memory(image, file) for file in files)
        assert image.tobytes() == bytes(packed[index][0])


def test_size_by_epoch(arrays: Path) -> None:
    plan = PackedSource(arrays, size={0: 40, 3: 96, "7": 40})
    assert [plan.size_of(e) for e in (0, 2, 3, 6, 7, 99)] == [40, 40, 96, 96, 40, 40]
    large = PackedSource(arrays)
    assert large.size == 96
    with pytest.raises(RuntimeError, match="depends on the epoch"):
        plan[0]
    with pytest.raises(ConfigError, match="must have one image per sample"):
        run(plan, arrays.parent / "again")
    assert plan.key(30) == large.key(2)
    with pytest.raises(IndexError, match=r"0 \.\. 27. Found: 28"):
        large.key(28)
    for size, text in (({1: 40}, "must have the key 0"), ({0: 50}, "40, 96. Found: 50"), (224, "40, 96. Found: 224"),
                       ({-1: 40}, "must be epochs from 0 to"), ({0: 40, 10**30: 96}, "epochs from 0 to"),
                       ({0: 40, "0": 96}, "no epoch twice")):  # fmt: skip
        with pytest.raises(ConfigError, match=text):
            PackedSource(arrays, size=size)


def test_the_loader_reads_the_size_of_its_epoch(arrays: Path) -> None:
    """Also where it jumps, where it resumes, and where single samples are fetched beside an epoch."""

    def loader(size: object) -> gpuaug.Loader:
        augment = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(32))
        source = PackedSource(arrays, size=size)
        return gpuaug.Loader(source, augment=augment, batch_size=8, num_workers=int(len(source.used) > 1), device="cpu")

    with loader({0: 40, 2: 96}) as planned, loader(40) as small, loader(96) as large:
        for epoch, other in ((0, small), (1, small), (2, large), (3, large), (1, small)):
            planned.set_epoch(epoch)
            other.set_epoch(epoch)
            for found, want in zip(planned, other, strict=True):
                assert torch.equal(found.images, want.images)
                assert torch.equal(found.labels, want.labels)
                fetched = planned.fetch(found.indices.tolist(), epoch=2)
                assert torch.equal(fetched.images, large.fetch(found.indices.tolist(), epoch=2).images)
        with pytest.raises(ConfigError, match="`indices` must be sample numbers"):
            planned.fetch([28], epoch=0)  # the row of another size


def test_an_index_that_cannot_be_written_names_the_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / ".partial").mkdir(parents=True)
    (blocked := tmp_path / "out" / ".partial" / "index").touch()  # where the folder of the index should be
    source = FolderSource(folder, labels="none", subset=2)
    with pytest.raises(GpuaugError, match=r"the run that writes .*/out.*\.partial/index.*run the same command"):
        run(source, tmp_path / "out", faults={"policy": "drop"})
    blocked.unlink()
    assert run(source, tmp_path / "out", faults={"policy": "drop"})["samples"]


# -- stopped --


class Killed(BaseException):
    """Stands for SIGKILL at a chosen place."""


def test_killed_at_any_rename_and_gone_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the last rename nothing looks finished; the same job goes on and gives the same bytes."""
    source = FolderSource(folder, subset=12)
    run(source, tmp_path / "whole", sizes=[20, 40], samples=4)
    want = content(tmp_path / "whole")
    replace_, renames = os.replace, 0

    def counting(a: object, b: object) -> None:
        nonlocal renames
        if renames == stop:
            raise Killed
        renames += 1
        replace_(a, b)

    monkeypatch.setattr(os, "replace", counting)
    stop = -1
    run(source, tmp_path / "counted", sizes=[20, 40], samples=4)
    total = renames
    assert total > 20
    for stop in (*range(8), *range(8, total - 6, 5), *range(total - 6, total)):  # most are columns of the index
        out, renames = tmp_path / f"killed{stop}", 0
        with pytest.raises(Killed):
            run(source, out, sizes=[20, 40], samples=4)
        with pytest.raises(SourceError, match="`gpuaug pack` has finished"):
            PackedSource(out)
        assert finished(out) is None
        if stop <= total - 4:
            assert os.listdir(out) == [".partial"]
        done = {f"{size}/{note.stem}.tar" for note in out.glob(".partial/done/*.json") for size in (20, 40)}
        made = {p.relative_to(out): p.stat().st_mtime_ns for p in out.rglob("*.tar")}
        renames = -10_000
        run(source, out, sizes=[20, 40], samples=4)
        assert content(out) == want
        for path, time_ in made.items():  # nothing that was done is done again
            if (name := str(path).removeprefix(".partial/")) in done:
                assert (out / name).stat().st_mtime_ns == time_
        shutil.rmtree(out)


def test_sigkill_in_mid_run(photos: Path, tmp_path: Path) -> None:
    """The real thing: the command, two processes, SIGKILL; its workers end by themselves; the next run goes on."""
    words = [f"source.root={photos}", "sizes=[64,100]", "samples=1", "num_workers=2"]
    words += ["decode.backend=pillow"]
    assert main(["pack", *words[:-2], "num_workers=0", words[-1], f"out={tmp_path / 'whole'}"]) == 0
    out = tmp_path / "out"
    command = [*PROGRAM, "pack", *words, f"out={out}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = forked.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while len(list(out.glob(".partial/done/*.json"))) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    started = tree(process.pid)
    process.kill()
    process.wait()
    assert len(started) >= 3
    assert ended(started, timeout=300)
    kept = {path: path.stat().st_mtime_ns for path in out.glob(".partial/done/*.json")}
    assert 3 <= len(kept) < 65
    assert os.listdir(out) == [".partial"]
    with pytest.raises(SourceError, match="Found no manifest.json"):
        PackedSource(out)
    assert main(["pack", *words[:-2], "num_workers=0", words[-1], f"out={out}"]) == 0
    assert content(out) == content(tmp_path / "whole")


def test_a_dead_worker_is_said_and_the_rest_is_kept(photos: Path, tmp_path: Path) -> None:
    source = Deadly(FolderSource(photos), tmp_path / "armed")
    (tmp_path / "armed").touch()
    what = Pack(sizes=32, samples=13)
    with pytest.raises(GpuaugError, match="a worker process died.*`num_workers`.*run the same command"):
        pack(source, tmp_path / "out", what=what, decode=PILLOW, num_workers=1)
    assert len(list((tmp_path / "out").glob(".partial/done/*"))) == 2
    (tmp_path / "armed").unlink()
    assert pack(source, tmp_path / "out", what=what, decode=PILLOW, num_workers=0)["samples"] == 65


class Deadly:
    """Ends the process that reads sample 30, while a file is there."""

    def __init__(self, source: FolderSource, armed: Path) -> None:
        self.source, self.armed = source, armed

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, i: int) -> tuple[bytes, int]:
        if i == 30 and self.armed.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return self.source[i]


def test_a_finished_folder_is_left_and_another_job_is_refused(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    source = FolderSource(folder, subset=5)
    first = run(source, out, sizes=20)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert run(source, out, sizes=20) == first
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    with pytest.raises(ConfigError, match=r"holds another job.*quality: 90 there, 80 in this run"):
        run(source, out, sizes=20, quality=80)
    with pytest.raises(ConfigError, match=r"holds another job.*images: 5 there, 6 in this run"):
        run(FolderSource(folder, subset=6), out, sizes=20)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="1 other files.*'thesis.tex'"):
        run(source, tmp_path / "mine")
    with pytest.raises(ConfigError, match="must not be inside `source.root`"):
        run(source, folder / "packed")
    assert not (folder / "packed").exists()


@pytest.mark.parametrize("labels", [[0.5, 1.5, 2.5], [[0, 1], [1, 0], [1, 1]], [3, 4, 5]])
def test_other_labels_of_any_kind_are_another_job(folder: Path, tmp_path: Path, labels: list) -> None:
    source = Labelled(folder, labels, known=True)
    first = run(source, tmp_path / "out", sizes=30)
    assert run(source, tmp_path / "out", sizes=30) == first
    with pytest.raises(ConfigError, match=r"holds another job.*labels"):
        run(Labelled(folder, labels[::-1], known=True), tmp_path / "out", sizes=30)


def test_two_runs_at_once_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / ".partial").mkdir(parents=True)
    lock = os.open(tmp_path / "out" / ".partial", os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another run is writing `out`"):
            run(FolderSource(folder), tmp_path / "out")
    finally:
        os.close(lock)


# -- damaged --


def test_pipes_in_the_folder_are_refused_and_not_waited_for(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / ".partial").mkdir(parents=True)
    os.mkfifo(out / ".partial" / "job.json")
    with pytest.raises(SourceError, match="job.json.*not a regular file but a pipe"):
        run(FolderSource(folder), out)
    shutil.rmtree(out)
    run(FolderSource(folder), out, sizes=[20], format="uint8")
    (out / MANIFEST).unlink()
    os.mkfifo(out / MANIFEST)
    for call in (finished, lambda out: run(FolderSource(folder), out, sizes=[20], format="uint8")):
        with pytest.raises(SourceError, match="not a regular file but a pipe"):
            call(out)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def test_a_damaged_folder_is_no_source(arrays: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = (arrays / MANIFEST).read_text()
    manifest = json.loads(text)

    def indexed(name: str, values: np.ndarray) -> None:
        """Write an index whose checksum is right, as another program could."""
        np.save(out / "index" / f"{name}.npy", values)
        data = (out / "index" / f"{name}.npy").read_bytes()
        files = manifest["files"] | {f"index/{name}.npy": [len(data), digest(data)]}
        write_manifest(out / MANIFEST, manifest | {"files": files})

    for damage, reason in (
        (lambda: os.truncate(out / "96" / "00001.bin", 1000), "96/00001.bin in .* has 1000 bytes instead .*Pack again"),
        (lambda: (out / "40" / "00000.bin").unlink(), "40/00000.bin in .* is missing"),
        (lambda: (out / MANIFEST).write_text(text.replace('"samples": 28', '"samples": 29', 1)), "checksum"),
        (lambda: (out / MANIFEST).write_text(text[:-40]), "cannot be used"),
        (lambda: (out / MANIFEST).write_text("[]"), "not written by"),
        (lambda: (out / MANIFEST).write_text(text.replace('"version": 2', '"version": 1', 1)), "version is 1"),
        (lambda: flip(out / "index" / "keys.npy", 200), "keys.npy .* does not match its checksum"),
        (lambda: indexed("40.offsets", np.full(28, 2**40)), "points outside its files"),
        (lambda: indexed("40.offsets", np.full(28, -1)), "points outside its files"),
        (lambda: indexed("40.lengths", np.full(27, 1, np.int32)), "40.lengths.npy .* cannot be read"),
        (lambda: write_manifest(out / MANIFEST, manifest | {"sizes": ["../x"]}), "has sizes that are no numbers"),
        (
            lambda: write_manifest(out / MANIFEST, manifest | {"files": {"../x": [1, ""]}}),
            "names files outside the fold",
        ),
        (lambda: shutil.rmtree(out), "must be a folder"),
    ):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(arrays, out)
        damage()
        with pytest.raises(SourceError, match=reason):
            PackedSource(out, size=40)


def test_a_file_cut_under_an_open_source_is_a_fault(arrays: Path, tmp_path: Path) -> None:
    shutil.copytree(arrays, tmp_path / "out")
    packed = PackedSource(tmp_path / "out", size=40)
    with (tmp_path / "out" / "40" / "00001.bin").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(SourceError, match="has 1000 bytes instead of"):
        packed[9]
    indices = torch.tensor([0, 9, 27])
    (batch,) = Reader(packed).batches([(indices, indices * 0, indices >= 0)])
    assert [fault.row for fault in batch.faults] == [1]


def test_a_damaged_sample_is_a_fault_that_names_it(arrays: Path, tmp_path: Path) -> None:
    shutil.copytree(arrays, tmp_path / "out")
    begins = np.load(tmp_path / "out" / "index" / "40.offsets.npy")
    flip(tmp_path / "out" / "40" / "00000.bin", int(begins[3]) + 9)
    packed = PackedSource(tmp_path / "out", size=40)
    augment = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(24))
    faults = Faults(policy="blank")
    with gpuaug.Loader(packed, augment=augment, batch_size=28, num_workers=0, device="cpu", faults=faults) as loader:
        (batch,) = loader
    assert batch.indices[~batch.valid].tolist() == [3]
    with (
        gpuaug.Loader(packed, augment=augment, num_workers=0, device="cpu") as loader,
        pytest.raises(DataError, match=r"sample 3 .'jpeg/3.jpg'. failed in read: .*40/00000.bin .*checksum"),
    ):
        next(iter(loader))


def test_more_files_than_a_process_keeps_open(arrays: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuaug.source.packed.MAPPED_FILES", 2)
    packed = PackedSource(arrays, size={0: 40, 1: 96})
    augment = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(24))
    with gpuaug.Loader(packed, augment=augment, batch_size=9, num_workers=0, device="cpu") as loader:
        assert sum(len(batch) for _ in range(2) for batch in loader) == 56
    assert packed._open.cache_info().currsize == 2


# -- faults of the source --


@pytest.fixture
def damaged(folder: Path, tmp_path: Path) -> Path:
    root = tmp_path / "damaged"
    shutil.copytree(folder, root)
    whole = (root / "jpeg" / "4.jpg").read_bytes()
    (root / "jpeg" / "4.jpg").write_bytes(whole[: len(whole) // 2])
    (root / "turned" / "2.jpg").write_bytes(b"")
    (root / "ödd" / "alpha.png").write_bytes(b"<html>404</html>")
    (root / "ödd" / "link.jpg").symlink_to("nowhere.jpg")
    return root


def test_bad_samples_stop_the_run_or_are_left_out(damaged: Path, tmp_path: Path) -> None:
    source = FolderSource(damaged)
    with pytest.raises(DataError, match=r"'jpeg/4.jpg'.*truncated.*`faults.policy=drop`"):
        run(source, tmp_path / "raised", sizes=30, format="uint8")
    assert not (tmp_path / "raised" / MANIFEST).exists()
    file = tmp_path / "bad.jsonl"
    for _ in range(2):  # going on or again adds nothing
        found = run(source, tmp_path / "out", sizes=30, format="uint8", faults={**DROP, "file": str(file)})
    bad = ["jpeg/4.jpg", "turned/2.jpg", "ödd/alpha.png", "ödd/link.jpg"]
    assert [json.loads(line)["key"] for line in file.read_text().splitlines()] == bad
    assert [entry["key"] for entry in found["dropped"]] == bad
    assert found["samples"] == 25
    packed = PackedSource(tmp_path / "out")
    assert [packed.key(i) for i in range(25)] == [k for k in map(source.key, range(29)) if k not in bad]
    clean = FolderSource(damaged, exclude=file)
    run(clean, tmp_path / "clean", sizes=30, format="uint8")
    assert [bytes(a) for a, _ in PackedSource(tmp_path / "clean")] == [bytes(a) for a, _ in packed]
    with pytest.raises(FaultBudgetError, match="`faults.max` allows 2"):
        run(source, tmp_path / "budget", sizes=30, faults={**DROP, "max": 2})
    with pytest.raises(ConfigError, match="`faults.policy=blank`"):
        run(source, tmp_path / "blank", faults={"policy": "blank"})
    shown = run(source, tmp_path / "shown", sizes=30, faults={**DROP, "truncated": "accept"})
    assert shown["samples"] == 26
    # what was accepted without its end is whole now
    assert PackedSource(tmp_path / "shown")[4][0][-2:] == b"\xff\xd9"


def test_nothing_but_bad_samples(tmp_path: Path) -> None:
    for k in range(3):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / f"{k}.jpg").write_bytes(b"no")
    with pytest.raises(SourceError, match="all 3 samples are bad"):
        run(FolderSource(tmp_path / "in", labels="none"), tmp_path / "out", faults=DROP, format="uint8")


# -- processes, Ray, the command --


@pytest.mark.long
def test_on_ray(photos: Path, tmp_path: Path) -> None:
    """The same bytes from a Ray of this machine, bad samples and all."""
    ray = pytest.importorskip("ray")
    root = tmp_path / "in"
    shutil.copytree(photos, root)
    (root / "china" / "003.jpg").write_bytes(b"no image")
    source, what = FolderSource(root), Pack(sizes=[48], samples=9, format="uint8")
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    try:
        found = pack(source, tmp_path / "ray", what=what, decode=PILLOW, faults=Faults(policy="drop"), on="ray")
        assert ray.is_initialized()
        with pytest.raises(DataError, match="china/003.jpg"):
            pack(source, tmp_path / "raised", what=what, decode=PILLOW, on="ray")
    finally:
        ray.shutdown()
    assert found["samples"] == 64
    pack(source, tmp_path / "here", what=what, decode=PILLOW, faults=Faults(policy="drop"), num_workers=0)
    assert content(tmp_path / "ray") == content(tmp_path / "here")


def test_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, file = tmp_path / "out", tmp_path / "report.json"
    words = ["pack", f"source.root={folder}", f"out={out}", "sizes=[20,40]", "num_workers=0", "decode.backend=pillow"]
    assert main([*words, "format=uint8", f"json={file}"]) == 0
    printed = capsys.readouterr().out
    assert f"source=packed source.root={out}" in printed
    report = json.loads(file.read_text())
    assert report["images"] == 28
    assert main([*words, "format=uint8"]) == 0
    assert "already finished" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["source.root=/x"], "must be given. Set it: out=DIR"),
        (["out=/x/y", "augment=simclr"], "`augment` has no effect"),
        (["out=/x/y", "sizs=4"], "`sizs`"),
        (["out=/x/y", "sizes=a"], "`sizes` must be"),
        (["out=/x/y", "sizes=[64,64]"], "`sizes` must be"),
        (["out=/x/y", "format=png"], "`format` must be one of jpeg, uint8, npy. Found: 'png'."),
        (["out=/x/y", "quality=101"], "from 1 to 100"),
        (["out=/x/y", "interpolation=lanczos"], "bilinear, bicubic"),
        (["out=/x/y", "samples=0"], "`samples` must be"),
        (["out=/proc/no", "on=ry"], "source.root"),
        (["out=7"], "`out` must be text"),
    ],
)
def test_command_refuses(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", *words]) == 2
    assert text in capsys.readouterr().err
