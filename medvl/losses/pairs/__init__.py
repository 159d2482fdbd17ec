"""Losses that compare the images and texts of a batch."""
