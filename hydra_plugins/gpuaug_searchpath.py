"""Puts gpuaug's configuration groups on the search path of every Hydra application.

Every Hydra application of the environment imports this file: it imports nothing heavy.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from gpuaug.config import conf_folder


class GpuaugSearchPathPlugin(SearchPathPlugin):
    """Appends the folder, after the application's own."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Hydra's hook, called once per composition."""
        # a file path, because pkg:// would need an __init__.py among the YAMLs
        search_path.append(provider="gpuaug", path=f"file://{conf_folder()}")
