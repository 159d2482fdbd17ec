"""What every loss does with its inputs: float32 inside, and ranges that are checked by name."""

import torch
from torch import Tensor


def full_precision(tensor: Tensor) -> torch.autocast:
    """Autocast off on the tensor's device: it would take a product back to 16 bits, whatever `.float()` says."""
    return torch.autocast(tensor.device.type, enabled=False)


def product_dtype(tensor: Tensor) -> torch.dtype:
    """What the operands of a loss's largest products are rounded to: a GPU's 16-bit autocast, else float32 as it is."""
    if tensor.is_cuda and torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda")
    return torch.float32


def check_share(name: str, value: float) -> None:
    """Raises ValueError, naming the argument, unless the value is within [0, 1]."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be within [0, 1], got {value}")
