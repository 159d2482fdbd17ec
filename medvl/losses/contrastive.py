"""Contrastive losses of dual-encoders.

Row i of `image_BE` and row i of `text_BE` belong together; all other rows are negatives. In a run of several ranks the
caller gathers first (`medvl.losses.distributed.gather`), so these functions never know of ranks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.losses.inputs import check_share, full_precision

# B pairs, E shared embedding dim.


def convirt(image_BE: Tensor, text_BE: Tensor, temperature: float = 0.1, image_weight: float = 0.75) -> Tensor:
    """Weighted bidirectional InfoNCE over cosine similarities (Zhang et al., arXiv 2010.00747, equations 2 to 4).

    `image_weight` (the paper's lambda) is the share of the image-to-text direction. Rows need not have unit length.
    Log-softmax keeps the loss finite at any temperature, where a ratio of exponentials overflows below about 0.02.

    Returns a scalar; with random embeddings it is near ln B. Raises ValueError on unequal shapes, a temperature of
    zero or below, or a weight outside [0, 1].
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    check_share("image_weight", image_weight)
    _check_pairs(image_BE, text_BE)
    with full_precision(image_BE):
        cosine_BB = F.normalize(image_BE.float(), dim=-1) @ F.normalize(text_BE.float(), dim=-1).T
        return _both_directions(cosine_BB / temperature, image_weight)


def clip(image_BE: Tensor, text_BE: Tensor, logit_scale: Tensor | float) -> Tensor:
    """Symmetric InfoNCE with a learned scale (Radford et al., arXiv 2103.00020, figure 3).

    The embeddings are L2-normalised by the caller; `logit_scale` multiplies the similarities, so it is the exponential
    of the parameter that models store. Returns a scalar. Raises ValueError on unequal shapes.
    """
    _check_pairs(image_BE, text_BE)
    with full_precision(image_BE):
        return _both_directions(logit_scale * (image_BE.float() @ text_BE.float().T), 0.5)


def siglip(image_BE: Tensor, text_BE: Tensor, logit_scale: Tensor | float, logit_bias: Tensor | float) -> Tensor:
    """Pairwise sigmoid loss (Zhai et al., arXiv 2303.15343, section 3.2): summed over all B x B pairs, divided by B.

    The embeddings are L2-normalised by the caller. Returns a scalar. Raises ValueError on unequal shapes.
    """
    _check_pairs(image_BE, text_BE)
    with full_precision(image_BE):
        logits_BB = logit_scale * (image_BE.float() @ text_BE.float().T) + logit_bias
        sign_BB = 2 * torch.eye(len(logits_BB), device=logits_BB.device) - 1  # +1 for the pair, -1 for all others
        return -F.logsigmoid(sign_BB * logits_BB).sum() / len(logits_BB)


def _both_directions(logits_BB: Tensor, image_weight: float) -> Tensor:
    target_B = torch.arange(len(logits_BB), device=logits_BB.device)
    image_to_text = F.cross_entropy(logits_BB, target_B)
    text_to_image = F.cross_entropy(logits_BB.T, target_B)
    return image_weight * image_to_text + (1 - image_weight) * text_to_image


def _check_pairs(image_BE: Tensor, text_BE: Tensor) -> None:
    if image_BE.ndim != 2 or image_BE.shape != text_BE.shape:
        raise ValueError(
            f"image and text embeddings must both be (B, E), got {tuple(image_BE.shape)} and {tuple(text_BE.shape)}"
        )
    if len(image_BE) == 0:
        raise ValueError("a contrastive loss needs at least one pair, got an empty batch")
