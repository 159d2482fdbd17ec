"""JPEG and PNG: decoding, encoding, resizing."""
