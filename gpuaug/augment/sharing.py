"""Which random numbers the frames of a clip share, and the cameras of a sample.

A clip is a row of images [T, C, H, W] of one sample. Its frames are T rows of a batch: row ``b * T + t`` is frame t of
sample b. What is shared has the stream of random numbers that a single image has. What is not shared has a stream of
its own for each camera, and for each frame after the first. So a clip of one frame equals the image, the length of a
clip does not change a frame, and a new camera does not change the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from torch import Tensor

from gpuaug import checks
from gpuaug.augment.parameters import Chosen, Params, Prepared
from gpuaug.errors import ConfigError
from gpuaug.random.keyed import Float, Int, Stream, sample_keys, seed_of_call, uniforms

Same = bool | Literal["field"]


@dataclass(frozen=True, slots=True)
class Draws:
    """What one operation, or the crop, draws in one view."""

    view: str
    copy: int
    name: str  # of the operation, or `crop`
    count: int  # of uniforms
    keyed: bool  # whether each sample also gets a key, for fields such as noise
    frames: Same  # whether the frames share it
    cameras: bool = False  # whether the cameras share it
    of: tuple[str, int] | None = None  # (view, copy) whose random numbers it uses; None: its own

    @property
    def key(self) -> tuple[str, int, str]:
        """Where a batch keeps its numbers."""
        return self.view, self.copy, self.name


@dataclass(frozen=True, slots=True)
class Rows:
    """What the rows of a batch are: images, or the frames of clips, from one camera of several or from the only one."""

    frames: int = 1
    camera: str = ""
    shared: frozenset[str] | None = None  # what Cameras shares; None: the recipe says it

    def stream(self, draws: Draws, frame: int = 0, round: int = 0) -> Stream:
        """The stream of a frame. ``round``: number of a further draw of a crop; 0: the first."""
        # no operation and no view has these names: a null character is not allowed in names
        again, own = f"\0{round}" if round else "", f"\0frame{frame}" if frame else ""
        shared = draws.cameras if self.shared is None else draws.name in self.shared
        view, copy = draws.of or (draws.view, draws.copy)
        view = view if shared or not self.camera else f"{view}\0camera{self.camera}"
        return Stream(view, copy, f"{draws.name}{again}{own}", draws.count)

    def draw(
        self, everything: tuple[Draws, ...], *, seed: int, epoch: int, indices: Int, repeats: Int | None
    ) -> tuple[dict[tuple[str, int, str], Float], dict[tuple[str, int, str], Int]]:
        """Draw the uniforms [rows, count] and the keys [rows, 2] of B samples, by (view, copy, name)."""
        samples: dict[str, Any] = {"seed": seed, "epoch": epoch, "indices": indices, "repeats": repeats}
        streams, of_keys = _streams(self, everything)
        drawn = uniforms([stream for own in streams.values() for stream in own], **samples)
        values = {at: self._rows([drawn[s.view, s.copy, s.op] for s in own]) for at, own in streams.items()}
        keys = {at: self._rows([sample_keys(s, **samples) for s in own]) for at, own in of_keys.items()}
        return values, keys

    def _rows(self, drawn: list[Any]) -> Any:
        """From arrays [B, n], one of all frames or one of each, to [B * T, n]."""
        if self.frames == 1:
            return drawn[0]
        every = drawn if len(drawn) > 1 else drawn * self.frames
        return np.stack(every, axis=1).reshape(len(drawn[0]) * self.frames, drawn[0].shape[1])

    def choose(self, op: Prepared, same: Same, u: Float, size: tuple[int, int], keys: Int | None) -> Chosen:
        """Draw the choices and parameters of ``op`` for clips, once for their frames if they share them."""
        if same is False:
            return op.draw(u, size, keys)
        once = op.draw(u[:: self.frames], size)
        done: dict[int, Params] = {}  # slots and alternatives may share one dictionary

        def each(params: Params) -> Params:
            if id(params) not in done:
                done[id(params)] = {name: np.repeat(v, self.frames, axis=0) for name, v in params.items()}
            return done[id(params)]

        return replace(
            once,
            choice=np.repeat(once.choice, self.frames, axis=0),
            params=tuple(tuple(map(each, alternatives)) for alternatives in once.params),
            keys=keys,
            weights=None if once.weights is None else np.repeat(once.weights, self.frames, axis=0),
            frames=1 if same == "field" else self.frames,
        )


IMAGES = Rows()
_Streams = dict[tuple[str, int, str], list[Stream]]


@lru_cache(maxsize=64)
def _streams(rows: Rows, everything: tuple[Draws, ...]) -> tuple[_Streams, _Streams]:
    """The streams of the uniforms and of the keys, one of all frames or one of each, by (view, copy, name)."""

    def frames(draws: Draws, apart: bool) -> list[Stream]:
        return [rows.stream(draws, frame) for frame in range(rows.frames if apart else 1)]

    values = {draws.key: frames(draws, draws.frames is False) for draws in everything}
    return values, {draws.key: frames(draws, draws.frames is not True) for draws in everything if draws.keyed}


def check_frames(same_on_frame: Mapping[str, Same] | None, ops: Iterable[Prepared], *, key: str) -> dict[str, Same]:
    """Check the setting ``same_on_frame``. Entries that are True, the default, are left out."""
    named = {op.name: op for op in ops}
    _check_names(same_on_frame, {"crop", *named}, key=key)
    for name, same in (same_on_frame or {}).items():
        if same is not True and same is not False and same != "field":
            raise ConfigError(f"`{key}.{name}` must be true, false or field. Found: {same!r}.")
        op = named.get(name)
        if same == "field" and (op is None or not op.keyed or op.seeded is not None):
            raise ConfigError(
                f"`{key}.{name}` must be true or false, because `{name}` has no random field, such as noise. "
                "Found: 'field'."
            )
    return {name: same for name, same in (same_on_frame or {}).items() if same is not True}


def check_cameras(same_on_camera: Mapping[str, bool] | None, names: Iterable[str], *, key: str) -> frozenset[str]:
    """Check the setting ``same_on_camera``. Returns which of ``names``, and of the crop, the cameras share.

    The entry ``default`` counts for all names without an entry; without it, they are not shared.
    """
    names = {"crop", *names}
    _check_names(same_on_camera, {"default", *names}, key=key)
    given = dict(same_on_camera or {})
    for name, same in given.items():
        if not isinstance(same, bool):
            raise ConfigError(f"`{key}.{name}` must be true or false. Found: {same!r}.")
    return frozenset(name for name in names if given.get(name, given.get("default", False)))


def _check_names(given: Any, names: set[str], *, key: str) -> None:
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"`{key}` must be a mapping of names of operations. Found: a {type(given).__name__}.")
    for name in given or {}:
        if name not in names:
            raise ConfigError(f"`{key}` must have names of {', '.join(sorted(names))}. Found: {name!r}.")


def fold(name: str, value: Any, samples: int, frames: int) -> Any:
    """From targets of B clips to those of B * T images: a tensor [B, T, ...], or B lists of T."""
    if value is None:
        return None
    try:
        found = (len(value), *{len(clip) for clip in value})
    except TypeError as error:
        raise ConfigError(f"`{name}` must have one list of {frames} frames per clip. Found: {error}.") from error
    if samples and found != (samples, frames):
        raise ConfigError(f"`{name}` must have {samples} clips of {frames} frames. Found: {list(found)}.")
    return value.flatten(0, 1) if isinstance(value, Tensor) else [frame for clip in value for frame in clip]


def by_camera(
    images: Mapping[str, Any],
    call: Callable[..., Any],
    given: dict[str, Any],
    *,
    seed: int | None,
    indices: Any,
    known: Iterable[str] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Call ``call(camera, images, given=..., seed=..., indices=..., **more)`` for each camera.

    The values of ``given`` and ``more`` are mappings from cameras, or the same for all cameras. ``known``: the names
    that they may have; None: those of ``images``.
    """
    for camera in images:
        checks.name_in("images", camera)
    names = list(images if known is None else known)
    for argument, value in (given | more).items():
        if isinstance(value, Mapping) and (unknown := [name for name in value if name not in names]):
            raise ConfigError(f"`{argument}` must have names of cameras: {', '.join(names)}. Found: {unknown[0]!r}.")
    sizes: dict[int, tuple[str, list[int]]] = {}  # by number of dimensions
    for camera, batch in images.items():
        shape = list(getattr(batch, "shape", ()))
        for other, found in sizes.values():
            same = 2 if len(shape) == len(found) == 5 else 1  # clips have equally many frames, too
            if shape[:same] != found[:same]:
                raise ConfigError(
                    "`images` must have equally many samples from each camera, and clips equally many frames. "
                    f"Found: `{other}` {found} and `{camera}` {shape}."
                )
        sizes.setdefault(len(shape), (camera, shape))
    if seed is None and indices is None:
        seed = seed_of_call()  # one for all cameras

    def own(values: Mapping[str, Any], camera: str) -> dict[str, Any]:
        return {name: value.get(camera) if isinstance(value, Mapping) else value for name, value in values.items()}

    made = {}
    for camera, batch in images.items():
        try:
            made[camera] = call(
                camera, batch, given=own(given, camera), seed=seed, indices=indices, **own(more, camera)
            )
        except ConfigError as error:
            raise ConfigError(f"camera {camera!r}: {error}") from error
    return made
