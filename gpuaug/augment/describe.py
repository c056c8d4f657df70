"""Describes recipes as short texts and as HTML tables. Recipes import this module, so it imports no recipe."""

from __future__ import annotations

from typing import Any

from gpuaug.display.sheet import table

LONGEST = 300  # largest number of characters of an operation's settings
_USUAL = {"keepdim": False, "same_on_batch": False, "p_batch": 1}  # Kornia's defaults, which are left out


def lines(recipe: Any, epoch: int) -> list[str]:
    """List the recipe's steps at ``epoch``, one line for each view and its copies."""
    made = []
    for view in recipe.at(epoch).views:
        augment = view.augment
        if not view.copy:
            crop = [] if augment.crop is None else [type(augment.crop).__name__]
            copies = f"{augment.copies} views" if augment.copies > 1 else ""
            name = f"{view.name} ({copies})" if view.name and copies else view.name or copies
            steps = ", ".join([*crop, *augment.ops]) or "nothing"
            made.append(f"{name}: {steps}" if name else steps)
    return made


def as_table(recipe: Any) -> str:
    """An HTML table of all steps with their settings."""
    rows = []
    for first, stage in recipe.stages.items():
        for view in stage.views:
            if not view.copy:
                where = [f"from epoch {first}"] if len(recipe.stages) > 1 else []
                where += [view.name] if view.name else []
                where += [f"{view.augment.copies} views"] if view.augment.copies > 1 else []
                rows += [(", ".join(where), *row) for row in _steps(view)]
    if not any(where for where, *_ in rows):
        return table([row[1:] for row in rows], head=("step", "operation", "settings"))
    return table(rows, head=("view", "step", "operation", "settings"))


def _steps(view: Any) -> list[tuple[str, str, str]]:
    made = view.augment.settings()
    known = [] if made["crop"] is None else [("crop", *_text(made["crop"]))]
    known += [(op["name"], *_text({k: v for k, v in op.items() if k != "name"})) for op in made["ops"]]
    if (normalize := made["normalize"]) is not None:
        known.append(("normalize", "Normalize", _text({"class": "", **normalize})[1]))
    return known or [("", "nothing", "")]


def _text(step: dict[str, Any]) -> tuple[str, str]:
    """The class name of a step, and the settings that are not None and differ from ``_USUAL``."""
    settings = {k.removesuffix("_sampler"): v for k, v in step.items() if k != "class"}
    parts = [f"{k}={_value(v)}" for k, v in settings.items() if v is not None and _USUAL.get(k, step) != v]
    text = ", ".join(parts)
    return step["class"].rpartition(".")[2], text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        kind, text = _text({"class": "", **value})
        return f"{kind or value.get('name', '')}({text})"
    return str(value)
