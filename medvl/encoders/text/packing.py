"""Text without padding: the real tokens of a batch in one row, and attention within each text.

Linear layers, norms and activations, nearly all of a BERT's arithmetic, then cost what the real tokens cost, whatever
the longest text of a batch is. Attention runs through `torch.nn.attention.varlen` where that can be had: on a GPU, in
16 bits, and without dropout of the attention, for which it has no argument (`attention_probs_dropout_prob=0.0` of the
encoder, or eval mode). Anywhere else queries, keys and values are padded for it and its result is packed again.

How many tokens are real must be known before anything can be computed, and on a GPU that is waited for: encode texts
first in a step, while nothing is queued yet.

N counts the real tokens of a batch; the other letters are those of `medvl.schema`, and h heads of d dimensions.
"""

import dataclasses
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ATTENTION = "medvl_packed"
"""Name of `packed_attention` among the attention functions of transformers."""

_VARLEN_DTYPES = (torch.float16, torch.bfloat16)
_VARLEN_CAPABILITY = (8, 0)  # flash attention begins with Ampere


@dataclasses.dataclass(frozen=True, slots=True)
class Packing:
    """Where the real tokens of a batch are."""

    mask_BT: Tensor
    """bool, True on real tokens."""
    place_N: Tensor
    """int64: of each real token among all B * T places, ascending."""
    start_B1: Tensor
    """int32 (B + 1,): where each text starts in the row of real tokens, and the row's end."""

    @classmethod
    def of(cls, mask_BT: Tensor) -> Self:
        """From a mask, which need not be padded on the right. Waits for the device."""
        place_N = mask_BT.flatten().nonzero()[:, 0]
        end_B = mask_BT.sum(dim=1).cumsum(dim=0)
        return cls(mask_BT, place_N, F.pad(end_B, (1, 0)).int())

    def __len__(self) -> int:
        """N."""
        return len(self.place_N)

    def pack(self, padded_BTx: Tensor) -> Tensor:
        """(B, T, ...) to (N, ...)."""
        return padded_BTx.flatten(0, 1).index_select(0, self.place_N)

    def unpack(self, packed_Nx: Tensor) -> Tensor:
        """(N, ...) to (B, T, ...), zero on padding."""
        empty = packed_Nx.new_zeros(self.mask_BT.numel(), *packed_Nx.shape[1:])
        return empty.index_copy(0, self.place_N, packed_Nx).unflatten(0, self.mask_BT.shape)


def use_packed_attention(net: Any) -> None:
    """Have a model of transformers attend through `packed_attention`."""
    import transformers

    transformers.AttentionInterface.register(ATTENTION, packed_attention)
    net.set_attn_implementation(ATTENTION)


def packed_attention(
    module: nn.Module,
    query_BhTd: Tensor,
    key_BhTd: Tensor,
    value_BhTd: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    packing: Packing | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: (B, T, h, d), and no weights.

    With a `packing`, inputs are a batch of one row of N tokens, each of which attends to its own text; without, this is
    transformers' own function for `scaled_dot_product_attention`.
    """
    if packing is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query_BhTd, key_BhTd, value_BhTd, attention_mask, dropout=dropout, scaling=scaling, **others
        )
    query_Nhd, key_Nhd, value_Nhd = (each[0].transpose(0, 1) for each in (query_BhTd, key_BhTd, value_BhTd))
    if _has_varlen(query_Nhd, dropout):
        return _attend_varlen(query_Nhd, key_Nhd, value_Nhd, packing, scaling)[None], None
    return _attend_padded(query_Nhd, key_Nhd, value_Nhd, packing, scaling, dropout)[None], None


def _has_varlen(query_Nhd: Tensor, dropout: float) -> bool:
    if not query_Nhd.is_cuda or dropout or query_Nhd.dtype not in _VARLEN_DTYPES:
        return False
    return query_Nhd.shape[2] % 8 == 0 and torch.cuda.get_device_capability(query_Nhd.device) >= _VARLEN_CAPABILITY


def _attend_varlen(query_Nhd: Tensor, key_Nhd: Tensor, value_Nhd: Tensor, packing: Packing, scaling: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    start, longest = packing.start_B1, packing.mask_BT.shape[1]
    attended = varlen_attn(query_Nhd, key_Nhd, value_Nhd, start, start, longest, longest, scale=scaling)
    assert isinstance(attended, Tensor)  # a pair only where more was asked for
    return attended


def _attend_padded(
    query_Nhd: Tensor, key_Nhd: Tensor, value_Nhd: Tensor, packing: Packing, scaling: float, dropout: float
) -> Tensor:
    query_BhTd, key_BhTd, value_BhTd = (
        packing.unpack(each).transpose(1, 2) for each in (query_Nhd, key_Nhd, value_Nhd)
    )
    seen_BT = packing.mask_BT | ~packing.mask_BT.any(dim=1, keepdim=True)  # a text without tokens would give NaN
    attended_BhTd = F.scaled_dot_product_attention(
        query_BhTd, key_BhTd, value_BhTd, attn_mask=seen_BT[:, None, None, :], dropout_p=dropout, scale=scaling
    )
    return packing.pack(attended_BhTd.transpose(1, 2))
