"""`gpuaug preview serve=true`: the page draws what the command draws, copies the recipe, and gives out nothing else."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from html import unescape
from http.client import HTTPConnection, HTTPException
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, urlsplit

import forked
import pytest
from browser import CHROMIUM, browser
from common import PROGRAM, tree
from PIL import Image
from test_parameters import OPS, OWN

import gpuaug
from gpuaug.errors import ConfigError
from gpuaug.tools.main import main
from gpuaug.tools.preview import controls
from gpuaug.tools.preview.drawing import Settings
from gpuaug.tools.preview.server import Live, LivePage, PageServer
from gpuaug.tools.request import Request

FEW = ("samples=2", "draws=1", "cell=64")
CHANGES = {
    "augment.ops.jitter.hue": 0.45,
    "augment.ops.gray.p": 0,
    "augment.crop.scale": [0.5, 0.75],
    "augment.crop.interpolation": "bilinear",
    "augment.ops.blur.kernel_size": 9,
}
WORDS = [  # the same as overrides, in the recipe's order
    "augment.crop.scale=[0.5,0.75]",
    "augment.crop.interpolation=bilinear",
    "augment.ops.jitter.hue=0.45",
    "augment.ops.gray.p=0.0",
    "augment.ops.blur.kernel_size=9",
]


@dataclass(frozen=True)
class Page:
    """A running page: its process, address and the command's overrides."""

    process: Any
    url: str
    words: tuple[str, ...]

    def ask(
        self, path: str, body: Any = None, host: str = "", *, whole: bool = False, **headers: str
    ) -> tuple[int, bytes]:
        """Status and body of an answer; ``path`` is behind the token, or ``whole``. ``body``: JSON, or bytes."""
        address = urlsplit(self.url)
        connection = HTTPConnection("127.0.0.1", address.port or 0, timeout=60)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        own = {"Host": host or address.netloc, **{name.replace("_", "-"): value for name, value in headers.items()}}
        connection.request("POST" if data else "GET", path if whole else address.path + path, data, own)
        with connection.getresponse() as answer:
            return answer.status, answer.read()


@pytest.fixture(scope="module")
def page(photos: Path) -> Iterator[Page]:
    words = (f"source.root={photos}", "augment=simclr", *FEW)
    process = forked.Popen([*PROGRAM, "preview", "serve=true", *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    assert url.startswith("http://127.0.0.1:"), url
    yield Page(process, url, words)
    process.send_signal(signal.SIGINT)  # Ctrl-C
    assert process.wait(60) == 0


def live(*words: str, **more: Any) -> Live:
    request = Request(command="preview", overrides=words, **more)
    return Live(request, Settings(**request.settings()))


def shown(html: str) -> list[tuple[str, str, bytes]]:
    """Caption, parameters and pixels of each picture of a page."""
    found = re.findall(r'<label title="(.*?)">.*?base64,(.*?)" alt="(.*?)"', html, re.DOTALL)
    made = []
    for details, data, caption in found:
        with Image.open(io.BytesIO(base64.b64decode(data))) as image:
            made.append((caption, details, image.convert("RGB").tobytes()))
    assert made
    return made


def test_the_pictures_are_those_of_the_command(page: Page, tmp_path: Path) -> None:
    edited = {"changes": CHANGES, "epoch": 2, "samples": [7], "seed": 5}
    for asked, more in (({}, []), (edited, [*WORDS, "epoch=2", "samples=[7]", "seed=5"])):
        status, html = page.ask("render", asked)
        assert status == 200, html
        assert main(["preview", *page.words, *more, f"out={tmp_path}/p.html"]) == 0
        assert shown(html.decode()) == shown((tmp_path / "p.html").read_text())


def test_what_is_copied_are_overrides(page: Page, photos: Path) -> None:
    state = json.loads(page.ask("state", {"changes": CHANGES})[1])
    assert shlex.split(state["overrides"]) == [f"source.root={photos}", "augment=simclr", *WORDS]
    assert (state["size"], state["seed"], state["epoch"]) == (65, "0", 0)


def operations_of(words: str) -> dict[str, Any]:
    """The operations of the recipe that overrides select, in their order."""
    return {op["name"]: op for op in recipe(*shlex.split(words)[1:])["ops"]}


def test_operations_are_left_out_added_and_moved(photos: Path) -> None:
    known = live(f"source.root={photos}", "augment=simclr")
    order = [name for name, _ in known.state()["ops"]["augment.ops"]]
    whole = operations_of(known.state()["overrides"])
    assert order == list(whole) == ["flip", "jitter", "gray", "blur"]
    for wanted in (order, order[:2], order[::-1], ["gray", "flip", "blur"], []):
        asked = {"ops": {"augment.ops": [[name, None] for name in wanted]}}
        ops = operations_of(known.state(asked)["overrides"])
        assert list(ops) == wanted
        assert ops == {name: whole[name] for name in wanted}
    more = [["solarize", "solarize"], ["flip", None], ["again", "solarize"]]
    state = known.state({"ops": {"augment.ops": more}, "changes": {"augment.ops.again.p": 0.25}})
    keys = {control["key"] for control in state["controls"]}
    assert keys >= {"augment.ops.again.p", "augment.ops.flip.p"}
    assert "augment.ops.jitter.p" not in keys
    ops = operations_of(state["overrides"])
    assert list(ops) == ["solarize", "flip", "again"]
    assert ops["solarize"] | {"p": 0.25, "name": "again"} == ops["again"]


def test_nested_operations_follow_the_outer_one(photos: Path) -> None:
    """Whatever was changed first."""
    known = live(f"source.root={photos}", "augment=threeaugment")
    outer, inner = (known.state()["ops"][key] for key in ("augment.ops", "augment.ops.choice.ops"))
    rest = [[name, None] for name, _ in outer if name != "choice"]
    without = [[name, None] for name, _ in inner if name != "gray"]
    assert outer[-1][0] != "choice"
    for keys in (("augment.ops.choice.ops", "augment.ops"), ("augment.ops", "augment.ops.choice.ops")):
        wanted = dict.fromkeys(keys) | {"augment.ops": [*rest, ["choice", None]], "augment.ops.choice.ops": without}
        state = live(*shlex.split(known.state({"ops": wanted})["overrides"])).state()
        assert [name for name, _ in state["ops"]["augment.ops.choice.ops"]] == [name for name, _ in without]
        assert state["ops"]["augment.ops"][-1][0] == "choice"
        state = live(*shlex.split(known.state({"ops": wanted | {"augment.ops": rest}})["overrides"])).state()
        assert list(state["ops"]) == ["augment.ops"]


NAMES = ["simclr", "threeaugment", "lerobot", "data2vec", "dinov2", "vicreg", "det_rtdetr", "efficientnetv2", "beit"]


@pytest.mark.parametrize("seed", range(18))
def test_random_arrangements_give_what_the_page_shows(seed: int, photos: Path) -> None:
    """Operations left out, moved and added at random, also those inside others: the list is the recipe's."""
    chance = random.Random(seed)
    known = live(f"source.root={photos}", f"augment={NAMES[seed % len(NAMES)]}", *FEW) if seed % 9 != 6 else None
    known = known or live(f"source.root={photos}", "augment=standard", *FEW)
    wanted = {}
    for key, pairs in known.state()["ops"].items():
        order = [[name, None] for name, _ in pairs if chance.random() < 0.7]
        chance.shuffle(order)
        if chance.random() < 0.5:
            order.insert(chance.randrange(len(order) + 1), ["new", chance.choice(["gray", "solarize", "flip"])])
        wanted[key] = order
    keys = list(wanted)
    chance.shuffle(keys)
    chosen = {key: wanted[key] for key in keys[: chance.randint(1, len(keys))]}
    found = live(*shlex.split(known.state({"ops": chosen})["overrides"]), *FEW).state()["ops"]
    for key, pairs in known.state()["ops"].items():
        outer = key.rpartition(".ops.")
        if outer[1] and outer[2].removesuffix(".ops") not in [name for name, _ in found.get(f"{outer[0]}.ops", [])]:
            assert key not in found  # inside an operation that was left out
        else:
            assert [name for name, _ in found[key]] == [name for name, _ in chosen.get(key, pairs)]


@pytest.mark.parametrize(
    ("name", "key", "left"),
    [
        ("lerobot", "augment.ops.choice.ops", "hue"),
        ("data2vec", "augment.views.teacher.ops", "flip"),
    ],
)
def test_what_else_names_an_operation_is_changed_with_it(name: str, key: str, left: str, photos: Path) -> None:
    known = live(f"source.root={photos}", f"augment={name}")
    assert left in [each for each, _ in known.state()["ops"][key]]
    kept = [[each, None] for each, _ in known.state()["ops"][key] if each != left]
    words = shlex.split(known.state({"ops": {key: kept}})["overrides"])
    assert left not in [each for each, _ in live(*words).state()["ops"][key]]
    recipe(*words[1:])  # it can be built


def test_an_operation_that_is_null_is_not_listed(photos: Path) -> None:
    known = live(f"source.root={photos}", "augment=simclr", "augment.ops.flip=null")
    names = [name for name, _ in known.state()["ops"]["augment.ops"]]
    assert names == ["jitter", "gray", "blur"]
    order = [[name, None] for name in names]
    moved = known.state({"ops": {"augment.ops": order[::-1]}})["overrides"]
    assert [*operations_of(moved)] == names[::-1]
    assert known.state()["nulls"] == {"augment.ops": ["flip"]}
    added = known.state({"ops": {"augment.ops": [*order, ["flip2", "flip"]]}})["overrides"]
    assert [*operations_of(added)] == [*names, "flip2"]


def test_an_operation_with_epochs_can_be_left_out(photos: Path) -> None:
    known = live(f"source.root={photos}", "augment=simclr", "+augment.epochs={gray:[0,1],blur:[0,2]}")
    order = [[name, None] for name in ("blur", "jitter", "flip")]
    words = shlex.split(known.state({"ops": {"augment.ops": order}})["overrides"])
    assert "~augment.epochs.gray" in words
    assert "~augment.epochs.blur" not in words
    assert [*operations_of(shlex.join(words))] == ["blur", "jitter", "flip"]


@pytest.mark.parametrize("name", ["dinov2", "efficientnetv2"])
def test_operations_of_views_and_stages_have_places_of_their_own(name: str, photos: Path) -> None:
    known = live(f"source.root={photos}", f"augment={name}")
    first, *others = known.state()["ops"]
    words = shlex.split(known.state({"ops": {first: [["inverse", "invert"]]}})["overrides"])
    ops = live(*words).state()["ops"]
    assert ops == {**known.state()["ops"], first: [["inverse", "RandomInvert"]]}
    assert len(others) >= 2


def test_every_example_can_be_added(photos: Path) -> None:
    known = live(f"source.root={photos}", "augment=flip", "augment.crop.size=32", "samples=1", "draws=1")
    names = known.state()["examples"]
    added = {"augment.ops": [[name, name] for name in names if name not in ("flip", "augmix")]}
    state = known.state({"ops": added})
    kinds = {str(value["_target_"]).rpartition(".")[2] for value in controls.examples().values()}
    kornias = {type(make(p=0.5)).__name__ for make in OPS.values()}
    assert kinds >= {*OWN, *kornias} - {"OneOf", "SomeOf", "RandomFisheye"}  # in need of operations, and of tensors
    assert len(shown(known.render({"ops": added, "samples": [3]}))) == 2
    assert len(state["controls"]) > 60


def test_another_recipe(photos: Path) -> None:
    known = live(f"source.root={photos}", "augment=simclr", "augment.ops.flip.p=0.9", *FEW)
    words = shlex.split(known.state({"recipe": "dino", "changes": {"augment.views.local.copies": 2}})["overrides"])
    assert words == [f"source.root={photos}", "augment=dino", "augment.views.local.copies=2"]
    assert {"dino", "simclr", "eval"} <= set(known.state()["recipes"])
    with pytest.raises(ConfigError, match="`recipe` must be one of"):
        known.state({"recipe": "../x"})


def test_the_next_images(photos: Path) -> None:
    known = live(f"source.root={photos}", "samples=[1,60]")
    seen = known.state()["next"]
    assert seen == [3, 62]
    assert known.state({"samples": seen})["next"] == [5, 64]
    assert known.state({"samples": [64]})["next"] == [0]


def recipe(*words: str) -> dict[str, Any]:
    return gpuaug.build(gpuaug.compose("train", words).augment).fingerprint()


@pytest.mark.parametrize("name", ["dino", "augmix"])
def test_every_parameter_can_be_changed_and_copied(name: str, photos: Path) -> None:
    """All numbers of the recipe's own file have a control. The values here are others, but near."""
    known = live(f"source.root={photos}", f"augment={name}")
    listed = known.state()["controls"]
    values = {c["key"]: c["value"] for c in listed}
    config = gpuaug.compose("train", [f"augment={name}"])
    assert {key for key in numbers(config.augment, "augment") if "normalize" not in key} <= values.keys()
    changes = {
        c["key"]: c["choices"][0] if c["choices"] else nearby(c["value"]) for c in listed if c["name"] != "alpha"
    }
    words = shlex.split(known.state({"changes": changes})["overrides"])
    copied = {c["key"]: c["value"] for c in live(*words).state()["controls"]}
    assert copied == values | changes
    assert recipe(*words) != recipe(f"augment={name}")


def numbers(node: Any, path: str) -> Iterator[str]:
    for key, value in node.items():
        if hasattr(value, "items"):
            yield from numbers(value, f"{path}.{key}")
        elif isinstance(value, int | float):
            yield f"{path}.{key}"


def nearby(value: Any) -> Any:
    if isinstance(value, list):
        return [nearby(each) for each in value]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 2 if value > 1 else value
    return value * 0.9


def test_sliders_hold_their_value_and_it_is_a_step() -> None:
    for name in ("simclr", "randaugment_torchvision", "det_rtdetr", "dinov2"):
        for control in controls.controls(gpuaug.compose("train", [f"augment={name}"]).augment):
            if control.step is not None and control.low is not None and control.high is not None:
                every = control.value if isinstance(control.value, list) else [control.value]
                assert all(control.low <= value <= control.high for value in every), control
                assert 2 <= (control.high - control.low) / control.step <= 1500, control


def test_the_recipe_of_an_application(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "app.yaml").write_text("defaults: [gpuaug@train_data: train, _self_]\n")
    out = ["samples=2", "draws=1", f"out={tmp_path}/p.html"]
    known = live(f"train_data.source.root={photos}", *FEW, config_dir=str(tmp_path), config_name="app", at="train_data")
    changes = {"train_data.augment.ops.gray.p": 1.0}
    words = shlex.split(known.state({"changes": changes})["overrides"])
    assert words[-1] == "train_data.augment.ops.gray.p=1.0"
    assert main(["preview", *words, *out]) == 0
    made = shown(known.render({"changes": changes}))
    assert made == shown((tmp_path / "p.html").read_text())
    assert made != shown(known.render())
    words = shlex.split(known.state({"recipe": "simclr", "seed": 3})["overrides"])
    assert words[-2:] == ["gpuaug/augment@train_data.augment=simclr", "train_data.seed=3"]
    assert main(["preview", *words, *out]) == 0
    assert shown(known.render({"recipe": "simclr", "seed": 3})) == shown((tmp_path / "p.html").read_text())


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"changes": {"source.root": "/etc"}}, "may name only parameters of the recipe. Found: 'source.root'."),
        ({"changes": {"augment.ops.jitter._target_": "os.system"}}, "Found: 'augment.ops.jitter._target_'."),
        ({"changes": {"augment.ops.jitter": {"_target_": "os.system"}}}, "Found: 'augment.ops.jitter'."),
        ({"changes": {"augment.ops.jitter.p": "${oc.env:HOME}"}}, "`augment.ops.jitter.p` must be a number in"),
        ({"changes": {"augment.ops.jitter.p": True}}, "`augment.ops.jitter.p` must be a number in"),
        ({"changes": {"augment.ops.jitter.p": 1.5}}, "`augment.ops.jitter.p` must be a number in [0, 1]. Found: 1.5."),
        ({"changes": {"augment.crop.scale": 0.5}}, "`augment.crop.scale` must be a list of 2 numbers. Found: 0.5."),
        ({"changes": {"augment.crop.scale": [1, 0.5]}}, "`augment.crop.scale` must satisfy 0 < min <= max <= 1."),
        ({"changes": {"augment.crop.interpolation": "a,source.root=/etc"}}, "must be one of bilinear, bicubic. Found:"),
        ({"changes": ["augment.ops.jitter.p=1"]}, "`changes` must be a mapping of keys to values."),
        ({"samples": ["../../etc/passwd"]}, "`samples` must be a count, such as 5, or a list of sample numbers"),
        ({"samples": [65]}, "Not among them: 65."),
        ({"ops": {"source": [["root", None]]}}, "`ops` must map keys of the recipe to lists of operations."),
        ({"ops": {"augment.ops": [["x", "os.system"]]}}, "`ops` must list pairs: the name of an operation"),
        ({"ops": {"augment.ops": [["x,source.root=/etc", "gray"]]}}, "`ops` must list pairs: the name of an operation"),
        ({"ops": {"augment.ops": [["flip", None], ["flip", None]]}}, "`ops` must list pairs: the name of an operation"),
        ({"ops": {"augment.ops": [[["flip"], None]]}}, "`ops` must list pairs: the name of an operation"),
        ({"ops": {"augment.ops": [["jitter", "gray"]]}}, "`ops` must list pairs: the name of an operation"),
        ({"ops": {"augment.ops": 3}}, "`ops` must list pairs: the name of an operation"),
        ({"ops": ["augment.ops"]}, "`ops` must map keys of the recipe to lists of operations."),
        ({"recipe": "simclr,source.root=/etc"}, "`recipe` must be one of augmix, "),
        ({"recipe": ["simclr"]}, "`recipe` must be one of augmix, "),
        ({"seed": "${oc.env:HOME}"}, "`seed` must be a whole number >= 0"),
        ({"epoch": -1}, "`epoch` must be a whole number >= 0"),
        ({"out": "/tmp/picture.png"}, "A request must be a mapping with recipe, ops, changes, seed, samples, epoch."),
        (b"augment.ops.jitter.p=1", "The body must be JSON."),
        (b'{"changes": {"augment.ops.jitter.p": NaN}}', "`augment.ops.jitter.p` must be a number in"),
        (b"[" * 60000, "The body must be JSON."),
        ({"changes": {"augment.crop.size": 12_000}}, "The limit is 200 million."),
    ],
    ids=lambda value: str(value)[:40],
)
def test_other_changes_are_refused(asked: Any, message: str, page: Page) -> None:
    status, text = page.ask("render", asked)
    assert message in text.decode()
    assert status == 400


def test_no_file_can_be_asked_for(page: Page) -> None:
    token = urlsplit(page.url).path
    places = ["../../../../etc/passwd", "..%2f..%2f..%2fetc/passwd", "/etc/passwd", "server.py", "live.html", "state/x"]
    for place in (*places, "live.js/../server.py", "live.js%00", "%2e%2e/etc/passwd", "file:///etc/passwd"):
        assert page.ask(place)[0] == 404, place
    for whole in ("/", "/etc/passwd", token[:-2] + "/", token[:-1], f"/x{token}", "//", f"{token.upper()}state"):
        status, text = page.ask(whole, whole=True)
        assert status == 404, whole
        assert b"root:" not in text
    assert page.ask("render")[0] == page.ask("state")[0] == page.ask("live.js", {})[0] == 404  # GET and POST
    assert page.ask("render", b" " * 100_000)[0] == 413


def test_only_this_machine_is_answered(page: Page, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = urlsplit(page.url)
    for host in ("evil.example", f"evil.example:{address.port}", "127.0.0.1.evil.example", "localhost@evil.example"):
        for path, body in (("", None), ("state", {}), ("render", {})):
            assert page.ask(path, body, host)[0] == 403, host
    for origin in ("http://evil.example", f"http://127.0.0.1.evil.example:{address.port}", "null"):
        assert page.ask("render", {}, Origin=origin)[0] == 403, origin
    assert page.ask("state", {}, Origin="http://localhost:8000", Content_Type="text/plain; charset=nope")[0] == 200
    for host in (f"LOCALHOST:{address.port}", "127.0.0.1:8000"):  # the port may be that of a tunnel
        assert page.ask("state", {}, host=host)[0] == 200
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    assert [at for _, at, _, kind, *_ in listening if kind == "0A" and at.endswith(f":{address.port:04X}")] == [
        f"0100007F:{address.port:04X}"  # 127.0.0.1, and no other address of this machine
    ]
    for words, message in (
        (["serve=true", "host=0.0.0.0"], "host"),
        (["serve=true", f"port={address.port}"], f"`port={address.port}` cannot be used"),
        (["serve=true", "port=70000"], "`port` must be a whole number from 0 to 65535"),
        (["serve=true", "out=x.png"], "`serve=true` writes no file"),
        (["port=8000"], "`port=8000` has no effect without serve=true"),
    ):
        assert main(["preview", f"source.root={photos}", *words]) == 2
        assert message in capsys.readouterr().err


@contextmanager
def served(drawer: Any) -> Iterator[Page]:
    """A page in this process. ``drawer`` stands for the recipe."""
    server = PageServer(drawer)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield Page(None, server.address, ())
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_tabs_are_drawn_one_at_a_time() -> None:
    drawing = threading.Lock()

    class Slow:
        def render(self, asked: int) -> str:
            assert drawing.acquire(blocking=False)
            time.sleep(0.01)
            drawing.release()
            return f"{asked}"

    with served(Slow()) as page, ThreadPoolExecutor(5) as tabs:
        assert [*tabs.map(partial(page.ask, "render"), range(5))] == [(200, b"%d" % n) for n in range(5)]


def test_garbage_is_refused_silently_and_half_a_request_is_dropped(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuaug.tools.preview.server._Handler.timeout", 1.0)
    with served(SimpleNamespace()) as page:
        address = urlsplit(page.url)
        get = f"GET {address.path} HTTP/1.1\r\nHost: localhost\r\n".encode()
        post = get.replace(b"GET", b"POST").replace(b"/ HTTP", b"/state HTTP")
        for sent, status in (
            (b"\x16\x03\x01\xee\r\n\r\n", b"400"),
            (b"GET /" + b"a" * 99_999 + b"\r\n", b"414"),
            (post + b"Content-Length: -1\r\n\r\n", b"413"),
            (get, b""),
            (post + b"Content-Length: 9\r\n\r\n{", b""),
            (get + b"Connection: close\r\n\r\n", b"200"),
        ):
            with socket.create_connection(("127.0.0.1", address.port), timeout=60) as connection:
                connection.sendall(sent)
                answer = b"".join(iter(lambda: connection.recv(9999), b""))  # until the server closes the connection
            assert status in answer, sent
            assert bool(answer) == bool(status), sent
    assert capfd.readouterr() == ("", "")


def test_close_ends_the_page_of_a_notebook(photos: Path) -> None:
    """Its port is free, and its threads end."""
    before = threading.active_count()
    with gpuaug.preview_page([f"source.root={photos}", *FEW]) as page:
        address = urlsplit(page.src)
        assert f'src="{page.src}"' in page._repr_html_()
        assert b"<title>gpuaug preview</title>" in Page(None, page.src, ()).ask("")[1]
    page.close()
    with pytest.raises(ConnectionRefusedError):
        HTTPConnection("127.0.0.1", address.port or 0, timeout=10).connect()
    again = gpuaug.preview_page([f"source.root={photos}", *FEW, f"port={address.port}"])
    again.close()
    while threading.active_count() > before:  # threads that are about to end
        time.sleep(0.01)


def test_ctrl_c_does_not_wait_for_the_picture(photos: Path) -> None:
    words = (f"source.root={photos}", "augment=simclr", "augment.crop.size=32", "samples=2", "draws=9000", "cell=16")
    process = forked.Popen([*PROGRAM, "preview", "serve=true", *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    page = Page(process, process.stdout.readline().strip(), words)

    def draw() -> None:
        with suppress(OSError, HTTPException):  # the server ends before it answers
            page.ask("render", {})

    drawing = threading.Thread(target=draw)
    drawing.start()
    try:
        time.sleep(2)  # the picture takes far longer
        assert drawing.is_alive()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()
        drawing.join()


def test_loaders_of_earlier_changes_are_closed(page: Page) -> None:
    def opened() -> tuple[int, int, int]:
        folder = Path(f"/proc/{page.process.pid}")
        return len(tree(page.process.pid)), *(len(os.listdir(folder / name)) for name in ("fd", "task"))

    page.ask("render", {"changes": {"augment.ops.flip.p": 0.9}})
    before = opened()
    for n in range(4):
        assert page.ask("render", {"changes": {"augment.ops.flip.p": n / 10}})[0] == 200
    for _ in range(100):
        after = opened()
        if after[1] <= before[1] + 1 and after[2] <= before[2] + 1:  # the connection and its thread
            break
        time.sleep(0.1)  # threads of answered requests may still be ending
    else:
        pytest.fail(f"processes, files, threads: {before}, after four changes {after}")
    assert before[0] == after[0] == 1  # no worker


SLIDER = "document.querySelector('[data-key=\"augment.ops.gray.p\"] input[type=range]')"
DRAWN = (
    'document.getElementById("status") && document.getElementById("status").textContent.startsWith("drawn in") '
    '&& !document.body.matches(".working")'
)
HTML = 'document.querySelector("iframe").srcdoc'
OVERFLOW = """[...document.querySelectorAll("nav input[type=number], header input")]
    .filter((x) => x.scrollWidth > x.clientWidth).map((x) => x.value)"""


async def drive(page: Page, notebook: str) -> dict[str, Any]:
    """Change a recipe by every control, reload the page; then open ``notebook``, which shows the page in a frame."""
    seen: dict[str, Any] = {}

    async def keep(name: str, code: str = "") -> None:
        await tab.value(code or "0")
        await tab.until(DRAWN)
        seen[name] = shown(await tab.value(HTML))
        seen[f"{name}: words"] = shlex.split(await tab.value('document.getElementById("overrides").textContent'))[1:]

    async with browser() as tab:
        origin = page.url[: page.url.index("/", 8)]
        permissions = ["clipboardReadWrite", "clipboardSanitizedWrite"]
        await tab.call("Browser.grantPermissions", origin=origin, permissions=permissions)
        await tab.call("Emulation.setFocusEmulationEnabled", enabled=True)
        await tab.call("Page.navigate", url=page.url)
        await tab.until(DRAWN)
        await keep("before")
        await keep("gray", f"{SLIDER}.value = 1, {SLIDER}.dispatchEvent(new Event('input'))")
        await tab.value("document.getElementById('copy-overrides').click()")
        await tab.until('document.getElementById("status").textContent === "copied"')
        seen["copied"] = await tab.value("navigator.clipboard.readText()")
        await keep("compared", "document.getElementById('before').click()")
        await keep("compared again", "document.getElementById('before').click()")
        await tab.value(f"{SLIDER}.nextSibling.select(), {SLIDER}.nextSibling.focus()")
        await tab.call("Input.insertText", text="7")
        await tab.until('!document.getElementById("error").hidden && !document.body.matches(".working")')
        seen["error"] = await tab.value('document.getElementById("error").textContent')
        await keep("reset", "document.getElementById('reset').click()")
        await keep("off", "document.querySelector('[aria-label=\"augment.ops.jitter on or off\"]').click()")
        await keep("moved", "document.querySelector('[aria-label=\"augment.ops.flip later\"]').click()")
        await keep("moved", "document.querySelector('[aria-label=\"augment.ops.flip later\"]').click()")
        menu = "document.querySelector('[aria-label=\"add to augment.ops\"]')"
        await keep("added", f"{menu}.value = 'solarize', {menu}.nextSibling.click()")
        await keep("next", "document.getElementById('next').click()")
        seed = "document.getElementById('seed')"
        await keep("seed", f"{seed}.value = 7, {seed}.dispatchEvent(new Event('change'))")
        seen["samples"] = await tab.value("document.getElementById('samples').value")
        await tab.value("document.querySelector('iframe').contentDocument.querySelectorAll('label')[1].click()")
        seen["open"] = await tab.value("""[...document.querySelector('iframe').contentDocument.querySelectorAll('pre')]
            .filter((x) => x.getClientRects().length).map((x) => x.innerText)""")
        await tab.call("Page.reload")
        await tab.until(f"document.readyState === 'complete' && {DRAWN}")
        await keep("reloaded")
        recipe = "document.getElementById('recipe')"
        await keep("dino", f"{recipe}.value = 'dino', {recipe}.dispatchEvent(new Event('change'))")
        seen["overflow"] = await tab.value(OVERFLOW)
        entries = "performance.getEntriesByType('resource').map((entry) => entry.name)"
        seen["requests"] = await tab.value(entries)
        size = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        await tab.call("Emulation.setDeviceMetricsOverride", **size)
        await tab.until("innerWidth === 390")
        seen["narrow"] = await tab.value("document.documentElement.scrollWidth")
        seen["overflow"] += await tab.value(OVERFLOW)
        await tab.call("Page.navigate", url=notebook)
        await tab.until('document.querySelector("iframe") && document.readyState === "complete"')
        (frame,) = (await tab.call("Page.getFrameTree"))["frameTree"]["childFrames"]
        world = await tab.call("Page.createIsolatedWorld", frameId=frame["frame"]["id"])
        tab.context = {"contextId": world["executionContextId"]}
        await tab.until(DRAWN)
        await keep("frame")
    return seen


ADDRESSES = ("%", "5", "[5]", "null", '{"ops":null}', '{"changes":null}', '{"ops":{"augment.ops":5}}', '{"x":1}')


async def addresses(page: Page) -> dict[str, Any]:
    """What the page shows for bad addresses, for a pasted one, and while another recipe loads."""
    seen: dict[str, Any] = {}
    async with browser() as tab:
        for address in ADDRESSES:
            await tab.call("Page.navigate", url="about:blank")
            await tab.call("Page.navigate", url=f"{page.url}#{quote(address, safe='%')}")
            await tab.until(DRAWN)
            seen[address] = shown(await tab.value(HTML))
        await tab.call("Page.navigate", url="about:blank")
        wrong = json.dumps({"recipe": "no such", "changes": {}})
        await tab.call("Page.navigate", url=f"{page.url}#{quote(wrong)}")
        failed = 'document.getElementById("error") && !document.getElementById("error").hidden'
        await tab.until(f'{failed} && !document.body.matches(".working")')
        seen["status"] = await tab.value('document.getElementById("status").textContent')
        await tab.value("document.getElementById('reset').click()")
        await tab.until(DRAWN)
        seen["reset"] = shown(await tab.value(HTML))
        await tab.value(f"location.hash = {json.dumps('#' + quote(json.dumps({'seed': 4})))}")
        await tab.until(f"document.getElementById('seed').value === '4' && {DRAWN}")
        seen["pasted"] = shown(await tab.value(HTML))
        recipe, controls = "document.getElementById('recipe')", "document.getElementById('controls')"
        choose = f"{recipe}.value = 'dino', {recipe}.dispatchEvent(new Event('change')), {controls}.inert"
        seen["inert"] = await tab.value(choose)
        await tab.until(f"!{controls}.inert && {DRAWN}")
    return seen


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")
def test_addresses_in_a_browser(page: Page) -> None:
    seen = asyncio.run(addresses(page))
    plain, seeded = (shown(page.ask("render", asked)[1].decode()) for asked in ({}, {"seed": 4}))
    assert seen.pop("status") == "not drawn; Reset begins again"
    assert seen.pop("inert") is True
    assert seen.pop("pasted") == seeded
    assert [name for name, pictures in seen.items() if pictures != plain] == []


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")
def test_in_a_browser(page: Page, tmp_path: Path) -> None:
    """Each control changes the pictures and the overrides; the address keeps the changes; a notebook shows the page."""
    (tmp_path / "index.html").write_text(LivePage._repr_html_(SimpleNamespace(src=page.url)))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path)) as notebook:
        threading.Thread(target=notebook.serve_forever, daemon=True).start()
        seen = asyncio.run(drive(page, f"http://127.0.0.1:{notebook.server_port}/"))
        notebook.shutdown()

    def rendered(**asked: Any) -> Any:
        return shown(page.ask("render", asked)[1].decode())

    gray = {"augment.ops.gray.p": 1.0}
    assert seen["before"] == seen["compared"] == seen["reset"] == seen["frame"] == rendered()
    assert seen["gray"] == seen["compared again"] == rendered(changes=gray)
    assert shlex.split(seen["copied"])[1:] == ["augment=simclr", "augment.ops.gray.p=1.0"] == seen["gray: words"]
    assert seen["error"] == "`augment.ops.gray.p` must be a number in [0, 1]. Found: 7.0."
    assert seen["off: words"] == ["augment=simclr", "~augment.ops.jitter"]
    order = [["gray", None], ["flip", None], ["blur", None]]
    assert seen["moved"] == rendered(ops={"augment.ops": order})
    assert seen["added"] == rendered(ops={"augment.ops": [*order, ["solarize", "solarize"]]})
    final = {"ops": {"augment.ops": [*order, ["solarize", "solarize"]]}, "samples": [18, 50], "seed": 7}
    assert seen["samples"] == "18, 50"
    assert seen["next"] == rendered(**{**final, "seed": 0})
    assert seen["seed"] == seen["reloaded"] == rendered(**final)
    assert seen["open"] == [unescape(seen["seed"][1][1])]
    assert seen["dino: words"] == ["augment=dino", "seed=7"]
    assert seen["dino"] == rendered(recipe="dino", samples=[18, 50], seed=7)
    assert seen["overflow"] == []  # numbers that do not fit their boxes
    assert seen["narrow"] <= 390
    assert all(address.startswith(page.url) for address in seen["requests"])


async def enlarge(file: Path, width: int) -> dict[str, Any]:
    """Read the tooltips of a page of `gpuaug preview`; click on a picture, and again."""
    seen: dict[str, Any] = {}
    count = 'document.querySelectorAll("figure").values().filter((x) => x.getClientRects().length).toArray().length'
    async with browser(width) as tab:
        await tab.call("Page.navigate", url=file.as_uri())
        await tab.until('document.readyState === "complete" && document.querySelector("label[title] img") !== null')
        seen["titles"] = await tab.value('[...document.querySelectorAll("label")].map((x) => x.title)')
        seen["all"] = await tab.value(count)
        tops = '[...document.querySelectorAll("main > div")].map((row) => [...row.children].map((x) => x.offsetTop))'
        seen["tops"] = await tab.value(tops)
        seen["wide"] = await tab.value("document.documentElement.scrollWidth")
        await tab.value('document.querySelectorAll("label")[2].click()')
        await tab.until(f"{count} < {seen['all']}")
        seen["open"] = await tab.value(count)
        shown = '[...document.querySelectorAll("pre")].filter((x) => x.getClientRects().length).map((x) => x.innerText)'
        seen["details"] = await tab.value(shown)
        seen["sides"] = await tab.value(
            '[...document.querySelectorAll("figure:has(:checked) img")].map((x) => x.getBoundingClientRect().width)'
        )
        await tab.value('document.querySelectorAll("label")[2].click()')
        await tab.until(f"{count} === {seen['all']}")
    return seen


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_explains_and_enlarges_its_pictures(width: int, photos: Path, tmp_path: Path) -> None:
    words = [f"source.root={photos}", "augment=simclr", "augment.crop.size=48", "num_workers=0", "device=cpu"]
    assert main(["preview", *words, "samples=2", "draws=2", f"out={tmp_path}/x.html"]) == 0
    seen = asyncio.run(enlarge(tmp_path / "x.html", width))
    with gpuaug.build(gpuaug.compose("train", words)) as loader:
        indices = [int(x) for x in re.findall(r"<p>(\d+): ", (tmp_path / "x.html").read_text())]
        batches = [loader.fetch(indices, epoch=epoch) for epoch in (0, 1)]
    expected = []
    for row in range(2):
        expected += ["", *("\n".join(view.lines) for batch in batches for view in batch.explain(row))]
    assert seen["titles"] == expected
    assert seen["details"] == [expected[2]]
    assert (seen["all"], seen["open"]) == (10, 7)  # of this row, only the original and the picture
    assert min(seen["sides"]) > (400 if width == 1280 else 280)
    if width == 1280:  # columns: all pictures of a row begin at one height
        assert all(len(set(row)) == 1 for row in seen["tops"])
    else:
        assert seen["wide"] <= width
