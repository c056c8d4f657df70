"""`gpuaug preview`: pictures of what a recipe does."""
