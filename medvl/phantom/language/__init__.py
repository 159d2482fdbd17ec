"""Report text, captions and questions of the phantom."""
