"""Training on rewards of sampled texts."""
