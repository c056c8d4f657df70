"""The fused backend: runs a recipe in a few compiled kernels, on the CPU (C++) or on CUDA (Triton)."""
