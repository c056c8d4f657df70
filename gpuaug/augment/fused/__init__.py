"""The fused backend: compiled kernels for the CPU (C++) and for CUDA (Triton)."""
