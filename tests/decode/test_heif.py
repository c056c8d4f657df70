"""AVIF and HEIF, whose headers and pixels only Pillow reads."""

import sys

import pytest
from pictures import encode, photograph
from test_decode import by_pillow, only_fault, whole

import gpuaug
from gpuaug.decode.decoder import Decode
from gpuaug.files import sniff

FORMS = {"avif": "AVIF", "heif": "HEIF"}


@pytest.fixture
def decoder():
    with_pillow = Decode(backend="pillow", num_threads=2).open("cpu")
    yield with_pillow
    with_pillow.close()


@pytest.fixture(params=FORMS)
def codec(request):
    if request.param == "heif":
        pytest.importorskip("pillow_heif").register_heif_opener()  # the encoder; decoding needs no registration
    return request.param


@pytest.mark.parametrize("orientation", range(1, 9))
def test_both_are_turned_as_pillow_turns_them(decoder, codec, orientation):
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(photograph(), FORMS[codec], exif=exif.tobytes(), quality=60)
    assert sniff(data) == codec
    found = whole(decoder, data)
    assert found.shape == ((187, 251, 3) if orientation < 5 else (251, 187, 3))
    assert (found == by_pillow(data)).all()


@pytest.mark.parametrize("mode", ["L", "RGBA"])
def test_gray_and_alpha(decoder, codec, mode):
    data = encode(photograph().convert(mode), FORMS[codec])
    assert (whole(decoder, data) == by_pillow(data)).all()


@pytest.mark.parametrize("size", [0, 16, 40, 200, 1000])
def test_a_truncated_file_is_a_fault(decoder, codec, size):
    data = encode(photograph(), FORMS[codec])
    assert only_fault(decoder, data[:size])


def test_a_brand_of_both_is_told_apart_by_the_brands_behind_it():
    def ftyp(major: bytes, *others: bytes) -> bytes:
        return (16 + 4 * len(others)).to_bytes(4, "big") + b"ftyp" + major + bytes(4) + b"".join(others) + bytes(30)

    assert sniff(ftyp(b"mif1", b"mif1", b"avif", b"miaf")) == sniff(ftyp(b"avis", b"msf1")) == "avif"
    assert sniff(ftyp(b"mif1", b"mif1", b"heic")) == sniff(ftyp(b"heix", b"mif1")) == "heif"
    assert sniff(ftyp(b"isom", b"mp42")) is None


@pytest.mark.parametrize(
    ("codec", "module", "remedy"),
    [("heif", "pillow_heif", r"pip install 'gpuaug\[heif\]'"), ("avif", "PIL.AvifImagePlugin", "Pillow 11.3")],
)
def test_a_folder_of_only_these_names_what_is_missing(tmp_path, monkeypatch, codec, module, remedy):
    brand = {"heif": b"heic", "avif": b"avif"}[codec]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / f"x.{brand.decode()}").write_bytes(b"\0\0\0\x18ftyp" + brand + bytes(100))
    monkeypatch.setitem(sys.modules, module, None)
    if codec == "avif":
        import PIL

        monkeypatch.delattr(PIL, "AvifImagePlugin", raising=False)
    recipe = gpuaug.Augment(crop=gpuaug.Resize((8, 8)))
    with (
        gpuaug.Loader(gpuaug.FolderSource(tmp_path), augment=recipe, num_workers=0, device="cpu") as loader,
        pytest.raises(gpuaug.DataError, match=remedy),
    ):
        next(iter(loader))
