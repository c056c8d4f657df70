"""Sources: map-style objects with ``len(source)`` and ``source[i] -> (bytes, label)``. See :class:`Source`.

Every worker unpickles the source. So no module here imports a decoder or a configuration library, or uses CUDA.
"""

from gpuaug.source.adapt import Source, adapt
from gpuaug.source.folder import FolderSource
from gpuaug.source.huggingface import DatasetSource
from gpuaug.source.parquet import ParquetSource
from gpuaug.source.remote.storage import Remote
from gpuaug.source.shards import ShardSource
from gpuaug.source.table import TableSource

__all__ = [
    "DatasetSource", "FolderSource", "ParquetSource", "Remote", "ShardSource", "Source", "TableSource", "adapt",
]  # fmt: skip
