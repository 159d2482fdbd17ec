"""Loaders: from shards or files to batches."""
