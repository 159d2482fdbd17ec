"""Batch norm of sequences with padding, and projection heads with it.

Shape letters as in `medvl.schema`; N tokens, words, sentences or regions, R ranks. The items are
before the features, (B, N, D), while `nn.BatchNorm1d` expects (B, D, N).
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.losses.gather import gather
from medvl.losses.precision import full_precision


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
