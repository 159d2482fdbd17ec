"""Attention of open_clip's causal text Transformers on a GPU, without a mask in memory."""

from torch import Tensor, nn


class CausalAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` under a causal mask: on a GPU it tells the kernel, which then computes half the matrix.

    Elsewhere this is `nn.MultiheadAttention`. The mask must be the causal one.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """See the base class."""
        is_causal = is_causal or (query.is_cuda and attn_mask is not None)
        return super().forward(
            query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )


def speed_up_causal_attention(net: nn.Module) -> None:
    """Make the attention of a causal Transformer `CausalAttention`, in place; parameters and their names stay."""
    for module in net.modules():
        if type(module) is nn.MultiheadAttention:
            module.__class__ = CausalAttention
