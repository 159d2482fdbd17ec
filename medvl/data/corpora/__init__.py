"""Corpora: one class per corpus, whose method `plan` turns its release on disk into records."""
