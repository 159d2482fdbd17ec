"""Radiology reports: sections, sentences, laterality and labels."""
