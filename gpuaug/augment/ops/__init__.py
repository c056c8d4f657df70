"""Entries of operations: tables for Kornia's classes, and one entry per class of gpuaug's own (parameters.py)."""
