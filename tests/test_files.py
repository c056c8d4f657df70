"""Files that appear whole or not at all."""

import os

import pytest

from gpuaug import files


def test_a_file_is_replaced_whole_or_stays_and_nothing_is_left_behind(tmp_path, monkeypatch):
    path = tmp_path / "a" / "b.json"
    files.write(path, "one")
    files.write(path, b"two")
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o644

    def fail(*names):
        assert b"".join(p.read_bytes() for p in path.parent.iterdir() if p != path) == b"three"
        raise OSError("full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="full"):
        files.write(path, b"three")
    assert [p.read_bytes() for p in path.parent.iterdir()] == [b"two"]


def test_the_cache_folder_follows_xdg(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert files.cache_folder() == tmp_path / "gpuaug"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.cache_folder() == tmp_path / ".cache" / "gpuaug"


def test_a_user_without_a_home_has_no_cache_folder_called_tilde(monkeypatch):
    def unknown(user):
        raise KeyError(user)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    for given in ("", "~/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert files.cache_folder().is_absolute()


def test_a_tilde_in_xdg_is_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "~/cache")
    assert files.cache_folder() == tmp_path / "cache" / "gpuaug"
