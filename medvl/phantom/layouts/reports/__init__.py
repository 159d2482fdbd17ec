"""Layouts of corpora of radiographs with reports."""
