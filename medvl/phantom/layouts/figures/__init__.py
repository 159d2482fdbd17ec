"""Layouts of corpora of figures with captions."""
