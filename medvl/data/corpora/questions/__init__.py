"""Corpora of images with questions and answers."""
