"""Losses of words, regions and sentences within a sample."""
