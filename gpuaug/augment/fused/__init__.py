"""The fused backend: a recipe as a few compiled kernels, on the CPU (C++) and on CUDA (Triton)."""
