"""The operation pairs of AutoAugment's policies, from torchvision and timm."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gpuaug.random.keyed import Float, Int


@dataclass(frozen=True, eq=False)
class Pairs:
    """A policy of K pairs."""

    names: tuple[str, ...]  # the operations that occur in the policy
    ops: Int  # [K, 2], indices into `names`
    p: Float  # [K, 2], probabilities
    magnitudes: NDArray[np.int64]  # [K, 2]; 0 for operations that have no magnitude


@lru_cache(maxsize=8)
def read(policy: str, posterize: str = "posterize") -> Pairs:
    """Read a policy, and rename its operation "posterize" to the argument ``posterize``."""
    words = [op.split() for line in _POLICIES[policy].strip().splitlines() for op in line.split(";")]
    found = [posterize if word[0] == "posterize" else word[0] for word in words]
    names = tuple(dict.fromkeys(found))
    ops = np.array([names.index(name) for name in found], dtype=np.int64)
    p = np.array([float(word[1]) for word in words], dtype=np.float32)
    magnitudes = np.array([int(word[2]) if len(word) == 3 else 0 for word in words], dtype=np.int64)
    return Pairs(names, ops.reshape(-1, 2), p.reshape(-1, 2), magnitudes.reshape(-1, 2))


_POLICIES = {  # a line is a pair of operations, each "name probability [magnitude]"
    "imagenet": """
posterize 0.4 8; rotate 0.6 9
solarize 0.6 5; auto_contrast 0.6
equalize 0.8; equalize 0.6
posterize 0.6 7; posterize 0.6 6
equalize 0.4; solarize 0.2 4
equalize 0.4; rotate 0.8 8
solarize 0.6 3; equalize 0.6
posterize 0.8 5; equalize 1
rotate 0.2 3; solarize 0.6 8
equalize 0.6; posterize 0.4 6
rotate 0.8 8; color 0.4 0
rotate 0.4 9; equalize 0.6
equalize 0; equalize 0.8
invert 0.6; equalize 1
color 0.6 4; contrast 1 8
rotate 0.8 8; color 1 2
color 0.8 8; solarize 0.8 7
sharpness 0.4 7; invert 0.6
shear_x 0.6 5; equalize 1
color 0.4 0; equalize 0.6
equalize 0.4; solarize 0.2 4
solarize 0.6 5; auto_contrast 0.6
invert 0.6; equalize 1
color 0.6 4; contrast 1 8
equalize 0.8; equalize 0.6
""",
    "cifar10": """
invert 0.1; contrast 0.2 6
rotate 0.7 2; translate_x 0.3 9
sharpness 0.8 1; sharpness 0.9 3
shear_y 0.5 8; translate_y 0.7 9
auto_contrast 0.5; equalize 0.9
shear_y 0.2 7; posterize 0.3 7
color 0.4 3; brightness 0.6 7
sharpness 0.3 9; brightness 0.7 9
equalize 0.6; equalize 0.5
contrast 0.6 7; sharpness 0.6 5
color 0.7 7; translate_x 0.5 8
equalize 0.3; auto_contrast 0.4
translate_y 0.4 3; sharpness 0.2 6
brightness 0.9 6; color 0.2 8
solarize 0.5 2; invert 0
equalize 0.2; auto_contrast 0.6
equalize 0.2; equalize 0.6
color 0.9 9; equalize 0.6
auto_contrast 0.8; solarize 0.2 8
brightness 0.1 3; color 0.7 0
solarize 0.4 5; auto_contrast 0.9
translate_y 0.9 9; translate_y 0.7 9
auto_contrast 0.9; solarize 0.8 3
equalize 0.8; invert 0.1
translate_y 0.7 9; auto_contrast 0.9
""",
    "v0": """
equalize 0.8; shear_y 0.8 4
color 0.4 9; equalize 0.6
color 0.4 1; rotate 0.6 8
solarize 0.8 3; equalize 0.4
solarize 0.4 2; solarize 0.6 2
color 0.2 0; equalize 0.8
equalize 0.4; solarize_add 0.8 3
shear_x 0.2 9; rotate 0.6 8
color 0.6 1; equalize 1
invert 0.4; rotate 0.6 0
equalize 1; shear_y 0.6 3
color 0.4 7; equalize 0.6
posterize 0.4 6; auto_contrast 0.4
solarize 0.6 8; color 0.6 9
solarize 0.2 4; rotate 0.8 9
rotate 1 7; translate_y 0.8 9
shear_x 0 0; solarize 0.8 4
shear_y 0.8 0; color 0.6 4
color 1 0; rotate 0.6 2
equalize 0.8; equalize 0
equalize 1; auto_contrast 0.6
shear_y 0.4 7; solarize_add 0.6 7
posterize 0.8 2; solarize 0.6 10
solarize 0.6 8; equalize 0.6
color 0.8 6; rotate 0.4 5
""",
}
