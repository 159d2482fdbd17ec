"""Contrastive losses of dual-encoders.

Row i of `image_BE` and row i of `text_BE` are a pair; all other rows are negatives. In a run of several ranks the
caller gathers first (`medvl.losses.gather.gather`); these functions do not communicate.

A large matrix of logits is computed in blocks (`medvl.losses.pairs.blockwise`): the same value and gradient, in memory
that grows with B and not with its square.

Reports repeat, and the images of a study share one: with `groups` (`medvl.losses.pairs.positives`), rows that agree in
any of them are positives of each other. None of the papers does so; it is off by default.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from medvl.losses.pairs.blockwise import info_nce, pairwise_sigmoid
from medvl.losses.precision import check_share, full_precision, one_number, product_dtype, shapes

# B pairs, E shared embedding dim.


def convirt(
    image_BE: Tensor,
    text_BE: Tensor,
    temperature: float = 0.1,
    image_weight: float = 0.75,
    *,
    groups: Sequence[Tensor] = (),
) -> Tensor:
    """Weighted bidirectional InfoNCE over cosine similarities (Zhang et al., arXiv 2010.00747, equations 2 to 4).

    `image_weight` (the paper's lambda) is the share of the image-to-text direction. Rows need not have unit length.
    Log-softmax keeps the loss finite at any temperature, where a ratio of exponentials overflows below about 0.02.

    `groups`, (B,) each: a row's target is then uniform over all rows that agree with it in any of them.

    Returns a scalar; with random embeddings it is near ln B. Raises ValueError on unequal shapes, a temperature of
    zero or below, or a weight outside [0, 1].
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    check_share("image_weight", image_weight)
    _check_pairs(image_BE, text_BE, groups)
    products = product_dtype(image_BE)
    with full_precision(image_BE):
        scaled_BE = F.normalize(image_BE.float(), dim=-1) / temperature
        return info_nce(scaled_BE, F.normalize(text_BE.float(), dim=-1), image_weight, groups, products=products)


def clip(image_BE: Tensor, text_BE: Tensor, logit_scale: Tensor | float, *, groups: Sequence[Tensor] = ()) -> Tensor:
    """Symmetric InfoNCE with a learned scale (Radford et al., arXiv 2103.00020, figure 3).

    The caller normalises the embeddings; `logit_scale` multiplies the similarities: the exponential of the parameter
    that models store, as a number or a tensor with one element. `groups` as for `convirt`.

    Returns a scalar. Raises ValueError on unequal shapes, or a scale of several numbers.
    """
    _check_pairs(image_BE, text_BE, groups)
    logit_scale = one_number("logit_scale", logit_scale)
    products = product_dtype(image_BE)
    with full_precision(image_BE):
        return info_nce(logit_scale * image_BE.float(), text_BE.float(), 0.5, groups, products=products)


def siglip(
    image_BE: Tensor,
    text_BE: Tensor,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float,
    *,
    groups: Sequence[Tensor] = (),
) -> Tensor:
    """Pairwise sigmoid loss (Zhai et al., arXiv 2303.15343, section 3.2): summed over all B x B pairs, divided by B.

    The caller normalises the embeddings. `logit_scale` multiplies the similarities and `logit_bias` is added, each a
    number or a tensor with one element. `groups`, (B,) each: rows that agree in any of them are positives.

    Returns a scalar. Raises ValueError on unequal shapes, or a scale or bias of several numbers.
    """
    _check_pairs(image_BE, text_BE, groups)
    logit_scale, logit_bias = one_number("logit_scale", logit_scale), one_number("logit_bias", logit_bias)
    products = product_dtype(image_BE)
    with full_precision(image_BE):
        scaled_BE = logit_scale * image_BE.float()
        return pairwise_sigmoid(scaled_BE, text_BE.float(), logit_bias, groups, products=products)


def _check_pairs(image_BE: Tensor, text_BE: Tensor, groups: Sequence[Tensor]) -> None:
    if image_BE.ndim != 2 or image_BE.shape != text_BE.shape:
        raise ValueError(f"image and text embeddings must both be (B, E), got {shapes(image_BE, text_BE)}")
    if len(image_BE) == 0:
        raise ValueError("expected at least one pair, got an empty batch")
    if any(group_B.shape != image_BE.shape[:1] for group_B in groups):
        raise ValueError(
            f"groups must be ({len(image_BE)},) each, as many as pairs: got {[tuple(g.shape) for g in groups]}"
        )
