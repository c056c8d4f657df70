"""Paths and URLs of sources."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable
from itertools import product
from typing import Any
from urllib.parse import quote, unquote

from gpuaug.errors import ConfigError

MOST_FILES = 1_000_000  # limit for a pattern with braces


def is_url(path: Any) -> bool:
    return "://" in os.fsdecode(path)


def absolute(path: Any, *, key: str = "source.root", below: Any = None) -> str:
    """Return a URL without a trailing slash, or an absolute local path. ``file://`` URLs become local paths.

    ``below``: the folder or URL where a relative path starts; None: the working folder.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path) or "\0" in os.fsdecode(path):
        raise ConfigError(f"`{key}` must be a path or a URL. Found: {path!r}.")
    text = os.fspath(path)
    if below is not None and not is_url(text) and not os.path.isabs(os.path.expanduser(text)):
        text = join(absolute(below), text)
    for scheme in ("file://", "local://"):
        if text.startswith(scheme):
            text = "/" + unquote(text.removeprefix(scheme), errors="surrogateescape").lstrip("/")
    if not is_url(text):
        return os.path.abspath(os.path.expanduser(text))
    if not is_url(short := text.rstrip("/")):
        raise ConfigError(f"`{key}` must name a bucket or a server. Found: {text!r}.")
    return short


def join(root: str, key: str) -> str:
    """The path or URL of a relative path below ``root``. Check an untrusted key with :func:`is_safe` first."""
    if not is_url(root):
        return os.path.join(root, key)
    if root.startswith(("http://", "https://")):  # keys are quoted in web URLs, but not for object stores
        key = quote(os.fsencode(key))
    return f"{root}/{key}"


def split(path: str) -> tuple[str, str]:
    """Split a path or URL into its folder and the name in that folder."""
    if not is_url(path):
        return os.path.split(path)
    scheme, rest = path.split("://", 1)
    folder, name = posixpath.split(rest)
    if scheme in ("http", "https"):
        name = unquote(name, errors="surrogateescape")
    return f"{scheme}://{folder}", name


def is_safe(key: str) -> bool:
    """Whether a relative path stays inside its root."""
    parts = key.rstrip("/").split("/")
    outside = os.path.isabs(key) or any(part in ("", ".", "..") for part in parts)
    return "\0" not in key and "://" not in key and not outside


def redact(path: str) -> str:
    """Remove user name, password and signature from a URL, because messages must not show them."""
    return re.sub(r"(?<=://)[^/]*@", "", path.split("?", 1)[0]) if is_url(path) else path


def expand_braces(text: str) -> list[str]:
    """Expand bash's ``{a,b}`` and ``{000..099}``, as webdataset does. Other braces are not changed.

    >>> expand_braces("train-{08..10}.tar")
    ['train-08.tar', 'train-09.tar', 'train-10.tar']
    """
    parts = re.split(r"\{([^{}]*,[^{}]*|\d+\.\.\d+)\}", text)
    options: list[Iterable[str]] = []
    count = 1
    for i, part in enumerate(parts):
        choices: list[str] | range = part.split(",") if i % 2 else [part]
        if i % 2 and "," not in part:
            first, last = part.split("..")
            width = max(len(first), len(last)) if first[0] == "0" or last[0] == "0" else 0
            step = 1 if int(first) <= int(last) else -1
            choices = range(int(first), int(last) + step, step)
        count *= len(choices)
        if count > MOST_FILES:
            raise ConfigError(f"`source.root` must name at most {MOST_FILES} files. Found: {text!r}.")
        options.append(choices if isinstance(choices, list) else [str(n).zfill(width) for n in choices])
    return ["".join(option) for option in product(*options)]


def common_folder(paths: list[str]) -> tuple[str, list[str]]:
    """The deepest folder that contains all files, and their paths relative to it."""
    pairs = [split(path) for path in paths]
    folders = [folder.split("/") for folder, _ in pairs]
    depth = 0
    while all(len(f) > depth for f in folders) and len({f[depth] for f in folders}) == 1:
        depth += 1
    names = [name.split("?", 1)[0] for _, name in pairs]
    names = ["/".join([*folder[depth:], name]) for folder, name in zip(folders, names, strict=True)]
    return "/".join(folders[0][:depth]) or "/", names
