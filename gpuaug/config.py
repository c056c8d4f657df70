"""YAML and override strings to a configuration (:func:`compose`), and a configuration to objects (:func:`build`).

Hydra is imported inside functions, as every Hydra application imports this file through our search-path plugin.
``hydra.utils.instantiate`` is not used: it copies the objects passed in (a source may hold a large index), does not
name the full key of an argument that a class does not take, and imports whatever module a target names.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

import gpuaug
from gpuaug.errors import ConfigError, GpuaugError

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

TRUSTED = ("kornia.augmentation.",)  # and gpuaug's public names
_NAMED = ("ops", "views")  # mappings of named objects, where null switches an entry off
# YAML's spelling of inf and nan, which is text in Hydra's overrides
_SPECIAL_FLOAT = re.compile(r"^([^=]+=[+-]?)\.(inf|nan)$", re.IGNORECASE)


def conf_folder() -> Path:
    """The folder that holds ``gpuaug/train.yaml``: ``gpuaug/conf`` of an installation, ``conf`` of a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


# -- compose ----------------------------------------------------------------------------------------------------------


def compose(name: str = "train", overrides: Sequence[str] = (), *, config_dir: str | Path | None = None) -> DictConfig:
    """The configuration ``name`` with ``overrides`` applied; the same strings as on the command line.

    Works inside a running Hydra application, whose state it leaves as it was.

    Args:
        name: ``train``, ``eval``, or the name of a file in ``config_dir``.
        overrides: Hydra's override strings, as ``["source.root=/data", "augment=simclr", "~augment.ops.gray"]``.
        config_dir: folder with further groups and configurations; they come before ours of the same name.

    Raises:
        ConfigError: names the full key, what was expected, what was found, and the nearest valid name.
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(overrides, str):
        raise ConfigError(f"`overrides` must be a list of strings. Found: {overrides!r}. Write [{overrides!r}].")
    overrides = [_SPECIAL_FLOAT.sub(r"\1\2", str(o)) for o in overrides]
    parsed = _parse(overrides)
    with _hydra(config_dir) as loader:
        _refuse_stale(name, parsed)
        try:
            cfg = hydra.compose(name, overrides)
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            raise ConfigError(_explain(error, name, parsed, loader)) from error
    if cfg.get("_target_") == "gpuaug.Loader":
        _apply_shuffle(cfg, key="")
    return cfg


@contextmanager
def _hydra(config_dir: str | Path | None) -> Iterator[ConfigLoader]:
    """Hydra over ``config_dir``, then our folder; what an outer Hydra application had is restored."""
    from hydra import initialize_config_dir
    from hydra.core.config_search_path import SearchPathQuery
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.utils import JobRuntime
    from hydra.version import VersionBase

    ours = conf_folder() / "gpuaug"
    first = ours if config_dir is None else Path(config_dir).expanduser().resolve()
    if not first.is_dir():
        raise ConfigError(f"`config_dir` must be a folder. Found: {str(config_dir)!r}.")
    outer, running = GlobalHydra.instance(), GlobalHydra.instance().hydra
    base, version = VersionBase.instance(), VersionBase.instance().version_base
    job, settings = JobRuntime.instance(), JobRuntime.instance().conf.copy()
    outer.clear()
    try:
        with initialize_config_dir(str(first), version_base="1.3", job_name="gpuaug"):
            loader: Any = GlobalHydra.instance().config_loader()
            if first != ours:  # by hydra.searchpath a primary configuration would not be found
                path = loader.get_search_path()
                path.prepend("gpuaug", f"file://{ours}", anchor=SearchPathQuery(provider="schema"))
                loader.repository.initialize_sources(path)
            yield loader
    finally:
        outer.hydra = running
        GlobalHydra.set_instance(outer)
        base.version_base = version
        job.conf = settings


def _parse(overrides: Iterable[str]) -> list[Override]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parsed = []
    for text in overrides:
        try:
            parsed.append(OverridesParser.create().parse_override(text))
        except HydraException as error:
            raise ConfigError(
                f"The override {text!r} cannot be read: {str(error).splitlines()[0]}. A value with = , {{ }} [ ] in it "
                "needs quotes of its own: \"key='value'\"."
            ) from error
    return parsed


def _explain(error: Exception, name: str, overrides: list[Override], loader: ConfigLoader) -> str:
    """Which override the composition failed at, and what it could have been; else Hydra's own message."""
    import hydra
    from hydra.core.object_type import ObjectType
    from hydra.errors import HydraException
    from omegaconf import DictConfig

    names = [n for n in loader.get_group_options("", results_filter=ObjectType.CONFIG) if not n.startswith("_")]
    if "/" not in name and name not in names:
        return f"There is no configuration {name!r}. Found: {', '.join(names)}.{_nearest(name, names)}"
    for override in overrides:
        group, key, value = override.key_or_group, override.get_key_element(), override.value()
        if override.is_sweep_override():
            return f"`{key}` takes one value, or a list in brackets. Found: {override.get_value_string()}, a sweep."
        options = [] if "." in group else loader.get_group_options(group, results_filter=ObjectType.CONFIG)
        for option in (value if isinstance(value, list) else [value]) if options else []:
            if not override.is_delete() and option not in options:
                given = "null" if option is None else str(option)
                near = _nearest(given, options, key=key)
                return f"`{key}` must be one of {', '.join(options)}. Found: {given}.{near}"
    named = re.match(r"Could not (?:override|delete from config\.) '([^']+)'", str(error))
    if named and "delete" in named[0]:
        lines = [str(o.input_line) for o in overrides if o.key_or_group != named[1]]
        try:
            hydra.compose(name, [*lines, f"{named[1]}=null"])  # fails as well, and says what there is
        except HydraException as other:
            error = other
    unknown: Any = error.__cause__
    parent = getattr(unknown, "parent_node", None)
    if not named or not isinstance(parent, DictConfig):
        return str(error)
    path, word, above = max(named[1], unknown.full_key, key=len), str(unknown.key), parent._get_full_key(None)
    keys = [str(key) for key in parent if key != "hydra"]
    target = f" ({parent._target_})" if above and "_target_" in keys else ""
    return (
        f"`{path}`: {f'`{above}`{target}' if above else f'the configuration {name!r}'} has no key {word!r}."
        f"{_nearest(word, keys)} It has: {', '.join(keys) or 'nothing'}. `+{path}=...` adds one."
    )


def _refuse_stale(name: str, overrides: list[Override]) -> None:
    """Refuse ``key={_target_: Other, ...}`` that would leave arguments of what stood there before.

    Hydra merges mappings, so they stay; some (as ``p``) would even be accepted by the new class.
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf import DictConfig, OmegaConf

    for override in overrides:
        value, key = override.value(), override.key_or_group
        if override.is_delete() or not isinstance(value, dict) or "_target_" not in value:
            continue
        below = [o for o in overrides if o.key_or_group.startswith(f"{key}.") and not o.is_delete()]
        others = [str(o.input_line) for o in overrides if o is not override and o not in below]
        try:
            before = OmegaConf.select(hydra.compose(name, others), key, throw_on_missing=False)
        except (HydraException, ValueError):
            continue  # another override is wrong, and will be named
        if not isinstance(before, DictConfig) or before.get("_target_") in (None, value["_target_"]):
            continue
        given = {*map(str, value), *(o.key_or_group[len(key) + 1 :].split(".")[0] for o in below)}
        if stale := [str(k) for k in before if str(k) not in given]:
            raise ConfigError(
                f"`{key}` was {before['_target_']} and becomes {value['_target_']}, but an override merges: "
                f"{', '.join(stale)} would stay. Remove it first: '~{key}' '+{key}={{_target_: ...}}' (in a mapping of "
                f"operations it then runs last), or remove only what is left over: '~{key}.{stale[0]}'."
            )


def _nearest(word: str, options: Iterable[str], *, key: str = "") -> str:
    """`` Did you mean 'x'?``, or nothing."""
    options = list(options)
    near = get_close_matches(word, options, n=1, cutoff=0.6)
    if not near and word == "null" and "none" in options:
        near = ["none"]
    if not near:
        return ""
    return f" Did you mean {key}={near[0]}?" if key else f" Did you mean {near[0]!r}?"


# -- build ------------------------------------------------------------------------------------------------------------


def build(cfg: Mapping[str, Any] | DictConfig, *, trust: str | Iterable[str] = (), **objects: Any) -> Any:
    """The loader (or whatever ``_target_`` names) that a configuration describes.

    The whole tree is checked before anything is instantiated: every ``_target_`` must resolve to a class whose own
    module is in ``kornia.augmentation``, or to a public class of gpuaug, and must take the arguments given to it.

    Args:
        cfg: from :func:`compose`, or a part of your own Hydra application's configuration, as ``cfg.train_data``.
        trust: module prefixes that targets may come from besides, as ``["my_pkg."]``.
        **objects: ready objects in place of arguments of the outermost target, as ``source=my_source``.

    Raises:
        ConfigError: names the full key, what was expected, what was found, and the nearest valid name. An error of a
            constructor is its cause.
    """
    trusted = [trust] if isinstance(trust, str) else list(trust)
    for prefix in trusted:
        if not isinstance(prefix, str) or not prefix.strip("."):
            raise ConfigError(f"`trust` must hold module prefixes, as 'my_pkg.'. Found: {prefix!r}.")
    prefixes = TRUSTED + tuple(p.rstrip(".") + "." for p in trusted)
    tree, root = _plain(cfg, leave_out=objects)
    if tree["_target_"] == "gpuaug.Loader" and "order" not in objects:
        _apply_shuffle(tree, key=root)
    plan = _check(tree, key=root, prefixes=prefixes, objects=objects)
    return _make(plan)


def _plain(cfg: Any, *, leave_out: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The configuration as plain containers with every interpolation resolved, and its full key."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(cfg, Mapping) and not isinstance(cfg, DictConfig):
        cfg = OmegaConf.create(dict(cfg), flags={"allow_objects": True})
    if not isinstance(cfg, DictConfig) or cfg._is_none() or cfg._is_missing():
        raise ConfigError(f"`cfg` must be a mapping with a `_target_`. Found: {cfg!r}.")
    root = cfg._get_full_key(None)
    if "_target_" not in cfg:
        raise ConfigError(
            f"{f'`{root}`' if root else 'The configuration'} needs a `_target_`. Found keys: "
            f"{', '.join(map(str, cfg)) or 'none'}. Pass the part that describes one object, as build(cfg.train_data)."
        )
    tree: dict[str, Any] = {}
    for key in cfg:
        if key in leave_out:
            continue  # neither its interpolations nor its missing values matter
        try:
            value = "???" if OmegaConf.is_missing(cfg, key) else cfg[key]
            tree[str(key)] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            full = getattr(error, "full_key", None) or _join(root, key)
            raise ConfigError(f"`{full}` cannot be resolved: {str(error).splitlines()[0]}") from error
    return tree, root


def _apply_shuffle(node: Any, *, key: str) -> None:
    """``shuffle=false`` means ``order=sequential``, ``shuffle=true`` means ``order=shuffle``."""
    shuffle = node.get("shuffle")
    if shuffle is None:
        return
    if not isinstance(shuffle, bool):
        raise ConfigError(f"`{_join(key, 'shuffle')}` must be true, false or null. Found: {shuffle!r}.")
    order = node.get("order")
    target = order.get("_target_") if isinstance(order, Mapping) or hasattr(order, "_metadata") else order
    if target not in (None, "gpuaug.Shuffle", "gpuaug.Sequential", "shuffle", "sequential"):
        raise ConfigError(
            f"`{_join(key, 'shuffle')}={str(shuffle).lower()}` and `{_join(key, 'order')}` ({target}) both choose the "
            "order. Set one of them; shuffle=null leaves it to `order`."
        )
    node["order"] = {"_target_": "gpuaug.Shuffle" if shuffle else "gpuaug.Sequential"}
    node["shuffle"] = None


@dataclass(frozen=True)
class _Call:
    """A checked target with its arguments, which may hold further ones."""

    key: str
    cls: type
    kwargs: dict[str, Any]


def _check(value: Any, *, key: str, prefixes: tuple[str, ...], objects: Mapping[str, Any] | None = None) -> Any:
    """The same tree with a :class:`_Call` for every mapping that has a ``_target_``; nothing is instantiated yet."""
    if isinstance(value, str) and value == "???":
        raise ConfigError(f"`{key}` must be given, and is missing. Set it: {key}=...")
    if isinstance(value, (list, tuple)):
        return [_check(v, key=f"{key}[{i}]", prefixes=prefixes) for i, v in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    if special := [k for k in value if k in ("_args_", "_partial_", "_recursive_", "_convert_")]:
        raise ConfigError(
            f"`{_join(key, special[0])}` is not supported: an object is built whole, from arguments by name. Remove it."
        )
    if "_target_" not in value:
        return {k: _check(v, key=_join(key, k), prefixes=prefixes) for k, v in value.items()}
    kwargs = {k: v for k, v in value.items() if k != "_target_"}
    if value["_target_"] is None:  # how a group's option says "nothing", as mix=none
        if kwargs:
            raise ConfigError(f"`{_join(key, next(iter(kwargs)))}` has nothing to belong to: `{key}` is switched off.")
        return None
    cls = _resolve(value["_target_"], key=_join(key, "_target_"), prefixes=prefixes)
    _check_arguments(cls, {**kwargs, **(objects or {})}, key=key, target=value["_target_"])
    for name in _NAMED:
        if isinstance(kwargs.get(name), Mapping):
            kwargs[name] = {k: v for k, v in kwargs[name].items() if v is not None}
            for k, v in kwargs[name].items():
                if isinstance(v, Mapping) and "_target_" not in v:
                    raise ConfigError(
                        f"`{_join(key, f'{name}.{k}')}` needs a `_target_`, as kornia.augmentation.RandomErasing. "
                        f"Found keys: {', '.join(map(str, v)) or 'none'}."
                    )
    checked = {k: _check(v, key=_join(key, k), prefixes=prefixes) for k, v in kwargs.items()}
    return _Call(key, cls, {**checked, **(objects or {})})


def _resolve(target: Any, *, key: str, prefixes: tuple[str, ...]) -> type:
    """The class that ``target`` names, if its own module may be used.

    The spelling is no boundary (``kornia.augmentation._2d.base.torch.load`` resolves): what it leads to decides. Nor is
    the way there without effect, because to import a module is to run it: only modules below a prefix and the packages
    they stand in are imported and read, and of gpuaug the public names alone.
    """
    expected = (
        f"`{key}` must name a class of kornia.augmentation or a public class of gpuaug"
        + "".join(f" or of {p[:-1]}" for p in prefixes[len(TRUSTED) :])
        + f". Found: {target!r}"
    )
    remedy = " Classes of your own: build(cfg, trust=['my_pkg.']) or --trust my_pkg."
    parts = target.split(".") if isinstance(target, str) else [""]
    if not all(part.isidentifier() and not part.startswith("__") for part in parts):
        raise ConfigError(f"{expected}.")  # my_pkg.__main__, say, would run a program
    if parts[0] == "gpuaug" and not _is_admitted(".".join(parts[:2]), prefixes):
        if len(parts) != 2 or parts[1] not in gpuaug.__all__:
            near = get_close_matches(parts[-1], gpuaug.__all__, n=1)
            raise ConfigError(f"{expected}." + (f" Did you mean 'gpuaug.{near[0]}'?" if near else ""))
        cls = getattr(gpuaug, parts[1])
    else:
        cls = _walk(parts, key=key, expected=expected, remedy=remedy, prefixes=prefixes)
    if not isinstance(cls, type):
        raise ConfigError(f"{expected}, which is no class but {type(cls).__name__}. A class of yours may call it.")
    own, name = f"{cls.__module__}.{cls.__qualname__}", cls.__name__
    public = own.startswith("gpuaug.") and name in gpuaug.__all__ and getattr(gpuaug, name) is cls
    if not public and not f"{own}.".startswith(prefixes):
        raise ConfigError(f"{expected}, which is the class {own}.{remedy}")
    return cls


def _is_admitted(module: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a module may be imported and read: below a prefix, or a package that leads to one."""
    return any(f"{module}.".startswith(p) or p.startswith(f"{module}.") for p in prefixes)


def _walk(parts: list[str], *, key: str, expected: str, remedy: str, prefixes: tuple[str, ...]) -> Any:
    """What a dotted path leads to, through modules that may be imported, and classes."""
    if not _is_admitted(parts[0], prefixes):
        raise ConfigError(f"{expected}.{remedy}")
    thing: Any = _import(parts[0], expected=expected)
    if thing is None:
        raise ConfigError(f"{expected}, and there is no module {parts[0]!r}.")
    for depth, part in enumerate(parts[1:], start=1):
        parent, path = thing, ".".join(parts[:depth])
        is_module = isinstance(parent, ModuleType)
        if is_module and not _is_admitted(parent.__name__, prefixes):
            raise ConfigError(f"{expected}, which leads into the module {parent.__name__}.{remedy}")
        if not is_module and not issubclass(type(parent), type):  # another object may run anything when it is asked
            raise ConfigError(f"{expected}, where {path} is neither a module nor a class.")
        try:
            thing = getattr(parent, part)
        except AttributeError as error:
            below = f"{parent.__name__}.{part}"
            thing = _import(below, expected=expected) if is_module and _is_admitted(below, prefixes) else None
            if thing is None:
                near = _nearest(part, [n for n in dir(parent) if not n.startswith("_")])
                raise ConfigError(f"`{key}`: {path} has no {part!r}. Found: {'.'.join(parts)!r}.{near}") from error
        except Exception as error:
            raise ConfigError(f"{expected}, which fails at {part!r}: {type(error).__name__}: {error}") from error
    return thing


def _import(module: str, *, expected: str) -> ModuleType | None:
    """The module; None where there is none of that name."""
    try:
        return import_module(module)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module:
            return None
        raise ConfigError(f"{expected}, and {module} cannot be imported: {type(error).__name__}: {error}") from error


def _check_arguments(cls: type, kwargs: Mapping[str, Any], *, key: str, target: str) -> None:
    """Refuse arguments the class does not take, before anything is instantiated."""
    try:
        parameters = inspect.signature(cls).parameters.values()
    except (TypeError, ValueError):
        return  # a class written in C may have none; its constructor will say
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for name in kwargs:
        if name not in named and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            near = _nearest(str(name), named) or (
                f" If it is left from what stood there before, remove that first: ~{key}." if key else ""
            )
            raise ConfigError(
                f"`{_join(key, name)}`: {target} takes no argument {name!r}.{near} It takes: {', '.join(named)}."
            )
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in kwargs:
            raise ConfigError(f"`{_join(key, name)}` must be given: {target} needs it.")
    for name, hint in _hints(cls).items():
        # a word such as `no` would count as true; what other types are given, constructors check themselves
        if name in kwargs and set(_members(hint)) <= {bool, NoneType} and not _fits(kwargs[name], hint):
            raise ConfigError(f"`{_join(key, name)}` must be {_words(hint)}. Found: {kwargs[name]!r}.")


def _hints(cls: type) -> dict[str, Any]:
    """The annotations of a class's arguments; {} where they cannot be read."""
    try:
        return get_type_hints(inspect.getattr_static(cls, "__init__"))
    except Exception:  # names that only a type checker sees
        return {}


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value may be what an annotation says, a list for any sequence; True where that is unknown."""
    members = _members(hint)
    if len(members) > 1:
        return any(_fits(value, member) for member in members)
    origin, inside = get_origin(hint), [a for a in get_args(hint) if a is not ...]
    if origin is Literal:
        return value in inside
    if isinstance(origin, type) and issubclass(origin, Sequence):
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        return is_list and (not inside or all(any(_fits(v, a) for a in inside) for v in value))
    kind = {float: int | float}.get(hint, origin or hint)
    if isinstance(value, bool) and hint in (int, float):
        return False
    return kind in (Any, object) or not isinstance(kind, type | UnionType) or isinstance(value, kind)


def _words(hint: Any) -> str:
    """An annotation as YAML's words, for messages."""
    words = {bool: ["true", "false"], int: ["a whole number"], float: ["a number"], str: ["text"], NoneType: ["null"]}
    names: list[str] = []
    for member in _members(hint):
        origin = get_origin(member)
        if origin is Literal:
            names += map(str, get_args(member))
        elif isinstance(origin, type) and issubclass(origin, Sequence):
            names.append("a list")
        else:
            names += words.get(member, [])  # an object is nothing that YAML could hold
    if "a number" in names and "a whole number" in names:
        names.remove("a whole number")
    *first, last = dict.fromkeys(names or ["an object"])
    return f"{', '.join(first)} or {last}" if first else last


def _make(plan: Any) -> Any:
    """Instantiate a checked tree, inside out; the only place where a configuration calls anything."""
    if isinstance(plan, list):
        return [_make(v) for v in plan]
    if isinstance(plan, dict):
        return {k: _make(v) for k, v in plan.items()}
    if not isinstance(plan, _Call):
        return plan
    kwargs = {k: _make(v) for k, v in plan.kwargs.items()}
    try:
        return plan.cls(**kwargs)
    except ConfigError as error:
        raise ConfigError(_at(plan.key, str(error), of_loader=plan.cls.__name__ == "Loader")) from error
    except GpuaugError as error:
        error.add_note(f"raised while building `{plan.key}`")
        raise
    except Exception as error:
        hints = _hints(plan.cls)
        for name, value in kwargs.items():  # the error may not name the argument, but the annotations do
            if name in hints and not _fits(value, hints[name]):
                wrong = f"`{_join(plan.key, name)}` must be {_words(hints[name])}. Found: {value!r}."
                raise ConfigError(wrong) from error
        where, cls = f"`{plan.key}`: " if plan.key else "", f"{plan.cls.__module__}.{plan.cls.__qualname__}"
        raise ConfigError(f"{where}{cls} refused its arguments: {type(error).__name__}: {error}") from error


def _at(key: str, message: str, *, of_loader: bool) -> str:
    """A constructor's message with the full key in place of the one it begins with.

    A class names the key at its usual place, as `augment.ops.jitter.p`; here it may stand in `train_data.augment` or
    `augment.views.local`. Whatever both have in common is where they join.
    """
    named = re.match(r"`([\w.]+)`", message)
    if not key or not named:
        return f"`{key}`: {message}" if key else message
    place, path = key.split("."), named[1].split(".")
    rest = path if of_loader or len(path) == 1 else path[1:]
    for start, length in ((s, n) for s in range(len(path)) for n in range(len(path) - s, 0, -1)):
        if not of_loader and place[-length:] == path[start : start + length]:
            rest = path[start + length :]
            break
    return f"`{'.'.join(place + rest)}`{message[named.end() :]}"


def _join(parent: str, name: Any) -> str:
    return f"{parent}.{name}" if parent else str(name)
