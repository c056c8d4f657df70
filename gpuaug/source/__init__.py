"""Sources: the number of samples, and the encoded bytes and label of sample number *i*.

A source is any map-style object with ``len(source)`` and ``source[i] -> (bytes, label)``; a sample never changes its
number ``i``. :class:`Source` lists what else a source may have, and :func:`adapt` adds what is missing.

Sources are unpickled in every worker, so no module here imports a decoder or a configuration library, or touches CUDA.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from gpuaug.source.adapt import adapt
from gpuaug.source.protocol import Source

_WHERE = {
    "DatasetSource": "gpuaug.source.huggingface",
    "FolderSource": "gpuaug.source.folder",
    "MapSource": "gpuaug.source.adapt",
    "ParquetSource": "gpuaug.source.parquet",
    "Remote": "gpuaug.source.remote.storage",
    "ShardSource": "gpuaug.source.shards",
    "TableSource": "gpuaug.source.table",
}

__all__ = [*_WHERE, "Source", "adapt"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'gpuaug.source' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value
