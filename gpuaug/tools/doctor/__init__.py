"""`gpuaug doctor`: whether this machine is fit, and what to do where it is not."""
