"""Augmentation: recipes, draws to parameters, two backends, and what mixes samples."""
