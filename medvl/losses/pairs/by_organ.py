"""Contrastive loss of images and texts by organ (fVLM, Shui et al., ICLR 2025).

In a run of several ranks the caller gathers first (`medvl.losses.common.gather`); this function
does not communicate. N pairs of the global batch, O organs, E shared embedding dim.
"""

import torch
from torch import Tensor

from medvl.losses.common import full_precision, one_number, shapes


def organ_contrast(
    image_NOE: Tensor,
    text_NOE: Tensor,
    logit_scale: Tensor | float,
    *,
    present_NO: Tensor,
    normal_NO: Tensor,
    text_id_NO: Tensor,
) -> Tensor:
    """Return the cross-entropy of each organ between its vectors in images and in texts, (O,); the
    system sums them.

    The targets of a row are equal shares among its own text, the texts of all rows in which the
    organ is normal where it is normal in this one, and equal texts. The loss of an organ is the
    mean over rows and over both directions, 0 with a zero gradient where no row has it abnormal.

    Args:
        image_NOE, text_NOE: L2-normalised by the caller.
        logit_scale: multiplies the cosines: the inverse of the temperature; one number.
        present_NO: bool: rows that have the organ, in the image and in a text; others neither count
            nor are compared.
        normal_NO: bool.
        text_id_NO: int64: equal for equal texts (`medvl.losses.pairs.blockwise.text_ids`).

    Raises ValueError on inconsistent shapes.
    """
    logit_scale = one_number("logit_scale", logit_scale)
    flags = (present_NO, normal_NO, text_id_NO)
    if (
        image_NOE.ndim != 3
        or image_NOE.shape != text_NOE.shape
        or any(flag_NO.shape != image_NOE.shape[:2] for flag_NO in flags)
    ):
        raise ValueError(
            f"expected images and texts (N, O, E) and flags (N, O), got "
            f"{shapes(image_NOE, text_NOE, *flags)}"
        )
    present_ON, normal_ON = present_NO.bool().T, normal_NO.bool().T
    id_ON = text_id_NO.T
    own_NN = torch.eye(len(image_NOE), dtype=torch.bool, device=image_NOE.device)
    same_ONN = id_ON[:, :, None] == id_ON[:, None]
    both_normal_ONN = normal_ON[:, :, None] & normal_ON[:, None]
    compared_ONN = present_ON[:, :, None] & present_ON[:, None]
    positive_ONN = (own_NN | same_ONN | both_normal_ONN) & compared_ONN
    target_ONN = positive_ONN / positive_ONN.sum(dim=2, keepdim=True).clamp(min=1)
    with full_precision(image_NOE):
        logits_ONN = logit_scale * torch.einsum("noe,moe->onm", image_NOE.float(), text_NOE.float())
        # finite, so that a row without the organ has a finite gradient, which its target removes
        logits_ONN = logits_ONN.masked_fill(~compared_ONN, torch.finfo(torch.float32).min)
        both_ONN = logits_ONN.log_softmax(dim=2) + logits_ONN.transpose(1, 2).log_softmax(dim=2)
        entropy_O = -(target_ONN * both_ONN.masked_fill(~positive_ONN, 0.0)).sum(dim=(1, 2)) / 2
    count_O = present_ON.sum(dim=1)
    is_trained_O = (present_ON & ~normal_ON).any(dim=1)
    return torch.where(is_trained_O, entropy_O / count_O.clamp(min=1), 0.0 * entropy_O)
