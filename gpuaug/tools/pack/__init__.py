"""`gpuaug pack`: a data set prepared once, as resized JPEG shards or as pixels."""
