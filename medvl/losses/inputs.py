"""What every loss does with its inputs: float32 inside, and ranges that are checked by name."""

import torch
from torch import Tensor


def full_precision(tensor: Tensor) -> torch.autocast:
    """Autocast off on the tensor's device: it would take a product back to 16 bits, whatever `.float()` says."""
    return torch.autocast(tensor.device.type, enabled=False)


def check_share(name: str, value: float) -> None:
    """Raises ValueError, naming the argument, unless the value is within [0, 1]."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be within [0, 1], got {value}")
