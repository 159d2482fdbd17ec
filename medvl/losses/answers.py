"""Answering as classification over a vocabulary of answers, with soft targets."""

import torch.nn.functional as F
from torch import Tensor

from medvl.losses.inputs import full_precision


def answers(logits_BV: Tensor, target_BV: Tensor) -> Tensor:
    """Binary cross-entropy of every answer, summed over the vocabulary and averaged over the questions.

    The mean over all cells times V, as METER and M3AE train VQA (after bottom-up attention, arXiv 1707.07998, section
    3.3): without the factor the gradient would fall with the size of the vocabulary.

    Args:
        logits_BV: a row a question, a column an answer.
        target_BV: how right each answer is, within [0, 1]; a row of zeros is a question whose answer is not in the
            vocabulary.

    Returns a scalar, V ln 2 for logits of zero. Raises ValueError on unequal shapes.
    """
    if logits_BV.ndim != 2 or logits_BV.shape != target_BV.shape:
        raise ValueError(
            f"answers need logits and targets of one shape (B, V), got {tuple(logits_BV.shape)} "
            f"and {tuple(target_BV.shape)}"
        )
    with full_precision(logits_BV):
        loss = F.binary_cross_entropy_with_logits(logits_BV.float(), target_BV.float(), reduction="sum")
        return loss / max(len(logits_BV), 1)
