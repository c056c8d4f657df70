"""`gpuaug train`: a small training run on the loader."""
