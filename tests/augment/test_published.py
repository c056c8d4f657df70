"""The recipes of published trainings: every setting against the authors' code, and pixels against Pillow, torchvision.

The numbers are written down here as the authors' files have them, at the places that each entry names.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image, ImageFilter, ImageOps

import gpuaug

CONF = Path(gpuaug.__file__).parent.parent / "conf/gpuaug/augment"
IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
RATIO = [3 / 4, 4 / 3]  # the default of torchvision's and timm's RandomResizedCrop, and of TensorFlow's crop


def jitter(brightness: float, contrast: float, saturation: float, hue: float) -> dict[str, Any]:
    """RandomApply([ColorJitter(...)], p=0.8), which all of these papers have; torchvision's order is random."""
    names = ("brightness", "contrast", "saturation", "hue")
    return dict(zip(names, (brightness, contrast, saturation, hue), strict=True)) | {"order": None, "p": 0.8}


def blur(p: float, size: int) -> dict[str, Any]:
    """A Gaussian blur with a sigma from 0.1 to 2.0."""
    return {"kernel_size": size, "sigma": [0.1, 2.0], "p": p}


def solarize(p: float) -> dict[str, Any]:
    """ImageOps.solarize(threshold=128)."""
    return {"thresholds": [0.5, 0.5], "additions": [0.0, 0.0], "p": p}


def view(
    copies: int, size: int, scale: list[float], interpolation: str, ops: dict[str, Any], normalize: Any = IMAGENET
) -> dict[str, Any]:
    """A view; the ops in their order."""
    crop = {"size": size, "scale": scale, "ratio": RATIO, "interpolation": interpolation}
    return {"copies": copies, "crop": crop, "ops": ops, "normalize": dict(zip(("mean", "std"), normalize, strict=True))}


FLIP, GRAY, BYOL = {"p": 0.5}, {"p": 0.2}, jitter(0.4, 0.4, 0.2, 0.1)
COLORS = {"flip": FLIP, "jitter": BYOL, "gray": GRAY}
SWAV = {"flip": FLIP, "jitter": jitter(0.8, 0.8, 0.8, 0.2), "gray": GRAY, "blur": blur(0.5, 23)}
PILLOW = 17  # taps that stand for Pillow's blur, which has no kernel size
RANDAUGMENT = {"config": "rand-m9-mstd0.5-inc1", "interpolation": "bicubic", "fill": [124, 116, 104]}


def both() -> list[dict[str, Any]]:
    """The two views of Barlow Twins and VICReg."""
    second = {**COLORS, "blur": blur(0.1, PILLOW), "solarize": solarize(0.2)}
    return [
        view(1, 224, [0.08, 1.0], "bicubic", {**COLORS, "blur": blur(1.0, PILLOW)}),
        view(1, 224, [0.08, 1.0], "bicubic", second),
    ]


def stage(size: int, magnitude: int) -> dict[str, Any]:
    """A stage of EfficientNetV2: distort_image_with_randaugment applies both of its operations, filled with 128."""
    policy = {"config": f"rand-m{magnitude}-n2-p1.0", "interpolation": "nearest", "fill": [128, 128, 128]}
    half = [128 / 255] * 3  # (image - 128.0) / 128.0
    return view(1, size, [0.05, 1.0], "bilinear", {"flip": FLIP, "timm": policy}, (half, half))


def dinov2(large: int, small: int, flip: float = 0.5) -> list[dict[str, Any]]:
    """The views of DINOv2 and DINOv3: GaussianBlur(p) has kernel_size=9 and gives RandomApply 1 - p."""
    colors = {**COLORS, "flip": {"p": flip}}
    return [
        view(1, large, [0.32, 1.0], "bicubic", {**colors, "blur": blur(1 - 1.0, 9)}),
        view(1, large, [0.32, 1.0], "bicubic", {**colors, "blur": blur(1 - 0.1, 9), "solarize": solarize(0.2)}),
        view(8, small, [0.05, 0.32], "bicubic", {**colors, "blur": blur(1 - 0.5, 9)}),
    ]


AUTHORS = {
    # facebookresearch/dinov2: dinov2/data/augmentations.py, DataAugmentationDINO; dinov2/data/transforms.py;
    # dinov2/configs/ssl_default_config.yaml and train/vitl14.yaml, crops
    "dinov2": dinov2(224, 96),
    "dinov2_patch14": dinov2(224, 98),
    # facebookresearch/dinov3: the settings of dinov3_vit7b16_pretrain.yaml
    "dinov3": dinov2(256, 112, flip=0.0),
    # the settings of dinov3_vit7b16_gram_anchor.yaml: gram crops are global crops at 512, with normalization alone
    "dinov3_gram": [*dinov2(256, 112, flip=0.0), *[view(1, 512, [0.32, 1.0], "bicubic", {"flip": {"p": 0.0}})] * 2],
    # the third size of dinov3_vit7b16_high_res_adapt.yaml
    "dinov3_highres": [*dinov2(768, 168, flip=0.0), *[view(1, 1152, [0.32, 1.0], "bicubic", {"flip": {"p": 0.0}})] * 2],
    # bytedance/ibot: main_ibot.py, DataAugmentationiBOT; README.md, ViT-S/16
    "ibot": [
        view(1, 224, [0.25, 1.0], "bicubic", {**COLORS, "blur": blur(1.0, PILLOW)}),
        view(1, 224, [0.25, 1.0], "bicubic", {**COLORS, "blur": blur(0.1, PILLOW), "solarize": solarize(0.2)}),
        view(10, 96, [0.05, 0.25], "bicubic", {**COLORS, "blur": blur(0.5, PILLOW)}),
    ],
    # facebookresearch/ijepa: the settings of in1k_vith14_ep300.yaml
    "ijepa": [view(1, 224, [0.3, 1.0], "bilinear", {})],
    # microsoft/SimMIM: data/data_simmim.py, SimMIMTransform
    "simmim": [view(1, 224, [0.67, 1.0], "bilinear", {"flip": FLIP})],
    # microsoft/unilm: beit/datasets.py, DataAugmentationForBEiT; timm's IMAGENET_INCEPTION_MEAN and _STD
    "beit": [
        view(1, 224, [0.08, 1.0], "bicubic", {"jitter": {**jitter(0.4, 0.4, 0.4, 0.0), "p": 1.0}, "flip": FLIP},
             ([0.5] * 3, [0.5] * 3)),
    ],
    # the same, with second_size 112; map_pixels of DALL-E is 0.8 x + 0.1
    "beit_tokenizer": [
        view(1, size, [0.08, 1.0], "bicubic", {"jitter": {**jitter(0.4, 0.4, 0.4, 0.0), "p": 1.0}, "flip": FLIP},
             ([-mean / scale] * 3, [1 / scale] * 3))
        for size, scale, mean in ((224, 2.0, -1.0), (112, 0.8, 0.1))
    ],
    # facebookresearch/fairseq: examples/data2vec/data/mae_image_dataset.py, MaeImageDataset with target_transform
    "data2vec": [
        view(1, 224, [0.2, 1.0], "bicubic", {"flip": FLIP, "jitter": {**jitter(0.4, 0.4, 0.4, 0.0), "p": 1.0}})
    ] * 2,
    # facebookresearch/mae: main_pretrain.py, transform_train
    "mae": [view(1, 224, [0.2, 1.0], "bicubic", {"flip": FLIP})],
    # facebookresearch/barlowtwins: main.py, Transform
    "barlowtwins": both(),
    # facebookresearch/vicreg: augmentations.py, TrainTransform
    "vicreg": both(),
    # facebookresearch/swav: src/multicropdataset.py, MultiCropDataset; scripts/swav_800ep_pretrain.sh
    "swav": [
        view(2, 224, [0.14, 1.0], "bilinear", SWAV, (IMAGENET[0], [0.228, 0.224, 0.225])),
        view(6, 96, [0.05, 0.14], "bilinear", SWAV, (IMAGENET[0], [0.228, 0.224, 0.225])),
    ],
    # mlfoundations/open_clip: src/open_clip/transform.py, image_transform and AugmentationCfg; constants.py
    "clip": [
        view(1, 224, [0.9, 1.0], "bicubic", {}, ([0.48145466, 0.4578275, 0.40821073],
                                                 [0.26862954, 0.26130258, 0.27577711])),
    ],
    # facebookresearch/ConvNeXt: main.py, get_args_parser; datasets.py, build_transform. The rest are defaults of timm:
    # timm/data/transforms_factory.py (scale, flip, img_mean as fill), timm/data/random_erasing.py (area and aspect)
    "convnext": [
        view(1, 224, [0.08, 1.0], "bicubic", {
            "flip": FLIP,
            "timm": RANDAUGMENT,
            "erase": {"p": 0.25, "scale": [0.02, 1 / 3], "ratio": [0.3, 1 / 0.3], "mode": "pixel", "count": 1,
                      "mean": IMAGENET[0], "std": IMAGENET[1], "masks": None},
        }),
    ],
    # google/automl: efficientnetv2/main.py (ibase 128, image_size, ram_list), effnetv2_configs.py (efficientnetv2-s:
    # train_size 300, randaug 10, 4 stages), hparams.py (350 epochs), preprocessing.py, autoaugment.py
    "efficientnetv2": [stage(int(128 + (300 - 128) * (k + 1) / 4), round(5 + 5 * k / 3)) for k in range(4)],
}  # fmt: skip
PUBLISHED = pytest.mark.parametrize("name", AUTHORS)


def plain(node: Any) -> Any:
    """Settings without class names and backends."""
    if isinstance(node, dict):
        return {k: plain(v) for k, v in node.items() if k not in ("_target_", "backend")}
    return node


def close(found: Any, want: Any) -> bool:
    """Equal, in the same order of names, with numbers equal to eight digits."""
    if isinstance(want, dict):
        return list(found) == list(want) and all(close(found[k], want[k]) for k in want)
    if isinstance(want, list):
        return len(found) == len(want) and all(map(close, found, want))
    return found == want or (isinstance(want, float) and found == pytest.approx(want, rel=1e-8))


@PUBLISHED
def test_settings_are_those_of_the_authors(name: str) -> None:
    given = OmegaConf.to_container(gpuaug.compose("train", [f"augment={name}"]).augment, resolve=True)
    assert isinstance(given, dict)
    views = [plain(each) for each in (given.get("views") or given.get("schedule") or {"": given}).values()]
    for found, want in zip(views, AUTHORS[name], strict=True):
        assert close({key: found[key] for key in want}, want), (found, want)


@PUBLISHED
def test_the_first_lines_cite_the_paper_and_the_authors_file(name: str) -> None:
    head = "".join(line for line in (CONF / f"{name}.yaml").read_text().splitlines(True) if line.startswith("#"))
    assert "arXiv:" in head
    assert "/" in head
    assert ".py" in head


def test_the_stages_of_efficientnetv2_have_equal_lengths() -> None:
    """main.py ends a stage after a quarter of the steps; an epoch belongs to the stage in which it begins."""
    firsts = [int(first) for first in gpuaug.compose("train", ["augment=efficientnetv2"]).augment.schedule]
    assert firsts == [-(-350 * k // 4) for k in range(4)]


# --- pixels


def theirs(image: Any, row: int, ops: Any, chosen: Any, v2: ModuleType, size: int | None) -> Any:
    """The authors' pipeline, with the parameters of one sample, on a Pillow image or a float tensor.

    ``size``: the taps of their blur; None: Pillow's blur.
    """
    F = v2.functional
    for op, drawn in zip(ops, chosen, strict=True):
        for slot in range(drawn.choice.shape[1]):
            if (choice := int(drawn.choice[row, slot])) < 0:
                continue
            params = {k: float(v[row]) for k, v in drawn.params[slot][choice].items()}
            if op.name == "flip":
                image = F.horizontal_flip(image)
            elif op.name == "jitter":
                step = ("brightness", "contrast", "saturation", "hue")[choice]
                image = getattr(F, f"adjust_{step}")(image, params[f"{step}_factor"])
            elif op.name == "gray":
                image = F.rgb_to_grayscale(image, num_output_channels=3)
            elif op.name == "blur" and size is None:
                image = image.filter(ImageFilter.GaussianBlur(params["sigma"]))
            elif op.name == "blur":
                image = F.gaussian_blur(image, [size] * 2, [params["sigma"]] * 2)
            else:
                assert op.name == "solarize"
                image = ImageOps.solarize(image, 128) if isinstance(image, Image.Image) else F.solarize(image, 0.5)
    return image


@pytest.mark.parametrize(("name", "size"), [("dinov2", 9), ("swav", 23), ("barlowtwins", None), ("vicreg", None)])
def test_pixels_are_those_of_the_authors_pipeline(
    name: str, size: int | None, v2: ModuleType, photo_batch: torch.Tensor
) -> None:
    """The same parameters on the same images, for every view.

    On floats, torchvision's functions give the same pixels. On Pillow images, as the authors use them, each step cuts
    to whole levels, and the hue has 256 levels: 1.2 to 1.7 levels of 255 on average.
    """
    images = photo_batch.repeat(4, 1, 1, 1)
    recipe = gpuaug.build(gpuaug.compose("train", [f"augment={name}"]).augment)
    seen = set()
    for number, view in enumerate(recipe.views):
        if view.copy:
            continue
        bare = gpuaug.MultiView(views={view.name: view.augment.replace(crop=None, normalize=None, copies=1)})
        drawn = bare.draw(seed=number, epoch=0, indices=range(len(images)))
        (chosen,) = bare.choose(drawn, [(64, 48)])
        (made,) = bare.render([images], drawn, chosen=[chosen])
        ops, levels = view.augment.prepared, []
        for row, ours in enumerate(made):
            want = np.asarray(theirs(Image.fromarray(images[row].numpy()), row, ops, chosen, v2, size))
            levels.append(np.abs(ours.permute(1, 2, 0).numpy() * 255 - want).mean())
            if size is not None:
                exact = theirs(images[row].permute(2, 0, 1) / 255, row, ops, chosen, v2, size)
                assert (ours - exact).abs().max() < 5e-4  # torchvision's weight of red is 0.2989, Kornia's 0.299
        assert np.mean(levels) < 2
        assert max(levels) < 5
        seen |= {op.name for op, drawn in zip(ops, chosen, strict=True) if (drawn.choice >= 0).any()}
    assert seen == {name for each in AUTHORS[name] for name in each["ops"]}
