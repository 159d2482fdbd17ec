"""Activation checkpointing: recompute activations in the backward pass (Chen et al., arXiv 1604.06174)."""

from typing import Any

from torch.nn.modules.batchnorm import _NormBase

from medvl.encoders.base import Encoder
from medvl.errors import ConfigError


def checkpoint_activations(encoder: Encoder) -> None:
    """Keep only the input of each layer, and recompute the layer in the backward pass.

    Values and gradients do not change, dropout included. A Transformer's activations take a small fraction of their
    memory, for a third more arithmetic. Nothing is saved in eval mode or in frozen layers, which keep no activations.

    Args:
        encoder: an `ImageEncoder` or a `TextEncoder`; its library's own checkpointing is enabled.

    Raises:
        ConfigError: "unsupported" if the library cannot checkpoint this backbone, or if the backbone has batch norms,
            whose running statistics would count every batch twice.
    """
    net: Any = encoder.backbone
    if any(isinstance(module, _NormBase) for module in net.modules()):
        reason = "whose running statistics would count every batch twice: its activations cannot be checkpointed"
        raise ConfigError(f"{encoder.name} has batch norms, {reason}", "unsupported")
    try:
        if hasattr(net, "set_grad_checkpointing"):  # timm and open_clip
            net.set_grad_checkpointing(True)
            return
        if getattr(net, "supports_gradient_checkpointing", False):  # transformers; renamed in its later versions
            enable = getattr(net, "activation_checkpointing_enable", None) or net.gradient_checkpointing_enable
            enable({"use_reentrant": False})
            return
    except (AssertionError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"{encoder.name} cannot checkpoint activations: {error}", "unsupported") from error
    raise ConfigError(f"{encoder.name} does not support activation checkpointing", "unsupported")
