"""Change between two images: how findings changed since the prior image."""
