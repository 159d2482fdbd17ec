"""Masked language modelling: cross-entropy at the masked tokens.

The vocabulary head costs more than a fusion layer, and 85 % of its rows are not needed, so models run it on the masked
positions only:

    index_N = masked_positions(labels_BT)
    logits_NV = head(states_BTD.flatten(0, 1)[index_N])
    loss = mlm(logits_NV, labels_BT.flatten()[index_N])

N masked positions of the whole batch, V vocabulary; the other letters as in `medvl.schema`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.losses.precision import check_share, full_precision, mean_of, shapes

IGNORED = -100
"""Label of a position that is not masked; torch's cross-entropy ignores it by default."""


def mlm(logits_BTV: Tensor, labels_BT: Tensor, count: Tensor | None = None) -> Tensor:
    """Mean cross-entropy over the masked positions of the whole batch (Devlin et al., arXiv 1810.04805, task 1).

    The mean is over positions, not over texts: a text with more masked tokens weighs more.

    Args:
        logits_BTV: scores of all positions, or (N, V) of the masked ones.
        labels_BT: int64, the masked ids, -100 elsewhere; or (N,).
        count: divisor of the sum in place of the number of masked positions. With the mean number of the micro-batches
            of all ranks, the mean of these losses is the mean over all masked positions.

    Returns a scalar, near ln V for an untrained head; 0 with a zero gradient where nothing is masked. Raises
    ValueError on inconsistent shapes.
    """
    return _hard(*_masked_only(logits_BTV, labels_BT), count)


def mlm_by_text(logits_NV: Tensor, labels_N: Tensor, text_N: Tensor, texts: int) -> Tensor:
    """Return (texts, 2) float32: each text's summed cross-entropy at its masked positions, and how many it has.

    For any texts of any ranks, the sum of the first column divided by the sum of the second is `mlm` of these texts.
    `text_N` is the text of each masked position. Raises ValueError on inconsistent shapes.
    """
    if logits_NV.shape[:-1] != labels_N.shape or labels_N.shape != text_N.shape:
        raise ValueError(
            f"expected logits (N, V), labels and texts of N positions, got {shapes(logits_NV, labels_N, text_N)}"
        )
    with full_precision(logits_NV):
        each_N = F.cross_entropy(logits_NV.float(), labels_N, reduction="none")
        pairs_N2 = torch.stack([each_N, torch.ones_like(each_N)], dim=1)
        return pairs_N2.new_zeros(texts, 2).index_add(0, text_N, pairs_N2)


def mlm_distilled(logits_BTV: Tensor, labels_BT: Tensor, teacher_BTV: Tensor, alpha: float = 0.4) -> Tensor:
    """(1 - alpha) cross-entropy with the masked ids + alpha with the teacher's distribution over the vocabulary.

    Momentum distillation of ALBEF (Li et al., arXiv 2107.07651, equation 7). The teacher, a moving average of the
    model, reads the same masked text; no gradient reaches it. Shapes, result and errors as for `mlm`; ValueError also
    on an alpha outside [0, 1].
    """
    check_share("alpha", alpha)
    if teacher_BTV.shape != logits_BTV.shape:
        raise ValueError(f"student and teacher logits must have equal shapes, got {shapes(logits_BTV, teacher_BTV)}")
    logits_NV, labels_N = _masked_only(logits_BTV, labels_BT)
    teacher_NV, _ = _masked_only(teacher_BTV.detach(), labels_BT)
    with full_precision(logits_NV):
        target_NV = teacher_NV.float().softmax(dim=-1)
        soft = F.cross_entropy(logits_NV.float(), target_NV, reduction="sum") / max(len(labels_N), 1)
        return (1 - alpha) * _hard(logits_NV, labels_N) + alpha * soft


def symmetric_kl(logits_NV: Tensor, other_NV: Tensor, count: Tensor | None = None) -> Tensor:
    """KL(p || q) + KL(q || p) of two predictions at masked positions, the mean over positions (`count` as in `mlm`).

    In each term only the second distribution has a gradient (ALUM, Liu et al., arXiv 2004.08994). Raises ValueError on
    different shapes.
    """
    if logits_NV.shape != other_NV.shape:
        raise ValueError(f"expected logits of one shape (N, V), got {shapes(logits_NV, other_NV)}")
    with full_precision(logits_NV):
        log_p_NV, log_q_NV = logits_NV.float().log_softmax(dim=-1), other_NV.float().log_softmax(dim=-1)
        total = F.kl_div(log_q_NV, log_p_NV.detach(), log_target=True, reduction="sum")
        total = total + F.kl_div(log_p_NV, log_q_NV.detach(), log_target=True, reduction="sum")
        return total / max(len(logits_NV), 1) if count is None else mean_of(total, count)


def masked_positions(labels_BT: Tensor) -> Tensor:
    """Return (N,) int64: the positions of labels other than -100 in the flattened (B * T) batch, in order."""
    return (labels_BT.flatten() != IGNORED).nonzero().squeeze(1)


def _hard(logits_NV: Tensor, labels_N: Tensor, count: Tensor | None = None) -> Tensor:
    with full_precision(logits_NV):
        total = F.cross_entropy(logits_NV.float(), labels_N, reduction="sum")
        return total / max(len(labels_N), 1) if count is None else mean_of(total, count)


def _masked_only(logits_BTV: Tensor, labels_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits and labels of the masked positions: only these are copied to float32."""
    if labels_BT.ndim == 0 or logits_BTV.shape[:-1] != labels_BT.shape:
        raise ValueError(
            f"logits must have the shape of the labels and a last dimension V, got {shapes(logits_BTV, labels_BT)}"
        )
    index_N = masked_positions(labels_BT)
    return logits_BTV.flatten(0, -2)[index_N], labels_BT.flatten()[index_N]
