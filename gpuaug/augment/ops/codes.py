"""The steps of the fused backend: one list, from which the enum and the traits in cpu.cpp are made.

A step's formula for the CPU is in fused/cpu.cpp. For CUDA, it is in fused/cuda_kernels.py, cuda_pillow.py (Triton) or
fused/cuda_steps.py (torch). A step of gpuaug's own operations has its torch formula in their entries.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag, auto

ARGS = 16  # number of float32 arguments per step
PILLOW_FLAG = 3  # index of the argument that selects Pillow's arithmetic


class Trait(IntFlag):
    """What the backends must know of a step, besides its formula."""

    POINTWISE = auto()  # a pixel depends on itself only, and on the statistics of its image
    ANYWHERE = auto()  # the step does not depend on the position, so it can change places with a flip
    STATISTIC = auto()  # needs the image's mean, extremes or histogram before this step
    OUTSIDE = auto()  # Kornia does not clamp values outside 0..1
    JUMPS = auto()  # a small change of a value can become a large one
    PILLOW = auto()  # has Pillow's arithmetic, selected by the argument at index PILLOW_FLAG
    KERNEL = auto()  # the Triton kernel for pixels runs it; torch or a kernel of its own runs the others


POINTWISE, ANYWHERE, STATISTIC, OUTSIDE, JUMPS, PILLOW, KERNEL = Trait


class Code(IntEnum):
    """The steps, with their traits. Comments give the arguments. Kornia clamps colours to 0..1 in the same places.

    With Pillow's arithmetic, SOLARIZE has a third argument: 1 keeps levels at or above the threshold, 0 inverts them.
    """

    traits: Trait

    def __new__(cls, number: int, traits: Trait) -> Code:
        """Keep the traits beside the number."""
        code = int.__new__(cls, number)
        code._value_, code.traits = number, traits
        return code

    NONE = 0, POINTWISE
    HFLIP = 1, POINTWISE | OUTSIDE | KERNEL
    VFLIP = 2, POINTWISE | OUTSIDE | KERNEL
    # (r, g, b)
    MULTIPLY = 3, POINTWISE | ANYWHERE | PILLOW | KERNEL
    # (r, g, b)
    ADD = 4, POINTWISE | ANYWHERE | KERNEL
    # (factor), around the image's mean gray before this step
    CONTRAST = 5, POINTWISE | ANYWHERE | STATISTIC | PILLOW | KERNEL
    # (factor), towards gray
    SATURATION = 6, POINTWISE | ANYWHERE | PILLOW | KERNEL
    # (factor)
    SATURATION_HSV = 7, POINTWISE | ANYWHERE | KERNEL
    # (turns)
    HUE = 8, POINTWISE | ANYWHERE | KERNEL
    # (weights of r, g, b; 1 if the result can leave 0..1, else 0)
    GRAY = 9, POINTWISE | ANYWHERE | OUTSIDE | KERNEL
    # (threshold, addition)
    SOLARIZE = 10, POINTWISE | ANYWHERE | JUMPS | PILLOW | KERNEL
    # (bits)
    POSTERIZE = 11, POINTWISE | ANYWHERE | JUMPS | PILLOW | KERNEL
    # (maximum)
    INVERT = 12, POINTWISE | ANYWHERE | OUTSIDE | KERNEL
    # (gamma, gain)
    GAMMA = 13, POINTWISE | ANYWHERE | KERNEL
    # (source channel of r, of g, of b)
    SHUFFLE = 14, POINTWISE | ANYWHERE | OUTSIDE | KERNEL
    # (x, y, width, height, value)
    ERASE = 15, POINTWISE | OUTSIDE | KERNEL
    # (); adds noise per pixel
    NOISE = 16, POINTWISE | OUTSIDE
    # (1: clamp)
    AUTOCONTRAST = 17, POINTWISE | ANYWHERE | STATISTIC | OUTSIDE | PILLOW
    EQUALIZE = 18, POINTWISE | ANYWHERE | STATISTIC | JUMPS | PILLOW
    # (factor)
    SHARPNESS = 19, ANYWHERE | PILLOW
    # (taps in x, taps in y, sigma, border: kornia.constants.BorderType)
    BLUR = 20, ANYWHERE | OUTSIDE
    # (matrix from output to input positions in -1..1, padding: SamplePadding, align_corners, projective, nearest)
    WARP = 21, OUTSIDE
    # (offset); x becomes floor(255 x + offset) / 255
    LEVELS = 22, POINTWISE | ANYWHERE | KERNEL
    # (Pillow's matrix from output to input: 6 float64 as 12 arguments; interpolation, r, g, b)
    RESAMPLE = 23, Trait(0)
    # (x, y, width, height, r, g, b, std of r, g, b); fills a box with the colour + std * noise
    ERASE_NOISE = 24, POINTWISE | OUTSIDE
    # (quality); with a table of 64 divisors for luma and 64 for chroma
    JPEG = 25, JUMPS


def having(trait: Trait) -> frozenset[Code]:
    """All steps that have a trait."""
    return frozenset(code for code in Code if trait in code.traits)


def as_cpp() -> str:
    """The definitions that cpu.cpp needs."""
    return "\n".join([
        "#include <cstdint>",
        f"constexpr int ARGS = {ARGS}, PILLOW_FLAG = {PILLOW_FLAG};",
        f"enum Code : int32_t {{ {', '.join(f'{code.name} = {code.value}' for code in Code)} }};",
        f"enum Trait : uint32_t {{ {', '.join(f'IS_{trait.name} = {trait.value}' for trait in Trait)} }};",
        f"constexpr uint32_t TRAITS[] = {{ {', '.join(str(int(code.traits)) for code in Code)} }};",
        "inline bool has(int32_t code, Trait trait) { return TRAITS[code] & trait; }",
        "",
    ])  # fmt: skip
