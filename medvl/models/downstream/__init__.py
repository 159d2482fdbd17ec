"""Models for downstream tasks: classification, detection, segmentation, question answering."""
