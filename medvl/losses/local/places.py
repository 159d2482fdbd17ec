"""Losses of a phrase's map over the cells of an image, against the cells that its boxes cover or
against the labels of the image.

B images, L labels, N phrases, P cells. `cover_NP` is the share of each cell that the boxes of a
phrase cover, in 0..1; a phrase that covers no cell has no box.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.losses.common import full_precision, shapes
from medvl.losses.supervised import known_labels

_LEAST = 1e-8
"""Attention below which its logarithm is cut, so that a text without words has a finite loss."""


def place_divergence(attention_NP: Tensor, cover_NP: Tensor) -> Tensor:
    """Return the divergence of each phrase's attention from its boxes, (N,): KL(t || a).

    The target t of a phrase with boxes is proportional to the cover of its cells; of one without
    boxes it is uniform: nowhere in particular.

    Args:
        attention_NP: sums to 1 over the cells.
        cover_NP: see above.

    0 where both are equal. Raises ValueError on unequal shapes.
    """
    _check(attention_NP, cover_NP)
    with full_precision(attention_NP):
        total_N1 = cover_NP.float().sum(dim=1, keepdim=True)
        uniform = 1 / cover_NP.shape[1]
        target_NP = torch.where(
            total_N1 > 0, cover_NP.float() / total_N1.clamp(min=_LEAST), uniform
        )
        log_NP = attention_NP.float().clamp(min=_LEAST).log()
        return (torch.xlogy(target_NP, target_NP) - target_NP * log_NP).sum(dim=1)


def place_entropy(logits_NP: Tensor, cover_NP: Tensor) -> Tensor:
    """Return the mean over cells of the binary cross-entropy of each phrase's log-odds with the
    cover, (N,).

    Without boxes, all cells are negative. Raises ValueError on unequal shapes.
    """
    _check(logits_NP, cover_NP)
    with full_precision(logits_NP):
        entropy_NP = F.binary_cross_entropy_with_logits(
            logits_NP.float(), cover_NP.float(), reduction="none"
        )
        return entropy_NP.mean(dim=1)


def label_entropy(logits_BLP: Tensor, target_BL: Tensor, sharpness: float = 1.0) -> Tensor:
    """Return the binary cross-entropy of each label with the pooled log-odds of its map, (B, L):
    multiple-instance learning, without boxes.

    The log-odds s of P cells are pooled to log(mean(exp(r s))) / r, between their mean (r = 0) and
    their maximum (Pinheiro and Collobert, arXiv 1411.6228, equation 3).

    Args:
        logits_BLP: log-odds of each label in each cell.
        target_BL: 1 or 0; uncertain (-1) and unknown (NaN) labels have a loss of 0.
        sharpness: r, above 0.

    Raises ValueError on inconsistent shapes.
    """
    if logits_BLP.ndim != 3 or logits_BLP.shape[:2] != target_BL.shape:
        raise ValueError(f"expected (B, L, P) and (B, L), got {shapes(logits_BLP, target_BL)}")
    known_BL = known_labels(target_BL)
    with full_precision(logits_BLP):
        pooled_BL = torch.logsumexp(sharpness * logits_BLP.float(), dim=2)
        pooled_BL = (pooled_BL - math.log(logits_BLP.shape[2])) / sharpness
        loss_BL = F.binary_cross_entropy_with_logits(
            pooled_BL, target_BL.masked_fill(~known_BL, 0).float(), reduction="none"
        )
        return loss_BL.masked_fill(~known_BL, 0.0)


def _check(map_NP: Tensor, cover_NP: Tensor) -> None:
    if map_NP.shape != cover_NP.shape or map_NP.ndim != 2:
        raise ValueError(f"expected two of (N, P), got {shapes(map_NP, cover_NP)}")
