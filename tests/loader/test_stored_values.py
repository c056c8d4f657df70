"""Loaders with `decode.pixels=raw`: every source gives the stored values, and pictures show three of the channels."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pictures import write_tar

pytest.importorskip("imagecodecs")  # of the extra gpuaug[tiff]

from stored import encoded, picture

import gpuaug
from gpuaug.errors import ConfigError
from gpuaug.tools.main import main
from gpuaug.tools.pack.command import pack
from gpuaug.tools.pack.job import Pack
from gpuaug.tools.plan import command as plan
from gpuaug.tools.preview.originals import originals

COUNT, CHANNELS = 4, 4
RAW = {"pixels": "raw", "channels": CHANNELS, "num_threads": 1}
KINDS = {"npy": "npy", "tif": "lzw tiles", "png": "png"}  # extension and variant


def image(k: int, dtype: str = "uint16") -> np.ndarray:
    return np.roll(picture(dtype, CHANNELS, 24, 32), k, axis=1)


def folder(root: Path, extension: str) -> Any:
    for k in range(COUNT):
        (root / f"class{k % 2}").mkdir(exist_ok=True)
        (root / f"class{k % 2}" / f"{k}.{extension}").write_bytes(encoded(KINDS[extension], image(k)))
    return gpuaug.FolderSource(root, extensions=[f".{extension}"])


def table(root: Path, extension: str) -> Any:
    folder(root, extension)
    lines = [f"class{k % 2}/{k}.{extension},{k}" for k in range(COUNT)]
    (root / "list.csv").write_text("\n".join(["path,label", *lines]) + "\n")
    return gpuaug.TableSource(root / "list.csv")


def shards(root: Path, extension: str) -> Any:
    entries = []
    for k in range(COUNT):
        entries += [(f"{k}.{extension}", encoded(KINDS[extension], image(k))), (f"{k}.cls", str(k).encode())]
    write_tar(root / "a.tar", entries)
    return gpuaug.ShardSource(root / "a.tar", extensions=[f".{extension}"], index=str(root))


def parquet(root: Path, extension: str) -> Any:
    files = [{"bytes": encoded(KINDS[extension], image(k)), "path": str(k)} for k in range(COUNT)]
    pq.write_table(pa.table({"image": files, "label": list(range(COUNT))}), root / "a.parquet")
    return gpuaug.ParquetSource(root)


def packed(root: Path, extension: str) -> Any:
    pack(pairs(root, extension), root / "packed", decode=gpuaug.Decode(**RAW), num_workers=0)
    return gpuaug.PackedSource(root / "packed")


def pairs(root: Path, extension: str) -> Any:
    return [(encoded(KINDS[extension], image(k)), k) for k in range(COUNT)]


def opened(source: Any, recipe: Any = None, **decode: Any) -> gpuaug.Loader:
    return gpuaug.Loader(
        source, augment=recipe or gpuaug.Augment(), batch_size=COUNT, num_workers=0, prefetch=0, device="cpu",
        order="sequential", decode=gpuaug.Decode(**RAW | decode),
    )  # fmt: skip


@pytest.mark.parametrize("extension", KINDS)
@pytest.mark.parametrize("make", [folder, table, shards, parquet, packed, pairs])
def test_every_source_gives_the_stored_values(make: Any, extension: str, tmp_path: Path) -> None:
    with opened(make(tmp_path, extension)) as loader:
        numbers, pipeline = torch.arange(COUNT), loader.pipeline
        (read,) = pipeline.read([(numbers, numbers * 0, numbers >= 0)], 0)
        (images,) = pipeline.decode(pipeline.read_headers(read, 0)).images
        keys = [loader.source.key(k) for k in range(COUNT)]
    order = [int(Path(key).stem) if make is folder else k for k, key in enumerate(keys)]
    assert images.dtype == torch.uint16
    assert np.array_equal(images.numpy(), np.stack([image(k) for k in order]))


def test_a_folder_lists_npy_files_only_if_it_is_asked_to(tmp_path: Path) -> None:
    folder(tmp_path, "npy")
    folder(tmp_path, "tif")
    assert len(gpuaug.FolderSource(tmp_path)) == COUNT


@pytest.mark.parametrize("white", [None, 4095.0])
def test_batches_are_the_values_over_white(white: float | None, tmp_path: Path) -> None:
    source = [(encoded("npy", image(k) % 4096), k) for k in range(COUNT)]
    with opened(source, white=white) as loader:
        (batch,) = loader
    expected = np.stack([image(k) % 4096 for k in range(COUNT)]).astype(np.float32).transpose(0, 3, 1, 2)
    assert batch.images.dtype == torch.float32
    assert np.abs(batch.images.numpy() - expected / (white or 65535)).max() < 1e-6


def test_blank_samples_have_all_channels() -> None:
    source = [(b"\x93NUMPY", 0), (encoded("npy", image(1)), 1)]
    settings = {"decode": gpuaug.Decode(**RAW), "faults": gpuaug.Faults(policy="blank")}
    with gpuaug.Loader(source, augment=gpuaug.Augment(), num_workers=0, device="cpu", **settings) as loader:
        batch = loader.fetch([0, 1])
    assert batch.images.shape == (2, CHANNELS, 24, 32)
    assert batch.valid.tolist() == [False, True]
    assert not batch.images[0].any()


def test_originals_show_the_bands_that_are_named(tmp_path: Path) -> None:
    with opened(pairs(tmp_path, "tif")) as loader:
        shown = originals(loader, [1, 2], epoch=0, bands=[3, 2, 1])
        with pytest.raises(ConfigError, match=r"`bands` must be the three channels .* from 0 to 3, such as bands="):
            originals(loader, [1], epoch=0)
    for k, sample in zip((1, 2), shown, strict=True):
        levels = np.rint(image(k)[..., [3, 2, 1]] / np.float32(65535) * 255)
        assert np.abs(np.asarray(sample.original.picture).astype(float) - levels).max() <= 1


def test_a_batch_shows_the_bands_that_are_named() -> None:
    values = torch.rand(1, 5, 40, 40)
    numbers = torch.arange(1)
    batch = gpuaug.Batch(images=values, labels=None, indices=numbers, valid=numbers >= 0)
    chosen = gpuaug.Batch(images=values[:, [4, 0, 2]], labels=None, indices=numbers, valid=numbers >= 0)
    assert batch.show(bands=[4, 0, 2]).tobytes() == chosen.show().tobytes()
    for wrong in (None, [0, 1], [0, 1, 5], [0, 1, -1], "012"):
        with pytest.raises(ConfigError, match="`bands` must be the three channels"):
            batch.show(bands=wrong)
    gray = gpuaug.Batch(images=values[:, :1], labels=None, indices=numbers, valid=numbers >= 0)
    thrice = gpuaug.Batch(images=values[:, [0, 0, 0]], labels=None, indices=numbers, valid=numbers >= 0)
    assert gray.show().tobytes() == thrice.show().tobytes()


def test_previews_show_the_bands_that_are_named(tmp_path: Path) -> None:
    folder(tmp_path, "tif")
    arguments = [f"source.root={tmp_path}", "source.extensions=[.tif]", "augment=none", "augment.normalize=null"]
    arguments += ["decode.pixels=raw", f"decode.channels={CHANNELS}", f"out={tmp_path / 'look.png'}", "device=cpu"]
    assert main(["preview", *arguments, "bands=[3,2,1]"]) == 0
    assert (tmp_path / "look.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["parity", "augment=none", "augment.normalize=null"], "`decode.pixels` must be rgb8"),
        (["pack", "format=jpeg"], "`format` must be npy without `epochs` with `decode.pixels=raw`. Found: format=jpeg"),
        (["pack", "epochs=2", "augment=flip"], "`format` must be npy without `epochs` with `decode.pixels=raw`"),
        (["pack", "format=npy", "decode.pixels=rgb8"], "`format` must be jpeg or uint8 with `decode.pixels=rgb8`"),
    ],
    ids=range(4),
)
def test_commands_that_need_rgb_refuse(
    settings: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder(tmp_path, "tif")
    (command, *more), raw = settings, ["decode.pixels=raw", f"decode.channels={CHANNELS}"]
    raw = raw if "decode.pixels=rgb8" not in more else []
    more += [f"out={tmp_path / 'packed'}"] if command == "pack" else []
    assert main([command, f"source.root={tmp_path}", "source.extensions=[.tif]", *raw, *more]) == 2
    assert message in capsys.readouterr().err


def test_packed_values_are_resized_ones_of_one_type(tmp_path: Path) -> None:
    """The first file decides the type for all processes: a file of another type is left out wherever it is."""
    values = [image(0), image(1, "uint8"), image(2), image(3)]
    (tmp_path / "in").mkdir()
    for k, own in enumerate(values):
        (tmp_path / "in" / f"{k}.npy").write_bytes(encoded("npy", own))
    source = gpuaug.FolderSource(tmp_path / "in", labels="none", extensions=[".npy"])
    settings: dict[str, Any] = {"decode": gpuaug.Decode(**RAW), "faults": gpuaug.Faults(policy="drop")}
    what = Pack(sizes=[12], samples=1)
    for workers in (0, 2):
        made = pack(source, tmp_path / f"out{workers}", what=what, num_workers=workers, **settings)
        assert [bad["key"] for bad in made["dropped"]] == ["1.npy"]
    files = [sorted((tmp_path / f"out{workers}" / "12").iterdir()) for workers in (0, 2)]
    assert [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]
    with opened(gpuaug.PackedSource(tmp_path / "out2")) as loader:
        (batch,) = loader
    whole = torch.from_numpy(np.stack([values[k] for k in (0, 2, 3)]).astype(np.float32)).permute(0, 3, 1, 2)
    wanted = gpuaug.Augment(crop=gpuaug.Resize((12, 16), interpolation="bicubic"))(whole, white=65535).clamp(0, 1)
    assert (batch.images - wanted).abs().max() <= 0.51 / 65535


def test_a_state_is_not_loaded_with_other_values(tmp_path: Path) -> None:
    with opened(pairs(tmp_path, "npy")) as loader:
        assert loader.fingerprint()["decode"] == {"pixels": "raw", "channels": CHANNELS, "white": None}
    assert "decode" not in gpuaug.Loader([(io.BytesIO(b"").read(), 0)], augment=gpuaug.Augment()).fingerprint()


def test_what_cuda_would_need_counts_the_bytes_of_the_values(tmp_path: Path) -> None:
    with opened(pairs(tmp_path, "npy")) as loader:
        needs = {each.stage: each.bytes for each in plan.on_cuda(loader, 0)}
    values = COUNT * CHANNELS * 24 * 32
    assert needs == {"views": 4 * 2 * values, "augment": 4 * values, "batches": 0}
