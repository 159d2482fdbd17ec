"""Transforms of images and texts, and masking for masked language modelling."""
