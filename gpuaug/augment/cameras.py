"""Several cameras of one sample, each with its recipe."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from gpuaug import checks
from gpuaug.augment.recipe import Augment, ReadOnly
from gpuaug.augment.sharing import Rows, by_camera, check_cameras
from gpuaug.errors import ConfigError


class Cameras(ReadOnly):
    """Applies a recipe to the images of each camera. The cameras show the same samples.

    Use it for the cameras of a robot, for stereo pairs, for damaged images and their originals, and for images and
    their depth: with ``same_on_camera``, operations of the same name get the same random numbers. Crops and shifts are
    relative to the size of the images, so the images of a sample may differ in size.

    Args:
        cameras: mapping of names to :class:`Augment`. None returns the camera's images as they are.
        same_on_camera: mapping of names of operations, or ``crop``, to whether the cameras share their random numbers.
            The entry ``default`` is for all other names. The default is False. The settings of the recipes with this
            name have no effect.

    >>> import gpuaug, torch, kornia.augmentation as K
    >>> flip = gpuaug.Augment(ops={"flip": K.RandomHorizontalFlip()})
    >>> cameras = gpuaug.Cameras(cameras={"left": flip, "right": flip, "map": None}, same_on_camera={"flip": True})
    >>> image = torch.zeros((8, 3, 32, 48), dtype=torch.uint8)
    >>> {name: tuple(x.shape) for name, x in cameras({"left": image, "right": image}, indices=range(8)).items()}
    {'left': (8, 3, 32, 48), 'right': (8, 3, 32, 48)}
    """

    _read_once = ("cameras", "same_on_camera")

    def __init__(
        self, *, cameras: Mapping[str, Augment | None], same_on_camera: Mapping[str, bool] | None = None
    ) -> None:
        super().__init__()
        if not isinstance(cameras, Mapping) or not cameras:
            found = "none" if isinstance(cameras, Mapping) else f"a {type(cameras).__name__}"
            raise ConfigError(
                "`augment.cameras` must be a mapping of names to gpuaug.Augment, such as {'top': Augment(...)}. "
                f"Found: {found}."
            )
        for name, recipe in cameras.items():
            checks.name_in("augment.cameras", name)
            checks.instance(f"augment.cameras.{name}", recipe, Augment, optional=True)
        recipes = {name: recipe for name, recipe in cameras.items() if recipe is not None}
        names = {op for recipe in recipes.values() for op in recipe.ops}
        self._shared = check_cameras(same_on_camera, names, key="augment.same_on_camera")
        self._recipes = nn.ModuleList(recipes.values())  # torch's repr shows them
        self._cameras = dict(cameras)
        self.same_on_camera = dict(same_on_camera or {})
        self._made = True

    @property
    def cameras(self) -> Mapping[str, Augment | None]:
        """The recipe of each camera."""
        return MappingProxyType(self._cameras)

    def forward(
        self,
        images: Mapping[str, Tensor],
        *,
        masks: Any = None,
        boxes: Any = None,
        labels: Any = None,
        keypoints: Any = None,
        corners: Any = None,
        targets: Any = None,
        seed: int | None = None,
        epoch: int = 0,
        indices: Any = None,
        layout: Any = None,
        white: Any = None,
        nan: Any = "refuse",
        dtype: str | torch.dtype = torch.float32,
        memory_format: str | torch.memory_format = torch.contiguous_format,
    ) -> dict[str, Any]:
        """Apply the recipes. The arguments are those of :class:`Augment`'s ``forward``.

        Args:
            images: mapping of cameras to images or clips of the same B samples. Cameras may be missing.
            masks, boxes, labels, keypoints, corners, targets: mappings of cameras to what :class:`Augment` takes.
            seed: any integer, for all cameras.
            epoch: number of the epoch.
            indices: [B], sample numbers.
            layout, white, nan: for all cameras, or mappings of cameras.
            dtype: of the results.
            memory_format: of the results.

        Returns:
            A dictionary with the keys of ``images``.
        """
        if not isinstance(images, Mapping) or not set(images) <= set(self.cameras):
            found = list(images) if isinstance(images, Mapping) else type(images).__name__
            raise ConfigError(f"`images` must have names of {', '.join(self.cameras)} as keys. Found: {found}.")
        given = {"masks": masks, "boxes": boxes, "labels": labels, "keypoints": keypoints, "corners": corners}
        given["targets"] = targets
        more = {"layout": layout, "white": white, "nan": nan, "dtype": dtype, "memory_format": memory_format}

        def call(camera: str, batch: Tensor, **own: Any) -> Any:
            recipe, rows = self.cameras[camera], Rows(camera=camera, shared=self._shared)
            return batch if recipe is None else recipe.augment_rows(batch, rows=rows, **own)

        every: Any = by_camera
        if torch.compiler.is_compiling():  # as in Augment
            every = torch.compiler.disable(every)
        return every(images, call, given, seed=seed, epoch=epoch, indices=indices, known=self.cameras, **more)

    def extra_repr(self) -> str:
        """The names, in the order of the recipes."""
        names = (name if recipe is not None else f"{name}=None" for name, recipe in self.cameras.items())
        return f"{', '.join(names)}, same_on_camera={self.same_on_camera}"

    def fingerprint(self) -> dict[str, Any]:
        """All settings that decide random numbers and pixels, as JSON."""
        recipes = {name: recipe and recipe.fingerprint() for name, recipe in self.cameras.items()}
        return {"cameras": recipes, "same_on_camera": self.same_on_camera}
