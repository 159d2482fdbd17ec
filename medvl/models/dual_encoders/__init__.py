"""Dual-encoders: a file for each system. `bases/` has what they inherit, `parts/` the layers
that they share.
"""
