"""Losses of labels, boxes, masks and answers."""
