"""Losses of answers: classification over a vocabulary with soft targets, or word by word.

V answers of a vocabulary, or tokens of a tokenizer; N words of all answers of a batch; B questions.
"""

import torch.nn.functional as F
from torch import Tensor

from medvl.losses.precision import check_share, full_precision, shapes


def vqa_bce(logits_BV: Tensor, target_BV: Tensor) -> Tensor:
    """Binary cross-entropy of every answer, summed over the vocabulary and averaged over the questions.

    This is the mean over all entries times V, as METER and M3AE train VQA (after bottom-up attention, arXiv 1707.07998,
    section 3.3): without the factor the gradient would shrink with the size of the vocabulary.

    Args:
        logits_BV: one row per question, one column per answer.
        target_BV: score of each answer, within [0, 1]; all zeros where no answer is in the vocabulary.

    Returns a scalar, V ln 2 for logits of zero. Raises ValueError on unequal shapes.
    """
    if logits_BV.ndim != 2 or logits_BV.shape != target_BV.shape:
        raise ValueError(f"expected logits and targets of one shape (B, V), got {shapes(logits_BV, target_BV)}")
    with full_precision(logits_BV):
        loss = F.binary_cross_entropy_with_logits(logits_BV.float(), target_BV.float(), reduction="sum")
        return loss / max(len(logits_BV), 1)


def answer_words(
    logits_NV: Tensor,
    ids_N: Tensor,
    weight_N: Tensor,
    questions: int,
    teacher_NV: Tensor | None = None,
    alpha: float = 0.0,
) -> Tensor:
    """Cross-entropy of every word, weighted by its answer's score, summed over the words and averaged over questions.

    As in ALBEF's answer decoder (Li et al., arXiv 2107.07651, section 5): answers are weighted by their scores, and
    long answers weigh more than short ones, as in the likelihood that ranks them at inference.

    Args:
        logits_NV: scores of each word from the words before it, the closing token included.
        ids_N: int64, the correct words.
        weight_N: score of the answer that each word belongs to, within [0, 1].
        questions: B, including questions without an answer.
        teacher_NV: scores of the same words by a moving average of the model, without gradient (momentum distillation).
        alpha: weight of the cross-entropy with the teacher's distribution; that with the correct words has 1 - alpha.

    Returns a scalar, near the number of words per question times ln V for an untrained decoder; 0 with a zero gradient
    where there is no word. Raises ValueError on inconsistent shapes, and on an alpha outside [0, 1].
    """
    check_share("alpha", alpha)
    if weight_N.shape != ids_N.shape:
        raise ValueError(f"each word needs a weight: {len(ids_N)} words and {len(weight_N)} weights")
    log_N = word_log_probability(logits_NV, ids_N)
    if teacher_NV is not None:
        if teacher_NV.shape != logits_NV.shape:
            raise ValueError(f"expected logits of the teacher of one shape, got {shapes(logits_NV, teacher_NV)}")
        with full_precision(logits_NV):
            target_NV = teacher_NV.detach().float().softmax(dim=1)
            soft_N = F.cross_entropy(logits_NV.float(), target_NV, reduction="none")
        log_N = (1 - alpha) * log_N - alpha * soft_N
    return -(log_N * weight_N.float()).sum() / max(questions, 1)


def word_log_probability(logits_NV: Tensor, ids_N: Tensor) -> Tensor:
    """Return (N,) float32: the log-probability of each word among all V.

    Raises ValueError on inconsistent shapes.
    """
    if logits_NV.ndim != 2 or ids_N.shape != logits_NV.shape[:1]:
        raise ValueError(f"expected logits (N, V) and ids (N,), got {shapes(logits_NV, ids_N)}")
    with full_precision(logits_NV):
        return -F.cross_entropy(logits_NV.float(), ids_N, reduction="none")
