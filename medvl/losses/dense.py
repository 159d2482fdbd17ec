"""Boxes and masks: the focal loss, generalised overlap, and soft Dice with cross-entropy.

Shape letters: B images, P cells, L labels; h, w cells of a grid.
"""

import torch.nn.functional as F
from torch import Tensor

from medvl.losses.precision import full_precision


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
    """What cells say of labels and of places: (focal loss, generalised overlap), each over the cells that have a box.

    The focal loss of all cells and labels (Lin et al., arXiv 1708.02002, equation 5: alpha for ones, 1 - alpha for
    zeros) in sum, and 1 - GIoU (Rezatofighi et al., arXiv 1902.09630) of the cells with a box in sum; both divided by
    the number of those cells, or 1 where there is none.

    Args:
        logits_BPL: a column a label.
        box_BP4, true_BP4: left, top, right and bottom edges. The true ones of cells without a box are not looked at.
        label_BPL: 1 or 0.
        inner_BP: bool, the cells that have a box.
        alpha, gamma: of the focal loss.

    Returns two scalars; with no box at all the second one is 0, with a gradient of zeros.
    """
    from torchvision.ops import generalized_box_iou_loss, sigmoid_focal_loss

    with full_precision(logits_BPL):
        count = inner_BP.sum().clamp(min=1)
        focal = sigmoid_focal_loss(logits_BPL.float(), label_BPL.float(), alpha=alpha, gamma=gamma, reduction="sum")
        apart = generalized_box_iou_loss(box_BP4[inner_BP].float(), true_BP4[inner_BP].float(), reduction="sum")
        return focal / count, apart / count


def bce_dice(logits_BLhw: Tensor, share_BLhw: Tensor, *, smoothing: float = 1.0) -> tuple[Tensor, Tensor]:
    """What cells say of masks: (cross-entropy, soft Dice loss).

    The binary cross-entropy averaged over all cells; and 1 - (2 sum(p s) + e) / (sum(p) + sum(s) + e), the sums over
    the cells of one label in one image, averaged over labels and images (Milletari et al., arXiv 1606.04797, without
    the squares). With e, an image without a mask has a loss of 0 once nothing is marked, and not 0 / 0.

    Args:
        logits_BLhw: a plane a label.
        share_BLhw: how much of each cell lies in the mask, 0 to 1.
        smoothing: e, in cells.

    Returns two scalars. Raises ValueError on unequal shapes.
    """
    if logits_BLhw.ndim != 4 or logits_BLhw.shape != share_BLhw.shape:
        raise ValueError(
            f"masks need logits and shares of one shape (B, L, h, w), got {tuple(logits_BLhw.shape)} "
            f"and {tuple(share_BLhw.shape)}"
        )
    with full_precision(logits_BLhw):
        logits_BLhw, share_BLhw = logits_BLhw.float(), share_BLhw.float()
        entropy = F.binary_cross_entropy_with_logits(logits_BLhw, share_BLhw)
        marked_BLhw = logits_BLhw.sigmoid()
        shared_BL = (marked_BLhw * share_BLhw).sum(dim=(2, 3))
        both_BL = marked_BLhw.sum(dim=(2, 3)) + share_BLhw.sum(dim=(2, 3))
        return entropy, (1 - (2 * shared_BL + smoothing) / (both_BL + smoothing)).mean()
