"""Classification of findings: several labels per image, some of them unknown. B images, L labels."""

import torch.nn.functional as F
from torch import Tensor

from medvl.losses.precision import full_precision, mean_of, shapes


def multilabel_bce(logits_BL: Tensor, target_BL: Tensor, count: Tensor | None = None) -> Tensor:
    """Binary cross-entropy, averaged over the labels that are known.

    Args:
        logits_BL: one row per image, one column per label.
        target_BL: 1 or 0; NaN where a label is unknown, or -1 where it is uncertain; such entries are ignored.
        count: divisor of the sum in place of the number of known labels, such as the mean number of an update's
            micro-batches on all ranks.

    Returns a scalar, ln 2 for logits of zero; 0 with a zero gradient where no label is known. Raises ValueError on
    unequal shapes.
    """
    if logits_BL.ndim != 2 or logits_BL.shape != target_BL.shape:
        raise ValueError(f"labels need logits and targets of one shape (B, L), got {shapes(logits_BL, target_BL)}")
    known_BL = known_labels(target_BL)
    with full_precision(logits_BL):
        loss_BL = F.binary_cross_entropy_with_logits(
            logits_BL.float(), target_BL.masked_fill(~known_BL, 0).float(), reduction="none"
        )
        return mean_of(loss_BL.masked_fill(~known_BL, 0.0).sum(), known_BL.sum() if count is None else count)


def known_labels(target_BL: Tensor) -> Tensor:
    """Return (B, L) bool: True for labels that are neither uncertain (-1) nor unknown (NaN)."""
    return target_BL >= 0
