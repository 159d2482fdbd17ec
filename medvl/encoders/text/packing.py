"""Packed texts: the real tokens of a batch in one row, with attention within each text.

Linear layers, norms and activations, nearly all of a BERT's arithmetic, then cost as much as the
real tokens alone. Attention uses `torch.nn.attention.varlen` on a GPU of compute capability 8.0 or
higher, in 16 bits and without attention dropout, which it does not support (set the encoder's
`attention_probs_dropout_prob=0.0`, or use eval mode). Otherwise queries, keys and values are padded
for attention, and its result is packed again.

The number of real tokens must be known on the host, so a GPU is synchronised: encode texts first in
a step, while its queue is empty. The row is filled up to one of few lengths, for which kernels are
compiled or CUDA graphs recorded (`medvl.common.compilation`): the filling attends to itself, and
nothing else reads it. This module imports torch's compiler, which takes seconds: import it only to
pack.

N is the number of real tokens of a batch, R that of rows, with the filling, and F that of texts
that the filling is divided into; the other letters are those of `medvl.schema`, with h heads of d
dimensions.
"""

import dataclasses
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import maybe_mark_dynamic

from medvl.common.compilation import FEW_ROWS, round_up

ATTENTION = "medvl_packed"
"""Name under which `packed_attention` is registered with transformers."""

_PARTS = 16
"""Lengths of the row between two powers of two: it is filled by less than 1/16."""
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
    place_R: Tensor
    """int64: the same index, but B * T, where nothing is read, for the filling."""
    offsets_O: Tensor
    """int32 (B + F + 1,): offset of each text in the row, then those of the filling's texts of at
    most T tokens, and the row's length.
    """

    @classmethod
    @torch.compiler.disable
    def from_mask(cls, mask_BT: Tensor) -> Self:
        """Return the packing of a mask, which need not be padded on the right; synchronises the
        device.

        torch.compile cannot trace the number of real tokens. The row's length is marked as dynamic,
        so that the encoder is compiled once instead of for the first one and again for all others.
        """
        index_N = mask_BT.flatten().nonzero()[:, 0]
        tokens, positions, longest = len(index_N), mask_BT.numel(), mask_BT.shape[1]
        rows = min(tokens if tokens <= FEW_ROWS else round_up(tokens, _PARTS, FEW_ROWS), positions)
        index_R = torch.cat([index_N, index_N[:1].expand(rows - tokens)])
        place_R = F.pad(index_N, (0, rows - tokens), value=positions)
        end_B = mask_BT.sum(dim=1).cumsum(dim=0)
        # As many as the largest filling of a row of this length has.
        texts = 0 if rows <= FEW_ROWS else -(-max(FEW_ROWS, rows // _PARTS) // longest)
        end_F = tokens + longest * torch.arange(1, texts + 1, device=mask_BT.device)
        offsets_O = F.pad(torch.cat([end_B, end_F.clamp(max=rows)]), (1, 0)).int()
        for tensor in (index_R, place_R, offsets_O):
            maybe_mark_dynamic(tensor, 0)
        return cls(mask_BT, index_R, place_R, offsets_O)

    def pack(self, padded_BTx: Tensor) -> Tensor:
        """Map (B, T, ...) to (R, ...)."""
        return padded_BTx.flatten(0, 1).index_select(0, self.index_R)

    def unpack(self, packed_Rx: Tensor) -> Tensor:
        """Map (R, ...) to (B, T, ...), zero on padding; the filling is dropped."""
        empty = packed_Rx.new_zeros(self.mask_BT.numel() + 1, *packed_Rx.shape[1:])
        filled = empty.index_copy(0, self.place_R, packed_Rx)
        return filled[:-1].unflatten(0, self.mask_BT.shape)


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

    start = packing.offsets_O
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
    # a text without tokens would give NaN
    allowed_BT = packing.mask_BT | ~packing.mask_BT.any(dim=1, keepdim=True)
    attended_BhTd = F.scaled_dot_product_attention(
        query_BhTd,
        key_BhTd,
        value_BhTd,
        attn_mask=allowed_BT[:, None, None, :],
        dropout_p=dropout,
        scale=scaling,
    )
    return packing.pack(attended_BhTd.transpose(1, 2))
