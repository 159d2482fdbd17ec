"""Dual-encoders of volumes and texts."""
