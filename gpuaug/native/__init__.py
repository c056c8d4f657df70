"""Compiles C++ code once per machine, and manages the memory of batches."""
