"""`gpuaug preview serve=true`: the page draws what the command draws, copies the recipe, and gives out nothing else."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import forked
import numpy as np
import pytest
from common import PROGRAM, tree
from PIL import Image

import gpuaug
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


def pixels(png: bytes | Path) -> np.ndarray[Any, Any]:
    with Image.open(png if isinstance(png, Path) else io.BytesIO(png)) as image:
        return np.asarray(image.convert("RGB"))


def test_the_picture_is_that_of_the_command(page: Page, tmp_path: Path) -> None:
    for asked, more in (({}, []), ({"changes": CHANGES, "epoch": 2, "indices": [7]}, [*WORDS, "epoch=2", "indices=7"])):
        status, png = page.ask("render", asked)
        assert status == 200, png
        assert main(["preview", *page.words, *more, f"out={tmp_path}/p.png"]) == 0
        assert np.array_equal(pixels(png), pixels(tmp_path / "p.png"))


def test_what_is_copied_are_overrides(page: Page, photos: Path) -> None:
    words = shlex.split(page.ask("overrides", {"changes": CHANGES})[1].decode())
    assert words == [f"source.root={photos}", "augment=simclr", *WORDS]


def recipe(*words: str) -> dict[str, Any]:
    return gpuaug.build(gpuaug.compose("train", words).augment).fingerprint()


@pytest.mark.parametrize("name", ["dino", "augmix"])
def test_every_parameter_can_be_changed_and_copied(name: str, photos: Path) -> None:
    """All numbers of the recipe's own file have a control. The values here are others, but near."""
    shown = live(f"source.root={photos}", f"augment={name}")
    values = {c.key: c.value for c in shown.controls}
    config = gpuaug.compose("train", [f"augment={name}"])
    assert {key for key in numbers(config.augment, "augment") if "normalize" not in key} <= values.keys()
    changes = {c.key: c.choices[0] if c.choices else nearby(c.value) for c in shown.controls if c.name != "alpha"}
    words = shlex.split(shown.overrides({"changes": changes}))
    copied = {c.key: c.value for c in live(*words).controls}
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
    out = ["samples=2", "draws=1", f"out={tmp_path}/p.png"]
    shown = live(f"train_data.source.root={photos}", *FEW, config_dir=str(tmp_path), config_name="app", at="train_data")
    changes = {"train_data.augment.ops.gray.p": 1.0}
    words = shlex.split(shown.overrides({"changes": changes}))
    assert words[-1] == "train_data.augment.ops.gray.p=1.0"
    assert main(["preview", *words, *out]) == 0
    assert not np.array_equal(pixels(shown.render({"changes": changes})), pixels(shown.render()))


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
        ({"indices": ["../../etc/passwd"]}, "`indices` must be a list of sample numbers"),
        ({"indices": [65]}, "Not among them: 65."),
        ({"epoch": -1}, "`epoch` must be a whole number >= 0"),
        ({"out": "/tmp/picture.png"}, "A request must be a mapping with changes, indices, epoch."),
        (b"augment.ops.jitter.p=1", "The body must be JSON."),
        (b'{"changes": {"augment.ops.jitter.p": NaN}}', "`augment.ops.jitter.p` must be a number in"),
        (b"[" * 60000, "The body must be JSON."),
        ({"changes": {"augment.crop.size": 12_000}}, "The limit is 200 million."),
    ],
    ids=lambda value: str(value)[:40],
)
def test_other_changes_are_refused(asked: Any, message: str, page: Page) -> None:
    status, text = page.ask("render", asked)
    assert status == 400
    assert message in text.decode()


def test_no_file_can_be_asked_for(page: Page) -> None:
    token = urlsplit(page.url).path
    places = ["../../../../etc/passwd", "..%2f..%2f..%2fetc/passwd", "/etc/passwd", "server.py", "live.html", "state/x"]
    for place in (*places, "live.js/../server.py", "live.js%00", "%2e%2e/etc/passwd", "file:///etc/passwd"):
        assert page.ask(place)[0] == 404, place
    for whole in ("/", "/etc/passwd", token[:-2] + "/", token[:-1], f"/x{token}", "//", f"{token.upper()}state"):
        status, text = page.ask(whole, whole=True)
        assert status == 404, whole
        assert b"root:" not in text
    assert page.ask("render")[0] == page.ask("state", {})[0] == 404  # GET and POST are exchanged
    assert page.ask("render", b" " * 100_000)[0] == 413


def test_only_this_machine_is_answered(page: Page, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = urlsplit(page.url)
    for host in ("evil.example", f"evil.example:{address.port}", "127.0.0.1.evil.example", "localhost@evil.example"):
        for path, body in (("", None), ("state", None), ("render", {})):
            assert page.ask(path, body, host)[0] == 403, host
    for origin in ("http://evil.example", f"http://127.0.0.1.evil.example:{address.port}", "null"):
        assert page.ask("render", {}, Origin=origin)[0] == 403, origin
    assert page.ask("overrides", {}, Origin="http://localhost:8000", Content_Type="text/plain; charset=nope")[0] == 200
    for host in (f"LOCALHOST:{address.port}", "127.0.0.1:8000"):  # the port may be that of a tunnel
        assert page.ask("state", host=host)[0] == 200
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
        def render(self, asked: int) -> bytes:
            assert drawing.acquire(blocking=False)
            time.sleep(0.01)
            drawing.release()
            return b"%d" % asked

    with served(Slow()) as page, ThreadPoolExecutor(5) as tabs:
        assert [*tabs.map(partial(page.ask, "render"), range(5))] == [(200, b"%d" % n) for n in range(5)]


def test_garbage_is_refused_silently_and_half_a_request_is_dropped(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuaug.tools.preview.server._Handler.timeout", 1.0)
    with served(SimpleNamespace(state=dict)) as page:
        address = urlsplit(page.url)
        get = f"GET {address.path}state HTTP/1.1\r\nHost: localhost\r\n".encode()
        post = get.replace(b"GET", b"POST").replace(b"state", b"overrides")
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


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Tab:
    """A page in a browser, controlled by the DevTools protocol."""

    def __init__(self, socket: Any) -> None:
        self.socket, self.count = socket, 0
        self.context: dict[str, int] = {}  # set if the page to evaluate in is an inner frame

    async def call(self, method: str, **arguments: Any) -> Any:
        self.count += 1
        await self.socket.send_json({"id": self.count, "method": method, "params": arguments})
        while (answer := await self.socket.receive_json(timeout=60)).get("id") != self.count:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    async def value(self, code: str) -> Any:
        """The value of an expression, which may be a promise."""
        asked = {"expression": code, "awaitPromise": True, "returnByValue": True, "userGesture": True, **self.context}
        found = await self.call("Runtime.evaluate", **asked)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, code: str) -> None:
        """Wait until the expression is true."""
        for _ in range(600):
            if await self.value(code):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"never true: {code}; {await self.value('document.body.innerText')}")


@asynccontextmanager
async def browser(folder: str) -> Any:
    """A tab of a headless Chromium whose profile is in ``folder``."""
    switches = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0"]
    switches += ["--no-sandbox"] * (os.geteuid() == 0)  # Chromium has no sandbox for root
    command = [str(CHROMIUM), *switches, f"--user-data-dir={folder}", "--window-size=1400,900", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        ready = Path(folder) / "DevToolsActivePort"
        for _ in range(1200):
            if ready.exists() and len(lines := ready.read_text().split()) == 2:
                break
            await asyncio.sleep(0.05)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{lines[0]}/json") as answer:
                (tab,) = [each for each in await answer.json() if each["type"] == "page"]
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Tab(socket)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


SHOWN = """(async () => {
  const drawn = document.getElementById("picture"), canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [drawn.naturalWidth, drawn.naturalHeight];
  canvas.getContext("2d").drawImage(drawn, 0, 0);
  return canvas.toDataURL("image/png").split(",")[1];
})()"""
SLIDER = "document.querySelector('[data-key=\"augment.ops.gray.p\"] input[type=range]')"
DRAWN = 'document.getElementById("status").textContent.startsWith("drawn in") && !document.body.matches(".working")'


async def drive(page: Page, notebook: str) -> dict[str, Any]:
    """Move a slider, copy, type a wrong value; then open ``notebook``, which shows the page in a frame."""
    seen: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        async with browser(folder) as tab:
            origin = page.url[: page.url.index("/", 8)]
            permissions = ["clipboardReadWrite", "clipboardSanitizedWrite"]
            await tab.call("Browser.grantPermissions", origin=origin, permissions=permissions)
            await tab.call("Emulation.setFocusEmulationEnabled", enabled=True)
            await tab.call("Log.enable")
            await tab.call("Page.navigate", url=page.url)
            await tab.until(f'document.getElementById("status") && {DRAWN}')
            seen["before"] = pixels(base64.b64decode(await tab.value(SHOWN)))
            await tab.value(f"{SLIDER}.value = 1, {SLIDER}.dispatchEvent(new Event('input'))")
            await tab.until(DRAWN)
            seen["after"] = pixels(base64.b64decode(await tab.value(SHOWN)))
            await tab.value("document.getElementById('copy-overrides').click()")
            await tab.until('document.getElementById("status").textContent === "copied"')
            seen["overrides"] = await tab.value("navigator.clipboard.readText()")
            await tab.value(f"{SLIDER}.nextSibling.select(), {SLIDER}.nextSibling.focus()")
            await tab.call("Input.insertText", text="7")
            await tab.until('!document.getElementById("error").hidden && !document.body.matches(".working")')
            seen["error"] = await tab.value('document.getElementById("error").textContent')
            await tab.value("document.getElementById('reset').click()")
            await tab.until(f'document.getElementById("error").hidden && {DRAWN}')
            seen["reset"] = pixels(base64.b64decode(await tab.value(SHOWN)))
            entries = "performance.getEntriesByType('resource').map((entry) => entry.name)"
            seen["requests"] = await tab.value(entries)
            await tab.call("Page.navigate", url=notebook)
            await tab.until('document.querySelector("iframe") && document.readyState === "complete"')
            (frame,) = (await tab.call("Page.getFrameTree"))["frameTree"]["childFrames"]
            world = await tab.call("Page.createIsolatedWorld", frameId=frame["frame"]["id"])
            tab.context = {"contextId": world["executionContextId"]}
            await tab.until(f'document.getElementById("status") && {DRAWN}')
            seen["frame"] = pixels(base64.b64decode(await tab.value(SHOWN)))
    return seen


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")
def test_in_a_browser(page: Page, tmp_path: Path) -> None:
    """A slider moves, the picture changes, what is copied builds the same recipe; a notebook shows the page too."""
    (tmp_path / "index.html").write_text(LivePage._repr_html_(SimpleNamespace(src=page.url)))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path)) as notebook:
        threading.Thread(target=notebook.serve_forever, daemon=True).start()
        seen = asyncio.run(drive(page, f"http://127.0.0.1:{notebook.server_port}/"))
        notebook.shutdown()
    gray = {"changes": {"augment.ops.gray.p": 1.0}}
    assert np.array_equal(seen["before"], pixels(page.ask("render", {})[1]))
    assert np.array_equal(seen["after"], pixels(page.ask("render", gray)[1]))
    assert not np.array_equal(seen["before"], seen["after"])
    assert np.array_equal(seen["reset"], seen["before"])
    assert np.array_equal(seen["frame"], seen["before"])
    assert shlex.split(seen["overrides"])[1:] == ["augment=simclr", "augment.ops.gray.p=1.0"]
    assert seen["error"] == "`augment.ops.gray.p` must be a number in [0, 1]. Found: 7.0."
    assert all(address.startswith((page.url, f"blob:{page.url[:16]}")) for address in seen["requests"])


async def enlarge(file: Path, width: int) -> dict[str, Any]:
    """Read the tooltips of a page of `gpuaug preview`; click on a picture, and again."""
    seen: dict[str, Any] = {}
    count = 'document.querySelectorAll("figure").values().filter((x) => x.getClientRects().length).toArray().length'
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        async with browser(folder) as tab:
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            await tab.call("Emulation.setDeviceMetricsOverride", **size)
            await tab.call("Page.navigate", url=file.as_uri())
            await tab.until('document.readyState === "complete" && document.querySelector("label[title] img") !== null')
            seen["titles"] = await tab.value('[...document.querySelectorAll("label")].map((x) => x.title)')
            seen["all"] = await tab.value(count)
            tops = (
                '[...document.querySelectorAll("main > div")].map((row) => [...row.children].map((x) => x.offsetTop))'
            )
            seen["tops"] = await tab.value(tops)
            seen["wide"] = await tab.value("document.documentElement.scrollWidth")
            await tab.value('document.querySelectorAll("label")[2].click()')
            await tab.until(f"{count} < {seen['all']}")
            seen["open"] = await tab.value(count)
            shown = (
                '[...document.querySelectorAll("pre")].filter((x) => x.getClientRects().length).map((x) => x.innerText)'
            )
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
