"""Helpers that every other package may import."""
