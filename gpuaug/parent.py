"""A worker process ends with the process that made it, however that ended."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing import connection


def end_with_it() -> None:
    """From now on this process ends as soon as the one that asked for it has: killed parents end nobody.

    A forkserver is nobody's substitute for it: that stays as long as its children, and they as long as their cache.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, name="gpuaug-parent", daemon=True).start()
