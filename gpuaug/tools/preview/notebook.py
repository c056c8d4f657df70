"""The live preview as widgets of a notebook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpuaug.errors import ConfigError, GpuaugError
from gpuaug.tools.preview.controls import Control
from gpuaug.tools.preview.drawing import Settings
from gpuaug.tools.preview.live import Live
from gpuaug.tools.request import Request


def preview_widgets(
    overrides: Sequence[str] = (),
    *,
    config_dir: str | Path | None = None,
    name: str | None = None,
    at: str | None = None,
    trust: str | Sequence[str] = (),
) -> Any:
    """Show samples in a notebook, with the sliders of `gpuaug preview serve=true` for the recipe's parameters.

    After each change, the same samples are drawn again. Below the picture are the overrides and the YAML of the changed
    recipe. This function needs ipywidgets: ``pip install 'gpuaug[live]'``.

    Args:
        overrides: strings as on the command line of ``gpuaug preview``, such as ``["source.root=/data", "samples=3"]``.
        config_dir: folder with your own configuration.
        name: your own configuration file in ``config_dir``; None: gpuaug's ``train``.
        at: path of the loader in your own configuration, such as ``train_data``.
        trust: prefixes of further modules that ``_target_`` may name, as in :func:`gpuaug.build`.

    Returns:
        A widget of ipywidgets. The notebook shows it if this call is the last line of a cell.

    Raises:
        ConfigError: if ipywidgets is missing, or the configuration is wrong.

    >>> shown = gpuaug.preview_widgets(["source.root=data/train", "augment=simclr", "samples=2"])
    """
    try:
        import ipywidgets as widgets
    except ImportError as error:
        raise ConfigError(
            f"`preview_widgets` needs ipywidgets ({error}). Install it: pip install 'gpuaug[live]'."
        ) from error
    request = Request(
        command="preview",
        overrides=tuple(overrides),
        config_dir=None if config_dir is None else str(config_dir),
        config_name=name,
        at=at,
        trust=(trust,) if isinstance(trust, str) else tuple(trust),
    )
    return _panel(widgets, Live(request, Settings(**request.settings())))


def _panel(widgets: Any, live: Live) -> Any:
    wide = widgets.Layout(width="100%")
    picture, message = widgets.Image(format="png", layout=widgets.Layout(max_width="100%")), widgets.Label()
    words = widgets.Textarea(description="overrides", rows=2, layout=wide)
    yaml = widgets.Textarea(description="YAML", rows=8, layout=wide)
    values = {control.key: control.value for control in live.controls}

    def draw() -> None:
        asked = {"changes": values}
        try:
            picture.value, words.value, yaml.value = live.png(asked), live.overrides(asked), live.yaml(asked)
            message.value = ""
        except GpuaugError as error:
            message.value = str(error)

    def change(control: Control, place: int | None, value: Any) -> None:
        old = values[control.key]
        values[control.key] = value if place is None else [*old[:place], value, *old[place + 1 :]]
        draw()

    groups: dict[str, list[Any]] = {}
    for control in live.controls:
        groups.setdefault(control.group, []).extend(_widgets(widgets, control, change))
    boxes = [widgets.VBox(members) for members in groups.values()]
    sliders = widgets.Accordion(boxes, layout=widgets.Layout(width="380px"))
    for number, group in enumerate(groups):
        sliders.set_title(number, group or "recipe")
    draw()
    return widgets.HBox([sliders, widgets.VBox([message, picture, words, yaml], layout=wide)])


def _widgets(widgets: Any, control: Control, change: Callable[[Control, int | None, Any], None]) -> list[Any]:
    """The widgets of one parameter: one slider per number, or a checkbox, or a list of words."""
    made = []
    several = isinstance(control.value, list)
    for place, value in enumerate(control.value if several else [control.value]):
        named: dict[str, Any] = {"description": f"{control.name} {place + 1}" if several else control.name}
        if isinstance(value, bool):
            widget = widgets.Checkbox(value, **named)
        elif isinstance(value, str):
            widget = widgets.Dropdown(options=control.choices, value=value, **named)
        else:  # `continuous_update=False`: draw after the slider is released
            whole = isinstance(value, int) and isinstance(control.step, int)
            kind, text = (widgets.IntSlider, "d") if whole else (widgets.FloatSlider, ".3g")
            ends = {"min": control.low, "max": control.high, "step": control.step, "readout_format": text}
            widget = kind(value, **ends, continuous_update=False, **named)
        widget.observe(lambda seen, place=place if several else None: change(control, place, seen["new"]), "value")
        made.append(widget)
    return made
