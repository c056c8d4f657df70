"""Exported recipes: equal to the recipe, read back as written, refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import kornia.augmentation as K
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from pictures import photograph
from torch import nn

import gpuaug
from bench import photographs
from gpuaug.deploy.graph import Evaluation
from gpuaug.errors import ConfigError, GpuaugError
from gpuaug.tools.main import main
from gpuaug.tools.train.model import SmallNet

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NORMALIZE = gpuaug.Normalize(MEAN, STD)
SIZES = [(300, 400), (401, 300), (720, 1281), (1000, 301), (256, 256), (100, 90), (224, 224), (257, 999)]


def images(height: int, width: int, batch: int = 1) -> torch.Tensor:
    """A photograph and its mirror image."""
    pixels = torch.from_numpy(np.array(photograph(size=(width, height)))).permute(2, 0, 1)
    return torch.stack([pixels, pixels.flip(2)])[:batch].contiguous()


def levels(a: torch.Tensor, b: torch.Tensor, std: Any = STD) -> tuple[float, float]:
    """Largest and mean difference, in levels of 255."""
    assert a.shape == b.shape
    difference = (a - b).abs() * torch.tensor(std).view(-1, 1, 1) * 255
    return float(difference.max()), float(difference.mean())


@pytest.fixture(scope="module")
def evaluation() -> gpuaug.Augment:
    return gpuaug.build(gpuaug.compose("eval").augment)


@pytest.fixture(scope="module")
def folder(evaluation: gpuaug.Augment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe `eval` in all forms."""
    made = tmp_path_factory.mktemp("exported")
    (made / "card.md").write_text("---\nlicense: mit\ngpuaug: {old: 1}\ntags: [a]\n---\n# A model\n\n---\ntext\n")
    for name in ("eval.pt2", "eval.onnx", "card.md", "new.md"):
        report = gpuaug.export(evaluation, made / name, classes=["cat", "dog"])
        assert report["fingerprint"] == evaluation.fingerprint()
        assert report.get("largest_difference", 0) < 1.01
    return made


@pytest.mark.parametrize("seed", range(4))
def test_any_crop_gives_the_pixels_of_the_recipe(seed):
    rng = np.random.default_rng(seed)
    for _ in range(12):
        size, resize = (tuple(rng.integers(20, 150, 2).tolist()) for _ in range(2))
        filter = str(rng.choice(["bilinear", "bicubic"]))
        short = int(rng.integers(20, 150))
        crops = [
            None,
            gpuaug.Resize(size, interpolation=filter),
            gpuaug.Resize(short, interpolation=filter),
            gpuaug.Resize(short, max_size=short + int(rng.integers(1, 60)), interpolation=filter),
            gpuaug.ResizeCenterCrop(short, size, interpolation=filter),
            gpuaug.ResizeCenterCrop(resize, size, interpolation=filter),
            gpuaug.Letterbox(
                size, centre=bool(rng.integers(2)), upscale=bool(rng.integers(2)), interpolation=filter,
                fill=(114, (9, 80, 255))[rng.integers(2)],
            ),
        ]  # fmt: skip
        batch = images(*rng.integers(30, 260, 2).tolist(), batch=2)
        for crop in crops:
            recipe = gpuaug.Augment(crop=crop, normalize=(None, NORMALIZE)[rng.integers(2)])
            std = STD if recipe.normalize else (1.0,)
            largest, mean = levels(Evaluation(recipe)(batch), recipe(batch), std)
            assert largest < 2.01, crop
            assert mean < 0.03, crop


def test_one_file_for_all_sizes(evaluation, folder):
    program = torch.export.load(folder / "eval.pt2").module()
    session = onnxruntime.InferenceSession(folder / "eval.onnx")
    means = []
    for n, size in enumerate(SIZES):
        batch = images(*size, batch=1 + n % 2)
        expected = evaluation(batch)
        made = program(images=batch)
        assert torch.equal(made, Evaluation(evaluation)(batch))
        by_onnx = torch.from_numpy(session.run(["output"], {"images": batch.numpy()})[0])
        for each in (made, by_onnx):
            largest, mean = levels(each, expected)
            assert largest < 1.01, size
            means.append(mean)
    assert max(means) < 0.03
    versions = {x.domain: x.version for x in onnx.load(folder / "eval.onnx").opset_import}
    assert versions[""] == 18


def test_a_pt2_needs_no_gpuaug(folder):
    code = (
        "import sys, torch\n"
        "images = torch.zeros(3, 3, 99, 70, dtype=torch.uint8)\n"
        "made = torch.export.load('eval.pt2').module()(images=images)\n"
        "assert made.shape == (3, 3, 224, 224) and 'gpuaug' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=folder)


@pytest.mark.parametrize("name", ["eval.pt2", "eval.onnx", "card.md", "new.md"])
def test_compose_reads_the_recipe_back(name, evaluation, folder):
    for config in ("eval", "train"):
        part = gpuaug.compose(config, [f"augment=file:{folder / name}"]).augment
        assert gpuaug.build(part).fingerprint() == evaluation.fingerprint()
    changed = gpuaug.compose(
        "eval", [f"augment=file:{folder / name}", "augment.crop.size=64", "augment.normalize=null"]
    )
    assert gpuaug.build(changed.augment).crop.size == (64, 64)


def test_the_rest_of_a_model_card_stays(folder):
    text = (folder / "card.md").read_text()
    assert text.startswith("---\nlicense: mit\ntags: [a]\ngpuaug: {")
    assert text.endswith("\n---\n# A model\n\n---\ntext\n")
    assert "old" not in text
    assert json.loads(text.split("gpuaug: ")[1].split("\n")[0])["classes"] == ["cat", "dog"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"crop": gpuaug.RandomResizedCrop(32)}, "augment.crop.*RandomResizedCrop. Take another recipe"),
        ({"crop": gpuaug.RandomCrop(32)}, "augment.crop.*RandomCrop"),
        ({"crop": gpuaug.Letterbox(32, shorter=20)}, r"augment.crop.shorter.*Found: 20.*max_size"),
        ({"crop": gpuaug.Letterbox(32, shorter=[20, 30])}, r"augment.crop.shorter"),
        ({"crop": gpuaug.Resize((8, 8), interpolation="nearest")}, "interpolation.*nearest"),
        ({"ops": {"flip": K.RandomHorizontalFlip(p=0.5)}}, r"augment.ops.flip.*p=0.5"),
        ({"ops": {"policy": gpuaug.RandAugment()}}, "augment.ops.policy.*RandAugment"),
        ({"normalize": gpuaug.Normalize([0.5] * 5, [0.5] * 5)}, "augment.normalize.*three channels.*5 values"),
        ({"crop": gpuaug.Letterbox(32, fill=[1, 2])}, "augment.crop.fill.*three channels.*2 values"),
        ({"copies": 2}, "augment.copies.*Found: 2"),
    ],
)
def test_what_cannot_be_exported_is_named(settings, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        gpuaug.export(gpuaug.Augment(**settings), tmp_path / "x.pt2")
    assert not list(tmp_path.iterdir())


def test_operations_that_never_run_are_left_out(tmp_path):
    recipe = gpuaug.Augment(crop=gpuaug.Resize((8, 8)), ops={"flip": K.RandomHorizontalFlip(p=0.0), "none": None})
    gpuaug.export(recipe, tmp_path / "x.md")
    part = gpuaug.compose("eval", [f"augment=file:{tmp_path / 'x.md'}"]).augment
    assert gpuaug.build(part).fingerprint() == recipe.replace(ops=None).fingerprint()


def test_wrong_arguments(evaluation, tmp_path):
    with pytest.raises(ConfigError, match=r"must end in .pt2, .onnx or .md. Found: .*x.jit"):
        gpuaug.export(evaluation, tmp_path / "x.jit")
    with pytest.raises(ConfigError, match="`model` must be None for a model card"):
        gpuaug.export(evaluation, tmp_path / "x.md", model=nn.Flatten())
    with pytest.raises(GpuaugError, match="could not be written"):
        gpuaug.export(evaluation, tmp_path / "no.pt2" / "\0.pt2")

    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(GpuaugError, match="torch.export refused the model: .*data-dependent"):
        gpuaug.export(evaluation, tmp_path / "x.pt2", model=Branches())


def hostile(kind: str) -> str:
    recipe = {"_target_": "gpuaug.Augment", "crop": None, "normalize": kind}
    return f"---\ngpuaug: {json.dumps({'recipes': {'eval': recipe}})}\n---\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.onnx", None, "FileNotFoundError"),
        ("junk.onnx", b"junk" * 99, "augment=file:"),
        ("junk.pt2", b"junk" * 99, "BadZipFile"),
        ("junk.pt", b"junk" * 99, "augment=file:"),
        ("empty.md", b"", "augment=file:"),
        ("other.md", b"---\nlicense: mit\n---\n", "KeyError: 'gpuaug'"),
        ("list.md", b"---\ngpuaug: [1]\n---\n", "augment=file:"),
        ("text.md", b"---\ngpuaug: {recipes: {eval: text}}\n---\n", "damaged"),
        ("none.md", b"---\ngpuaug: {recipes: {}}\n---\n", "Found recipes: none"),
        ("oc.md", hostile("${oc.env:HOME}").encode(), "an interpolation"),
        ("alias.md", b"---\nx: &x [1]\ngpuaug: {recipes: {eval: {a: *x}}}\n---\n", "it has aliases"),
        ("date.md", b"---\ngpuaug: {recipes: {eval: {a: 2020-01-01}}}\n---\n", "TypeError"),
        ("null.md", b"---\ngpuaug: {recipes: {1: null}}\n---\n", "Found recipes: 1"),
        ("long.md", hostile("x" * 200_000).encode(), "damaged"),
        ("large.md", hostile("x" * 2_000_000).encode(), "more than 1048576"),
        ("deep.md", hostile("").replace("null", "[" * 5000 + "]" * 5000).encode(), "augment=file:"),
    ],
)
def test_files_that_hold_no_recipe(name, content, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        gpuaug.compose("eval", [f"augment=file:{tmp_path / name}"])


def test_a_pt2_with_a_huge_member_is_not_unpacked(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.pt2", "w", zipfile.ZIP_DEFLATED) as members:
        members.writestr("x/extra/gpuaug.json", b" " * 50_000_000)
    with pytest.raises(ConfigError, match="has 50000000 bytes"):
        gpuaug.compose("eval", [f"augment=file:{tmp_path / 'x.pt2'}"])


@pytest.mark.parametrize("kind", ["pt2", "onnx"])
def test_a_crop_larger_than_the_resized_image(kind, tmp_path):
    recipe = gpuaug.Augment(crop=gpuaug.ResizeCenterCrop(40, 56), normalize=NORMALIZE)
    assert gpuaug.export(recipe, tmp_path / f"x.{kind}")["largest_difference"] < 1.01


def test_models_with_other_outputs(evaluation, tmp_path):
    class Other(nn.Module):
        def __init__(self, make: Any) -> None:
            super().__init__()
            self.make = make

        def forward(self, x: torch.Tensor) -> Any:
            return self.make(x.mean((2, 3)))

    for make, message in (
        (lambda x: (x, x), "must return one tensor. Found: tuple"),
        (lambda x: {"a": x}, "must return one tensor. Found: dict"),
        (lambda x: x * float("nan"), "gives other values"),
    ):
        with pytest.raises(GpuaugError, match=message):
            gpuaug.export(evaluation, tmp_path / "x.pt2", model=Other(make))
    gpuaug.export(evaluation, tmp_path / "x.pt2", model=Other(lambda x: x > 0))
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt2"]


def test_onnx_holds_two_gigabytes(evaluation, tmp_path):
    model = nn.Linear(3, 3)
    model.weight = nn.Parameter(torch.empty(1, dtype=torch.float32).expand(2**15, 2**15))  # no memory
    with pytest.raises(ConfigError, match="at most 2 GB. Found: a model of 4.3 GB. Write a .pt2 file"):
        gpuaug.export(evaluation, tmp_path / "x.onnx", model=model)


def test_text_in_a_file_is_only_text(tmp_path):
    """Quotes and Hydra's special characters give no other keys, and `_target_` is checked as everywhere."""
    for text in ("a'b", "a',x:1,y:'", "\\'}", "a,b", "}", "choice(1,2)", '"'):
        (tmp_path / "x.md").write_text(hostile(text))
        assert gpuaug.compose("eval", [f"augment=file:{tmp_path / 'x.md'}"]).augment.normalize == text
    (tmp_path / "x.md").write_text(hostile("").replace("gpuaug.Augment", "os.system"))
    with pytest.raises(ConfigError, match="must name a class of kornia.augmentation or a public class"):
        gpuaug.build(gpuaug.compose("eval", [f"augment=file:{tmp_path / 'x.md'}"]).augment)


def test_a_checkpoint_is_served_as_it_was_evaluated(tmp_path, capsys):
    photos, out = photographs.cut(tmp_path / "photos", count=40), tmp_path / "run"
    small = ["augment.crop.size=32", "+model.width=8", "batch_size=8", "num_workers=0", "epochs=1", f"out={out}"]
    held_out = ["val.augment=eval", "val.augment.crop.resize=40", "val.augment.crop.size=36"]
    assert main(["train", f"source.root={photos}/train", f"val.source.root={photos}/val", *small, *held_out]) == 0
    assert main(["export", f"checkpoint={out}/last.pt", f"out={tmp_path}/net.onnx", f"json={tmp_path}/x.json"]) == 0
    assert json.loads((tmp_path / "x.json").read_text())["largest_difference"] < 1.01

    recipe = gpuaug.build(gpuaug.compose("eval", [f"augment=file:{out}/last.pt"]).augment)
    assert recipe.crop.resize == 40
    train = gpuaug.build(gpuaug.compose("train", [f"augment=file:{out}/last.pt"]).augment)
    assert isinstance(train.crop, gpuaug.RandomResizedCrop)
    served = gpuaug.compose("eval", [f"augment=file:{tmp_path}/net.onnx"]).augment
    assert gpuaug.build(served).fingerprint() == recipe.fingerprint()

    checkpoint = torch.load(out / "last.pt", weights_only=True)
    net = SmallNet(num_classes=len(checkpoint["classes"]), width=8).eval()
    net.load_state_dict(checkpoint["model"])
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    with torch.no_grad():
        for size in SIZES:
            batch = images(*size)
            (logits,) = session.run(None, {"images": batch.numpy()})
            expected = net(recipe(batch))
            assert logits.argmax() == expected.argmax()
            np.testing.assert_allclose(logits, expected.numpy(), atol=0.02)

    capsys.readouterr()
    for words, message in (
        ([f"checkpoint={out}/last.pt", "+model.width=16", "model._target_=gpuaug.tools.train.model.SmallNet"], "width"),
        (["model=timm:resnet18"], "`checkpoint` must be given with `model`"),
        ([f"checkpoint={tmp_path}/none.pt"], "`checkpoint` must name a checkpoint"),
        (["augment=simclr"], "RandomResizedCrop. Take another"),
        (["out=x.txt"], "must end in .pt2, .onnx or .md"),
    ):
        assert main(["export", f"out={tmp_path}/y.pt2", *words]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "y.pt2").exists()


def test_a_checkpoint_without_an_evaluation(tmp_path):
    torch.save({"gpuaug": {"recipes": {"train": {"_target_": "gpuaug.Augment"}}}}, tmp_path / "last.pt")
    with pytest.raises(ConfigError, match="must hold the recipe of the evaluation. Found recipes: train"):
        gpuaug.compose("eval", [f"augment=file:{tmp_path}/last.pt"])
    assert gpuaug.compose("train", [f"augment=file:{tmp_path}/last.pt"]).augment == {"_target_": "gpuaug.Augment"}
