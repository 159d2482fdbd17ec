"""Contrast of images with statements; an image has several statements, and images share statements.

    scores_NM = patch_cosine(tokens_NKE, texts_ME, scale)  # RadZero: each image pooled by each
    statement to_image, to_statement = statement_contrast(scale * scores_NM, positive_NM)

Every ratio of exponentials is a log-sum-exp. Two ranks compare their own images with the statements
of all ranks and gather the rows of scores: the loss is that of one process, and each rank holds its
share of the comparison.

Shape letters: N images, M statements, K tokens of an image, E shared embedding dim.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from medvl.losses.precision import full_precision, one_number, shapes

_CHUNK_BYTES = 2**29
"""Memory of the scores of one chunk of columns."""


def statement_contrast(
    logits_NM: Tensor, positive_NM: Tensor, *, equal_rows: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (statement to image, image to statement), scalars: the mean over positive pairs of a
    contrast each.

    A positive pair (i, m) is compared with the negatives of its column (statement to image) or of
    its row (image to statement); other positives are left out of the denominator (MP-NCE of
    UniCLIP, arXiv 2209.13430, as RadZero uses it). With one positive in each column, the first is
    the cross-entropy over images. Without a positive, both are 0.

    With `equal_rows` each column (statement to image) or row counts as one, as the mean over its
    positive pairs. Where k images each have the same statement in a column of its own, the mean
    over pairs counts it k * k times.

    Raises ValueError on unequal shapes.
    """
    if logits_NM.ndim != 2 or logits_NM.shape != positive_NM.shape:
        raise ValueError(
            f"logits and positives must both be (N, M), got {shapes(logits_NM, positive_NM)}"
        )
    logits_NM = logits_NM.float()
    positive_NM = positive_NM.bool()
    # Not minus infinity: a column without negatives has no gradient, and no NaN.
    negative_NM = logits_NM.masked_fill(positive_NM, torch.finfo(torch.float32).min)

    def direction(dim: int) -> Tensor:
        others = (
            negative_NM.logsumexp(dim=dim, keepdim=True)
            if negative_NM.shape[dim]
            else logits_NM.new_zeros(1)
        )
        pair_NM = F.softplus(others - logits_NM) * positive_NM
        if not equal_rows:
            return pair_NM.sum() / positive_NM.sum().clamp(min=1)
        count = positive_NM.sum(dim=dim, keepdim=True)
        return (pair_NM / count.clamp(min=1)).sum() / (count > 0).sum().clamp(min=1)

    return direction(0), direction(1)


def patch_cosine(
    tokens_NKE: Tensor, texts_ME: Tensor, scale: Tensor | float, *, chunk: int | None = None
) -> Tensor:
    """Return (N, M) float32: the cosine of each text with the mean of an image's tokens that the
    text attends to.

    Attention is the softmax over an image's tokens of `scale` times their cosine with the text
    (RadZero, arXiv 2504.07416, section 3.2). Tokens and texts need not have unit length. `chunk` is
    the number of texts compared at a time, by default as many as fit in 512 MiB; chunks are
    recomputed in the backward pass, with equal results.

    Raises ValueError on inconsistent shapes, a scale of several numbers, or an image without
    tokens.
    """
    fits = tokens_NKE.ndim == 3 and texts_ME.ndim == 2 and tokens_NKE.shape[2] == texts_ME.shape[1]
    if not fits or not tokens_NKE.shape[1]:
        raise ValueError(
            f"expected tokens (N, K, E) and texts (M, E), got {shapes(tokens_NKE, texts_ME)}"
        )
    images, tokens, dim = tokens_NKE.shape
    with full_precision(tokens_NKE):
        unit_NKE = F.normalize(tokens_NKE.float(), dim=2)
        factor = torch.as_tensor(
            one_number("scale", scale), device=unit_NKE.device, dtype=torch.float32
        )

        def compare(unit_NKE: Tensor, text_CE: Tensor, factor: Tensor) -> Tensor:
            cosine_NCK = text_CE @ unit_NKE.transpose(1, 2)
            seen_NCE = (factor * cosine_NCK).softmax(dim=2) @ unit_NKE
            return (F.normalize(seen_NCE, dim=2) * text_CE).sum(dim=2)

        chunk = chunk or max(1, _CHUNK_BYTES // (4 * max(1, images * (2 * tokens + dim))))
        return in_chunks(
            compare, unit_NKE, F.normalize(texts_ME.float(), dim=1), factor, chunk=chunk
        )


def in_chunks(
    score: Callable[..., Tensor], rows: Tensor, columns_MD: Tensor, *others: Tensor, chunk: int
) -> Tensor:
    """Return score(rows, columns, *others), (N, M), computed for `chunk` columns at a time.

    More than one chunk are recomputed in the backward pass, so that memory does not grow with M;
    random numbers (dropout) are the same in both passes.
    """
    if len(columns_MD) <= chunk:
        return score(rows, columns_MD, *others)
    parts = columns_MD.split(chunk)
    if not torch.is_grad_enabled():
        return torch.cat([score(rows, part_CD, *others) for part_CD in parts], dim=1)
    return torch.cat(
        [checkpoint(score, rows, part_CD, *others, use_reentrant=False) for part_CD in parts], dim=1
    )
