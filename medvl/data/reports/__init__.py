"""Radiology reports: sections, sentences, laterality, labels."""
