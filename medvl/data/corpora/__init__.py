"""One file a corpus: what its release looks like on disk, and how its rows become samples."""
