"""Measurements and advice for a recipe on this machine."""
