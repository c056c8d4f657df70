"""Puts every file of a folder into a batch of good ones, under every policy, and tells what became of each.

A process of its own, so that a crash or a growing memory is seen from outside:
    python tests/hostile_worker.py FOLDER GOOD_FILE... > report.json
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

import gpuaug

SIZE = 48


class Mixed:
    """Every hostile file between good ones, four to a batch: good, good, hostile, good."""

    def __init__(self, hostile: list[str], good: list[str]) -> None:
        self.hostile, self.good = hostile, good

    def __len__(self):
        return 4 * len(self.hostile)

    def __getitem__(self, i):
        path = self.hostile[i // 4] if i % 4 == 2 else self.good[(i % 4) % len(self.good)]
        with open(path, "rb") as file:
            return file.read(), i // 4

    def key(self, i):
        return os.fsdecode(self.hostile[i // 4]) if i % 4 == 2 else f"good{i % 4}"


def loader(source, policy, backend):
    augment = gpuaug.Augment(crop=gpuaug.Resize([SIZE, SIZE]), backend="kornia")
    return gpuaug.Loader(
        source,
        augment=augment,
        batch_size=4,
        order="sequential",
        num_workers=0,
        device="cpu",
        decode=gpuaug.Decode(backend=backend),
        faults=gpuaug.Faults(policy=policy),
    )


def peak():
    """Bytes; not getrusage's, which begins with the peak of the process that started this one."""
    return next(int(x.split()[1]) for x in open("/proc/self/status") if x.startswith("VmHWM")) * 1024


def main(folder, *good, backend="dali"):
    torch.set_num_threads(1)
    names = sorted(os.listdir(os.fsencode(folder)))
    source = Mixed([os.path.join(os.fsencode(folder), name) for name in names], list(good))
    with loader(Mixed(list(good)[:1], list(good)), "raise", backend) as clean:
        expected = clean.fetch([0, 1, 3]).images
    verdicts = {os.fsdecode(name): {} for name in names}
    changed, slowest, slow_name = [], 0.0, ""
    for policy in ("blank", "drop"):
        with loader(source, policy, backend) as ours:
            begin = time.process_time()
            for batch in ours:
                number = int(batch.indices[0]) // 4
                name = os.fsdecode(names[number])
                rows = {int(i) % 4: row for row, i in enumerate(batch.indices.tolist())}
                good_rows = [rows[k] for k in (0, 1, 3)]
                if not torch.equal(batch.images[good_rows], expected) or not batch.valid[good_rows].all():
                    changed.append([policy, name])
                bad = 2 not in rows or not bool(batch.valid[rows[2]])
                if policy == "blank" and bad and batch.images[rows[2]].any():
                    changed.append(["not blank", name])
                verdicts[name][policy] = "bad" if bad else "good"
                if (took := time.process_time() - begin) > slowest:
                    slowest, slow_name = took, name
                begin = time.process_time()
    with loader(source, "raise", backend) as ours:
        for number, name in enumerate(names):
            try:
                ours.fetch([4 * number, 4 * number + 2])
                verdict = "good"
            except gpuaug.DataError as error:
                verdict = "bad" if error.index == 4 * number + 2 and error.reason else "misnamed"
            verdicts[os.fsdecode(name)]["raise"] = verdict
    json.dump(
        {
            "verdicts": verdicts,
            "changed": changed,
            "slowest": [slowest, slow_name],
            "peak_bytes": peak(),
        },
        sys.stdout,
    )


if __name__ == "__main__":
    arguments = sys.argv[1:]
    backend = arguments.pop(0).removeprefix("--backend=") if arguments[0].startswith("--backend=") else "dali"
    main(str(Path(arguments[0])), *arguments[1:], backend=backend)
