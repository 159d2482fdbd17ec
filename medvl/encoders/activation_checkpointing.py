"""Activations computed twice instead of kept: time for memory (Chen et al., arXiv 1604.06174)."""

from typing import Any

from torch.nn.modules.batchnorm import _NormBase

from medvl.encoders.base import Encoder
from medvl.errors import ConfigError


def checkpoint_activations(encoder: Encoder) -> None:
    """From now on keep of each layer its input only, and compute the layer again when its gradient is taken.

    Values and gradients stay what they are, what dropout draws included. For a third more arithmetic, a Transformer's
    activations take a small fraction of their memory. In eval mode, and in frozen layers, nothing is kept anyway.

    Args:
        encoder: an `ImageEncoder` or a `TextEncoder`; its library's own switch is turned.

    Raises:
        ConfigError: the library has no switch for this backbone, or the backbone has batch norms, whose running
            statistics would count every batch twice.
    """
    net: Any = encoder.backbone
    if any(isinstance(module, _NormBase) for module in net.modules()):
        raise ConfigError(
            f"{encoder.name} has batch norms, whose running statistics would count every batch twice if its layers "
            "were computed again"
        )
    try:
        if hasattr(net, "set_grad_checkpointing"):  # timm and open_clip
            net.set_grad_checkpointing(True)
            return
        if getattr(net, "supports_gradient_checkpointing", False):  # transformers, which has renamed it of late
            turn_on = getattr(net, "activation_checkpointing_enable", None) or net.gradient_checkpointing_enable
            turn_on({"use_reentrant": False})
            return
    except (AssertionError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"{encoder.name} cannot compute its layers again: {error}") from error
    raise ConfigError(f"{encoder.name} has no switch for computing its layers again")
