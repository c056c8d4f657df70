"""The command `gpuaug export`."""
