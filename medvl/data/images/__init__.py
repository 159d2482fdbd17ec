"""Image files: reading, decoding, encoding."""
