"""Checkpoints, protection from non-finite values, signals, and errors with advice."""
