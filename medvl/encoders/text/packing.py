"""Packed texts: the real tokens of a batch in one row, with attention within each text.

Linear layers, norms and activations, nearly all of a BERT's arithmetic, then cost as much as the
real tokens alone. Attention uses `torch.nn.attention.varlen` on a GPU of compute capability 8.0 or
higher, in 16 bits and without attention dropout, which it does not support (set the encoder's
`attention_probs_dropout_prob=0.0`, or use eval mode). Otherwise queries, keys and values are padded
for attention, and its result is packed again.

The number of real tokens must be known on the host, so a GPU is synchronised: encode texts first in
a step, while its queue is empty. On a CPU the row is filled up (`medvl.common.cpu_rows`). This
module imports torch's compiler, which takes seconds: import it only to pack.

N is the number of real tokens of a batch, and R that of rows, with the filling; the other letters
are those of `medvl.schema`, with h heads of d dimensions.
"""

import dataclasses
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import maybe_mark_dynamic

from medvl.common.cpu_rows import filling_rows

ATTENTION = "medvl_packed"
"""Name under which `packed_attention` is registered with transformers."""

_VARLEN_DTYPES = (torch.float16, torch.bfloat16)
_VARLEN_CAPABILITY = (8, 0)  # flash attention needs Ampere or later


@dataclasses.dataclass(frozen=True, slots=True)
class Packing:
    """Positions of the real tokens of a batch."""

    mask_BT: Tensor
    """bool, True on real tokens."""
    index_R: Tensor
    """int64: index of each real token among all B * T positions, ascending; then the first one's
    again, as filling.
    """
    index_N: Tensor
    """int64: `index_R` without the filling."""
    offsets_B1: Tensor
    """int32 (B + 1,): offset of each text in the row of real tokens, and the row's length."""

    @property
    def tokens(self) -> int:
        """N, the number of real tokens."""
        return len(self.index_N)

    @classmethod
    @torch.compiler.disable
    def from_mask(cls, mask_BT: Tensor) -> Self:
        """Return the packing of a mask, which need not be padded on the right; synchronises the
        device.

        torch.compile cannot trace the number of real tokens. It is marked as dynamic, so that the
        encoder is compiled once instead of for the first number and again for all others.
        """
        index_N = mask_BT.flatten().nonzero()[:, 0]
        end_B = mask_BT.sum(dim=1).cumsum(dim=0)
        filling = min(filling_rows(len(index_N), index_N.device), mask_BT.numel() - len(index_N))
        index_R = torch.cat([index_N, index_N[:1].expand(filling)])
        for index in (index_R, index_N):
            maybe_mark_dynamic(index, 0)
        return cls(mask_BT, index_R, index_N, F.pad(end_B, (1, 0)).int())

    def pack(self, padded_BTx: Tensor) -> Tensor:
        """Map (B, T, ...) to (R, ...)."""
        return padded_BTx.flatten(0, 1).index_select(0, self.index_R)

    def unpack(self, packed_Rx: Tensor) -> Tensor:
        """Map (R, ...) to (B, T, ...), zero on padding; the filling is dropped."""
        empty = packed_Rx.new_zeros(self.mask_BT.numel(), *packed_Rx.shape[1:])
        filled = empty.index_copy(0, self.index_N, packed_Rx[: self.tokens])
        return filled.unflatten(0, self.mask_BT.shape)


def use_packed_attention(net: Any) -> None:
    """Make `packed_attention` the attention function of a transformers model."""
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
    """Compute attention for transformers; return (B, T, h, d), and None in place of weights.

    With a `packing`, the inputs are one row of R tokens, each of which attends to its own text.
    Without one, this calls transformers' own function for `scaled_dot_product_attention`.
    """
    if packing is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module,
            query_BhTd,
            key_BhTd,
            value_BhTd,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            **others,
        )
    query_Rhd, key_Rhd, value_Rhd = (
        each[0].transpose(0, 1) for each in (query_BhTd, key_BhTd, value_BhTd)
    )
    if _has_varlen(query_Rhd, dropout):
        return _attend_varlen(query_Rhd, key_Rhd, value_Rhd, packing, scaling)[None], None
    return _attend_padded(query_Rhd, key_Rhd, value_Rhd, packing, scaling, dropout)[None], None


def _has_varlen(query_Rhd: Tensor, dropout: float) -> bool:
    if (
        not query_Rhd.is_cuda
        or dropout
        or query_Rhd.dtype not in _VARLEN_DTYPES
        or not len(query_Rhd)
    ):
        return False
    return (
        query_Rhd.shape[2] % 8 == 0
        and torch.cuda.get_device_capability(query_Rhd.device) >= _VARLEN_CAPABILITY
    )


def _attend_varlen(
    query_Rhd: Tensor, key_Rhd: Tensor, value_Rhd: Tensor, packing: Packing, scaling: float
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    start = packing.offsets_B1
    longest = packing.mask_BT.shape[1]
    attended = varlen_attn(
        query_Rhd, key_Rhd, value_Rhd, start, start, longest, longest, scale=scaling
    )
    assert isinstance(attended, Tensor)  # a pair only if auxiliary outputs are requested
    return attended


def _attend_padded(
    query_Rhd: Tensor,
    key_Rhd: Tensor,
    value_Rhd: Tensor,
    packing: Packing,
    scaling: float,
    dropout: float,
) -> Tensor:
    query_BhTd, key_BhTd, value_BhTd = (
        packing.unpack(each).transpose(1, 2) for each in (query_Rhd, key_Rhd, value_Rhd)
    )
    allowed_BT = packing.mask_BT | ~packing.mask_BT.any(
        dim=1, keepdim=True
    )  # a text without tokens would give NaN
    attended_BhTd = F.scaled_dot_product_attention(
        query_BhTd,
        key_BhTd,
        value_BhTd,
        attn_mask=allowed_BT[:, None, None, :],
        dropout_p=dropout,
        scale=scaling,
    )
    return packing.pack(attended_BhTd.transpose(1, 2))
