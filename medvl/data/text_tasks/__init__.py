"""Data sets that text encoders are evaluated on: BLURB's thirteen, inference between sentences,
and similarity.
"""
