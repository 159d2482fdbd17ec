"""Corpora of radiographs with labels."""
