"""Zero-shot classification with prompt sets."""
