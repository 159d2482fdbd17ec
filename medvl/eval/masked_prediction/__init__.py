"""Masked prediction: words of report sentences that a language model fills in."""
