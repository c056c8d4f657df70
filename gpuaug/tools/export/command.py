"""`gpuaug export`: writes a recipe for evaluation, and a model behind it, as one ONNX or torch file."""

from __future__ import annotations

import logging
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from gpuaug.deploy.graph import export
from gpuaug.errors import ConfigError, StateError
from gpuaug.tools.report import Report, output
from gpuaug.tools.request import Keys, Request
from gpuaug.tools.train.checkpoint import about, read_checkpoint
from gpuaug.tools.train.model import build_model

log = logging.getLogger("gpuaug")


@dataclass(frozen=True, kw_only=True)
class Settings(Keys):
    """The keys of `gpuaug export`."""

    out: str = "eval.onnx"
    model: Any = None
    checkpoint: str | None = None


def main(request: Request) -> int:
    settings = Settings(**request.settings())
    out = output(settings.out, "out")
    report, begin = Report(file=settings.json), time.monotonic()
    checkpoint = {} if settings.checkpoint is None else read_checkpoint(Path(settings.checkpoint), key="checkpoint")
    known = about(checkpoint)
    is_stored = bool(checkpoint) and not request.names_recipe
    config = request.loader("eval", before=[f"augment=file:{settings.checkpoint}"] if is_stored else ())
    recipe = request.build(config.augment)
    if known.get("fingerprint") not in (None, recipe.fingerprint()):
        text = "the recipe differs from that of the evaluation in %s, which gpuaug %s wrote"
        log.warning(text, settings.checkpoint, known.get("version"))
    classes = checkpoint.get("classes")
    model = _model(request, settings, known, checkpoint) if checkpoint else None
    if settings.model is not None and not checkpoint:
        raise ConfigError(
            "`checkpoint` must be given with `model`, because the model needs weights. Set checkpoint=FILE."
        )
    is_card = out.suffix.lower() == ".md"
    made = export(recipe, out.resolve(), model=None if is_card else model, classes=classes)
    report.values["fingerprint"] = made.pop("fingerprint")
    for name, value in made.items():
        report.add(name, value, f"{value:.2g} of 255 levels from the recipe")
    size = out.stat().st_size / 1e6
    report.add("export", str(out), f"{out} ({size:.1f} MB, {time.monotonic() - begin:.1f} s)")
    report.write()
    return 0


def _model(request: Request, settings: Settings, known: dict[str, Any], checkpoint: dict[str, Any]) -> nn.Module:
    config, count = settings.model or known.get("model"), known.get("num_classes") or len(checkpoint["classes"] or ())
    if config is None or not count:
        raise ConfigError(
            "`model` must name the network of the checkpoint. Found: null. Set model=... as for that run."
        )
    model = build_model(request, config, num_classes=count, seed=0)
    try:
        model.load_state_dict(checkpoint["model"])
    except RuntimeError as error:
        reason = textwrap.shorten(str(error), 400, placeholder=" ...")
        raise StateError(
            f"{settings.checkpoint} belongs to another model ({reason}). Set `model` as in that run."
        ) from error
    return model
