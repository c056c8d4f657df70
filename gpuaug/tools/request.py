"""Splits the overrides of a command line into the command's own keys and the loader's keys."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpuaug import checks, config
from gpuaug.errors import ConfigError, SourceError
from gpuaug.loader.loader import Loader

OVERRIDE = re.compile(r"(?P<sign>[+~]*)(?P<root>[^.=@]*)(?P<rest>.*)", re.DOTALL)
# keys that the held-out loader (`val.`) takes from the training loader if overrides do not set them
SHARED = ("batch_size", "device", "dtype", "memory_format", "num_workers", "read_threads", "timeout", "start_method")


@dataclass(frozen=True, kw_only=True)
class Keys:
    """A command's keys, explained in ``conf/gpuaug/command/<name>.yaml``. Checks the types of str and bool keys."""

    json: str | None = None

    def __post_init__(self) -> None:
        for key, kind in ((field.name, str(field.type)) for field in fields(self)):
            if kind in ("str", "str | None"):
                checks.text(key, getattr(self, key), optional=kind != "str")
            elif kind == "bool":
                checks.flag(key, getattr(self, key))


@dataclass(frozen=True, kw_only=True)
class Request:
    """One call of a command: its overrides and options."""

    command: str
    overrides: tuple[str, ...] = ()  # for the command and the loader
    config_dir: str | None = None  # folder of the user's own groups and configurations
    config_name: str | None = None  # the user's configuration in that folder; None: gpuaug's ``train``
    at: str | None = None  # the path of the loader in the user's configuration
    trust: tuple[str, ...] = ()  # module prefixes that `_target_` may name, besides gpuaug's and Kornia's

    def __post_init__(self) -> None:
        if self.at is not None and self.config_name is None:
            raise ConfigError(
                f"`--at {self.at}` is a path in your own configuration. Add --config-dir and --config-name."
            )
        if self.config_name is not None and self.config_dir is None:
            raise ConfigError(
                f"`--config-name {self.config_name}` names your own configuration. Add its folder with --config-dir."
            )

    @property
    def prefix(self) -> str:
        """The prefix of the loader's keys in the user's configuration, such as ``train_data.``."""
        return "" if self.at is None else f"{self.at}."

    @cached_property
    def _keys(self) -> list[str]:
        file = config.conf_folder() / "gpuaug" / "command" / f"{self.command}.yaml"
        return [str(key) for key in OmegaConf.load(file)]

    @cached_property
    def _overrides(self) -> dict[str, list[tuple[str, str]]]:
        """For each receiver: pairs (first word of the key, override in the form that `config.compose` needs)."""
        overrides: dict[str, list[tuple[str, str]]] = {"command": [], "held out": [], "loader": []}
        for text in self.overrides:
            sign, root, rest = OVERRIDE.fullmatch(text).groups()  # type: ignore[union-attr]  # always matches
            if self.command == "train" and root == "val" and rest.startswith("."):
                overrides["held out"].append((root, sign + rest[1:]))
            elif root in self._keys:
                overrides["command"].append((root, f"{sign}command.{root}{rest}"))
            else:
                overrides["loader"].append((root, text))
        return overrides

    def settings(self) -> dict[str, Any]:
        """The values of the command's own keys."""
        try:
            composed = config.compose(f"command/{self.command}", [text for _, text in self._overrides["command"]])
            return dict(OmegaConf.to_container(composed.command, resolve=True))  # type: ignore[arg-type]
        except ConfigError as error:
            raise ConfigError(str(error).replace("command.", "")) from error
        except OmegaConfBaseException as error:
            key, reason = str(error.full_key).removeprefix("command."), str(error).partition("\n")[0]
            raise ConfigError(f"`{key}` cannot be resolved: {reason}. Give `{key}` a value.") from error

    def loader(self, name: str = "train", *, before: Sequence[str] = ()) -> DictConfig:
        """The part of the configuration at the path ``--at``. Without a path: the whole configuration.

        ``name``: gpuaug's configuration, used if the user names none. ``before``: overrides before those of the user.
        """
        self._check_roots()
        overrides = [*before, *(text for _, text in self.others())]
        # with `.yaml`, `train` is the user's file and not gpuaug's
        name = name if self.config_name is None else f"{self.config_name.removesuffix('.yaml')}.yaml"
        composed = config.compose(name, overrides, config_dir=self.config_dir)
        if self.at is None:
            if self.config_name is None or "_target_" in composed:
                return composed
            raise ConfigError(
                f"`--at` must give the path of a loader, because `{name}` holds more than one object. Found: no --at. "
                f"Add, for example, --at {next(iter(composed), 'train_data')!s}."
            )
        part = OmegaConf.select(composed, self.at, throw_on_missing=False)
        if not OmegaConf.is_dict(part):
            keys = ", ".join(map(str, composed)) or "nothing"
            raise ConfigError(
                f"`{self.at}` must be the path of a loader in your configuration. Keys found there: {keys}."
            )
        return part

    @cached_property
    def held_out(self) -> DictConfig | None:
        """The configuration of the loader that overrides with ``val.`` describe; None without them."""
        overrides = [text for _, text in self._overrides["held out"]]
        with _held_out():
            return config.compose("eval", overrides, config_dir=self.config_dir) if overrides else None

    def build_held_out(self, train: DictConfig, *, classes: Sequence[str] | None) -> Any:
        """Build the loader of ``held_out``, or None. If its source sets no classes, the source gets ``classes``."""
        part = self.held_out
        if part is None:
            return None
        given = {text.lstrip("+~").partition("=")[0] for _, text in self._overrides["held out"]}
        with _held_out():
            part.update({key: train[key] for key in SHARED if key in train and key not in given})
            source = part.get("source")
            if classes is None or not (OmegaConf.is_dict(source) and "classes" in source and source.classes is None):
                return self.build(part)
            # an object, because OmegaConf would resolve names such as `${oc.env:HOME}` in a configuration
            return self.build(part, source=self.build(source, classes=list(classes)))

    def others(self) -> list[tuple[str, str]]:
        """The loader's overrides, as pairs (first word of the key, override)."""
        return self._overrides["loader"]

    @property
    def names_recipe(self) -> bool:
        """Whether an override such as ``augment=eval`` chooses a recipe."""
        return any(root == "augment" and text.startswith("augment=") for root, text in self.others())

    def build(self, part: DictConfig, *, trust: tuple[str, ...] = (), **objects: Any) -> Any:
        """Build the object that a part of the configuration describes."""
        if self.trust and os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # last, so that installed modules are found first
        return config.build(part, trust=(*self.trust, *trust), **objects)

    def _check_roots(self) -> None:
        """Raise ConfigError for an override without `=`, or for an unknown key similar to a key of the command."""
        for root, text in self.others():
            if not root or ("=" not in text and not text.startswith("~")):
                raise ConfigError(f"`{text}` is not an override. Write overrides as key=value, and options with --.")
            if re.match(r"\+*hydra[./](?!searchpath)", text):
                raise ConfigError(f"`{text}` has no effect here, only in Hydra applications. Leave it out.")
            near = difflib.get_close_matches(root, self._keys, n=1)
            if not near or root.startswith("hydra") or text.startswith("+") or "/" in root:
                continue
            # compose checks the keys of the user's own configuration
            if self.config_name is None and root not in map(str, config.compose("train", config_dir=self.config_dir)):
                raise ConfigError(f"`{root}` is not a key of the command or of the loader. Did you mean `{near[0]}`?")


@contextmanager
def _held_out() -> Iterator[None]:
    try:
        yield
    except (ConfigError, SourceError) as error:
        raise type(error)(f"In the overrides that begin with `val.`: {error}") from error


def count_batches(loader: Loader) -> int:
    """The number of batches of an epoch on this rank. ConfigError if it is 0."""
    if count := len(loader):
        return count
    ranks = loader.epoch_order.world_size
    raise ConfigError(
        f"an epoch has no batches: {len(loader.source)} samples, `batch_size={loader.batch_size}`"
        f"{f' on {ranks} ranks' if ranks > 1 else ''}, `last={loader.last}`. Lower `batch_size` or set `last=pad`."
    )
