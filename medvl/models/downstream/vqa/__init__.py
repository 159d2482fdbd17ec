"""Visual question answering on a pretrained fusion-encoder."""
