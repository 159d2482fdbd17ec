"""Volume encoders."""
