"""The policies of torchvision and timm: their pixels for the same choices, and their distributions of choices."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from PIL import Image
from torch import nn

import gpuaug
from gpuaug.augment.policy import OneOf, prepare
from gpuaug.errors import ConfigError

DRAWS = 10_000
SIZE = (40, 56)  # H, W
TORCHVISION = {
    "randaugment": lambda: gpuaug.RandAugment(interpolation="bilinear"),
    "randaugment strong": lambda: gpuaug.RandAugment(3, 20, fill=(10, 200, 30)),
    "randaugment bicubic": lambda: gpuaug.RandAugment(2, 5, 11, "bicubic"),
    "trivialaugment": lambda: gpuaug.TrivialAugmentWide(),
    "autoaugment": lambda: gpuaug.AutoAugment(interpolation="bilinear"),
    "autoaugment cifar10": lambda: gpuaug.AutoAugment("cifar10"),
    "augmix": lambda: gpuaug.AugMix(),
    "augmix deep": lambda: gpuaug.AugMix(8, 2, 4, all_ops=False, interpolation="nearest"),
}
TIMM = (
    "rand-m9-mstd0.5-inc1", "rand", "rand-m15-n3-mmax30-p0.8", "rand-m6-n4-mstd101-inc1",
    "original", "originalr-mstd0.5", "v0-mstd0.5", "v0r", "augmix", "augmix-m5-w2-d2-mstd0.5",
)  # fmt: skip
POLICIES = TORCHVISION | {name: lambda name=name: gpuaug.TimmAugment(name) for name in TIMM}
# names of torchvision and timm; timm's relative translations and `Increasing` are the same operations
NAMES = {
    "Identity": "identity", "ShearX": "shear_x", "ShearY": "shear_y", "TranslateX": "translate_x",
    "TranslateY": "translate_y", "Rotate": "rotate", "Brightness": "brightness", "Color": "color",
    "Contrast": "contrast", "Sharpness": "sharpness", "Posterize": "posterize", "Solarize": "solarize",
    "SolarizeAdd": "solarize_add", "AutoContrast": "auto_contrast", "Equalize": "equalize", "Invert": "invert",
}  # fmt: skip
WITHOUT = {"Identity", "AutoContrast", "Equalize", "Invert"}
FACTORS = {"Brightness", "Color", "Contrast", "Sharpness"}
THEIRS = {name: theirs for theirs, name in NAMES.items()}
Step = tuple[str, float, str]  # name, PillowOp's magnitude, interpolation


@pytest.fixture(scope="module")
def libraries(v2) -> tuple[Any, Any]:
    """torchvision.transforms.autoaugment and timm.data.auto_augment."""
    import timm.data.auto_augment
    import torchvision.transforms.autoaugment

    return torchvision.transforms.autoaugment, timm.data.auto_augment


def theirs_for(name: str, libraries: tuple[Any, Any]) -> Any:
    """The library's own policy with the same arguments, as in its training script."""
    torchvision, timm = libraries
    op = POLICIES[name]()
    if name in TIMM:
        hparams = {"translate_const": 100, "img_mean": (124, 116, 104), "interpolation": Image.Resampling.BICUBIC}
        if name.startswith("rand"):
            return timm.rand_augment_transform(name, hparams)
        if name.startswith("augmix"):
            return timm.augment_and_mix_transform(name, hparams | {"translate_pct": 0.3})
        return timm.auto_augment_transform(name, hparams)
    kind = getattr(torchvision, type(op).__name__)
    names = kind.__init__.__code__.co_varnames[1 : kind.__init__.__code__.co_argcount]
    given = {k: getattr(op, k) for k in names}
    given["interpolation"] = torchvision.InterpolationMode(op.interpolation)
    if "policy" in given:
        given["policy"] = torchvision.AutoAugmentPolicy(op.policy)
    return kind(**given)


def chosen_for(op: nn.Module, count: int, *, seed: int = 0, size: tuple[int, int] = SIZE) -> tuple[Any, Any]:
    prepared = prepare("policy", op)
    u = np.random.default_rng(seed).integers(0, 2**24, (count, prepared.count)).astype(np.float32) * np.float32(2**-24)
    return prepared, prepared.draw(u, size)


def steps_of(prepared: Any, chosen: Any) -> list[list[Step]]:
    """For each sample, the operations of its slots in order."""
    samples: list[list[Step]] = [[] for _ in chosen.choice]
    for slot, modules in enumerate(prepared.slots):
        values = [params["magnitude"] for params in chosen.params[slot]]
        for row, alternative in enumerate(chosen.choice[:, slot].tolist()):
            if alternative >= 0:
                module: Any = modules[alternative]
                samples[row].append((module.name, float(values[alternative][row]), module.interpolation))
    return samples


# --- pixels


def applied(step: Step, image: Image.Image, fill: Any, library: str, libraries: tuple[Any, Any]) -> Image.Image:
    """One operation by the library's own function."""
    torchvision, timm = libraries
    name, magnitude, interpolation = step
    theirs = THEIRS[name]
    if name == "posterize" and magnitude == 0:  # Pillow 13 refuses it; older releases make the image black
        return Image.new("RGB", image.size)
    if library == "torchvision":
        magnitude -= theirs in FACTORS
        mode = torchvision.InterpolationMode(interpolation)
        return torchvision._apply_op(image, theirs, magnitude, interpolation=mode, fill=list(fill))
    relative = {"TranslateX": ("TranslateXRel", image.width), "TranslateY": ("TranslateYRel", image.height)}
    if theirs in relative:
        theirs, extent = relative[theirs]
        magnitude = -magnitude / extent
    whole = theirs.startswith(("Posterize", "Solarize"))
    arguments = () if theirs in WITHOUT else (int(magnitude) if whole else magnitude,)
    resample = getattr(Image.Resampling, interpolation.upper())
    return timm.NAME_TO_OP[theirs](image, *arguments, fillcolor=tuple(fill), resample=resample)


def expected(
    name: str, op: Any, prepared: Any, chosen: Any, image: Image.Image, row: int, libraries: Any
) -> np.ndarray:
    library = "timm" if name in TIMM else "torchvision"
    own = slice(row, row + 1)

    def run(slots: range) -> np.ndarray:
        made = image
        for slot in slots:
            alternative = chosen.choice[row, slot]
            if alternative >= 0:
                module = prepared.slots[slot][alternative]
                value = float(chosen.params[slot][alternative]["magnitude"][row])
                made = applied((module.name, value, module.interpolation), made, op.fill, library, libraries)
        return np.asarray(made)

    if not prepared.chains:
        return run(range(len(prepared.slots)))
    depth = len(prepared.slots) // prepared.chains
    chains = [run(range(k, k + depth)) for k in range(0, len(prepared.slots), depth)]
    mix, *shares = chosen.weights[own][0]
    if library == "timm":  # as its AugMixAugment._apply_basic
        mixed = np.zeros(np.shape(image), dtype=np.float32)
        for share, chain in zip(shares, chains, strict=True):
            mixed += share * chain.astype(np.float32)
        return np.asarray(Image.blend(image, Image.fromarray(np.clip(mixed, 0, 255).astype(np.uint8)), float(mix)))
    total = (1 - torch.tensor(mix)) * torch.from_numpy(np.array(image))  # as its AugMix.forward
    for share, chain in zip(shares, chains, strict=True):
        total.add_(torch.tensor(share) * torch.tensor(mix) * torch.from_numpy(chain.copy()))
    return total.to(torch.uint8).numpy()


@pytest.mark.parametrize("name", POLICIES)
def test_pixels_are_the_librarys_for_the_same_choices(name, libraries, photo_batch) -> None:
    op = POLICIES[name]()
    images = photo_batch[:8].repeat(3, 1, 1, 1)
    prepared, chosen = chosen_for(op, len(images), size=tuple(images.shape[1:3]))
    recipe = gpuaug.Augment(ops={"policy": op})
    got = recipe.run(images, [chosen]).mul(255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    want = np.stack([
        expected(name, op, prepared, chosen, Image.fromarray(image), row, libraries)
        for row, image in enumerate(images.numpy())
    ])  # fmt: skip
    difference = np.abs(got.astype(int) - want)
    # at a tie, torchvision's way to compute a matrix may take the neighbour
    assert (difference > 0).mean() <= (0 if name in TIMM else 1e-3)


# --- distributions


def recorded(name: str, libraries: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, float]]]:
    """What the library itself draws: operations and PillowOp's magnitudes of each sample."""
    torchvision, timm = libraries
    image, samples = Image.new("RGB", SIZE[::-1]), []

    def note(image: Any, op: str, value: float = 0.0) -> Any:
        value = 0.0 if op in WITHOUT else int(value) if op.startswith(("Translate", "Posterize")) else value
        samples[-1].append((NAMES[op], value + (op in FACTORS)))
        return image

    def of_timm(theirs: str) -> Any:
        op = theirs.removesuffix("Increasing").removesuffix("Original").removesuffix("Rel")
        scale = {"TranslateXRel": -SIZE[1], "TranslateYRel": -SIZE[0]}.get(theirs, 1)

        def call(image: Any, value: float = 0.0, **_: Any) -> Any:
            samples[-1].append((NAMES[op], min(value, 8) * scale if op == "Posterize" else value * scale))
            return image

        return call

    monkeypatch.setattr(torchvision, "_apply_op", lambda image, op, value, **_: note(image, op, value))
    for theirs in timm.NAME_TO_OP:
        if theirs.removesuffix("Increasing").removesuffix("Original").removesuffix("Rel") in NAMES:
            monkeypatch.setitem(timm.NAME_TO_OP, theirs, of_timm(theirs))
    transform = theirs_for(name, libraries)
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    for _ in range(DRAWS // 3 if "augmix" in name else DRAWS):
        samples.append([])
        transform(image)
    return samples


def same_counts(ours: Counter, theirs: Counter) -> None:
    """Chi-squared test of two tables; what occurs rarely counts as one."""
    assert sum(ours.values())
    assert sum(theirs.values())
    whole = ours + theirs
    table = [[c[key] for key in whole if whole[key] >= 20] for c in (ours, theirs)]
    rest = [sum(c[key] for key in whole if whole[key] < 20) for c in (ours, theirs)]
    columns = np.array([[*row, extra] for row, extra in zip(table, rest, strict=True)])
    columns = columns[:, columns.sum(0) > 0]
    if columns.shape[1] > 1:
        assert scipy.stats.chi2_contingency(columns).pvalue > 1e-4, (ours, theirs)


def magnitudes(samples: list[list[Any]]) -> dict[str, np.ndarray]:
    found: dict[str, list[float]] = {}
    for sample in samples:
        for name, value, *_ in sample:
            found.setdefault(name, []).append(value)
    return {name: np.round(np.array(values, dtype=np.float32), 3) for name, values in found.items()}


@pytest.mark.parametrize("name", POLICIES)
def test_operations_and_magnitudes_have_the_librarys_distributions(name, libraries, monkeypatch) -> None:
    theirs = recorded(name, libraries, monkeypatch)
    ours = steps_of(*chosen_for(POLICIES[name](), len(theirs)))
    same_counts(*(Counter(map(len, samples)) for samples in (ours, theirs)))
    same_counts(*(Counter(tuple(step[0] for step in s[:2]) for s in samples) for samples in (ours, theirs)))
    got, want = magnitudes(ours), magnitudes(theirs)
    assert got.keys() == want.keys()
    for op in got.keys() - {NAMES[n] for n in WITHOUT}:
        values, counts = np.unique(want[op], return_counts=True)
        if len(values) <= 2 * 31:
            assert set(np.unique(got[op])) <= set(values) or counts.min() < 20, op
            same_counts(Counter(got[op].tolist()), Counter(want[op].tolist()))
        else:
            assert scipy.stats.ks_2samp(got[op], want[op]).pvalue > 1e-4, op
            assert np.abs(got[op]).max() == pytest.approx(np.abs(want[op]).max(), rel=0.05)


@pytest.mark.parametrize("name", ["augmix", "augmix deep", "augmix-m5-w2-d2-mstd0.5"])
def test_weights_have_the_distributions_of_dirichlet_and_beta(name) -> None:
    prepared, chosen = chosen_for(POLICIES[name](), DRAWS)
    mix, shares = chosen.weights[:, 0], chosen.weights[:, 1:]
    assert shares.shape[1] == prepared.chains
    assert np.allclose(shares.sum(1), 1)
    assert scipy.stats.kstest(mix, "uniform").pvalue > 1e-4
    for share in shares.T:
        assert scipy.stats.kstest(share, scipy.stats.beta(1, prepared.chains - 1).cdf).pvalue > 1e-4
    assert abs(np.corrcoef(mix, shares[:, 0])[0, 1]) < 0.05


def test_random_interpolation_is_bilinear_or_bicubic_for_each_operation() -> None:
    op = gpuaug.TimmAugment("rand-m9-p1-inc1", interpolation="random")
    steps = [step for sample in steps_of(*chosen_for(op, 4000)) for step in sample]
    used = Counter(mode for name, _, mode in steps if name.startswith(("shear", "translate", "rotate")))
    assert used.keys() == {"bilinear", "bicubic"}
    assert scipy.stats.binomtest(used["bicubic"], used.total()).pvalue > 1e-4
    fixed = steps_of(*chosen_for(gpuaug.TimmAugment("rand-m9-p1-inc1"), 4000))
    assert [step[:2] for step in steps] == [step[:2] for sample in fixed for step in sample]


# --- settings


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (lambda: gpuaug.RandAugment(magnitude=-1), ["`magnitude`", "0 to 30", "-1"]),
        (lambda: gpuaug.RandAugment(num_ops=0), ["`num_ops`", "0"]),
        (lambda: gpuaug.TrivialAugmentWide(num_magnitude_bins=1), ["`num_magnitude_bins`", "1"]),
        (lambda: gpuaug.AutoAugment("svhn"), ["`policy`", "one of imagenet, cifar10", "svhn"]),
        (lambda: gpuaug.AutoAugment(interpolation="lanczos"), ["`interpolation`", "bicubic", "lanczos"]),
        (lambda: gpuaug.RandAugment(fill=(1, 2)), ["`fill`", "3", "(1, 2)"]),
        (lambda: gpuaug.RandAugment(fill=300), ["`fill`", "255", "300"]),
        (lambda: gpuaug.RandAugment(fill="gray"), ["`fill`", "gray"]),
        (lambda: gpuaug.AugMix(severity=11), ["`severity`", "11"]),
        (lambda: gpuaug.AugMix(alpha=0.5), ["`alpha`", "must be 1", "0.5"]),
        (lambda: gpuaug.TimmAugment("rand-m-9"), ["`config`", "-mN", "'m' in 'rand-m-9'"]),
        (lambda: gpuaug.TimmAugment("rand-m9-inc"), ["'inc'"]),
        (lambda: gpuaug.TimmAugment("rand-m9-m8"), ["'m8'", "twice"]),
        (lambda: gpuaug.TimmAugment("rand-p2"), ["'p2'"]),
        (lambda: gpuaug.TimmAugment("rand-tweights"), ["`rand` with any of -mN", "tweights"]),
        (lambda: gpuaug.TimmAugment("rand-t3a"), ["threeaugment"]),
        (lambda: gpuaug.TimmAugment("3a"), ["threeaugment"]),
        (lambda: gpuaug.TimmAugment("augmix-b1"), ["'b1'"]),
        (lambda: gpuaug.TimmAugment("augmix-a0.5"), ["'a0.5'"]),
        (lambda: gpuaug.TimmAugment("v1"), ["`v0`", "'v1'"]),
        (lambda: gpuaug.TimmAugment("rand-m9\n"), [r"'m9\n'"]),
        (lambda: gpuaug.TimmAugment("rand-m٩"), ["'m٩'"]),
        (lambda: gpuaug.TimmAugment("rand-m" + 400 * "9"), ["four digits"]),
        (lambda: gpuaug.TimmAugment("rand-n101"), ["100", "'n101'"]),
        (lambda: gpuaug.AugMix(mixture_width=101), ["`mixture_width`", "100", "101"]),
        (lambda: gpuaug.RandAugment(num_magnitude_bins=10**12), ["`num_magnitude_bins`", "2 to 1000"]),
        (lambda: gpuaug.TimmAugment(9), ["`config`", "int"]),
        (lambda: gpuaug.RandAugment()(torch.zeros(1, 3, 8, 8)), ["`ops`", "direct call"]),
    ],
)
def test_wrong_settings_are_refused_with_the_value_found(make, facts) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert all(fact in str(error.value) for fact in facts), error.value


def test_a_policy_is_one_of_several_choices_but_not_augmix(photo_batch) -> None:
    ops = {"rand": gpuaug.RandAugment(), "trivial": gpuaug.TrivialAugmentWide()}
    fused = gpuaug.Augment(ops={"choice": OneOf(ops=ops, p=0.9)})
    assert torch.equal(fused(photo_batch, seed=1), fused.replace(backend="kornia")(photo_batch, seed=1))
    with pytest.raises(ConfigError, match="augmix.*mixes several chains"):
        gpuaug.Augment(ops={"choice": OneOf(ops={**ops, "augmix": gpuaug.AugMix()})})


def test_masks_move_with_geometric_operations_and_augmix_is_refused(photo_batch) -> None:
    masks = torch.arange(photo_batch[..., 0].numel()).view(photo_batch.shape[:3]) % 200
    op = gpuaug.RandAugment(num_ops=1, magnitude=20)
    recipe = gpuaug.Augment(ops={"policy": op})
    _, targets = recipe(photo_batch, masks=masks, seed=5)
    drawn = recipe.draw(seed=5, epoch=0, indices=range(len(masks)))
    ((chosen,),) = recipe.choose(drawn, [tuple(masks.shape[1:])])
    names = [sample[0][0] for sample in steps_of(recipe.prepared[0], chosen)]
    moved = [not torch.equal(a, b) for a, b in zip(targets.masks, masks, strict=True)]
    assert moved == [name.startswith(("shear", "translate", "rotate")) for name in names]
    assert any(moved)
    with pytest.raises(ConfigError, match=r"`augment.ops.mix`.*masks.*AugMix"):
        gpuaug.Augment(ops={"mix": gpuaug.AugMix()})(photo_batch, masks=masks)


# --- augment=timm:...


def test_a_string_of_timm_selects_the_recipe() -> None:
    for value in ("timm:rand-m7-mstd0.5-inc1", "'timm:rand-m7-mstd0.5-inc1'"):
        cfg = gpuaug.compose("train", ["source.root=.", f"augment={value}", "augment.ops.timm.fill=0"])
        assert dict(cfg.augment.ops.timm, _target_="") == {
            "_target_": "", "config": "rand-m7-mstd0.5-inc1", "interpolation": "bicubic", "fill": 0,
        }  # fmt: skip
        assert gpuaug.build(cfg.augment).ops["timm"].config == "rand-m7-mstd0.5-inc1"
    with pytest.raises(ConfigError, match=r"`augment=timm:\.\.\.`.*`original`.*Found: 'random'"):
        gpuaug.compose("train", ["source.root=.", "augment=timm:random"])
