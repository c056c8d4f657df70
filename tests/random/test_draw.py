import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuaug.random import keyed as draw
from gpuaug.random.keyed import Stream

# Known answers of philox4x32 with 10 rounds, from Random123's kat_vectors: counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return [np.uint64(int(w, 16)) for w in text.split()]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_known_answers(counter, key, result):
    assert [int(w) for w in draw.philox(words(counter), words(key))] == [int(w) for w in words(result)]


STREAMS = [Stream("", 0, "flip", 1), Stream("", 0, "jitter", 6), Stream("", 1, "jitter", 6), Stream("local", 0, "x", 9)]


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 2**32 - 1),
    indices=st.lists(st.integers(0, 2**62), min_size=1, max_size=9),
    keep=st.sets(st.integers(0, 3), min_size=1),
)
def test_a_value_depends_on_nothing_but_its_key(seed, epoch, indices, keep):
    indices = np.array(indices)
    whole = draw.uniforms(STREAMS, seed=seed, epoch=epoch, indices=indices)
    part = draw.uniforms([STREAMS[k] for k in keep], seed=seed, epoch=epoch, indices=indices[::-1])
    for name, values in part.items():
        assert np.array_equal(values[::-1], whole[name])
        assert values.dtype == np.float32
        assert (values >= 0).all()
        assert (values < 1).all()


def test_every_part_of_the_key_counts():
    one = np.array([5])
    base = draw.uniforms([Stream("v", 0, "op", 8)], seed=1, epoch=2, indices=one)["v", 0, "op"]
    others = [
        draw.uniforms([Stream("w", 0, "op", 8)], seed=1, epoch=2, indices=one),
        draw.uniforms([Stream("v", 1, "op", 8)], seed=1, epoch=2, indices=one),
        draw.uniforms([Stream("v", 0, "po", 8)], seed=1, epoch=2, indices=one),
        draw.uniforms([Stream("v", 0, "op", 8)], seed=2, epoch=2, indices=one),
        draw.uniforms([Stream("v", 0, "op", 8)], seed=1, epoch=3, indices=one),
        draw.uniforms([Stream("v", 0, "op", 8)], seed=1, epoch=2, indices=one + 2**32),
        draw.uniforms([Stream("v", 0, "op", 8)], seed=1, epoch=2, indices=one, repeats=np.array([1])),
    ]
    values = [base] + [next(iter(o.values())) for o in others]
    assert len({v.tobytes() for v in values}) == len(values)


def test_uniform():
    u = draw.uniforms([Stream("", 0, "x", 64)], seed=3, epoch=0, indices=np.arange(4096))["", 0, "x"]
    counts = np.histogram(u, bins=256, range=(0, 1))[0]
    chi2 = ((counts - u.size / 256) ** 2 / (u.size / 256)).sum()
    assert 180 < chi2 < 340  # 255 degrees of freedom: mean 255, standard deviation 22.6
    assert abs(np.corrcoef(u[:, 0], u[:, 1])[0, 1]) < 0.05


def test_field_is_the_same_philox():
    keys = draw.sample_keys(Stream("", 0, "noise", 1), seed=7, epoch=1, indices=np.arange(3))
    values = draw.uniform_field(torch.from_numpy(keys), 10)
    for row in range(3):
        k = [np.uint64(x) for x in keys[row]]
        zero = np.uint64(0)
        expected = [w for block in range(3) for w in draw.philox([np.uint64(block), zero, zero, zero], k)][:10]
        expected = [(float(int(w) >> 8) + 0.5) * 2.0**-24 for w in expected]
        assert values[row].tolist() == pytest.approx(expected, abs=1e-7)


def test_normal_field_is_normal():
    keys = draw.sample_keys(Stream("", 0, "noise", 1), seed=7, epoch=1, indices=np.arange(4))
    values = draw.normal_field(torch.from_numpy(keys), 50001)
    assert values.shape == (4, 50001)
    assert values.mean().abs() < 0.01
    assert (values.std() - 1).abs() < 0.01
    assert (values.abs() < 1.96).float().mean().item() == pytest.approx(0.95, abs=0.003)
    assert torch.equal(draw.normal_field(torch.from_numpy(keys[1:2]), 50001)[0], values[1])


def test_integers_have_no_seams():
    whole = draw.integers("order", seed=4, epoch=2, count=100)
    assert np.array_equal(whole[30:], draw.integers("order", seed=4, epoch=2, count=70, start=30))
    assert len(set(whole.tolist())) == 100


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 2**32 - 1),
    counts=st.lists(st.integers(0, 41), max_size=5),
    samples=st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 65535)), max_size=40),
    repeated=st.booleans(),
)
def test_compiled_and_numpy_draw_the_same_bits(seed, epoch, counts, samples, repeated):
    if draw.library() is None:
        pytest.skip("no C++ compiler here")
    streams = [Stream("view", k, "op", count) for k, count in enumerate(counts)]
    indices, repeats = np.array(samples, dtype=np.int64).reshape(-1, 2).T
    with pytest.MonkeyPatch.context() as patch:
        given_ = {"seed": seed, "epoch": epoch, "indices": indices, "repeats": repeats if repeated else None}
        compiled = draw.uniforms(streams, **given_)
        patch.setattr(draw, "library", lambda: None)
        plain = draw.uniforms(streams, **given_)
    assert compiled.keys() == plain.keys()
    for name, values in compiled.items():
        assert values.shape == (len(samples), counts[name[1]])
        assert values.tobytes() == plain[name].tobytes()
