"""Layouts of corpora of radiographs with labels."""
