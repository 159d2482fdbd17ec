"""Base classes of dual-encoders, their settings, and the pairs that they compare."""
