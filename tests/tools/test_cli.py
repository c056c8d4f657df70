"""The command line itself: help, names, keys, errors, the user's own configuration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from common import PROGRAM
from conftest import ROOT
from omegaconf import OmegaConf
from PIL import Image

import gpuaug
from gpuaug.config import conf_folder
from gpuaug.errors import ConfigError, GpuaugError, SourceError
from gpuaug.tools.main import COMMANDS, main
from gpuaug.tools.report import Report, output
from gpuaug.tools.request import Request


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("blue", "red"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for n in range(4):
            color = (200, 30, 10 * n) if name == "red" else (10 * n, 30, 200)
            Image.new("RGB", (40, 30), color).save(tmp_path / "images" / name / f"{n}.png")
    return tmp_path / "images"


def request(*overrides: str, command: str = "train", **more: object) -> Request:
    return Request(command=command, overrides=overrides, **more)  # type: ignore[arg-type]


def test_help_imports_nothing_but_a_little_of_the_standard_library(capsys: pytest.CaptureFixture[str]) -> None:
    """Which is why it answers in a tenth of a second: 98 modules, most of them Python's own start."""
    code = (
        "import sys; sys.modules.pop('_distutils_hack', None); before = set(sys.modules)\n"
        "from gpuaug.tools.main import COMMANDS, main\n"
        "assert not any(main([*words, '--help']) for words in ([], *([name] for name in COMMANDS)))\n"
        "new = set(sys.modules) - before\n"
        "others = {name.partition('.')[0] for name in new} - {'gpuaug', *sys.stdlib_module_names}\n"
        "assert not others, others\n"
        "assert len(new) < 100, sorted(new)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for word in (*(f"\n  {name} " for name in COMMANDS), "--trust", str(conf_folder() / "gpuaug" / "train.yaml")):
        assert word in done.stdout
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        keys = OmegaConf.load(conf_folder() / "gpuaug" / "command" / f"{name}.yaml")
        shown = capsys.readouterr().out
        assert all(f"  {key}:" in shown for key in keys)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_key_of_a_command_is_one_of_its_settings(name: str) -> None:
    from importlib import import_module

    module = import_module(f"gpuaug.tools.{name}.command")
    settings = request(command=name).settings()
    assert set(settings) == set(module.Settings.__dataclass_fields__)
    made, default = module.Settings(**settings), module.Settings()
    for key, value in settings.items():
        assert getattr(made, key) == value
        assert key == "model" or getattr(default, key) == value, f"{key}: YAML and dataclass differ"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trian"], "Did you mean `train`?"),
        (["source.root=/data"], "The command comes first: gpuaug train source.root=/data"),
        (["xyz"], "Commands: train"),
        (["train", "epocks=3"], "Did you mean `epochs`?"),
        (["train", "bach_size=3"], "Did you mean 'batch_size'?"),
        (["train", "source.root=x", "augment=simcrl"], "Did you mean augment=simclr?"),
        (["train", "optimiser=sgd"], "Did you mean `optimizer`?"),
        (["train", "optimizer=sgdd"], "`optimizer` must be one of sgd, adamw. Found: 'sgdd'."),
        (["train", "epochs=0"], "`epochs` must be a whole number from 1 to 999999999. Found: 0."),
        (["train", "lr=high"], "`lr` must be a number in [0, inf]. Found: 'high'."),
        (["train", "model.widht=3"], "`model.widht`"),
        (["train", "lr=${oc.env:NO_SUCH_NAME}"], "`lr` cannot be resolved: KeyError"),
        (["preview", "out=${seed}"], "`out` cannot be resolved: Interpolation key 'seed' not found."),
        (["train", "oops"], "`oops` is not an override"),
        (["train", "~"], "`~` is not an override"),
        (["train", "hydra.run.dir=x"], "`hydra.run.dir=x` has no effect here"),
        (["train", "+hydra/launcher=basic"], "`+hydra/launcher=basic` has no effect here"),
        (["train", "--trust", "./my_net.py"], "`trust` must hold module prefixes, such as 'my_pkg.'. Found: './my"),
        (["train", "--at", "train_data"], "--config-name"),
        (["train"], "source.root"),
        (["train", "out=2024"], "Quote it: \"out='2024'\"."),
        (["preview", "out=null"], "`out` must be text. Found: None."),
        (["preview", "out=look.jpg"], "`out` must end in .png or .html or .htm. Found: 'look.jpg'."),
        (["preview", "draws=0"], "`draws` must be a whole number >= 1 or null. Found: 0."),
        (["preview", "samples=[1,x]"], "`samples` must be a count, such as 5, or a list of sample numbers"),
        (["profile", "repeats=0"], "`repeats` must be a whole number >= 1. Found: 0."),
        (["profile", "num_classes=ten"], "`num_classes` must be a whole number >= 1 or null. Found: 'ten'."),
        (["doctor", "fresh=maybe"], "`fresh` must be true or false"),
        (["doctor", "json=/proc/none/d.json"], "`json` must be the path of a file"),
        (["doctor", "seconds=-1"], "`seconds` must be a number in [0, 120]. Found: -1."),
        (["plan", "seconds=0"], "`seconds` must be a number in [1, 3600]. Found: 0."),
    ],
)
def test_errors_are_one_clean_message(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    err = capsys.readouterr().err
    assert expected in err
    assert "Traceback" not in err
    assert "command.train" not in err  # how the keys are composed is no business of the user's


def test_held_out_overrides_are_named_as_the_user_wrote_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", f"source.root={folder}", "val.bach=3", "num_workers=0"]) == 2
    assert "`val.`: `bach`" in capsys.readouterr().err
    assert main(["train", f"source.root={folder}", "val.source.root=/no/such", "num_workers=0"]) == 2
    assert "`val.`: `source.root` does not exist: '/no/such'" in capsys.readouterr().err


def test_tracebacks_on_request(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["train", "epochs=0", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("GPUAUG_DEBUG", "1")
    assert main(["train", "epochs=0"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_overrides_go_where_they_belong(folder: Path) -> None:
    asked = request(
        *("epochs=3", "model._target_=my.Net", "+model.depth=2", "source.root=/a", "~augment.ops.gray", "batch_size=7"),
        *(f"val.source.root={folder}", "val.augment=none", "val.num_workers=0", "device=cpu"),
    )
    settings, loader = asked.settings(), asked.loader()
    assert settings["epochs"] == 3
    assert settings["model"] == {"_target_": "my.Net", "depth": 2}
    assert loader.source.root == "/a"
    assert "gray" not in loader.augment.ops
    assert not {"epochs", "model", "val"} & set(loader)
    with asked.build_held_out(loader, classes=None) as held_out:
        assert (len(held_out.source), held_out.batch_size, held_out.num_workers) == (8, 7, 0)
        assert isinstance(held_out.augment.crop, gpuaug.Resize)
    assert request("source.root=/a").build_held_out(loader, classes=None) is None


def test_names_of_classes_are_data_and_not_configuration(tmp_path: Path) -> None:
    names = ["${oc.env:HOME}", "${nowhere}", "???", "a,b=[c]"]
    for part, held in (("train", names), ("val", names[:2])):
        for name in held:
            (tmp_path / part / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / part / name / "0.png")
    words = [f"source.root={tmp_path}/train", "num_workers=0", "device=cpu", "decode.backend=pillow"]
    asked = request(*words, f"val.source.root={tmp_path}/val")
    train = asked.loader()
    with asked.build(train) as loader, asked.build_held_out(train, classes=loader.source.classes) as val:
        assert val.source.classes == loader.source.classes == sorted(names)
        assert val.source.labels.tolist() == [sorted(names).index(n) for n in sorted(names[:2])]
    with pytest.raises(SourceError, match="no/such/folder"):
        request("val.source.root=/no/such/folder").build_held_out(train, classes=names)
    with pytest.raises(ConfigError, match=r"`source\.root` must be given"):
        request("val.augment=none").build_held_out(train, classes=names)


def test_own_configuration(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "train.yaml").write_text(
        "defaults:\n  - gpuaug@train_data: train\n  - _self_\n"
        f"batch: 5\ntrain_data:\n  batch_size: ${{batch}}\n  source: {{root: {folder}}}\n"
    )
    own = {"config_dir": str(tmp_path / "conf"), "config_name": "train"}
    asked = request("epochs=2", "batch=6", "gpuaug/augment@train_data.augment=flip", at="train_data", **own)
    loader = asked.loader()
    assert asked.settings()["epochs"] == 2
    assert "jitter" not in loader.augment.ops
    with asked.build(loader) as built:
        assert built.batch_size == 6
    with pytest.raises(ConfigError, match="`train_date` must be the path of a loader"):
        request(at="train_date", **own).loader()
    with pytest.raises(ConfigError, match=r"`train\.yaml` holds more than one object.* --at train_data\."):
        request(**own).loader()
    with pytest.raises(ConfigError, match="--config-dir"):
        request(config_name="train")
    (tmp_path / "conf" / "augment").mkdir()
    (tmp_path / "conf" / "augment" / "mine.yaml").write_text("_target_: gpuaug.Augment\ncopies: 3\n")
    assert request("augment=mine", config_dir=own["config_dir"]).loader().augment.copies == 3
    main_words = ["preview", "--config-dir", own["config_dir"], "--config-name", "train", "--at", "train_data"]
    assert main([*main_words, f"out={tmp_path / 'own.png'}", "samples=1", "draws=1"]) == 0
    assert (tmp_path / "own.png").exists()


@pytest.mark.parametrize("key", ["json", "out"])
def test_a_file_that_cannot_be_written_is_found_out_first(
    key: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["preview", f"source.root={folder}", f"{key}={tmp_path}"]) == 2
    assert f"`{key}` must be the path of a file" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    for place in (f"{tmp_path}/file/x", "/proc/x", f"{tmp_path}/pipe"):  # of which rights alone say nothing
        assert main(["preview", f"source.root={folder}", f"{key}={place}"]) == 2
        shown = capsys.readouterr()
        assert f"`{key}` must be the path of a file" in shown.err
        assert not shown.out


def test_what_belongs_to_the_system_is_not_replaced(tmp_path: Path) -> None:
    for place in ("/dev/stdout", "/dev/null", "/dev/no/such"):
        with pytest.raises(ConfigError, match="a system file"):
            output(place, "json")
    (tmp_path / "real.json").write_text("{}")
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    report = Report(file=str(tmp_path / "link.json"))
    report.values["a"] = 1
    report.write()
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text()) == {"a": 1}


def test_a_file_that_can_no_longer_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    report = Report(file=str(tmp_path / "new" / "r.json"))
    report.values["a"] = 1
    (tmp_path / "new").rmdir()
    (tmp_path / "new").write_text("no folder any more")
    with pytest.raises(GpuaugError, match="`json`, '.*r.json', could not be written"):
        report.write()


def test_logging_is_as_before_afterwards(folder: Path, tmp_path: Path) -> None:
    import logging

    log = logging.getLogger("gpuaug")
    before = log.level, log.propagate, list(log.handlers)
    main(["preview", f"source.root={folder}", f"out={tmp_path}/p.png", "samples=1", "draws=1"])
    assert (log.level, log.propagate, list(log.handlers)) == before


@pytest.mark.parametrize("command", ["--help", "train --help", "doctor"])
def test_a_reader_that_has_had_enough_is_no_error(command: str) -> None:
    """As `gpuaug train --help | head -1`."""
    process = subprocess.Popen(
        [*PROGRAM, *command.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert "Traceback" not in said
    assert "BrokenPipe" not in said
    assert process.wait(300) in (0, 2, 141)
