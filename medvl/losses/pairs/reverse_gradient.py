"""Gradient reversal, for adversarial alignment of two domains."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.losses.gather import mean_over_ranks
from medvl.losses.precision import full_precision, shapes


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


def modality_confusion(discriminator: nn.Module, image_NE: Tensor, text_ME: Tensor) -> Tensor:
    """Return the cross-entropy of a discriminator of images and texts, whose gradient is reversed for the features.

    One step trains the discriminator to separate the two, and the features to become inseparable.

    Args:
        discriminator: maps float32 (..., E) to logits (..., 1), positive for images.
        image_NE: this rank's images.
        text_ME: this rank's texts.

    Returns a scalar, the mean over the images and texts of all ranks; 0 with a zero gradient without any. Raises
    ValueError on inconsistent shapes.
    """
    if image_NE.ndim != 2 or text_ME.ndim != 2 or image_NE.shape[1] != text_ME.shape[1]:
        raise ValueError(f"expected images (N, E) and texts (M, E), got {shapes(image_NE, text_ME)}")
    with full_precision(image_NE):
        both_NE = torch.cat([image_NE.float(), text_ME.float()])
        is_image_N = (torch.arange(len(both_NE), device=both_NE.device) < len(image_NE)).float()
        logits_N = discriminator(reverse_gradient(both_NE))[:, 0]
        error_N = F.binary_cross_entropy_with_logits(logits_N, is_image_N, reduction="none")
        return mean_over_ranks(error_N, torch.ones_like(error_N, dtype=torch.bool))


class _Reverse(torch.autograd.Function):
    """Identity whose gradient is multiplied by -weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)  # a new tensor: autograd would not record the input itself

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return -ctx.weight * grads[0], None
