"""Conversion of a corpus to shards."""
