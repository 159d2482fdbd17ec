"""Importers of published checkpoints."""
