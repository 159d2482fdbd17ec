"""Gradient reversal, for adversarial alignment of two domains."""

from typing import Any

import torch
from torch import Tensor


def reverse_gradient(x: Tensor, weight: float = 1.0) -> Tensor:
    """Return the input; in the backward pass, multiply its gradient by -weight (Ganin and Lempitsky, arXiv 1409.7495).

    Placed between features and a discriminator of images and texts, it lets one loss train both: the discriminator to
    separate the two, and the features to become inseparable:

        loss = F.binary_cross_entropy_with_logits(discriminator(reverse_gradient(features_BE, weight)), is_image_B)

    The features have any shape and dtype. Raises ValueError on a negative weight.
    """
    if weight < 0:
        raise ValueError(f"weight must be 0 or above, got {weight}")
    reversed_x: Tensor = _Reverse.apply(x, weight)
    return reversed_x


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)  # a new tensor: autograd would not record the input itself

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return -ctx.weight * grads[0], None
