"""What the live page can change in a recipe, and the overrides that change it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from gpuaug import checks
from gpuaug.config import literal
from gpuaug.errors import ConfigError

# Lower end, upper end and step of sliders, by argument name. Other numbers can be typed; the operation checks them.
RANGES = {
    "p": (0, 1, 0.01),
    "hue": (0, 0.5, 0.005),
    "degrees": (0, 180, 1),
    "fill": (0, 255, 1),
    "m": (0, 30, 1),
    "magnitude": (0, 30, 1),
    "copies": (1, 8, 1),
    "size": (32, 512, 1),
    "kernel_size": (1, 31, 2),  # odd
    "additions": (-0.5, 0.5, 0.01),
}
CHOICES = {  # words that every class with this argument accepts
    "interpolation": ("bilinear", "bicubic"),
    "anchor": ("random", "diagonal"),
    "mode": ("pixel", "const"),
    "policy": ("imagenet", "cifar10"),
    "style": ("torchvision", "mmseg"),
}
# Arguments without a control. Previews undo `normalize`. `backend` does not change the pixels.
# The `mean` and `std` of an operation must equal those of `normalize`.
LEFT_OUT = ("normalize", "backend", "mean", "std")
LONGEST = 4  # lists of more numbers have no control
LARGEST = 1e9  # largest number that can be typed
NAME = re.compile(r"\w+")  # keys and words that need no quotes in an override


@dataclass(frozen=True)
class Control:
    """One parameter. Its value is a number, a list of numbers, true or false, or a word from a list of choices."""

    key: str  # the full key, such as augment.ops.jitter.p
    group: str  # path of the operation in the recipe, such as ops.jitter; "" for the recipe's own parameters
    value: Any  # the value in the configuration
    low: float | None = None  # ends and step of the slider; None if the value has no numbers
    high: float | None = None
    step: float | None = None
    choices: tuple[str, ...] = ()  # words to choose from; empty if the value is not a word

    @property
    def name(self) -> str:
        """The argument, such as ``p``."""
        return self.key.rpartition(".")[2]

    def checked(self, value: Any) -> Any:
        """Return ``value`` if it has this parameter's type, else raise ConfigError. The operation checks the range."""
        if isinstance(self.value, bool):
            return checks.flag(self.key, value)
        if self.choices:
            return checks.one_of(self.key, value, self.choices)
        if not isinstance(self.value, list):
            return self._number(value, self.value)
        if not isinstance(value, list) or len(value) != len(self.value):
            raise ConfigError(f"`{self.key}` must be a list of {len(self.value)} numbers. Found: {value!r:.100}.")
        return [self._number(new, old) for new, old in zip(value, self.value, strict=True)]

    def _number(self, value: Any, old: float) -> float:
        checks.number(self.key, value, -LARGEST, LARGEST)
        return float(value) if isinstance(old, float) else int(value) if value == int(value) else value


def controls(augment: Any) -> list[Control]:
    """The parameters that can be changed in a recipe's configuration. Parameters of nested mappings come last."""
    if not OmegaConf.is_dict(augment):
        return []
    return list(_walk(OmegaConf.to_container(augment, resolve=True), augment._get_full_key(None), ""))


def _walk(node: Any, key: str, group: str) -> Iterator[Control]:
    for name, value in sorted(node.items(), key=lambda item: isinstance(item[1], Mapping)):
        if name in LEFT_OUT or not NAME.fullmatch(str(name)) or str(name).startswith("_"):
            continue
        if isinstance(value, Mapping):
            yield from _walk(value, f"{key}.{name}", f"{group}.{name}".removeprefix("."))
        elif (control := _control(f"{key}.{name}", group, value)) is not None:
            yield control


def _control(key: str, group: str, value: Any) -> Control | None:
    """The control for a value, or None for a value that cannot be changed, such as null."""
    name = key.rpartition(".")[2]
    if isinstance(value, bool):
        return Control(key, group, value)
    if isinstance(value, str):
        if name not in CHOICES or not NAME.fullmatch(value):
            return None
        return Control(key, group, value, choices=tuple(dict.fromkeys((*CHOICES[name], value))))
    numbers = value if isinstance(value, list) else [value]
    if not 0 < len(numbers) <= LONGEST or any(isinstance(n, bool) or not isinstance(n, int | float) for n in numbers):
        return None
    largest = max(abs(n) for n in numbers)
    whole = largest > 1 and all(isinstance(n, int) for n in numbers)
    low, high, step = RANGES.get("p" if name.endswith("_p") else name, (0, 10, 1) if whole else (0, 1, 0.01))
    if largest > high:
        high = 2 * largest
        if not whole:  # about a hundredth of the slider: 1, 2 or 5 times a power of ten
            power = 10.0 ** math.floor(math.log10(high / 100))
            step = next(n * power for n in (1, 2, 5, 10) if n * power * 100 >= high * (1 - 1e-9))
    return Control(key, group, value, -high if min(numbers) < 0 else low, high, step)


def changed(known: list[Control], changes: Any) -> list[str]:
    """The override strings for ``changes``, a mapping from key to value. Unchanged values are left out."""
    if not isinstance(changes, Mapping):
        raise ConfigError(f"`changes` must be a mapping of keys to values. Found: {changes!r:.100}.")
    if foreign := sorted({*changes} - {control.key for control in known}):
        raise ConfigError(f"`changes` may name only parameters of the recipe. Found: {foreign[0]!r:.100}.")
    made = []
    for control in known:
        if control.key in changes and (value := control.checked(changes[control.key])) != control.value:
            text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
            made.append(f"{control.key}={text}")
    return made


@cache
def examples() -> dict[str, dict[str, Any]]:
    """The operations that can be added: a name and an example of each."""
    loaded = OmegaConf.load(Path(__file__).with_name("operations.yaml"))
    return dict(OmegaConf.to_container(loaded))  # type: ignore[arg-type]


def operations(augment: Any) -> dict[str, dict[str, Any]]:
    """Every mapping ``ops`` of a recipe's configuration, by its full key, with unresolved values."""
    if not OmegaConf.is_dict(augment):
        return {}
    found: dict[str, dict[str, Any]] = {}

    def look(node: Mapping[str, Any], key: str) -> None:
        for name, inner in node.items():
            if isinstance(inner, Mapping) and NAME.fullmatch(str(name)):
                if name == "ops":
                    found[f"{key}.ops"] = dict(inner)
                look(inner, f"{key}.{name}")

    look(OmegaConf.to_container(augment), augment._get_full_key(None))  # type: ignore[arg-type]
    return found


def arranged(augment: Any, wanted: Any) -> list[str]:
    """The override strings that leave out, add and reorder operations.

    Args:
        augment: the recipe's configuration.
        wanted: for each changed mapping its operations in their order, as pairs (name, name of the example to add, or
            None for an operation that the recipe has).
    """
    known = operations(augment)
    if not isinstance(wanted, Mapping) or wanted.keys() - known.keys():
        raise ConfigError(f"`ops` must map keys of the recipe to lists of operations. Found: {wanted!r:.100}.")
    made, gone = list[str](), list[str]()
    for key in sorted(wanted, key=len):  # an operation before those inside it
        if key.startswith(tuple(f"{path}." for path in gone)):
            continue
        values = _wanted(known[key], wanted[key])
        present = [name for name, value in known[key].items() if value is not None]
        order, kept = list(values), [name for name in present if name in values]
        same = next((n for n, (a, b) in enumerate(zip_longest(order, kept)) if a != b), len(order))
        made += [f"~{key}.{name}" for name in present if name not in kept[:same]]
        made += [f"+{key}.{name}={literal(values[name])}" for name in order[same:]]
        gone += [f"{key}.{name}" for name in present if name not in values]
    return made + _forgotten(augment, gone)


def _wanted(present: Mapping[str, Any], pairs: Any) -> dict[str, Any]:
    """The configurations of the wanted operations, in their order."""
    values = dict[str, Any]()
    for pair in pairs if isinstance(pairs, list) else [pairs]:
        match pair:
            case [str(name), None] if present.get(name) is not None and name not in values:
                values[name] = present[name]
            case [str(name), str(example)] if (
                NAME.fullmatch(name) and example in examples() and name not in present and name not in values
            ):
                values[name] = examples()[example]
            case _:
                raise ConfigError(
                    "`ops` must list pairs: the name of an operation of the recipe and null, or a new name and "
                    f"the name of an example, such as gray. Found: {pair!r:.100}."
                )
    return values


def _forgotten(augment: Any, gone: list[str]) -> list[str]:
    """Overrides for what else names the operations at the paths ``gone``: epochs, weights and shared random numbers."""
    root, shared, made = augment._get_root(), dict[str, list[str]](), list[str]()
    for path in gone:
        above, _, name = path.rpartition(".ops.")
        for table in ("epochs", "weights"):
            if name in (OmegaConf.select(root, f"{above}.{table}") or {}):
                made.append(f"~{above}.{table}.{name}")
        recipe, _, view = above.rpartition(".views.")
        if recipe and name in (OmegaConf.select(root, f"{recipe}.share") or {}):
            key = f"{recipe}.share.{name}"
            shared.setdefault(key, list(OmegaConf.select(root, key) or [])).remove(view)
    for key, views in shared.items():
        made.append(f"{key}=[{','.join(views)}]" if len(views) > 1 else f"~{key}")
    return made
