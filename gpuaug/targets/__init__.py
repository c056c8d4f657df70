"""Masks, boxes and keypoints, which move with their image."""
