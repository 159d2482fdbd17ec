"""Parts that report generators share: a decoder behind a prefix."""
