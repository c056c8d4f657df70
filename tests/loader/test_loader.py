"""Determinism, order and life cycle of the whole loader, on real photographs."""

import hashlib
import itertools
import json
import multiprocessing
import re
import shutil
import threading
import time
import weakref

import kornia.augmentation as K
import pytest
import torch
from common import loader, recipe

import gpuaug
from gpuaug.augment.mix import Mix
from gpuaug.batch import Fault
from gpuaug.errors import ConfigError, DataError, GpuaugError, StateError
from gpuaug.read.prefetch import Producer
from gpuaug.source.base import checksum


def pixels(batches):
    """(index, repeat number) to a digest of the image's bytes and the label."""
    seen, times = {}, {}
    for batch in batches:
        for row, index in enumerate(batch.indices.tolist()):
            if not batch.valid[row]:
                continue
            times[index] = times.get(index, -1) + 1
            views = batch.images if isinstance(batch.images, list) else [batch.images]
            data = b"".join(view[row].contiguous().view(torch.uint8).numpy().tobytes() for view in views)
            seen[index, times[index]] = hashlib.blake2b(data).hexdigest(), int(batch.labels[row])
    return seen


@pytest.fixture(scope="module")
def expected(photos):
    with loader(photos, prefetch=0) as whole:
        seen = pixels(whole)
    assert len(seen) == 65
    assert len(set(seen.values())) == 65
    return seen


@pytest.mark.parametrize(
    "settings",
    [{"batch_size": 1, "prefetch": 0}, {"batch_size": 64, "num_workers": 1}, {"num_workers": 3, "prefetch": 4}],
)
def test_batch_size_workers_and_prefetch_change_no_pixel_and_no_generator(photos, expected, settings):
    state = torch.get_rng_state()
    with loader(photos, **settings) as ours:
        assert pixels(ours) == expected
    assert torch.equal(torch.get_rng_state(), state)
    assert not multiprocessing.active_children()


def test_headers_are_read_while_the_batch_before_is_decoded_and_the_one_before_augmented(photos, monkeypatch):
    """Every stage waits for the one before it to begin with the next batch: in fewer threads nothing would come."""
    begun, changed = {"headers": 0, "pixels": 0}, threading.Condition()

    def waiting(name, behind, work):
        number = 0

        def call(*args, **kwargs):
            nonlocal number
            number += 1
            with changed:
                if name in begun:
                    begun[name] += 1
                    changed.notify_all()
                if number < 8:  # the last batches have none behind them
                    assert changed.wait_for(lambda: behind is None or begun[behind] > number, timeout=30)
            return work(*args, **kwargs)

        return call

    with loader(photos) as ours:
        decoder = ours.pipeline.decoder
        monkeypatch.setattr(decoder, "read_headers", waiting("headers", None, decoder.read_headers))
        monkeypatch.setattr(decoder, "pixels", waiting("pixels", "headers", decoder.pixels))
        monkeypatch.setattr(ours.augment, "render", waiting("render", "pixels", ours.augment.render))
        assert len(list(ours)) == 10


def test_two_decoders_work_at_the_same_time(photos, expected, monkeypatch):
    """As on CUDA. The first batch and the last are decoded alone, all others in pairs."""
    with loader(photos) as ours:
        decoders, met, numbers = ours.pipeline.decoders, threading.Barrier(2), itertools.count()
        decoders.count = 2
        for decoder in (decoders.get(0), decoders.get(1)):

            def pixels_of(*given, work=decoder.pixels):
                if 0 < next(numbers) < 9:
                    met.wait(timeout=30)
                return work(*given)

            monkeypatch.setattr(decoder, "pixels", pixels_of)
        iterator = iter(ours)
        found = list(iterator)
        assert iterator.decoders == 2
        assert [batch.indices.tolist() for batch in found] == [task[0].tolist() for task in loader(photos).epoch_order]
        assert pixels(found) == expected
        assert decoders.get(1) is not decoders.get(0)
        decoders.get(0).use_pillow()
        assert decoders.get(1).backend == "pillow"


def test_an_error_in_one_of_two_decoders_comes_after_the_batches_before(photos, expected, monkeypatch):
    with loader(photos) as ours:
        ours.pipeline.decoders.count = 2
        second, calls = ours.pipeline.decoders.get(1), itertools.count(1)
        work = second.pixels

        def pixels_of(*given):
            if next(calls) == 2:  # batch 3
                raise OSError("the second call")
            return work(*given)

        monkeypatch.setattr(second, "pixels", pixels_of)
        found = []
        with pytest.raises(OSError, match="the second call"):
            for batch in ours:
                found.append(batch)
        assert len(found) == 3
        assert pixels(found).items() <= expected.items()
        found += ours  # goes on with batch 3
        assert pixels(found) == expected


def test_threads_set_their_device_before_they_touch_one(monkeypatch):
    """A new thread's is the first, and using that opens a context there, on every rank."""
    done = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append((threading.current_thread().name, device)))

    def items():
        done.append("begun")
        yield 1

    assert list(Producer(items(), count=1, name="one", device=torch.device("cuda", 1))) == [1]
    assert list(Producer(items(), count=1, name="two", device=torch.device("cpu"))) == [1]
    assert done == [("one", torch.device("cuda", 1)), "begun", "begun"]


def test_epochs_differ_and_can_be_repeated(photos, expected):
    with loader(photos) as ours:
        assert pixels(ours) == expected
        assert ours.epoch == 1
        second = pixels(ours)
        assert second.keys() == expected.keys()
        assert not set(second.values()) & set(expected.values())
        ours.set_epoch(0)
        assert pixels(ours) == expected
        ours.set_epoch(1)
        assert pixels(ours) == second
    with loader(photos, seed=4) as other:
        assert not set(pixels(other).values()) & set(expected.values())


def test_fetch_shows_what_training_sees(photos, expected):
    with loader(photos) as ours:
        batch = ours.fetch([5, 64, 11], epoch=0)
        assert batch.indices.tolist() == [5, 64, 11]
        assert {key: value for key, value in expected.items() if key[0] in (5, 64, 11)} == pixels([batch])
    with loader([(b"", 0)] * 3) as ours, pytest.raises(ConfigError, match=r"`indices` must be .* Found: 3 \(the"):
        ours.fetch([2, 3])


def test_a_batch_is_images_and_labels(photos):
    with loader(photos, dtype="bfloat16", memory_format="channels_last", order="sequential") as ours:
        batch = next(iter(ours))
        images, labels = batch
    assert images.shape == (7, 3, 32, 32)
    assert images.dtype == torch.bfloat16
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert labels.tolist() == [0] * 7
    assert batch.indices.tolist() == list(range(7))
    assert batch.valid.all()
    assert batch.keys[0] == "astronaut/000.jpg"
    assert not images.requires_grad


def ended(threads):
    """Names of the threads that do not end."""
    for thread in threads:
        thread.join(30)
    return [thread.name for thread in threads if thread.is_alive()]


def test_an_abandoned_loader_leaves_nothing(photos):
    others, processes = set(threading.enumerate()), set(multiprocessing.active_children())
    ours = loader(photos, num_workers=2)
    iterator, alive = iter(ours), weakref.ref(ours)
    next(iterator)
    threads = set(threading.enumerate()) - others
    workers = set(multiprocessing.active_children()) - processes
    assert {"gpuaug-loader", "gpuaug-decoding", "gpuaug-headers"} <= {thread.name for thread in threads}
    assert len(workers) == 2
    del iterator, ours
    assert alive() is None
    assert ended(threads) == []
    for worker in workers:
        worker.join(30)
    assert not set(multiprocessing.active_children()) - processes


@pytest.mark.parametrize("prefetch", [0, 3])
def test_errors_of_a_stage_arrive_with_their_own_type(photos, prefetch):
    class Custom(Exception):
        pass

    class Broken:
        def __len__(self):
            return 20

        def __getitem__(self, i):
            if i == 11:
                raise Custom("eleven")
            return (photos / "china" / "000.jpg").read_bytes(), i % 3

    with loader(Broken(), batch_size=4, order="sequential", prefetch=prefetch) as ours:
        seen = []
        with pytest.raises(Custom, match="eleven"):
            for batch in ours:
                seen += batch.indices.tolist()
        assert seen == list(range(8))
        assert ours.state_dict()["position"] == 8


def test_closed_loader(photos):
    ours = loader(photos, drop_last=True)
    assert ours.last == "drop"
    ours.close()
    ours.close()
    with pytest.raises(GpuaugError, match="closed"):
        iter(ours)


def test_state_of_another_recipe_is_refused_inside_an_epoch(photos, caplog):
    with loader(photos) as ours:
        next(iter(ours))
        inside = ours.state_dict()
        ours.set_epoch(0)
        list(ours)
        boundary = ours.state_dict()
    other = recipe(jitter=K.ColorJitter(0.5, 0.3, 0.3, 0.1, p=0.8))
    with loader(photos, augment=other) as theirs:
        with pytest.raises(StateError, match="jitter"):
            theirs.load_state_dict(inside)
        theirs.load_state_dict(boundary)
        assert theirs.epoch == 1
        assert "another configuration" in caplog.text
        with pytest.raises(StateError, match="not a loader state"):
            theirs.load_state_dict({"a": 1})
        with pytest.raises(StateError, match="version"):
            theirs.load_state_dict({**boundary, "version": 99})


def test_log_lines_name_their_loader(photos, caplog, tmp_path):
    """In order, a pass that was left (as by Lightning's sanity check) is begun again without a word."""
    caplog.set_level("INFO", logger="gpuaug")
    shutil.copytree(photos, tmp_path / "photos")
    next((tmp_path / "photos").rglob("*.jpg")).write_bytes(b"no image")
    words = [f"source.root={tmp_path}/photos", "faults.policy=blank", "device=cpu", "augment.crop.size=8"]
    with gpuaug.build(gpuaug.compose("train", words)) as train, gpuaug.build(gpuaug.compose("eval", words)) as val:
        for each in (train, val):
            next(iter(each))
            list(each)
    chosen = [message.partition(": num_workers")[0] for message in caplog.messages if "num_workers" in message]
    assert chosen == ["train", "val"]
    left = [message for message in caplog.messages if "was left" in message]
    assert [message.partition(" was left")[0] for message in left] == ["train: epoch 0"]
    assert [m for m in caplog.messages if "bad samples" in m] == [
        "train: epoch 1: 1 bad samples (policy blank)",
        "val: epoch 1: 1 bad samples (policy blank)",
    ]


def test_a_pass_after_one_that_was_left_is_the_next_epoch(photos, expected, caplog):
    caplog.set_level("INFO", logger="gpuaug")
    with loader(photos) as whole:
        list(whole)
        second = pixels(whole)
    with loader(photos) as ours:
        iter(ours)
        iter(ours)  # nothing was taken of them
        assert ours.epoch == 0
        batches = iter(ours)
        begun = pixels([next(batches), next(batches)])
        inside = ours.state_dict()
        assert (inside["epoch"], inside["position"]) == (0, 14)
        assert "epoch 0 was left" not in caplog.text
        assert pixels(ours) == second
        assert caplog.text.count("epoch 0 was left 8 batches before its end") == 1
        ours.load_state_dict(inside)
        iter(ours)  # keeps the place too
        assert begun | pixels(ours) == expected
        ours.start_at(0, 14)
        next(iter(ours))
        ours.set_epoch(0)  # names the one that is there, whose beginning is wanted
        assert pixels(ours) == expected


def test_states_before_inside_and_after_a_pass(photos, expected):
    with loader(photos, limit_batches=2) as short:
        assert len(short) == len([*short]) == 2
        assert short.epoch == 1
    with loader(photos) as ours:
        sizes = []
        for batch in ours:
            sizes.append(len(batch))
            state = ours.state_dict()
        assert sizes == [7] * 9 + [2]
        assert (state["epoch"], state["position"]) == (1, 0)
        ours.set_epoch(0)
        seen = pixels([next(iter(ours))])
        state = ours.state_dict()
        assert state["position"] == 7
        ours.load_state_dict(state)
        ours.set_epoch(0)  # keeps the position
        assert seen | pixels(ours) == expected
        ours.load_state_dict(state)
        ours.set_epoch(5)
        assert len(pixels(ours)) == 65


@pytest.mark.parametrize("longer", ["first", "second"])
def test_zip_moves_on_to_the_next_epoch(photos, longer):
    with loader(photos, last="drop") as ours:
        for epoch in range(3):
            other = range(len(ours) if longer == "second" else 2)
            pairs = zip(ours, other, strict=False) if longer == "first" else zip(other, ours, strict=False)
            assert len([0 for _ in pairs]) == len(other)
            assert ours.epoch == epoch


def test_after_an_error_the_next_pass_goes_on(photos, expected, tmp_path):
    root = tmp_path / "damaged"
    shutil.copytree(photos, root)
    file = root / "china" / "004.jpg"
    data = file.read_bytes()
    file.write_bytes(b"")
    seen = {}
    with loader(root, batch_size=1) as ours:
        with pytest.raises(DataError, match="china/004.jpg"):
            for batch in ours:
                seen |= pixels([batch])
        file.write_bytes(data)
        assert 0 < len(seen) < 64
        assert not seen.keys() & (rest := pixels(ours)).keys()
        assert seen | rest == expected


def test_settings_cannot_be_assigned(photos):
    import inspect

    with loader(photos) as ours:
        for name in inspect.signature(gpuaug.Loader).parameters:
            before = getattr(ours, name, None)
            with pytest.raises(AttributeError, match=rf"`{name}` .*load_state_dict") as info:
                setattr(ours, name, None)
            assert isinstance(info.value, ConfigError)
            assert getattr(ours, name, None) is before


def test_uneven_ranks_with_as_many_batches_are_not_warned_of(photos, caplog):
    with loader(photos, batch_size=4, rank=0, world_size=2, last="uneven", limit_batches=8) as ours:
        list(ours)
    assert "this epoch has" not in caplog.text


def damage(photos, tmp_path):
    root = tmp_path / "damaged"
    shutil.copytree(photos, root)
    (root / "china" / "004.jpg").write_bytes(b"")
    (root / "coffee" / "001.jpg").write_bytes((root / "coffee" / "001.jpg").read_bytes()[:900])
    (root / "flower" / "002.jpg").unlink()
    (root / "flower" / "002.jpg").symlink_to(root / "nowhere.jpg")
    return root, {"china/004.jpg", "coffee/001.jpg", "flower/002.jpg"}


def test_bad_samples_are_named_and_counted(photos, tmp_path, caplog):
    root, _ = damage(photos, tmp_path)
    with (
        loader(root, order="sequential") as ours,
        pytest.raises(DataError, match="china/004.jpg.*faults.policy") as info,
    ):
        list(ours)
    assert info.value.key == "china/004.jpg"
    faults = gpuaug.Faults(policy="blank", max=1)
    with loader(root, faults=faults) as ours, pytest.raises(gpuaug.FaultBudgetError, match=r"2 bad samples"):
        list(ours)
    with loader(root, faults=gpuaug.Faults(policy="blank"), prefetch=0) as ours:
        list(ours)
        next(batch for batch in ours if not batch.valid.all())  # this pass is left
        list(ours)
    assert re.findall(r"epoch (\d): (\d+) bad samples", caplog.text) == [("0", "3"), ("2", "3")]


@pytest.mark.parametrize("policy", ["blank", "drop"])
def test_bad_samples_are_survived_and_recorded(photos, expected, tmp_path, policy):
    root, bad = damage(photos, tmp_path)
    record = tmp_path / "faults.jsonl"
    with loader(root, faults=gpuaug.Faults(policy=policy, file=str(record))) as ours:
        for _ in range(2):
            ours.set_epoch(0)
            batches = list(ours)
            seen = pixels(batches)
            names = {ours.source.key(i) for i in range(65)} - {ours.source.key(i) for i, _ in seen}
            assert names == bad
            assert seen == {key: value for key, value in expected.items() if key in seen}
            blank = [batch.images[~batch.valid] for batch in batches]
            assert sum(map(len, blank)) == (3 if policy == "blank" else 0)
            assert all((images == 0).all() for images in blank)
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert {line["key"] for line in lines} == bad
    assert len(lines) == 3
    with loader(gpuaug.FolderSource(root, exclude=str(record))) as ours:
        assert pixels(ours) == {key: value for key, value in expected.items() if key in seen}


def test_truncated_images_can_be_accepted(photos, expected, tmp_path):
    root = tmp_path / "truncated"
    shutil.copytree(photos, root)
    whole = (root / "coffee" / "001.jpg").read_bytes()
    (root / "coffee" / "001.jpg").write_bytes(whole[: len(whole) * 2 // 3])
    with loader(root, faults=gpuaug.Faults(truncated="accept")) as ours:
        batches = list(ours)
        assert all(batch.valid.all() for batch in batches)
        seen = pixels(batches)
    changed = {ours.source.key(index) for index, repeat in seen if seen[index, repeat] != expected[index, repeat]}
    assert changed <= {"coffee/001.jpg"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "together"),
        ({"rank": 2, "world_size": 2}, "rank"),
        ({"rank": 0, "world_size": 10**30}, "0 <= rank < world_size < 2"),
        ({"order": gpuaug.Weighted(), "shuffle": False}, "shuffle"),
        ({"drop_last": True, "last": "pad"}, "drop_last"),
    ],
)
def test_settings_that_cannot_work(photos, settings, message):
    with pytest.raises(ConfigError, match=message):
        loader(photos, **settings)


def test_samples_excluded_inside_an_epoch_move_no_other(photos, expected, tmp_path):
    with loader(photos) as first:
        batches = iter(first)
        done = pixels([next(batches) for _ in range(3)])
        state = first.state_dict()
    gone = [*sorted(done)[:5], *sorted(set(expected) - set(done))[:4]]
    record = tmp_path / "excluded.jsonl"
    record.write_text("".join(json.dumps({"key": first.source.key(index)}) + "\n" for index, _ in gone))

    def rest(**source):
        with loader(gpuaug.FolderSource(photos, **source), batch_size=4) as second:
            second.load_state_dict(state)
            return pixels(second)

    assert rest().keys() == expected.keys() - done.keys()
    assert rest(exclude=str(record)).keys() == expected.keys() - done.keys() - set(gone)
    half = rest(subset=30).keys()
    with loader(gpuaug.FolderSource(photos, subset=30)) as part:
        assert half == {(int(i), 0) for i in part.source.indices} - done.keys()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (list(range(20)), list(range(19, -1, -1))),
        (gpuaug.Weighted([1.0] * 65), gpuaug.Weighted([1.0] * 64 + [9.0])),
    ],
)
def test_another_order_of_the_same_kind_is_refused_inside_an_epoch(photos, one, other):
    with loader(photos, order=one) as first, loader(photos, order=other) as second, loader(photos, order=one) as third:
        next(iter(first))
        state = first.state_dict()
        with pytest.raises(StateError, match="order"):
            second.load_state_dict(state)
        assert second.state_dict()["position"] == 0
        third.load_state_dict(state)
        assert len(pixels(third)) > 0


@pytest.mark.parametrize(
    "change",
    [
        {"position": 10**6},
        {"version": 0},
        {"order": "x"},
        {"fingerprint": {}},
        {"more": {1}},
    ],
)
def test_a_refused_state_changes_nothing(photos, change):
    with loader(photos) as ours:
        batches = iter(ours)
        next(batches)
        before = ours.state_dict()
        with pytest.raises(StateError, match="was changed after|this gpuaug reads"):
            ours.load_state_dict({**before, **change})
        for forged in ({**before, "after": -1}, {**before, "position": 10**30}):
            with pytest.raises(StateError):
                ours.load_state_dict({**forged, "checksum": checksum(forged)})
        assert ours.state_dict() == before
        ours.load_state_dict(json.loads(json.dumps(before)))


@pytest.mark.parametrize("how", ["close", "iter", "set_epoch", "load_state_dict"])
def test_ended_from_another_thread(photos, how):
    data = (photos / "china" / "000.jpg").read_bytes()
    reading, read = threading.Event(), []

    class Slow:
        def __len__(self):
            return 40

        def __getitem__(self, i):
            read.append(i)
            if i >= 4:
                reading.set()
            if i == 4 or i >= 8:  # the rest of this batch is read in any case
                time.sleep(0.5)
            return data, 0

    ours = loader(Slow(), batch_size=4, order="sequential", prefetch=1)
    state = ours.state_dict()

    def end():
        reading.wait(100)
        {"close": ours.close, "iter": lambda: iter(ours), "set_epoch": lambda: ours.set_epoch(3)}.get(
            how, lambda: ours.load_state_dict(state)
        )()

    other = threading.Thread(target=end)
    other.start()
    with pytest.raises(GpuaugError, match="iterator has ended"):
        for _ in ours:
            pass
    assert max(read) < 39  # it did not go on to the end
    other.join(100)
    assert not other.is_alive()
    ours.close()


def test_mix_of_labels_that_only_reading_shows(photos):
    data = (photos / "china" / "000.jpg").read_bytes()

    class MultiLabel:
        def __len__(self):
            return 8

        def __getitem__(self, i):
            return data, [1.0, 0.0, float(i % 2)]

    with loader(MultiLabel(), batch_size=4, mix=Mix(mixup_alpha=1.0)) as ours:
        assert next(iter(ours)).labels.shape == (4, 3)


def test_two_sources_share_a_record_and_padding_counts_once(photos, tmp_path):
    root, bad = damage(photos, tmp_path)
    record = tmp_path / "faults.jsonl"
    other = tmp_path / "other"
    (other / "a").mkdir(parents=True)
    (other / "a" / "bad.jpg").write_bytes(b"nothing")
    (other / "a" / "good.jpg").write_bytes((photos / "china" / "000.jpg").read_bytes())
    with loader(root, faults=gpuaug.Faults(policy="blank", file=str(record))) as ours:
        list(ours)
    with loader(other, faults=gpuaug.Faults(policy="blank", file=str(record), max=1), last="pad", batch_size=8) as ours:
        assert [int(batch.valid.sum()) for batch in ours] == [1]
    assert {json.loads(line)["key"] for line in record.read_text().splitlines()} == bad | {"a/bad.jpg"}


def test_a_record_whose_last_line_is_incomplete_is_continued(tmp_path):
    record = tmp_path / "faults.jsonl"
    record.write_text('{"key": "a"}\n{"key": "b')
    faults = gpuaug.Faults(policy="blank", file=record)
    faults.handle([Fault(0, "read", "gone")], indices=[7], epoch=0, key_of=str)
    *old, new = record.read_text().splitlines()
    assert old == ['{"key": "a"}', '{"key": "b']
    assert json.loads(new)["key"] == "7"
