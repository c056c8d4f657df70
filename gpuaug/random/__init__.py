"""Keyed random numbers: each number is a pure function of (seed, epoch, sample, operation)."""
