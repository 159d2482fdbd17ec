"""Numbers of published papers: what a recipe should reproduce with the paper's weights and data."""
