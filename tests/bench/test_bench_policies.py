"""bench/policies.py: both sides are measured, and the table names them."""

import policies as bench
import torch


def test_both_sides_change_the_images_they_share(v2) -> None:
    windows = list(bench.images(4))
    found = bench.policies()
    assert len({image.tobytes() for image in windows}) == 4
    for name in ("torchvision's RandAugment, magnitude 15", "timm's `rand-m9-mstd0.5-inc1` (`timm`)"):
        row = bench.measure(*found[name], windows)
        assert all(0 < mean < 255 for mean, _ in row.values())
    versions, rows = {"torch": torch.__version__}, [{"name": name, **row}]
    text = bench.table({"count": 4, "date": "2026-01-01", "versions": versions, "rows": rows})
    assert f"| {name} | {row['ours'][0]:.1f} ± " in text
