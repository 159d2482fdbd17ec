"""Tokenizers and WordPiece training."""
