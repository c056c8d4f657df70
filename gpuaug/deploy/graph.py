"""Writes an evaluation recipe, and a model behind it, as one graph: for torch (`.pt2`) or ONNX (`.onnx`).

:class:`Evaluation` computes what the recipe does, in operations that ``torch.export`` and ONNX have. It computes sizes
from whole numbers without branches: a graph with ``if h < w`` would fail for other sizes than those of the example.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

from gpuaug import checks, files
from gpuaug.augment.crop import Crop, Resize, ResizeCenterCrop
from gpuaug.augment.recipe import Augment
from gpuaug.augment.target_crops import Letterbox
from gpuaug.deploy.saved import KEY, MEMBER, add_to_card, described
from gpuaug.errors import ConfigError, GpuaugError

log = logging.getLogger("gpuaug")

OPSET = 18  # the first one of ONNX whose Resize has antialiasing
LARGEST_ONNX = 2**31 - 2**20  # bytes: protobuf's limit, less some for the graph itself
WORST, MEAN = 2.01, 0.03  # limits of the difference from the recipe, in levels of 255
# added before rounding down: Pillow rounds halves up, and a computed half may lie a little below
HALF = 0.5 + 2**-12
# (B, H, W) of the images that compare the graph with the recipe: landscape, portrait, odd margins, small, equal
PROBES = ((2, 300, 400), (1, 400, 301), (1, 720, 1281), (3, 100, 90), (1, 224, 224), (1, 999, 257))
Side = Any  # an int, or a symbol for one
Run = Callable[[Tensor], Tensor]


class Evaluation(nn.Module):
    """What an evaluation recipe does to uint8 images [B, 3, H, W]: float32 [B, 3, h, w].

    Like Pillow, it resizes the width, rounds to whole levels, and then resizes the height.
    """

    fill: Tensor
    mean: Tensor
    std: Tensor

    def __init__(self, recipe: Augment) -> None:
        super().__init__()
        self.crop: Crop | None = recipe.crop
        normalize = recipe.normalize
        fill = torch.tensor(getattr(self.crop, "fill", 0), dtype=torch.float32)
        mean, std = (torch.zeros(1), torch.ones(1)) if normalize is None else (normalize.mean, normalize.std)
        for name, values in (("fill", fill), ("mean", mean), ("std", std)):
            self.register_buffer(name, values.detach().cpu().clone().view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Resize, crop and normalize."""
        x, crop = images.to(torch.float32), self.crop
        if crop is not None:
            x = self._resized(x, *_sides(crop, *images.shape[2:]))
            if not isinstance(crop, Resize):
                x = self._placed(x, *crop.size, centre=getattr(crop, "centre", True))
        return (x / 255 - self.mean) / self.std

    def _resized(self, x: Tensor, height: Side, width: Side) -> Tensor:
        assert self.crop is not None
        for size in ((x.shape[2], width), (height, width)):
            x = interpolate(x, size=size, mode=self.crop.interpolation, antialias=True)
            x = (x + HALF).floor().clamp(0, 255)
        return x

    def _placed(self, x: Tensor, height: int, width: int, *, centre: bool) -> Tensor:
        """Pad with `fill`, or cut."""
        borders, starts = list[Side](), list[Side]()
        for n, size in ((x.shape[3], width), (x.shape[2], height)):
            missing, extra = torch.sym_max(size - n, 0), torch.sym_max(n - size, 0)
            before = missing // 2 if centre else 0
            borders += [before, missing - before]
            starts.append(extra // 2 + (extra % 2) * (extra // 2 % 2))  # of extra / 2, halves round to even
        x = pad(x - self.fill, borders) + self.fill
        columns, rows = (
            start + torch.arange(size, device=x.device) for start, size in zip(starts, (width, height), strict=True)
        )
        return x.index_select(2, rows).index_select(3, columns)


class _WithModel(nn.Module):
    """An evaluation, and a model behind it."""

    def __init__(self, head: Evaluation, model: nn.Module) -> None:
        super().__init__()
        self.head, self.model = head, model

    def forward(self, images: Tensor) -> Any:
        return self.model(self.head(images))


def _sides(crop: Crop, h: Side, w: Side) -> tuple[Side, Side]:
    """Height and width after the resizing of ``crop``."""
    if isinstance(crop, Letterbox):
        (H, W), long = crop.size, torch.sym_max(h * crop.size[1], w * crop.size[0])  # decides which side fits
        if not crop.upscale:
            long = torch.sym_max(long, H * W)
        rows, columns = (torch.sym_max(_rounded(n * H * W, long), 1) for n in (h, w))
        return rows, columns
    size = crop.resize if isinstance(crop, ResizeCenterCrop) else crop.size
    if isinstance(size, tuple):
        return size
    short = torch.sym_min(h, w)
    height, width = size * h // short, size * w // short
    longest = getattr(crop, "max_size", None)
    if longest is None:
        return height, width
    longer = torch.sym_max(height, width)
    over = torch.sym_min(torch.sym_max(longer - longest, 0), 1)  # 1: the longer side is too long
    shrunk = torch.sym_max(longest * size // longer, 1)
    sides = []
    for side in (height, width):
        is_longer = torch.sym_min(torch.sym_max(side - size, 0), 1)
        sides.append(side + over * (is_longer * longest + (1 - is_longer) * shrunk - side))
    return sides[0], sides[1]


def _rounded(number: Side, divisor: Side) -> Side:
    """``number / divisor``, halves rounded to even."""
    up = (2 * number + divisor) // (2 * divisor)
    is_half = 1 - torch.sym_min((2 * number + divisor) % (2 * divisor), 1)
    return up - is_half * (up % 2)


def export(
    recipe: Augment,
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    classes: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Write an evaluation recipe as one graph, which needs no gpuaug.

    The graph has the input ``images``, uint8 [B, 3, H, W], RGB and upright. B, H and W may have any value. The output
    is float32 [B, 3, h, w] as the recipe makes it on the CPU, or the output of ``model``. It differs from the recipe by
    at most one level of 255, or two where images are enlarged. The graph is compared with the recipe before it is
    written. The file also holds the recipe, and ``gpuaug.compose("eval", ["augment=file:PATH"])`` reads it.

    Args:
        recipe: an :class:`Augment` that draws nothing: its crop is None, :class:`Resize`, :class:`ResizeCenterCrop` or
            :class:`Letterbox` without ``shorter``; its operations have p = 0; it has one view.
        path: file to write. ``.pt2``: for ``torch.export.load``. ``.onnx``: ONNX with opset 18; needs
            ``pip install gpuaug[export]``. ``.md``: a model card, where only the recipe is written into the YAML.
        model: module that takes the recipe's output; it is written in evaluation mode, behind the recipe.
        classes: names of the classes, to be written into the file.

    Returns:
        ``largest_difference`` and ``mean_difference`` from the recipe, in levels of 255, over images of six sizes;
        ``fingerprint``: the settings, as JSON.

    Raises:
        ConfigError: the recipe cannot be exported.
        GpuaugError: the model cannot be exported, or the file cannot be written.

    >>> recipe = Augment(crop=ResizeCenterCrop(64, 56))
    >>> export(recipe, "eval.pt2")["largest_difference"] <= 1
    True
    """
    checks.instance("recipe", recipe, Augment)
    checks.instance("model", model, nn.Module, optional=True)
    checks.instance("path", path, str, os.PathLike)
    if classes is not None and not all(isinstance(x, str) for x in checks.instance("classes", classes, list, tuple)):
        raise ConfigError(f"`classes` must be names. Found: {classes!r:.99}.")
    kind = os.path.splitext(path)[1].lower()
    if kind not in (".pt2", ".onnx", ".md"):
        raise ConfigError(f"`path` must end in .pt2, .onnx or .md. Found: {os.fspath(path)!r}.")
    check_exportable(recipe)
    recipe = recipe.replace(ops=None, epochs=None, sizes=None)
    info = described(recipe, classes)
    if kind == ".md":
        if model is not None:
            raise ConfigError("`model` must be None for a model card, which holds only text. Found: a module.")
        add_to_card(path, info)
        return {"fingerprint": info["fingerprint"]}
    head = Evaluation(recipe)
    whole: nn.Module = head if model is None else _WithModel(head, copy.deepcopy(model).cpu())
    whole.eval()
    size = sum(each.numel() * each.element_size() for each in (*whole.parameters(), *whole.buffers()))
    if kind == ".onnx" and size > LARGEST_ONNX:
        raise ConfigError(f"an ONNX file holds at most 2 GB. Found: a model of {size / 1e9:.1f} GB. Write a .pt2 file.")
    program = _traced(whole)
    data, run = _torch(program, info) if kind == ".pt2" else _onnx(program, info)
    largest, mean = _compared(recipe, head, whole, run)
    try:
        files.write(path, data)
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise GpuaugError(f"{os.fspath(path)!r} could not be written: {error}.") from error
    differences = {"largest_difference": round(largest, 4), "mean_difference": round(mean, 4)}
    return {**differences, "fingerprint": info["fingerprint"]}


def check_exportable(recipe: Augment) -> None:
    """Raise ConfigError for a recipe that draws random numbers, or does what a graph cannot."""
    crop = recipe.crop
    if recipe.combine.entries:
        raise ConfigError("`augment.combine` must be null for an export. Found: combine. Take a recipe for evaluation.")
    if crop is not None and not isinstance(crop, Resize | ResizeCenterCrop | Letterbox):
        raise ConfigError(
            "`augment.crop` must be Resize, ResizeCenterCrop, Letterbox or null for an export. Found: "
            f"{type(crop).__name__}. Take another recipe for evaluation, such as augment=eval."
        )
    if isinstance(crop, Letterbox) and crop.shorter is not None:
        raise ConfigError(
            f"`augment.crop.shorter` must be null for an export. Found: {crop.shorter}. Use "
            "gpuaug.Resize(SHORTER, max_size=LONGER)."
        )
    if crop is not None and crop.pad == "batch":
        raise ConfigError("`augment.crop.pad` must be size for an export. Found: batch.")
    if crop is not None and crop.interpolation == "nearest":
        raise ConfigError("`augment.crop.interpolation` must be bilinear or bicubic for an export. Found: nearest.")
    for name, op in recipe.ops.items():
        if (p := getattr(op, "p", 1.0)) != 0:
            raise ConfigError(
                f"`augment.ops.{name}` must be null for an export, because it changes images. Found: "
                f"{type(op).__name__} with p={p:g}. Set augment.ops.{name}=null, or take a recipe for evaluation."
            )
    for part, values in (("crop.fill", getattr(crop, "fill", 0)), ("normalize", getattr(recipe.normalize, "mean", 0))):
        if (count := np.asarray(values).size) not in (1, 3):
            raise ConfigError(
                f"`augment.{part}` must be for images of three channels for an export. Found: {count} values."
            )
    if recipe.copies != 1:
        raise ConfigError(f"`augment.copies` must be 1 for an export. Found: {recipe.copies}.")


def _traced(whole: nn.Module) -> torch.export.ExportedProgram:
    """The graph of a module, with a dynamic batch, height and width."""
    size = torch.export.Dim.DYNAMIC
    example = torch.zeros(2, 3, 301, 403, dtype=torch.uint8)
    try:
        with torch.no_grad(), _quiet():
            return torch.export.export(
                whole, (), {"images": example}, dynamic_shapes={"images": {0: size, 2: size, 3: size}}
            )
    except Exception as error:  # torch raises many types
        reason = str(error).strip().partition("\n")[0]
        raise GpuaugError(
            f"torch.export refused the {'model' if isinstance(whole, _WithModel) else 'recipe'}: "
            f"{type(error).__name__}: {reason}"
        ) from error


def _torch(program: torch.export.ExportedProgram, info: dict[str, Any]) -> tuple[bytes, Run]:
    stream = io.BytesIO()
    torch.export.save(program, stream, extra_files={MEMBER: json.dumps(info)})
    module = program.module()
    return stream.getvalue(), lambda images: module(images=images)


def _onnx(program: torch.export.ExportedProgram, info: dict[str, Any]) -> tuple[bytes, Run | None]:
    """The file of a graph, and a function that runs it; None without onnxruntime."""
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"ONNX files need two packages ({error}). Run `pip install gpuaug[export]`.") from error
    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["output"]}
    try:
        with _quiet():
            made: Any = torch.onnx.export(program, opset_version=OPSET, verbose=False, **names)
    except Exception as error:  # of a model's operations
        raise GpuaugError(f"torch.onnx refused the graph: {str(error).strip().partition(chr(10))[0]}") from error
    made.model.metadata_props[KEY] = json.dumps(info)
    data = made.model_proto.SerializeToString()
    try:
        import onnxruntime
    except ImportError:
        log.info("the ONNX file was not run, because onnxruntime is not installed")
        return data, None
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return data, lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def _compared(recipe: Augment, head: Evaluation, whole: nn.Module, run: Run | None) -> tuple[float, float]:
    """Largest and mean difference from the recipe, in levels. GpuaugError if the graph differs."""
    largest, means = 0.0, list[float]()
    with torch.no_grad():
        for n, (batch, height, width) in enumerate(PROBES):
            coarse = torch.rand(batch, 3, 24, 31, generator=torch.Generator().manual_seed(n))
            images = interpolate(coarse, size=(height, width), mode="bicubic").clamp(0, 1).mul(255).to(torch.uint8)
            expected, pixels = recipe(images, seed=0), head(images)
            if run is not None and whole is head:
                pixels = run(images)
            elif run is not None:
                b = whole(images)
                if not isinstance(b, torch.Tensor):
                    raise GpuaugError(f"the model must return one tensor. Found: {type(b).__name__}.")
                a, b = run(images).double(), b.double()
                worst = float((a - b).abs().max())
                if not worst <= 0.02 * float(b.abs().max()):  # also NaN
                    raise GpuaugError(f"the graph of the model gives other values: they differ by up to {worst:.3g}.")
            levels = ((pixels - expected) * head.std * 255).abs()
            largest, means = max(largest, float(levels.max())), [*means, float(levels.mean())]
    mean = sum(means) / len(means)
    if largest > WORST or mean > MEAN:
        raise GpuaugError(f"the graph differs from the recipe by {largest:.3g} levels of 255, {mean:.3g} on average.")
    return largest, mean


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide what torch prints while it traces."""
    loggers = [logging.getLogger(f"torch.{name}") for name in ("onnx", "export", "fx")]
    before = [each.level for each in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for each in loggers:
            each.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for each, level in zip(loggers, before, strict=True):
                each.setLevel(level)
