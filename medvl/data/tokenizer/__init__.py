"""Tokenizers and the WordPiece trainer."""
