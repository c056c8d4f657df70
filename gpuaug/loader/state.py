"""The state of a loader, for a checkpoint."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, fields
from typing import Any

from gpuaug.augment.fingerprint import differences
from gpuaug.errors import StateError
from gpuaug.random import keyed as draw
from gpuaug.read.order import Order, Ordered, describe

log = logging.getLogger("gpuaug")

VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state that ``Loader.state_dict`` returns.

    All ranks return the same state at the same step. Any number of ranks can load the state.
    """

    epoch: int
    position: int  # number of samples of the epoch that all ranks together have consumed
    after: int | None = None  # the sample consumed last, by its number; None at the start of an epoch
    order: str | None = None  # hash of the epoch's whole order; None at the start of an epoch
    fingerprint: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"version": VERSION, "draw": draw.VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, value: Any) -> State:
        """Read a result of ``to_json``. Raise StateError for another value or another version."""
        if not isinstance(value, dict) or not {"version", "epoch", "position", "fingerprint"} <= value.keys():
            raise StateError(
                f"not a loader state: expected version, epoch, position and fingerprint. Found: {str(value)[:200]!r}."
            )
        versions = value["version"], value.get("draw")
        if versions != (VERSION, draw.VERSION) or any(type(x) is not int for x in versions):
            raise StateError(
                f"this gpuaug reads state version {VERSION} with random-number scheme {draw.VERSION}. Found: state "
                f"version {versions[0]}, random-number scheme {versions[1]}. Finish the run with the gpuaug that wrote "
                "the state, or start at the beginning of an epoch with `set_epoch`."
            )
        state = cls(**{key.name: value[key.name] for key in fields(cls) if key.name in value})
        numbers = all(type(x) is int and x >= 0 for x in (state.epoch, state.position)) and state.epoch < draw.EPOCHS
        inside = state.position and (type(state.after) is not int or not isinstance(state.order, str))
        if not numbers or inside or not isinstance(state.fingerprint, dict):
            raise StateError(
                "A state needs: `epoch` (int, 0 to 2**32-1), `position` (int >= 0), `fingerprint` (dict). If position "
                f"> 0 also: `after` (int, a sample number) and `order` (str, a hash). Found: {str(value)[:200]!r}."
            )
        return state


def compare(one: Any, other: Any, of_one: str, of_other: str) -> str:
    """Return the first differences of two descriptions, as text; empty if the descriptions are equal.

    ``of_one`` and ``of_other`` say where the values are from, such as ``on rank 0``.
    """
    different = differences(one, other)
    # show hashes only if nothing readable differs
    readable = [d for d in different if not d[0].endswith(".digest")] or different
    return "; ".join(f"{where}: {_short(a)} {of_one}, {_short(b)} {of_other}" for where, a, b in readable[:5])


def _short(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(x, dict) and "name" in x for x in value):
        value = [x["name"] for x in value]
    if isinstance(value, dict) and "class" in value:
        value = value["class"].rpartition(".")[2]
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:99]}…"


def plain(value: Any) -> Any:
    """Convert ``value`` to JSON and back, so that ``value`` can be compared with stored JSON."""
    return json.loads(json.dumps(value))


def locate(state: State, ordered: Ordered, order: Order, seed: int) -> int:
    """Return the position at which ``state`` continues. ``ordered``: what ``order`` gives for that epoch."""
    if ordered.digest == state.order:
        if not 0 < state.position <= len(ordered) or int(ordered.indices[state.position - 1]) != state.after:
            raise StateError(
                f"the state is damaged: sample {state.after} is not at position {state.position} of epoch "
                f"{state.epoch}. Load another checkpoint."
            )
        return state.position
    position = getattr(order, "position", None)
    if position is None:
        raise StateError(
            f"this state was taken inside epoch {state.epoch} of another order. The present order "
            f"{describe(order)} gives other samples in this epoch. Restore source and order to finish the epoch, or "
            f"start the next epoch with `set_epoch({state.epoch + 1})`."
        )
    assert state.after is not None
    at = int(position(seed, state.epoch, ordered.indices, state.after))
    log.warning(
        "the set of samples changed since the state was saved (exclusions or subset): epoch %d continues after "
        "sample %d, at position %d of %d",
        state.epoch, state.after, at, len(ordered),
    )  # fmt: skip
    return at
