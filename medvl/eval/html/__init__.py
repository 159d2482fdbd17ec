"""HTML pages, plots and image overlays."""
