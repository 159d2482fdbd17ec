"""Pages of a benchmark."""
