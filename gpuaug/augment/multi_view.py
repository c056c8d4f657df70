"""Recipes that make several views of each image, and what their views have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from gpuaug import checks
from gpuaug.augment.crop import RandomResizedCrop
from gpuaug.augment.recipe import BACKENDS, Augment, RecipeBase, View, ViewCopy
from gpuaug.errors import ConfigError


class MultiView(RecipeBase):
    """Applies several recipes to each image, which is decoded once.

    The results have the order of ``views``, and the copies of one view are adjacent. A view has its own random numbers,
    unless ``like`` or ``share`` say that it uses those of another view.

    Args:
        views: mapping of names to :class:`Augment`; None skips an entry. A view's random numbers depend on its name.
        backend: ``fused`` or ``kornia`` for all views; None: each view keeps its own backend.
        like: mapping of views to other views. Copy k of a view uses the random numbers of copy k of the other view, for
            the crop and for the operations that have the same name in both. So a view of another size can show the
            same part of the image, with the same flip: ``{gram: global}``.
        share: mapping of operations, or ``crop``, to lists of views whose copies use the same random numbers for it:
            those of the first copy of the first view.
        inside: mapping of views to lists of views before them. The crop window of copy k is inside that of one of the
            listed views and copies, which take turns. The crop must be a :class:`RandomResizedCrop`; its ``scale`` is
            a share of that window.

    >>> import gpuaug
    >>> large, small = (gpuaug.Augment(crop=gpuaug.RandomResizedCrop(size), copies=2) for size in (224, 96))
    >>> len(gpuaug.MultiView(views={"global": large, "local": small}).views)
    4
    """

    _read_once = ("views", "augments", "backend", "crop", "ops", "normalize", "copies", "like", "share", "inside")

    def __init__(
        self,
        *,
        views: Mapping[str, Augment | None],
        backend: str | None = None,
        like: Mapping[str, str] | None = None,
        share: Mapping[str, Sequence[str]] | None = None,
        inside: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        super().__init__()
        if backend is not None:
            checks.one_of("augment.backend", backend, BACKENDS)
        if not isinstance(views, Mapping):
            raise ConfigError(
                "`augment.views` must be a mapping of names to gpuaug.Augment, such as {'global': Augment(copies=2)}. "
                f"Found: a {type(views).__name__}."
            )
        recipes: dict[str, Augment] = {}
        for name, augment in views.items():
            if augment is None:
                continue
            checks.name_in("augment.views", name)
            checks.instance(f"augment.views.{name}", augment, Augment)
            if backend not in (None, augment.backend):
                augment = augment.replace(backend=backend)  # the caller's object is unchanged
            if augment.sizes or augment.combine:
                found = "`sizes`" if augment.sizes else augment.combine
                raise ConfigError(f"`augment.views.{name}` must have no {found}: only a recipe without views has it.")
            recipes[name] = augment
        if not recipes:
            raise ConfigError("`augment.views` must have at least one view. Found: none.")
        self.augments = nn.ModuleList(recipes.values())
        self.like = {name: of for name, of in _given("like", like, recipes, str).items() if of is not None}
        self.share, self.inside = _lists("share", share, None, recipes), _lists("inside", inside, recipes, recipes)
        self.views = self._related(recipes)
        self._made = True

    def _related(self, recipes: Mapping[str, Augment]) -> list[View]:
        """All copies of all views, with the views whose random numbers or windows they use."""
        sources: dict[ViewCopy, dict[str, ViewCopy]] = {}
        for name, other in self.like.items():
            own, of = recipes[name], recipes[other]
            key = f"augment.like.{name}"
            if other in self.like or own.copies > of.copies:
                raise ConfigError(
                    f"`{key}` must name a view with at least as many copies, which is like no other view. "
                    f"Found: {other!r}, with {of.copies} copies for {own.copies}."
                )
            shared = [op for op in _draws(own) if op in _draws(of)]
            for op in shared:
                _check_equal(key, op, name, own, other, of)
            for copy in range(own.copies):
                sources[name, copy] = dict.fromkeys(shared, (other, copy))
        for op, names in self.share.items():
            first, key = names[0], f"augment.share.{op}"
            for name in names:
                if op not in _draws(recipes[name]):
                    raise ConfigError(f"`{key}` must list views that have `{op}`. Found: {name!r}.")
                _check_equal(key, op, name, recipes[name], first, recipes[first])
                for copy in range(recipes[name].copies):
                    sources.setdefault((name, copy), {})[op] = (first, 0)
        found = [(name, copy) for name, augment in recipes.items() for copy in range(augment.copies)]
        outer: dict[ViewCopy, int] = {}
        for name, others in self.inside.items():
            if not isinstance(recipes[name].crop, RandomResizedCrop):
                raise ConfigError(
                    f"`augment.inside.{name}` needs a view whose crop is a gpuaug.RandomResizedCrop. Found: "
                    f"{recipes[name].crop!r}."
                )
            places = [k for k, (other, _) in enumerate(found) if other in others]
            if max(places) > found.index((name, 0)):
                raise ConfigError(f"`augment.inside.{name}` must list views before {name!r}. Found: {others}.")
            if any(recipes[other].crop is None for other in others):
                raise ConfigError(f"`augment.inside.{name}` must list views with a crop. Found: {others}.")
            for copy in range(recipes[name].copies):
                outer[name, copy] = places[copy % len(places)]
        return [
            View(at[0], at[1], recipes[at[0]], tuple(sorted(sources.get(at, {}).items())), outer.get(at))
            for at in found
        ]

    def changes(self) -> set[int]:
        """The epochs at which a view changes."""
        return {epoch for view in self.views for epoch in view.augment.changes()}

    def _of_epoch(self, epoch: int) -> MultiView:
        views: dict[str, Augment] = {view.name: view.augment.at(epoch) for view in self.views}
        share = {
            op: names for op, names in self.share.items() if any(op in ("crop", *views[name].ops) for name in names)
        }
        return self.replace(views=views, share=share)

    @property
    def _relations(self) -> dict[str, dict[str, Any]]:
        return {name: value for name in ("like", "share", "inside") if (value := getattr(self, name))}

    def replace(self, **changes: Any) -> MultiView:
        """Return a new recipe with ``changes`` of the settings, for example ``replace(backend="kornia")``."""
        views = {view.name: view.augment for view in self.views}
        return MultiView(**{"views": views, **self._relations} | changes)

    def fingerprint(self) -> dict[str, Any]:
        """All settings that decide random numbers and pixels, as JSON."""
        views = [{"name": v.name, **v.augment.fingerprint()} for v in self.views if v.copy == 0]
        return {"views": views, **self._relations}

    def extra_repr(self) -> str:
        """Which views are related."""
        return ", ".join(f"{name}={value}" for name, value in self._relations.items())


def _given(key: str, value: Any, names: Iterable[str] | None, kind: type) -> dict[str, Any]:
    """A setting as a dictionary. ``names``: the keys that it may have; None: any."""
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"`augment.{key}` must be a mapping. Found: a {type(value).__name__}.")
    known = None if names is None else set(names)
    for name, each in (value or {}).items():
        if known is not None and (unknown := [x for x in (name, each) if isinstance(x, str) and x not in known]):
            raise ConfigError(
                f"`augment.{key}` must name views, which are {', '.join(sorted(known))}. Found: {unknown[0]!r}."
            )
        if each is not None and not isinstance(each, kind):
            raise ConfigError(f"`augment.{key}.{name}` must be a {kind.__name__}. Found: {each!r:.200}.")
    return dict(value or {})


def _lists(key: str, value: Any, names: Iterable[str] | None, views: Iterable[str]) -> dict[str, list[str]]:
    """A setting whose values are lists of views."""
    made = {}
    for name, listed in _given(key, value, names, object).items():
        if listed is None:
            continue
        known = set(views)
        if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed or not known.issuperset(listed):
            raise ConfigError(
                f"`augment.{key}.{name}` must be a list of views, which are {', '.join(sorted(known))}. "
                f"Found: {listed!r:.200}."
            )
        made[str(name)] = list(listed)
    return made


def _draws(augment: Augment) -> dict[str, tuple[int, bool]]:
    """What each operation, and the crop, draws: number of uniforms, and whether it has a key."""
    return {draws.name: (draws.count, draws.keyed) for draws in View("", 0, augment).draws()}


def _check_equal(key: str, op: str, name: str, own: Augment, other: str, of: Augment) -> None:
    """Raise ConfigError if an operation draws other random numbers in two views, because it is of another kind."""
    kinds = [type(each.crop if op == "crop" else each.ops[op]).__name__ for each in (own, of)]
    if kinds[0] != kinds[1] or _draws(own)[op] != _draws(of)[op]:
        raise ConfigError(
            f"`{key}` needs the same kind of `{op}` in both views. Found: {kinds[0]} in {name!r} and {kinds[1]} in "
            f"{other!r}."
        )
