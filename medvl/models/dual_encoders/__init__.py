"""Dual-encoders, one file per system."""
