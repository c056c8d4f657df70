"""The command `gpuaug replay`."""
