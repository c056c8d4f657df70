"""A loader's state: where in which epoch it is, and what it was an epoch of."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from gpuaug.augment.fingerprint import differences as differences
from gpuaug.errors import StateError
from gpuaug.random import keyed as draw

VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Small, versioned, JSON: what ``Loader.state_dict`` gives.

    ``position`` counts samples of the epoch's order that all ranks together have consumed, so the state of any rank,
    taken at the same step, serves every rank and any other number of ranks.
    """

    epoch: int
    position: int
    after: int | None = None  # number of the sample that was consumed last; None at the start of an epoch
    order: str | None = None  # hash of the epoch's whole order; None at the start of an epoch
    fingerprint: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        return {"version": VERSION, "draw": draw.VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, value: Any) -> State:
        """What ``to_json`` gave. Raises StateError for anything else, and for another version."""
        if not isinstance(value, dict) or not {"version", "epoch", "position", "fingerprint"} <= value.keys():
            raise StateError(
                f"not a loader state: expected version, epoch, position and fingerprint. Found: {str(value)[:200]!r}."
            )
        versions = value["version"], value.get("draw")
        if versions != (VERSION, draw.VERSION) or any(type(x) is not int for x in versions):
            raise StateError(
                f"this gpuaug reads state version {VERSION} with draw scheme {draw.VERSION}. Found: state version "
                f"{versions[0]}, draw scheme {versions[1]}. "
                "Finish the run with the gpuaug that wrote it, or start at an epoch boundary with `set_epoch`."
            )
        state = cls(**{key.name: value[key.name] for key in fields(cls) if key.name in value})
        numbers = all(type(x) is int and x >= 0 for x in (state.epoch, state.position)) and state.epoch < draw.EPOCHS
        inside = state.position and (type(state.after) is not int or not isinstance(state.order, str))
        if not numbers or inside or not isinstance(state.fingerprint, dict):
            raise StateError(
                "a state has `epoch` (below 2**32) and `position`, whole numbers >= 0, `fingerprint`, a mapping, and "
                f"inside an epoch `after`, the number of a sample, and `order`, a hash. Found: {str(value)[:200]!r}."
            )
        return state


def compare(one: Any, other: Any, of_one: str, of_other: str) -> str:
    """The first places where two descriptions differ, as text; empty where they do not."""
    different = differences(one, other)
    # a hash tells a person nothing
    readable = [d for d in different if not d[0].endswith(".digest")] or different
    return "; ".join(f"{where}: {_short(a)} {of_one}, {_short(b)} {of_other}" for where, a, b in readable[:5])


def _short(value: Any) -> str:
    """A setting as text; of whole operations and views only their names."""
    if isinstance(value, list) and value and all(isinstance(x, dict) and "name" in x for x in value):
        value = [x["name"] for x in value]
    if isinstance(value, dict) and "class" in value:
        value = value["class"].rpartition(".")[2]
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:99]}…"


def plain(value: Any) -> Any:
    """``value`` as it comes back from JSON (tuples become lists), so that descriptions compare equal."""
    return json.loads(json.dumps(value))
