"""Layouts of corpora of images with boxes or masks."""
