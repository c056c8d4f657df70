"""The live page inside a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Thread

from gpuaug.tools.preview.drawing import Settings
from gpuaug.tools.preview.server import Live, PageServer
from gpuaug.tools.request import Request


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
