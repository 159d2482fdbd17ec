"""Layers and functions that several fusion-encoders use."""
