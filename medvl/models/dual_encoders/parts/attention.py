"""Attention between the words, sentences and regions of a sample, and pooling of them by attention.

    attended_BWE = attend(words_BWE, regions_BPE, scale=10.0)  # MGCA, of normalised features
    sentences_BSE, regions_BPE = cross(sentences_BSE, regions_BPE, mask_BS)  # LoVT
    report_BD, weight_BS = pool(sentences_BSD, mask_BS)

Padding is ignored, even if it is not finite: no result depends on how far a sequence is padded.
Shape letters: Q queries, K keys, N and M items of two sequences; the others as in `medvl.schema`.
"""

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from medvl.losses.precision import full_precision
from medvl.models.dual_encoders.parts.heads import MaskedBatchNorm, init_fan_out, mask_of


def attention_weights(
    query_BQE: Tensor, key_BKE: Tensor, mask_BK: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """Return (B, Q, K) float32: the softmax of `scale` times the products over the real keys of the
    same sample.

    A query's weights sum to 1, and to 0 in a sample without keys. `mask_BK` is True on real keys;
    None: all are. It is computed in float32 also under autocast, because the scale enlarges the
    rounding of cosines.
    """
    mask_BK = mask_of(key_BKE, mask_BK)
    with full_precision(query_BQE):
        key_BKE = key_BKE.float().masked_fill(~mask_BK[:, :, None], 0.0)
        scores_BQK = scale * query_BQE.float() @ key_BKE.transpose(1, 2)
        # Not minus infinity, whose softmax over nothing would be NaN.
        scores_BQK = scores_BQK.masked_fill(~mask_BK[:, None], torch.finfo(torch.float32).min)
        return scores_BQK.softmax(dim=2).masked_fill(~mask_BK[:, None], 0.0)


def attend(
    query_BQE: Tensor,
    key_BKE: Tensor,
    mask_BK: Tensor | None = None,
    scale: float = 1.0,
    *,
    value_BKD: Tensor | None = None,
) -> Tensor:
    """Return (B, Q, D) float32: for each query, the mean of the values weighted by
    `attention_weights`.

    Without `value_BKD` the keys are the values. Queries of a sample without keys get zeros.
    """
    value_BKD = key_BKE if value_BKD is None else value_BKD
    weight_BQK = attention_weights(query_BQE, key_BKE, mask_BK, scale)
    with full_precision(query_BQE):
        return weight_BQK @ value_BKD.float().masked_fill(
            ~mask_of(key_BKE, mask_BK)[:, :, None], 0.0
        )


def clip_to_percentiles(
    weight_BN: Tensor | None, mask_BN: Tensor, low: float = 0.1, high: float = 0.9
) -> Tensor | None:
    """Return (B, N) float32: weights limited to two percentiles of the real items of their sample;
    0 for padding.

    MGCA's released code limits attention weights to the 10th and 90th percentile. `mask_BN` is True
    on real items. No gradient. None stays None.
    """
    if weight_BN is None or not weight_BN.numel():
        return weight_BN
    known_BN = weight_BN.detach().float().masked_fill(~mask_BN, torch.nan)
    low_B1, high_B1 = (known_BN.nanquantile(share, dim=1, keepdim=True) for share in (low, high))
    return known_BN.clamp(low_B1, high_B1).nan_to_num(nan=0.0)


class CrossAttention(nn.Module):
    """Attention of two sequences to each other, with the same projections in both directions.

    As in LoVT (Mueller et al., arXiv 2112.02889, section 3.4, and its released code): queries and
    keys of both sides are projections by one matrix, values by another; the attended vectors pass
    the output projection and a batch norm, of real items only. Products are divided by sqrt(D) and
    by the temperature.

    Args:
        dim: D, width of both sequences.
        temperature: 1 in LoVT.
        synchronize: as in `MaskedBatchNorm`.
    """

    def __init__(self, dim: int, *, temperature: float = 1.0, synchronize: bool = False) -> None:
        super().__init__()
        self.scale = 1 / (temperature * dim**0.5)
        self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(3))
        for layer in (self.key, self.value, self.out):
            init_fan_out(layer, "linear")
        self.norm = MaskedBatchNorm(dim, synchronize=synchronize)

    def forward(
        self,
        a_BND: Tensor,
        b_BMD: Tensor,
        mask_a_BN: Tensor | None = None,
        mask_b_BM: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the attended vectors of `b` for each item of `a` (B, N, D), and the reverse (B, M,
        D); 0 for padding.

        Masks are True on real items; None: all are.
        """
        mask_a_BN = mask_of(a_BND, mask_a_BN)
        mask_b_BM = mask_of(b_BMD, mask_b_BM)
        a_BND, b_BMD = (
            x_BND.masked_fill(~mask_BN[:, :, None], 0.0)
            for x_BND, mask_BN in ((a_BND, mask_a_BN), (b_BMD, mask_b_BM))
        )
        key_a_BND = self.key(a_BND)
        key_b_BMD = self.key(b_BMD)
        for_a_BND = attend(key_a_BND, key_b_BMD, mask_b_BM, self.scale, value_BKD=self.value(b_BMD))
        for_b_BMD = attend(key_b_BMD, key_a_BND, mask_a_BN, self.scale, value_BKD=self.value(a_BND))
        return self.norm(self.out(for_a_BND), mask_a_BN), self.norm(self.out(for_b_BMD), mask_b_BM)


class AttentionPool(nn.Module):
    """Multi-head attention over a sequence, with the mean of its real items as the query.

    As in LoVT (arXiv 2112.02889, section 3.2), for regions and for sentences. Its released code
    divides the query's sum by the padded length, so that a report's vector changes with the longest
    report of the batch.

    Args:
        dim: D; a multiple of `heads`.
        heads: 8 in LoVT.
    """

    def __init__(self, dim: int, heads: int = 8) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, x_BND: Tensor, mask_BN: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (B, D), and (B, N) float32, the attention to each item, averaged over heads.

        `mask_BN` is True on real items; None: all are. A sample without items has zeros. LoVT
        weighs the items' losses by the attention (`medvl.losses.within_sample_nce`).
        """
        mask_BN = mask_of(x_BND, mask_BN)
        x_BND = x_BND.masked_fill(~mask_BN[:, :, None], 0.0)
        some_B1 = mask_BN.any(dim=1, keepdim=True)
        query_B1D = x_BND.sum(dim=1, keepdim=True) / mask_BN.sum(dim=1).clamp(min=1)[:, None, None]
        # A sample without items attends to its padding: no softmax over nothing.
        pooled_B1D, weight_B1N = self.attention(
            query_B1D, x_BND, x_BND, key_padding_mask=~mask_BN & some_B1
        )
        weight_BN = weight_B1N.squeeze(1).float().masked_fill(~mask_BN, 0.0)
        return pooled_B1D.squeeze(1).masked_fill(~some_B1, 0.0), weight_BN


class PositionedPool(nn.Module):
    """Multi-head attention of a grid's mean to itself and to the cells, with learned positions
    (CLIP's ResNets, MAVL).

    Args:
        dim: D; a multiple of `heads`.
        cells: P, number of cells.
        heads: 8 in MAVL.
        out: E, width of the result.
    """

    def __init__(self, dim: int, cells: int, heads: int, out: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(1 + cells, dim) / dim**0.5)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.attention.out_proj = NonDynamicallyQuantizableLinear(dim, out)

    def forward(self, grid_BPD: Tensor) -> Tensor:
        """Return (B, E)."""
        tokens_BKD = (
            torch.cat([grid_BPD.mean(dim=1, keepdim=True), grid_BPD], dim=1) + self.position
        )
        pooled_B1D: Tensor = self.attention(
            tokens_BKD[:, :1], tokens_BKD, tokens_BKD, need_weights=False
        )[0]
        return pooled_B1D.squeeze(1)
