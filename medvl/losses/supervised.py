"""Losses of supervised tasks: findings, boxes and masks, and answers."""

import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.losses.common import check_share, full_precision, gather, mean_of, mean_or_zero, shapes

# Classification of findings: several labels per image, some of them unknown. B images, L labels.


def multilabel_bce(logits_BL: Tensor, target_BL: Tensor, count: Tensor | None = None) -> Tensor:
    """Binary cross-entropy, averaged over the labels that are known.

    Args:
        logits_BL: one row per image, one column per label.
        target_BL: 1 or 0; NaN where a label is unknown, or -1 where it is uncertain; such entries
            are ignored.
        count: divisor of the sum in place of the number of known labels, such as the mean number of
            an update's micro-batches on all ranks.

    Returns a scalar, ln 2 for logits of zero; 0 with a zero gradient where no label is known.
    Raises ValueError on unequal shapes.
    """
    if logits_BL.ndim != 2 or logits_BL.shape != target_BL.shape:
        raise ValueError(
            f"labels need logits and targets of one shape (B, L), got "
            f"{shapes(logits_BL, target_BL)}"
        )
    known_BL = known_labels(target_BL)
    with full_precision(logits_BL):
        loss_BL = F.binary_cross_entropy_with_logits(
            logits_BL.float(), target_BL.masked_fill(~known_BL, 0).float(), reduction="none"
        )
        return mean_of(
            loss_BL.masked_fill(~known_BL, 0.0).sum(), known_BL.sum() if count is None else count
        )


def known_labels(target_BL: Tensor) -> Tensor:
    """Return (B, L) bool: True for labels that are neither uncertain (-1) nor unknown (NaN)."""
    return target_BL >= 0


# Losses of boxes and masks: focal loss, generalised IoU, soft Dice and cross-entropy, LViT's two
# losses.
#
# Shape letters: B images, P cells, L labels; h, w cells of a grid.

_SMOOTH = 1e-5
_TINY = 1e-12
"""Smoothing of Dice and smallest divisor in `lvit`."""


def detection(
    logits_BPL: Tensor,
    box_BP4: Tensor,
    label_BPL: Tensor,
    true_BP4: Tensor,
    inner_BP: Tensor,
    count: Tensor | None = None,
    *,
    alpha: float = 0.25,
    gamma: float = 2.0,
) -> tuple[Tensor, Tensor]:
    """Return (focal loss, generalised IoU loss) of cells against boxes, each over the number of
    cells with a box.

    The first is the focal loss summed over all cells and labels (Lin et al., arXiv 1708.02002,
    equation 5: alpha for ones, 1 - alpha for zeros), the second 1 - GIoU (Rezatofighi et al., arXiv
    1902.09630) summed over the cells with a box; both are divided by the number of those cells, or
    by 1 if there is none.

    Args:
        logits_BPL: one column per label.
        box_BP4, true_BP4: left, top, right and bottom edges. The true ones of cells without a box
            are ignored.
        label_BPL: 1 or 0.
        inner_BP: bool, True on cells with a box.
        count: divisor in place of the number of those cells, such as the mean number of an update's
            micro-batches on all ranks.
        alpha, gamma: parameters of the focal loss.

    Returns two scalars; without any box the second one is 0 with a zero gradient.
    """
    from torchvision.ops import generalized_box_iou_loss, sigmoid_focal_loss

    inner_BP = inner_BP.bool()  # numbers would be taken for indices
    with full_precision(logits_BPL):
        cells = inner_BP.sum() if count is None else count
        focal = sigmoid_focal_loss(
            logits_BPL.float(), label_BPL.float(), alpha=alpha, gamma=gamma, reduction="sum"
        )
        apart = generalized_box_iou_loss(
            box_BP4[inner_BP].float(), true_BP4[inner_BP].float(), reduction="sum"
        )
        return mean_of(focal, cells), mean_of(apart, cells)


def bce_dice(
    logits_BLhw: Tensor, share_BLhw: Tensor, *, smoothing: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return (cross-entropy, soft Dice loss) of cells against masks.

    The first is the binary cross-entropy averaged over all cells, the second 1 - (2 sum(p s) + e) /
    (sum(p) + sum(s) + e), with sums over the cells of one label in one image, averaged over labels
    and images (Milletari et al., arXiv 1606.04797, without the squares). With e, an image without a
    mask has a loss of 0 where nothing is predicted.

    Args:
        logits_BLhw: one plane per label.
        share_BLhw: fraction of each cell that is covered by the mask, 0 to 1.
        smoothing: e, in cells.

    Returns two scalars; 0 with a zero gradient for an empty batch. Raises ValueError on unequal
    shapes.
    """
    if logits_BLhw.ndim != 4 or logits_BLhw.shape != share_BLhw.shape:
        raise ValueError(
            f"expected logits and shares of one shape (B, L, h, w), got "
            f"{shapes(logits_BLhw, share_BLhw)}"
        )
    with full_precision(logits_BLhw):
        logits_BLhw = logits_BLhw.float()
        share_BLhw = share_BLhw.float()
        entropy_BLhw = F.binary_cross_entropy_with_logits(logits_BLhw, share_BLhw, reduction="none")
        marked_BLhw = logits_BLhw.sigmoid()
        shared_BL = (marked_BLhw * share_BLhw).sum(dim=(2, 3))
        both_BL = marked_BLhw.sum(dim=(2, 3)) + share_BLhw.sum(dim=(2, 3))
        dice_BL = 1 - (2 * shared_BL + smoothing) / (both_BL + smoothing)
        return mean_or_zero(entropy_BLhw), mean_or_zero(dice_BL)


def lvit(prob_B1HW: Tensor, mask_B1HW: Tensor, weight_B: Tensor | None = None) -> Tensor:
    """Return half the Dice loss plus half the balanced cross-entropy of LViT (Li et al., arXiv
    2206.14718; its code).

    The Dice loss of an image is 1 - (2 sum(p t) / 4 + e) / (sum(p^2) / 4 + sum(t^2) / 4 + e) with e
    = 1e-5, the mean over images; the quarters come from the published scaling of p and t by 0.5. An
    image without a mask has a Dice loss near 1 unless almost nothing is predicted. The
    cross-entropy is the mean over the pixels with t > 0.5 and the mean over those with t < 0.5, of
    the batches of all ranks, each by half; without any such pixel its half is 0.

    Args:
        prob_B1HW: probabilities; with several planes (B, L, H, W), the loss is the mean over
            planes.
        mask_B1HW: 1 or 0.
        weight_B: weight of each image in both means; None: all are equal.

    Returns a scalar, equal on all ranks; with weights of zero only it is 0 with a zero gradient.
    Raises ValueError on unequal shapes.
    """
    if prob_B1HW.ndim != 4 or prob_B1HW.shape != mask_B1HW.shape:
        message = (
            f"expected probabilities and masks of one shape (B, 1, H, W), got "
            f"{shapes(prob_B1HW, mask_B1HW)}"
        )
        raise ValueError(message)
    if weight_B is not None and weight_B.shape != prob_B1HW.shape[:1]:
        raise ValueError(f"weight_B must be ({len(prob_B1HW)},), got {shapes(weight_B)}")
    with full_precision(prob_B1HW):
        p = prob_B1HW.float()
        t = mask_B1HW.float()
        weight_B1 = (
            torch.ones_like(p[:, :1, 0, 0]) if weight_B is None else weight_B.float()[:, None]
        )
        shared_BL = (p * t).sum(dim=(2, 3))
        square_BL = (p.square() + t.square()).sum(dim=(2, 3))
        dice_BL = 1 - (2 * shared_BL / 4 + _SMOOTH) / (square_BL / 4 + _SMOOTH)
        sums = [(weight_B1 * dice_BL).sum(dim=0), weight_B1.expand_as(dice_BL).sum(dim=0)]
        entropy = F.binary_cross_entropy(p, t, reduction="none")
        for side in (t > 0.5, t < 0.5):
            chosen_BLHW = side * weight_B1[:, :, None, None]
            sums += [(chosen_BLHW * entropy).sum(dim=(0, 2, 3)), chosen_BLHW.sum(dim=(0, 2, 3))]
        sums_6L = gather(torch.stack(sums)[None]).sum(dim=0)
        dice_L, positive_L, negative_L = sums_6L[::2] / sums_6L[1::2].clamp(min=_TINY)
        return (0.5 * dice_L + 0.25 * (positive_L + negative_L)).mean()


def contrastive_mask(prob_B1HW: Tensor, reference_B1HW: Tensor) -> Tensor:
    """Return (B,): 1 - cosine of predicted masks and reference masks (the LV loss of LViT, arXiv
    2206.14718).

    Raises ValueError on unequal shapes.
    """
    if prob_B1HW.shape != reference_B1HW.shape:
        raise ValueError(f"expected masks of one shape, got {shapes(prob_B1HW, reference_B1HW)}")
    with full_precision(prob_B1HW):
        return 1 - F.cosine_similarity(
            prob_B1HW.float().flatten(1), reference_B1HW.float().flatten(1), dim=1
        )


# Losses of answers: classification over a vocabulary with soft targets, choice among the options of
# a question, or word by word.
#
# V answers of a vocabulary, or tokens of a tokenizer; N words of all answers of a batch; B
# questions, O options.


def vqa_bce(logits_BV: Tensor, target_BV: Tensor) -> Tensor:
    """Binary cross-entropy of every answer, summed over the vocabulary and averaged over the
    questions.

    This is the mean over all entries times V, as METER and M3AE train VQA (after bottom-up
    attention, arXiv 1707.07998, section 3.3): without the factor the gradient would shrink with the
    size of the vocabulary.

    Args:
        logits_BV: one row per question, one column per answer.
        target_BV: score of each answer, within [0, 1]; all zeros where no answer is in the
            vocabulary.

    Returns a scalar, V ln 2 for logits of zero. Raises ValueError on unequal shapes.
    """
    if logits_BV.ndim != 2 or logits_BV.shape != target_BV.shape:
        raise ValueError(
            f"expected logits and targets of one shape (B, V), got {shapes(logits_BV, target_BV)}"
        )
    with full_precision(logits_BV):
        loss = F.binary_cross_entropy_with_logits(
            logits_BV.float(), target_BV.float(), reduction="sum"
        )
        return loss / max(len(logits_BV), 1)


def option_choice(score_BO: Tensor, target_BO: Tensor, count: Tensor | None = None) -> Tensor:
    """Cross-entropy of the right option of each question, averaged over the questions.

    The softmax is over the options of a question. Of several right options, the sum of their
    probabilities counts.

    Args:
        score_BO: one row per question, one column per option.
        target_BO: 1 for right options, 0 for others; NaN where a question has fewer options. A
            question without a right option is left out.
        count: divisor of the sum in place of the number of those questions, such as the mean number
            of an update's micro-batches on all ranks.

    Returns a scalar, ln O for equal scores; 0 with a zero gradient where no question has a right
    option. Raises ValueError on unequal shapes.
    """
    if score_BO.ndim != 2 or score_BO.shape != target_BO.shape:
        raise ValueError(
            f"expected scores and targets of one shape (B, O), got {shapes(score_BO, target_BO)}"
        )
    right_BO = target_BO == 1
    asked_B = right_BO.any(dim=1)
    with full_precision(score_BO):
        # finite, so that a row without an option has a finite gradient, which is not counted
        lowest = torch.finfo(torch.float32).min
        log_BO = score_BO.float().masked_fill(target_BO.isnan(), lowest).log_softmax(dim=1)
        log_B = log_BO.masked_fill(~right_BO, lowest).logsumexp(dim=1)
        total = -log_B.where(asked_B, 0.0).sum()
        return mean_of(total, asked_B.sum() if count is None else count)


def answer_words(
    logits_NV: Tensor,
    ids_N: Tensor,
    weight_N: Tensor,
    questions: int,
    teacher_NV: Tensor | None = None,
    alpha: float | Tensor = 0.0,
) -> Tensor:
    """Cross-entropy of every word, weighted by its answer's score, summed over the words and
    averaged over questions.

    As in ALBEF's answer decoder (Li et al., arXiv 2107.07651, section 5): answers are weighted by
    their scores, and long answers weigh more than short ones, as in the likelihood that ranks them
    at inference.

    Args:
        logits_NV: scores of each word from the words before it, the closing token included.
        ids_N: int64, the correct words.
        weight_N: score of the answer that each word belongs to, within [0, 1].
        questions: B, including questions without an answer.
        teacher_NV: scores of the same words by a moving average of the model, without gradient
            (momentum distillation).
        alpha: weight of the cross-entropy with the teacher's distribution; that with the correct
            words has 1 - alpha.

    Returns a scalar, near the number of words per question times ln V for an untrained decoder; 0
    with a zero gradient if there is no word. Raises ValueError on inconsistent shapes, and on an
    alpha outside [0, 1].
    """
    check_share("alpha", alpha)
    if weight_N.shape != ids_N.shape:
        raise ValueError(
            f"each word needs a weight: {len(ids_N)} words and {len(weight_N)} weights"
        )
    log_N = word_log_probability(logits_NV, ids_N)
    if teacher_NV is not None:
        if teacher_NV.shape != logits_NV.shape:
            raise ValueError(
                f"expected logits of the teacher of one shape, got {shapes(logits_NV, teacher_NV)}"
            )
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
