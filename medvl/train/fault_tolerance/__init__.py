"""Checkpoints, non-finite updates and errors with advice."""
