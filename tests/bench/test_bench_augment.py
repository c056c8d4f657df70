"""bench/augment.py: what peers are given, how they are run, and what is written about them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import augment as bench
import augment_peers as peers
import forked
import numpy as np
import pytest
import torch
from conftest import ROOT


def case(recipe: str, batch: int = 6, size: int = 32) -> Any:
    return bench.Case(recipe, batch, size, "cpu", torch.float32)


def views(recipe: str, tmp_path: Path) -> tuple[Any, list[peers.Given]]:
    c = case(recipe)
    np.savez(tmp_path / "in.npz", images=c.images.numpy(), **bench.given(c))
    return peers.read(tmp_path)


@pytest.mark.parametrize("recipe", ["standard_random", "dino", "imagenet"])
def test_a_peer_gets_every_draw(recipe: str, tmp_path: Path) -> None:
    """With Kornia's functions as the peer's, sample by sample, come the pixels of Kornia's modules."""
    import kornia.enhance as E
    from kornia.color import rgb_to_grayscale
    from kornia.filters import gaussian_blur2d

    does: peers.Does = {
        "vflip": lambda x: x.flip(2),
        "flip": lambda x: x.flip(3),
        "brightness": lambda x, factor: (x * factor).clamp(0, 1),
        "contrast": E.adjust_contrast_with_mean_subtraction,
        "saturation": E.adjust_saturation_with_gray_subtraction,
        "hue": lambda x, turns: E.adjust_hue(x, turns * 2 * torch.pi),
        "gray": lambda x: rgb_to_grayscale(x).expand(-1, 3, -1, -1),
        "blur": lambda x, sigma, taps: gaussian_blur2d(x, (taps, taps), (sigma, sigma)),
        "solarize": lambda x, threshold, _: E.solarize(x, threshold),
    }
    images, given = views(recipe, tmp_path)
    assert given[0].one_order == (recipe in ("standard", "imagenet"))
    mean, std = (torch.tensor(v)[:, None, None] for v in (peers.MEAN, peers.STD))
    for view, expected in zip(given, case(recipe).ours("kornia")(), strict=True):
        for k, image in enumerate(images):
            x = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255
            found = (peers.through(x, view, k, does)[0] - mean) / std
            assert (found - expected[k]).abs().max() < 2e-3


def test_a_peer_gets_every_choice_of_a_policy(tmp_path: Path) -> None:
    from gpuaug.augment.ops.pillow import PillowOp

    def policy(x: Any, name: str, magnitude: float) -> Any:
        return PillowOp(name, interpolation="bilinear")(x, {"magnitude": torch.tensor([magnitude])})

    images, (view,) = views("randaugment_torchvision", tmp_path)
    mean, std = (torch.tensor(v)[:, None, None] for v in (peers.MEAN, peers.STD))
    (expected,) = case("randaugment_torchvision").ours("kornia")()
    for k, image in enumerate(images):
        x = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255
        found = peers.through(x, view, k, {"flip": lambda x: x.flip(3), "randaugment": policy})[0]
        assert ((found - mean) / std - expected[k]).abs().max() < 1e-5


NEEDS_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
@pytest.mark.parametrize("variant", bench.VARIANTS["dali"])
def test_dali_reads_the_pixels_where_ours_are(device: str, variant: str) -> None:
    """What it gives follows what is written there, so none of its time goes into bringing pixels to the device."""
    pytest.importorskip("nvidia.dali")
    c = bench.Case("standard", 6, 32, device, torch.float32)
    run = bench.dali(c, variant)
    (first,) = run()
    assert first.device.type == device
    first = first.cpu().clone()
    (expected,) = bench.dali(bench.Case("standard", 6, 32, "cpu", torch.float32), variant)()
    assert (first - expected).abs().max() < (1e-6 if device == "cpu" else 0.1)
    c.images.zero_()
    (black,) = run()
    lowest = -torch.tensor(bench.MEAN) / torch.tensor(bench.STD)
    assert (black.cpu().amin((0, 2, 3)) - lowest).abs().max() < 1e-2
    assert not torch.equal(black.cpu(), first)


def test_the_script_runs_and_writes_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, readme = tmp_path / "augment.json", tmp_path / "README.md"
    script = [sys.executable, str(ROOT / "bench/augment.py")]
    done = forked.run(
        [*script, "--recipe", "imagenet", "standard_random", "--batch", "4", "--size", "32", "--rounds", "1",
         "--peer", "kornia_eager", "dali", "cvcuda", "--json", str(report)],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    rows = {(r["recipe"], r["peer"], r["variant"]): r for r in found["results"]}
    assert rows["imagenet", "fused", ""]["max_difference"] < 2e-5
    assert rows["standard_random", "fused", ""]["max_difference"] < 2e-5
    assert rows["standard_random", "fused_host", ""]["host_microseconds"] > 0
    assert "CUDA" in rows["imagenet", "cvcuda", ""]["reason"]
    assert set(found["ratios"]["imagenet"]) == set(bench.PEERS)
    assert found["ratios"]["imagenet"]["kornia_eager"] == rows["imagenet", "kornia_eager", ""]["fused_ratio"]
    assert found["ratios"]["imagenet"]["cvcuda"] is None
    readme.write_text("# M\n\n## augment.py\n\nprose\n\n## loader.py: end to end\n\nmore\n")
    monkeypatch.setattr(sys, "argv", ["augment.py", "--table", str(report), "--readme", str(readme)])
    for _ in range(2):
        bench.main()
    text = readme.read_text()
    assert text.count("| imagenet | 4 | fused |") == 1
    assert text.index("prose") < text.index("<!-- augment.py on cpu -->") < text.index("## loader.py")
    assert text.endswith("## loader.py: end to end\n\nmore\n")
