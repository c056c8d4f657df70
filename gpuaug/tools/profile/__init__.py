"""`gpuaug profile`: the time of every stage, the bottleneck, and the change that helps."""
