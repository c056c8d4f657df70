"""Masks and objects in datasets of Hugging Face: which columns are targets, damaged rows, whole batches."""

import pickle

import datasets
import numpy as np
import pytest
from test_parquet_targets import columns_of, rows_of
from test_shard_targets import K_POINTS, loader, read, same, same_batches, scene, wanted

import gpuaug
from gpuaug.errors import ConfigError, ReadError, SourceError
from gpuaug.source import DatasetSource, ParquetSource, adapt

IMAGE, TEXT, INT = datasets.Image(decode=False), datasets.Value("string"), datasets.Value("int64")
CLASSES = [f"class {i}" for i in range(9)]
NUMBERS = datasets.List(datasets.Value("float32"))
OBJECT = {
    "id": INT, "bbox": datasets.List(datasets.Value("float32"), length=4), "area": datasets.Value("float64"),
    "category": datasets.ClassLabel(names=CLASSES), "iscrowd": INT, "keypoints": NUMBERS, "segmentation": TEXT,
}  # fmt: skip
COLUMNS = {
    "image_id": INT, "image": IMAGE, "width": INT, "height": INT,
    "objects": {name: datasets.List(feature) for name, feature in OBJECT.items()},
}  # fmt: skip


def dataset_of(count: int, *, nested=False, change=None, **more):
    """The scenes as a data set of detection; ``more`` are further columns, as (feature, values)."""
    scenes = [scene(i) for i in range(count)]
    rows = {
        "image_id": list(range(count)),
        "image": [{"bytes": image, "path": None} for image, _ in scenes],
        "width": [target.size[1] for _, target in scenes],
        "height": [target.size[0] for _, target in scenes],
        "objects": [(rows_of if nested else columns_of)(target) for _, target in scenes],
    }
    for i, value in (change or {}).items():
        rows["objects"][i] = value
    features = {**COLUMNS, **({"objects": datasets.List(OBJECT)} if nested else {})}
    features |= {name: feature for name, (feature, _) in more.items()}
    rows |= {name: values for name, (_, values) in more.items()}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


def masks(count: int) -> list:
    return [{"bytes": scene(i)[1].mask, "path": None} for i in range(count)]


@pytest.mark.parametrize("nested", [False, True])
def test_detection_is_recognised(nested, caplog, tmp_path):
    dataset = dataset_of(8, nested=nested)
    with caplog.at_level("INFO", "gpuaug"):
        source = adapt(dataset)
    assert [r.message for r in caplog.records] == ["source datasets.Dataset: reading objects from the column 'objects'"]
    assert source.target_kinds == {"boxes", "keypoints"}
    assert source.num_keypoints == K_POINTS
    assert source.classes == CLASSES
    assert source.labels is None
    for i in range(8):
        image, target = source[i]
        assert image == scene(i)[0]
        same(target, gpuaug.Target(**{name: getattr(scene(i)[1], name) for name in gpuaug.Target.__slots__
                                      if name not in ("mask", "_checked")}))  # fmt: skip
        same(source.label(i), target)
    reversed_classes = DatasetSource(dataset, classes=CLASSES[::-1])
    assert reversed_classes.classes == CLASSES[::-1]
    for i in range(8):
        assert reversed_classes[i][1].labels.tolist() == (8 - scene(i)[1].labels).tolist()
    with pytest.raises(SourceError, match="lacks 8 of the objects"):
        DatasetSource(dataset, classes=CLASSES[:1])
    turned = dataset.select(range(7, -1, -1)).with_format("torch")
    np.testing.assert_array_equal(adapt(turned)[0][1].boxes, scene(7)[1].boxes)
    dataset.to_parquet(tmp_path / "x.parquet")  # and what it writes
    written = ParquetSource(tmp_path / "x.parquet", objects="objects")
    assert written.objects_digest() == source.objects_digest()
    assert written.classes == CLASSES


def test_segmentation_is_recognised(caplog):
    plain = datasets.Dataset.from_dict(
        {"image": [{"bytes": scene(i)[0], "path": None} for i in range(4)], "annotation": masks(4)},
        features=datasets.Features({"image": IMAGE, "annotation": IMAGE}),
    )
    with caplog.at_level("INFO", "gpuaug"):
        source = adapt(plain)
    assert [r.message for r in caplog.records] == [
        "source datasets.Dataset: reading masks from the column 'annotation'"
    ]
    assert source.target_kinds == {"masks"}
    assert list(source) == [(scene(i)[0], gpuaug.Target(mask=scene(i)[1].mask)) for i in range(4)]
    other = plain.rename_columns({"image": "pixel_values", "annotation": "label"})
    assert list(adapt(other)) == list(source)
    assert adapt(other).labels is None
    kind = (datasets.ClassLabel(names=["a", "b"]), [1, 0, 1, 0])
    scenes = plain.add_column("scene", kind[1]).cast_column("scene", kind[0])
    assert adapt(scenes)[0] == (scene(0)[0], gpuaug.Target(mask=scene(0)[1].mask, label=1))
    assert DatasetSource(scenes, mask="none", image="image", label="none")[1] == (scene(1)[0], None)
    assert DatasetSource(plain, image="annotation", mask="none")[1] == (scene(1)[1].mask, None)
    unknown = plain.rename_column("annotation", "depth")
    with pytest.raises(SourceError, match=r"2 columns .* have bytes.*mask='NAME'"):
        adapt(unknown)
    assert list(DatasetSource(unknown, mask="depth")) == list(source)
    for bad, message in (({"mask": "x"}, "`source.mask` must be"), ({"image": "x"}, "`source.image` must be"),
                         ({"image": "image", "mask": "image"}, "`source.image` must be")):  # fmt: skip
        with pytest.raises(SourceError, match=message):
            DatasetSource(unknown, **bad)
    decoded = plain.cast_column("annotation", datasets.Image())
    with pytest.raises(SourceError, match=r"cast_column\('annotation', datasets\.Image\(decode=False\)\)"):
        adapt(decoded)


def test_masks_and_objects_by_arguments():
    dataset = dataset_of(6, mask=(IMAGE, masks(6)), label=(INT, list(range(6))))
    source = DatasetSource(dataset, objects="objects", label="none")
    assert source.target_kinds == {"masks", "boxes", "keypoints"}
    for i, (image, target) in enumerate(source):
        assert image == scene(i)[0]
        same(target, scene(i)[1])
        assert target.label is None
    labelled = DatasetSource(dataset, objects="objects")
    assert [target.label for _, target in labelled] == [0, 1, 2, 3, 4, 5]
    with pytest.raises(SourceError, match=r"`source\.objects` must be a column .* Columns: .*'objects: struct"):
        DatasetSource(dataset, objects="image_id")
    with pytest.raises(ConfigError, match="`classes` is for the classes of objects"):
        DatasetSource(dataset, classes=CLASSES)
    found, faults = read(source, num_workers=1)
    assert (found, faults) == (wanted(6), {})
    assert len(pickle.dumps(source._objects)) < 5_000


def test_labels_come_first():
    """A data set that was read for classification is read in the same way."""
    dataset = dataset_of(4, label=(INT, [3, 2, 1, 0]))
    source = adapt(dataset)
    assert source.target_kinds == frozenset()
    assert list(source) == [(scene(i)[0], 3 - i) for i in range(4)]
    assert source.objects_digest() is None


def test_a_damaged_row_is_a_fault_of_its_sample():
    short = columns_of(scene(3)[1])
    short["category"] = short["category"][1:]
    out_of_range = columns_of(scene(5)[1])
    out_of_range["category"] = [-1] * len(out_of_range["category"])
    dataset = dataset_of(8, change={3: short, 5: out_of_range, 6: None}, mask=(IMAGE, [*masks(7), None]))
    source = DatasetSource(dataset)
    with pytest.raises(ReadError, match=r"the objects of '3' cannot be used: `category` has 2 entries"):
        source[3]
    found, faults = read(source)
    assert sorted(faults) == [3, 5, 6, 7]
    assert "must be 0 .. 8" in faults[5]
    assert "has no mask bytes" in faults[7]
    assert found == {i: value for i, value in wanted(8).items() if i not in faults}


def test_masks_that_are_files(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.jpg").write_bytes(scene(i)[0])
        (tmp_path / f"{i}.png").write_bytes(scene(i)[1].mask)
    files = {
        name: [str(tmp_path / f"{i}.{end}") for i in range(3)] for name, end in (("image", "jpg"), ("mask", "png"))
    }
    dataset = datasets.Dataset.from_dict(files, features=datasets.Features({"image": IMAGE, "mask": IMAGE}))
    source = adapt(dataset)
    assert list(source) == [(scene(i)[0], gpuaug.Target(mask=scene(i)[1].mask)) for i in range(3)]
    (tmp_path / "1.png").unlink()
    with pytest.raises(FileNotFoundError):
        source[1]


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_those_of_a_list(workers):
    dataset = dataset_of(12, annotation=(IMAGE, masks(12)))
    same_batches(dataset, 12, num_workers=workers)
    with pytest.raises(ConfigError, match="needs a source with masks"):
        loader(dataset.remove_columns("annotation"))
