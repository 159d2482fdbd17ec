"""Layers that fusion-encoders share."""
