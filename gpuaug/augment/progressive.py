"""Recipes that change during training: the epoch selects the recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import Tensor, nn

from gpuaug import checks
from gpuaug.augment.recipe import BACKENDS, Augment, MultiView, ReadOnly, View
from gpuaug.errors import ConfigError
from gpuaug.random.keyed import EPOCHS


class Progressive(ReadOnly):
    """Changes the recipe at certain epochs, for example to larger images, as EfficientNetV2 does (arXiv:2104.00298).

    All stages must have the same views: equal names, in the same order, with equal ``copies``.

    Args:
        stages: maps the first epoch of each stage to an :class:`Augment` or :class:`MultiView`. One stage must begin
            with epoch 0. An epoch may be a string of digits, as in YAML. None skips an entry.
        backend: ``fused`` or ``kornia`` for all stages; None: each stage keeps its own backend.

    >>> import gpuaug
    >>> small, large = (gpuaug.Augment(crop=gpuaug.RandomResizedCrop(size)) for size in (128, 224))
    >>> recipe = Progressive(stages={0: small, 30: large})
    >>> [recipe.at(epoch).crop.size for epoch in (0, 29, 30, 500)]
    [(128, 128), (128, 128), (224, 224), (224, 224)]
    """

    _read_once = ("stages", "backend")

    def __init__(self, *, stages: Mapping[Any, Augment | MultiView | None], backend: str | None = None) -> None:
        super().__init__()
        if backend is not None:
            checks.one_of("augment.backend", backend, BACKENDS)
        if not isinstance(stages, Mapping):
            raise ConfigError(
                "`augment.stages` must be a mapping of first epochs to recipes, such as {0: Augment(...), 30: ...}. "
                f"Found: a {type(stages).__name__}."
            )
        given: dict[int, Augment | MultiView] = {}
        for key, stage in stages.items():
            if stage is None:
                continue
            first = int(key) if isinstance(key, str) and re.fullmatch("[0-9]{1,10}", key) else key
            if type(first) is not int or first not in range(EPOCHS):
                raise ConfigError(
                    f"`augment.stages` must have first epochs from 0 to {EPOCHS - 1} as keys. Found: {key!r:.200}."
                )
            checks.instance(f"augment.stages.{key}", stage, Augment, MultiView)
            if first in given:
                raise ConfigError(f"`augment.stages` must have one recipe per epoch. Found: two for {first}.")
            if backend is not None and isinstance(stage, Augment):
                stage = stage.replace(backend=backend)
            elif backend is not None:
                stage = MultiView(views={view.name: view.augment for view in stage.views}, backend=backend)
            given[first] = stage
        if 0 not in given:
            raise ConfigError(f"`augment.stages` must have a stage for epoch 0. Found: {sorted(given) or 'none'}.")
        views = {first: [(view.name, view.copy) for view in stage.views] for first, stage in given.items()}
        if any(found != views[0] for found in views.values()):
            names = {first: [name or copy for name, copy in found] for first, found in views.items()}
            raise ConfigError(f"`augment.stages` must all have the same views, in one order. Found, by epoch: {names}.")
        self._firsts = sorted(given)
        self._recipes = nn.ModuleList(given[first] for first in self._firsts)  # torch's repr shows them
        self.backend = backend
        self._made = True

    @property
    def stages(self) -> Mapping[int, Augment | MultiView]:
        """Maps the first epoch of each stage to the stage's recipe, in the order of epochs."""
        stages = dict(zip(self._firsts, self._recipes, strict=True))
        return MappingProxyType(stages)  # type: ignore[arg-type]

    def at(self, epoch: int) -> Augment | MultiView:
        """Return the recipe of ``epoch``."""
        checks.whole_number("epoch", int(epoch) if isinstance(epoch, np.integer) else epoch, 0)
        stages = self.stages
        return stages[max(first for first in stages if first <= epoch)]

    @property
    def main_thread(self) -> bool:
        """Whether a stage must run in the iterating thread."""
        return any(stage.main_thread for stage in self.stages.values())

    def check_unchanged(self) -> None:
        """Raise ReadOnlyError if a setting was changed after its stage was created. Such a change has no effect."""
        for first, stage in self.stages.items():
            stage.check_unchanged(key=f"augment.stages.{first}")

    def fingerprint(self) -> dict[str, Any]:
        """All settings that decide random numbers and pixels, as JSON."""
        return {"stages": [{"name": str(first), **stage.fingerprint()} for first, stage in self.stages.items()]}

    def forward(self, images: Tensor, *, epoch: int = 0, **given: Any) -> Any:
        """Apply the stage of an epoch to a decoded batch. Returns what :class:`Augment`'s ``forward`` returns.

        Args:
            images: uint8 [B, 3, H, W] or [B, H, W, 3].
            epoch: number of the epoch.
            given: other arguments of :class:`Augment`'s ``forward``, such as ``seed``, ``indices`` and ``masks``.
        """
        return self.at(epoch)(images, epoch=epoch, **given)

    def extra_repr(self) -> str:
        """The first epochs of the stages."""
        return f"first epochs: {', '.join(map(str, self.stages))}"


Recipe = Augment | MultiView | Progressive  # what a loader takes


def views_of(recipe: Recipe) -> list[tuple[str, View]]:
    """The views of all stages, with their configuration keys, such as ``augment.stages.30.views.local``."""
    found = []
    for first, stage in recipe.stages.items():
        key = f"augment.stages.{first}" if isinstance(recipe, Progressive) else "augment"
        found += [(f"{key}.views.{view.name}" if view.name else key, view) for view in stage.views]
    return found
