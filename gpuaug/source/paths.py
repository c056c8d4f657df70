"""Which files a user means: paths and URLs with braces or ``*``, lists of them, folders."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

from gpuaug.errors import ConfigError, SourceError
from gpuaug.source.remote.storage import Found, Storage, is_url, join, locate, shown, split

MOST_FILES = 1_000_000


def places_of(root: Any, storage: Storage, *, ending: str) -> list[Found]:
    """The files in order, each with its bytes and version; the place stands for the key.

    Args:
        root: a path or URL, with ``{000..099}``, ``{a,b}`` or ``*``, or a folder; or a list of them.
        storage: where they are.
        ending: of the files; in a folder, of those that are taken.

    Raises:
        ConfigError, SourceError: if a file is missing, or there are none.
    """
    many = isinstance(root, Sequence) and not isinstance(root, str)
    places: list[str] = []
    known: dict[str, Found] = {}
    for item in list(root) if many else [root]:
        if not isinstance(item, str | os.PathLike) or not os.fspath(item) or "\0" in str(item):
            raise ConfigError(f"`source.root` must be paths or URLs of {ending} files. Found: {item!r}.")
        for text in braces(os.fspath(item)):
            place = locate(text)
            if (
                place.split("?", 1)[0].endswith(ending)
                and "*" not in place
                and (is_url(place) or not os.path.isdir(place))
            ):
                places.append(place)
                continue
            below = _below(place, storage, ending)
            if not below:
                raise SourceError(
                    f"`source.root` must name {ending} files, or a folder of them. Found: {shown(place)!r}."
                )
            known |= {file.key: file for file in below}
            places += [file.key for file in below]
    if not places:
        raise ConfigError(f"`source.root` must name {ending} files. Found: {root!r}.")
    if len(set(places)) < len(places):
        twice = sorted({place for place in places if places.count(place) > 1}) if len(places) < 10_000 else places
        raise SourceError(f"`source.root` names files twice, such as {shown(twice[0])!r}.")
    missing = [place for place in places if place not in known]
    known |= dict(zip(missing, storage.stat(missing), strict=True))
    return [known[place] for place in places]


def braces(text: str) -> list[str]:
    """Bash's ``{a,b}`` and ``{000..099}``, as webdataset expands them; others are left as they are."""
    parts = re.split(r"\{([^{}]*,[^{}]*|\d+\.\.\d+)\}", text)
    options: list[Sequence[str]] = []
    count = 1
    for i, part in enumerate(parts):
        if i % 2 == 0:
            options.append([part])
        elif "," in part:
            options.append(part.split(","))
        else:
            first, last = part.split("..")
            width = max(len(first), len(last)) if first[0] == "0" or last[0] == "0" else 0
            step = 1 if int(first) <= int(last) else -1
            numbers = range(int(first), int(last) + step, step)
            options.append(
                [str(n).zfill(width) for n in numbers] if len(numbers) <= MOST_FILES else [""] * (MOST_FILES + 1)
            )
        count *= len(options[-1])
        if count > MOST_FILES:
            raise ConfigError(f"`source.root` must name at most {MOST_FILES} files. Found: {text!r}.")
    return ["".join(option) for option in product(*options)]


def common_folder(places: list[str]) -> tuple[str, list[str]]:
    """The folder that all files are in, and their paths in it."""
    pairs = [split(place) for place in places]
    folders = [folder.split("/") for folder, _ in pairs]
    depth = 0
    while all(len(f) > depth for f in folders) and len({f[depth] for f in folders}) == 1:
        depth += 1
    names = [name.split("?", 1)[0] for _, name in pairs]
    names = ["/".join([*folder[depth:], name]) for folder, name in zip(folders, names, strict=True)]
    return "/".join(folders[0][:depth]) or "/", names


def _below(place: str, storage: Storage, ending: str) -> list[Found]:
    """The files in a folder and the folders in it, or that a pattern matches, sorted."""
    pattern = None
    if "*" in place:
        place, pattern = split(place)
        if "*" in place:
            raise ConfigError(f"`source.root` may have a * in its last part only. Found: {shown(place)!r}.")
    if not is_url(place):
        if pattern is not None:
            return storage.stat(sorted(glob.glob(os.path.join(glob.escape(place), pattern))))
        walk = os.walk(place)
        return storage.stat(
            sorted(os.path.join(above, x) for above, _, names in walk for x in names if x.endswith(ending))
        )
    found = [
        Found(join(place, file.key), file.size, file.stamp)
        for file in storage.find(place)
        if (file.key.endswith(ending) if pattern is None else fnmatchcase(file.key, pattern) and "/" not in file.key)
    ]
    if any(file.size < 0 for file in found):  # a listing in HTML has no sizes
        found = storage.stat([file.key for file in found])
    return sorted(found)
