"""Alignment of words and patches by optimal transport (UNITER, Chen et al., arXiv 1909.11740, section 3.2; ViLT).

B samples, M words, N patches, E width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.losses.precision import full_precision, shapes

_NORM_EPS = 1e-5
"""As in the released code of UNITER and ViLT."""


def word_patch_alignment(
    text_BME: Tensor,
    image_BNE: Tensor,
    text_pad_BM: Tensor,
    image_pad_BN: Tensor,
    beta: float = 0.5,
    iterations: int = 50,
) -> tuple[Tensor, Tensor]:
    """Return the cost of moving the words of each sample onto its patches, and the transport plan.

    The cost of a word and a patch is 1 - cosine. The plan is IPOT's (Xie et al., arXiv 1802.04307, algorithm 1, one
    inner iteration): nonnegative, words have equal shares of a total of 1, patches nearly so. It is detached, so that
    the gradient goes through the costs alone.

    Padding is ignored, even if it is not finite.

    Args:
        text_BME, image_BNE: states of words and patches; not normalised.
        text_pad_BM, image_pad_BN: bool, True on padding and on tokens that take no part.
        beta: step of the proximal point method; smaller is faster and less stable.
        iterations: iterations of the outer loop.

    Returns:
        distance_B: float32, within [0, 2]; 0 with a zero gradient for a sample without words or without patches.
        plan_BNM: float32; 0 where a word or a patch is padding.

    Raises ValueError on inconsistent shapes, masks that are not bool, a beta of zero or below, or no iteration.
    """
    if beta <= 0 or iterations < 1:
        raise ValueError(f"expected a beta above 0 and at least one iteration, got {beta} and {iterations}")
    pads = text_pad_BM.dtype == image_pad_BN.dtype == torch.bool
    fits = text_BME.ndim == image_BNE.ndim == 3 and text_BME.shape[::2] == image_BNE.shape[::2]
    if not (pads and fits) or text_pad_BM.shape != text_BME.shape[:2] or image_pad_BN.shape != image_BNE.shape[:2]:
        got = shapes(text_BME, image_BNE, text_pad_BM, image_pad_BN)
        raise ValueError(f"expected (B, M, E), (B, N, E), bool (B, M) and bool (B, N), got {got}")
    with full_precision(text_BME):
        text_BME, image_BNE = _unit(text_BME, text_pad_BM), _unit(image_BNE, image_pad_BN)
        pad_BNM = image_pad_BN[:, :, None] | text_pad_BM[:, None, :]
        cost_BNM = (1 - image_BNE @ text_BME.transpose(1, 2)).masked_fill(pad_BNM, 0.0)
        plan_BNM = _ipot(cost_BNM.detach(), pad_BNM, beta, iterations)
        return (cost_BNM * plan_BNM).sum(dim=(1, 2)), plan_BNM


def _unit(states_BTE: Tensor, pad_BT: Tensor) -> Tensor:
    """Return normalised states in float32, with zeros as padding, which may not have been finite."""
    return F.normalize(states_BTE.float().masked_fill(pad_BT[:, :, None], 0.0), dim=-1, eps=_NORM_EPS)


@torch.no_grad()
def _ipot(cost_BNM: Tensor, pad_BNM: Tensor, beta: float, iterations: int) -> Tensor:
    kernel_BNM = (-cost_BNM / beta).exp().masked_fill(pad_BNM, 0.0)
    real_BNM = ~pad_BNM
    real_BN, real_BM = real_BNM.any(dim=2), real_BNM.any(dim=1)  # none in a sample that lacks words or patches
    share_BN, share_BM = (real / real.sum(dim=1, keepdim=True).clamp(min=1) for real in (real_BN, real_BM))
    plan_BNM, scale_BM = real_BNM.float(), share_BM
    for _ in range(iterations):
        moved_BNM = kernel_BNM * plan_BNM
        scale_BN = share_BN / _or_one((moved_BNM @ scale_BM[:, :, None]).squeeze(2), real_BN)
        scale_BM = share_BM / _or_one((scale_BN[:, None] @ moved_BNM).squeeze(1), real_BM)
        plan_BNM = scale_BN[:, :, None] * moved_BNM * scale_BM[:, None]
    return plan_BNM


def _or_one(value: Tensor, real: Tensor) -> Tensor:
    """Replace the zeros of padding by 1, to avoid a division by zero."""
    return value.masked_fill(~real, 1.0)
