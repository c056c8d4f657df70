"""Reads and lists files, on a local disk or behind a URL."""
