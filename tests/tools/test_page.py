"""The page of `gpuaug preview` in a real browser: slider, keys, links, light and dark. Needs chromium, chromedriver."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.request
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gpuaug.tools.preview import command as preview
from gpuaug.tools.preview import page
from gpuaug.tools.samples import Sample

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    BROWSER is None or DRIVER is None, reason="no chromium with chromedriver: apt-get install chromium chromium-driver"
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--window-size=1000,800",
)  # fmt: skip
KEYS = {"left": "\ue012", "right": "\ue014", "home": "\ue011", "end": "\ue010", "tab": "\ue004", "space": " "}
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


class Browser:
    """The few words of the WebDriver protocol (w3.org/TR/webdriver2) that are needed here."""

    def __init__(self, port: str, profile: Path) -> None:
        self._at = f"http://127.0.0.1:{port}/session"
        options = {"binary": BROWSER, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        logs = {"browser": "ALL"}
        wanted = {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": logs}}
        self._at += f"/{self._call('', {'capabilities': wanted})['sessionId']}"

    def _call(self, path: str, body: Any = None, method: str = "POST") -> Any:
        data = json.dumps({} if body is None else body).encode() if method == "POST" else None
        request = urllib.request.Request(self._at + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=300) as answer:
            return json.load(answer)["value"]

    def open(self, address: str) -> None:
        self._call("/url", {"url": address})

    def run(self, script: str) -> Any:
        return self._call("/execute/sync", {"script": script, "args": []})

    def press(self, *names: str) -> None:
        keys = [{"type": kind, "value": KEYS[n]} for n in names for kind in ("keyDown", "keyUp")]
        self._call("/actions", {"actions": [{"type": "key", "id": "keys", "actions": keys}]})

    def click(self, selector: str) -> None:
        found = self._call("/element", {"using": "css selector", "value": selector})
        self._call(f"/element/{next(iter(found.values()))}/click")

    def dark(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        command = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}}
        self._call("/goog/cdp/execute", command)

    def screenshot(self) -> np.ndarray:
        with Image.open(io.BytesIO(b64decode(self._call("/screenshot", method="GET")))) as image:
            return np.asarray(image.convert("RGB"))

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self._call("/se/log", {"type": "browser"})]

    def close(self) -> None:
        self._call("", method="DELETE")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with tempfile.TemporaryDirectory() as profile:
        driver = subprocess.Popen([str(DRIVER), "--port=0"], stdout=subprocess.PIPE, text=True)
        try:
            assert driver.stdout is not None
            found = (re.search(r"successfully on port (\d+)", line) for line in iter(driver.stdout.readline, ""))
            port = next(match[1] for match in found if match)
            try:
                session = Browser(port, Path(profile))
            except OSError as error:  # among them the driver's answer that the browser did not start
                pytest.skip(f"the browser does not start: {error}")
            yield session
            session.close()
        finally:
            driver.terminate()
            driver.wait(100)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two views: the first is red, green, blue in epochs 5, 6, 7."""
    path = tmp_path_factory.mktemp("page") / "p.html"
    pictures = [Image.new("RGB", size, color) for color in (RED, GREEN, BLUE) for size in ((64, 64), (32, 32))]
    boxes = [(n, 0, n + 20, 10) for n in range(6)]
    samples = [
        Sample(n, f"a/{n}.jpg", "a", Image.new("RGB", (80, 60), (128, 128, 128)), boxes, pictures) for n in (3, 8)
    ]
    text = page.page(
        samples, heading="test", lines=["two"], epochs=[5, 6, 7], views=["big", "small"], color=preview.color
    )
    path.write_text(text, encoding="utf-8")
    return path


def state(browser: Browser) -> tuple[str, str, list[int]]:
    """What is shown: the text, the slider's value as it is read out, and the color of the first picture."""
    deadline = time.monotonic() + 100
    while not browser.run("return [...document.images].every((i) => i.complete && i.naturalWidth > 0)"):
        assert time.monotonic() < deadline, "pictures do not load"
    pixel = browser.run(
        "const c = document.createElement('canvas').getContext('2d');"
        "c.drawImage(document.querySelector('img[data-view]'), 0, 0); return [...c.getImageData(9, 9, 1, 1).data]"
    )
    read = browser.run("return document.getElementById('epoch').getAttribute('aria-valuetext')")
    return browser.run("return document.getElementById('shown').textContent"), read, pixel[:3]


def test_a_link_opens_its_epoch_and_the_slider_moves_it(browser: Browser, file: Path) -> None:
    browser.open("about:blank")
    browser.open(f"{file.as_uri()}#epoch=6")
    assert state(browser) == ("epoch 6", "epoch 6", list(GREEN))
    browser.run("document.getElementById('epoch').focus()")
    browser.press("right")
    assert state(browser) == ("epoch 7", "epoch 7", list(BLUE))
    assert browser.run("return location.hash") == "#epoch=7"
    browser.press("home")
    assert state(browser) == ("epoch 5", "epoch 5", list(RED))
    browser.run("location.hash = '#epoch=6'")
    deadline = time.monotonic() + 100
    while state(browser)[0] != "epoch 6":  # the event of it comes by itself
        assert time.monotonic() < deadline
    browser.open("about:blank")
    browser.open(f"{file.as_uri()}#epoch=99")
    assert state(browser)[0] == "epoch 5"


def test_everything_can_be_reached_with_keys_alone(browser: Browser, file: Path) -> None:
    browser.open("about:blank")
    browser.open(file.as_uri())
    browser.press("right")  # wherever the focus is
    assert state(browser)[2] == list(GREEN)
    browser.press("end")
    browser.press("right")  # there is none after the last
    assert state(browser)[2] == list(BLUE)
    reached = []
    for _ in range(4):
        browser.press("tab")
        reached.append(browser.run("return document.activeElement.id"))
        outline = browser.run("return getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"
    assert reached == ["back", "epoch", "forth", "play"]
    browser.press("space")
    assert browser.run("return document.getElementById('play').textContent") == "pause"
    deadline = time.monotonic() + 100
    while state(browser)[0] == "epoch 7":
        assert time.monotonic() < deadline, "it does not play"
    browser.press("space")
    assert browser.run("return document.getElementById('play').getAttribute('aria-pressed')") == "false"
    browser.click("#back")
    shown = state(browser)[0]
    browser.click("#forth")
    assert state(browser)[0] != shown or shown == "epoch 7"


def test_boxes_names_and_sizes(browser: Browser, file: Path) -> None:
    browser.open("about:blank")
    browser.open(f"{file.as_uri()}#epoch=6")
    state(browser)
    rect = "document.querySelectorAll('#sample-1 rect')[1]"
    assert browser.run(f"return ['x','y','width','height'].map((n) => {rect}.getAttribute(n))") == [
        "3",
        "0",
        "20",
        "10",
    ]
    names = browser.run("return [...document.querySelectorAll('#sample-1 img')].map((i) => i.alt)")
    assert names == ["sample 8, original", "sample 8, big, epoch 6", "sample 8, small, epoch 6"]
    widths = browser.run("return [...document.querySelectorAll('#sample-1 img[data-view]')].map((i) => i.width)")
    assert widths == [224, 112]  # small views keep their size relative to large ones
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")


def test_light_and_dark_are_both_readable_and_nothing_is_fetched(browser: Browser, file: Path) -> None:
    for scheme, background in (("light", 255), ("dark", 22)):
        browser.dark(scheme)
        browser.open("about:blank")
        browser.open(file.as_uri())
        state(browser)
        shot = browser.screenshot().astype(int)
        assert abs(shot[5, 5, 0] - background) <= 4
        assert any((shot == color).all(axis=2).sum() > 40_000 for color in (RED,))  # 224 x 224, on the screen itself
        for selector in ("h1", "header p", "figcaption", "button", "footer"):
            assert contrast(browser, selector) >= 4.5, (scheme, selector)  # WCAG 2.2, AA
    assert browser.complaints() == []  # the policy of the page would name what it kept from loading
    names = browser.run("return performance.getEntriesByType('resource').map((r) => r.name.slice(0, 5))")
    assert set(names) <= {"data:"}


def contrast(browser: Browser, selector: str) -> float:
    """Ratio of the luminances of an element's text and of what is behind it, as WCAG defines it."""
    colors = browser.run(
        f"let e = document.querySelector('{selector}'); const ink = getComputedStyle(e).color; let paper = '';"
        "for (; e; e = e.parentElement) { paper = getComputedStyle(e).backgroundColor;"
        "if (paper !== 'rgba(0, 0, 0, 0)') break; } return [ink, paper]"
    )
    values = []
    for color in colors:
        channels = np.array([int(v) for v in re.findall(r"\d+", color)[:3]]) / 255
        linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
        values.append(float(linear @ [0.2126, 0.7152, 0.0722]))
    return (max(values) + 0.05) / (min(values) + 0.05)
