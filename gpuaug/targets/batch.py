"""The targets of an augmented batch, and the layouts that training code expects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from gpuaug.errors import ConfigError
from gpuaug.targets import geometry

_ON_DEVICE = ("masks", "boxes", "oriented", "labels", "keypoints", "sample", "weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTargets:
    """The targets of a batch of B images: masks, and one table with the N objects of all images.

    Masks, boxes, oriented, labels, keypoints, sample and weights are on the device. The other tensors are on the CPU.

    Attributes:
        masks: int64 ``[B, H, W]``; None if the run has no masks.
        boxes: float32 ``[N, 4]``, (x1, y1, x2, y2) in pixels of the output; None if the run has no boxes.
        oriented: float32 ``[N, 5]``, with ``oriented`` of :class:`~gpuaug.Boxes` the smallest rectangle of any angle
            around what is left of each object, else None: centre x, centre y, width, height in pixels of the output,
            and angle. The width is the longer side, along the angle. The angle is in radians, from x towards y
            (clockwise in a picture), in -pi/4 .. 3 pi/4, as in ``xyxyxyxy2xywhr`` of ultralytics/utils/ops.py.
        labels: int64 ``[N]``, class of each object.
        keypoints: float32 ``[N, K, 3]``, (x, y, visibility); None if the run has no keypoints.
        sample: int64 ``[N]``, position of each object's image in the batch; ascending.
        counts: int64 ``[B]``, number of objects of each image.
        ids: int64 ``[N]``, id of each annotation in its file; -1: the annotation has no id.
        crowd: bool ``[N]``, True for an annotation that covers many objects (COCO's iscrowd).
        visible: float32 ``[N]``, the part of each box's area that the output shows, 0..1, as ``min_visibility`` of
            :class:`~gpuaug.Boxes` counts it. With ``combine``, of the whole box in its image. CopyPaste multiplies it
            by the part of the object's pixels that it leaves. None if the run has no boxes.
        area: float32 ``[N]``, area in the annotation file, in pixels of the source image; NaN: not known.
        indices: int64 ``[B]``, index of the sample in the source.
        image_ids: int64 ``[B]``, the source's own id of each image, such as ``images[].id`` in COCO's files. If the
            source has no ids: ``indices``.
        sizes: int64 ``[B, 2]``, (height, width) of the upright source image.
        annotated: int64 ``[B, 2]``, the same of the annotated image; other than ``sizes`` if annotations were made for
            the stored image, which EXIF turns.
        covered: int64 ``[B, 4]``, (top, left, bottom, right): the part of the output that the image covers. If it is
            rotated, the smallest box around this part. Elastic transforms and other fields are not followed.
        matrices: float64 ``[B, 3, 3]``, from positions in the annotated image to positions in the output. Pixel i
            covers i..i+1. The inverse matrices map predictions back. NaN for a sample that an operation has moved by an
            offset per pixel, such as an elastic transform.
        size: (height, width) of the output.
        source: int64 ``[N]``, number of the sample that each object comes from. This and the next three are None except
            with ``combine`` or :class:`PersonCrop`, and with a mix of targets, whose mates are further tiles. Then
            ``matrices``, ``sizes`` and ``image_ids`` are those of the sample itself.
        tile: int64 ``[N]``, number of the tile that shows the object, 0 .. K - 1; 0 is the sample itself.
        sources: int64 ``[B, K]``, number of the sample in each tile; -1: no tile.
        tile_matrices: float64 ``[B, K, 3, 3]``, as ``matrices``, for each tile.
        weights: float32 ``[N]``, with MixUp the share of each object's image; else None.
        instances: True: masks hold k + 1 for object k of the image, and 0 for no object. False: masks hold class
            numbers.

    >>> import gpuaug
    >>> def total_loss(loader: gpuaug.Loader, detector: torch.nn.Module) -> float:
    ...     batches = (detector(list(images), targets.as_torchvision()) for images, targets in loader)
    ...     return sum(float(sum(losses.values())) for losses in batches)
    """

    masks: Tensor | None = None
    boxes: Tensor | None = None
    oriented: Tensor | None = None
    labels: Tensor
    keypoints: Tensor | None = None
    sample: Tensor
    counts: Tensor
    ids: Tensor
    crowd: Tensor
    area: Tensor
    visible: Tensor | None = None
    indices: Tensor
    image_ids: Tensor
    sizes: Tensor
    annotated: Tensor
    covered: Tensor
    matrices: Tensor
    size: tuple[int, int]
    source: Tensor | None = None
    tile: Tensor | None = None
    sources: Tensor | None = None
    tile_matrices: Tensor | None = None
    weights: Tensor | None = None
    instances: bool = False

    def __len__(self) -> int:
        """Number of images."""
        return len(self.counts)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> BatchTargets:
        """Move masks, boxes, labels, keypoints, sample and weights to ``device``.

        ``non_blocking``: see ``Tensor.to``.
        """
        moved = {name: value for name in _ON_DEVICE if (value := getattr(self, name)) is not None}
        return replace(self, **{name: value.to(device, non_blocking=non_blocking) for name, value in moved.items()})

    @property
    def yielded(self) -> Any:
        """The second value of a batch: the masks if they are the only target, else this object."""
        return self if self.boxes is not None or self.keypoints is not None else self.masks

    @property
    def on_device(self) -> list[Tensor]:
        """The tensors on the device: masks [B, H, W], boxes, labels, keypoints, sample and weights [N, ...]."""
        return [value for name in _ON_DEVICE if (value := getattr(self, name)) is not None]

    def as_torchvision(self, *, first_label: int = 1, weighted: bool = False) -> list[dict[str, Any]]:
        """Return one dictionary per image, in the form that torchvision's detection models take.

        ``masks``, uint8 [n, H, W], exist only with ``targets=instances``. ``area`` is the area of the boxes in the
        output, in pixels. ``image_id`` is the image's element of ``image_ids``.

        Args:
            first_label: the label of class 0. torchvision's models need 1, because their label 0 is the background.
            weighted: whether to add ``weights`` [n], with MixUp the share of each object's image, else 1.
        """
        images = self._split(weighted, labels=self.labels + first_label, boxes=self.boxes, keypoints=self.keypoints)
        for image, image_id in zip(images, self.image_ids.tolist(), strict=True):
            image["image_id"] = image_id
            if "masks" in image:
                image["masks"] = image["masks"].to(torch.uint8)
        return images

    def as_ultralytics(self, *, weighted: bool = False) -> dict[str, Tensor]:
        """Return one dictionary for the batch, in the form that Ultralytics' losses take.

        ``bboxes`` [N, 4] are centre, width and height. Coordinates are fractions of the output. With ``oriented``,
        ``bboxes`` [N, 5] are those boxes: x and width divided by the output's width, y and height by its height, and
        the angle in radians, as in Ultralytics' batches for oriented boxes.

        Args:
            weighted: whether to add ``weights`` [N], with MixUp the share of each object's image, else 1. Ultralytics'
                losses do not use it.
        """
        height, width = self.size
        made = {"batch_idx": self.sample.float(), "cls": self.labels.float()[:, None]}
        if (boxes := self._centred()) is not None:
            made["bboxes"] = boxes
        if self.oriented is not None:
            made["bboxes"] = self.oriented / self.oriented.new_tensor([width, height, width, height, 1])
        if weighted:
            made["weights"] = self._weights
        if self.keypoints is not None:
            made["keypoints"] = self.keypoints / self.keypoints.new_tensor([width, height, 1])
        return made

    def as_detr(self, *, weighted: bool = False) -> list[dict[str, Any]]:
        """Return one dictionary per image, in the form that DETR's models in ``transformers`` take.

        ``boxes`` are centre, width and height as fractions of the output. ``area`` is the area of the boxes in the
        output, in pixels. ``image_id`` [1] is from ``image_ids``. ``masks`` exist only with ``targets=instances``.

        Args:
            weighted: whether to add ``weights`` [n], with MixUp the share of each object's image, else 1.
        """
        images = self._split(weighted, class_labels=self.labels, boxes=self._centred())
        for row, image in enumerate(images):
            image["image_id"] = self.image_ids[row : row + 1]
            image["size"], image["orig_size"] = torch.tensor(self.size, device="cpu"), self.sizes[row]
        return images

    def restore(
        self,
        *,
        boxes: Sequence[Tensor] | None = None,
        oriented: Sequence[Tensor] | None = None,
        keypoints: Sequence[Tensor] | None = None,
        masks: Tensor | None = None,
        logits: Tensor | None = None,
        outside: int = 255,
        pixel_centers: bool = True,
    ) -> list[dict[str, Tensor]]:
        """Move predictions for the batch back into the pixels of the annotated images, undoing crop and operations.

        Args:
            boxes: for each image [n, 4], (x1, y1, x2, y2) in pixels of the output. Each becomes the box around its
                moved corners, clipped to the image.
            oriented: for each image [n, 5], as ``targets.oriented``. Each becomes the smallest rectangle around its
                moved corners, which is exact without shear, perspective and unequal scales. Nothing is clipped.
            keypoints: for each image [n, K, 2 or more], x and y first, in pixels of the output. Other columns stay.
            masks: integers [B, H, W], or bool; each pixel of the image gets the value at its place.
            logits: floats [B, C, h, w] for the whole output, also of a lower resolution; bilinear.
            outside: value of a mask where the image is outside of the output. Logits are 0 there.
            pixel_centers: as in :class:`~gpuaug.Keypoints`: whole numbers in ``keypoints`` are centres of pixels.

        Returns:
            One dictionary per image, with the given names: boxes, oriented, keypoints, masks [h0, w0], logits
            [C, h0, w0], where h0 and w0 are its ``annotated`` size. Floats are float32.

        Raises:
            ConfigError: the predictions are not those of B images, or a field has moved the images.
        """
        if self.matrices.isnan().any():
            raise ConfigError(
                "`restore` needs outputs that only matrices have moved. Found: samples that a field has moved, such as "
                "an elastic transform. Evaluate without this operation."
            )
        if self.sources is not None and (self.sources[:, 1:] >= 0).any():
            raise ConfigError(
                "`restore` needs outputs that show one image each, but these show several. Found: "
                f"{self.sources.shape[1]} tiles. Evaluate without `combine` and `mix`."
            )
        given = {"boxes": boxes, "oriented": oriented, "keypoints": keypoints, "masks": masks, "logits": logits}
        for name, value in given.items():
            if value is not None and len(value) != len(self):
                raise ConfigError(f"`{name}` must be those of {len(self)} images. Found: {len(value)}.")
        for name, value, columns in (("boxes", boxes, 4), ("oriented", oriented, 5)):
            for row, each in enumerate([] if value is None else value):
                if not isinstance(each, Tensor) or each.ndim != 2 or each.shape[1] != columns:
                    kind = f"shape {list(each.shape)}" if isinstance(each, Tensor) else type(each).__name__
                    raise ConfigError(
                        f"`{name}[{row}]` must be a tensor [n, {columns}], without scores. Found: {kind}."
                    )
        if masks is not None and tuple(masks.shape[1:]) != self.size:
            raise ConfigError(
                f"`masks` must have the size of the output, {list(self.size)}. Found: {list(masks.shape[1:])}. For "
                "another resolution, give `logits`."
            )
        images: list[dict[str, Tensor]] = [{} for _ in range(len(self))]
        for row, (image, (h, w)) in enumerate(zip(images, self.annotated.tolist(), strict=True)):
            forward = self.matrices[row].double()
            back = forward.inverse()
            if boxes is not None:
                x1, y1, x2, y2 = boxes[row].double().unbind(1)
                corners = torch.stack([x1, y1, x2, y1, x2, y2, x1, y2], dim=1).view(-1, 4, 2)
                corners = _moved(corners, back.to(corners.device))
                limits = corners.new_tensor([w, h])
                low, high = (x.clamp(min=0).minimum(limits) for x in (corners.amin(1), corners.amax(1)))
                image["boxes"] = torch.cat([low, high], dim=1).float()
            if oriented is not None:
                corners = torch.from_numpy(geometry.corners_of(oriented[row].double().numpy(force=True)))
                whole = torch.from_numpy(geometry.rectangles(_moved(corners, back).numpy()))
                image["oriented"] = whole.float().to(oriented[row].device)
            if keypoints is not None:
                half = 0.5 if pixel_centers else 0.0
                xy = _moved(keypoints[row][..., :2].double() + half, back.to(keypoints[row].device)) - half
                image["keypoints"] = torch.cat([xy, keypoints[row][..., 2:].double()], dim=-1).float()
            if masks is not None:
                x, y = _places(forward, h, w, masks.device).floor().long().unbind(-1)
                inside = (x >= 0) & (x < masks.shape[2]) & (y >= 0) & (y < masks.shape[1])
                found = masks[row][y.clamp(0, masks.shape[1] - 1), x.clamp(0, masks.shape[2] - 1)]
                image["masks"] = torch.where(inside, found, torch.full_like(found, outside))
            if logits is not None:
                size = logits.new_tensor(self.size[::-1], dtype=torch.float64)
                places = _places(forward, h, w, logits.device) / size
                inside = ((places >= 0) & (places < 1)).all(-1)
                grid = (places * 2 - 1).float()[None]
                made = grid_sample(logits[row : row + 1].float(), grid, padding_mode="border", align_corners=False)[0]
                image["logits"] = torch.where(inside, made, 0.0)
        return images

    def pixel_mask(self) -> Tensor:
        """Return DETR's pixel mask, int64 ``[B, H, W]`` on the CPU: 1 in ``covered``, 0 in the padding."""
        y, x = (torch.arange(side, device="cpu") for side in self.size)
        y = y[:, None]
        top, left, bottom, right = self.covered.T[:, :, None, None]
        return ((y >= top) & (y < bottom) & (x >= left) & (x < right)).long()

    def _split(self, weighted: bool, **columns: Tensor | None) -> list[dict[str, Any]]:
        """Split the columns by image. Add ``iscrowd``, ``area`` and bool ``masks`` [n, H, W]."""
        columns["iscrowd"] = self.crowd.long()
        if weighted:
            columns["weights"] = self._weights
        if self.boxes is not None:
            columns["area"] = (self.boxes[:, 2:] - self.boxes[:, :2]).prod(dim=1)
        counts = self.counts.tolist()
        parts = {name: column.split(counts) for name, column in columns.items() if column is not None}
        images: list[dict[str, Any]] = [{name: part[row] for name, part in parts.items()} for row in range(len(self))]
        if self.instances and self.masks is not None:
            for image, mask, count in zip(images, self.masks, counts, strict=True):
                numbers = torch.arange(1, count + 1, device=mask.device)
                image["masks"] = mask == numbers[:, None, None]
        return images

    @property
    def _weights(self) -> Tensor:
        return torch.ones(len(self.labels), device=self.labels.device) if self.weights is None else self.weights

    def _centred(self) -> Tensor | None:
        """Boxes as centre, width and height, as fractions of the output."""
        if self.boxes is None:
            return None
        low, high = self.boxes[:, :2], self.boxes[:, 2:]
        height, width = self.size
        return torch.cat([(low + high) / 2, high - low], dim=1) / low.new_tensor([width, height, width, height])


def resized(targets: BatchTargets, size: tuple[int, int], half: float) -> BatchTargets:
    """The targets of a batch that was resized to ``size``, (H, W), where ``oriented`` already is. Masks take the
    nearest pixel.

    ``half``: what must be added to coordinates of keypoints, so that pixel i covers i..i+1.
    """
    (height, width), (H, W) = targets.size, size
    scale = torch.tensor([W / width, H / height, 1.0], device="cpu", dtype=torch.float64)
    made: dict[str, Any] = {"size": size, "matrices": scale[:, None] * targets.matrices}
    made["covered"] = (targets.covered * scale[[1, 0, 1, 0]]).round().long()
    if targets.tile_matrices is not None:
        made["tile_matrices"] = scale[:, None] * targets.tile_matrices
    if targets.masks is not None:
        rows, columns = (
            ((torch.arange(new, device=targets.masks.device) + 0.5) * (old / new)).long()
            for new, old in zip(size, targets.size, strict=True)
        )
        made["masks"] = targets.masks[:, rows[:, None], columns]
    if targets.boxes is not None:
        made["boxes"] = targets.boxes * targets.boxes.new_tensor([W / width, H / height] * 2)
    if targets.keypoints is not None:
        shift = (targets.keypoints[..., 2:] > 0) * targets.keypoints.new_tensor([half, half, 0])
        made["keypoints"] = (targets.keypoints + shift) * targets.keypoints.new_tensor(scale.tolist()) - shift
    return replace(targets, **made)


def _moved(xy: Tensor, matrix: Tensor) -> Tensor:
    """Points float64 [..., 2] under a matrix [3, 3]."""
    moved = xy @ matrix[:2, :2].T + matrix[:2, 2]
    return moved / (xy @ matrix[2, :2] + matrix[2, 2])[..., None]


def _places(matrix: Tensor, height: int, width: int, device: torch.device) -> Tensor:
    """Where the centres of an image's pixels lie under its matrix, float64 [h, w, 2]; -1 behind the viewer."""
    y, x = (torch.arange(side, device=device, dtype=torch.float64) + 0.5 for side in (height, width))
    xy, matrix = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1), matrix.to(device)
    return torch.where((xy @ matrix[2, :2] + matrix[2, 2] > 0)[..., None], _moved(xy, matrix), -1.0)
