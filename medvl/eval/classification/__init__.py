"""Evaluation of trained classifiers, label policies and subgroups."""
