"""The commands of `gpuaug`, one folder each, and their shared code."""
