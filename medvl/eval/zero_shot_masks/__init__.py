"""Zero-shot segmentation by the maps of a dual-encoder."""
