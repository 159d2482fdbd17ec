"""Readers that several corpora share: tables, figures, record files."""
