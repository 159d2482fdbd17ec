"""Losses between items of the same sample: words, sentences or regions.

    # MGCA
    loss = within_sample_nce(words_BNE, attended_BNE, mask_BN, temperature=0.1, symmetric=True)
    # LoVT
    loss = within_sample_nce(regions_BPE, attended_BPE, None, weights_BP, grid_positives(7, 7))
    loss = local_alignment(words_BNE, attended_BNE, mask_BN)
    loss = loss + 0.1 * local_uniformity(words_BNE, mask_BN)

Items need not have unit length; all losses normalise them. Padding is ignored, even if it is not
finite, and gets a zero gradient. Means are over the samples of all ranks, which exchange only two
numbers: every rank passes its own samples and gets the loss of the global batch, and all ranks must
call a loss equally often (`medvl.losses.common`). Gathered samples give the same loss.

B samples of this rank, N items of a sample, P regions, E shared embedding dim.

The last three compare the map of a phrase over the cells of an image with the cells that its boxes
cover, or with the labels of the image: N phrases, L labels, P cells. `cover_NP` is the share of
each cell that the boxes of a phrase cover, in 0..1; a phrase that covers no cell has no box.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from medvl.losses.common import full_precision, mean_over_ranks, one_number, shapes
from medvl.losses.supervised import known_labels


def within_sample_nce(
    a_BNE: Tensor,
    b_BNE: Tensor,
    mask_BN: Tensor | None = None,
    weights_BN: Tensor | None = None,
    positives_NN: Tensor | None = None,
    temperature: float = 0.3,
    *,
    symmetric: bool = False,
) -> Tensor:
    """InfoNCE of each item of `a` against all items of `b` in its own sample, in that direction
    only by default.

    With the cosine s_ij of item i of `a` and item j of `b`, and the share p_ij of j in the
    positives of i, an item has -sum_j p_ij s_ij / temperature + ln sum_j exp(s_ij / temperature).
    This is the local loss of LoVT (Mueller et al., arXiv 2112.02889, section 3.5) and, with one
    positive, the token loss of MGCA (Wang et al., arXiv 2210.06044, section 3.3).

    Args:
        a_BNE, b_BNE: item i of one belongs to item i of the other, such as a word and its attended
            vector.
        mask_BN: bool, True on real items of both; None: all are real. Padding is not a candidate:
            it would make the loss depend on the length of the longest text of the batch.
        weights_BN: weights of the items of `a`, such as attention weights; divided by their sum
            over the real items. They get no gradient. None: equal.
        positives_NN: weights of the positives of item i in row i; divided by their sum over the
            real items of a row. They get no gradient. None: the item of the same number. See
            `grid_positives`.
        temperature: 0.3 in LoVT, 0.1 in MGCA.
        symmetric: return the mean of this and of the other direction, with `a` and `b` exchanged,
            as in MGCA.

    Returns a scalar: the weighted mean over a sample's items, averaged over the samples of all
    ranks that have an item. An item whose positives are all padding is left out. 0 with a zero
    gradient without any item. Raises ValueError on inconsistent shapes, or a temperature of zero or
    below.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    mask_BN = _check(a_BNE, b_BNE, mask_BN, weights_BN)
    items = a_BNE.shape[1]
    if positives_NN is not None and positives_NN.shape != (items, items):
        raise ValueError(
            f"positives_NN must be ({items}, {items}), got {tuple(positives_NN.shape)}"
        )
    with full_precision(a_BNE):
        logits_BNN = _unit(a_BNE, mask_BN) @ _unit(b_BNE, mask_BN).transpose(1, 2) / temperature
        if positives_NN is None:
            own_BN = logits_BNN.diagonal(dim1=1, dim2=2)
            counted_BN = mask_BN
        else:
            share_BNN = positives_NN.detach().float() * mask_BN[:, None]
            total_BN1 = share_BNN.sum(dim=2, keepdim=True)
            own_BN = (F.normalize(share_BNN, p=1.0, dim=2) * logits_BNN).sum(dim=2)
            counted_BN = mask_BN & (total_BN1.squeeze(2) > 0)
        # Not minus infinity: for a sample without items, the softmax would be NaN.
        among_BNN = logits_BNN.masked_fill(~mask_BN[:, None], torch.finfo(torch.float32).min)
        loss = _mean(among_BNN.logsumexp(dim=2) - own_BN, counted_BN, weights_BN)
    if not symmetric:
        return loss
    return (
        loss + within_sample_nce(b_BNE, a_BNE, mask_BN, weights_BN, positives_NN, temperature)
    ) / 2


def grid_positives(
    height: int, width: int, threshold: float = 0.5, smoothing: float = 1.0
) -> Tensor:
    """Return (P, P) float32: for every region of a grid, the shares of regions near it; rows sum to
    1.

    A share is proportional to exp(-smoothing * d) where d <= threshold, and 0 elsewhere. d is the
    distance of two cells in cells, divided by the diagonal, sqrt(height^2 + width^2). As in LoVT
    (arXiv 2112.02889, section 3.5, and the settings of its released code, which are the defaults).
    A threshold of 0 gives the identity, a smoothing of 0 equal shares.

    Raises ValueError on a grid without cells, or a negative threshold or smoothing.
    """
    if min(height, width) < 1 or min(threshold, smoothing) < 0:
        got = f"{height} x {width} cells, threshold {threshold} and smoothing {smoothing}"
        raise ValueError(
            f"expected a grid of cells, and a threshold and smoothing of 0 or above, got {got}"
        )
    place_P2 = torch.cartesian_prod(torch.arange(height), torch.arange(width)).float()
    distance_PP = torch.cdist(place_P2, place_P2, compute_mode="donot_use_mm_for_euclid_dist")
    distance_PP /= (height**2 + width**2) ** 0.5
    near_PP = torch.exp(-smoothing * distance_PP).masked_fill(distance_PP > threshold, 0.0)
    return F.normalize(near_PP, p=1.0, dim=1)


def local_alignment(
    a_BNE: Tensor, b_BNE: Tensor, mask_BN: Tensor | None = None, weights_BN: Tensor | None = None
) -> Tensor:
    """Squared distance of each normalised item of `a` to the same item of `b`: 2 - 2 cos, without
    negatives.

    The alignment of Wang and Isola (arXiv 2005.10242, section 4.1, alpha 2) for local features, as
    analysed by Mueller et al. (arXiv 2211.07254). Arguments, means, result and errors as for
    `within_sample_nce`.
    """
    mask_BN = _check(a_BNE, b_BNE, mask_BN, weights_BN)
    with full_precision(a_BNE):
        square_BN = (_unit(a_BNE, mask_BN) - _unit(b_BNE, mask_BN)).square().sum(dim=2)
        return _mean(square_BN, mask_BN, weights_BN)


def local_uniformity(z_BNE: Tensor, mask_BN: Tensor | None = None, t: float = 2.0) -> Tensor:
    """Logarithm of the mean of exp(-t ||z_i - z_j||^2) over all pairs i != j of a sample's
    normalised items.

    The uniformity of Wang and Isola (arXiv 2005.10242, section 4.1) inside of each sample, which
    Mueller et al. (arXiv 2211.07254) put in place of the negatives of a local loss. Minimise it; it
    is within [-4 t, 0].

    Args:
        z_BNE: items of each sample.
        mask_BN: bool, True on real items; None: all are real.
        t: above 0.

    Returns a scalar: the mean over the samples of all ranks that have at least two items; 0 with a
    zero gradient where none has. Raises ValueError on inconsistent shapes, or a t of zero or below.
    """
    if t <= 0:
        raise ValueError(f"t must be above 0, got {t}")
    mask_BN = _check(z_BNE, z_BNE, mask_BN, None)
    with full_precision(z_BNE):
        unit_BNE = _unit(z_BNE, mask_BN)
        log_BNN = -t * (2 - 2 * unit_BNE @ unit_BNE.transpose(1, 2))
        other_NN = ~torch.eye(z_BNE.shape[1], dtype=torch.bool, device=z_BNE.device)
        pair_BNN = mask_BN[:, :, None] & mask_BN[:, None] & other_NN
        count_B = pair_BNN.sum(dim=(1, 2))
        sum_B = (
            log_BNN.masked_fill(~pair_BNN, torch.finfo(torch.float32).min)
            .flatten(1)
            .logsumexp(dim=1)
        )
        mean_B = sum_B - count_B.clamp(min=1).log()
        return mean_over_ranks(mean_B.masked_fill(count_B == 0, 0.0), count_B > 0)


def _unit(x_BNE: Tensor, mask_BN: Tensor) -> Tensor:
    """Return normalised items in float32, with zeros as padding, which may not have been finite."""
    return F.normalize(x_BNE.float().masked_fill(~mask_BN[:, :, None], 0.0), dim=2)


def _mean(loss_BN: Tensor, counted_BN: Tensor, weights_BN: Tensor | None) -> Tensor:
    """Return the weighted mean over the counted items of a sample, averaged over the samples
    that have any.
    """
    weight_BN = counted_BN if weights_BN is None else weights_BN.detach()
    weight_BN = weight_BN.float().masked_fill(~counted_BN, 0.0)
    loss_B = (loss_BN.masked_fill(~counted_BN, 0.0) * F.normalize(weight_BN, p=1.0, dim=1)).sum(
        dim=1
    )
    return mean_over_ranks(loss_B, weight_BN.sum(dim=1) > 0)


def _check(
    a_BNE: Tensor, b_BNE: Tensor, mask_BN: Tensor | None, weights_BN: Tensor | None
) -> Tensor:
    """Return the mask, all True if there is none. Raises ValueError on inconsistent shapes."""
    if a_BNE.ndim != 3 or a_BNE.shape != b_BNE.shape:
        raise ValueError(f"expected items (B, N, E) of one shape, got {shapes(a_BNE, b_BNE)}")
    for name, tensor in (("mask_BN", mask_BN), ("weights_BN", weights_BN)):
        if tensor is not None and tensor.shape != a_BNE.shape[:2]:
            raise ValueError(f"{name} must be {tuple(a_BNE.shape[:2])}, got {tuple(tensor.shape)}")
    return torch.ones_like(a_BNE[..., 0], dtype=torch.bool) if mask_BN is None else mask_BN.bool()


# Alignment of words and patches by optimal transport (UNITER, Chen et al., arXiv 1909.11740,
# section 3.2; ViLT).
#
# B samples, M words, N patches, E width.

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

    The cost of a word and a patch is 1 - cosine. The plan is IPOT's (Xie et al., arXiv 1802.04307,
    algorithm 1, one inner iteration): nonnegative, words have equal shares of a total of 1, patches
    nearly so. It is detached, so that the gradient goes through the costs alone.

    Padding is ignored, even if it is not finite.

    Args:
        text_BME, image_BNE: states of words and patches; not normalised.
        text_pad_BM, image_pad_BN: bool, True on padding and on tokens that take no part.
        beta: step of the proximal point method; smaller is faster and less stable.
        iterations: iterations of the outer loop.

    Returns:
        distance_B: float32, within [0, 2]; 0 with a zero gradient for a sample without words or
            without patches.
        plan_BNM: float32; 0 where a word or a patch is padding.

    Raises ValueError on inconsistent shapes, masks that are not bool, a beta of zero or below, or
    no iteration.
    """
    if beta <= 0 or iterations < 1:
        raise ValueError(
            f"expected a beta above 0 and at least one iteration, got {beta} and {iterations}"
        )
    pads = text_pad_BM.dtype == image_pad_BN.dtype == torch.bool
    fits = text_BME.ndim == image_BNE.ndim == 3 and text_BME.shape[::2] == image_BNE.shape[::2]
    if (
        not (pads and fits)
        or text_pad_BM.shape != text_BME.shape[:2]
        or image_pad_BN.shape != image_BNE.shape[:2]
    ):
        got = shapes(text_BME, image_BNE, text_pad_BM, image_pad_BN)
        raise ValueError(f"expected (B, M, E), (B, N, E), bool (B, M) and bool (B, N), got {got}")
    with full_precision(text_BME):
        text_BME = _unit_states(text_BME, text_pad_BM)
        image_BNE = _unit_states(image_BNE, image_pad_BN)
        pad_BNM = image_pad_BN[:, :, None] | text_pad_BM[:, None, :]
        cost_BNM = (1 - image_BNE @ text_BME.transpose(1, 2)).masked_fill(pad_BNM, 0.0)
        plan_BNM = _ipot(cost_BNM.detach(), pad_BNM, beta, iterations)
        return (cost_BNM * plan_BNM).sum(dim=(1, 2)), plan_BNM


def _unit_states(states_BTE: Tensor, pad_BT: Tensor) -> Tensor:
    """Return normalised states in float32, with zeros as padding, which may not have been
    finite.
    """
    return F.normalize(
        states_BTE.float().masked_fill(pad_BT[:, :, None], 0.0), dim=-1, eps=_NORM_EPS
    )


@torch.no_grad()
def _ipot(cost_BNM: Tensor, pad_BNM: Tensor, beta: float, iterations: int) -> Tensor:
    kernel_BNM = (-cost_BNM / beta).exp().masked_fill(pad_BNM, 0.0)
    real_BNM = ~pad_BNM
    # none in a sample that lacks words or patches
    real_BN = real_BNM.any(dim=2)
    real_BM = real_BNM.any(dim=1)
    share_BN, share_BM = (
        real / real.sum(dim=1, keepdim=True).clamp(min=1) for real in (real_BN, real_BM)
    )
    plan_BNM = real_BNM.float()
    scale_BM = share_BM
    for _ in range(iterations):
        moved_BNM = kernel_BNM * plan_BNM
        scale_BN = share_BN / _or_one((moved_BNM @ scale_BM[:, :, None]).squeeze(2), real_BN)
        scale_BM = share_BM / _or_one((scale_BN[:, None] @ moved_BNM).squeeze(1), real_BM)
        plan_BNM = scale_BN[:, :, None] * moved_BNM * scale_BM[:, None]
    return plan_BNM


def _or_one(value: Tensor, real: Tensor) -> Tensor:
    """Replace the zeros of padding by 1, to avoid a division by zero."""
    return value.masked_fill(~real, 1.0)


# Contrast of images with statements; an image has several statements, and images share
# statements.
#
#     # RadZero: each image pooled by each statement
#     scores_NM = patch_cosine(tokens_NKE, texts_ME, scale)
#     to_image, to_statement = statement_contrast(scale * scores_NM, positive_NM)
#
# Every ratio of exponentials is a log-sum-exp. Two ranks compare their own images with the
# statements of all ranks and gather the rows of scores: the loss is that of one process, and each
# rank holds its share of the comparison.
#
# Shape letters: N images, M statements, K tokens of an image, E shared embedding dim.

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


_LEAST = 1e-8
"""Attention below which its logarithm is cut, so that a text without words has a finite loss."""


def place_divergence(attention_NP: Tensor, cover_NP: Tensor) -> Tensor:
    """Return the divergence of each phrase's attention from its boxes, (N,): KL(t || a).

    The target t of a phrase with boxes is proportional to the cover of its cells; of one without
    boxes it is uniform: nowhere in particular.

    Args:
        attention_NP: sums to 1 over the cells.
        cover_NP: see above.

    0 where both are equal. Raises ValueError on unequal shapes.
    """
    _check_cover(attention_NP, cover_NP)
    with full_precision(attention_NP):
        total_N1 = cover_NP.float().sum(dim=1, keepdim=True)
        uniform = 1 / cover_NP.shape[1]
        target_NP = torch.where(
            total_N1 > 0, cover_NP.float() / total_N1.clamp(min=_LEAST), uniform
        )
        log_NP = attention_NP.float().clamp(min=_LEAST).log()
        return (torch.xlogy(target_NP, target_NP) - target_NP * log_NP).sum(dim=1)


def place_entropy(logits_NP: Tensor, cover_NP: Tensor) -> Tensor:
    """Return the mean over cells of the binary cross-entropy of each phrase's log-odds with the
    cover, (N,).

    Without boxes, all cells are negative. Raises ValueError on unequal shapes.
    """
    _check_cover(logits_NP, cover_NP)
    with full_precision(logits_NP):
        entropy_NP = F.binary_cross_entropy_with_logits(
            logits_NP.float(), cover_NP.float(), reduction="none"
        )
        return entropy_NP.mean(dim=1)


def label_entropy(logits_BLP: Tensor, target_BL: Tensor, sharpness: float = 1.0) -> Tensor:
    """Return the binary cross-entropy of each label with the pooled log-odds of its map, (B, L):
    multiple-instance learning, without boxes.

    The log-odds s of P cells are pooled to log(mean(exp(r s))) / r, between their mean (r = 0) and
    their maximum (Pinheiro and Collobert, arXiv 1411.6228, equation 3).

    Args:
        logits_BLP: log-odds of each label in each cell.
        target_BL: 1 or 0; uncertain (-1) and unknown (NaN) labels have a loss of 0.
        sharpness: r, above 0.

    Raises ValueError on inconsistent shapes.
    """
    if logits_BLP.ndim != 3 or logits_BLP.shape[:2] != target_BL.shape:
        raise ValueError(f"expected (B, L, P) and (B, L), got {shapes(logits_BLP, target_BL)}")
    known_BL = known_labels(target_BL)
    with full_precision(logits_BLP):
        pooled_BL = torch.logsumexp(sharpness * logits_BLP.float(), dim=2)
        pooled_BL = (pooled_BL - math.log(logits_BLP.shape[2])) / sharpness
        loss_BL = F.binary_cross_entropy_with_logits(
            pooled_BL, target_BL.masked_fill(~known_BL, 0).float(), reduction="none"
        )
        return loss_BL.masked_fill(~known_BL, 0.0)


def _check_cover(map_NP: Tensor, cover_NP: Tensor) -> None:
    if map_NP.shape != cover_NP.shape or map_NP.ndim != 2:
        raise ValueError(f"expected two of (N, P), got {shapes(map_NP, cover_NP)}")
