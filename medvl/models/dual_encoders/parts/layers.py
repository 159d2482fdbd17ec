"""Attention between words, sentences and regions of a sample, pooling by attention, and batch norm
and projection heads of sequences with padding.

    attended_BWE = attend(words_BWE, regions_BPE, scale=10.0)  # MGCA, of normalised features
    sentences_BSE, regions_BPE = cross(sentences_BSE, regions_BPE, mask_BS)  # LoVT
    report_BD, weight_BS = pool(sentences_BSD, mask_BS)

Padding is ignored, even if it is not finite: no result depends on how far a sequence is padded.
Shape letters as in `medvl.schema`; N tokens, words, sentences or regions, M items of another
sequence, R ranks, Q queries, K keys. The items are before the features, (B, N, D), while
`nn.BatchNorm1d` expects (B, D, N).
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from medvl.losses.common import full_precision, gather


def mask_of(x_BND: Tensor, mask_BN: Tensor | None) -> Tensor:
    """Return the mask as bool, all True where it is None. Raises ValueError where its shape is
    not (B, N).
    """
    if mask_BN is None:
        return torch.ones_like(x_BND[..., 0], dtype=torch.bool)
    if mask_BN.shape != x_BND.shape[:-1]:
        raise ValueError(f"expected a mask {tuple(x_BND.shape[:-1])}, got {tuple(mask_BN.shape)}")
    return mask_BN.bool()


class MaskedBatchNorm(nn.BatchNorm1d):
    """Batch norm whose batch and running statistics are computed from real items only.

    Under `nn.BatchNorm1d` the padding would pull mean and variance towards its own, more so in
    batches with a long text. Without padding, value, gradient and buffers are those of
    `nn.BatchNorm1d` (Ioffe and Szegedy, arXiv 1502.03167). Statistics are in float32; the result
    has the dtype of the input. A single real item gives the bias, where torch raises an error.

    Args:
        features: D.
        affine: train a weight and a bias.
        synchronize: statistics of the items of all ranks, so that two ranks compute what one would.
            In training, all ranks must then call it equally often, with any number of items.
        eps, momentum: as in torch.
    """

    def __init__(
        self,
        features: int,
        *,
        affine: bool = True,
        synchronize: bool = False,
        eps: float = 1e-5,
        momentum: float = 0.1,
    ) -> None:
        super().__init__(features, eps=eps, momentum=momentum, affine=affine)
        self.synchronize = synchronize

    def forward(self, x_BND: Tensor, mask_BN: Tensor | None = None) -> Tensor:
        """Return (B, N, D), or (B, D) for such an input; 0 for padding, which may be non-finite.

        `mask_BN` is True on real items, of the input's shape without D; None: all are. Raises
        ValueError on a mask of another shape.
        """
        real_BN1 = mask_of(x_BND, mask_BN)[..., None]
        with full_precision(x_BND):
            if (
                mask_BN is None
                and not self.synchronize
                and (real_BN1.numel() > 1 or not self.training)
            ):
                # torch's kernel keeps one tensor for the backward pass instead of two: regions are
                # many.
                return super().forward(x_BND.flatten(0, -2)).view_as(x_BND)
            assert self.running_mean is not None
            assert self.running_var is not None
            items_BND = x_BND.float().masked_fill(~real_BN1, 0.0)
            mean_D = self.running_mean.float()
            variance_D = self.running_var.float()
            if self.training:
                dims = tuple(range(x_BND.ndim - 1))
                count = self._total(real_BN1.sum(dim=dims).float())
                mean_D = self._total(items_BND.sum(dim=dims)) / count.clamp(min=1)
            centred_BND = (items_BND - mean_D).masked_fill(~real_BN1, 0.0)
            if self.training:
                variance_D = self._total(centred_BND.square().sum(dim=dims)) / count.clamp(min=1)
                self._update(mean_D, variance_D, count)
            normed_BND = centred_BND * (variance_D + self.eps).rsqrt()
            if self.affine:
                normed_BND = normed_BND * self.weight.float() + self.bias.float()
            return normed_BND.masked_fill(~real_BN1, 0.0).to(x_BND.dtype)

    def _total(self, sums_D: Tensor) -> Tensor:
        """Return the sums over all ranks, if statistics are synchronised."""
        return gather(sums_D[None]).sum(dim=0) if self.synchronize else sums_D

    @torch.no_grad()
    def _update(self, mean_D: Tensor, variance_D: Tensor, count: Tensor) -> None:
        """Move the running statistics towards those of a batch, unless it has no item."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        rate = (self.momentum or 0.0) * (count > 0)
        unbiased_D = variance_D * (count / (count - 1).clamp(min=1))
        self.running_mean.add_(rate * (mean_D - self.running_mean))
        self.running_var.add_(rate * (unbiased_D - self.running_var))
        self.num_batches_tracked.add_(1)


def init_fan_out(layer: nn.Linear, follower: Literal["relu", "linear"]) -> None:
    """Draw weights from a normal distribution of variance gain / out_features (He et al., arXiv
    1502.01852), as LoVT.

    The gain is 2 before a ReLU, else 1; biases are zeros.
    """
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity=follower)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


class BatchNormHead(nn.Module):
    """Linear, batch norm, ReLU, Linear, and on request a batch norm without parameters; for vectors
    and sequences.

    The projection head of LoVT (arXiv 2112.02889; `norm_output` False) and of MGCA (arXiv
    2210.06044; True), whose convolutions of width 1 over tokens are these linear layers.

    Args:
        in_features, out_features: widths.
        hidden: 2048 in both.
        norm_output: end with a batch norm without weight and bias.
        inner_bias: give the first linear layer a bias, which the batch norm removes again.
        fan_out_init: initialise as LoVT's released code (`init_fan_out`), not as PyTorch.
        synchronize: as in `MaskedBatchNorm`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        hidden: int = 2048,
        *,
        norm_output: bool = False,
        inner_bias: bool = True,
        fan_out_init: bool = False,
        synchronize: bool = False,
    ) -> None:
        super().__init__()
        self.inner = nn.Linear(in_features, hidden, bias=inner_bias)
        self.outer = nn.Linear(hidden, out_features)
        if fan_out_init:
            init_fan_out(self.inner, "relu")
            init_fan_out(self.outer, "linear")
        self.norm = MaskedBatchNorm(hidden, synchronize=synchronize)
        self.output_norm = (
            MaskedBatchNorm(out_features, affine=False, synchronize=synchronize)
            if norm_output
            else None
        )

    def forward(self, x_BND: Tensor, mask_BN: Tensor | None = None) -> Tensor:
        """Map (B, N, D) to (B, N, E), or (B, D) to (B, E); 0 for padding. The mask as in
        `MaskedBatchNorm`.
        """
        padding_BN1 = ~mask_of(x_BND, mask_BN)[..., None]
        hidden_BNH = self.inner(x_BND.masked_fill(padding_BN1, 0.0))
        out_BNE: Tensor = self.outer(F.relu(self.norm(hidden_BNH, mask_BN)))
        if self.output_norm is not None:
            return self.output_norm(out_BNE, mask_BN)
        return out_BNE.masked_fill(padding_BN1, 0.0)


def in_full_precision(head: nn.Module, x_BND: Tensor) -> Tensor:
    """Return the output of a head in float32: autocast would round regions and words before a
    softmax of products.
    """
    with full_precision(x_BND):
        out_BNE: Tensor = head(x_BND.float())
    return out_BNE


@torch.no_grad()
def move_to_orthogonal(weight_ED: Tensor, beta: float) -> None:
    """Move a matrix towards orthogonal rows: W <- (1 + beta) W - beta W W^T W (Lample et al.,
    arXiv 1710.04087).
    """
    weight_ED.copy_((1 + beta) * weight_ED - beta * weight_ED @ weight_ED.T @ weight_ED)


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
