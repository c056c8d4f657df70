"""Composing configurations and building objects from them: what works, and what every mistake is told."""

import inspect
import math
import subprocess
import sys
from pathlib import Path
from typing import Literal

import kornia.augmentation as K
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobRuntime
from hydra.version import VersionBase
from omegaconf import OmegaConf

import gpuaug
from gpuaug.config import build, compose
from gpuaug.errors import ConfigError, SourceError

CONF = Path(gpuaug.__file__).parent.parent / "conf"


def recipe(*overrides, **more):
    return build(compose("train", overrides).augment, **more)


def refused(*overrides, name="train", cfg=None, **more):
    """The message that composing or building ends with."""
    with pytest.raises(ConfigError) as caught:
        found = compose(name, overrides) if cfg is None else cfg
        build(found, **more)
    return str(caught.value)


# -- the shipped files


@pytest.mark.parametrize("name", ["train", "eval"])
def test_every_key_of_the_loader_stands_in_the_yaml_with_its_default(name):
    cfg = compose(name)
    groups = {"source", "order", "decode", "augment", "targets", "mix", "patch_masks", "faults"}
    parameters = inspect.signature(gpuaug.Loader).parameters
    assert set(cfg) - {"_target_", "_convert_"} == set(parameters)
    words = {torch.float32: "float32", torch.contiguous_format: "contiguous_format"}
    assert cfg.name == {"train": "train", "eval": "val"}[name]
    for key in set(parameters) - groups - {"name"}:
        assert cfg[key] == words.get(parameters[key].default, parameters[key].default), key


SOURCES = sorted(f"source/{path.stem}" for path in (CONF / "gpuaug" / "source").glob("*.yaml"))


@pytest.mark.parametrize("path", [*SOURCES, "order/weighted", "order/repeated", "decode/default",
                                  "faults/default", "mix/mixup", "mix/mixup_objects", "mix/cutmix_masks",
                                  "mix/classmix", "mix/copy_paste"])  # fmt: skip
def test_every_key_of_a_stage_stands_in_its_group_with_its_default(path):
    node = OmegaConf.load(CONF / "gpuaug" / f"{path}.yaml")
    parameters = inspect.signature(getattr(gpuaug, node._target_.removeprefix("gpuaug."))).parameters
    assert set(node) - {"_target_"} == set(parameters)
    if "remote" in node:
        assert set(node.remote) - {"_target_"} == set(inspect.signature(gpuaug.Remote).parameters)
    for key, parameter in parameters.items():
        if parameter.default is not parameter.empty and key not in ("mixup_alpha", "remote"):
            default = list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
            assert node[key] == default, key


def test_groups_are_relative_so_that_they_can_be_composed_anywhere():
    files = sorted(CONF.rglob("*.yaml"))
    assert len(files) > 20
    for file in files:
        text = file.read_text()
        assert text.startswith("# "), file
        assert "@package" not in text, file
        assert all(part.startswith("${.") for part in text.split("$")[1:] if part.startswith("{")), file
        for default in OmegaConf.load(file).get("defaults", []):
            assert default == "_self_" or all(not str(group).startswith("/") for group in default), file
        assert max(map(len, text.splitlines())) <= 120, file
        assert len(text.splitlines()) <= 50, file


def test_operation_names_are_the_same_in_every_recipe():
    names = {
        "RandomHorizontalFlip": "flip", "RandomVerticalFlip": "vflip", "ColorJitter": "jitter",
        "RandomGrayscale": "gray", "RandomGaussianBlur": "blur", "RandomSolarize": "solarize",
        "RandomBoxBlur": "blur", "RandomMedianBlur": "median",
        "RandAugment": "randaugment", "OneOf": "choice", "SomeOf": "choice",
        "PhotometricDistort": "distort", "TrivialAugmentWide": "trivialaugment", "AutoAugment": "autoaugment",
        "AugMix": "augmix", "TimmAugment": "timm", "RandomErasing": "erase",
        "RandomHue": "hue", "RandomSaturation": "saturation", "RandomBrightness": "brightness",
    }  # fmt: skip

    def ops(node, name=None):
        for key, value in node.items():
            if isinstance(value, dict):
                if name == "ops" and "_target_" in value:  # else it changes an operation of another file
                    yield key, value["_target_"].rsplit(".", 1)[1]
                if not str(value.get("_target_")).endswith("SomeOf"):  # its operations have lerobot's names
                    yield from ops(value, key)

    for file in (CONF / "gpuaug" / "augment").glob("*.yaml"):
        for key, kind in ops(OmegaConf.to_container(OmegaConf.load(file))):
            assert names[kind] == key, file


# -- compose


def test_overrides_reach_views_ops_and_groups():
    cfg = compose(
        "train",
        ["source.root=/data", "augment=dino", "augment.views.local.ops.jitter.p=0.3", "~augment.views.local.ops.gray",
         "augment.views.global2.ops.blur=null", "mix=mixup_cutmix", "order=weighted", "batch_size=256"],
    )  # fmt: skip
    assert cfg.batch_size == 256
    assert cfg.order._target_ == "gpuaug.Weighted"
    assert cfg.mix.cutmix_alpha == 1.0
    built = build(cfg.augment)
    assert [(v.name, v.copy) for v in built.views] == [("global1", 0), ("global2", 0)] + [
        ("local", i) for i in range(6)
    ]
    assert "hydra" not in cfg
    # an anchor in the file is no link: only the local view has changed
    assert cfg.augment.views.global1.ops.jitter.p == cfg.augment.views.global2.ops.jitter.p == 0.8
    assert cfg.augment.views.local.ops.jitter.p == 0.3


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("augment=simcrl", ["`augment` must be one of", "Found: simcrl", "Did you mean augment=simclr?"]),
        ("augmnt=simclr", ["`augmnt`", "Did you mean 'augment'?"]),
        ("batchsize=3", ["`batchsize`", "Did you mean 'batch_size'?"]),
        ("augment.ops.jitter.brigthness=0.3", ["`augment.ops.jitter.brigthness`", "ColorJitter",
                                               "Did you mean 'brightness'?"]),
        ("~augment.ops.foo", ["`augment.ops.foo`", "It has: vflip, flip, jitter, gray"]),
        ("augment.op.jitter.p=1", ["`augment.op.jitter.p`", "Did you mean 'ops'?"]),
        ("mix=null", ["`mix` must be one of", "Found: null", "Did you mean mix=none?"]),
        ("order.weights=class", ["`order.weights`", "gpuaug.Shuffle"]),
        ("source.root=/data/a=b", ["source.root=/data/a=b", "quotes"]),
        ("augment.ops.jitter={p", ["augment.ops.jitter={p", "quotes"]),
        ("batch_size=1,2", ["`batch_size`", ": 1,2"]),
    ],
)  # fmt: skip
def test_an_override_that_does_not_fit_is_told_the_nearest(override, expected):
    message = refused("augment=standard", override) if not override.startswith("augment=") else refused(override)
    for part in expected:
        assert part in message, message
    assert message.count("Did you mean") <= 1


def test_an_unknown_configuration_is_told_the_nearest():
    message = refused(name="trian")
    assert "'trian'" in message
    assert "Did you mean 'train'?" in message


def test_one_override_still_comes_in_a_list():
    with pytest.raises(ConfigError, match="`overrides` must be a list of strings"):
        compose("train", "augment=simclr")


def test_a_quoted_value_may_hold_anything():
    assert compose("train", ["source.root='/data/a=b, c'"]).source.root == "/data/a=b, c"


def test_replacing_an_operation_says_to_remove_the_old_one_first():
    new = "augment.ops.jitter={_target_: kornia.augmentation.RandomGrayscale, rgb_weights: null}"
    message = refused(new)
    assert "`augment.ops.jitter` (kornia.augmentation.RandomGrayscale) has no key 'rgb_weights'" in message
    assert message.endswith("remove it first: '~augment.ops.jitter' '+augment.ops.jitter={_target_: ...}'.")
    cfg = compose("train", ["~augment.ops.jitter", "+" + new.replace("null", "null, p: 0.2")])
    assert list(cfg.augment.ops) == ["vflip", "flip", "gray", "jitter"]
    assert cfg.augment.ops.jitter == {
        "_target_": "kornia.augmentation.RandomGrayscale", "rgb_weights": None, "p": 0.2,
    }  # fmt: skip


def test_shuffle_is_another_word_for_the_order(photos):
    base = [f"source.root='{photos}'", "num_workers=0", "device=cpu"]
    for name, overrides, order in (
        ("train", ["shuffle=false"], gpuaug.Sequential()),
        ("eval", ["shuffle=true"], gpuaug.Shuffle()),
        ("train", ["shuffle=false", "order=sequential"], gpuaug.Sequential()),
    ):
        with build(compose(name, [*base, *overrides])) as loader:
            assert loader.order == order
    assert "but `order` is Weighted(" in refused(*base, "shuffle=false", "order=weighted")
    assert "`shuffle` must be true or false or null. Found: 'maybe'" in refused(*base, "shuffle=maybe")


@pytest.mark.parametrize("path", SOURCES)
def test_what_sources_share_is_overridden_alike(path):
    name = path.removeprefix("source/")
    chosen = [f"source={name}", "source.root=s3://bucket/x", "source.subset=0.5", "source.exclude=bad.jsonl"]
    source = compose("train", chosen).source
    assert (source.root, source.subset, source.exclude) == ("s3://bucket/x", 0.5, "bad.jsonl")
    changed = ["source.remote.cache=/tmp/x", "source.remote.tries=7", "source.remote.options={anon: true}"]
    remote = build(compose("train", [*chosen, *changed]).source.remote)
    assert remote == gpuaug.Remote(cache="/tmp/x", tries=7, options={"anon": True})
    assert build(source.remote) == gpuaug.Remote()


@pytest.mark.parametrize("command", ["train", "preview"])
def test_a_commands_keys_can_be_composed_in(command):
    cfg = compose("train", [f"+command@_global_={command}", "augment=simclr"])
    own = OmegaConf.load(CONF / "gpuaug" / "command" / f"{command}.yaml")
    assert own
    assert all(cfg[key] == own[key] for key in own)
    assert not set(own) & set(inspect.signature(gpuaug.Loader).parameters)


def test_a_users_file_replaces_ours_only_in_the_subfolder_gpuaug(tmp_path):
    for file, text in {
        "augment/mine": "_target_: gpuaug.Augment\nops: {flip: {_target_: kornia.augmentation.RandomHorizontalFlip}}\n",
        "augment/simclr": "wrong: true\n",
        "gpuaug/augment/flip": "_target_: gpuaug.Augment\ncopies: 3\n",
        "gpuaug/augment/larger": "defaults: [simclr, _self_]\ncrop: {size: 96}\n",
        "gpuaug/augment/dino": "defaults: [dino, _self_]\n",
        "train": "defaults: [gpuaug@train_data: train, _self_]\nlr: 1\n",
        "eval": "lr: 2\n",
        "gpuaug/augment/lost": "defaults: [simcrl, _self_]\n",
        "app": "defaults: [gpuaug@train_data: train, _self_]\n",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{file}.yaml").write_text(text)
    larger = compose("train", ["augment=larger"], config_dir=tmp_path)
    assert (larger.augment.copies, larger.augment.crop.size, larger.decode._target_) == (2, 96, "gpuaug.Decode")
    assert "flip" in compose("train", ["augment=mine"], config_dir=tmp_path).augment.ops
    assert compose("train", ["augment=flip"], config_dir=tmp_path).augment.copies == 3
    assert compose("eval", config_dir=tmp_path).batch_size == 64
    own = compose("train.yaml", ["gpuaug/augment@train_data.augment=larger"], config_dir=tmp_path)
    assert (own.lr, own.train_data.augment) == (1, larger.augment)
    assert "configuration 'train' has no key 'lrr'" in refused_in(tmp_path, "train.yaml", "lrr=3")
    lost = "`defaults` of 'augment/lost' must name existing files. Found: 'augment/simcrl'. Did you mean 'simclr'?"
    assert refused_in(tmp_path, "train", "augment=lost") == lost
    assert "needs another name" in refused_in(tmp_path, "train", "augment=dino")
    assert "mine" in refused_in(tmp_path, "train", "augment=mien")
    app = compose("app", ["gpuaug/augment@train_data.augment=simclr"], config_dir=str(tmp_path))
    assert app.train_data.augment.copies == 2
    message = refused_in(tmp_path, "app", "gpuaug/augment@train_data.augment=simcrl")
    assert "`gpuaug/augment@train_data.augment` must be one of" in message
    assert "gpuaug/augment=simclr" not in message.replace("gpuaug/augment@train_data.augment=simclr", "")
    assert "Did you mean 'train_data'" in refused_in(tmp_path, "app", "train_dat.seed=1")
    with pytest.raises(ConfigError, match="`config_dir` must be a folder"):
        compose("train", config_dir=tmp_path / "nowhere")


def refused_in(folder, name, override):
    with pytest.raises(ConfigError) as caught:
        compose(name, [override], config_dir=folder)
    return str(caught.value)


def test_a_running_hydra_application_keeps_its_state(tmp_path):
    import hydra

    (tmp_path / "app.yaml").write_text("x: 1\n")
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.2", job_name="app"):
        before, version = GlobalHydra.instance(), VersionBase.instance().version_base
        running = before.hydra
        assert compose("train").batch_size == 64
        assert refused("augment=simcrl")
        assert GlobalHydra.instance() is before
        assert GlobalHydra.instance().hydra is running
        assert VersionBase.instance().version_base == version
        assert JobRuntime.instance().get("name") == "app"
        assert hydra.compose("app").x == 1
    assert not GlobalHydra.instance().is_initialized()
    compose("train")
    assert not GlobalHydra.instance().is_initialized()


# -- build: what may be named


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "torch.load",
        "kornia.augmentation._2d.base.torch.load",
        "kornia.augmentation",
        "kornia.augmentation.RandomHorizontalFlip.__init__",
        "kornia.geometry.transform.Rotate",
        "kornia.augmentation._2d.intensity.jpeg.JPEGCodecDifferentiable",
        "gpuaug.config.Path",
        "gpuaug.build",
        "gpuaug.read.prefetch.threading.Thread",
        "gpuaug.random.keyed.Stream",
        "",
        ".os.system",
        "gpuaug..Loader",
        "kornia.augmentation.os",
        42,
    ],
)
@pytest.mark.parametrize("place", ["top", "op", "list", "nested"])
def test_a_target_out_of_bounds_is_refused_wherever_it_stands(target, place):
    bad = {"_target_": target}
    tree = {
        "top": bad,
        "op": {"_target_": "gpuaug.Augment", "ops": {"x": bad}},
        "list": {"_target_": "gpuaug.Augment", "ops": {"x": [1, [bad]]}},
        "nested": {"_target_": "gpuaug.Augment", "ops": {"x": {"_target_": "gpuaug.OneOf", "ops": {"y": bad}}}},
    }[place]
    with pytest.raises(ConfigError) as caught:
        build(tree)
    key = {"top": "", "op": "ops.x.", "list": "ops.x[1][0].", "nested": "ops.x.ops.y."}[place]
    assert f"`{key}_target_`" in str(caught.value)
    assert repr(target) in str(caught.value)


def test_everything_is_checked_before_anything_is_made(tmp_path, monkeypatch):
    made = []
    (tmp_path / "recorder.py").write_text("class Op:\n    made = []\n    def __init__(self): self.made.append(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    ops = {"a": {"_target_": "recorder.Op"}, "z": {"_target_": "os.system"}}
    with pytest.raises(ConfigError, match="os.system"):
        build({"_target_": "gpuaug.Augment", "ops": ops}, trust=["recorder."])
    from recorder import Op

    assert Op.made == made
    ops["z"] = {"_target_": "recorder.Op", "what": 1}
    with pytest.raises(ConfigError, match="takes no argument 'what'"):
        build({"_target_": "gpuaug.Augment", "ops": ops}, trust=["recorder."])
    assert Op.made == made


def test_a_module_that_is_not_trusted_is_not_even_imported(tmp_path, monkeypatch):
    (tmp_path / "sideeffect.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="sideeffect"):
        build({"_target_": "sideeffect.Op"})
    assert "sideeffect" not in sys.modules


def test_trust_admits_a_users_own_classes_and_nothing_they_import(tmp_path, monkeypatch):
    (tmp_path / "my_pkg.py").write_text(
        "from kornia.augmentation import RandomInvert\nimport os\n"
        "from shutil import rmtree\n"
        "class Invert(RandomInvert):\n    pass\n"
        "def make(p: float = 0.5): return Invert(p=p)\n"
        "value = 3\n"
    )
    (tmp_path / "my_pkg_evil.py").write_text("class Invert: pass\n")
    monkeypatch.syspath_prepend(tmp_path)

    def one(target, **more):
        return build({"_target_": "gpuaug.Augment", "ops": {"x": {"_target_": target}}}, **more)

    for trust in (["my_pkg."], "my_pkg.", ["my_pkg"], ["my_pkg.Invert"]):
        assert one("my_pkg.Invert", trust=trust).views
    assert one("my_pkg.RandomInvert", trust=["my_pkg."]).views  # Kornia's own
    assert type(build({"_target_": "my_pkg.make", "p": 1.0}, trust=["my_pkg."])).__name__ == "Invert"
    with pytest.raises(ConfigError, match="`q`: my_pkg.make takes no argument 'q'.* It takes: p"):
        build({"_target_": "my_pkg.make", "q": 1}, trust=["my_pkg."])
    for target in ("my_pkg.os.system", "my_pkg.rmtree", "my_pkg.value", "my_pkg_evil.Invert", "my_pkg.Inverted"):
        with pytest.raises(ConfigError, match=r"`ops.x._target_`"):
            one(target, trust=["my_pkg."])
    for target in ("kornia.augmentation.utils._adapted_uniform", "gpuaug.compose"):  # functions of nobody's own module
        with pytest.raises(ConfigError, match=r"`ops.x._target_`"):
            one(target, trust=["my_pkg."])
    for trust in ([""], ["."], [3]):
        with pytest.raises(ConfigError, match="`trust` must hold"):
            one("my_pkg.Invert", trust=trust)


def test_a_misspelt_target_is_told_the_nearest():
    message = refused("+augment.ops.x._target_=kornia.augmentation.RandomErasng", "source.root=/x")
    assert "`augment.ops.x._target_`: kornia.augmentation has no 'RandomErasng'" in message
    assert "Did you mean 'RandomErasing'?" in message


# -- build: arguments


def test_hydras_special_keys_are_refused():
    for special in ("_partial_", "_recursive_", "_args_"):
        op = {"_target_": "kornia.augmentation.RandomHorizontalFlip", special: True}
        with pytest.raises(ConfigError, match=f"`ops.flip.{special}` is not supported"):
            build({"_target_": "gpuaug.Augment", "ops": {"flip": op}})
    with pytest.raises(ConfigError, match="`mix._args_` is not supported"):
        build({"_target_": "gpuaug.Loader", "source": ".", "augment": None, "mix": {"_args_": [1]}})


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["+augment.ops.jitter.brigthness=0.3"], ["`augment.ops.jitter.brigthness`", "Did you mean 'brightness'?"]),
        (["~augment.crop.size"], ["`augment.crop.size` must be given", "gpuaug.RandomResizedCrop"]),
        (["augment.ops.jitter.p=high"], ["`augment", "'high'"]),
        (["augment.ops.jitter.p=2"], ["`augment.ops.jitter", "2"]),
        (["augment.crop.scale=[0.5,0.1]"], ["`augment.crop.scale`", "0.1"]),
        (["augment.backend=fast"], ["`augment.backend`", "fast"]),
        (["+augment.ops.jitter.same_on_batch=true"], ["`augment.ops.jitter.same_on_batch`"]),
        (["+augment.ops.x={p: 0.1}"], ["`augment.ops.x` must be an operation, such as kornia", "Found: {'p': 0.1}"]),
        (["augment.ops.jitter._target_=kornia.augmentation.RandomInvert"],
         ["`augment.ops.jitter.brightness`", "takes no argument 'brightness'", "~augment.ops.jitter"]),
        (["augment=dino", "augment.views.local.copies=0"], ["`augment.views.local.copies`", "0"]),
        (["augment=dino", "augment.views.local.normalize.std=[0,1,1]"], ["`augment.views.local.normalize.std`"]),
        (["augment=dino", "+augment.views.local.ops.flip.p_batch=0.5"], ["`augment.views.local.ops.flip.p_batch`"]),
        (["augment=threeaugment", "augment.ops.choice.p=2"], ["`augment.ops.choice.p`", "2"]),
        (["+epochs=3"], ["`epochs`", "gpuaug.Loader takes no argument 'epochs'"]),
        (["faults.policy=ignore"], ["`faults.policy`", "ignore"]),
        (["decode.backend=opencv"], ["`decode.backend`", "opencv"]),
        (["mix=mixup", "mix.p=2"], ["`mix.p`", "2"]),
        (["+mix.p=2"], ["gpuaug.CopyPaste or null. Found: {'p': 2}.", "mix._target_"]),
        (["order=repeated", "order.repeats=0"], ["`order.repeats`", "0"]),
        (["batch_size=0"], ["`batch_size`", "0"]),
        (["faults.max='5'"], ["`faults.max` must be", "Found: '5'."]),
        (["timeout=abc"], ["`timeout` must be a number", "Found: 'abc'."]),
        (["seed=null"], ["`seed` must be", "Found: None."]),
        (["device=[cpu]"], ["`device`", "cpu"]),
        (["rank=a"], ["`rank`", "Found: rank="]),
        (["drop_last=maybe"], ["`drop_last` must be true or false. Found: 'maybe'."]),
        (["+augment.ops.jitter.keepdim=no"], ["`augment.ops.jitter.keepdim` must be true or false. Found: 'no'."]),
        (["augment.ops.jitter.p=null"], ["`augment.ops.jitter.p` must be", "None"]),
        (["augment.ops.jitter.brightness=[a,b]"], ["`augment.ops.jitter.brightness` must be a number or a list."]),
        (["+augment.ops.n={_target_: gpuaug.Normalize, mean: [0,0,0], std: [1,1,1]}"],
         ["`augment.ops.n`", "Normalize", "Use `normalize` instead"]),
        (["+augment.ops.n={_target_: gpuaug.Augment}"], ["`augment.ops.n`", "a whole recipe", "MultiView"]),
    ],
)  # fmt: skip
def test_an_argument_that_does_not_fit_names_its_full_key(photos, overrides, expected):
    composed = compose("train", [f"source.root='{photos}'", *overrides])
    for cfg, root in ((composed, ""), (OmegaConf.create({"train_data": composed}).train_data, "t")):
        message = refused(cfg=cfg)
        for part in expected:
            if root and part.startswith("`"):
                part = part.replace("`", "`train_data.", 1)
            if "~augment" in part and root:
                part = part.replace("~", "~train_data.")
            assert part in message, message


def test_a_missing_root_is_asked_for():
    assert "`source.root` must be given" in refused()
    cfg = OmegaConf.create({"train_data": compose("train")})
    assert "Set train_data.source.root=..." in refused(cfg=cfg.train_data)


def test_the_cause_is_chained_and_other_errors_keep_their_type(tmp_path):
    with pytest.raises(ConfigError) as caught:
        recipe("augment.ops.gray.p=high")
    assert caught.value.__cause__ is not None
    with pytest.raises(SourceError) as caught:
        build(compose("train", [f"source.root={tmp_path}/nowhere"]))
    assert "raised while building `source`" in caught.value.__notes__


def test_null_and_deletion_switch_an_operation_or_view_off():
    for overrides in (["augment.ops.jitter=null"], ["~augment.ops.jitter"]):
        assert [s.name for s in recipe(*overrides).draws if s.name != "crop"] == ["vflip", "flip", "gray"]
    assert len(recipe("augment=dino", "augment.views.local=null").views) == 2
    assert recipe("augment.normalize=null").normalize is None


def test_ready_objects_take_the_place_of_arguments_and_are_not_copied(photos):
    source = gpuaug.FolderSource(photos)
    cfg = compose("train", ["num_workers=0", "device=cpu"])  # its source.root is missing, and not needed
    with build(cfg, source=source) as loader:
        assert loader.source is source
    with pytest.raises(ConfigError, match=r"`sorce`.*Did you mean 'source'\?"):
        build(cfg, sorce=source)


def test_a_part_of_an_application_is_built_with_its_interpolations(photos):
    cfg = OmegaConf.create(
        {
            "seed": 7,
            "size": 48,
            "train_data": compose("train", [f"source.root='{photos}'", "num_workers=0", "device=cpu"]),
        }
    )
    OmegaConf.set_struct(cfg, False)
    cfg.train_data.seed = "${..seed}"
    cfg.train_data.augment.crop.size = "${size}"
    cfg.train_data.augment.ops.vflip.p = "${..flip.p}"
    cfg.train_data.shuffle = False
    with build(cfg.train_data) as loader:
        assert loader.seed == 7
        assert loader.augment.crop.size == (48, 48)
        assert type(loader.order) is gpuaug.Sequential
    assert cfg.train_data.shuffle is False  # a user's configuration is left as it was
    cfg.train_data.augment.ops.vflip.p = "${nowhere}"
    assert "`train_data.augment.ops.vflip.p`" in refused(cfg=cfg.train_data)
    assert "build(cfg.train_data)" in refused(cfg=cfg)


def test_plain_dictionaries_may_hold_objects():
    flip = K.RandomHorizontalFlip(p=0.5)
    built = build({"_target_": "gpuaug.Augment", "ops": {"flip": flip}})
    assert built.prepared[0].op is flip
    for nothing in ({}, None, OmegaConf.create({}), [1], "train"):
        with pytest.raises(ConfigError, match="_target_"):
            build(nothing)


RUNS = """
import sys
sys.argv = ["app", "train", "source.root=/no/such/folder"]
import gpuaug
targets = (
    "gpuaug gpuaug.tools.__main__ gpuaug.tools.train.command gpuaug.tools.parity.counterpart "
    "gpuaug.tools.preview.server gpuaug.tools.train.command.Settings "
    "gpuaug.augment.recipe.Augment kornia.core.external.diffusers.X kornia.core.external.onnx.load kornia.__main__ "
    "kornia.onnx.utils.ONNXLoader kornia.feature.loftr.LoFTR kornia.augmentation.__main__"
)
for target in targets.split():
    try:
        gpuaug.build({"_target_": "gpuaug.Augment", "ops": {"x": {"_target_": target}}})
    except gpuaug.ConfigError as error:
        assert str(error).startswith("`ops.x._target_`"), error
        assert repr(target) in str(error), error
    else:
        raise SystemExit(f"{target} was taken")
unwanted = ("gpuaug.tools.main", "gpuaug.tools.parity.counterpart", "gpuaug.tools.preview.server", "diffusers", "onnx")
print([m for m in unwanted if m in sys.modules])
"""


def test_resolving_a_target_runs_nothing():
    done = subprocess.run([sys.executable, "-c", RUNS], capture_output=True, text=True, cwd=CONF.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""


def test_the_nearest_public_name_is_told():
    assert "Did you mean 'gpuaug.Shuffle'?" in refused(cfg={"_target_": "gpuaug.Shufle"})


def test_whatever_a_trusted_module_raises_names_the_key(tmp_path, monkeypatch):
    package = tmp_path / "my_broken"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name, text in (("a", "raise RuntimeError('boom')"), ("b", "raise SystemExit(3)"), ("c", "import no_such_thing"),
                       ("d", "class Lazy:\n    def __getattr__(self, name): raise OSError('asked')\nlazy = Lazy()"),
                       ("e", "def __getattr__(name): raise OSError('asked')"), ("f", "x = ("),
                       ("__main__", "raise OSError('run')")):  # fmt: skip
        (package / f"{name}.py").write_text(text + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    for path, said in {
        "a.X": "boom", "b.X": "SystemExit: 3", "c.X": "no_such_thing", "d.lazy.X": "neither a module nor a class",
        "e.X": "asked", "f.X": "SyntaxError", "__main__": "must name", "g.X": "has no 'g'",
    }.items():  # fmt: skip
        message = refused(
            cfg={"_target_": "gpuaug.Augment", "crop": {"_target_": f"my_broken.{path}"}}, trust="my_broken"
        )
        assert message.startswith("`crop._target_`")
        assert said in message


@pytest.mark.parametrize(("text", "value"), [(".inf", math.inf), ("-.Inf", -math.inf), ("inf", math.inf), ("1.5", 1.5)])
def test_numbers_may_be_written_as_in_yaml(text, value):
    assert compose("train", [f"timeout={text}"]).timeout == value
    assert compose("train", [f"source.root='{text}'"]).source.root == text  # quoted, it is text


class Own:
    def __init__(self, *, a: int | None = None, b: "Unseen" = None) -> None:  # noqa: F821
        raise TypeError("raw")


class Plain:
    def __init__(
        self, many, *, a: int | None = None, b: tuple[float, float] = (0, 1), c: Literal["x", "y"] = "x"
    ) -> None:
        raise TypeError("raw")


def test_the_argument_that_a_constructor_did_not_name_is_found_by_its_annotation():
    plain, own = (f"{__name__}.{kind.__name__}" for kind in (Plain, Own))
    for arguments, expected in (
        ({"a": "1"}, "`crop.a` must be a whole number or null. Found: '1'."),
        ({"a": True}, "`crop.a` must be a whole number or null. Found: True."),
        ({"b": [1, "2"]}, "`crop.b` must be a list. Found: [1, '2']."),
        ({"b": "01"}, "`crop.b` must be a list. Found: '01'."),
        ({"c": "z"}, "`crop.c` must be x or y. Found: 'z'."),
        ({"a": 1, "b": [1, 2.5], "c": "y"}, f"`crop`: {plain} refused its arguments: TypeError: raw"),
    ):
        crop = {"_target_": plain, "many": {"x": 1}, **arguments}
        assert refused(cfg={"_target_": "gpuaug.Augment", "crop": crop}, trust=[__name__]) == expected
    crop = {"_target_": own, "a": "1"}  # its annotations cannot be read
    assert "refused its arguments" in refused(cfg={"_target_": "gpuaug.Augment", "crop": crop}, trust=[__name__])


BOMB = b"a0: &a0 [x, x, x, x, x]\n" + b"".join(
    b"a%d: &a%d [*a%d, *a%d, *a%d, *a%d, *a%d]\n" % (k, k, *[k - 1] * 5) for k in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        (b"seed: 1\nseed: 2\n", 2, "duplicate key"),
        (b"seed: !!python/object:os.system x\n", 1, "tag"),
        (b"seed: 1\na: 'x\n", 3, "quoted scalar|end of stream"),
        (b"seed: 1\na: " + b"[" * 3000 + b"]" * 3000, 2, "100 levels"),
        (b"a: 1\nb: " + b"{b: " * 400 + b"1" + b"}" * 400, 2, "100 levels"),
        (b"a: 1\nb: \xff\n", 2, "UTF-8"),
        (BOMB, 7, "100000 values"),
    ],
)
def test_yaml_that_cannot_be_read_names_file_and_line(tmp_path, text, line, reason):
    (tmp_path / "mine.yaml").write_bytes(text)
    with pytest.raises(ConfigError, match=rf"mine\.yaml, line {line}: .*({reason})"):
        gpuaug.compose("mine", config_dir=tmp_path)
