"""Images of the phantom."""
