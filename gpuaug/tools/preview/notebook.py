"""The live page inside a notebook."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from gpuaug.tools.preview.drawing import Settings
from gpuaug.tools.request import Request

if TYPE_CHECKING:
    from IPython.display import IFrame


def preview_page(
    overrides: Sequence[str] = (),
    *,
    config_dir: str | Path | None = None,
    name: str | None = None,
    at: str | None = None,
    trust: str | Sequence[str] = (),
) -> IFrame:
    """Show the page of `gpuaug preview serve=true` in a notebook: samples, and sliders for a recipe's parameters.

    A thread of this process serves the page until the process ends. The browser must run on this machine, or reach the
    page's port through a tunnel, as in ``ssh -L 8000:127.0.0.1:8000`` with the override ``port=8000``. Needs
    ``pip install 'gpuaug[live]'``.

    Args:
        overrides: strings as on the command line of ``gpuaug preview``, such as ``["source.root=/data", "samples=3"]``.
        config_dir: folder with your own configuration.
        name: your own configuration file in ``config_dir``; None: gpuaug's ``train``.
        at: path of the loader in your own configuration, such as ``train_data``.
        trust: prefixes of further modules that ``_target_`` may name, as in :func:`gpuaug.build`.

    Returns:
        An IFrame, which the notebook shows if this call is the last line of a cell. Its ``src`` is the page's address.

    Raises:
        ConfigError: if aiohttp is missing, the port is taken, or the configuration is wrong.

    >>> page = gpuaug.preview_page(["source.root=data/train", "augment=simclr", "samples=2"])
    >>> page.src.startswith("http://127.0.0.1:")
    True
    """
    from IPython.display import IFrame

    from gpuaug.tools.preview import server

    request = Request(
        command="preview",
        overrides=tuple(overrides),
        config_dir=None if config_dir is None else str(config_dir),
        config_name=name,
        at=at,
        trust=(trust,) if isinstance(trust, str) else tuple(trust),
    )
    settings = Settings(**{**request.settings(), "serve": True})
    served, listening, address = server.prepared(request, settings, ThreadPoolExecutor(1))
    Thread(target=lambda: asyncio.run(server.serve(served, listening)), name="gpuaug-page", daemon=True).start()
    return IFrame(address, width="100%", height=900, extras=['allow="clipboard-write"'])
