"""Draws pages of captioned pictures, annotations on images, and the batches and recipes that a notebook shows."""
