"""Corpora of images with boxes or masks."""
