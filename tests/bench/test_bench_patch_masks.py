"""bench/patch_masks.py: both times are measured, and the comparison tells one law from another."""

import numpy as np
import patch_masks as bench

import gpuaug


def test_the_comparison_tells_one_law_from_another() -> None:
    def drawn(made: gpuaug.BlockMasks) -> bench.Masks:
        return lambda count: made(range(count), size=(224, 224), seed=99).masks[0].numpy()

    equal = bench.compared("dinov2", drawn(bench.OURS["dinov2"][0]), 4000)
    other = bench.compared("dinov2", drawn(gpuaug.BlockMasks(smallest=16)), 4000)
    assert min(equal["ks"], equal["chi2"]) > 1e-3
    assert equal["z"] < 4.5
    assert other["chi2"] < 1e-6


def test_the_time_of_masks_and_layouts_is_measured() -> None:
    for made, views, layout in bench.OURS.values():
        drawn, laid = bench.measured(made, views, layout, 4, 14, 2)
        assert drawn > 0
        assert (laid > 0) == (layout != "flat")


def test_the_authors_files_are_run_as_they_are(tmp_path) -> None:
    path = tmp_path / "masks.py"
    path.write_text("from timm.data import SIZE\nimport numpy as np\nclass Made:\n    mask = np.ones((2, 2))\n")
    assert np.array_equal(bench.load(path).Made.mask, np.ones((2, 2)))
