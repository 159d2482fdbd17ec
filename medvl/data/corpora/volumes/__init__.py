"""Corpora of volumes: CT."""
