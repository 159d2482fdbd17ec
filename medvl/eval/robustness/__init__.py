"""Robustness of a model's results to other patients, sites, images and wordings."""
