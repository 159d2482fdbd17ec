"""Fine-tuning head of a text encoder: one linear layer (Gu et al. 2021, Section 3.3).

Letters: C classes (1 for a score), S mentions (2).
"""

from typing import Literal

import torch
from torch import Tensor, nn

from medvl.encoders import TextEncoder
from medvl.errors import ConfigError

TextPool = Literal["first", "mentions", "starts", "tokens"]


class TextHead(nn.Module):
    """A text encoder with dropout and a linear layer on its last layer's states.

    There is no pooler: "first" is the state of the first token, which the paper calls the [CLS] encoding. The sequence
    heads of transformers read a dense layer with tanh behind it instead.

    Args:
        encoder: trained with the head.
        outputs: number of classes, 1 for a score.
        pool: "first", the first token; "mentions", the mean over each of two mentions, side by side; "starts", the
            first token of each; "tokens", every token.
        dropout: probability, before the linear layer.
    """

    def __init__(self, encoder: TextEncoder, outputs: int, pool: TextPool = "first", dropout: float = 0.1) -> None:
        super().__init__()
        self.encoder, self.pool = encoder, pool
        mentions = 2 if pool in ("mentions", "starts") else 1
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(mentions * encoder.token_dim, outputs)
        nn.init.normal_(self.linear.weight, std=0.02)
        nn.init.zeros_(self.linear.bias)

    def forward(
        self, ids_BT: Tensor, mask_BT: Tensor, types_BT: Tensor | None = None, mention_BST: Tensor | None = None
    ) -> Tensor:
        """Return logits (B, C), or (B, T, C) with pool "tokens".

        Args:
            ids_BT, mask_BT: token ids, and True on real tokens.
            types_BT: 1 on the second text of a pair; None where all are 0.
            mention_BST: True on the tokens of the first and of the second mention, for "mentions" and "starts".

        Raises ConfigError without mentions where they are needed, and for types with an encoder that has none.
        """
        positions = {} if types_BT is None else {"token_type_ids": types_BT}
        hidden_BTD = self.encoder.embed(ids_BT, mask_BT, **positions)
        tokens_BTD = self.encoder.encode(hidden_BTD, mask_BT)[-1]
        logits: Tensor = self.linear(self.dropout(self._pooled(tokens_BTD, mention_BST)))
        return logits

    def _pooled(self, tokens_BTD: Tensor, mention_BST: Tensor | None) -> Tensor:
        if self.pool == "tokens":
            return tokens_BTD
        if self.pool == "first":
            return tokens_BTD[:, 0]
        if mention_BST is None:
            raise ConfigError(f"pool {self.pool!r} needs the mentions of the text", "missing", field="mention_BST")
        weight_BST = mention_BST.to(tokens_BTD.dtype)
        if self.pool == "starts":
            weight_BST = weight_BST * (weight_BST.cumsum(dim=2) == 1)
        weight_BST = weight_BST / weight_BST.sum(dim=2, keepdim=True).clamp(min=1)
        return torch.einsum("bst,btd->bsd", weight_BST, tokens_BTD).flatten(1)
