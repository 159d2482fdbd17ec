"""Swapped prediction: the nearest of K learned prototypes of an image from its text, and vice
versa.

Every rank gives its own rows and gets the loss of the global batch; all ranks must call these
functions equally often (`medvl.losses.common`). Gathered rows give the same.

N pairs and B samples of this rank, K prototypes, E shared embedding dim.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.losses.common import full_precision, gather, mean_over_ranks, shapes


def prototype_swap(
    image_NE: Tensor,
    text_NE: Tensor,
    prototypes_KE: Tensor,
    temperature: float = 0.2,
    epsilon: float = 0.05,
    iterations: int = 3,
) -> Tensor:
    """Cross-entropy of each side's prototypes with the codes of the other (Wang et al., MGCA, arXiv
    2210.06044, 3.4).

    With the scores z C^T of each side: (-sum_k q_image ln softmax(scores_text / temperature) -
    sum_k q_text ln softmax(scores_image / temperature)) / 2, averaged over the pairs of all ranks.
    The codes q are those of `sinkhorn`, without gradient.

    Args:
        image_NE, text_NE: row i of both is a pair; L2-normalised by the caller.
        prototypes_KE: vectors of unit length. MGCA normalises the parameter in place before each
            step, and does not train it in the first epoch.
        temperature: temperature of the predictions.
        epsilon, iterations: as for `sinkhorn`.

    Returns a scalar, near ln K for predictions that prefer no prototype; 0 with a zero gradient
    without a pair. Raises ValueError on inconsistent shapes, or a temperature or epsilon of zero or
    below.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    fits = image_NE.ndim == prototypes_KE.ndim == 2 and image_NE.shape[1] == prototypes_KE.shape[1]
    if not fits or image_NE.shape != text_NE.shape:
        got = shapes(image_NE, text_NE, prototypes_KE)
        raise ValueError(f"expected pairs (N, E) and prototypes (K, E), got {got}")
    with full_precision(image_NE):
        image_NK, text_NK = (
            side_NE.float() @ prototypes_KE.float().T for side_NE in (image_NE, text_NE)
        )
        image_code_NK, text_code_NK = (
            sinkhorn(scores_NK, epsilon, iterations) for scores_NK in (image_NK, text_NK)
        )
        loss_N = -(image_code_NK * (text_NK / temperature).log_softmax(dim=1)).sum(dim=1)
        loss_N = loss_N - (text_code_NK * (image_NK / temperature).log_softmax(dim=1)).sum(dim=1)
        return mean_over_ranks(loss_N / 2, torch.ones_like(loss_N, dtype=torch.bool))


@torch.no_grad()
def sinkhorn(scores_BK: Tensor, epsilon: float = 0.05, iterations: int = 3) -> Tensor:
    """Return (B, K) float32: soft assignments of samples to prototypes that use all prototypes
    about equally.

    The Sinkhorn-Knopp algorithm of SwAV (Caron et al., arXiv 2006.09882, section 3.1) over the
    samples of all ranks: exp(scores / epsilon) is scaled so that every prototype has the same
    total, then so that every sample has a total of 1, `iterations` times. It works on logarithms:
    exp(scores / 0.05) exceeds the range of float16 for cosines above 0.554.

    Args:
        scores_BK: similarities of this rank's samples. The result has no gradient.
        epsilon: smaller is closer to a hard assignment; 0.05 in SwAV and MGCA.
        iterations: with 0, it is the softmax of scores / epsilon.

    Rows sum to 1. Raises ValueError on an epsilon of zero or below, negative iterations, or without
    a prototype.
    """
    if epsilon <= 0 or iterations < 0:
        raise ValueError(
            f"expected an epsilon above 0 and iterations of 0 or above, got {epsilon} and "
            f"{iterations}"
        )
    if scores_BK.ndim != 2 or scores_BK.shape[1] == 0:
        raise ValueError(
            f"expected scores (B, K) with at least one prototype, got {shapes(scores_BK)}"
        )
    with full_precision(scores_BK):
        log_BK = scores_BK.float() / epsilon
        for _ in range(iterations):
            # A rank without samples sends minus infinity, which adds nothing to the total of a
            # prototype.
            log_BK = log_BK - gather(log_BK.logsumexp(dim=0, keepdim=True)).logsumexp(dim=0)
            log_BK = log_BK.log_softmax(dim=1)
        return log_BK.softmax(dim=1)


# Gradient reversal, for adversarial alignment of two domains.


def reverse_gradient(x: Tensor, weight: float = 1.0) -> Tensor:
    """Return the input; in the backward pass, multiply its gradient by -weight (Ganin and
    Lempitsky, arXiv 1409.7495).

    Placed between features and a discriminator of images and texts, it lets one loss train both:
    the discriminator to separate the two, and the features to become inseparable:

        loss = F.binary_cross_entropy_with_logits(discriminator(reverse_gradient(features_BE,
            weight)), is_image_B)

    The features have any shape and dtype. Raises ValueError on a negative weight.
    """
    if weight < 0:
        raise ValueError(f"weight must be 0 or above, got {weight}")
    reversed_x: Tensor = _Reverse.apply(x, weight)
    return reversed_x


def modality_confusion(discriminator: nn.Module, image_NE: Tensor, text_ME: Tensor) -> Tensor:
    """Return the cross-entropy of a discriminator of images and texts, whose gradient is reversed
    for the features.

    One step trains the discriminator to separate the two, and the features to become inseparable.

    Args:
        discriminator: maps float32 (..., E) to logits (..., 1), positive for images.
        image_NE: this rank's images.
        text_ME: this rank's texts.

    Returns a scalar, the mean over the images and texts of all ranks; 0 with a zero gradient
    without any. Raises ValueError on inconsistent shapes.
    """
    if image_NE.ndim != 2 or text_ME.ndim != 2 or image_NE.shape[1] != text_ME.shape[1]:
        raise ValueError(
            f"expected images (N, E) and texts (M, E), got {shapes(image_NE, text_ME)}"
        )
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
