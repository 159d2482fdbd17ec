"""Image-text retrieval, re-ranking and retrieval by class."""
