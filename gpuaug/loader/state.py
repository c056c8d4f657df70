"""The state of a loader, for a checkpoint."""

from __future__ import annotations

import json
import logging
from typing import Any, NamedTuple, get_args

import numpy as np

from gpuaug.augment.fingerprint import differences
from gpuaug.errors import StateError
from gpuaug.random import keyed as draw
from gpuaug.read.order import EpochOrder, Last, Order, Ordered, describe
from gpuaug.read.tokens import Tokens
from gpuaug.source.base import checksum

log = logging.getLogger("gpuaug")

VERSION = 3
LASTS = get_args(Last)


def check_state(value: Any) -> None:
    """Raise StateError unless ``value`` is a result of this version's ``Loader.state_dict``.

    All ranks have the same state at the same step. Any number of ranks can load the state.
    """
    if not isinstance(value, dict) or not {"version", "epoch", "position", "fingerprint"} <= value.keys():
        raise StateError(
            f"not a loader state: expected version, epoch, position and fingerprint. Found: {str(value)[:200]!r}."
        )
    versions = value["version"], value.get("draw")
    if versions != (VERSION, draw.VERSION):
        raise StateError(
            f"this gpuaug reads state version {VERSION} with random-number scheme {draw.VERSION}. Found: state "
            f"version {versions[0]}, random-number scheme {versions[1]}. Finish the run with the gpuaug that wrote "
            "the state, or start at the beginning of an epoch with `set_epoch`."
        )
    try:
        found = checksum(value)
    except (TypeError, ValueError, RecursionError) as error:  # other values than JSON's
        found = str(error)
    if found != (written := value.get("checksum")):
        raise StateError(
            f"the loader state was changed after `state_dict()` gave it: its checksum is {found:.100}, not "
            f"{written!r:.60}. Load another checkpoint, or start at the beginning of an epoch with `set_epoch`."
        )
    numbers = value["epoch"], value["position"], value.get("after") or 0, value.get("step", 0)
    if not all(type(x) is int and 0 <= x < 2**62 for x in numbers) or not isinstance(value["fingerprint"], dict):
        raise StateError(f"a loader state needs whole numbers and a fingerprint. Found: {str(value)[:200]!r}.")
    check_rows(value.get("passes", []))


class Row(NamedTuple):
    """Passes of a run with equal settings, one after the other without a gap. Rows lead from a step to its samples.

    Attributes:
        step: the number of batches that each rank had got before these passes.
        epoch, position: where the first of the passes began.
        samples: of an epoch.
        batch_size, world_size, last, limit: how an epoch is split, as in :class:`~gpuaug.read.order.EpochOrder`.
            ``batch_size`` is a list for :class:`~gpuaug.Tokens`: tokens, multiple, and the lengths.
    """

    step: int
    epoch: int
    position: int
    samples: int
    batch_size: int | list[int]
    world_size: int
    last: Last
    limit: int | None

    def split(
        self, epoch: Any, *, start: int, rank: int = 0, seed: int = 0, number: int = 0, origin: int = 0
    ) -> EpochOrder:
        """The batches of ``rank`` from position ``start`` on. ``epoch``: its samples in order."""
        share: dict[str, Any] = {"world_size": self.world_size, "last": self.last, "limit": self.limit}
        if isinstance(self.batch_size, list):
            tokens, multiple, *lengths = self.batch_size
            share |= {"tokens": Tokens(tokens, lengths, multiple), "seed": seed, "number": number, "origin": origin}
        else:
            share["batch_size"] = self.batch_size
        return EpochOrder(epoch, start=start, rank=rank, **share)

    def place(self, step: int, *, seed: int) -> tuple[int, int, int]:
        """The epoch of a step, the position where its pass began, and the number of its batch in the pass."""
        samples, kind = range(self.samples), {"seed": seed, "number": self.epoch}
        first, number = len(self.split(samples, start=self.position, **kind)), step - self.step
        if number < first:
            return self.epoch, self.position, number
        later = max(1, len(self.split(samples, start=0)))  # the same in all epochs
        epochs, number = divmod(number - first, later)
        return self.epoch + 1 + epochs, 0, number

    def leads_to(self, other: Row, *, seed: int) -> bool:
        """Whether this row also describes the passes of ``other``."""
        if self[3:] != other[3:] or other.step < self.step:
            return False
        epoch, start, number = self.place(other.step, seed=seed)
        own, kind = range(self.samples), {"seed": seed, "number": epoch}
        ours, theirs = (self.split(own, start=at, origin=start, **kind) for at in (start, other.position))
        if (epoch, ours.position(number)) != (other.epoch, other.position):
            return False
        if ours.plan is None or theirs.plan is None:
            return True
        return bool(np.array_equal(ours.plan.lengths[number:], theirs.plan.lengths))


def check_rows(value: Any) -> list[Row]:
    """The rows of a state. Raises StateError if they are damaged."""
    rows = []
    for each in value if isinstance(value, list) and len(value) <= 10_000 else [None]:
        given = each if isinstance(each, list) and len(each) == 8 else [-1] * 8
        several = given[4] if isinstance(given[4], list) and 3 <= len(given[4]) <= 1002 else [given[4]]
        numbers = [*given[:4], *several, given[5], 1 if given[7] is None else given[7]]
        whole = all(type(x) is int and 0 <= x < 2**62 for x in numbers) and given[6] in LASTS
        most = 2**20 if several == [given[4]] else 2**31
        if not whole or min(numbers[4:]) < 1 or max(numbers[4:-1]) > most or given[2] > given[3]:
            raise StateError(f"the passes of the loader state are damaged. Found: {str(value)[:200]!r}.")
        rows.append(Row(*given))
    return rows


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


def locate(state: dict[str, Any], ordered: Ordered, order: Order, seed: int) -> int:
    """Return the position at which ``state`` continues. ``ordered``: the state's epoch in ``order``."""
    epoch, at, after = state["epoch"], state["position"], state["after"]
    if ordered.digest == state["order"]:
        if not 0 < at <= len(ordered) or int(ordered.indices[at - 1]) != after:
            raise StateError(
                f"the state is damaged: sample {after} is not at position {at} of epoch {epoch}. Load another "
                "checkpoint."
            )
        return int(at)
    position = getattr(order, "position", None)
    if position is None:
        raise StateError(
            f"this state was taken inside epoch {epoch} of another order. The present order {describe(order)} gives "
            "other samples in this epoch. Restore source and order to finish the epoch, or start the next epoch with "
            f"`set_epoch({epoch + 1})`."
        )
    at = int(position(seed, epoch, ordered.indices, after))
    log.warning(
        "the set of samples changed since the state was saved (exclusions or subset): epoch %d continues after "
        "sample %d, at position %d of %d",
        epoch, after, at, len(ordered),
    )  # fmt: skip
    return at
