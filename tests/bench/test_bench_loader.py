"""bench/loader.py: that it runs, and serves what a folder has."""

import loader as bench
import pytest
from quick import quick


def test_a_quick_run_measures_ours_its_stages_and_their_ceiling(tmp_path):
    report = quick(
        "loader.py", tmp_path, "--set", "photos", "--recipe", "flip", "--who", "ours", "read", "decode", "augment"
    )
    rows = {row["who"]: row for row in report["results"]}
    assert set(rows) == {"ours", "read", "decode", "augment", "ceiling"}
    for who in ("ours", "read", "decode", "augment"):
        assert rows[who]["lowest"] <= rows[who]["images_per_second"] <= rows[who]["highest"]
        assert rows[who]["peak_pss"] > 50 << 20
    alone = sum(1 / rows[who]["images_per_second"] for who in ("read", "decode", "augment"))
    assert rows["ceiling"]["images_per_second"] == pytest.approx(1 / alone)
    found = report["ratios"]["flip"]
    assert found["ceiling"] == pytest.approx(rows["ours"]["images_per_second"] * alone)
    peers = {"torchvision", "kornia_eager", "dali_reader", "dali_proxy", "ffcv", "spdl"}
    assert set(found) == {*peers, "ceiling", "decode"}
    assert found["torchvision"] is None
    assert report["ratios"]["flip_packed"] == {"ffcv_raw": None}
    text = bench.table(report)
    assert text.count("| photos | flip |") == 5
    assert f"{rows['ours']['images_per_second']:,.0f}" in text


@pytest.mark.long
def test_everybody_who_can_run_here_does(tmp_path):
    report = quick("loader.py", tmp_path)
    reasons = {(row["set"], row["recipe"], row["who"]): row["reason"] for row in report["results"] if "reason" in row}
    assert {who for _, _, who in reasons} <= {"torchvision", "torchvision_v2", "ffcv", "ffcv_raw", "spdl"}, reasons
    assert report["ratios"]["standard"]["kornia_eager"] > 0
    assert report["ratios"]["standard_s3"]["local"] > 0


def test_the_s3_server_gives_the_folder_as_it_is(tmp_path):
    from gpuaug.source import FolderSource, Remote
    from gpuaug.source.remote.storage import Range, Storage

    for name in ("a/1.jpg", "a/2.jpg", "b/3 #.jpg"):
        (tmp_path / "train" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "train" / name).write_bytes(name.encode() * 100)
    with bench.s3.serve(tmp_path / "train", 0.01) as server:
        remote = Remote(options={"endpoint_url": server.endpoint, "key": "x", "secret": "x"})
        source = FolderSource(server.url, remote=remote)
        for _ in range(2):  # the second time out of what is kept
            assert list(source) == list(FolderSource(tmp_path / "train"))
        assert Storage(remote).read([Range(f"{server.url}/a/1.jpg", 6, 3)]) == [("a/1.jpg" * 2).encode()[6:9]]
        assert server.seconds() > 0
        assert "moto" in server.how
