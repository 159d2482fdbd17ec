"""Bounds of the mutual information of images and texts, to be maximised, and a critic that scores
all their pairs.

    scores_BN = critic(image_BD, gather(text_BD))              # own images with all texts
    loss = -information_bound(scores_BN, own_column_B, ~same_BN, "dv")
    # the same of "info_nce"
    loss = -info_nce_bound(scores_BN[row_B, own_column_B], scores_BN, ~same_BN)

Every rank gives the scores of its own pairs and gets the bound of the global batch, from a few
numbers of each rank; all ranks must call a bound equally often (`medvl.losses.common`).

Liao et al., arXiv 2103.04537. In its released code the positive is missing in the sum of InfoNCE,
whose gradient is then exactly that of the other bound, and pairs are concatenated one by one.

N images, M texts, P pairs and regions, S sentences, Q real sentences, R rows of a product, D
feature dim, H hidden dim.
"""

import itertools
from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from medvl.common.compilation import filling_rows
from medvl.losses.common import full_precision, gather, mean_over_ranks, shapes

SentenceSum = Literal["sum", "mean"]

_LOWEST = torch.finfo(torch.float32).min
"""Score of entries excluded from a log-sum-exp; minus infinity would give NaN gradients if all
are excluded.
"""
_CHUNK_BYTES = 2**28
_CPU_CHUNK_BYTES = 2**22
"""Memory of a critic's hidden values at a time; on a CPU they stay in its caches."""
_KEPT_BYTES = 2**30
"""Memory of hidden values above which they are recomputed in the backward pass."""


def dv_bound(positive_P: Tensor, negative_N: Tensor, mask_N: Tensor | None = None) -> Tensor:
    """Donsker-Varadhan bound: mean of the positives' scores - ln of the mean of exp of the
    negatives' scores.

    Belghazi et al., arXiv 1801.04062, section 3.1. To be maximised; it has no upper limit.

    Args:
        positive_P: scores of images with their own texts.
        negative_N: scores of images with texts of other studies; of any shape.
        mask_N: bool, of the same shape, True on real negatives; None: all are.

    Returns a scalar, 0 for equal scores, from the pairs of all ranks; 0 with a zero gradient where
    these have no positive or no negative. Raises ValueError on inconsistent shapes.
    """
    if mask_N is not None and mask_N.shape != negative_N.shape:
        raise ValueError(
            f"expected a mask of the negatives' shape, got {shapes(negative_N, mask_N)}"
        )
    with full_precision(positive_P):
        mask_N = torch.ones_like(negative_N, dtype=torch.bool) if mask_N is None else mask_N.bool()
        negative_N = negative_N.float().masked_fill(~mask_N, _LOWEST).flatten()
        # one more column, for a rank without negatives
        log_sum = F.pad(negative_N, (0, 1), value=_LOWEST).logsumexp(dim=0)
        count = torch.full_like(log_sum, positive_P.numel())
        parts = torch.stack(
            [positive_P.float().sum(), count, log_sum, mask_N.sum().to(log_sum.dtype)]
        )
        positive_R, count_R, log_sum_R, others_R = gather(parts[None]).unbind(dim=1)
        positives = count_R.sum()
        negatives = others_R.sum()
        log_mean = log_sum_R.logsumexp(dim=0) - negatives.clamp(min=1).log()
        bound = positive_R.sum() / positives.clamp(min=1) - log_mean
        return torch.where((positives > 0) & (negatives > 0), bound, 0.0)


def info_nce_bound(
    positive_P: Tensor, negative_PN: Tensor, mask_PN: Tensor | None = None
) -> Tensor:
    """InfoNCE bound: ln K + the mean log-softmax of a pair's score among its own and its K - 1
    negatives' scores.

    van den Oord et al., arXiv 1807.03748, equation 5 and appendix A.1. To be maximised; at most ln
    K, and K may differ between pairs.

    Args:
        positive_P: scores of images with their own texts.
        negative_PN: scores of each pair's image with other texts, or of its text with other images.
        mask_PN: bool, True on real negatives, and so not on the positive; None: all are.

    Returns a scalar, 0 for equal scores: the mean over the pairs of all ranks that have a negative;
    0 with a zero gradient where none has. Raises ValueError on inconsistent shapes.
    """
    pairs = positive_P.shape[0] if positive_P.ndim == 1 else -1
    if (
        negative_PN.ndim != 2
        or len(negative_PN) != pairs
        or (mask_PN is not None and mask_PN.shape != negative_PN.shape)
    ):
        got = shapes(positive_P, negative_PN, *([] if mask_PN is None else [mask_PN]))
        raise ValueError(f"expected positives (P,), and negatives and mask (P, N), got {got}")
    with full_precision(positive_P):
        mask_PN = (
            torch.ones_like(negative_PN, dtype=torch.bool) if mask_PN is None else mask_PN.bool()
        )
        positive_P = positive_P.float()
        among_PN = negative_PN.float().masked_fill(~mask_PN, _LOWEST)
        log_sum_P = torch.cat([positive_P[:, None], among_PN], dim=1).logsumexp(dim=1)
        others_P = mask_PN.sum(dim=1)
        return mean_over_ranks(positive_P - log_sum_P + others_P.add(1).log(), others_P > 0)


def information_bound(
    scores_BN: Tensor, own_B: Tensor, other_BN: Tensor, bound: Literal["dv", "info_nce"]
) -> Tensor:
    """Return a bound of the mutual information from the scores of this rank's B images with the N
    texts of all ranks.

    Args:
        scores_BN: scores of a critic.
        own_B: int64, column of each image's own text.
        other_BN: bool, True on negatives.
        bound: "dv" is `dv_bound`, "info_nce" `info_nce_bound`.

    Raises ValueError on inconsistent shapes, or an unknown bound.
    """
    bounds = {"dv": dv_bound, "info_nce": info_nce_bound}
    if bound not in bounds:
        raise ValueError(f"bound must be one of {', '.join(bounds)}, got {bound!r}")
    return bounds[bound](scores_BN.gather(1, own_B[:, None])[:, 0], scores_BN, other_BN)


class SeparableCritic(nn.Module):
    """MLP on the concatenation of an image's and a text's features, for all pairs of N images and M
    texts at once.

    The first layer of a concatenation is a sum, W [a; b] + c = W_a a + W_b b + c, so it runs on N +
    M rows instead of N * M, and the concatenation is never formed. Hidden values of the pairs are
    computed in chunks of limited memory; where they would keep too much for the backward pass, they
    are recomputed.

    Under autocast the products are in 16 bits, as in every module; scores are float32.

    Args:
        image_dim, text_dim: widths of the features; 768 each in Liao et al.
        hidden: widths of the hidden layers, with ReLU.

    Attributes:
        first: the first layer, with the columns of the image's features first.
        rest: the layers after it.
    """

    def __init__(self, image_dim: int, text_dim: int, hidden: Sequence[int] = (1024, 512)) -> None:
        super().__init__()
        self.dims = (image_dim, text_dim)
        self.hidden = tuple(hidden)
        self.first = nn.Linear(image_dim + text_dim, hidden[0])
        layers: list[nn.Module] = [nn.ReLU(inplace=True)]
        for width, following in itertools.pairwise(hidden):
            layers += [nn.Linear(width, following), nn.ReLU(inplace=True)]
        self.rest = nn.Sequential(*layers, nn.Linear(hidden[-1], 1))

    def forward(self, image_ND: Tensor, text_MD: Tensor) -> Tensor:
        """Return (N, M) float32: the score of every image with every text.

        Raises ValueError on features of other widths.
        """
        image_NH, text_MH = self._first(image_ND, text_MD)
        return self._scores(image_NH[:, None], text_MH)

    def local(
        self,
        regions_NPD: Tensor,
        sentences_MSD: Tensor,
        mask_MS: Tensor | None = None,
        reduce: SentenceSum = "sum",
    ) -> Tensor:
        """Return (N, M) float32: for every image and text, the highest score of each sentence with
        any region, summed.

        Regions are chosen without gradient, then only the chosen ones are scored with gradient,
        which equals that of the maximum. Padding is not scored; a GPU is synchronised to count the
        real sentences.

        Args:
            regions_NPD: regions of the images.
            sentences_MSD: sentences of the texts. Padding is ignored, even if it is not finite.
            mask_MS: bool, True on real sentences; None: all are. A text without sentences has a
                score of 0.
            reduce: "mean" divides by the number of real sentences.

        Raises ValueError on inconsistent shapes, without a region, or on an unknown `reduce`.
        """
        if reduce not in get_args(SentenceSum):
            raise ValueError(
                f"reduce must be one of {', '.join(get_args(SentenceSum))}, got {reduce!r}"
            )
        if regions_NPD.ndim != 3 or sentences_MSD.ndim != 3 or not regions_NPD.shape[1]:
            raise ValueError(
                f"expected regions (N, P, D) and sentences (M, S, D), got "
                f"{shapes(regions_NPD, sentences_MSD)}"
            )
        mask_MS = (
            torch.ones_like(sentences_MSD[..., 0], dtype=torch.bool)
            if mask_MS is None
            else mask_MS.bool()
        )
        if mask_MS.shape != sentences_MSD.shape[:2]:
            raise ValueError(
                f"mask_MS must be {tuple(sentences_MSD.shape[:2])}, got {tuple(mask_MS.shape)}"
            )
        real_Q = mask_MS.flatten().nonzero()[:, 0]
        rows_R = torch.cat([real_Q, real_Q[:1].expand(filling_rows(len(real_Q), real_Q.device))])
        regions_NPH, sentences_RH = self._first(regions_NPD, sentences_MSD.flatten(0, 1)[rows_R])
        with torch.no_grad():
            columns = max(1, _chunk_bytes(sentences_RH) // self._pair_bytes(regions_NPH.shape[1]))
            parts = sentences_RH.split(columns)
            best_NR = torch.cat(
                [self._scores(regions_NPH[:, :, None], part, highest=True) for part in parts], dim=1
            )
        best_NRH = best_NR[:, :, None].expand(-1, -1, regions_NPH.shape[2])
        score_NQ = self._scores(regions_NPH.gather(1, best_NRH), sentences_RH)[:, : len(real_Q)]
        empty_NK = score_NQ.new_zeros(len(score_NQ), mask_MS.numel())
        total_NM = empty_NK.index_copy(1, real_Q, score_NQ).unflatten(1, mask_MS.shape).sum(dim=2)
        return total_NM / mask_MS.sum(dim=1).clamp(min=1) if reduce == "mean" else total_NM

    def _first(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """Return the image's and the text's part of the first layer."""
        if (image.shape[-1], text.shape[-1]) != self.dims:
            raise ValueError(f"expected features of widths {self.dims}, got {shapes(image, text)}")
        image_weight, text_weight = self.first.weight.split(self.dims, dim=1)
        return F.linear(image, image_weight), F.linear(text, text_weight, self.first.bias)

    def _scores(self, left: Tensor, right_QH: Tensor, *, highest: bool = False) -> Tensor:
        """Return the scores of sums of first-layer parts, in chunks of rows; with `highest`,
        indices of the best.
        """
        row_bytes = len(right_QH) * self._pair_bytes(left.shape[1] if highest else 1)
        rows = max(1, _chunk_bytes(right_QH) // max(1, row_bytes))
        recompute = torch.is_grad_enabled() and len(left) * row_bytes > _KEPT_BYTES
        chunks = []
        for chunk in left.split(rows):
            if recompute:
                chunks.append(
                    checkpoint(
                        self._score, chunk, right_QH, use_reentrant=False, preserve_rng_state=False
                    )
                )
            else:
                scores = self._score(chunk, right_QH)
                chunks.append(scores.argmax(dim=1) if highest else scores)
        return torch.cat(chunks)

    def _pair_bytes(self, regions: int) -> int:
        """Return the memory of the hidden values of an image and a text, or of an image's
        regions and a sentence.
        """
        return 4 * regions * sum(self.hidden)

    def _score(self, left: Tensor, right_QH: Tensor) -> Tensor:
        scores: Tensor = self.rest(left + right_QH).squeeze(-1).float()
        return scores


def _chunk_bytes(features: Tensor) -> int:
    return _CPU_CHUNK_BYTES if features.is_cpu else _CHUNK_BYTES
