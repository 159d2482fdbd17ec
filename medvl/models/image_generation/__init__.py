"""Systems that generate images."""
