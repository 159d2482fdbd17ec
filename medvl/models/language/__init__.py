"""Systems that pretrain a text encoder on text alone."""
