"""Image transforms, text policies, and masking for masked language modelling."""
