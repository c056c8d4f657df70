"""Compares each operation with one plain call of Kornia on the same batch: uint8 pixels in, float32 out, in turns.

    python bench/operations.py --readme bench/README.md
    python bench/operations.py --only rain jpeg

Both sides draw their parameters, and every sample is changed (p = 1). A ratio above 1 says that gpuaug is faster.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.augment import photographs
from bench.readme import processor, put


def operations() -> dict[str, Callable[..., Any]]:
    """Kornia's 2-D operations, without the common ones that bench/augment.py measures in recipes."""
    import kornia.augmentation as K

    pair = torch.tensor([-0.3, 0.3])
    return {
        "affine": lambda **k: K.RandomAffine(30.0, (0.1, 0.1), (0.8, 1.2), 10.0, **k),
        "rotation90": lambda **k: K.RandomRotation90((0, 3), **k),
        "perspective": lambda **k: K.RandomPerspective(0.5, **k),
        "thin_plate_spline": lambda **k: K.RandomThinPlateSpline(0.2, **k),
        "fisheye": lambda **k: K.RandomFisheye(pair, pair, torch.tensor([0.9, 1.1]), **k),
        "elastic": lambda **k: K.RandomElasticTransform(**k),
        "box_blur": lambda **k: K.RandomBoxBlur((5, 5), **k),
        "median_blur": lambda **k: K.RandomMedianBlur((3, 3), **k),
        "motion_blur": lambda **k: K.RandomMotionBlur(9, 35.0, 0.5, **k),
        "gaussian_noise": lambda **k: K.RandomGaussianNoise(0.0, 0.1, **k),
        "salt_and_pepper": lambda **k: K.RandomSaltAndPepperNoise(**k),
        "channel_dropout": lambda **k: K.RandomChannelDropout(**k),
        "channel_shuffle": lambda **k: K.RandomChannelShuffle(**k),
        "planckian": lambda **k: K.RandomPlanckianJitter("blackbody", **k),
        "plasma_brightness": lambda **k: K.RandomPlasmaBrightness(**k),
        "plasma_contrast": lambda **k: K.RandomPlasmaContrast(**k),
        "plasma_shadow": lambda **k: K.RandomPlasmaShadow(**k),
        "gaussian_illumination": lambda **k: K.RandomGaussianIllumination(**k),
        "linear_illumination": lambda **k: K.RandomLinearIllumination(**k),
        "corner_illumination": lambda **k: K.RandomLinearCornerIllumination(**k),
        "rain": lambda **k: K.RandomRain(**k),
        "snow": lambda **k: K.RandomSnow((0.3, 0.7), (1.0, 3.0), **k),
        "clahe": lambda **k: K.RandomClahe((1.0, 40.0), **k),
        "jpeg": lambda **k: K.RandomJPEG((20.0, 90.0), **k),
        "gamma": lambda **k: K.RandomGamma((0.5, 2.0), **k),
    }


def measure(op: Any, images: torch.Tensor, rounds: int) -> tuple[float, float, str]:
    """Median seconds of gpuaug and of Kornia, and how gpuaug runs the operation: fused, batched or one by one."""
    import gpuaug

    ours = gpuaug.Augment(ops={"op": op}, normalize=None)
    prepared = ours.prepared[0]

    def kornia() -> torch.Tensor:
        return op(images.permute(0, 3, 1, 2).float().div_(255))

    times: dict[int, list[float]] = {0: [], 1: []}
    with torch.no_grad():
        for number in range(rounds + 1):
            for side, call in enumerate((lambda number=number: ours(images, seed=number), kornia)):
                start = time.perf_counter()
                call()
                times[side].append(time.perf_counter() - start)
    if prepared.seeded is not None:
        how = "one by one"
    else:
        how = "fused" if all(part.columns is not None for part in ours._executor._parts) else "Kornia's module"
    return statistics.median(times[0][1:]), statistics.median(times[1][1:]), how


def main() -> None:
    """Measure, print a line per operation, and put the table into the README if asked."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", nargs="*", help="names of operations; default: all")
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--size", type=int, default=224)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--readme", type=Path, help="put the table between its marks in this file")
    given = options.parse_args()
    logging.getLogger("gpuaug").setLevel(logging.ERROR)
    torch.set_num_threads(given.threads)
    images = photographs(given.batch, given.size)
    lines = ["| Operation | How | gpuaug | Kornia | Kornia / gpuaug |", "|---|---|---:|---:|---:|"]
    for name, make in operations().items():
        if given.only and name not in given.only:
            continue
        ours, kornia, how = measure(make(p=1.0), images, given.rounds)
        lines.append(f"| {name} | {how} | {1000 * ours:.1f} ms | {1000 * kornia:.1f} ms | {kornia / ours:.2f} |")
        print(lines[-1], flush=True)
    if given.readme:
        what = f"{given.batch} photographs of {given.size} x {given.size}, {given.threads} threads"
        what += f", median of {given.rounds}, torch {torch.__version__}, {processor()}, {datetime.date.today()}."
        put(given.readme, "operations.py", "\n".join([what, "", *lines]))


if __name__ == "__main__":
    main()
