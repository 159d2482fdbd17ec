"""Paired comparison of evaluation runs."""
