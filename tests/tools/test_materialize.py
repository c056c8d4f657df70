"""Augmented epochs on disk: a replay shows what the live loader shows, or says why it cannot."""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import forked
import kornia.augmentation as K
import numpy as np
import pytest
import torch
from common import NORMALIZE, PROGRAM, STD, loader, recipe
from conftest import ROOT

import gpuaug
from gpuaug.errors import ConfigError, DataError, GpuaugError, SourceError, StateError
from gpuaug.tools.main import main
from gpuaug.tools.materialize import command as materialize


def stored(photos, out, *, epochs=2, start_epoch=0, store="final", chunk=20, **settings):
    with loader(photos, **settings) as live:
        gpuaug.Materialize(live, out=out, epochs=epochs, start_epoch=start_epoch, store=store, chunk=chunk).run()
    return gpuaug.MaterializedSource(out)


def views(batch):
    return batch.images if isinstance(batch.images, list) else [batch.images]


def seen(batches):
    """(index, how often before) to label, validity and the bytes of all views."""
    found, times = {}, {}
    for batch in batches:
        for row, index in enumerate(batch.indices.tolist()):
            times[index] = times.get(index, -1) + 1
            data = [view[row].contiguous().view(torch.uint8).numpy().tobytes() for view in views(batch)]
            found[index, times[index]] = batch.labels[row].tolist(), bool(batch.valid[row]), data
    return found


def same(a, b):
    assert a.indices.tolist() == b.indices.tolist()
    assert a.valid.tolist() == b.valid.tolist()
    assert a.keys == b.keys
    assert torch.equal(a.labels, b.labels)
    for x, y in zip(views(a), views(b), strict=True):
        assert x.dtype == y.dtype
        assert x.is_contiguous() == y.is_contiguous()
        assert torch.equal(x, y)


def tree(root):
    return {str(file.relative_to(root)): file.read_bytes() for file in sorted(root.rglob("*")) if file.is_file()}


@pytest.fixture(scope="module")
def final(photos, tmp_path_factory):
    """Epochs 0 and 1 of `recipe()`, in float32."""
    return stored(photos, tmp_path_factory.mktemp("final") / "data").root


@pytest.fixture(scope="module")
def rounded(photos, tmp_path_factory):
    """The same as uint8."""
    return stored(photos, tmp_path_factory.mktemp("rounded") / "data", store="uint8").root


# -- a replay is what was live


@pytest.mark.parametrize("backend", ["kornia", "fused"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_final_dtype_is_replayed_bit_for_bit(photos, tmp_path, backend, dtype):
    settings = {"augment": recipe(backend), "dtype": dtype}
    source = stored(photos, tmp_path / "out", epochs=2, **settings)
    with loader(photos, **settings) as live, loader(source, **settings) as replay:
        for _ in range(2):
            for a, b in zip(live, replay, strict=True):
                same(a, b)
    assert replay.epoch == 2


@pytest.mark.parametrize("backend", ["kornia", "fused"])
def test_uint8_is_within_half_a_level(photos, tmp_path, backend):
    source = stored(photos, tmp_path / "out", epochs=1, store="uint8", augment=recipe(backend))
    worst = 0.0
    with loader(photos, augment=recipe(backend)) as live, loader(source, augment=recipe(backend)) as replay:
        for a, b in zip(live, replay, strict=True):
            assert a.indices.tolist() == b.indices.tolist()
            worst = max(worst, float(((a.images - b.images).abs() * torch.tensor(STD).view(3, 1, 1) * 255).max()))
    assert 0.3 < worst <= 0.5 + 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("backend", ["kornia", "fused"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_cuda(photos, tmp_path, backend, dtype):
    settings = {"augment": recipe(backend), "dtype": dtype, "device": "cuda", "num_workers": 2}
    source = stored(photos, tmp_path / "out", epochs=1, **settings)
    rounded = stored(photos, tmp_path / "rounded", epochs=1, store="uint8", **settings)
    with loader(photos, **settings) as live, loader(source, **settings) as a, loader(rounded, **settings) as b:
        for expected, found, near in zip(live, a, b, strict=True):
            if backend == "fused":
                same(expected, found)
            else:  # chunks are other batches: within 2e-6 before normalization, and what a cast makes of it
                assert found.indices.tolist() == expected.indices.tolist()
                assert torch.equal(found.labels, expected.labels)
                tolerance = {"rtol": 0, "atol": 1e-5} if dtype == "float32" else {"rtol": 2**-7, "atol": 1e-5}
                assert torch.allclose(found.images, expected.images, **tolerance)
            if dtype == "float32":
                off = (expected.images - near.images).abs() * torch.tensor(STD, device="cuda").view(3, 1, 1) * 255
                assert off.max() <= 0.5 + 1e-3


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"memory_format": "channels_last"}])
def test_float32_serves_other_dtypes_and_formats(photos, final, settings):
    with loader(photos, **settings) as live, loader(gpuaug.MaterializedSource(final), **settings) as replay:
        for a, b in zip(live, replay, strict=True):
            same(a, b)


def test_batch_size_workers_ranks_and_prefetch_change_nothing(photos, final):
    with loader(photos) as live:
        expected = seen(live)
    for settings in ({"batch_size": 64}, {"batch_size": 5, "num_workers": 2}, {"batch_size": 1, "prefetch": 0}):
        with loader(gpuaug.MaterializedSource(final), **settings) as replay:
            assert seen(replay) == expected
    found = {}
    for rank in range(3):
        with loader(gpuaug.MaterializedSource(final), rank=rank, world_size=3, last="uneven") as replay:
            share = seen(replay)
        assert not share.keys() & found.keys()
        found |= share
    assert found == expected


def test_workers_that_are_spawned(final):
    with (
        loader(gpuaug.MaterializedSource(final)) as here,
        loader(gpuaug.MaterializedSource(final), num_workers=1, start_method="spawn") as there,
    ):
        assert seen(here) == seen(there)


def test_a_state_fits_live_and_replay(photos, final):
    with loader(photos) as live:
        live.set_epoch(1)
        whole = list(live)
        live.set_epoch(1)
        batches = iter(live)
        for _ in range(3):
            next(batches)
        state = json.loads(json.dumps(live.state_dict()))
    with loader(gpuaug.MaterializedSource(final)) as replay:
        replay.load_state_dict(state)
        batches = iter(replay)
        for expected in whole[3:5]:
            same(expected, next(batches))
        state = json.loads(json.dumps(replay.state_dict()))
    with loader(photos, batch_size=24) as live:
        live.load_state_dict(state)
        found = seen(live)
    assert found == seen(whole[5:])


@pytest.mark.parametrize("store", ["final", "uint8"])
def test_views_of_several_sizes(photos, tmp_path, store):
    augment = gpuaug.MultiView(
        views={
            "global": gpuaug.Augment(crop=gpuaug.RandomResizedCrop(24), normalize=NORMALIZE, copies=2),
            "local": gpuaug.Augment(crop=gpuaug.RandomResizedCrop(16), ops={"flip": K.RandomHorizontalFlip(p=0.5)}),
        }
    )
    source = stored(photos, tmp_path / "out", epochs=1, store=store, augment=augment)
    with loader(photos, augment=augment) as live, loader(source, augment=augment, num_workers=1) as replay:
        for a, b in zip(live, replay, strict=True):
            assert [x.shape[1:] for x in b.images] == [(3, 24, 24), (3, 24, 24), (3, 16, 16)]
            if store == "final":
                same(a, b)
            for x, y, std in zip(a.images, b.images, (STD, STD, (1.0,) * 3), strict=True):
                assert ((x - y).abs() * torch.tensor(std).view(3, 1, 1) * 255).max() <= 0.5 + 1e-3
    first = np.load(tmp_path / "out" / "epoch-0000" / "00000.npy", mmap_mode="r")
    assert first["view2"].shape == ((20, 3, 16, 16) if store == "final" else (20, 16, 16, 3))


def test_mix_is_drawn_at_replay(photos, final):
    mix = gpuaug.Mix(mixup_alpha=0.8, cutmix_alpha=1.0)
    with loader(photos, mix=mix) as live, loader(gpuaug.MaterializedSource(final), mix=mix) as replay:
        for _ in range(2):
            for a, b in zip(live, replay, strict=True):
                same(a, b)
        replay.set_epoch(0)
        first = [batch.images.clone() for batch in replay]
        replay.set_epoch(2)
        assert not any(torch.equal(a, b.images) for a, b in zip(first, replay, strict=True))


def test_a_single_batch_can_be_fetched(photos, final):
    with loader(photos) as live, loader(gpuaug.MaterializedSource(final)) as replay:
        same(live.fetch([7, 60, 0], epoch=1), replay.fetch([7, 60, 0], epoch=1))
        with pytest.raises(ConfigError, match="sample 7 .repeat 1. is not stored in epoch 1"):
            replay.fetch([7], epoch=1, repeats=[1])


# -- epochs and orders


def test_epochs_beyond_the_stored_ones_are_repeats_in_a_new_order(final, caplog):
    with loader(gpuaug.MaterializedSource(final)) as replay:
        orders, pixels = [], []
        with caplog.at_level(logging.WARNING, "gpuaug"):
            for _ in range(6):
                batches = list(replay)
                orders.append([i for batch in batches for i in batch.indices.tolist()])
                pixels.append(seen(batches))
    assert pixels[0] == pixels[2] == pixels[4] != pixels[1] == pixels[3] == pixels[5]
    assert len({tuple(order) for order in orders}) == 6
    told = [re.findall(r"\d+", r.getMessage()) for r in caplog.records if "repeats" in r.getMessage()]
    assert told == [["2", "0", "2", "0"]]


def test_a_first_epoch_that_is_not_0(photos, tmp_path):
    source = stored(photos, tmp_path / "out", epochs=2, start_epoch=3)
    with loader(photos) as live, loader(source) as replay:
        for epoch, shown in ((3, 3), (4, 4), (5, 3), (0, 4)):
            live.set_epoch(shown)
            replay.set_epoch(epoch)
            assert seen(live) == seen(replay)


@pytest.mark.parametrize("order", [gpuaug.Repeated(repeats=3), gpuaug.Weighted(), gpuaug.Sequential()])
def test_orders_with_repeats(photos, tmp_path, order):
    source = stored(photos, tmp_path / "out", epochs=2, order=order)
    with loader(photos, order=order) as live, loader(source, order=order) as replay:
        epochs = [list(live) for _ in range(2)]
        for _ in range(2):  # the second time epochs 2 and 3, in the order that is stored
            for epoch in epochs:
                for a, b in zip(epoch, replay, strict=True):
                    same(a, b)


def test_another_order_of_the_same_samples(photos, final):
    with (
        loader(photos, order="sequential") as live,
        loader(gpuaug.MaterializedSource(final), order="sequential") as replay,
    ):
        for a, b in zip(live, replay, strict=True):
            same(a, b)
    with (
        loader(gpuaug.MaterializedSource(final), order=gpuaug.Repeated()) as replay,
        pytest.raises(ConfigError, match=r"Repeated.*not stored for epoch 0.*Shuffle\(\)"),
    ):
        iter(replay)


def test_padding_is_marked_as_it_was(photos, final):
    settings = {"last": "pad", "batch_size": 8, "rank": 1, "world_size": 3}
    with loader(photos, **settings) as live, loader(gpuaug.MaterializedSource(final), **settings) as replay:
        for a, b in zip(live, replay, strict=True):
            assert a.indices.tolist() == b.indices.tolist()
            assert a.valid.tolist() == b.valid.tolist()
            assert torch.equal(a.images[a.valid], b.images[b.valid])
        assert not b.valid.all()


def test_samples_keep_their_numbers_keys_and_labels(photos, tmp_path):
    live = gpuaug.FolderSource(photos, subset=20)
    source = stored(live, tmp_path / "out", epochs=1)
    assert len(source) == 20
    assert source.indices.tolist() == live.indices.tolist()
    assert [source.key(i) for i in source.indices.tolist()] == [live.key(i) for i in live.indices.tolist()]
    assert torch.equal(source.labels, live.labels)
    assert source.classes == live.classes
    assert source.class_to_idx == live.class_to_idx
    assert source.digest() == live.digest()
    assert source[int(source.indices[3])][1] == live[int(live.indices[3])][1]
    with pytest.raises(IndexError):
        source.key(1)
    with loader(live) as a, loader(source) as b:
        assert seen(a) == seen(b)


def test_a_part_of_the_stored_samples(photos, final):
    part = [3, 5, 30, 64]
    live = torch.utils.data.Subset(gpuaug.FolderSource(photos), part)
    replayed = torch.utils.data.Subset(gpuaug.MaterializedSource(final), part)
    with loader(live) as a, loader(replayed) as b:
        assert seen(a) == seen(b)


@pytest.mark.parametrize("subset", [13, 0.5, [0, 7, 64, 40]])
def test_subset_and_exclude_are_those_of_the_live_source(photos, final, tmp_path, subset):
    """The same settings give the same samples, batches and states, whether live or replayed."""
    left_out = tmp_path / "bad.jsonl"
    keys = [gpuaug.FolderSource(photos).key(i) for i in (7, 40)]
    left_out.write_text("".join(json.dumps({"key": key}) + "\n" for key in keys))
    given = {"subset": subset, "exclude": left_out}
    live, replayed = gpuaug.FolderSource(photos, **given), gpuaug.MaterializedSource(final, **given)
    assert replayed.indices.tolist() == live.indices.tolist()
    assert len(replayed) == len(live)
    assert replayed.digest() == live.digest()
    assert [label for _, label in replayed] == [label for _, label in live]
    with loader(live) as a, loader(replayed) as b:
        assert a.fingerprint() == b.fingerprint()
        assert seen(a) == seen(b)


def test_a_subset_of_a_subset(photos, tmp_path):
    """Samples keep the numbers of the first source; those that were never stored cannot be asked for."""
    out = tmp_path / "out"
    first = stored(gpuaug.FolderSource(photos, subset=20), out, epochs=1)
    numbers = first.indices.tolist()
    part = gpuaug.MaterializedSource(out, subset=5)
    assert part.indices.tolist() == numbers[::4]
    assert gpuaug.MaterializedSource(out, subset=numbers[3:5]).indices.tolist() == numbers[3:5]
    assert part.key(numbers[1]) == first.key(numbers[1])  # stored, though it is not active
    with loader(torch.utils.data.Subset(gpuaug.FolderSource(photos), numbers[::4])) as a, loader(part) as b:
        assert seen(a) == seen(b)
    missing = next(i for i in range(numbers[-1]) if i not in numbers)
    with pytest.raises(gpuaug.SourceError, match="only the 20 stored samples"):
        gpuaug.MaterializedSource(out, subset=[missing])


def test_samples_excluded_inside_an_epoch_move_no_other(photos, final, tmp_path):
    with loader(gpuaug.MaterializedSource(final), batch_size=8) as whole:
        batches = iter(whole)
        shown = [next(batches).indices.tolist() for _ in range(2)]
        state = whole.state_dict()
        rest = [i for batch in batches for i in batch.indices.tolist()]
        key = whole.source.key(rest[3])
    (tmp_path / "bad.jsonl").write_text(json.dumps({"key": key}) + "\n")
    with loader(gpuaug.MaterializedSource(final, exclude=tmp_path / "bad.jsonl"), batch_size=5) as left:
        left.load_state_dict(state)
        found = [i for batch in left for i in batch.indices.tolist()]
    assert found == rest[:3] + rest[4:]
    assert not set(found) & {i for batch in shown for i in batch}


class Vectors:
    """A user's source with labels that are vectors."""

    def __init__(self, source):
        self.source = source

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        data, label = self.source[index]
        return data, [label / 4, 1.0, float(index)]


@pytest.mark.parametrize("labels", ["none", "vectors"])
def test_other_labels(photos, tmp_path, labels):
    source = gpuaug.FolderSource(photos, labels="none" if labels == "none" else "folder")
    source = source if labels == "none" else Vectors(source)
    replayed = stored(source, tmp_path / "out", epochs=1)
    with loader(source) as live, loader(replayed) as replay:
        for a, b in zip(live, replay, strict=True):
            assert (a.labels is None) == (b.labels is None) == (labels == "none")
            assert a.labels is None or torch.equal(a.labels, b.labels)
            assert torch.equal(a.images, b.images)


# -- bad samples


@pytest.fixture
def damaged(photos, tmp_path):
    root = tmp_path / "damaged"
    shutil.copytree(photos, root)
    (root / "coffee" / "003.jpg").write_bytes(b"no image at all")
    (root / "china" / "005.jpg").write_bytes(b"")
    return root


def test_bad_samples_are_replayed_as_bad(damaged, tmp_path):
    with pytest.raises(DataError):
        stored(damaged, tmp_path / "raise", epochs=1)
    source = stored(damaged, tmp_path / "out", epochs=1, faults=gpuaug.Faults(policy="drop"))
    records = []
    for name, images in (("live", damaged), ("replay", source)):
        file = tmp_path / f"{name}.jsonl"
        with loader(images, faults=gpuaug.Faults(policy="blank", file=str(file))) as ours:
            batches = list(ours)
        records.append([json.loads(line) for line in file.read_text().splitlines()])
        bad = [
            (key, x) for b in batches for key, x, ok in zip(b.keys, b.images, b.valid.tolist(), strict=True) if not ok
        ]
        assert sorted(key for key, _ in bad) == ["china/005.jpg", "coffee/003.jpg"]
        assert not any(x.any() for _, x in bad)
    assert records[0] == records[1]
    with loader(damaged, faults=gpuaug.Faults(policy="blank")) as live:
        expected = seen(live)
    with loader(source, faults=gpuaug.Faults(policy="blank")) as replay:
        assert seen(replay) == expected
    with loader(source, faults=gpuaug.Faults(policy="drop")) as replay:
        assert sum(len(batch) for batch in replay) == 63
    with loader(source) as replay, pytest.raises(DataError, match="coffee/003.jpg|china/005.jpg"):
        list(replay)


def test_a_chunk_that_is_gone_is_a_fault_of_its_samples(photos, tmp_path):
    source = stored(photos, tmp_path / "out", epochs=1)
    chunk = tmp_path / "out" / "epoch-0000" / "00001.npy"
    chunk.write_bytes(chunk.read_bytes()[:-1000])
    with loader(source, faults=gpuaug.Faults(policy="blank")) as replay, loader(photos) as live:
        batches = list(replay)
        assert sum(int((~b.valid).sum()) for b in batches) == 20
        assert [b.labels.tolist() for b in batches] == [b.labels.tolist() for b in live]
    with loader(gpuaug.MaterializedSource(tmp_path / "out")) as replay, pytest.raises(DataError, match="or damaged"):
        list(replay)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("manifest.json", b""),
        ("manifest.json", b"[]"),
        ("manifest.json", lambda text: text.replace(b'"rows": [', b'"rows": [null, ')),
        ("manifest.json", lambda text: text.replace(b'"epochs": 2', b'"epochs": 9')),
        ("manifest.json", lambda text: text.replace(b'"float32"', b'"complex"')),
        ("manifest.json", lambda text: text.replace(b'"backend"', b'"front"')),
        ("manifest.json", lambda text: text.replace(b'"size"', b'"sighs"')),
        ("keys.npy", b""),
        ("keys.npy", lambda data: data[:-9]),
        ("key_offsets.npy", b"\x93NUMPY\x01\x00"),
        ("key_offsets.npy", lambda data: data[:-8] + b"\xff" * 8),
        ("labels.npy", b"PK\x03\x04" + bytes(100)),
        ("epoch-0000/order.npy", lambda data: data[:-8]),
        ("epoch-0000/order.npy", b"\x80\x04K\x01."),
        ("epoch-0000/00002.json", b"{}"),
        ("epoch-0000/00002.json", b'{"rows": 20, "faults": [{"row": 3}]}'),
        ("epoch-0000/00002.npy", b""),
        ("epoch-0000/00002.npy", lambda data: data.replace(b"<f4", b"<i4")),
        ("epoch-0000/00002.npy", lambda data: data[:3000]),
    ],
)
def test_damaged_files_raise_only_our_errors(final, tmp_path, name, data):
    shutil.copytree(final, tmp_path / "out")
    file = tmp_path / "out" / name
    file.write_bytes(data(file.read_bytes()) if callable(data) else data)
    with pytest.raises(GpuaugError), loader(gpuaug.MaterializedSource(tmp_path / "out")) as replay:
        list(replay)


# -- what does not belong together


def test_other_recipes_seeds_and_sources_are_refused(photos, final, tmp_path):
    source = gpuaug.MaterializedSource(final)
    for settings, told in (
        ({"augment": recipe(size=24)}, r"augment\.crop\.size.*32.*stored.*24.*here"),
        ({"augment": recipe(invert=K.RandomInvert(p=0.1))}, "augment.ops"),
        ({"augment": recipe(flip=K.RandomHorizontalFlip(p=0.25))}, r"augment\.ops\.flip.*0\.5 stored.*0\.25 here"),
        ({"seed": 4}, "seed: 3 stored, 4 here"),
        (
            {"augment": gpuaug.MultiView(views={"one": recipe(), "two": recipe()})},
            r"None stored, \['one', 'two'\] here",
        ),
    ):
        with pytest.raises(StateError, match=told):
            loader(source, **settings)
        with loader(photos, **settings) as live, pytest.raises(StateError, match=told) as caught:
            gpuaug.Materialize(live, out=final, epochs=2, store="final")
        assert len(str(caught.value)) < 1500
    other = tmp_path / "other"
    shutil.copytree(photos, other)
    (other / "coffee" / "003.jpg").unlink()
    with loader(other) as live, pytest.raises(StateError, match="source: "):
        gpuaug.Materialize(live, out=final, epochs=2, store="final")
    with pytest.raises(SourceError, match="`source.original` does not have the samples"):
        gpuaug.MaterializedSource(final, original=gpuaug.FolderSource(other))
    assert len(gpuaug.MaterializedSource(final, original=gpuaug.FolderSource(photos))) == 65


def test_a_stored_half_precision_does_not_become_another(photos, tmp_path):
    source = stored(photos, tmp_path / "out", epochs=1, dtype="bfloat16")
    with pytest.raises(ConfigError, match="`dtype` must be bfloat16"):
        loader(source)


def test_pixels_beyond_uint8_are_refused(photos, tmp_path):
    noisy = recipe(noise=K.RandomGaussianNoise(std=0.3, p=1.0))
    with pytest.raises(ConfigError, match="`store=uint8` holds pixels from 0 to 1"):
        stored(photos, tmp_path / "out", store="uint8", augment=noisy)
    source = stored(photos, tmp_path / "final", epochs=1, augment=noisy)
    with loader(photos, augment=noisy) as live, loader(source, augment=noisy) as replay:
        assert seen(live) == seen(replay)


def test_what_cannot_be_materialized(photos, final, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with loader(photos) as live:
        for settings, told in (
            ({"epochs": 0}, "`epochs` must be a whole number >= 1"),
            ({"store": "int4"}, "`store` must be one of uint8, final"),
            ({"on": "moon"}, "`on` must be one of local, ray"),
            ({"out": tmp_path / "full"}, "`out` must be a new or empty folder"),
        ):
            with pytest.raises(ConfigError, match=told):
                gpuaug.Materialize(live, **{"out": tmp_path / "out", **settings})
        with pytest.raises(StateError, match="store: 'float32' there, 'uint8' in this run"):
            gpuaug.Materialize(live, out=final, epochs=2)
    with loader(photos, limit_batches=2) as live, pytest.raises(ConfigError, match="`limit_batches` must be null"):
        gpuaug.Materialize(live, out=tmp_path / "out")
    with loader(gpuaug.MaterializedSource(final)) as replay, pytest.raises(ConfigError, match="already materialized"):
        gpuaug.Materialize(replay, out=tmp_path / "out")
    with pytest.raises(SourceError, match="no manifest.json"):
        gpuaug.MaterializedSource(photos)


def test_a_full_disk_is_refused_beforehand(photos, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10**6))
    with loader(photos) as live:
        job = gpuaug.Materialize(live, out=tmp_path / "out", epochs=2)
        assert job.bytes == 2 * 65 * (32 * 32 * 3 + 8)
        with pytest.raises(GpuaugError, match=r"needs .* Free: 1.0 MiB"):
            job.run()
    assert not (tmp_path / "out").exists()


# -- stopping, going on, growing


def test_any_batch_size_writes_the_same_bytes_and_a_folder_grows(photos, final, tmp_path):
    out = tmp_path / "out"
    stored(photos, out, epochs=1, batch_size=64, num_workers=1)
    before = tree(out)
    stored(photos, out, epochs=2, batch_size=3)
    after = tree(out)
    assert after == tree(Path(final))
    assert {name for name in before if before[name] != after[name]} == {"manifest.json"}
    with loader(photos) as live:
        job = gpuaug.Materialize(live, out=out, epochs=1, store="final")
        assert (job.missing, job.plan["epochs"]) == ([], 2)
        job.run()
    assert tree(out) == after


def test_damage_is_found_and_only_that_is_made_anew(photos, rounded, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(rounded, out)
    whole = tree(out)
    chunk = out / "epoch-0001" / "00002.npy"
    data = bytearray(chunk.read_bytes())
    data[5000] ^= 1
    chunk.write_bytes(data)
    with loader(photos) as live:
        job = gpuaug.Materialize(live, out=out, epochs=2)
        assert job.missing == []
        assert job.verify() == [str(chunk)]
        chunk.unlink()
        job = gpuaug.Materialize(live, out=out, epochs=2)
        assert job.missing == [(1, 2)]
        job.run()
        assert job.verify() == []
    assert tree(out) == whole


def test_a_killed_run_looks_unfinished_and_goes_on(photos, tmp_path, capsys):
    words = ["materialize", f"source.root={photos}", "augment=flip", "augment.crop.size=96", "epochs=8", "chunk=4"]
    words += ["batch_size=4", "num_workers=1", "store=final", "prefetch=0"]
    out = tmp_path / "killed"
    running = forked.Popen(
        [*PROGRAM, *words, f"out={out}"], cwd=ROOT, stderr=subprocess.PIPE, start_new_session=True
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while len(list(out.glob("epoch-*/0*.json"))) < 20 and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    os.killpg(running.pid, signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL, running.stderr.read()
    running.stderr.close()
    assert 20 <= len(list(out.glob("epoch-*/0*.json"))) < 8 * 17
    with pytest.raises(SourceError, match="is not finished"):
        gpuaug.MaterializedSource(out)
    killed = tree(out)
    assert main([*words, "batch_size=11", f"out={out}", "verify=true"]) == 0
    assert "match their checksums" in capsys.readouterr().out
    found = tree(out)
    kept = {name for name in killed if name.startswith("epoch") and name.endswith(".npy")}
    assert all(found[name] == killed[name] for name in kept)
    assert main([*words, f"out={tmp_path / 'whole'}"]) == 0
    assert found == tree(tmp_path / "whole")


# -- the command line


def test_the_command_and_its_replay(photos, tmp_path, capsys):
    out, file = tmp_path / "out", tmp_path / "out.json"
    words = [f"source.root={photos}", "augment=flip", "augment.crop.size=32"]
    assert main(["materialize", *words, "epochs=2", f"out={out}", "mix=mixup", f"json={file}"]) == 0
    printed = capsys.readouterr()
    size = 32 * 32 * 3 + 8
    assert f"2 x 65 x {size} bytes as uint8 = {2 * 65 * size / 2**20:.1f} MiB" in printed.out
    assert "mix is not stored" in printed.err
    assert json.loads(file.read_text())["size"] == 2 * 65 * size
    replay = ["source=materialized", f"source.root={out}", *words[1:], "num_workers=0", "device=cpu"]
    with gpuaug.build(gpuaug.compose("train", replay)) as ours:
        assert sum(len(batch) for batch in ours) == 65
    with pytest.raises(StateError, match="recipe"):
        gpuaug.build(gpuaug.compose("train", [*replay, "augment.ops.flip.p=0.3"]))
    assert main(["train", *replay, "batch_size=13", "epochs=1", f"out={tmp_path / 'train'}"]) == 0
    assert main(["materialize", *words]) == 2
    assert "must be given. Set it: out=" in capsys.readouterr().err


@pytest.mark.long
def test_ray_writes_the_same_bytes(photos, final, tmp_path):
    ray = pytest.importorskip("ray")
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}}
    ray.init(num_cpus=8, log_to_driver=False, include_dashboard=False, runtime_env=environment)
    try:
        with loader(photos) as live:
            gpuaug.Materialize(live, out=tmp_path / "out", epochs=2, store="final", chunk=20, on="ray").run()
        noisy = recipe(noise=K.RandomGaussianNoise(std=0.3, p=1.0))
        with loader(photos, augment=noisy) as live, pytest.raises(ConfigError, match="`store=uint8` holds"):
            gpuaug.Materialize(live, out=tmp_path / "noisy", on="ray").run()
    finally:
        ray.shutdown()
    assert tree(tmp_path / "out") == tree(Path(final))


def test_a_pipe_in_the_place_of_the_plan_is_refused_and_not_waited_for(photos, tmp_path):
    os.mkfifo(tmp_path / materialize.PLAN)
    with (
        loader(photos) as live,
        pytest.raises(ConfigError, match="`out` cannot be read.*not a regular file but a pipe"),
    ):
        gpuaug.Materialize(live, out=tmp_path)
