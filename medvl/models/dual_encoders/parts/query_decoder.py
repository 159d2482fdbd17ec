"""Transformer decoder whose queries read a memory with padding: statements over patches, images over words, entities.

    decoder = QueryDecoder(768, config, self_attention=False)          # CARZero: queries do not attend to each other
    states_BQD = decoder(query_BQD, memory_BKD, mask_BK)
    states_BQD, attention_BQK = decoder.with_attention(query_BQD, memory_BKD, mask_BK)

Parameters have the names of torch's `TransformerDecoder`, which those of MedKLIP, KAD and MAVL share. Shape letters: Q
queries, K positions of the memory; the others as in `medvl.schema`.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from medvl.common.checks import check_within
from medvl.models.dual_encoders.parts.heads import mask_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryDecoderConfig:
    """Settings of a `QueryDecoder`, to inherit beside those of a system; published ones of all of its systems."""

    decoder_layers: int = 4
    decoder_heads: int = 4
    decoder_hidden: int = 1024
    dropout: float = 0.1
    """Rate of dropout in the decoder, of the states that it returns, and in CARZero's head."""
    init_std: float | None = 0.02
    """Standard deviation of the initial weights of the decoder and of heads around it; None: the rules of torch,
    which narrow decoders keep."""

    def check_decoder(self) -> None:
        """Raise ConfigError for a value out of range."""
        check_within(self, "[1, inf)", "decoder_layers", "decoder_heads", "decoder_hidden")
        check_within(self, "[0, 1)", "dropout")
        check_within(self, "(0, inf)", "init_std")

    def init_modules(self, *modules: nn.Module) -> None:
        """Draw weights of linear and attention layers from N(0, `init_std`), as the released code of MedKLIP, KAD, MAVL
        and CARZero does; biases keep their values."""
        if self.init_std is None:
            return
        for child in (child for module in modules for child in module.modules()):
            if isinstance(child, nn.Linear):
                nn.init.normal_(child.weight, std=self.init_std)
            elif isinstance(child, nn.MultiheadAttention):
                nn.init.normal_(child.in_proj_weight, std=self.init_std)


class QueryDecoder(nn.Module):
    """Pre-norm layers of attention among queries, attention to the memory, and a feed-forward network with ReLU.

    Args:
        dim: width of queries and memory.
        config: sizes.
        self_attention: whether queries attend to each other. The score of a query then depends on the others, unless
            `reads_QQ` hides them from it.
        shared_norm: apply the last norm to queries and memory as well (KAD, CARZero).
    """

    def __init__(
        self, dim: int, config: QueryDecoderConfig, *, self_attention: bool = True, shared_norm: bool = False
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(dim, config, self_attention) for _ in range(config.decoder_layers))
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(config.dropout)
        self.shared_norm = shared_norm
        config.init_modules(self)

    def forward(self, query_BQD: Tensor, memory_BKD: Tensor, mask_BK: Tensor | None = None) -> Tensor:
        """Return (B, Q, D). `mask_BK` is True on real positions; None: all are. A memory without any adds nothing."""
        return self._decode(query_BQD, memory_BKD, mask_BK, None, attention=False)[0]

    def with_attention(
        self,
        query_BQD: Tensor,
        memory_BKD: Tensor,
        mask_BK: Tensor | None = None,
        *,
        reads_QQ: Tensor | None = None,
        last_layer: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return (B, Q, D), and (B, Q, K), the attention to the memory, averaged over heads and layers.

        With `last_layer`, the attention is that of the last layer, averaged over heads.
        `reads_QQ` (float): entry (i, j) is the number of equal queries that query j counts as when query i attends to
        it; 0 hides it. None: 1 for all.
        """
        states_BQD, weights = self._decode(query_BQD, memory_BKD, mask_BK, reads_QQ, attention=True)
        return states_BQD, weights[-1] if last_layer else torch.stack(weights).mean(dim=0)

    def _decode(
        self,
        query_BQD: Tensor,
        memory_BKD: Tensor,
        mask_BK: Tensor | None,
        reads_QQ: Tensor | None,
        *,
        attention: bool,
    ) -> tuple[Tensor, list[Tensor]]:
        mask_BK = mask_of(memory_BKD, mask_BK)
        memory_BKD = memory_BKD.masked_fill(~mask_BK[:, :, None], 0.0)
        if self.shared_norm:
            query_BQD, memory_BKD = self.norm(query_BQD), self.norm(memory_BKD)
        weights = []
        for layer in self.layers:
            query_BQD, weight_BQK = layer(query_BQD, memory_BKD, mask_BK, reads_QQ, attention)
            weights.append(weight_BQK)
        return self.dropout(self.norm(query_BQD)), weights


class _Layer(nn.TransformerDecoderLayer):
    """Layer of torch with optional self-attention, which returns the attention to the memory."""

    def __init__(self, dim: int, config: QueryDecoderConfig, self_attention: bool) -> None:
        sizes = config.decoder_heads, config.decoder_hidden, config.dropout
        super().__init__(dim, *sizes, batch_first=True, norm_first=True)
        if not self_attention:
            del self.self_attn, self.norm1, self.dropout1

    def forward(self, *inputs: Any) -> Any:
        """Return the states (B, Q, D) and, if wanted, the attention (B, Q, K)."""
        x_BQD, memory_BKD, mask_BK, reads_QQ, attention = inputs
        if hasattr(self, "self_attn"):
            normed_BQD, bias_QQ = self.norm1(x_BQD), None if reads_QQ is None else reads_QQ.log()
            of_queries = self.self_attn(normed_BQD, normed_BQD, normed_BQD, need_weights=False, attn_mask=bias_QQ)
            x_BQD = x_BQD + self.dropout1(of_queries[0])
        some_B1 = mask_BK.any(dim=1, keepdim=True)  # without any, attend to the padding, whose result is not used
        hidden_BK = ~mask_BK & some_B1
        read_BQD, weight_BQK = self.multihead_attn(
            self.norm2(x_BQD), memory_BKD, memory_BKD, key_padding_mask=hidden_BK, need_weights=attention
        )
        x_BQD = x_BQD + self.dropout2(read_BQD.masked_fill(~some_B1[:, :, None], 0.0))
        wide_BQD = self.dropout(torch.relu(self.linear1(self.norm3(x_BQD))))
        return x_BQD + self.dropout3(self.linear2(wide_BQD)), weight_BQK
