"""The relational memory of R2Gen, and the decoder that it drives.

Letters: as in `medvl.models.report_generators.layers`; V words.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.models.fusion_encoders.parts.attention_masks import padding_mask
from medvl.models.fusion_encoders.parts.encoder import Tokens
from medvl.models.fusion_encoders.parts.transformer import Sizes
from medvl.models.report_generators.layers import Attention, DecoderLayer, Norm, WritingState, sines


class RelationalMemory(nn.Module):
    """Slots that attend to themselves and to each new token, and are gated (R2Gen, section 2.2).

    M' = M + Attention(M, [M; y]); M'' = M' + MLP(M'); i, f = sigmoid(W y + U tanh(M)); M <- i tanh(M'') + f M
    """

    def __init__(self, sizes: Sizes, slots: int, heads: int) -> None:
        super().__init__()
        width = sizes.width
        self.slots = slots
        self.attention = Attention(width, heads, sizes.dropout)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.token_gates, self.memory_gates = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)

    def start(self, samples: int) -> Tensor:
        """(B, M, D): the memory before the first token: an identity matrix, padded with zeros."""
        weight = self.token_gates.weight
        return torch.eye(self.slots, weight.shape[1], device=weight.device, dtype=weight.dtype).expand(samples, -1, -1)

    def forward(self, tokens_RTD: Tensor, memory_RMD: Tensor) -> Tensor:
        """(R, T, M, D): the memory after each token. A step depends on the memory before it and on its token only."""
        token_keys, token_values = self.attention.keys_values(tokens_RTD)
        token_gates_RTF = self.token_gates(tokens_RTD)
        after = []
        for step in range(tokens_RTD.shape[1]):
            keys, values = self.attention.keys_values(memory_RMD)
            seen = (
                torch.cat([keys, token_keys[:, :, step : step + 1].to(keys.dtype)], dim=2),
                torch.cat([values, token_values[:, :, step : step + 1].to(values.dtype)], dim=2),
            )
            next_RMD = memory_RMD + self.attention.attend(memory_RMD, seen)
            next_RMD = next_RMD + self.mlp(next_RMD)
            gates_RMF = token_gates_RTF[:, step, None] + self.memory_gates(memory_RMD.tanh())
            input_gate, forget_gate = gates_RMF.sigmoid().chunk(2, dim=2)
            memory_RMD = input_gate * next_RMD.tanh() + forget_gate * memory_RMD
            after.append(memory_RMD)
        return torch.stack(after, dim=1)


class MemoryDecoder(nn.Module):
    """Causal Transformer over words whose norms depend on a relational memory.

    Args:
        sizes: sizes of the layers.
        vocab_size: V.
        slots, memory_heads: numbers of slots and of attention heads of the memory.
    """

    def __init__(self, sizes: Sizes, vocab_size: int, slots: int, memory_heads: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.words = nn.Embedding(vocab_size, sizes.width)
        self.memory = RelationalMemory(sizes, slots, memory_heads)
        self.layers = nn.ModuleList(DecoderLayer(sizes, slots) for _ in range(sizes.layers))
        self.norm = Norm(sizes.width)

    def read(self, image: Tokens) -> WritingState:
        """Return the state before the first token, with the keys and values of the images."""
        layers: Any = self.layers
        read = tuple(layer.cross_attention.keys_values(image.states_BND) for layer in layers)
        return WritingState(read, padding_mask(image.mask_BN), None, self.memory.start(len(image.states_BND)))

    def forward(self, ids_RT: Tensor, state: WritingState) -> tuple[Tensor, WritingState]:
        """Append tokens to the texts; return their states (R, T, D) and the state after them."""
        tokens = ids_RT.shape[1]
        before = 0 if state.written is None else state.written[0][0].shape[2]
        place_T = torch.arange(before, before + tokens, device=ids_RT.device)
        width = self.sizes.width
        words_RTD = self.words(ids_RT) * math.sqrt(width) + sines(place_T, width)
        memory_RTMD = self.memory(F.dropout(words_RTD, self.sizes.dropout, self.training), state.memory_RMD)
        states_RTD = F.dropout(words_RTD, self.sizes.dropout, self.training)
        earlier_1TK = None
        if tokens > 1:
            earlier_1TK = (torch.arange(before + tokens, device=ids_RT.device) <= place_T[:, None])[None]
        written = []
        for number, layer in enumerate(self.layers):
            old = None if state.written is None else state.written[number]
            states_RTD, new = layer(states_RTD, memory_RTMD, old, earlier_1TK, state.read[number], state.read_mask_B1P)
            written.append(new)
        after = state._replace(written=tuple(written), memory_RMD=memory_RTMD[:, -1])
        return self.norm(states_RTD), after


class MemoryWriter:
    """A `NextToken` of a `MemoryDecoder`: each step computes one token; keys, values and memory are cached."""

    def __init__(self, decoder: MemoryDecoder, word_head: nn.Linear, image: Tokens, first_id: int) -> None:
        self._decoder, self._word_head, self._first_id = decoder, word_head, first_id
        self._state = decoder.read(image)

    def first(self) -> Tensor:
        """See `NextToken`."""
        memory_BMD = self._state.memory_RMD
        return self._step(torch.full((len(memory_BMD),), self._first_id, device=memory_BMD.device))

    def next(self, ids_R: Tensor, parent_R: Tensor) -> Tensor:
        """See `NextToken`."""
        self._state = self._state.rows(parent_R)
        return self._step(ids_R)

    def _step(self, ids_R: Tensor) -> Tensor:
        states_R1D, self._state = self._decoder(ids_R[:, None], self._state)
        scores_RV: Tensor = self._word_head(states_R1D[:, 0])
        return scores_RV
