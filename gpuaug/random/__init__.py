"""Keyed random numbers: a pure function of (seed, epoch, sample, operation)."""
