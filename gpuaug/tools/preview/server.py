"""`gpuaug preview serve=true`: serves a page with sliders for a recipe, to this machine only.

No request names a file, and the path of every address begins with a random token. Another web page could let its own
host name point to this machine (DNS rebinding). So only the host names 127.0.0.1 and localhost are accepted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import secrets
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuaug.errors import ConfigError, GpuaugError
from gpuaug.tools.preview.live import Live

if TYPE_CHECKING:
    from aiohttp import web

    from gpuaug.tools.preview.drawing import Settings
    from gpuaug.tools.request import Request

log = logging.getLogger("gpuaug")

HOST = "127.0.0.1"
LOCAL = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?", re.IGNORECASE)  # any port: an SSH tunnel may use another one
LARGEST_BODY = 1 << 16  # bytes
TIMEOUT_S = 20.0  # seconds that a request may take to arrive
FILES = {"": "live.html", "live.js": "live.js"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors http://127.0.0.1:* http://localhost:* https://localhost:* vscode-webview:",  # notebooks
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def main(request: Request, settings: Settings) -> int:
    """Serve the page until Ctrl-C."""
    worker = ThreadPoolExecutor(1)
    served, listening, address = prepared(request, settings, worker)
    with listening:
        print(address, flush=True)
        log.info("open this address in a browser on this machine; Ctrl-C ends the page")
        log.setLevel(logging.WARNING)  # each change builds a loader, which would log the same lines again
        with suppress(KeyboardInterrupt):
            asyncio.run(serve(served, listening))
    idle = worker.submit(int)  # this empty task waits while a picture is being drawn
    worker.shutdown(wait=False)
    if not wait([idle], timeout=0.1).done:
        sys.stdout.flush()
        os._exit(0)  # a normal exit would wait for the thread that draws
    return 0


def prepared(
    request: Request, settings: Settings, worker: ThreadPoolExecutor
) -> tuple[web.Application, socket.socket, str]:
    """The page's routes, its listening socket and its address. ``worker`` must have one thread."""
    try:
        import aiohttp  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"The live page needs aiohttp ({error}). Install it: pip install 'gpuaug[live]'.") from error
    live, token = Live(request, settings), secrets.token_urlsafe(16)
    try:
        listening = socket.create_server((HOST, settings.port))
    except OSError as error:
        raise ConfigError(f"`port={settings.port}` cannot be used: {error}. port=0 takes a free port.") from error
    return application(live, token, worker), listening, f"http://{HOST}:{listening.getsockname()[1]}/{token}/"


async def serve(served: web.Application, listening: socket.socket, *, timeout: float = TIMEOUT_S) -> None:
    """Answer requests until this task is cancelled. A connection may take ``timeout`` seconds to send its request."""
    from aiohttp import web

    silent = logging.Logger("gpuaug.live")  # aiohttp logs a traceback for every request that is not HTTP
    silent.addHandler(logging.NullHandler())
    runner = web.AppRunner(served, access_log=None, logger=silent, shutdown_timeout=1, keepalive_timeout=timeout)
    await runner.setup()
    loop, waiting = asyncio.get_running_loop(), set[Any]()  # connections without a request
    assert runner.server is not None
    answer = runner.server.request_handler

    async def hear(request: web.BaseRequest) -> web.StreamResponse:
        waiting.discard(request.protocol)
        return await answer(request)

    runner.server.request_handler = hear

    def drop(protocol: Any) -> None:
        if protocol in waiting:
            waiting.discard(protocol)
            protocol.force_close()

    def connected() -> Any:
        assert runner.server is not None
        protocol = runner.server()
        waiting.add(protocol)
        loop.call_later(timeout, drop, protocol)
        return protocol

    try:
        async with await loop.create_server(connected, sock=listening) as server:
            await server.serve_forever()
    finally:
        await runner.cleanup()


def _guard(token: str) -> Any:
    """A middleware that refuses other hosts, requests from other pages, and addresses without the token."""
    from aiohttp import web

    @web.middleware
    async def guarded(request: web.Request, handler: Any) -> web.StreamResponse:
        origin = request.headers.get("Origin", f"http://{HOST}")  # the server whose page sent the request
        if not all(map(LOCAL.fullmatch, (request.headers.get("Host", ""), origin.partition("//")[2]))):
            raise web.HTTPForbidden(text="This page is only for 127.0.0.1 and localhost.")
        first = request.path.removeprefix("/").partition("/")[0]
        if not secrets.compare_digest(first.encode("utf-8", "replace"), token.encode()):
            raise web.HTTPNotFound(text="There is nothing here. Open the address that the terminal shows.")
        return await handler(request)

    return guarded


def application(live: Live, token: str, worker: ThreadPoolExecutor) -> web.Application:
    """The page's routes. ``worker`` must have one thread. A waiting picture is not drawn if its page was closed."""
    from aiohttp import web

    async def headers(_: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(HEADERS)

    async def file(_: web.Request, *, name: str) -> web.FileResponse:
        return web.FileResponse(Path(__file__).with_name(name))

    async def state(_: web.Request) -> web.Response:
        return web.json_response(live.state())

    async def made(request: web.Request, *, make: Callable[[Any], str | bytes]) -> web.Response:
        try:
            asked = json.loads(await asyncio.wait_for(request.read(), TIMEOUT_S))
        except (ValueError, RecursionError, TimeoutError) as error:
            raise web.HTTPBadRequest(text="The body must be JSON.") from error
        try:
            answer = await asyncio.get_running_loop().run_in_executor(worker, make, asked)
        except GpuaugError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        except (MemoryError, OSError, RuntimeError) as error:  # no memory, source gone, error in torch
            raise web.HTTPInternalServerError(text=f"{type(error).__name__}: {error}") from error
        if isinstance(answer, bytes):
            return web.Response(body=answer, content_type="image/png")
        return web.Response(text=answer)

    async def render(request: web.Request) -> web.Response:
        def picture(asked: Any) -> bytes:
            if request.transport is None:
                raise ConfigError("the page that asked for this picture was closed.")
            return live.png(asked)

        return await made(request, make=picture)

    served = web.Application(middlewares=[_guard(token)], client_max_size=LARGEST_BODY)
    served.on_response_prepare.append(headers)
    for place, name in FILES.items():
        served.router.add_get(f"/{token}/{place}", partial(file, name=name))
    served.router.add_get(f"/{token}/state", state)
    served.router.add_post(f"/{token}/render", render)
    served.router.add_post(f"/{token}/overrides", partial(made, make=live.overrides))
    served.router.add_post(f"/{token}/yaml", partial(made, make=live.yaml))
    return served
