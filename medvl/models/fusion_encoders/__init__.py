"""Fusion-encoders, one file per system."""
