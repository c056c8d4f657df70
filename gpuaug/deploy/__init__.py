"""Evaluation recipes outside of gpuaug: as one graph of torch operations, and as text in other files."""
