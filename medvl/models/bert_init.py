"""Initialisation of layers as in BERT (Devlin et al., arXiv 1810.04805)."""

from torch import nn

LAYER_NORM_EPS = 1e-12
"""As in BERT."""
INIT_STD = 0.02


def init_weights(module: nn.Module) -> None:
    """Initialise as BERT: linear layers and embeddings from N(0, 0.02), biases with zeros, norms with ones."""
    for child in module.modules():
        if isinstance(child, nn.Linear | nn.Embedding):
            nn.init.normal_(child.weight, std=INIT_STD)
        if isinstance(child, nn.LayerNorm):
            nn.init.ones_(child.weight)
        if isinstance(child, nn.Linear | nn.LayerNorm) and child.bias is not None:
            nn.init.zeros_(child.bias)
