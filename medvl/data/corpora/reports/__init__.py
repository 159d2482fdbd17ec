"""Corpora of radiographs with reports."""
