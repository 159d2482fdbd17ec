"""Evaluation of detection and segmentation."""
