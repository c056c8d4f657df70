"""Recipes as text in other files: graphs, checkpoints and model cards. :func:`read` gives the configuration back."""

from __future__ import annotations

import json
import os
import re
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import gpuaug
from gpuaug import files
from gpuaug.augment.recipe import Augment
from gpuaug.errors import ConfigError, GpuaugError

KEY = "gpuaug"  # of ONNX's metadata, of a model card's YAML, and of a checkpoint
MEMBER = "gpuaug.json"  # extra file of a .pt2
LIMIT = 100_000  # bytes of a recipe as JSON; Hydra reads longer ones in seconds
CARD = 1 << 20  # bytes of a model card
_FRONT = re.compile(r"---\n(.*?)^---$", re.DOTALL | re.MULTILINE)


def described(recipe: Augment, classes: Sequence[str] | None = None) -> dict[str, Any]:
    """An evaluation recipe without operations, as JSON: its configuration for `gpuaug.build`, and its fingerprint."""
    crop, normalize = recipe.crop, recipe.normalize
    config: dict[str, Any] = {"_target_": "gpuaug.Augment", "backend": "fused", "copies": 1, "crop": None, "ops": {}}
    if crop is not None:
        config["crop"] = {"_target_": f"gpuaug.{type(crop).__name__}", **vars(crop)}
    config["normalize"] = None
    if normalize is not None:
        short = {k: [float(str(np.float32(x))) for x in values] for k, values in normalize.settings.items()}
        config["normalize"] = {"_target_": "gpuaug.Normalize", **short}  # 0.485, not 0.48500001430511475
    made = {"version": gpuaug.__version__, "recipes": {"eval": config}, "fingerprint": recipe.fingerprint()}
    made |= {} if classes is None else {"classes": list(classes)}
    return dict(json.loads(json.dumps(made)))


def add_to_card(path: str | os.PathLike[str], info: dict[str, Any]) -> None:
    """Write ``info`` as one line of the YAML at the top of a model card. Everything else in the card stays."""
    card = Path(path)
    try:
        text = card.read_text(encoding="utf-8") if card.exists() else ""
    except (OSError, ValueError) as error:  # ValueError: a null byte, or not UTF-8
        raise ConfigError(f"`path` must name a model card in UTF-8. Found: {str(path)!r} ({error}).") from error
    line = f"{KEY}: {json.dumps(info)}\n"  # JSON is YAML
    front = _FRONT.match(text)
    if front is None:
        text = f"---\n{line}---\n{text}"
    else:
        kept = re.sub(rf"^{KEY}:.*\n", "", front[1], flags=re.MULTILINE)
        text = f"---\n{kept}{line}---{text[front.end() :]}"
    try:
        files.write(card, text)
    except OSError as error:
        raise GpuaugError(f"{str(path)!r} could not be written: {error}.") from error


def read(path: str, name: str) -> dict[str, Any]:
    """The configuration of a recipe in a file, of which nothing is executed.

    ``name``: ``eval``, or another for the recipe of the training; if the file holds none, for that of the evaluation.
    Raises ConfigError if the file has no such recipe.
    """
    expected = "`augment=file:...` must name a file of `gpuaug export`, or a checkpoint of `gpuaug train`. Found: "
    try:
        info = _info(path)
        recipes = info["recipes"]
        recipe = recipes.get("eval" if name == "eval" or "train" not in recipes else "train")
        text = json.dumps(recipe)
        if not isinstance(recipe, dict | None) or len(text) > LIMIT:
            raise ValueError("its recipe is damaged")
        recipe = json.loads(text)
    except ImportError as error:
        raise ConfigError(f"{path!r} needs another package ({error}). Run `pip install gpuaug[export]`.") from error
    except Exception as error:  # of torch, onnx, yaml
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ConfigError(f"{expected}{path!r} ({reason}).") from error
    if recipe is None:
        raise ConfigError(
            f"{path!r} must hold the recipe of the evaluation. Found recipes: "
            f"{', '.join(map(str, recipes)) or 'none'}. Train with val.source.root=DIR, or set augment=eval."
        )
    if "${" in text:
        raise ConfigError(f"the recipe in {path!r} must hold plain values. Found: an interpolation, ${{...}}.")
    return dict(recipe)


def _info(path: str) -> Any:
    kind = os.path.splitext(path)[1].lower()
    files.check_regular(os.stat(path), path, limit=CARD if kind == ".md" else sys.maxsize)
    if kind == ".pt2":
        with zipfile.ZipFile(path) as members:
            (member,) = (x for x in members.infolist() if x.filename.endswith(f"/{MEMBER}"))
            if member.file_size > 10 * LIMIT:
                raise ValueError(f"{MEMBER} has {member.file_size} bytes")
            return json.loads(members.read(member))
    if kind == ".onnx":
        import onnx

        model = onnx.load(path, load_external_data=False)
        return json.loads({x.key: x.value for x in model.metadata_props}[KEY])
    if kind == ".md":
        import yaml

        class Plain(yaml.SafeLoader):
            """YAML without aliases, which can make a short text huge."""

            def compose_node(self, parent: Any, index: Any) -> Any:
                if self.check_event(yaml.AliasEvent):
                    raise yaml.YAMLError("it has aliases")
                return super().compose_node(parent, index)

        front = _FRONT.match(Path(path).read_text(encoding="utf-8"))
        return yaml.load(front[1] if front else "", Plain)[KEY]  # a SafeLoader
    import torch

    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)[KEY]
