"""Losses of masked words, pixels and regions."""
