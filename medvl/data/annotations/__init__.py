"""Boxes, masks, phrases and questions that come with images."""
