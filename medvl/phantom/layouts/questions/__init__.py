"""Layouts of corpora of images with questions and answers."""
