"""Compiling C++: the cache, damaged and unsafe libraries, compilers that are missing, broken or several words."""

from __future__ import annotations

import logging
import platform
import shutil
import tempfile
from pathlib import Path

import pytest

from gpuaug.augment.fused import backend as native
from gpuaug.native import build as compiled


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file to compile, and an empty folder for what is built."""
    if native.library() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "one.cpp"
    source.write_text('extern "C" int gpuaug_test_one() { return 41 + 1; }\n')
    return source


def load(source: Path) -> int:
    library = compiled.load(str(source), name="one", without="is missing")
    assert library is not None
    return library.gpuaug_test_one()


def write_compiler(folder: Path, patch: pytest.MonkeyPatch, script: str) -> None:
    """A compiler that is a shell script, in which ``REAL`` is a real one."""
    compiler = folder / "c++"
    compiler.write_text("#!/bin/sh\n" + script.replace("REAL", shutil.which("g++") or shutil.which("clang++") or ""))
    compiler.chmod(0o755)
    patch.setenv("CXX", str(compiler))


def test_the_build_is_kept_and_its_time_shown(one: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="gpuaug"):
        assert [load(one), load(one)] == [42, 42]
    assert len([r for r in caplog.records if "compiled" in r.message and " s with " in r.message]) == 1
    assert len(list((one.parent / "gpuaug").glob("*.so"))) == 1


@pytest.mark.parametrize("damage", ["empty", "cut", "link", "group"])
def test_a_build_that_is_damaged_or_not_ones_own_is_built_anew(
    damage: str, one: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(one) == 42
    (file,) = (one.parent / "gpuaug").glob("*.so")
    whole = file.read_bytes()
    file.unlink()  # a library that is loaded must not be written into
    if damage == "link":
        (one.parent / "elsewhere.so").write_bytes(whole)
        file.symlink_to(one.parent / "elsewhere.so")
    else:
        file.write_bytes({"empty": b"", "cut": whole[: len(whole) // 2], "group": whole}[damage])
        file.chmod(0o770 if damage == "group" else 0o700)
    with caplog.at_level(logging.INFO, logger="gpuaug"):
        assert load(one) == 42
    assert str(file) in caplog.text
    assert file.stat().st_size == len(whole)
    assert not file.is_symlink()
    assert file.stat().st_mode & 0o022 == 0


def test_the_best_installed_library_for_the_processor_is_loaded_unless_it_is_damaged_or_the_source_changed(
    one: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    text, file = compiled.source_text(str(one), name="one")
    levels = {"best": ("", "no-processor-has-this"), "good": ("", ""), "slow": ("", "")}
    for number, level in enumerate(levels):
        path = one.parent / "lib" / level / file
        path.parent.mkdir(parents=True)
        compiled.compile_file(compiled.find_compiler() or [], compiled.FLAGS, text.replace("41 + 1", str(number)), path)
    monkeypatch.setattr(compiled, "INSTALLED", one.parent / "lib")
    monkeypatch.setattr(compiled, "LEVELS", {platform.machine(): levels})
    with monkeypatch.context() as without:
        without.setenv("CXX", "g++-0.1")
        assert load(one) == 1
        one.write_text(one.read_text().replace("41 + 1", "41 + 2"))
        assert compiled.load(str(one), name="one", without="is missing") is None
        assert "Looked for: g++-0.1." in caplog.text
    assert load(one) == 43
    path = one.parent / "lib/good" / compiled.source_text(str(one), name="one")[1]
    path.write_bytes(b"")
    with caplog.at_level(logging.INFO, logger="gpuaug"):
        assert load(one) == 43
    assert f"{path} is not used" in caplog.text


def test_the_build_is_not_kept_behind_a_link(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir(mode=0o700)
    (tmp_path / "gpuaug").symlink_to(tmp_path / "other")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.INFO, logger="gpuaug"):
        found = compiled.cache()
    assert found is None
    assert str(tmp_path / "gpuaug") in caplog.text


def test_a_build_that_cannot_be_kept_leaves_nothing_behind(
    one: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file, so that no folder can be made")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    assert load(one) == 42
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_build_that_cannot_be_written_to_the_cache_still_runs(one: Path, caplog: pytest.LogCaptureFixture) -> None:
    """For example, on a full disk; here the file name is too long."""
    library = compiled.load(str(one), name="one" * 80, without="is missing")
    assert library is not None
    assert library.gpuaug_test_one() == 42
    assert "cannot write" in caplog.text
    assert list((one.parent / "gpuaug").iterdir()) == []


def test_a_broken_compiler_is_named(
    one: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_compiler(one.parent, monkeypatch, 'test "$1" = --version && exit 0\necho no space left >&2\nexit 1\n')
    assert compiled.load(str(one), name="one", without="is missing") is None
    assert "no space left" in caplog.text


@pytest.mark.parametrize("words", ["env {}", "{}"])
def test_the_compiler_may_be_several_words_or_a_path_with_spaces(
    words: str, one: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one.parent / "my tools").mkdir()
    link = one.parent / ("my tools/c++" if words == "{}" else "c++")
    link.symlink_to(shutil.which("g++") or shutil.which("clang++") or "")
    monkeypatch.setenv("CXX", words.format(link))
    assert load(one) == 42


def test_a_compiler_may_write_in_another_encoding(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_compiler(one.parent, monkeypatch, "printf 'keine Gew\\344hr'\nexec REAL \"$@\"\n")  # German, in Latin-1
    assert load(one) == 42


def test_a_build_without_native_instructions_does_not_replace_one_with_them(
    one: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler may have been killed once, because memory was short."""
    short = one.parent / "short"
    short.touch()
    script = f'case "$*" in *=native*) test -e "{short}" && exit 1;; esac\nexec REAL "$@"\n'
    write_compiler(one.parent, monkeypatch, script)
    assert load(one) == 42
    (slow,) = (one.parent / "gpuaug").glob("*.so")
    short.unlink()
    assert load(one) == 42
    assert len(list((one.parent / "gpuaug").glob("*.so"))) == 2
    assert slow.exists()
