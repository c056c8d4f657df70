"""`gpuaug doctor`: checks whether this machine can run gpuaug, and gives advice."""
