"""Losses of boxes and masks: focal loss, generalised IoU, soft Dice and cross-entropy.

Shape letters: B images, P cells, L labels; h, w cells of a grid.
"""

import torch.nn.functional as F
from torch import Tensor

from medvl.losses.precision import full_precision, shapes


def detection(
    logits_BPL: Tensor,
    box_BP4: Tensor,
    label_BPL: Tensor,
    true_BP4: Tensor,
    inner_BP: Tensor,
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
        alpha, gamma: parameters of the focal loss.

    Returns two scalars; without any box the second one is 0 with a zero gradient.
    """
    from torchvision.ops import generalized_box_iou_loss, sigmoid_focal_loss

    with full_precision(logits_BPL):
        count = inner_BP.sum().clamp(min=1)
        focal = sigmoid_focal_loss(logits_BPL.float(), label_BPL.float(), alpha=alpha, gamma=gamma, reduction="sum")
        apart = generalized_box_iou_loss(box_BP4[inner_BP].float(), true_BP4[inner_BP].float(), reduction="sum")
        return focal / count, apart / count


def bce_dice(logits_BLhw: Tensor, share_BLhw: Tensor, *, smoothing: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return (cross-entropy, soft Dice loss) of cells against masks.

    The first is the binary cross-entropy averaged over all cells, the second 1 - (2 sum(p s) + e) / (sum(p) + sum(s) +
    e), with sums over the cells of one label in one image, averaged over labels and images (Milletari et al., arXiv
    1606.04797, without the squares). With e, an image without a mask has a loss of 0 where nothing is predicted.

    Args:
        logits_BLhw: one plane per label.
        share_BLhw: fraction of each cell that is covered by the mask, 0 to 1.
        smoothing: e, in cells.

    Returns two scalars. Raises ValueError on unequal shapes.
    """
    if logits_BLhw.ndim != 4 or logits_BLhw.shape != share_BLhw.shape:
        raise ValueError(f"expected logits and shares of one shape (B, L, h, w), got {shapes(logits_BLhw, share_BLhw)}")
    with full_precision(logits_BLhw):
        logits_BLhw, share_BLhw = logits_BLhw.float(), share_BLhw.float()
        entropy = F.binary_cross_entropy_with_logits(logits_BLhw, share_BLhw)
        marked_BLhw = logits_BLhw.sigmoid()
        shared_BL = (marked_BLhw * share_BLhw).sum(dim=(2, 3))
        both_BL = marked_BLhw.sum(dim=(2, 3)) + share_BLhw.sum(dim=(2, 3))
        return entropy, (1 - (2 * shared_BL + smoothing) / (both_BL + smoothing)).mean()
