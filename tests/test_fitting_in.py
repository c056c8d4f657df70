"""gpuaug inside other programs: the lines that users write there, with the programs themselves."""

from __future__ import annotations

import io
import math
import os
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import forked
import hydra
import kornia.augmentation as K
import numpy as np
import pytest
import torch
from conftest import ROOT
from omegaconf import OmegaConf
from PIL import Image
from torch.utils.data import DataLoader

import gpuaug
from gpuaug.errors import ConfigError

SMALL = ["num_workers=0", "device=cpu", "batch_size=16", "augment=flip", "augment.crop.size=32"]
PATHS = os.pathsep.join(map(str, (ROOT, *filter(None, [os.environ.get("PYTHONPATH")]))))


@pytest.fixture
def overrides(photos: Path) -> list[str]:
    return [f"source.root='{photos}'", *SMALL]


@pytest.fixture
def loader(overrides: list[str]) -> Any:
    with gpuaug.build(gpuaug.compose("train", overrides)) as loader:
        yield loader


def message(call: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value)


# -- hydra.utils.instantiate


RECIPES = sorted(path.stem for path in (ROOT / "conf" / "gpuaug" / "augment").glob("*.yaml"))


@pytest.mark.parametrize("name", RECIPES)
def test_hydra_instantiates_every_recipe_as_build_does(name: str) -> None:
    cfg = gpuaug.compose("train", [f"augment={name}"])
    made = hydra.utils.instantiate(cfg.augment)
    assert made.fingerprint() == gpuaug.build(cfg.augment).fingerprint()


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["shuffle=false"],
        ["mix=mixup_cutmix", "order=weighted"],
        ["order=repeated", "augment=dino"],
        ["augment=efficientnetv2", "faults.policy=blank"],
    ],
)
def test_hydra_instantiates_the_loader_that_build_makes(photos: Path, more: list[str]) -> None:
    base = [override for override in SMALL if not override.startswith("augment")]
    cfg = OmegaConf.create({"train_data": gpuaug.compose("train", [f"source.root='{photos}'", *base, *more])})
    with hydra.utils.instantiate(cfg.train_data) as theirs, gpuaug.build(cfg.train_data) as ours:
        assert theirs.fingerprint() == ours.fingerprint()
        assert (theirs.mix, repr(theirs.order)) == (ours.mix, repr(ours.order))
        a, b = next(iter(theirs)), next(iter(ours))
        views = [x if isinstance(x, list) else [x] for x in (a.images, b.images)]
        assert all(torch.equal(x, y) for x, y in zip(*views, strict=True))
        assert a.keys == b.keys


@pytest.mark.parametrize("name", ["detection", "segmentation", "instances", "pose", "none"])
def test_hydra_instantiates_targets_and_decode(name: str) -> None:
    cfg = gpuaug.compose("train", [f"targets={name}"])
    if name != "none":  # an empty mapping
        assert repr(hydra.utils.instantiate(cfg.targets)) == repr(gpuaug.build(cfg.targets))
    assert repr(hydra.utils.instantiate(cfg.decode, _convert_="all")) == repr(gpuaug.build(cfg.decode))


# -- one place for a user's own recipes


def test_one_file_is_a_recipe_of_the_command_line_of_an_application_and_of_a_notebook(
    photos: Path, tmp_path: Path
) -> None:
    from gpuaug.tools.main import main

    conf, look = tmp_path / "conf", tmp_path / "look.png"
    (conf / "gpuaug" / "augment").mkdir(parents=True)
    (conf / "gpuaug" / "augment" / "mine.yaml").write_text("defaults: [flip, _self_]\ncrop: {size: 48}\n")
    (conf / "app.yaml").write_text("defaults:\n  - gpuaug@train_data: train\n  - _self_\n")
    inside = [f"train_data.source.root={photos}", "train_data.num_workers=0", "train_data.device=cpu"]
    with hydra.initialize_config_dir(str(conf), version_base="1.3"):
        app = hydra.compose("app", [*inside, "gpuaug/augment@train_data.augment=mine"])
    for made in (hydra.utils.instantiate(app.train_data), gpuaug.build(app.train_data)):
        assert (made.augment.crop.size, list(made.augment.ops)) == ((48, 48), ["flip"])
        made.close()
    composed = gpuaug.compose("train", ["augment=mine"], config_dir=conf)
    assert gpuaug.build(composed.augment).crop.size == (48, 48)
    given = [f"source.root={photos}", "device=cpu", "num_workers=0", f"out={look}"]
    assert main(["preview", "--config-dir", str(conf), "augment=mine", *given]) == 0
    assert look.is_file()
    assert "mine" in message(lambda: gpuaug.compose("train", ["augment=mien"], config_dir=conf))


# -- a loader is the DataLoader


@pytest.mark.parametrize("settings", [{}, {"batch_size": 4, "shuffle": True}, {"num_workers": 1}])
@pytest.mark.parametrize("kind", ["DataLoader", "StatefulDataLoader"])
def test_wrapping_a_loader_says_that_it_is_the_dataloader(loader: Any, kind: str, settings: dict[str, Any]) -> None:
    opened: list[Any] = []

    def first() -> None:
        opened.append(iter(make(loader, **settings)))
        next(opened[0])

    if kind == "StatefulDataLoader":
        make = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    else:
        make = DataLoader
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchdata calls what torch has deprecated
        said = message(first)
    for batches in opened:  # the garbage collector's way to end the workers takes 5 seconds
        getattr(batches, "_shutdown_workers", int)()
    assert "Pass the loader itself." in said
    assert sum(len(batch) for batch in loader) == 65  # the loader itself is unharmed


def test_copying_a_loader_says_what_to_do(loader: Any) -> None:
    import copy
    import pickle

    for call in (lambda: pickle.dumps(loader), lambda: copy.deepcopy(loader), lambda: copy.copy(loader)):
        said = message(call)
        assert "Pass the loader itself." in said
        assert "state_dict" in said


def test_skipping_batches_says_how_to_resume(loader: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    said = message(lambda: accelerate.skip_first_batches(loader, 2))
    assert "Pass the loader itself." in said
    assert "loader.load_state_dict(state)" in said
    assert not hasattr(loader, "dataset")  # Lightning and others ask


def test_a_loader_that_has_samples_is_still_iterated_in_batches(loader: Any) -> None:
    assert loader[3][0].ndim == 3
    for call in (lambda: reversed(loader), lambda: 3 in loader):
        with pytest.raises(TypeError):
            call()
    assert [len(batch) for batch in loader] == [16, 16, 16, 16, 1]
    assert len(list(DataLoader(loader, batch_size=None))) == len(loader) == 5  # single samples, as the guide says


def test_a_sample_of_a_repeated_order_is_its_first_occurrence(photos: Path) -> None:
    crop, order = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(16)), gpuaug.Repeated(repeats=3)
    settings: dict[str, Any] = {"batch_size": 3, "num_workers": 0, "device": "cpu"}
    with gpuaug.Loader(gpuaug.FolderSource(photos), augment=crop, order=order, **settings) as loader:
        batch = next(iter(loader))
        (number,) = set(batch.indices.tolist())
        assert torch.equal(loader[number][0], batch.images[0])
    assert not torch.equal(batch.images[0], batch.images[2])


# -- Hugging Face


@pytest.fixture(scope="module")
def transformers(v2: Any) -> Any:
    """Its import needs torchvision's operators, which the fixture `v2` declares."""
    return pytest.importorskip("transformers")


def test_a_trainer_that_gets_a_loader_as_a_dataset_says_what_to_do(
    transformers: Any, loader: Any, tmp_path: Path
) -> None:
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1], layer_type="basic", num_labels=5)
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "output_dir": str(tmp_path)}
    arguments = transformers.TrainingArguments(**quiet)
    model = transformers.ResNetForImageClassification(config)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=loader)
    assert "For Hugging Face's Trainer, see examples/hugging_face_trainer.py" in message(trainer.train)
    assert (ROOT / "examples" / "hugging_face_trainer.py").is_file()


# -- Lightning, Fabric, Accelerate


def seen(call: Any) -> list[str]:
    """The warnings of a call, without torch's own about Lightning's use of it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [text for w in caught if "LeafSpec" not in (text := str(w.message))]


def lightning(**how: Any) -> tuple[Any, Any]:
    """A trainer that prints nothing, and a model that records the numbers of its samples."""
    lightning = pytest.importorskip("lightning")

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.seen = torch.nn.Linear(3, 5), []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            images, labels = batch
            self.seen.append(batch.indices.tolist())
            loss = torch.nn.functional.cross_entropy(self.layer(images.mean(dim=(2, 3))), labels)
            self.log("loss", loss, on_epoch=True)  # asks the batch for its size
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.training_step(batch, batch_idx)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(accelerator="cpu", enable_checkpointing=False, **quiet, **how), Model()


def test_lightning_takes_a_loader_without_a_warning(overrides: list[str], tmp_path: Path) -> None:
    trainer, model = lightning(max_epochs=2, default_root_dir=tmp_path)
    with (
        gpuaug.build(gpuaug.compose("train", overrides)) as loader,
        gpuaug.build(gpuaug.compose("eval", [*overrides, "order=sequential"])) as held_out,
    ):
        assert seen(lambda: trainer.fit(model, loader, held_out)) == []
        assert trainer.global_step == 10


def test_overfitting_says_how_to_repeat_the_same_batches(overrides: list[str], caplog: Any) -> None:
    """Lightning's `overfit_batches` stops each pass after a few batches, and cannot switch off our shuffling."""
    said = []
    for more in ([], ["limit_batches=2", "order=sequential"]):
        caplog.clear()
        trainer, model = lightning(max_epochs=3, overfit_batches=2)
        with gpuaug.build(gpuaug.compose("train", [*overrides, *more])) as loader:
            trainer.fit(model, loader)
        said += [[record.message for record in caplog.records if "was left" in record.message]]
        assert (model.seen[:2] == model.seen[2:4] == model.seen[4:]) == bool(more)
    assert said[0][0].startswith("train: epoch 0 was left 3 batches before its end; epoch 1 begins, with other samples")
    assert "set `limit_batches` and `order=sequential`" in said[0][0]
    assert said[1] == []


def test_fabric_and_accelerate_take_a_loader_without_a_warning(loader: Any) -> None:
    fabric_module, accelerate = pytest.importorskip("lightning.fabric"), pytest.importorskip("accelerate")

    def steps(device: torch.device, prepare: Any, batches: Any, backward: Any) -> None:
        net = torch.nn.Linear(3, 5)
        net, optimizer = prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        assert device.type == loader.device.type
        for images, labels in batches:
            backward(torch.nn.functional.cross_entropy(net(images.mean(dim=(2, 3))), labels))
            optimizer.step()

    def with_fabric() -> None:
        fabric = fabric_module.Fabric(accelerator="cpu")
        fabric.launch()
        steps(fabric.device, fabric.setup, loader, fabric.backward)

    def with_accelerate() -> None:
        accelerator = accelerate.Accelerator(cpu=True)
        assert accelerator.prepare(loader) is loader  # left as it is
        steps(accelerator.device, accelerator.prepare, loader, accelerator.backward)

    assert seen(with_fabric) == []
    assert seen(with_accelerate) == []


COMPILED = """
import torch, gpuaug, kornia.augmentation as K
ops = {"flip": K.RandomHorizontalFlip(), "jitter": K.ColorJitter(0.4, 0.4, 0.4, 0.1)}
augment = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(16), ops=ops)
images = torch.randint(0, 256, (4, 3, 24, 24), dtype=torch.uint8)
net = torch.nn.Conv2d(3, 4, 3)
step = torch.compile(
    lambda images, epoch, indices: net(augment(images, seed=3, epoch=epoch, indices=indices)), backend="eager"
)
alone = torch.compile(augment)
for epoch in range(12):  # more often than torch compiles anew
    numbers = torch.arange(4) + epoch
    expected = augment(images, seed=3, epoch=epoch, indices=numbers)
    assert torch.equal(alone(images, seed=3, epoch=epoch, indices=numbers), expected)
    assert torch.allclose(step(images, epoch, numbers), net(expected), atol=1e-5)
"""


def test_augment_under_torch_compile_prints_nothing(tmp_path: Path) -> None:
    done = forked.run([sys.executable, "-c", COMPILED], cwd=tmp_path, env={**os.environ, "PYTHONPATH": PATHS})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# -- the command line


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("-m lr=0.1,0.2", "Call gpuaug in a loop"),
        ("--multirun lr=0.1,0.2", "Call gpuaug in a loop"),
        ("--cfg job", "gpuaug.compose('train', [])"),
        ("--config-path=conf", "--config-dir"),
        ("-cn app", "--config-name"),
    ],
)
def test_an_option_of_hydra_applications_is_named(words: str, remedy: str, capsys: Any) -> None:
    from gpuaug.tools.main import main

    with pytest.raises(SystemExit) as caught:
        main(["train", *words.split()])
    said = capsys.readouterr().err
    assert caught.value.code == 2
    assert f"`{words.split()[0].partition('=')[0]}` belongs to Hydra applications" in said
    assert remedy in said


def test_a_key_with_dashes_is_told_how_to_write_it(capsys: Any) -> None:
    from gpuaug.tools.main import main

    with pytest.raises(SystemExit) as caught:
        main(["train", "--batch-size", "64"])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "there is no option `--batch-size`. Keys are written without dashes: batch_size=VALUE." in said


def test_what_the_advice_for_cfg_prints(capsys: Any) -> None:
    from gpuaug.tools.main import HYDRAS

    exec(HYDRAS["--cfg"].partition('"')[2].rpartition('"')[0], {})
    assert OmegaConf.create(capsys.readouterr().out) == gpuaug.compose("train")


def test_mps_says_what_to_do(overrides: list[str]) -> None:
    said = message(lambda: gpuaug.build(gpuaug.compose("train", [*overrides, "device=mps"])))
    assert said.startswith("`device` must be auto, cpu, cuda or cuda:N. Found: 'mps'.")
    assert "Set `device=cpu`, and move each batch to the device of the model: `batch.to('mps')`." in said


# -- advice that leads on


@pytest.mark.parametrize(
    ("overrides", "advice"),
    [
        (["augment=randaugment_torchvision", "augment.ops.randaugment.mstd=0.5"], "augment=timm:rand-m9-mstd0.5-inc1"),
        (["augment=randaugment"], "Did you mean augment=randaugment_torchvision?"),
        (["augment=dino", "augment.crop.size=96"], "`augment.views.local.crop`"),
        (["augment=dino", "+augment.crop={_target_: gpuaug.Resize, size: 96}"], "`augment.views.local.crop`"),
        (["augment=efficientnetv2", "augment.crop.size=96"], "`augment.schedule.88.crop`"),
        (
            ["mix.p=0.5"],
            "It is switched off. Choose one first: mix=classmix|copy_paste|cutmix|cutmix_masks|mixup|mixup_cutmix|"
            "mixup_objects|none.",
        ),
    ],
)
def test_a_key_that_is_elsewhere(photos: Path, overrides: list[str], advice: str) -> None:
    def made() -> None:
        gpuaug.build(gpuaug.compose("train", [f"source.root='{photos}'", *overrides]))

    said = message(made)
    assert advice in said
    assert "adds it" not in said  # it would be refused later
    assert "previous target" not in said


def test_the_advice_can_be_followed() -> None:
    assert gpuaug.compose("train", ["augment=timm:rand-m9-mstd0.5-inc1"]).augment.ops.timm.config
    changed = gpuaug.compose("train", ["augment=dino", "augment.views.local.crop.size=88"])
    assert gpuaug.build(changed.augment).augments[2].crop.size == (88, 88)
    assert "adds it" not in message(lambda: gpuaug.compose("train", ["batch_siz=1"]))
    added = message(lambda: gpuaug.compose("train", ["augment.ops.invert.p=1"]))
    assert "`+augment.ops.invert.p=...` adds it." in added


@pytest.mark.parametrize(
    ("target", "full"),
    [
        ("RandomGaussianBlur", "kornia.augmentation.RandomGaussianBlur"),
        ("K.RandomGaussianBlur", "kornia.augmentation.RandomGaussianBlur"),
        ("kornia.RandomGaussianBlur", "kornia.augmentation.RandomGaussianBlur"),
        ("gpuaug.RandomGaussianBlur", "kornia.augmentation.RandomGaussianBlur"),
        ("RandomErasing", "gpuaug.RandomErasing"),
        ("TimmAugment", "gpuaug.TimmAugment"),
    ],
)
def test_a_target_without_its_module(target: str, full: str) -> None:
    cfg = {"_target_": "gpuaug.Augment", "ops": {"blur": {"_target_": target, "kernel_size": 3, "sigma": [0.1, 2.0]}}}
    assert f"Did you mean '{full}'?" in message(lambda: gpuaug.build(cfg))


def test_images_that_are_no_batch() -> None:
    augment = gpuaug.Augment(ops={"flip": K.RandomHorizontalFlip()})
    images = torch.randint(0, 256, (4, 3, 8, 9), dtype=torch.uint8)
    expected = augment(images, seed=1)
    for given, advice in (
        (images.numpy(), "torch.from_numpy(images)"),
        (list(images), "torch.stack(images)"),
    ):
        assert f"`{advice}`" in message(lambda given=given: augment(given))
        followed = eval(advice, {"images": given, "torch": torch, "np": np})
        assert torch.equal(augment(followed, seed=1), expected)
    assert "`images[None]`" in message(lambda: augment(images[0]))


@pytest.mark.parametrize(
    ("key", "value"),
    [("batch_size", "32"), ("timeout", "1.5"), ("augment.crop.size", "48"), ("augment.ops.flip.p", "0.5")],
)
def test_an_environment_variable_where_a_number_is_wanted(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch, key: str, value: str
) -> None:
    monkeypatch.setenv("MY_NUMBER", value)

    def made(text: str) -> Any:
        return gpuaug.build(gpuaug.compose("train", [*overrides, f"{key}={text}"]))

    said = message(lambda: made("${oc.env:MY_NUMBER}"))
    assert said.startswith(f"`{key}` must be")
    assert said.endswith(f"Found: '{value}'.")
    made("'${oc.decode:${oc.env:MY_NUMBER}}'").close()


def test_dir_holds_public_names_only() -> None:
    assert dir(gpuaug) == sorted([*gpuaug.__all__, "__version__"])


# -- Jigsaw moves the pieces of each image, and mixes no images


@pytest.mark.parametrize("backend", ["fused", "kornia"])
def test_jigsaw_is_kornias_with_a_permutation_per_sample(backend: str, photo_batch: torch.Tensor) -> None:
    images = photo_batch.permute(0, 3, 1, 2)  # [8, 3, 64, 48]
    augment = gpuaug.Augment(ops={"jigsaw": K.RandomJigsaw((4, 3), p=0.7)}, backend=backend)
    made = augment(images, seed=5, indices=range(8))
    chosen = augment.choose(augment.draw(seed=5, epoch=0, indices=range(8)), [(64, 48)])[0][0]
    params = {"permutation": torch.from_numpy(chosen.params[0][0]["permutation"])}
    params["batch_prob"] = torch.from_numpy(chosen.choice[:, 0] == 0).float()
    assert 0 < params["batch_prob"].sum() < 8
    assert torch.equal(made, K.RandomJigsaw((4, 3))(images / 255, params=params))
    alone = [augment(images[i : i + 1], seed=5, indices=[i]) for i in range(8)]
    assert torch.equal(torch.cat(alone), made)


@pytest.mark.parametrize(("grid", "ensure_perm"), [((2, 2), True), ((2, 2), False), ((1, 2), True), ((3, 2), True)])
def test_all_permutations_are_equally_likely(grid: tuple[int, int], ensure_perm: bool) -> None:
    augment = gpuaug.Augment(ops={"jigsaw": K.RandomJigsaw(grid, p=1.0, ensure_perm=ensure_perm)})
    drawn = augment.choose(augment.draw(seed=1, epoch=0, indices=range(20_000)), [(6, 6)])[0][0]
    counts = Counter(map(tuple, drawn.params[0][0]["permutation"].tolist()))
    unchanged = tuple(np.arange(math.prod(grid)).reshape(grid).T.flatten().tolist())
    assert (unchanged in counts) != ensure_perm
    kinds = math.factorial(math.prod(grid)) - ensure_perm
    assert len(counts) == kinds
    chi2 = sum((n - 20_000 / kinds) ** 2 for n in counts.values()) * kinds / 20_000
    assert chi2 < kinds + 5 * math.sqrt(2 * kinds)  # mean kinds - 1, standard deviation sqrt(2 (kinds - 1))


def test_jigsaw_says_what_it_cannot_do() -> None:
    images = torch.zeros((2, 3, 8, 9), dtype=torch.uint8)
    with_pieces = gpuaug.Augment(ops={"jigsaw": K.RandomJigsaw((4, 4), p=1.0)})
    assert "must be divisible by grid (4, 4)" in message(lambda: with_pieces(images))
    masks = torch.zeros(2, 8, 9, dtype=torch.int64)
    assert "must be divisible by grid (4, 4)" in message(lambda: with_pieces(images, masks=masks))
    assert "use gpuaug.Mosaic as an entry of `combine`" in message(lambda: gpuaug.Augment(ops={"x": K.RandomMosaic()}))
    state = gpuaug.Augment(ops={"jigsaw": K.RandomJigsaw((4, 4), ensure_perm=False)}).fingerprint()
    assert state != gpuaug.Augment(ops={"jigsaw": K.RandomJigsaw((4, 4))}).fingerprint()


def test_a_loader_of_bytes_needs_no_configuration() -> None:
    Image.new("RGB", (8, 8)).save(png := io.BytesIO(), "png")
    with gpuaug.Loader([(png.getvalue(), 1)], augment=gpuaug.Augment(), mix={}, targets={}, device="cpu",
                       num_workers=0) as loader:  # fmt: skip
        assert (loader.mix, loader.targets) == (None, None)
        assert [labels.tolist() for _, labels in loader] == [[1]]
