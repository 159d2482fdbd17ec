"""GLoRIA's similarity of words and image regions, and its local loss (Huang et al., ICCV 2021,
section 3.3).

    similarity_NM = gloria_similarity(regions_NPE, words_MWE, word_mask_MW)  # every image with
    every text image_to_text, text_to_image = gloria_local(regions_BPE, words_BWE, word_mask_BW)

Comparing every text with every image takes several tensors of N * M * W * P numbers. Texts are
therefore processed in chunks of limited memory, sorted by length, each padded to its longest text;
where all chunks would keep too much for the backward pass, they are recomputed one at a time. With
at most E regions, attended contexts are not formed: their products with the words follow from the
attended scores, and their norms from the Gram matrix of the regions, which all texts share. On a
GPU, torch.compile fuses the passes over a chunk, and regions and words are padded to multiples of
8.

Shape letters: N images, M texts, B pairs, P regions, W words, E shared embedding, Q words of all
texts of a chunk.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from medvl.losses.common import full_precision, fused_if_possible, shapes

WordPool = Literal["sum", "mean", "max"]

_CHUNK_BYTES = 2**30
_GPU_CHUNK_BYTES = 2**31
_CHUNK_TENSORS = 8
"""Memory of one chunk, on a CPU and on a GPU, and how many tensors of N * P * Q numbers forward and
backward hold at once.
"""
_MULTIPLE = 1
_GPU_MULTIPLE = 8
"""Regions and words are padded to multiples of it. With 361 regions and 97 words, an H200's
products take 2.6 times as long as with multiples of 8.
"""
_KEPT_BYTES = 2**31
_KEPT_TENSORS = 4
"""Memory that all chunks may keep for the backward pass before they are recomputed, and their
tensors per chunk.
"""
_EPS = 1e-16
"""Lower bound of squared norms and of the square of a product of two norms, against division by
zero.
"""


def gloria_local(
    regions_BPE: Tensor,
    words_BWE: Tensor,
    word_mask_BW: Tensor,
    temp1: float = 4.0,
    temp2: float = 5.0,
    temp3: float = 10.0,
    *,
    pool: WordPool = "sum",
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the local contrastive loss of both directions, from regions and words (equations 2 to
    7).

    Row i of the regions and row i of the words are a pair. Padding is ignored, even if it is not
    finite. A pair whose text has no word is left out, with its image; without any pair left, both
    losses are 0 with a zero gradient.

    Args:
        regions_BPE, words_BWE: not normalised; their norms set how sharp the attention is.
        word_mask_BW: bool, True on real words.
        temp1, temp2, temp3: temperatures of the attention over regions, the pooling of words, and
            the contrastive loss; they multiply.
        pool, chunk: as in `gloria_similarity`.

    Returns:
        (image to text, text to image), scalars, which GLoRIA sums. Near ln B each for unrelated
        embeddings of texts with equally many words.

    Raises:
        ValueError: inconsistent shapes, no pair, or a temperature of zero or below.
    """
    if len(regions_BPE) != len(words_BWE) or len(regions_BPE) == 0:
        raise ValueError(
            f"gloria_local needs pairs, got {len(regions_BPE)} images and {len(words_BWE)} texts"
        )
    similarity_BB = gloria_similarity(
        regions_BPE, words_BWE, word_mask_BW, temp1=temp1, temp2=temp2, pool=pool, chunk=chunk
    )
    return gloria_contrast(similarity_BB, word_mask_BW.bool().any(dim=1), temp3)


def gloria_contrast(
    similarity_BB: Tensor, has_words_B: Tensor, temp3: float = 10.0
) -> tuple[Tensor, Tensor]:
    """Return `gloria_local` from similarities, for ranks that compare their own images and gather
    the rows.

    Args:
        similarity_BB: result of `gloria_similarity`, images in rows.
        has_words_B: bool; pairs without words are left out.
        temp3: multiplies the similarities.

    Raises ValueError when the similarities are not square, or on a temperature of zero or below.
    """
    if temp3 <= 0:
        raise ValueError(f"temp3 must be above 0, got {temp3}")
    if similarity_BB.ndim != 2 or similarity_BB.shape[0] != similarity_BB.shape[1]:
        raise ValueError(f"expected similarities (B, B), got {tuple(similarity_BB.shape)}")
    logits_BB = temp3 * similarity_BB.float()
    has_words_B = has_words_B.bool()
    row_B = torch.arange(len(logits_BB), device=logits_BB.device)
    target_B = row_B.masked_fill(~has_words_B, -100)
    # Not minus infinity: without any pair left, the softmax would be NaN.
    lowest = torch.finfo(logits_BB.dtype).min
    count = has_words_B.sum().clamp(min=1)

    def direction(logits_BB: Tensor) -> Tensor:
        among_BB = logits_BB.masked_fill(~has_words_B, lowest)
        return F.cross_entropy(among_BB, target_B, ignore_index=-100, reduction="sum") / count

    return direction(logits_BB), direction(logits_BB.T)


def gloria_similarity(
    regions_NPE: Tensor,
    words_MWE: Tensor,
    word_mask_MW: Tensor,
    temp1: float = 4.0,
    temp2: float = 5.0,
    *,
    pool: WordPool = "sum",
    chunk: int | None = None,
) -> Tensor:
    """Return (N, M) float32: the similarity of the regions of each image and the words of each text
    (equations 2 to 6).

    Each region is distributed over the words by a softmax over their products; each word then
    attends to the regions by a softmax over temp1 times its shares, and r is its cosine with the
    attended context. Words are pooled:

    * "sum": ln of the sum over words of exp(temp2 * r), as GLoRIA is trained;
    * "mean": the same with the mean, its other option, which gives long texts no advantage;
    * "max": temp2 times the largest r, as in its zero-shot code.

    A text without words has -temp2, the minimum for a word. Differentiable; `chunk` is the number
    of texts compared at a time, by default as many as fit in 1 GiB (2 GiB on a GPU), and affects
    only time and memory.

    Raises ValueError on inconsistent shapes, a temperature of zero or below, or an unknown pool.
    """
    _check(regions_NPE, words_MWE, word_mask_MW, temp1, temp2, pool)
    word_mask_MW = word_mask_MW.bool()
    if not word_mask_MW.shape[1]:  # one padding word
        words_MWE = F.pad(words_MWE, (0, 0, 0, 1))
        word_mask_MW = F.pad(word_mask_MW, (0, 1))
    place_W = torch.arange(1, word_mask_MW.shape[1] + 1, device=word_mask_MW.device)
    length_M = (word_mask_MW * place_W).amax(dim=1)
    order_M = length_M.argsort(descending=True)
    lengths = length_M[order_M].clamp(min=1).tolist()  # the only wait for the device
    multiple, chunk_bytes = (
        (_GPU_MULTIPLE, _GPU_CHUNK_BYTES) if regions_NPE.is_cuda else (_MULTIPLE, _CHUNK_BYTES)
    )
    images, regions = regions_NPE.shape[:2]
    with full_precision(regions_NPE):
        regions_NPE = regions_NPE.float()
        # Padding may not be finite: set it to zero.
        words_MWE = words_MWE.float().masked_fill(~word_mask_MW[:, :, None], 0.0)[order_M]
        mask_MW = word_mask_MW[order_M]
        regions_NPE, words_MWE, mask_MW = (
            _pad(each, multiple) for each in (regions_NPE, words_MWE, mask_MW)
        )
        lengths = [length + -length % multiple for length in lengths]
        word_bytes = 4 * images * regions_NPE.shape[1]
        recompute = (
            torch.is_grad_enabled() and _KEPT_TENSORS * word_bytes * sum(lengths) > _KEPT_BYTES
        )
        # Not in evaluations: they have many sizes, each of which would be compiled.
        compare = fused_if_possible(_compare, regions_NPE) if torch.is_grad_enabled() else _compare
        gram_NPP = (
            regions_NPE @ regions_NPE.transpose(1, 2) if regions <= regions_NPE.shape[2] else None
        )
        columns: list[Tensor] = []
        for rows, width in _chunks(
            lengths, chunk, chunk_bytes // max(1, _CHUNK_TENSORS * word_bytes)
        ):
            texts = words_MWE[rows, :width], mask_MW[rows, :width]
            inputs = regions_NPE, gram_NPP, *texts, regions, temp1, temp2, pool
            if recompute:
                columns.append(
                    checkpoint(compare, *inputs, use_reentrant=False, preserve_rng_state=False)
                )
            else:
                columns.append(compare(*inputs))
        if not columns:
            return regions_NPE.new_zeros(images, 0)
        return torch.cat(columns, dim=1)[:, order_M.argsort()]


def gloria_attention(
    regions_BPE: Tensor, words_BWE: Tensor, word_mask_BW: Tensor, temp1: float = 4.0
) -> Tensor:
    """Return (B, W, P) float32: the attention of each word of text i over image i (equations 2 and
    3); 0 for padding.

    The attention of a word sums to 1 over the regions. Raises ValueError on inconsistent shapes, or
    a temperature of zero or below.
    """
    _check(regions_BPE, words_BWE, word_mask_BW, temp1=temp1)
    word_mask_BW = word_mask_BW.bool()
    with full_precision(regions_BPE):
        words_BWE = words_BWE.float().masked_fill(~word_mask_BW[:, :, None], 0.0)
        attention_BPW = _attend(
            regions_BPE.float() @ words_BWE.transpose(1, 2), word_mask_BW[:, None], temp1
        )
        return attention_BPW.transpose(1, 2).masked_fill(~word_mask_BW[:, :, None], 0.0)


def _chunks(lengths: Sequence[int], texts: int | None, words: int) -> Iterator[tuple[slice, int]]:
    """Yield chunks of `texts` texts, or of up to `words` words with padding; and the length of
    their longest text.
    """
    start = 0
    while start < len(lengths):
        rows = slice(start, start + (texts or max(1, words // lengths[start])))
        yield rows, lengths[start]
        start = rows.stop


def _pad(rows: Tensor, multiple: int) -> Tensor:
    """Fill the second dimension up with zeros to the next multiple."""
    missing = -rows.shape[1] % multiple
    return F.pad(rows, (0, 0) * (rows.ndim - 2) + (0, missing)) if missing else rows


def _attend(scores: Tensor, mask: Tensor, temp1: float, regions: int | None = None) -> Tensor:
    """Return the attention of words (last dimension, as the mask) over the first `regions`
    (second dimension).
    """
    # A text without words uses its padding: no softmax over nothing.
    first_W = torch.arange(mask.shape[-1], device=mask.device) == 0
    mask = mask | (first_W & ~mask.any(dim=-1, keepdim=True))
    shares = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
    if regions is not None and regions < scores.shape[1]:
        real_P = torch.arange(scores.shape[1], device=scores.device) < regions
        shares = shares.masked_fill(~real_P.view(-1, *[1] * (scores.ndim - 2)), -torch.inf)
    return (temp1 * shares).softmax(dim=1)


def _compare(
    regions_NPE: Tensor,
    gram_NPP: Tensor | None,
    words_MWE: Tensor,
    mask_MW: Tensor,
    regions: int,
    temp1: float,
    temp2: float,
    pool: WordPool,
) -> Tensor:
    """Return similarity_NM of one chunk of texts; without the Gram matrix, attended contexts are
    formed.

    Regions from number `regions` on are filling.
    """
    scores_NPQ = F.linear(regions_NPE, words_MWE.flatten(0, 1))
    attention_NPQ = _attend(
        scores_NPQ.unflatten(2, mask_MW.shape), mask_MW, temp1, regions
    ).flatten(2)
    product_NQ = (attention_NPQ * scores_NPQ).sum(dim=1)
    if gram_NPP is None:
        square_NQ = (attention_NPQ.transpose(1, 2) @ regions_NPE).square().sum(dim=2)
    else:
        square_NQ = _Quadratic.apply(attention_NPQ, gram_NPP)
    word_square_Q = words_MWE.square().sum(dim=2).flatten()
    norms_NQ = square_NQ.clamp(min=_EPS).sqrt() * word_square_Q.clamp(min=_EPS).sqrt()
    cosine_NQ = product_NQ / norms_NQ.clamp(min=_EPS**0.5)
    return _pool(temp2 * cosine_NQ.unflatten(1, mask_MW.shape), mask_MW, temp2, pool)


class _Quadratic(torch.autograd.Function):
    """x^T G x of every column x, for symmetric G; keeps G x, so that the gradient 2 G x needs no
    product.
    """

    @staticmethod
    def forward(ctx: Any, x_NPQ: Tensor, gram_NPP: Tensor) -> Tensor:
        product_NPQ = gram_NPP @ x_NPQ
        ctx.save_for_backward(x_NPQ, product_NPQ)
        return (x_NPQ * product_NPQ).sum(dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x_NPQ, product_NPQ = ctx.saved_tensors
        grad_N1Q = grads[0][:, None]
        return 2 * grad_N1Q * product_NPQ, (grad_N1Q * x_NPQ) @ x_NPQ.transpose(1, 2)


def _pool(scaled_NMW: Tensor, mask_MW: Tensor, temp2: float, pool: WordPool) -> Tensor:
    """Pool the matches of words to those of texts."""
    masked_NMW = scaled_NMW.masked_fill(~mask_MW, torch.finfo(scaled_NMW.dtype).min)
    pooled_NM = masked_NMW.amax(dim=2) if pool == "max" else masked_NMW.logsumexp(dim=2)
    if pool == "mean":
        pooled_NM = pooled_NM - mask_MW.sum(dim=1).clamp(min=1).log()
    return torch.where(mask_MW.any(dim=1), pooled_NM, -temp2)


def _check(
    regions_NPE: Tensor,
    words_MWE: Tensor,
    word_mask_MW: Tensor,
    temp1: float = 1.0,
    temp2: float = 1.0,
    pool: WordPool = "sum",
) -> None:
    if min(temp1, temp2) <= 0:
        raise ValueError(f"temperatures must be above 0, got temp1 {temp1} and temp2 {temp2}")
    if pool not in get_args(WordPool):
        raise ValueError(f"pool must be one of {', '.join(get_args(WordPool))}, got {pool!r}")
    fits = regions_NPE.ndim == words_MWE.ndim == 3 and regions_NPE.shape[2] == words_MWE.shape[2]
    if not fits or regions_NPE.shape[1] == 0 or words_MWE.shape[:2] != word_mask_MW.shape:
        expected = (
            "regions must be (N, P, E), words (M, W, E) and their mask (M, W), with at "
            "least one region"
        )
        raise ValueError(f"{expected}; got {shapes(regions_NPE, words_MWE, word_mask_MW)}")
