"""Phrase grounding: heat maps against boxes."""
