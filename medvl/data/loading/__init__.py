"""Batches from shards: sources, sampling, collation, worker processes."""
