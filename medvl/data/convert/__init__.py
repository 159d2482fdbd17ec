"""Conversion of a corpus to shards: plan, convert, write, merge."""
