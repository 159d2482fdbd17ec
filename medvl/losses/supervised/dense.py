"""Losses of boxes and masks: focal loss, generalised IoU, soft Dice and cross-entropy, LViT's two losses.

Shape letters: B images, P cells, L labels; h, w cells of a grid.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.losses.gather import gather
from medvl.losses.precision import full_precision, mean_of, mean_or_zero, shapes

_SMOOTH, _TINY = 1e-5, 1e-12
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
    """Return (focal loss, generalised IoU loss) of cells against boxes, each over the number of cells with a box.

    The first is the focal loss summed over all cells and labels (Lin et al., arXiv 1708.02002, equation 5: alpha for
    ones, 1 - alpha for zeros), the second 1 - GIoU (Rezatofighi et al., arXiv 1902.09630) summed over the cells with a
    box; both are divided by the number of those cells, or by 1 where there is none.

    Args:
        logits_BPL: one column per label.
        box_BP4, true_BP4: left, top, right and bottom edges. The true ones of cells without a box are ignored.
        label_BPL: 1 or 0.
        inner_BP: bool, True on cells with a box.
        count: divisor in place of the number of those cells, such as the mean number of an update's micro-batches on
            all ranks.
        alpha, gamma: parameters of the focal loss.

    Returns two scalars; without any box the second one is 0 with a zero gradient.
    """
    from torchvision.ops import generalized_box_iou_loss, sigmoid_focal_loss

    inner_BP = inner_BP.bool()  # numbers would be taken for indices
    with full_precision(logits_BPL):
        cells = inner_BP.sum() if count is None else count
        focal = sigmoid_focal_loss(logits_BPL.float(), label_BPL.float(), alpha=alpha, gamma=gamma, reduction="sum")
        apart = generalized_box_iou_loss(box_BP4[inner_BP].float(), true_BP4[inner_BP].float(), reduction="sum")
        return mean_of(focal, cells), mean_of(apart, cells)


def bce_dice(logits_BLhw: Tensor, share_BLhw: Tensor, *, smoothing: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return (cross-entropy, soft Dice loss) of cells against masks.

    The first is the binary cross-entropy averaged over all cells, the second 1 - (2 sum(p s) + e) / (sum(p) + sum(s) +
    e), with sums over the cells of one label in one image, averaged over labels and images (Milletari et al., arXiv
    1606.04797, without the squares). With e, an image without a mask has a loss of 0 where nothing is predicted.

    Args:
        logits_BLhw: one plane per label.
        share_BLhw: fraction of each cell that is covered by the mask, 0 to 1.
        smoothing: e, in cells.

    Returns two scalars; 0 with a zero gradient for an empty batch. Raises ValueError on unequal shapes.
    """
    if logits_BLhw.ndim != 4 or logits_BLhw.shape != share_BLhw.shape:
        raise ValueError(f"expected logits and shares of one shape (B, L, h, w), got {shapes(logits_BLhw, share_BLhw)}")
    with full_precision(logits_BLhw):
        logits_BLhw, share_BLhw = logits_BLhw.float(), share_BLhw.float()
        entropy_BLhw = F.binary_cross_entropy_with_logits(logits_BLhw, share_BLhw, reduction="none")
        marked_BLhw = logits_BLhw.sigmoid()
        shared_BL = (marked_BLhw * share_BLhw).sum(dim=(2, 3))
        both_BL = marked_BLhw.sum(dim=(2, 3)) + share_BLhw.sum(dim=(2, 3))
        dice_BL = 1 - (2 * shared_BL + smoothing) / (both_BL + smoothing)
        return mean_or_zero(entropy_BLhw), mean_or_zero(dice_BL)


def lvit(prob_B1HW: Tensor, mask_B1HW: Tensor, weight_B: Tensor | None = None) -> Tensor:
    """Return half the Dice loss plus half the balanced cross-entropy of LViT (Li et al., arXiv 2206.14718; its code).

    The Dice loss of an image is 1 - (2 sum(p t) / 4 + e) / (sum(p^2) / 4 + sum(t^2) / 4 + e) with e = 1e-5, the mean
    over images; the quarters come from the published scaling of p and t by 0.5. An image without a mask has a Dice
    loss near 1 unless almost nothing is predicted. The cross-entropy is the mean over the pixels with t > 0.5 and the
    mean over those with t < 0.5, of the batches of all ranks, each by half; without any such pixel its half is 0.

    Args:
        prob_B1HW: probabilities; with several planes (B, L, H, W), the loss is the mean over planes.
        mask_B1HW: 1 or 0.
        weight_B: weight of each image in both means; None: all are equal.

    Returns a scalar, equal on all ranks; with weights of zero only it is 0 with a zero gradient. Raises
    ValueError on unequal shapes.
    """
    if prob_B1HW.ndim != 4 or prob_B1HW.shape != mask_B1HW.shape:
        message = f"expected probabilities and masks of one shape (B, 1, H, W), got {shapes(prob_B1HW, mask_B1HW)}"
        raise ValueError(message)
    if weight_B is not None and weight_B.shape != prob_B1HW.shape[:1]:
        raise ValueError(f"weight_B must be ({len(prob_B1HW)},), got {shapes(weight_B)}")
    with full_precision(prob_B1HW):
        p, t = prob_B1HW.float(), mask_B1HW.float()
        weight_B1 = torch.ones_like(p[:, :1, 0, 0]) if weight_B is None else weight_B.float()[:, None]
        shared_BL, square_BL = (p * t).sum(dim=(2, 3)), (p.square() + t.square()).sum(dim=(2, 3))
        dice_BL = 1 - (2 * shared_BL / 4 + _SMOOTH) / (square_BL / 4 + _SMOOTH)
        sums = [(weight_B1 * dice_BL).sum(dim=0), weight_B1.expand_as(dice_BL).sum(dim=0)]
        entropy = F.binary_cross_entropy(p, t, reduction="none")
        for chosen in (t > 0.5, t < 0.5):
            chosen_BLHW = chosen * weight_B1[:, :, None, None]
            sums += [(chosen_BLHW * entropy).sum(dim=(0, 2, 3)), chosen_BLHW.sum(dim=(0, 2, 3))]
        sums_6L = gather(torch.stack(sums)[None]).sum(dim=0)
        dice_L, positive_L, negative_L = sums_6L[::2] / sums_6L[1::2].clamp(min=_TINY)
        return (0.5 * dice_L + 0.25 * (positive_L + negative_L)).mean()


def contrastive_mask(prob_B1HW: Tensor, reference_B1HW: Tensor) -> Tensor:
    """Return (B,): 1 - cosine of predicted masks and reference masks (the LV loss of LViT, arXiv 2206.14718).

    Raises ValueError on unequal shapes.
    """
    if prob_B1HW.shape != reference_B1HW.shape:
        raise ValueError(f"expected masks of one shape, got {shapes(prob_B1HW, reference_B1HW)}")
    with full_precision(prob_B1HW):
        return 1 - F.cosine_similarity(prob_B1HW.float().flatten(1), reference_B1HW.float().flatten(1), dim=1)
