"""Corpora of figures with captions."""
