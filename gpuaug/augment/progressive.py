"""Recipes that change during training: the epoch selects the recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from gpuaug import checks
from gpuaug.augment.multi_view import MultiView
from gpuaug.augment.recipe import BACKENDS, Augment, ReadOnly, View
from gpuaug.errors import ConfigError
from gpuaug.random.keyed import EPOCHS


class Progressive(ReadOnly):
    """Changes the recipe at certain epochs, for example to larger images, as EfficientNetV2 does (arXiv:2104.00298).

    All recipes must have the same views: equal names, in the same order, with equal ``copies``.

    Args:
        schedule: maps the first epoch of each recipe to the recipe, an :class:`Augment` or :class:`MultiView`. One
            recipe must begin with epoch 0. An epoch may be a string of digits, as in YAML. None skips an entry.
        backend: ``fused`` or ``kornia`` for all recipes; None: each recipe keeps its own backend.

    >>> import gpuaug
    >>> small, large = (gpuaug.Augment(crop=gpuaug.RandomResizedCrop(size)) for size in (128, 224))
    >>> recipe = Progressive(schedule={0: small, 30: large})
    >>> [recipe.at(epoch).crop.size for epoch in (0, 29, 30, 500)]
    [(128, 128), (128, 128), (224, 224), (224, 224)]
    """

    _read_once = ("schedule", "backend")

    def __init__(self, *, schedule: Mapping[Any, Augment | MultiView | None], backend: str | None = None) -> None:
        super().__init__()
        if backend is not None:
            checks.one_of("augment.backend", backend, BACKENDS)
        if not isinstance(schedule, Mapping):
            raise ConfigError(
                "`augment.schedule` must be a mapping of first epochs to recipes, such as {0: Augment(...), 30: ...}. "
                f"Found: a {type(schedule).__name__}."
            )
        given: dict[int, Augment | MultiView] = {}
        for key, recipe in schedule.items():
            if recipe is None:
                continue
            first = int(key) if isinstance(key, str) and re.fullmatch("[0-9]{1,10}", key) else key
            if type(first) is not int or first not in range(EPOCHS):
                raise ConfigError(
                    f"`augment.schedule` must have first epochs from 0 to {EPOCHS - 1} as keys. Found: {key!r:.200}."
                )
            checks.instance(f"augment.schedule.{key}", recipe, Augment, MultiView)
            if first in given:
                raise ConfigError(f"`augment.schedule` must have one recipe per epoch. Found: two for {first}.")
            if backend is not None:
                recipe = recipe.replace(backend=backend)
            given[first] = recipe
        if 0 not in given:
            raise ConfigError(f"`augment.schedule` must have a recipe for epoch 0. Found: {sorted(given) or 'none'}.")
        views = {first: [(view.name, view.copy) for view in recipe.views] for first, recipe in given.items()}
        if any(found != views[0] for found in views.values()):
            names = {first: [name or copy for name, copy in found] for first, found in views.items()}
            raise ConfigError(
                f"`augment.schedule` must have recipes with the same views, in one order. Found, by epoch: {names}."
            )
        for first, end in pairwise([*sorted(given), EPOCHS]):  # operations with `epochs` make further recipes
            recipe = given[first]
            given |= {epoch: recipe.at(epoch) for epoch in {first, *recipe.changes()} if first <= epoch < end}
        self._firsts = sorted(given)
        self._recipes = nn.ModuleList(given[first] for first in self._firsts)  # torch's repr shows them
        self.backend = backend
        self._made = True

    @property
    def schedule(self) -> Mapping[int, Augment | MultiView]:
        """Maps the first epoch of each recipe to the recipe, in the order of epochs."""
        schedule = dict(zip(self._firsts, self._recipes, strict=True))
        return MappingProxyType(schedule)  # type: ignore[arg-type]

    @property
    def main_thread(self) -> bool:
        """Whether a recipe must run in the iterating thread."""
        return any(recipe.main_thread for recipe in self.schedule.values())

    def check_unchanged(self) -> None:
        """Raise ReadOnlyError if a setting was changed after its recipe was created. Such a change has no effect."""
        for first, recipe in self.schedule.items():
            recipe.check_unchanged(key=f"augment.schedule.{first}")

    def fingerprint(self) -> dict[str, Any]:
        """All settings that decide random numbers and pixels, as JSON."""
        return {"schedule": [{"name": str(first), **recipe.fingerprint()} for first, recipe in self.schedule.items()]}

    def forward(self, images: Tensor, *, epoch: int = 0, **given: Any) -> Any:
        """Apply the recipe of an epoch to a decoded batch. Returns what :class:`Augment`'s ``forward`` returns.

        Args:
            images: uint8 [B, 3, H, W] or [B, H, W, 3].
            epoch: number of the epoch.
            given: other arguments of :class:`Augment`'s ``forward``, such as ``seed``, ``indices`` and ``masks``.
        """
        return self.at(epoch)(images, epoch=epoch, **given)

    def extra_repr(self) -> str:
        """The first epochs of the recipes."""
        return f"first epochs: {', '.join(map(str, self.schedule))}"


Recipe = Augment | MultiView | Progressive  # what a loader takes


def views_of(recipe: Recipe) -> list[tuple[str, View]]:
    """The views of all recipes, with their configuration keys, such as ``augment.schedule.30.views.local``."""
    found = []
    for first, one in recipe.schedule.items():
        key = f"augment.schedule.{first}" if isinstance(recipe, Progressive) else "augment"
        found += [(f"{key}.views.{view.name}" if view.name else key, view) for view in one.views]
    return found
