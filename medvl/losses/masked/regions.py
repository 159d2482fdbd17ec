"""Losses of masked regions: their features, and the detector's distribution over its classes.

N masked regions, D features, K classes.
"""

import torch.nn.functional as F
from torch import Tensor

from medvl.losses.precision import full_precision, shapes


def region_regression(predicted_ND: Tensor, true_ND: Tensor, *, smooth: bool = False) -> Tensor:
    """Mean squared error of features (MRFR; UNITER, Chen et al., arXiv 1909.11740, section 3.2).

    With `smooth`, the smooth L1 error of LXMERT (Tan and Bansal, arXiv 1908.07490, section 3.1). No gradient is taken
    for `true_ND`.

    Returns a scalar; 0 with a zero gradient for no region. Raises ValueError on inconsistent shapes.
    """
    _check(predicted_ND, true_ND)
    with full_precision(predicted_ND):
        error = F.smooth_l1_loss if smooth else F.mse_loss
        return error(predicted_ND.float(), true_ND.detach().float(), reduction="sum") / max(predicted_ND.numel(), 1)


def region_kl(logits_NK: Tensor, classes_NK: Tensor) -> Tensor:
    """Mean over regions of KL(classes || softmax(logits)) (MRC-kl; UNITER, section 3.2).

    UNITER's released code divides by the number of classes as well.

    Args:
        logits_NK: predictions.
        classes_NK: the detector's distributions; rows of zeros do not count.

    Returns a scalar; 0 with a zero gradient for no region. Raises ValueError on inconsistent shapes.
    """
    _check(logits_NK, classes_NK)
    with full_precision(logits_NK):
        total = F.kl_div(logits_NK.float().log_softmax(dim=1), classes_NK.float(), reduction="sum")
        return total / (classes_NK > 0).any(dim=1).sum().clamp(min=1)


def region_labels(logits_NK: Tensor, classes_NK: Tensor) -> Tensor:
    """Mean over regions of the cross-entropy with the detector's best class, times its confidence (LXMERT, 3.1).

    Arguments, result and errors as for `region_kl`.
    """
    _check(logits_NK, classes_NK)
    with full_precision(logits_NK):
        confidence_N, label_N = classes_NK.float().max(dim=1)
        error_N = F.cross_entropy(logits_NK.float(), label_N, reduction="none")
        return (confidence_N * error_N).sum() / (confidence_N > 0).sum().clamp(min=1)


def _check(predicted: Tensor, true: Tensor) -> None:
    if predicted.ndim != 2 or predicted.shape != true.shape or predicted.shape[1] == 0:
        raise ValueError(f"expected predictions and targets of one shape (N, values), got {shapes(predicted, true)}")
