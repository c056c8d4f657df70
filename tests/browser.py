"""A headless Chromium, controlled by the DevTools protocol."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

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
async def browser(width: int = 1280, height: int = 900) -> Any:
    """A tab of a headless Chromium whose window has this size."""
    folder = tempfile.mkdtemp()  # the profile
    switches = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0"]
    switches += ["--no-sandbox"] * (os.geteuid() == 0)  # Chromium has no sandbox for root
    command = [str(CHROMIUM), *switches, f"--user-data-dir={folder}", "--window-size=1280,900", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        ready = Path(folder) / "DevToolsActivePort"
        for _ in range(1200):
            if ready.exists() and len(lines := ready.read_text().split()) == 2:
                break
            await asyncio.sleep(0.05)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{lines[0]}/json") as answer:
                (first,) = [each for each in await answer.json() if each["type"] == "page"]
            async with session.ws_connect(first["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                tab = Tab(socket)
                size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
                await tab.call("Emulation.setDeviceMetricsOverride", **size)
                yield tab
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)
