""":func:`compose` makes a configuration from YAML and override strings; :func:`build` makes objects from it.

Hydra is imported inside functions, because every Hydra application imports this file through our search-path plugin.
:func:`build` does not use ``hydra.utils.instantiate``. That function copies existing objects, and imports any module.
Its errors do not name the full key of an unknown argument.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import RLock
from types import FunctionType, MappingProxyType, ModuleType, NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from gpuaug.errors import ConfigError, GpuaugError

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

_PACKAGE = sys.modules["gpuaug"]  # a `_target_` may be one of its public names

Target = type | FunctionType  # the kinds of objects that a `_target_` may name
TRUSTED = ("kornia.augmentation.",)
_LOCK = RLock()  # Hydra's state is global, and the live page composes in a thread
OWN = ("train", "eval")  # gpuaug's main configurations
_DEEPEST = 100  # levels of nesting in a YAML file; OmegaConf fails at about 150
_MOST = 100_000  # values in a YAML file, after OmegaConf has expanded aliases; a recipe has about 50
# `.inf` and `.nan` are numbers in YAML, but text in Hydra's overrides
_SPECIAL_FLOAT = re.compile(r"^([^=]+=[+-]?)\.(inf|nan)$", re.IGNORECASE)
# for example, `augment=timm:rand-m9-mstd0.5-inc1` and `augment=file:last.pt`
_SPECIAL = re.compile(r"^(\+{0,2}augment)=(['\"]?)(timm|file):(.*)\2$")


def conf_folder() -> Path:
    """The folder of ``gpuaug/train.yaml``: ``gpuaug/conf`` in an installed package, ``conf`` in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def compose(name: str = "train", overrides: Sequence[str] = (), *, config_dir: str | Path | None = None) -> DictConfig:
    """Compose the configuration ``name`` with ``overrides``, the same strings as on the command line.

    The state of a running Hydra application does not change.

    Args:
        name: ``train`` or ``eval`` for gpuaug's own configurations, or the name of a file in ``config_dir``. Write
            ``train.yaml`` if your own file has the name ``train``.
        overrides: Hydra's override strings, such as ``["source.root=/data", "augment=simclr", "~augment.ops.gray"]``.
            ``augment=timm:CONFIG`` selects the recipe ``timm`` and sets its ``config``. ``augment=file:PATH`` takes the
            recipe from a file of :func:`gpuaug.export` or a checkpoint of `gpuaug train`: with ``eval``, that of the
            evaluation; else that of the training, if the file holds it.
        config_dir: folder with your own configurations. Its subfolder ``gpuaug/augment/`` holds your own recipes. A
            file in the subfolder ``gpuaug/`` replaces gpuaug's file of the same name, as in Hydra applications.

    >>> import gpuaug
    >>> cfg = gpuaug.compose("train", ["source.root=data/train", "augment=simclr", "augment.crop.size=96"])
    >>> cfg.augment.copies, cfg.augment.crop.size
    (2, 96)
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if isinstance(overrides, str):
        raise ConfigError(f"`overrides` must be a list of strings. Found: {overrides!r}. Write [{overrides!r}].")
    overrides = [text for o in overrides for text in _expand(_SPECIAL_FLOAT.sub(r"\1\2", str(o)), name)]
    parsed = [_parse(text) for text in overrides]
    with _LOCK, _hydra(config_dir, ours_first=name in OWN) as loader:
        try:
            return hydra.compose(name, overrides)
        except (YAMLError, RecursionError) as error:
            raise ConfigError(_unreadable(error)) from error
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            raise ConfigError(_explain(error, name, parsed, loader)) from error


def _load(load: Callable[[str], Any], folder: str, config_path: str) -> Any:
    """Let Hydra ``load`` a YAML file, unless it is nested too deeply or aliases expand to too many values."""
    import yaml

    path = Path(folder, f"{config_path.removesuffix('.yaml')}.yaml")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}, line {number}: {error}. Save the file as UTF-8.") from error
    counts, anchors, sizes = [0], list[str | None](), dict[str | None, int]()  # of open collections; of anchors
    with suppress(yaml.YAMLError):  # Hydra reports it
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            anchor, size = getattr(event, "anchor", None), 1
            if isinstance(event, yaml.CollectionStartEvent):
                counts, anchors, size = [*counts, 0], [*anchors, anchor], 0
            elif isinstance(event, yaml.CollectionEndEvent):
                size, anchor = counts.pop() + 1, anchors.pop()
            elif isinstance(event, yaml.AliasEvent):
                size = sizes.get(anchor, 0)
            sizes[anchor] = size
            counts[-1] += size
            for found, most, what in ((len(anchors), _DEEPEST, "levels of nesting"), (counts[-1], _MOST, "values")):
                if found > most:
                    raise ConfigError(f"{path}, line {event.start_mark.line + 1}: more than {most} {what}. Use fewer.")
    return load(config_path)


def _unreadable(error: Exception) -> str:
    """A message that names the YAML file and the line that cannot be read."""
    mark, problem, reason = getattr(error, "problem_mark", None), getattr(error, "problem", None), str(error)
    if mark is not None:
        return f"{mark.name}, line {mark.line + 1}: {problem}. Correct this line or the line before it."
    if isinstance(error, RecursionError):
        reason = "a `defaults` list leads back to its own file, which needs another name, or a value refers to itself"
    return f"the configuration cannot be read: {reason}. Correct it in the YAML files or the overrides."


@contextmanager
def _hydra(config_dir: str | Path | None, *, ours_first: bool) -> Iterator[ConfigLoader]:
    """Start Hydra. On exit, restore the state of an outer Hydra.

    Hydra searches ``config_dir``, its subfolder ``gpuaug``, and gpuaug's files; ``config_dir`` last if ``ours_first``.
    """
    from hydra import initialize_config_dir
    from hydra.core.config_search_path import SearchPathQuery
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.utils import JobRuntime
    from hydra.version import VersionBase

    ours = conf_folder() / "gpuaug"
    folder = ours if config_dir is None else Path(config_dir).expanduser().resolve()
    if not folder.is_dir():
        raise ConfigError(f"`config_dir` must be a folder. Found: {str(config_dir)!r}.")
    outer, running = GlobalHydra.instance(), GlobalHydra.instance().hydra
    base, version = VersionBase.instance(), VersionBase.instance().version_base
    job, settings = JobRuntime.instance(), JobRuntime.instance().conf.copy()
    outer.clear()
    try:
        with initialize_config_dir(str(folder), version_base="1.3", job_name="gpuaug"):
            loader: Any = GlobalHydra.instance().config_loader()
            if folder != ours:  # `hydra.searchpath` would be too late: Hydra finds `name` earlier
                path, anchor = loader.get_search_path(), SearchPathQuery(provider="main" if ours_first else "schema")
                for each in (folder / "gpuaug", ours):  # `folder / "gpuaug"` holds the user's recipes
                    path.prepend("gpuaug", f"file://{each}", anchor=anchor)
                loader.repository.initialize_sources(path)
                for source in loader.repository.sources:
                    if source.scheme() == "file" and Path(source.path) != ours:
                        source.load_config = partial(_load, source.load_config, source.path)
            yield loader
    finally:
        outer.hydra = running
        GlobalHydra.set_instance(outer)
        base.version_base = version
        job.conf = settings


def group_options(group: str, *, config_dir: str | Path | None = None) -> list[str]:
    """The names that ``group=NAME`` can select, in alphabetical order."""
    from hydra.core.object_type import ObjectType

    with _hydra(config_dir, ours_first=True) as loader:
        return sorted(loader.get_group_options(group, results_filter=ObjectType.CONFIG))


def _expand(override: str, name: str) -> list[str]:
    """Replace ``augment=timm:...`` and ``augment=file:...`` by overrides that Hydra can read."""
    if not (special := _SPECIAL.match(override)):
        return [override]
    group, _, kind, text = special.groups()
    if kind == "file":
        from gpuaug.deploy.saved import read  # needs torch

        return ["~augment"] * ("+" not in group) + [f"+augment={literal(read(text, name))}"]
    from gpuaug.augment.auto_timm import parse  # needs torch

    try:
        parse(text)
    except ConfigError as error:
        raise ConfigError(str(error).replace("`config`", "`augment=timm:...`", 1)) from error
    return [f"{group}=timm", f"augment.ops.timm.config={text}"]


def literal(value: Any) -> str:
    """A value in the syntax of Hydra's overrides."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{literal(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(literal, value)) + "]"
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _parse(override: str) -> Override:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(override)
    except RecursionError as error:
        raise ConfigError(f"The override {override[:40]!r}... is nested too deeply. Use fewer brackets.") from error
    except HydraException as error:
        raise ConfigError(
            f"The override {override!r} cannot be read: {str(error).splitlines()[0]}. Put a value that "
            "contains = , { } or [ ] in quotes: \"key='value'\"."
        ) from error


def _explain(error: Exception, name: str, overrides: list[Override], loader: ConfigLoader) -> str:
    """A message that names the wrong override and the valid values, or Hydra's own message."""
    import hydra
    from hydra.core.object_type import ObjectType
    from hydra.errors import HydraException
    from omegaconf import DictConfig

    names = [n for n in loader.get_group_options("", results_filter=ObjectType.CONFIG) if not n.startswith("_")]
    name = name.removesuffix(".yaml")
    if "/" not in name and name not in names:
        return f"There is no configuration {name!r}. Found: {', '.join(names)}.{_nearest(name, names)}"
    for override in overrides:
        group, key, value = override.key_or_group, override.get_key_element(), override.value()
        if override.is_sweep_override():
            return f"`{key}` takes one value, or a list in brackets. Found a sweep: {override.get_value_string()}."
        options = [] if "." in group else loader.get_group_options(group, results_filter=ObjectType.CONFIG)
        for option in (value if isinstance(value, list) else [value]) if options else []:
            if not override.is_delete() and option not in options:
                given = "null" if option is None else str(option)
                near = _nearest(given, options, key=key)
                return f"`{key}` must be one of {', '.join(options)}. Found: {given}.{near}"
    if lost := re.match(r"In '(.+)': Could not (?:load|find) '(.+)'", str(error)):
        options = loader.get_group_options(lost[2].rpartition("/")[0], results_filter=ObjectType.CONFIG)
        near = _nearest(lost[2].rpartition("/")[2], options)
        return f"`defaults` of {lost[1]!r} must name existing files. Found: {lost[2]!r}.{near}"
    named = re.match(r"Could not (?:override|delete from config\.) '([^']+)'", str(error))
    if named and "delete" in named[0]:
        lines = [str(o.input_line) for o in overrides if o.key_or_group != named[1]]
        try:
            hydra.compose(name, [*lines, f"{named[1]}=null"])  # this fails too, and the error holds the valid keys
        except HydraException as other:
            error = other
    unknown: Any = error.__cause__
    parent = getattr(unknown, "parent_node", None)
    if not named or not isinstance(parent, DictConfig):
        return str(error)
    path, word, above = max(named[1], unknown.full_key, key=len), str(unknown.key), parent._get_full_key(None)
    keys = [str(key) for key in parent if key not in ("hydra", "_convert_")]
    target = f" ({parent._target_})" if above and "_target_" in keys else ""
    near = _nearest(word, keys)
    options = loader.get_group_options(above, results_filter=ObjectType.CONFIG) if above and not keys else []
    if any(o.key_or_group == above and "_target_" in o.get_value_string() for o in overrides):
        advice = f" To replace all of it, remove it first: '~{above}' '+{above}={{_target_: ...}}'."
    elif options:
        advice = f" It is switched off. Choose one first: {above}={'|'.join(options)}."
    else:
        advice = _elsewhere(word, parent, key=above) or ("" if near else f" If it takes this, `+{path}=...` adds it.")
    return (
        f"`{path}`: {f'`{above}`{target}' if above else f'the configuration {name!r}'} has no key {word!r}."
        f"{near} It has: {', '.join(keys) or 'nothing'}.{advice}"
    )


def _elsewhere(word: str, node: Mapping[Any, Any], *, key: str) -> str:
    """A sentence that names the right place for ``word``, which ``node`` does not have; "" if none is known."""
    if str(node.get("_target_")).endswith(".RandAugment") and word in ("mstd", "inc", "mmax"):
        return f" `{word}` is part of timm's strings: augment=timm:rand-m9-mstd0.5-inc1."
    for name in ("views", "schedule"):
        inner = node.get(name)
        inner = inner if isinstance(inner, Mapping) else {}
        places = [f"`{_join(key, name)}.{k}.{word}`" for k, v in inner.items() if isinstance(v, Mapping) and word in v]
        if places:
            return f" Set it in the {name}: {', '.join(places)}."
    return ""


def _nearest(word: str, options: Iterable[str], *, key: str = "") -> str:
    """`` Did you mean 'x'?``, or an empty string."""
    word, options = "none" if word == "null" else word, list(options)
    longer = [option for option in options if option.startswith(f"{word}_")]  # randaugment_torchvision, not autoaugment
    for near in longer[:1] or get_close_matches(word, options, n=1):
        return f" Did you mean {key}={near}?" if key else f" Did you mean {near!r}?"
    return ""


def build(cfg: Mapping[str, Any] | DictConfig, *, trust: str | Iterable[str] = (), **objects: Any) -> Any:
    """Build the loader (or another object that ``_target_`` names) from a configuration.

    The whole tree is checked before any object is created. Every ``_target_`` must name a public class of gpuaug, or a
    class defined in ``kornia.augmentation``. ``hydra.utils.instantiate(cfg)`` makes the same object without this check.

    Args:
        cfg: from :func:`compose`, or a part of your own Hydra application's configuration, such as ``cfg.train_data``.
        trust: prefixes of other modules whose classes and functions a ``_target_`` may name, such as ``["my_pkg."]``.
        **objects: existing objects that replace arguments of the outermost target, such as ``source=my_source``.

    Raises:
        ConfigError: the configuration is invalid. If a constructor failed, its error is the ``__cause__``.

    >>> import gpuaug
    >>> cfg = gpuaug.compose("train", ["source.root=data/train", "augment.crop.size=32", "batch_size=8"])
    >>> with gpuaug.build(cfg) as loader:
    ...     images, labels = next(iter(loader))
    >>> images.shape
    torch.Size([8, 3, 32, 32])
    >>> gpuaug.build(cfg.augment).crop.size  # a part of the configuration
    (32, 32)
    """
    trusted = [trust] if isinstance(trust, str) else list(trust)
    for prefix in trusted:
        if not isinstance(prefix, str) or not all(map(str.isidentifier, prefix.rstrip(".").split("."))):
            raise ConfigError(f"`trust` must hold module prefixes, such as 'my_pkg.'. Found: {prefix!r}.")
    prefixes = TRUSTED + tuple(p.rstrip(".") + "." for p in trusted)
    tree, root = _plain(cfg, leave_out=objects)
    return _check(tree, key=root, prefixes=prefixes, objects=objects)()


def _plain(cfg: Any, *, leave_out: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Convert ``cfg`` to plain containers with resolved interpolations. Also return the full key of ``cfg``."""
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
            f"{', '.join(map(str, cfg)) or 'none'}. Pass the part that describes one object: build(cfg.train_data)."
        )
    tree: dict[str, Any] = {}
    for key in cfg:
        if key in leave_out:
            continue  # an object replaces this value
        try:
            value = "???" if OmegaConf.is_missing(cfg, key) else cfg[key]
            tree[str(key)] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            full = getattr(error, "full_key", None) or _join(root, key)
            raise ConfigError(f"`{full}` cannot be resolved: {str(error).splitlines()[0]}") from error
    return tree, root


def _check(
    value: Any, *, key: str, prefixes: tuple[str, ...], objects: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[], Any]:
    """Check a tree. Return a function that creates its objects, so that none is created before all are checked."""
    if isinstance(value, str) and value == "???":
        raise ConfigError(f"`{key}` must be given. Set {key}=...")
    if isinstance(value, (list, tuple)):
        entries = [_check(v, key=f"{key}[{i}]", prefixes=prefixes) for i, v in enumerate(value)]
        return lambda: [make() for make in entries]
    if not isinstance(value, Mapping):
        return lambda: value
    for special in ("_args_", "_partial_", "_recursive_"):
        if special in value:
            raise ConfigError(
                f"`{_join(key, special)}` is not supported: objects are built from named arguments. Remove this key."
            )
    given = {k: v for k, v in value.items() if k not in ("_target_", "_convert_")}  # `_convert_` has no effect
    if "_target_" in value:
        called = _resolve(value["_target_"], key=_join(key, "_target_"), prefixes=prefixes)
        _check_arguments(called, {**given, **objects}, key=key, target=value["_target_"])
    items = {k: _check(v, key=_join(key, k), prefixes=prefixes) for k, v in given.items()}
    if "_target_" not in value:
        return lambda: {k: make() for k, make in items.items()}
    return lambda: _call(called, {k: make() for k, make in items.items()} | dict(objects), key=key)


def _resolve(target: Any, *, key: str, prefixes: tuple[str, ...]) -> Target:
    """Resolve ``target`` to a class, or to a user's function. The module that defines the object must be allowed."""
    own_modules = prefixes[len(TRUSTED) :]
    expected = (
        f"`{key}` must name a class of kornia.augmentation or a public class of gpuaug"
        + "".join(f" or a class or function of {p[:-1]}" for p in own_modules)
        + f". Found: {target!r}"
    )
    remedy = " To use your own classes: build(cfg, trust=['my_pkg.']) or --trust my_pkg."
    parts = target.split(".") if isinstance(target, str) else [""]
    if not all(part.isidentifier() and not part.startswith("__") for part in parts):
        raise ConfigError(f"{expected}.")  # for example, my_pkg.__main__ would run a program
    if parts[0] == "gpuaug" and not _is_admitted(".".join(parts[:2]), prefixes):
        if len(parts) != 2 or parts[1] not in _PACKAGE.__all__:
            near = get_close_matches(parts[-1], _PACKAGE.__all__, n=1)
            raise ConfigError(f"{expected}.{_full_name(parts[-1]) or _full_name(*near)}")
        found = getattr(_PACKAGE, parts[1])
    elif not _is_admitted(parts[0], prefixes):
        raise ConfigError(f"{expected}.{_full_name(parts[-1]) or remedy}")
    else:
        found = _walk(parts, key=key, expected=expected, remedy=remedy, prefixes=prefixes)
    if not isinstance(found, Target):
        raise ConfigError(f"{expected}, a {type(found).__name__}. Write a function that calls this object.")
    # the path proves nothing: `kornia.augmentation._2d.base.torch.load` is a function of torch
    own, name = f"{found.__module__}.{found.__qualname__}", found.__name__
    is_class = isinstance(found, type)
    public = is_class and own.startswith("gpuaug.") and name in _PACKAGE.__all__ and getattr(_PACKAGE, name) is found
    if not public and not f"{own}.".startswith(prefixes if is_class else own_modules):
        raise ConfigError(f"{expected}, which resolves to the {'class' if is_class else 'function'} {own}.{remedy}")
    return found


def _full_name(name: str = "") -> str:
    """`` Did you mean 'kornia.augmentation.NAME'?`` for a class of gpuaug or Kornia, or an empty string."""
    import kornia.augmentation

    if name in _PACKAGE.__all__:
        return f" Did you mean 'gpuaug.{name}'?"
    known = isinstance(getattr(kornia.augmentation, name, None), type)
    return f" Did you mean 'kornia.augmentation.{name}'?" if known else ""


def _is_admitted(module: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a module is below or above an allowed prefix. An import of any other module could run harmful code."""
    return any(f"{module}.".startswith(p) or p.startswith(f"{module}.") for p in prefixes)


def _walk(parts: list[str], *, key: str, expected: str, remedy: str, prefixes: tuple[str, ...]) -> Any:
    """Resolve a dotted path through admitted modules and through classes. ``parts[0]`` must be admitted."""
    thing: Any = _import(parts[0], expected=expected)
    if thing is None:
        raise ConfigError(f"{expected}, but there is no module {parts[0]!r}.")
    for depth, part in enumerate(parts[1:], start=1):
        path, module = ".".join(parts[:depth]), thing.__name__ if isinstance(thing, ModuleType) else None
        if module and not _is_admitted(module, prefixes):
            raise ConfigError(f"{expected}, which leads into the module {module}.{remedy}")
        if not module and not issubclass(type(thing), type):  # getattr of any other object may run code
            raise ConfigError(f"{expected}, but {path} is neither a module nor a class.")
        parent = thing
        try:
            thing = getattr(parent, part)
        except AttributeError as error:
            below = f"{module}.{part}"
            thing = _import(below, expected=expected) if module and _is_admitted(below, prefixes) else None
            if thing is None:
                near = _full_name(part) or _nearest(part, [n for n in dir(parent) if not n.startswith("_")])
                raise ConfigError(f"`{key}`: {path} has no {part!r}. Found: {'.'.join(parts)!r}.{near}") from error
        except Exception as error:
            raise ConfigError(f"{expected}, which fails at {part!r}: {type(error).__name__}: {error}") from error
    return thing


def _import(module: str, *, expected: str) -> ModuleType | None:
    """Import a module; None if no module has this name."""
    try:
        return import_module(module)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module:
            return None
        raise ConfigError(f"{expected}, but {module} cannot be imported: {type(error).__name__}: {error}") from error


def _check_arguments(called: Target, kwargs: Mapping[str, Any], *, key: str, target: str) -> None:
    """Refuse arguments that the class or function does not take."""
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return  # classes written in C may have no signature; their constructors check the arguments
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for name in kwargs:
        if name not in named and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            near = _nearest(str(name), named) or _elsewhere(str(name), {**kwargs, "_target_": target}, key=key)
            if not near and key:
                near = f" If this argument belongs to the previous target, first remove the whole entry: ~{key}."
            raise ConfigError(
                f"`{_join(key, name)}`: {target} takes no argument {name!r}.{near} It takes: {', '.join(named)}."
            )
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in kwargs:
            raise ConfigError(f"`{_join(key, name)}` must be given: {target} needs it.")
    for name, hint in _hints(called).items():
        # only true/false is checked here: text such as `no` could count as true
        if name in kwargs and set(_members(hint)) <= {bool, NoneType} and not _fits(kwargs[name], hint):
            raise ConfigError(f"`{_join(key, name)}` must be {_words(hint)}. Found: {kwargs[name]!r}.")


def _hints(called: Target) -> dict[str, Any]:
    """The annotations of the arguments; {} if they cannot be read."""
    try:
        return get_type_hints(inspect.getattr_static(called, "__init__") if isinstance(called, type) else called)
    except Exception:  # annotations may use names that only a type checker sees
        return {}


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value matches an annotation; True if this cannot be checked. A list also matches ``tuple``."""
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
    """Describe an annotation in YAML's terms, for messages."""
    words = {bool: ["true", "false"], int: ["a whole number"], float: ["a number"], str: ["text"], NoneType: ["null"]}
    names: list[str] = []
    for member in _members(hint):
        origin = get_origin(member)
        if origin is Literal:
            names += map(str, get_args(member))
        elif isinstance(origin, type) and issubclass(origin, Sequence):
            names.append("a list")
        else:
            names += words.get(member, [])  # YAML cannot hold other types
    if "a number" in names and "a whole number" in names:
        names.remove("a whole number")
    *first, last = dict.fromkeys(names or ["an object"])
    return f"{', '.join(first)} or {last}" if first else last


def _call(called: Target, kwargs: dict[str, Any], *, key: str) -> Any:
    """Create an object. Every error names the full key."""
    try:
        return called(**kwargs)
    except ConfigError as error:
        raise ConfigError(_at(key, str(error), of_loader=called.__name__ == "Loader")) from error
    except GpuaugError as error:
        error.add_note(f"raised while building `{key}`")
        raise
    except Exception as error:
        hints = _hints(called)
        for name, value in kwargs.items():  # the constructor's error may not name the argument
            if name in hints and not _fits(value, hints[name]):
                wanted = _words(hints[name])
                raise ConfigError(f"`{_join(key, name)}` must be {wanted}. Found: {value!r}.") from error
        where, own = f"`{key}`: " if key else "", f"{called.__module__}.{called.__qualname__}"
        raise ConfigError(f"{where}{own} refused its arguments: {type(error).__name__}: {error}") from error


def _at(key: str, message: str, *, of_loader: bool) -> str:
    """Put the full key of the argument at the start of a constructor's message."""
    named = re.match(r"`([\w.]+)`", message)
    if not key or not named:
        return f"`{key}`: {message}" if key else message
    place, path = key.split("."), named[1].split(".")
    if not of_loader and place[-1] in path:  # `augment.crop.size` in a message, `train_data.augment` as key
        path = path[len(path) - path[::-1].index(place[-1]) :]
    elif not of_loader and len(path) > 1:
        path = path[1:]
    return f"`{'.'.join(place + path)}`{message[named.end() :]}"


def _join(parent: str, name: Any) -> str:
    return f"{parent}.{name}" if parent else str(name)
