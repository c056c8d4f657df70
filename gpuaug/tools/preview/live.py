"""Draws samples again after each change of the recipe's parameters, for the live page."""

from __future__ import annotations

import io
import shlex
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from gpuaug.display.sheet import sheet
from gpuaug.errors import ConfigError
from gpuaug.tools.preview.controls import changed, controls
from gpuaug.tools.preview.drawing import SHOWN, Settings, chosen, drawing
from gpuaug.tools.request import Request

QUESTION = ("changes", "indices", "epoch")  # keys of a request, all optional; `changes` maps parameters to values


class Live:
    """Draws samples with changed parameters of a recipe. The source is opened only once."""

    def __init__(self, request: Request, settings: Settings) -> None:
        self.request, self.settings = request, settings
        config = request.loader()
        self.controls = controls(config.get("augment"))
        with request.build(config, mix=None, num_workers=0, prefetch=0) as loader:
            self.source = loader.source
        self.indices = chosen(self.source, settings.indices, count=settings.samples or SHOWN[settings.show])

    def state(self) -> dict[str, Any]:
        """The values that the page needs to show its controls, ready for JSON."""
        listed = [{**asdict(control), "name": control.name} for control in self.controls]
        return {"controls": listed, "indices": self.indices, "epoch": self.settings.epoch, "size": len(self.source)}

    def render(self, asked: Any = None) -> bytes:
        """The PNG that ``gpuaug preview`` writes with the changed parameters. ``QUESTION`` explains ``asked``."""
        request, stream = self._changed(asked), io.BytesIO()
        given = {name: value for name, value in (asked or {}).items() if name != "changes" and value is not None}
        settings = replace(self.settings, **given)
        objects = {"source": self.source, "self_check": False}  # each change would be a new recipe to check
        rows, above, _ = drawing(request, request.loader(), settings, **objects)
        sheet(rows, **above).save(stream, "PNG", compress_level=1)  # fast, and large files do not matter here
        return stream.getvalue()

    def overrides(self, asked: Any = None) -> str:
        """The command-line options and overrides that select the changed recipe, quoted for a shell."""
        call = self._changed(asked)
        options = {"--config-dir": call.config_dir, "--config-name": call.config_name, "--at": call.at}
        words = [word for option, value in options.items() if value is not None for word in (option, value)]
        words += [word for prefix in call.trust for word in ("--trust", prefix)]
        return shlex.join([*words, *(text for _, text in call.others())])

    def _changed(self, asked: Any) -> Request:
        asked = {} if asked is None else asked
        if not isinstance(asked, Mapping) or any(name not in QUESTION for name in asked):
            raise ConfigError(f"A request must be a mapping with {', '.join(QUESTION)}. Found: {asked!r:.100}.")
        more = changed(self.controls, asked.get("changes", {}))
        return replace(self.request, overrides=(*self.request.overrides, *more))
