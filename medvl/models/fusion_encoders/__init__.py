"""Fusion-encoders, one file a system."""
