"""bench/loader.py: that it runs, and that its ratios and table say what was measured."""

import sys

import loader as bench
import pytest
import reading
from quick import popen, quick


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


def test_ratios_are_ours_over_the_faster_torchvision():
    def row(who, rate, kind="photos", recipe="standard"):
        return {"set": kind, "recipe": recipe, "who": who, "images_per_second": rate}

    rows = [row("ours", 900.0), row("torchvision", 300.0), row("torchvision_v2", 450.0), row("dali_reader", 600.0),
            row("ours_s3", 810.0), row("ours_packed", 2000.0, recipe="flip"), row("ffcv_raw", 1000.0, recipe="flip"),
            row("ours_engine", 1500.0), row("dali_reader_engine", 750.0),
            {"set": "photos", "recipe": "standard", "who": "spdl", "reason": "no"},
            row("ours", 80.0, kind="large"), row("torchvision", 40.0, kind="large")]  # fmt: skip
    found = bench.ratios(rows)
    assert found["standard"]["torchvision"] == 2.0
    assert found["standard"]["dali_reader"] == 1.5
    assert found["standard"]["spdl"] is None
    assert found["standard_large"]["torchvision"] == 2.0
    assert found["flip_packed"] == {"ffcv_raw": 2.0}
    assert found["standard_s3"] == {"local": pytest.approx(0.9)}
    engine = {"ours": pytest.approx(5 / 3), "dali_reader_engine": 2.0, "dali_proxy_engine": None}
    assert found["standard_engine"] == engine
    assert bench.Spec("ours_engine", "flip", "", 8, 1, 1, "cuda", "float32", {}).engine == 0.65
    assert bench.Spec("ours", "flip", "", 8, 1, 1, "cuda", "float32", {}).engine == 0.0
    assert not bench.takes_part("ours_engine", "flip", "photos", "cpu")
    rows = [row("read", 1000.0), row("decode", 3000.0), row("augment", 6000.0)]
    for on_gpu, rate in ((True, 1000.0), (False, 1 / (1 / 1000 + 1 / 3000 + 1 / 6000))):  # reading has its own cores
        (ceiling,) = bench._derived(rows, "photos", "standard", on_gpu=on_gpu)
        assert ceiling["images_per_second"] == pytest.approx(rate)


def test_the_table_goes_between_its_marks_and_touches_nothing_else():
    text = "# Measurements\n\nhand-written\n"
    once = bench.insert(text, "| a |")
    assert once.startswith("# Measurements\n\nhand-written\n\n## loader.py")
    twice = bench.insert(once + "\nmore\n", "| b |")
    assert "| a |" not in twice
    assert "| b |" in twice
    assert twice.endswith("\nmore\n")
    assert twice.count(bench.BEGIN) == 1


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


def test_reading_is_measured_with_and_without_workers(tmp_path):
    (tmp_path / "a").mkdir()
    for i in range(100):
        (tmp_path / "a" / f"{i}.jpg").write_bytes(b"jpeg" * i)
    source = reading.Delayed(tmp_path)
    source.delay = 0.0001
    for num_workers in (0, 1):
        reader = reading.Reader(source, num_workers=num_workers)
        rate, used = reading.epoch(reader, 4)
        reader.close()
        assert 0 < rate < 1e7
        assert 0 < used < 1


def started(root, who="read"):
    spec = bench.Spec(who, "flip", str(root), 8, 1, 1, "cpu", "float32", {})
    return bench.Contestant(spec, sys.executable, preload=None, data=str(root), delay=0.0)


def test_a_contestant_that_cannot_begin_or_dies_says_why_and_ends_nobody_else(tmp_path, monkeypatch):
    monkeypatch.setattr(bench.subprocess, "Popen", popen)
    lost = started(tmp_path / "nowhere")
    lost.close()
    assert "nowhere" in lost.reason
    root = bench.prepare(tmp_path, "photos", 16)
    contestant = started(root)
    try:
        assert contestant.reason is None
        contestant.round()
        assert len(contestant.rates) == 1
        contestant.process.kill()
        contestant.round()
        assert contestant.reason == "its process ended with signal 9"
        assert len(contestant.rates) == 1
        contestant.weigh()
    finally:
        contestant.close()
