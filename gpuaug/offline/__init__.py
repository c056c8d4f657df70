"""Preparation before a training: packed data sets and augmented epochs, on one machine or a Ray cluster."""
