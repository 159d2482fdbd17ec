"""Data settings and loaders of the training tasks."""
