"""Old names of the functions for byte sizes in :mod:`gpuaug.files`."""

from gpuaug.files import format_bytes as text
from gpuaug.files import parse_bytes as parse

__all__ = ["parse", "text"]
