"""The commands of `gpuaug`, a folder each, and what they share."""
