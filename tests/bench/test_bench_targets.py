"""bench/targets.py: that it runs, that its contestants do the same work, and that its table says what was measured."""

import pytest
import targets as bench
from quick import quick


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return quick("targets.py", tmp_path_factory.mktemp("report"), "--who", "ours", "images_only", "kornia")


def rows_of(report, recipe):
    return {row["who"]: row for row in report["results"] if row["recipe"] == recipe}


def test_a_quick_run_measures_ours_with_and_without_masks(report):
    rows = rows_of(report, bench.SEG)
    assert set(rows) == {"ours", "images_only"}
    masked, plain = rows["ours"], rows["images_only"]
    assert masked["ratio"] == 1
    assert plain["ratio"] == pytest.approx(masked["rates"][0] / plain["rates"][0])
    assert masked["facts"]["mean"] == pytest.approx(plain["facts"]["mean"], abs=1e-6)  # the same images
    shares = [masked["facts"][name] for name in ("background", "things", "ignored", "other labels")]
    assert sum(shares) == pytest.approx(1)
    assert shares[3] == 0
    assert [(row["recipe"], tuple(row["kinds"])) for row in report["stages"]] == list(bench.STAGES)
    for row in report["stages"]:
        assert row["pixels_equal"]
        assert row["ratio"] == pytest.approx(row["with_ms"] / row["without_ms"])
    text = bench.table(report)
    assert f"| {bench.SEG} | ours | {masked['images_per_second']:,.0f} |" in text
    assert text.count("not run") == len(bench.BARS) - 1  # Kornia's is there


def test_kornias_batches_hold_what_ours_hold(report):
    ours, kornia = (rows_of(report, bench.WARP)[who]["facts"] for who in ("ours", "kornia"))
    for name, limit in (("mean", 0.3), ("deviation", 0.3), ("background", 0.15), ("things", 0.1), ("ignored", 0.1)):
        assert ours[name] == pytest.approx(kornia[name], abs=limit), name
    assert kornia["other labels"] == 0
