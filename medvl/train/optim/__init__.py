"""Optimisers, schedules, precision and GradCache."""
