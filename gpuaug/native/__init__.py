"""Compiled C++ code, and the memory of batches."""
