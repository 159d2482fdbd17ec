"""Metrics, bootstrap intervals and result files that all evaluators share."""
