"""Puts gpuaug's configuration groups on the search path of every Hydra application.

Every Hydra application of the environment imports this file: it imports nothing but Hydra.
"""

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


def folder() -> Path:
    """The folder that holds ``gpuaug/train.yaml``: ``gpuaug/conf`` of an installation, ``conf`` of a checkout."""
    root = Path(__file__).resolve().parent.parent
    installed = root / "gpuaug" / "conf"
    return installed if installed.is_dir() else root / "conf"


class GpuaugSearchPathPlugin(SearchPathPlugin):
    """Appends the folder, after the application's own."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Hydra's hook, called once per composition."""
        # a file path, because pkg:// would need an __init__.py among the YAMLs
        search_path.append(provider="gpuaug", path=f"file://{folder()}")
