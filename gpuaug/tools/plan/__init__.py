"""`gpuaug plan`: the memory of a configuration before it runs."""
