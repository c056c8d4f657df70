"""lerobot: augment the cameras of a batch on the device, as a step of the policy's preprocessor.

python examples/lerobot_step.py
"""

from typing import Any

import torch
from lerobot.processor import DataProcessorPipeline, ProcessorStep, TransitionKey

import gpuaug


class AugmentCameras(ProcessorStep):
    """Augments the images of the cameras that ``cameras`` names. All frames of an observation move alike.

    Place it before the step that normalizes. Use it for training only: the robot needs a preprocessor without it.
    The random numbers depend on the dataset's ``index`` and on the number of the step, which is saved with the
    preprocessor. To resume a run, load the preprocessor with ``DataProcessorPipeline.from_pretrained`` and
    ``overrides={"AugmentCameras": {"cameras": cameras()}}``.
    """

    def __init__(self, cameras: gpuaug.Cameras, *, seed: int = 0) -> None:
        self.cameras, self.seed, self.step = cameras, seed, 0

    def __call__(self, transition: Any) -> Any:
        """Returns the transition with float32 images [B, C, H, W] or [B, T, C, H, W]."""
        seen = transition[TransitionKey.OBSERVATION]
        images = {name: seen[name] for name in self.cameras.cameras if name in seen}
        numbers = transition[TransitionKey.COMPLEMENTARY_DATA]["index"]
        made = self.cameras(images, seed=self.seed, epoch=self.step, indices=numbers)
        self.step += 1
        return {**transition, TransitionKey.OBSERVATION: {**seen, **made}}

    def transform_features(self, features: Any) -> Any:
        """Names and shapes stay."""
        return features

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The number of the step."""
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Continue after the saved step."""
        self.step = int(state["step"])


def cameras() -> gpuaug.Cameras:
    """lerobot's recipe, three of six operations. The wrist camera is not moved, and depth stays as it is."""
    top, wrist = (
        gpuaug.build(gpuaug.compose("train", ["augment=lerobot", *overrides]).augment)
        for overrides in ([], ["augment.ops.choice.ops.affine=null"])
    )
    prefix = "observation.images"
    return gpuaug.Cameras(cameras={f"{prefix}.top": top, f"{prefix}.wrist": wrist, f"{prefix}.depth": None})


if __name__ == "__main__":
    preprocessor = DataProcessorPipeline(steps=[AugmentCameras(cameras())])  # first of your policy's own steps
    batch = {
        "observation.images.top": torch.rand(8, 2, 3, 96, 96),  # two frames
        "observation.images.wrist": torch.rand(8, 3, 64, 64),
        "observation.state": torch.rand(8, 6),
        "action": torch.rand(8, 6),
        "index": torch.arange(8),
    }
    print({name: tuple(value.shape) for name, value in preprocessor(batch).items() if "images" in name})
