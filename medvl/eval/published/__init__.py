"""Numbers of published papers, which a recipe should reproduce with the paper's weights and
data.
"""
