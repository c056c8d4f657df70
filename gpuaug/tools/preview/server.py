"""The page of `gpuaug preview serve=true`: draws samples again after each change, for this machine and for notebooks.

No request names a file, and the path of every address begins with a random token. Another web page could let its own
host name point to this machine (DNS rebinding). So only the host names 127.0.0.1 and localhost are accepted.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shlex
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
from omegaconf import DictConfig

from gpuaug import checks
from gpuaug.config import group_options
from gpuaug.display.sheet import page
from gpuaug.errors import ConfigError, GpuaugError
from gpuaug.source.adapt import active_numbers
from gpuaug.tools.preview.controls import Control, arranged, changed, controls, examples, operations
from gpuaug.tools.preview.drawing import SHOWN, Settings, chosen, drawing, recipe_of
from gpuaug.tools.request import Request

log = logging.getLogger("gpuaug")

HOST = "127.0.0.1"
LOCAL = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?", re.IGNORECASE)  # any port: an SSH tunnel may use another one
LARGEST_BODY = 1 << 16  # bytes
TEXT = "text/plain; charset=utf-8"
FILES = {"": ("live.html", "text/html; charset=utf-8"), "live.js": ("live.js", "text/javascript; charset=utf-8")}
PLACES = {"GET": (*FILES,), "POST": ("state", "render")}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors http://127.0.0.1:* http://localhost:* https://localhost:* vscode-webview:",  # notebooks
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def main(request: Request, settings: Settings) -> int:
    """Serve the page until Ctrl-C."""
    with PageServer(Live(request, settings), port=settings.port) as server:
        print(server.address, flush=True)
        log.info("open this address in a browser on this machine; Ctrl-C ends the page")
        log.setLevel(logging.WARNING)  # each change builds a loader, which would log the same lines again
        with suppress(KeyboardInterrupt):
            server.serve_forever()
        if server.drawing.locked():
            sys.stdout.flush()
            os._exit(0)  # a normal exit could crash, because it frees what the drawing thread still uses
    return 0


# Keys of a request, all optional. `recipe`: another recipe's name. `ops`: see `arranged` in controls.py. `changes`: new
# values of parameters, by key.
QUESTION = ("recipe", "ops", "changes", "seed", "samples", "epoch")


class Live:
    """Draws samples with a changed recipe. The source is opened only once."""

    def __init__(self, request: Request, settings: Settings) -> None:
        self.request, self.settings = request, settings
        config = request.loader()
        self.recipe = recipe_of(request, config)
        self.recipes = group_options("augment", config_dir=request.config_dir)
        with request.build(config, mix=None, num_workers=0, prefetch=0) as loader:
            self.source = loader.source
        self.samples = chosen(self.source, settings.samples, count=SHOWN[settings.show])
        self._latest: tuple[Any, Any] = (None, None)  # the latest question and what it asks for

    def state(self, asked: Any = None) -> dict[str, Any]:
        """What the page needs to show its controls, ready for JSON. ``QUESTION`` explains ``asked``."""
        now = self._changed(asked)
        active = active_numbers(self.source)
        samples = chosen(self.source, now.settings.samples or self.samples, count=1)
        following = active[(np.searchsorted(active, samples) + len(samples)) % len(active)]
        listed = [{**asdict(control), "name": control.name} for control in now.controls]
        return {
            "recipe": (asked or {}).get("recipe") or self.recipe,
            "recipes": list(dict.fromkeys([self.recipe, *self.recipes])),
            "examples": list(examples()),
            "ops": {
                key: [[name, _class(value)] for name, value in ops.items() if value is not None]
                for key, ops in now.ops.items()
            },
            "nulls": {key: [name for name, value in ops.items() if value is None] for key, ops in now.ops.items()},
            "controls": listed,
            "overrides": self._words(now.request),
            "samples": samples,
            "next": following.tolist(),
            "size": len(self.source),
            "seed": str(now.config.get("seed")),  # JavaScript has no large integers
            "epoch": now.settings.epoch,
        }

    def render(self, asked: Any = None) -> str:
        """The page that ``gpuaug preview out=FILE.html`` writes for the changed recipe."""
        now = self._changed(asked)
        settings = replace(now.settings, samples=now.settings.samples or self.samples)
        objects = {"source": self.source, "self_check": False}  # each change would be a new recipe to check
        rows, above, _ = drawing(now.request, now.config, settings, is_page=True, **objects)
        return page(rows, **above, live=True)

    @staticmethod
    def _words(call: Request) -> str:
        """The command-line options and overrides that select the recipe, quoted for a shell."""
        options = {"--config-dir": call.config_dir, "--config-name": call.config_name, "--at": call.at}
        words = [word for option, value in options.items() if value is not None for word in (option, value)]
        words += [word for prefix in call.trust for word in ("--trust", prefix)]
        return shlex.join([*words, *(text for _, text in call.others())])

    def _changed(self, asked: Any) -> Changed:
        asked = {} if asked is None else asked
        if not isinstance(asked, Mapping) or any(name not in QUESTION for name in asked):
            raise ConfigError(f"A request must be a mapping with {', '.join(QUESTION)}. Found: {asked!r:.100}.")
        if asked == self._latest[0]:
            return self._latest[1]
        request, at = self.request, self.request.prefix
        if (recipe := asked.get("recipe")) not in (None, self.recipe):
            checks.one_of("recipe", recipe, self.recipes)
            replaced = (f"{at}augment", "gpuaug/augment@")
            own = tuple(text for text in request.overrides if not text.lstrip("+~").startswith(replaced))
            group = "augment" if request.config_name is None else f"gpuaug/augment@{at}augment"
            request = replace(request, overrides=(*own, f"{group}={recipe}"))
        if (seed := asked.get("seed")) is not None:
            checks.whole_number("seed", seed, 0)
            request = replace(request, overrides=(*request.overrides, f"{at}seed={seed}"))
        config = request.loader()
        ops = operations(config.get("augment"))
        if more := arranged(config.get("augment"), asked.get("ops") or {}):
            request = replace(request, overrides=(*request.overrides, *more))
            config = request.loader()
        known = controls(config.get("augment"))
        if more := changed(known, asked.get("changes") or {}):
            request = replace(request, overrides=(*request.overrides, *more))
            config = request.loader()
        given = {name: asked[name] for name in ("samples", "epoch") if asked.get(name) is not None}
        self._latest = asked, Changed(request, config, replace(self.settings, **given), ops, known)
        return self._latest[1]


class Changed(NamedTuple):
    """What a request asks for."""

    request: Request
    config: DictConfig  # of the loader
    settings: Settings
    ops: dict[str, dict[str, Any]]  # the operations of the recipe as it is in its file
    controls: list[Control]  # of the operations that the request asks for


def _class(operation: Any) -> str:
    target = operation.get("_target_") if isinstance(operation, Mapping) else operation
    return str(target).rpartition(".")[2]


class PageServer(ThreadingTCPServer):  # HTTPServer would first look up the host's name, which can take seconds
    """Serves the page of a recipe. Each request has a connection and a thread; pictures are drawn one at a time."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, live: Live, *, port: int = 0) -> None:
        self.live, self.token, self.drawing = live, secrets.token_urlsafe(16), threading.Lock()
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise ConfigError(f"`port={port}` cannot be used: {error}. port=0 takes a free port.") from error

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # OSError: the browser closed the connection
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "gpuaug", ""
    timeout = 20.0  # seconds that a connection may be silent

    def do_GET(self) -> None:
        status, kind, content = self._answer()
        data = content.encode() if isinstance(content, str) else content
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET  # noqa: N815

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        """Log no requests."""

    def _answer(self) -> tuple[int, str, str | bytes]:
        """Status, content type and content."""
        length = self.headers.get("Content-Length", "0")
        if not re.fullmatch("[0-9]{1,9}", length) or int(length) > LARGEST_BODY:
            return 413, TEXT, f"A request must give its length, at most {LARGEST_BODY} bytes."
        body = self.rfile.read(int(length))
        origin = self.headers.get("Origin", f"http://{HOST}")  # the server whose page sent the request
        if not all(map(LOCAL.fullmatch, (self.headers.get("Host", ""), origin.partition("//")[2]))):
            return 403, TEXT, "This page is only for 127.0.0.1 and localhost."
        token, slash, name = self.path.removeprefix("/").partition("/")
        known = slash and name in PLACES[self.command]
        if not secrets.compare_digest(token.encode(), self.server.token.encode()) or not known:
            return 404, TEXT, "There is nothing here. Open the address that the terminal shows."
        if name in FILES:
            return 200, FILES[name][1], Path(__file__).with_name(FILES[name][0]).read_bytes()
        return self._made(name, body)

    def _made(self, name: str, body: bytes) -> tuple[int, str, str | bytes]:
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):
            return 400, TEXT, "The body must be JSON."
        try:
            with self.server.drawing:
                made = getattr(self.server.live, name)(asked)
        except GpuaugError as error:
            return 400, TEXT, str(error)
        except Exception as error:  # no memory, source gone, error in torch: the page shows it
            return 500, TEXT, f"{type(error).__name__}: {error}"
        return 200, TEXT, made if isinstance(made, str) else json.dumps(made)


class LivePage(AbstractContextManager["LivePage"]):
    """A page that a thread of this process serves. ``src`` is its address. See :func:`preview_page`."""

    def __init__(self, server: PageServer) -> None:
        self._server, self.src = server, server.address
        Thread(target=server.serve_forever, args=(0.1,), name="gpuaug-page", daemon=True).start()

    def close(self) -> None:
        """End the page, and free its port. A second call does nothing."""
        self._server.shutdown()
        self._server.server_close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _repr_html_(self) -> str:
        return f'<iframe src="{self.src}" width="100%" height="900" frameborder="0" allow="clipboard-write"></iframe>'


def preview_page(
    overrides: Sequence[str] = (),
    *,
    config_dir: str | Path | None = None,
    name: str | None = None,
    at: str | None = None,
    trust: str | Sequence[str] = (),
) -> LivePage:
    """Show the page of `gpuaug preview serve=true` in a notebook: samples, and sliders for a recipe's parameters.

    A thread of this process serves the page until ``close()``. The browser must run on this machine, or reach the
    page's port through a tunnel, as in ``ssh -L 8000:127.0.0.1:8000`` with the override ``port=8000``.

    Args:
        overrides: strings as on the command line of ``gpuaug preview``, such as ``["source.root=/data", "samples=3"]``.
        config_dir: folder with your own configuration.
        name: your own configuration file in ``config_dir``; None: gpuaug's ``train``.
        at: path of the loader in your own configuration, such as ``train_data``.
        trust: prefixes of further modules that ``_target_`` may name, as in :func:`gpuaug.build`.

    Returns:
        The page, which the notebook shows if this call is the last line of a cell. Its ``src`` is its address.
        ``close()``, or the end of a ``with`` block, ends the page and frees its port.

    Raises:
        ConfigError: if the port is taken, or the configuration is wrong.

    >>> with gpuaug.preview_page(["source.root=data/train", "augment=simclr", "samples=2"]) as page:
    ...     page.src.startswith("http://127.0.0.1:")
    True
    """
    request = Request(
        command="preview",
        overrides=tuple(overrides),
        config_dir=None if config_dir is None else str(config_dir),
        config_name=name,
        at=at,
        trust=(trust,) if isinstance(trust, str) else tuple(trust),
    )
    settings = Settings(**{**request.settings(), "serve": True})
    return LivePage(PageServer(Live(request, settings), port=settings.port))
