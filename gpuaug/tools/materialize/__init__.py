"""`gpuaug materialize`: augmented epochs, written to disk."""
