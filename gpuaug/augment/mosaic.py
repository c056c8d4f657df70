"""Operations between the crop and ``ops`` that combine samples: mosaic, the affine transform of its canvas, MixUp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuaug import checks
from gpuaug.augment.crop import pair
from gpuaug.batch import Int64
from gpuaug.errors import ConfigError
from gpuaug.random.keyed import Float, pick

Float64 = NDArray[np.float64]

PARTNERS = ("window", "fresh", "batch")
STRIDE = 8  # partners are this many positions apart, so that on 1, 2, 4 or 8 ranks they were samples of the same rank


class CombineOp:
    """Base of the operations in ``combine``. No dataclass, because Hydra turns one in a mapping into a mapping."""

    count: int  # uniforms of each sample

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class TilesOp(CombineOp):
    """Base of the operations that show other samples beside a sample.

    The first uniform of a sample decides whether it is changed; those from the fourth on choose its partners.
    """

    tiles: int  # samples in an output, with the sample itself

    def __init__(self, p: float, partners: str, window: int, *, kinds: Sequence[str]) -> None:
        self.p = float(checks.number("p", p, 0, 1))
        self.partners = checks.one_of("partners", partners, kinds)
        self.window = checks.whole_number("window", window, 8, 1000)

    def _applied(self, u: Float) -> NDArray[np.bool_]:
        """Whether each sample is changed, bool [B]. ``u``: uniforms [B, count]."""
        return np.asarray(u[:, 0] < self.p)

    def _distances(self, u: Float, most: int) -> Int64:
        """Different numbers from 1 to ``most``, int64 [B, tiles - 1]; they repeat if there are too few."""
        made = np.zeros((len(u), 0), dtype=np.int64)
        for k in range(self.tiles - 1):
            left = max(most - k, 1)
            number = pick(u[:, 3 + k], left) + 1
            for earlier in np.sort(made, axis=1).T if most > k else ():
                number += number >= earlier
            made = np.concatenate([made, number[:, None]], axis=1)
        return made


class Mosaic(TilesOp):
    """Puts the crops of several samples side by side on a canvas, as YOLOv4 and later detectors train.

    ``tiles: 4`` (arXiv:2004.10934): the canvas has twice the sides of the crop. The tiles meet at a random point, the
    sample itself at its top left. ``tiles: 9``: the sample is in the middle of the canvas, and the others lie around
    it, as in Ultralytics' ``Mosaic(n=9)``. What a crop pads is no part of its tile. Use a crop that does not center,
    such as ``Letterbox(640, fill=114, centre=False)``. Where no tile is, the canvas has the ``fill`` of the crop, or 0.

    The sample's own number decides everything, so it looks the same in any batch and on any rank, except with
    ``partners: batch``. A sample that cannot be read is missing in the mosaics of others.

    Args:
        tiles: 4 or 9.
        centre: smallest and largest x and y of the point where four tiles meet, as a fraction of the crop's sides.
        p: probability of a mosaic. Without it, the sample lies alone on a canvas of the crop's size.
        partners: which samples the other tiles show. ``window``: samples that come shortly before this one in the
            epoch's order. A run keeps their decoded tiles, so on 1, 2, 4 or 8 ranks hardly anything is decoded twice.
            ``fresh``: any samples of the epoch; each is decoded again. ``batch``: other samples of the batch.
        window: with ``partners: window``, the partners are up to 8 times this many positions before the sample.

    >>> Mosaic(p=0.5).tiles
    4
    """

    def __init__(
        self,
        *,
        tiles: int = 4,
        centre: Sequence[float] = (0.5, 1.5),
        p: float = 1.0,
        partners: str = "window",
        window: int = 32,
    ) -> None:
        if type(tiles) is not int or tiles not in (4, 9):
            raise ConfigError(f"`tiles` must be 4 or 9. Found: {tiles!r:.99}.")
        self.tiles, self.centre = tiles, checks.pair("centre", centre, 0, 2)
        super().__init__(p, partners, window, kinds=PARTNERS)

    @property
    def count(self) -> int:  # type: ignore[override]
        """Number of uniforms: whether there is a mosaic, two for the point, one for each partner."""
        return 2 + self.tiles

    def _place(self, u: Float, sides: Int64, size: tuple[int, int]) -> Int64:
        """Top left corners of the tiles on the canvas of twice the crop's sides: (x, y), int64 [B, tiles, 2].

        Args:
            u: uniforms [B, count].
            sides: int64 [B, tiles, 2], (width, height) of each tile.
            size: (H, W) of the crop.
        """
        height, width = size
        if self.tiles == 4:
            low, high = self.centre
            share = low + u[:, 1:3].astype(np.float64) * (high - low)
            meet = (share * (width, height)).astype(np.int64)[:, None]  # [B, 1, 2]
            return meet - sides * np.array([[1, 1], [0, 1], [1, 0], [0, 0]])
        w, h = np.moveaxis(sides, -1, 0)
        x, y = np.full(w.shape, width), np.full(h.shape, height)
        x[:, 2] = width + w[:, 1]
        x[:, 3] = x[:, 4] = width + w[:, 0]
        x[:, 5] = width + w[:, 0] - w[:, 5]
        x[:, 6] = width + w[:, 0] - w[:, 5] - w[:, 6]
        x[:, 7], x[:, 8] = width - w[:, 7], width - w[:, 8]
        y[:, 1], y[:, 2] = height - h[:, 1], height - h[:, 2]
        y[:, 4] = height + h[:, 3]
        y[:, 5] = y[:, 6] = height + h[:, 0]
        y[:, 7] = height + h[:, 0] - h[:, 7]
        y[:, 8] = y[:, 7] - h[:, 8]
        return np.stack([x - width // 2, y - height // 2], axis=-1)  # the middle of a canvas of three crops


class CanvasAffine(CombineOp):
    """Rotates, scales, shears and shifts the canvas of a mosaic, or each sample, and gives the output its size.

    Args:
        size: output (H, W); an int is a square.
        degrees: the largest angle; angles are uniform in both directions.
        translate: the largest shift in both directions, as a fraction of the output's sides.
        scale: smallest and largest factor, 0.001 <= min <= max <= 100.
        shear: the largest shear in degrees, in both directions, for x and y.
        about: what stays in place without a shift. ``centre``: the canvas's centre goes to the output's centre, as in
            Ultralytics. ``origin``: the top left corner, as in YOLOX. ``crop``: nothing; the output is a random crop of
            the scaled canvas, or has it at the top left if it is smaller, as in RTMDet. Then the other settings are 0.

    >>> CanvasAffine(size=640).size
    (640, 640)
    """

    count = 6

    def __init__(
        self,
        size: int | Sequence[int],
        *,
        degrees: float = 0.0,
        translate: float = 0.1,
        scale: Sequence[float] = (0.5, 1.5),
        shear: float = 0.0,
        about: str = "centre",
    ) -> None:
        self.size = pair("size", size)
        self.degrees = float(checks.number("degrees", degrees, 0, 180))
        self.translate = float(checks.number("translate", translate, 0, 1))
        self.scale = checks.pair("scale", scale, 0.001, 100)
        self.shear = float(checks.number("shear", shear, 0, 60))
        self.about = checks.one_of("about", about, ("centre", "origin", "crop"))
        if about == "crop" and (degrees or translate or shear):
            raise ConfigError(
                "`degrees`, `translate` and `shear` must be 0 with `about: crop`. "
                f"Found: {degrees}, {translate} and {shear}."
            )

    def _values(self, u: Float) -> dict[str, NDArray[Any]]:
        """Angle and shears in degrees, scale, and shift as a fraction: float64 [B] or [B, 2]. ``u``: [B, count]."""
        u = u.astype(np.float64)
        low, high = self.scale
        return {
            "angle": (2 * u[:, 0] - 1) * self.degrees,
            "scale": low + u[:, 1] * (high - low),
            "shear": (2 * u[:, 2:4] - 1) * self.shear,
            "shift": (2 * u[:, 4:6] - 1) * self.translate,
        }

    def _matrices(self, u: Float, canvas: Int64) -> Float64:
        """From positions on the canvas to positions in the output, float64 [B, 3, 3].

        Args:
            u: uniforms [B, count].
            canvas: int64 [B, 2], (width, height) of each canvas.
        """
        values, output = self._values(u), np.array(self.size[::-1], dtype=np.float64)
        angle, shear = np.deg2rad(values["angle"]), np.tan(np.deg2rad(values["shear"]))
        m = np.tile(np.eye(3), (len(u), 1, 1))
        cos, sin = values["scale"] * np.cos(angle), values["scale"] * np.sin(angle)
        turned = np.stack([np.stack([cos, sin], -1), np.stack([-sin, cos], -1)], -2)  # as cv2.getRotationMatrix2D
        sheared = np.tile(np.eye(2), (len(u), 1, 1))
        sheared[:, 0, 1], sheared[:, 1, 0] = shear.T
        m[:, :2, :2] = sheared @ turned
        m[:, :2, 2] = values["shift"] * output
        if self.about == "crop":
            room = np.maximum(np.floor(canvas * values["scale"][:, None]) - output, 0)
            m[:, :2, 2] = -np.floor(u[:, 4:6].astype(np.float64) * (room + 1))
        if self.about == "centre":
            m[:, :2, 2] += output / 2 - (m[:, :2, :2] @ (canvas / 2)[..., None])[..., 0]
        return m


class TileMixUp(TilesOp):
    """Blends each output of a mosaic, or each sample, with one more sample, as YOLOX does (arXiv:2107.08430).

    The other sample, the mate, is the whole crop with its padding. Its sides W and H become int(W * scale) and
    int(H * scale). It may be mirrored. A smaller mate lies at the top left of the output, on ``fill``. If a side is
    larger than the output, a random part of it is shown, which begins at a whole pixel. The objects of both samples are
    kept. ``targets.weights`` has the share of each object's image, and ``targets.tile`` of the mate's objects is the
    number of the mosaic's tiles, or 1. A class label of an image stays that of the sample.

    Pixels of the mate are interpolated without antialiasing, as in OpenCV's resizing; those of its border are
    interpolated with ``fill``. The blend is of whole numbers, rounded down, and the same on all devices. The other
    operations of ``combine`` do not change the mate; ``ops`` follow. A mate that cannot be read is left out.
    :class:`MixObjects` blends finished outputs of a batch instead.

    Args:
        weight: the share of the mate, rounded to 1/256.
        scale: smallest and largest factor of the mate's sides, 0.001 <= min <= max <= 100.
        flip: probability that left and right of the mate are exchanged.
        fill: value from 0 to 255 beside the mate.
        p: probability of a mate.
        partners: which samples are mates, as in :class:`Mosaic`: ``window`` or ``fresh``. Where an order repeats
            samples, a mate may be the sample itself.
        window: with ``partners: window``, the mate is up to 8 times this many positions before the sample.

    >>> TileMixUp(scale=(0.8, 1.6)).weight
    0.5
    """

    count, tiles = 6, 2

    def __init__(
        self,
        *,
        weight: float = 0.5,
        scale: Sequence[float] = (0.5, 1.5),
        flip: float = 0.5,
        fill: int = 0,
        p: float = 1.0,
        partners: str = "window",
        window: int = 32,
    ) -> None:
        self.weight = round(256 * checks.number("weight", weight, 0, 1)) / 256
        self.scale = checks.pair("scale", scale, 0.001, 100)
        self.flip = float(checks.number("flip", flip, 0, 1))
        self.fill = checks.whole_number("fill", fill, 0, 255)
        super().__init__(p, partners, window, kinds=PARTNERS[:2])

    def _values(self, u: Float, crop: tuple[int, int], size: tuple[int, int]) -> dict[str, NDArray[Any]]:
        """Scale [B], whether mirrored [B], and (x, y) of the mate's top left corner in the output, int64 [B, 2].

        Args:
            u: uniforms [B, count].
            crop, size: (H, W) of the crops and of the outputs.
        """
        u = u.astype(np.float64)
        scale = self.scale[0] + u[:, 4] * (self.scale[1] - self.scale[0])
        room = np.maximum(self._sides(scale, crop) - size[::-1], 0)
        return {"scale": scale, "mirrored": u[:, 5] < self.flip, "corner": -(u[:, 1:3] * room).astype(np.int64)}

    @staticmethod
    def _sides(scale: NDArray[Any], crop: tuple[int, int]) -> Int64:
        """(width, height) of the mates, int64 [B, 2]. ``scale``: [B]."""
        return np.maximum((scale[:, None] * crop[::-1]).astype(np.int64), 1)

    def _matrices(self, u: Float, crop: tuple[int, int], size: tuple[int, int]) -> Float64:
        """From positions in the mates to positions in the outputs, float64 [B, 3, 3]. Arguments as of ``_values``."""
        values, m = self._values(u, crop, size), np.tile(np.eye(3), (len(u), 1, 1))
        sides, mirrored = self._sides(values["scale"], crop), values["mirrored"]
        m[:, [0, 1], [0, 1]] = sides / crop[::-1]
        m[:, :2, 2] = values["corner"]
        m[:, 0, 2] += mirrored * sides[:, 0]
        m[:, 0, 0] *= 1 - 2 * mirrored
        return m


@dataclass(frozen=True)
class Combine:
    """What a recipe does between its crop and its operations. ``entries`` may be empty.

    Attributes:
        entries: names, which key the random numbers, and operations.
        crop: the recipe's crop, if its windows have a ``rest``; else None. Then there are no entries.
    """

    entries: Mapping[str, Mosaic | CanvasAffine | TileMixUp] = field(default_factory=dict)
    crop: Any = None

    def __bool__(self) -> bool:
        return bool(self.entries) or self.crop is not None

    def __str__(self) -> str:
        return "`combine`" if self.crop is None else f"gpuaug.{type(self.crop).__name__}"

    @property
    def key(self) -> str:
        """The part of the recipe that makes outputs of tiles."""
        return "combine" if self.crop is None else "crop"

    def named(self, kind: type) -> tuple[str, Any]:
        """The name and the operation of a kind; "" and None if there is none."""
        return next(((name, each) for name, each in self.entries.items() if isinstance(each, kind)), ("", None))

    @property
    def showing(self) -> list[tuple[str, TilesOp]]:
        """The operations that show other samples, with their names, in the order of their tiles."""
        return [self.named(kind) for kind in (Mosaic, TileMixUp) if self.named(kind)[0]]

    @classmethod
    def of(cls, given: Any, names: Sequence[str], crop: Any) -> Combine:
        """Check ``augment.combine``. ``names``: of the recipe's operations. Raises ConfigError."""
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(f"`augment.combine` must be a mapping of names. Found: a {type(given).__name__}.")
        entries = {}
        for name, each in (given or {}).items():
            if each is None:
                continue
            checks.name_in("augment.combine", name)
            checks.instance(f"augment.combine.{name}", each, Mosaic, CanvasAffine, TileMixUp)
            if name in (*names, "crop"):
                raise ConfigError(f"`augment.combine` and `augment.ops` must have different names. Found: {name!r}.")
            entries[name] = each
        made = cls(entries, crop if getattr(crop, "turns", False) else None)
        if entries and made.crop is not None:
            raise ConfigError(f"`augment.combine` must be left out with {made}. Found: {', '.join(entries)}.")
        if len({type(each) for each in entries.values()}) < len(entries):
            raise ConfigError(f"`augment.combine` must have one of each kind. Found: {', '.join(entries)}.")
        if entries and (crop is None or not crop.fixed or getattr(crop, "centres", False)):
            raise ConfigError(
                "`augment.combine` needs a crop with a size (H, W) that does not choose objects by their centre, such "
                f"as gpuaug.Letterbox. Found: {crop!r:.99}."
            )
        if entries and not isinstance(getattr(crop, "fill", 0), int):
            raise ConfigError(f"`augment.crop.fill` must be one number with `combine`. Found: {crop.fill}.")
        return made

    def size(self, crop: tuple[int, int]) -> tuple[int, int]:
        """(H, W) of the output. ``crop``: that of the crop's windows."""
        if self.crop is not None:
            return tuple(self.crop.size)
        if (affine := self.named(CanvasAffine)[1]) is not None:
            return affine.size
        return crop if self.named(Mosaic)[1] is None else (2 * crop[0], 2 * crop[1])

    def lay(
        self, uniforms: Mapping[str, Float], crop: tuple[int, int], covered: Int64, rest: Float64 | None = None
    ) -> Layout:
        """Where the tiles of each output are.

        Args:
            uniforms: of each entry, [B, count].
            crop: (H, W) of the crops.
            covered: int64 [B, K, 4], (x1, y1, x2, y2) of the crop that shows the image of a tile; empty: no tile.
                K is 1 without a mosaic. The mate of a :class:`TileMixUp` is none of these tiles.
            rest: of the crop's windows.
        """
        count, tiles = covered.shape[:2]
        if rest is not None:
            canvas = np.tile(np.array(crop[::-1], dtype=np.int64), (count, 1))
            return Layout(covered[..., :2] * 0, covered, canvas, rest, self.size(crop))
        (name, mosaic), (affine_name, affine) = self.named(Mosaic), self.named(CanvasAffine)
        sides, single = covered[..., 2:] - covered[..., :2], np.array(crop[::-1], dtype=np.int64)
        # alone: at the centre, or where the crop has put it
        centred = mosaic is not None if affine is None else affine.about == "centre"
        alone = (single - sides[:, 0]) // 2 if centred else covered[:, 0, :2]
        placed = np.zeros((count, tiles, 2), dtype=np.int64)
        placed[:, 0], canvas = alone, np.tile(single, (count, 1))
        if affine is not None and affine.about == "crop":  # of the image, not of what the tile's crop has padded
            placed[:, 0], canvas = 0, np.maximum(sides[:, 0], 1)
        many = np.zeros(count, dtype=bool)
        if mosaic is not None:
            many = mosaic._applied(uniforms[name])
            if affine is None:  # one size for all
                canvas[:] = 2 * single
                placed[:, 0] += single // 2 if centred else 0
            canvas[many] = 2 * single
            placed[many] = mosaic._place(uniforms[name][many], sides[many], crop)
        far = np.maximum(placed, 0), np.minimum(placed + sides, canvas[:, None])
        visible = np.concatenate(far, axis=-1)
        shown = np.asarray((visible[..., 2:] > visible[..., :2]).all(axis=-1))
        shown[~many, 1:] = False
        visible[~shown] = 0
        matrices = np.tile(np.eye(3), (count, 1, 1))
        if affine is not None:
            matrices = affine._matrices(uniforms[affine_name], canvas)
        return Layout(placed - covered[..., :2], visible, canvas, matrices, self.size(crop))

    def lay_mates(self, uniforms: Mapping[str, Float], crop: tuple[int, int], covered: Int64) -> Layout | None:
        """Where the mates of a :class:`TileMixUp` are; None without one. Arguments as of :meth:`lay`, with K = 1."""
        name, mixup = self.named(TileMixUp)
        if mixup is None:
            return None
        canvas, size = np.tile(np.array(crop[::-1], dtype=np.int64), (len(covered), 1)), self.size(crop)
        return Layout(covered[..., :2] * 0, covered, canvas, mixup._matrices(uniforms[name], crop, size), size)

    def unseen(self, uniforms: Mapping[str, Float], crop: tuple[int, int]) -> NDArray[np.bool_]:
        """Which tiles of a mosaic of 4 the outputs cannot show, whatever the sizes of their images: bool [B, 4]."""
        from gpuaug.targets.geometry import points  # runs without tiles do not import it

        count = len(next(iter(uniforms.values())))
        layout = self.lay(uniforms, crop, np.tile([0, 0, *crop[::-1]], (count, 4, 1)))
        height, width = layout.size
        corners = points(layout.inverse, np.tile([[0.0, 0.0], [width, 0], [width, height], [0, height]], (count, 1, 1)))
        low, high = corners.min(axis=1)[:, None] - 1, corners.max(axis=1)[:, None] + 1  # pixels between two centres
        outside = (layout.visible[..., 2:] <= low) | (layout.visible[..., :2] >= high)
        return np.asarray(outside.any(axis=-1))


class Layout(NamedTuple):
    """Tiles on the canvases of B outputs, and where the canvases go."""

    origin: Int64  # [B, K, 2], (x, y) of the crop's first pixel on the canvas
    visible: Int64  # [B, K, 4], (x1, y1, x2, y2) of the canvas that shows the tile; empty: nothing
    canvas: Int64  # [B, 2], (width, height)
    matrices: Float64  # [B, 3, 3], from the canvas to the output
    size: tuple[int, int]  # (H, W) of the output

    @property
    def shown(self) -> NDArray[np.bool_]:
        """Whether the canvas shows each tile, bool [B, K]."""
        return np.asarray((self.visible[..., 2:] > self.visible[..., :2]).all(axis=-1))

    @property
    def inverse(self) -> Float64:
        from gpuaug.targets.geometry import inverse  # runs without tiles do not import it

        return inverse(self.matrices)
