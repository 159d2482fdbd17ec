"""Attention of open_clip's causal text Transformers on a GPU, without a mask in memory."""

from typing import Any

from torch import Tensor, nn


class CausalAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` under a causal mask: on a GPU it tells the kernel, which then computes half the matrix.

    Elsewhere this is `nn.MultiheadAttention`. The mask must be the causal one.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        """See the base class."""
        is_causal = query.is_cuda and options.get("attn_mask") is not None
        return super().forward(query, key, value, **{"is_causal": is_causal, **options})


def speed_up_causal_attention(net: nn.Module) -> None:
    """Make the attention of a causal Transformer `CausalAttention`, in place; parameters and their names stay."""
    for module in net.modules():
        if type(module) is nn.MultiheadAttention:
            module.__class__ = CausalAttention
