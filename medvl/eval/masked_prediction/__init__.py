"""Masked prediction: which words of report sentences a language model fills in."""
