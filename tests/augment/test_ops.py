"""The entries of Kornia's operations: each is tested, says what it does to targets, and belongs to one exact class."""

from __future__ import annotations

import kornia.augmentation as K
import pytest
from kornia.augmentation._2d.geometric.base import GeometricAugmentationBase2D
from kornia.augmentation._2d.intensity.base import IntensityAugmentationBase2D
from test_parameters import OPS

from gpuaug.augment.policy import ENTRIES, by_class, entry_of, prepare


def test_every_entry_stands_in_the_table_of_tests() -> None:
    assert set(ENTRIES) == {type(make()).__name__ for make in OPS.values()}


@pytest.mark.parametrize("name", ENTRIES)
def test_what_moves_pixels_is_what_kornia_calls_geometric(name: str) -> None:
    kind = getattr(K, name)
    assert entry_of(next(op for op in (make() for make in OPS.values()) if type(op) is kind)) is ENTRIES[name]
    if issubclass(kind, IntensityAugmentationBase2D):
        assert ENTRIES[name].affects == "pixels"
    elif issubclass(kind, GeometricAugmentationBase2D):
        assert ENTRIES[name].affects == "matrix"
    else:
        assert kind in (K.RandomElasticTransform, K.RandomThinPlateSpline, K.RandomFisheye, K.RandomJigsaw)
        assert ENTRIES[name].affects == "field"
    assert (ENTRIES[name].matrix is not None) == (ENTRIES[name].affects == "matrix")


def test_subclasses_and_namesakes_have_no_entry() -> None:
    namesake = type("RandomBrightness", (K.RandomBrightness,), {})
    assert entry_of(K.RandomBrightness()) is ENTRIES["RandomBrightness"]
    assert entry_of(namesake()) is None
    assert prepare("x", namesake()).seeded
    assert by_class({"RandomHue": 1}, K.RandomHue()) == 1
    assert by_class({"RandomHue": 1}, K.RandomBrightness()) is None
