"""What a loader still has to do with images that `gpuaug pack epochs=K` has already augmented."""

from __future__ import annotations

import logging
from typing import Any

from gpuaug.augment.crop import side_by_side
from gpuaug.augment.multi_view import MultiView
from gpuaug.augment.progressive import Progressive, Recipe
from gpuaug.augment.recipe import Augment
from gpuaug.errors import ConfigError
from gpuaug.loader.state import compare, plain
from gpuaug.random import keyed as draw

log = logging.getLogger("gpuaug")


def before_normalization(recipe: Augment | MultiView) -> Augment | MultiView:
    """The same recipe without normalization."""
    if isinstance(recipe, MultiView):
        return recipe.replace(views={view.name: view.augment.replace(normalize=None) for view in recipe.views})
    return recipe.replace(normalize=None)


def made_of(recipe: Augment | MultiView, seed: int) -> dict[str, Any]:
    """Everything that decides the stored pixels of a sample, as JSON."""
    return dict(plain({"augment": before_normalization(recipe).fingerprint(), "seed": seed, "draw": draw.VERSION}))


def remaining(recipe: Recipe, source: Any, seed: int) -> Recipe:
    """The recipe that is left to apply: normalization, if the source's images are augmented; else ``recipe``.

    Raises ConfigError if the images were augmented with another recipe or seed.
    """
    stored: dict[str, Any] | None = source.augmented_by
    if stored is None:
        return recipe
    if len(recipe.schedule) > 1 or isinstance(recipe, Progressive):
        different = "augment: one recipe stored, a recipe that changes with the epoch here"
    else:
        different = compare(stored["made_of"], made_of(recipe, seed), "stored", "here")
    if different:
        raise ConfigError(
            "`augment` and `seed` must be those with which `gpuaug pack` made the images of this source; only "
            f"`augment.normalize` may differ. Found: {different}. Restore them, or pack again into a new folder."
        )
    log.info(
        "source packed: %d augmented versions of each sample; epoch e reads version e mod %d, also where the order "
        "repeats a sample", stored["epochs"], stored["epochs"],
    )  # fmt: skip
    whole: list[Augment] = [view.augment for view in recipe.at(0).views]
    windows, _ = side_by_side([each.crop.size for each in whole])
    left = {
        str(k): Augment(crop=windows[k], normalize=each.normalize, backend=each.backend) for k, each in enumerate(whole)
    }
    return MultiView(views=left)
