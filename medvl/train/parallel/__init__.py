"""Several processes and devices."""
