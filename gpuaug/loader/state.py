"""A loader's state: where in which epoch it is, and what it was an epoch of."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
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
    resumes: list[int] = field(default_factory=list)  # positions at which this epoch was taken up again
    fingerprint: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        return {"version": VERSION, "draw": draw.VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, value: Any) -> State:
        """Check and take over what ``to_json`` gave, perhaps by way of a file.

        Raises:
            StateError: if it is not a state, or one of another version.
        """
        if not isinstance(value, dict) or not {"version", "epoch", "position", "fingerprint"} <= value.keys():
            raise StateError(
                f"not a loader state: expected version, epoch, position and fingerprint. Found: {str(value)[:200]!r}."
            )
        versions = value["version"], value.get("draw")
        if versions != (VERSION, draw.VERSION) or any(type(x) is not int for x in versions):
            found = f"state version {value['version']}, draw scheme {value.get('draw')}"
            raise StateError(
                f"this gpuaug reads state version {VERSION} with draw scheme {draw.VERSION}. Found: {found}. "
                "Finish the run with the gpuaug that wrote it, or start at an epoch boundary with `set_epoch`."
            )
        epoch, position, resumes = value["epoch"], value["position"], value.get("resumes", [])
        whole = [epoch, position, *resumes] if isinstance(resumes, list) else [None]
        whole_numbers = all(type(x) is int and x >= 0 for x in whole) and epoch < draw.EPOCHS
        if not whole_numbers or not isinstance(value["fingerprint"], dict):
            raise StateError(
                "`epoch` (below 2**32), `position` and `resumes` of a state are whole numbers >= 0, `fingerprint` is a "
                f"mapping. Found: epoch={epoch!r}, position={position!r}, resumes={resumes!r}."
            )
        after, order = value.get("after"), value.get("order")
        if position and (type(after) is not int or not isinstance(order, str)):
            raise StateError(
                "a state inside an epoch has `after`, the number of a sample, and `order`, a hash. "
                f"Found: after={after!r}, order={order!r}."
            )
        return cls(
            epoch=epoch,
            position=position,
            after=after,
            order=order,
            resumes=list(resumes),
            fingerprint=value["fingerprint"],
        )


def plain(value: Any) -> Any:
    """``value`` as it comes back from JSON (tuples become lists), so that descriptions compare equal."""
    return json.loads(json.dumps(value))
