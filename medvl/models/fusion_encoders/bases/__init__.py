"""Base classes of fusion-encoders and their settings."""
