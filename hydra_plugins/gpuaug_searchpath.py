"""Puts gpuaug's configuration groups on the search path of every Hydra application.

Every Hydra application in the environment imports this file, so it must not import large packages.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from gpuaug.config import conf_folder


class GpuaugSearchPathPlugin(SearchPathPlugin):
    """Appends gpuaug's configuration folder after the application's own folders."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Hydra's hook, called once per composition."""
        # not pkg://, because it needs an __init__.py in the folder of the YAML files
        search_path.append(provider="gpuaug", path=f"file://{conf_folder()}")
