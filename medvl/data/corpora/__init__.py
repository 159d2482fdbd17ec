"""Corpora: one module per corpus, each with a `plan` function that turns its release on disk
into records.
"""
