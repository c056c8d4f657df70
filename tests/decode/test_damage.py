"""Photographs of which one in twenty is damaged, in ways that a strict decoder can notice: training goes through."""

import json
import random

from hostile import find, segments, with_frame, with_size

from bench import photographs
from gpuaug.tools.main import main


def without(data: bytes, marker: int) -> bytes:
    """The JPEG with all segments of one marker left out."""
    kept = [data[start:end] for found, start, end in segments(data) if found != marker]
    return data[:2] + b"".join(kept) + data[segments(data)[-1][2] :]


WAYS = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "header_only": lambda data: data[: find(data, 0xDA)[0]],
    "html": lambda data: b"<html><body>503 Service Unavailable</body></html>",
    "zeros": lambda data: bytes(len(data)),
    "no_end": lambda data: data[:-2],
    "huge": lambda data: with_size(data, 65535, 65535),
    "no_tables": lambda data: without(data, 0xDB),
    "precision": lambda data: with_frame(data, precision=16),
    "junk_at_start": lambda data: b"junk" + data,
}


def test_training_goes_through(tmp_path, capsys):
    photographs.cut(tmp_path / "photos", count=260)
    train = tmp_path / "photos" / "train"
    files = sorted(train.rglob("*.jpg"))
    chosen = random.Random(0).sample(files, max(len(WAYS), len(files) // 20))
    for k, path in enumerate(chosen):
        damage = list(WAYS.values())[k % len(WAYS)]
        path.write_bytes(damage(path.read_bytes()))
    record = tmp_path / "faults.jsonl"
    words = [
        "train", f"source.root={train}", "augment=standard", "augment.crop.size=32", "epochs=2", "batch_size=32",
        "num_workers=1", "device=cpu", "faults.policy=blank", f"faults.file={record}", f"out={tmp_path / 'run'}",
    ]  # fmt: skip
    assert main(words) == 0
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert sorted(line["key"] for line in lines) == sorted(path.relative_to(train).as_posix() for path in chosen)
    assert f"{len(chosen)} bad samples" in capsys.readouterr().err
    assert all(line["reason"] and line["stage"] in ("read", "decode") for line in lines)
