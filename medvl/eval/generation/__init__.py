"""Evaluation of generated images: findings, fidelity, diversity, alignment, memorisation and use
as training data.
"""
