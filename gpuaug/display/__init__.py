"""Draws batches, annotations, and pages of captioned pictures."""
