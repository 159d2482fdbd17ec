"""Robustness: what happens to a model's results under other patients, sites, images and words."""
