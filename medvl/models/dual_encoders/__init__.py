"""Dual-encoders, one file a system."""
