"""The order of an epoch: permutations, a rank's share, last batches, positions, resumption."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, Subset, WeightedRandomSampler

from gpuaug import source as sources
from gpuaug.errors import ConfigError
from gpuaug.random import keyed as draw
from gpuaug.read.order import (
    Buckets,
    EpochOrder,
    Grouped,
    Ordered,
    Repeated,
    Sequential,
    Shuffle,
    Weighted,
    adapt,
)
from gpuaug.source.adapt import adapt as adapt_source


class Source(sources.Source):
    """As much of a source as an order looks at."""

    def __init__(self, count, indices=None, labels=None, image_ids=None):
        self.count = count
        self.image_ids = None if image_ids is None else torch.tensor(image_ids)
        self.indices = None if indices is None else torch.tensor(indices)
        self.labels = None if labels is None else torch.tensor(labels)

    def __len__(self):
        return self.count if self.indices is None else len(self.indices)


def ordered(order, seed, epoch, source):
    return Ordered(order.order(seed, epoch, source))


def share(epoch, rank, **settings):
    """All that a rank gets: indices, repeats, valid, one after the other, and the batch sizes."""
    batches = list(EpochOrder(epoch, rank=rank, **settings))
    joined = [torch.cat([batch[part] for batch in batches]).tolist() if batches else [] for part in range(3)]
    return [*joined, [len(batch[0]) for batch in batches]]


sizes = st.fixed_dictionaries(
    {"total": st.integers(0, 70), "world_size": st.integers(1, 9), "batch_size": st.integers(1, 20)}
)


@given(sizes, st.floats(0, 1))
@settings(max_examples=150, deadline=None)
def test_uneven_gives_every_sample_once(size, begin):
    total, ranks = size["total"], size["world_size"]
    start = int(begin * total)
    epoch = ordered(Shuffle(), 1, 2, Source(total))
    parts = [
        share(epoch, r, start=start, world_size=ranks, batch_size=size["batch_size"], last="uneven")
        for r in range(ranks)
    ]
    assert sorted(i for part in parts for i in part[0]) == sorted(epoch.indices[start:].tolist())
    assert all(all(part[2]) for part in parts)
    for rank, part in enumerate(parts):
        assert part[0] == epoch.indices[start:][rank::ranks].tolist()
        assert all(b == size["batch_size"] for b in part[3][:-1])
        assert all(0 < b <= size["batch_size"] for b in part[3])
    lengths = [len(part[0]) for part in parts]
    assert max(lengths) - min(lengths) <= 1


@given(sizes, st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_drop_and_pad_give_all_ranks_equal_full_batches(size, begin):
    total, ranks, b = size["total"], size["world_size"], size["batch_size"]
    start = int(begin * total)
    epoch = ordered(Shuffle(), 1, 2, Source(total))
    rest = epoch.indices[start:].tolist()
    for last in ("drop", "pad"):
        parts = [share(epoch, r, start=start, world_size=ranks, batch_size=b, last=last) for r in range(ranks)]
        assert all(part[3] == parts[0][3] for part in parts)
        assert set(parts[0][3]) <= {b}
        valid = [i for part in parts for i, ok in zip(part[0], part[2], strict=True) if ok]
        assert len(set(valid)) == len(valid)
        if last == "drop":
            assert all(all(part[2]) for part in parts)
            assert sorted(valid) == sorted(rest[: len(rest) // (b * ranks) * b * ranks])
        else:
            assert sorted(valid) == sorted(rest)
            together = [x for step in range(len(parts[0][0])) for x in (part[0][step] for part in parts)]
            assert together[: len(rest)] == rest
            wrapped = epoch.indices.tolist() * (1 + len(together))
            assert together[len(rest) :] == wrapped[: len(together) - len(rest)]
            pairs = [pair for part in parts for pair in zip(part[0], part[1], strict=True)]
            if start == 0:  # a filler is one more occurrence of its sample
                assert len(set(pairs)) == len(pairs)
            for part in parts:
                assert all((again > 0) == (not ok) for again, ok in zip(part[1], part[2], strict=True))


@given(sizes, st.integers(0, 8), st.integers(1, 9), st.integers(1, 20), st.sampled_from(["uneven", "drop", "pad"]))
@settings(max_examples=150, deadline=None)
def test_a_resume_with_other_ranks_goes_on_with_the_very_next_sample(size, k, ranks, b, last):
    total = size["total"]
    epoch = ordered(Shuffle(), 4, 0, Source(total))
    before = [EpochOrder(epoch, rank=r, last=last, **_run(size)) for r in range(size["world_size"])]
    k = min(k, max(map(len, before)))
    seen = []
    for part in before:
        for step in range(min(k, len(part))):
            indices, _, valid = part[step]
            seen += indices[valid].tolist()
    position = before[0].position(k)
    assert all(part.position(k) == position for part in before)
    assert sorted(seen) == sorted(epoch.indices[:position].tolist())
    rest = [share(epoch, r, start=position, world_size=ranks, batch_size=b, last="uneven")[0] for r in range(ranks)]
    assert sorted(seen + [i for part in rest for i in part]) == list(range(total))


def _run(size):
    return {name: size[name] for name in ("world_size", "batch_size")}


def test_types_limits_and_empty_epochs():
    epoch = ordered(Sequential(), 0, 0, Source(10))
    plan = EpochOrder(epoch, start=1, rank=1, world_size=2, batch_size=2)
    assert [x.dtype for x in plan[0]] == [torch.int64, torch.int64, torch.bool]
    for k in (2, -1):
        with pytest.raises(IndexError):
            plan[k]
    short = EpochOrder(epoch, start=3, batch_size=2, limit=4)
    assert [batch[0].tolist() for batch in short] == [[3, 4], [5, 6]]  # two batches are before `start`
    assert len(EpochOrder(epoch, start=9, batch_size=2, limit=4)) == 0
    for last in ("uneven", "drop", "pad"):
        empty = EpochOrder(ordered(adapt([]), 0, 0, Source(4)), last=last)
        assert list(empty) == []
        assert empty.position(3) == 0


def test_a_batch_does_not_keep_the_epoch_alive():
    epoch = ordered(Shuffle(), 0, 0, Source(1000))
    indices, repeats, _ = EpochOrder(epoch, batch_size=10)[3]
    assert indices.untyped_storage().nbytes() == 80
    assert repeats.untyped_storage().nbytes() == 80
    indices.zero_()
    assert epoch.indices.unique().numel() == 1000


def test_a_shuffle_is_a_permutation_of_seed_and_epoch():
    source = Source(1000)
    orders = {(seed, epoch): Shuffle().order(seed, epoch, source) for seed in range(3) for epoch in range(3)}
    for one, first in orders.items():
        assert sorted(first.tolist()) == list(range(1000))
        assert first.dtype == torch.int64
        for other, second in orders.items():
            same = int((first == second).sum())
            assert same == 1000 if one == other else same < 10
    values = draw.integers("order", seed=2, epoch=1, count=1000)
    assert orders[2, 1].tolist() == sorted(range(1000), key=lambda i: values[i])
    assert torch.equal(ordered(Shuffle(), 2, 1, source).indices, orders[2, 1])


@given(st.sets(st.integers(0, 60), min_size=1))
@settings(max_examples=30, deadline=None)
def test_leaving_samples_out_keeps_the_order_of_the_others(active):
    whole = Shuffle().order(5, 6, Source(61)).tolist()
    some = Shuffle().order(5, 6, Source(61, indices=sorted(active))).tolist()
    assert some == [i for i in whole if i in active]
    assert Sequential().order(0, 0, Source(61, indices=sorted(active))).tolist() == sorted(active)


def test_no_global_generator_moves():
    def states():
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()

    before = states()
    source = Source(50, labels=[i % 3 for i in range(50)])
    for order in ("shuffle", Weighted(), Repeated()):
        ordered(adapt(order), 0, 0, source)
    assert states() == before


def test_weighted_by_class_draws_every_class_equally_often():
    labels = [0] * 900 + [1] * 90 + [2] * 10
    source = Source(1000, labels=labels)
    drawn = torch.cat([Weighted().order(0, epoch, source) for epoch in range(20)])
    assert len(drawn) == 20_000
    counts = np.bincount(np.array(labels)[drawn.numpy()])
    assert np.abs(counts - 20_000 / 3).max() < 4 * np.sqrt(20_000 * 2 / 9)
    inside = np.bincount(drawn[drawn < 900].numpy(), minlength=900)
    assert inside.var() / inside.mean() == pytest.approx(1, abs=0.25)
    assert repr(Weighted()) == "Weighted(weights=class)"


def test_weighted_by_given_weights(tmp_path):
    weights = np.array([0.0, 1.0, 0.0, 3.0, 0.0])
    np.save(tmp_path / "w.npy", weights)
    (tmp_path / "w.txt").write_text("0 1\n0 3 0\n")
    (tmp_path / "w.json").write_text("[0, 1.0, 0, 3, 0]")
    expected = Weighted(weights).order(1, 2, Source(5))
    many = torch.cat([Weighted(weights).order(1, e, Source(5)) for e in range(1000)])
    assert set(many.tolist()) == {1, 3}
    assert (many == 3).float().mean().item() == pytest.approx(0.75, abs=0.03)
    for name in ("w.npy", "w.txt", "w.json"):
        order = Weighted(tmp_path / name)
        assert torch.equal(order.order(1, 2, Source(5)), expected)
        assert repr(order) == repr(Weighted(weights)) != repr(Weighted(weights + 1))
    # by number under a subset, by place where there are as many weights as active samples
    assert set(Weighted(weights).order(0, 0, Source(5, indices=[0, 2, 3])).tolist()) == {3}
    assert set(Weighted([0.0, 0, 1]).order(0, 0, Source(5, indices=[0, 2, 3])).tolist()) == {3}
    for bad, source in (
        ([1.0, 2.0], Source(5)),
        ([1.0] * 6, Source(5)),
        ([1.0] * 2, Source(9, indices=[0, 1, 8])),
        ([0.0] * 5, Source(5)),
        ("class", Source(5)),
    ):
        with pytest.raises(ConfigError, match=r"order\.weights"):
            Weighted(bad).order(0, 0, source)
    for bad in ([1.0, -1.0], [float("nan")], [[1.0]]):
        with pytest.raises(ConfigError, match=r"order\.weights"):
            Weighted(bad)


@given(st.integers(1, 40), st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_repeated_shows_a_part_of_the_samples_several_times(total, repeats):
    epoch = ordered(Repeated(repeats=repeats), 0, 3, Source(total))
    shuffled = Shuffle().order(0, 3, Source(total)).tolist()
    assert epoch.indices.tolist() == [i for i in shuffled for _ in range(repeats)][:total]
    assert epoch.repeats.tolist() == [k % repeats for k in range(total)]
    with pytest.raises(ConfigError, match=r"order\.repeats"):
        Repeated(repeats=0)


def grouped(order, ratios, samples, edges):
    """Fills a list for each bucket, as torchvision's GroupedBatchSampler does; the rest comes last, in its order."""
    full, lists = [], {}
    for i in order:
        bucket = sum(ratios[i] >= edge for edge in edges)
        lists.setdefault(bucket, []).append(i)
        if len(lists[bucket]) == samples:
            full += lists.pop(bucket)
    return [*full, *(i for i in order if i not in full)]


@given(st.lists(st.floats(0.2, 5), max_size=60), st.integers(1, 9), st.sampled_from([(1.0,), (0.5, 1, 2), ()]))
@settings(max_examples=80, deadline=None)
def test_buckets_are_those_of_a_slow_loop(ratios, samples, edges):
    source = Source(len(ratios))
    order = Buckets(samples, edges=edges, ratios=ratios)
    for epoch in range(2):
        shuffled = Shuffle().order(3, epoch, source).tolist()
        found = order.order(3, epoch, source).tolist()
        assert found == grouped(shuffled, ratios, samples, edges)
        assert sorted(found) == list(range(len(ratios)))


@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 12), (1, 4), (3, 4), (2, 3), (3, 2)])
def test_all_ranks_work_on_one_bucket_in_each_step(ranks, batch_size):
    """Also after a resume with other ranks: the order does not depend on them."""
    ratios = np.random.default_rng(0).choice([0.7, 1.4], 500)
    epoch = ordered(Buckets(12, ratios=ratios), 0, 5, Source(500))
    mixed = 0
    for start in (0, 144):
        shares = [EpochOrder(epoch, start=start, rank=r, world_size=ranks, batch_size=batch_size) for r in range(ranks)]
        for k in range(min(map(len, shares))):
            shown = {ratios[i] for own in shares for i in own[k][0].tolist()}
            mixed += len(shown) > 1
    assert mixed <= 2 * 24 / (ranks * batch_size)  # what is left at the end of an epoch


def test_buckets_of_a_subset_and_wrong_settings():
    source = Source(6, indices=[1, 2, 4, 5])
    by_number, own = Buckets(2, ratios=[9, 0.5, 2, 9, 0.5, 2]), Buckets(2, ratios=[0.5, 2, 0.5, 2])
    assert own.order(0, 0, source).tolist() == by_number.order(0, 0, source).tolist()
    pairs = own.order(0, 0, source).reshape(2, 2).sort().values.tolist()
    assert sorted(pairs) == [[1, 4], [2, 5]]
    assert repr(own) != repr(by_number)
    with pytest.raises(ConfigError, match="`order.samples` must be"):
        Buckets(0)
    with pytest.raises(ConfigError, match="`order.edges` must be ascending"):
        Buckets(2, edges=[1, 0.5])
    with pytest.raises(ConfigError, match="`order.ratios` must be a FILE or one number per sample. Found"):
        Buckets(2, ratios=[1, float("nan")])
    with pytest.raises(ConfigError, match="`order.ratios` must hold one number per sample of the source: 6. Found: 2"):
        Buckets(2, ratios=[1, 2]).order(0, 0, Source(6))
    with pytest.raises(ConfigError, match="knows the sizes of its images .* Set `order.ratios` to a FILE"):
        Buckets(2).order(0, 0, Source(6))


@given(st.lists(st.integers(-3, 20), min_size=1, max_size=60), st.integers(1, 12), st.randoms())
@settings(max_examples=80, deadline=None)
def test_groups_are_those_of_a_slow_loop(ids, streams, rng):
    ids.append(ids[0])
    everything, some = range(len(ids)), sorted(rng.sample(range(len(ids)), rng.randint(1, len(ids))))
    for epoch in range(2):
        shuffled = Shuffle().order(3, epoch, Source(len(ids))).tolist()
        images = [ids[i] for i in shuffled if ids.index(ids[i]) == i]
        for numbers, indices in ((everything, None), (some, some)):
            row = iter([i for image in images for i in numbers if ids[i] == image])
            want = {place: next(row) for k in range(streams) for place in range(k, len(numbers), streams)}
            found = Grouped(streams).order(3, epoch, Source(len(ids), indices, image_ids=ids))
            assert found.tolist() == [want[place] for place in range(len(numbers))]


@pytest.mark.parametrize(
    ("streams", "ranks", "least"),
    [(1, 1, 0.98), (8, 1, 0.87), (8, 2, 0.93), (8, 4, 0.96), (8, 8, 0.97), (8, 16, 0.6), (16, 16, 0.97), (8, 3, 0.3)],
)
def test_samples_of_an_image_meet_in_a_batch(streams, ranks, least):
    """The share of the decodes that are saved, of those that one decode per image would save."""
    ids = np.repeat(np.arange(2000), np.random.default_rng(0).geometric(1 / 2.6, 2000))
    source, start, saved = Source(len(ids), image_ids=ids), 1001, []
    for order in (Grouped(streams), Shuffle()):
        epoch = ordered(order, 0, 1, source)
        shares = [EpochOrder(epoch, start=start, rank=r, world_size=ranks, batch_size=64) for r in range(ranks)]
        decoded = sum(len(np.unique(ids[batch])) for share in shares for batch, _, _ in share)
        shown = ids[epoch.indices[start:]]
        saved.append((len(shown) - decoded) / (len(shown) - len(np.unique(shown))))
    assert saved[0] >= least
    assert saved[1] < 0.05


def test_groups_need_several_samples_of_an_image():
    for ids in (None, [3, 4, 5]):
        with pytest.raises(ConfigError, match="several samples of one image.* `source.unit=object` .*`order=shuffle`"):
            Grouped().order(0, 0, Source(3, image_ids=ids))
    one_each = Grouped().order(0, 0, Source(4, [0, 2], None, [7, 7, 8, 8]))
    assert sorted(one_each.tolist()) == [0, 2]
    with pytest.raises(ConfigError, match="`order.streams` must be"):
        Grouped(0)


@given(st.lists(st.integers(0, 8), max_size=40))
@settings(max_examples=60, deadline=None)
def test_repeats_count_earlier_occurrences(numbers):
    epoch = Ordered(torch.tensor(numbers, dtype=torch.int64))
    assert epoch.repeats.tolist() == [numbers[:k].count(i) for k, i in enumerate(numbers)]


def test_positions_and_weights_of_a_torch_subset_follow_its_own_order():
    source = adapt_source(Subset(range(20), [7, 3, 11]))
    for positions in ([0, 2, 1], (0, 2, 1), np.array([0, 2, 1], dtype=np.uint8), torch.tensor([0, 2, 1])):
        assert adapt(positions).order(0, 0, source).tolist() == [7, 11, 3]
        assert repr(adapt(positions)) == repr(adapt([0, 2, 1])) != repr(adapt([0, 1, 2]))
    assert adapt([1, 1, 0]).order(0, 0, source).tolist() == [3, 3, 7]
    assert adapt([]).order(0, 0, source).tolist() == []
    assert Weighted([0.0, 0.0, 1.0]).order(0, 0, source).tolist() == [11] * 3
    by_number = [float(i == 3) for i in range(20)]
    assert Weighted(by_number).order(0, 0, source).tolist() == [3] * 3


def test_what_is_no_order():
    source = Source(20)
    with pytest.raises(ConfigError, match=r"0 \.\. 19.*Found: 0 \.\. 20"):
        adapt(range(21)).order(0, 0, source)
    for bad in (
        "random", 3, None, iter([1]), {"a": 1}, [0.5], [True], [[1], [2, 3]], [[1]], [2**70],
        torch.tensor(1), RandomSampler(range(20)), BatchSampler([1, 2], 2, False),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"`order` must be.*method `order\(seed, epoch, source\)`"):
            adapt(bad)
    with pytest.raises(ConfigError, match="order=weighted"):
        adapt(WeightedRandomSampler([1.0] * 20, 30))
    assert adapt("shuffle") == Shuffle() == adapt(Shuffle())
    assert adapt("sequential") == Sequential()
    assert repr(adapt("shuffle")) == "Shuffle()"
