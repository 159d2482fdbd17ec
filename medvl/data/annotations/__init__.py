"""Boxes, masks, phrases and questions of an image."""
