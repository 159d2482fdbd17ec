"""Fine-tuning of image-text matching for retrieval: an image's own text against false texts
(METER, M3AE).
"""

import copy
import dataclasses
from pathlib import Path
from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.common.config_io import check_within
from medvl.encoders import TextEncoder
from medvl.errors import ConfigError
from medvl.models.base import complete_rows
from medvl.models.downstream.fused_classifier import (
    FusionTask,
    FusionTaskConfig,
    described_fusion,
    open_fusion,
)
from medvl.models.fusion_encoders.bases.base import FusionModel
from medvl.models.registry import register_system
from medvl.schema import Batch, Losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrievalConfig(FusionTaskConfig):
    """A rank head on a fusion-encoder."""

    negatives: int = 15
    """False texts for each image."""
    head_lr_mult: float | None = None
    """Learning rate of the head, as a multiple of the encoders'; None is M3AE's 5."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "(0, inf)", "negatives")

    @property
    def effective_head_lr_mult(self) -> float:
        return 5.0 if self.head_lr_mult is None else self.head_lr_mult


@register_system("retrieval")
class RetrievalModel(FusionTask):
    """One score for each pair; softmax cross-entropy over an image's own text and
    `config.negatives` false ones.

    The head starts as the "match" logit of the fusion-encoder's ITM head, which stays as it is
    (M3AE's released code). False texts are other texts of the batch, encoded once, where M3AE reads
    15 more texts for each image; texts equal to the own one are never false. With fewer texts in a
    batch, all of them are used.

    N complete rows of the batch, K texts of an image, the own one first.
    """

    Config = RetrievalConfig
    head_name = "rank_head"

    def __init__(self, config: RetrievalConfig, fusion_model: FusionModel) -> None:
        super().__init__(config, fusion_model)
        self.rank_head = match_logit(fusion_model.itm_head)

    @classmethod
    def on(
        cls, fusion_model: FusionModel, *, negatives: int = 15, head_lr_mult: float | None = None
    ) -> Self:
        """Put the head on a fusion-encoder, which is not copied unless `for_reading` changes it.

        Raises ConfigError for a value out of range.
        """
        fusion_model = fusion_model.for_reading()
        fields = described_fusion(fusion_model)
        return cls(
            RetrievalConfig(**fields, negatives=negatives, head_lr_mult=head_lr_mult),
            fusion_model,
        )

    def forward(self, batch: Batch) -> Losses:
        """Return the loss over the samples with an image and a text; 0 where there are fewer
        than two texts.
        """
        model = self.fusion_model
        row_N = complete_rows(batch)
        weight = 1 / len(row_N) if len(row_N) else 0.0
        row_N = row_N if len(row_N) else row_N.new_zeros(1)  # a BERT reads no empty batch
        text_NK, allowed_NK = sample_texts(batch.ids_BT[row_N], self.config.negatives)
        image = model.images_of_rows(batch).rows(row_N)
        text = model.text_tokens(batch.ids_BT, batch.mask_BT, batch.has_text_B).rows(row_N)
        image_M = torch.arange(len(row_N), device=row_N.device).repeat_interleave(text_NK.shape[1])
        fused = model.fuse(text.rows(text_NK.flatten()), image.rows(image_M))
        score_NK = (
            self.rank_head(fused.pooled_BD)
            .view(text_NK.shape)
            .float()
            .masked_fill(~allowed_NK, -torch.inf)
        )
        target_N = torch.zeros_like(row_N)
        loss = F.cross_entropy(score_NK, target_N, reduction="sum") * weight
        return Losses.sum(retrieval=loss)

    def as_matcher(self) -> FusionModel:
        """Return the fusion-encoder with this head in place of its ITM head, for evaluators; it
        is not copied.
        """
        return ranked_by(self.fusion_model, self.rank_head)


class RankAsMatch(nn.Module):
    """A rank head as an ITM head: the log-odds of a match are the rank score."""

    def __init__(self, rank_head: nn.Module) -> None:
        super().__init__()
        self.rank_head = rank_head

    def forward(self, pooled_BD: Tensor) -> Tensor:
        """(B, D) to (B, 2)."""
        score_B1 = self.rank_head(pooled_BD)
        return torch.cat([torch.zeros_like(score_B1), score_B1], dim=1)


def ranked_by(model: FusionModel, rank_head: nn.Module) -> FusionModel:
    """Return a fusion-encoder, not copied, with a rank head in place of its ITM head."""
    model.itm_head = RankAsMatch(rank_head)
    model.can_match = True
    return model


def match_logit(itm_head: nn.Module) -> nn.Module:
    """Return a copy of an ITM head with its "match" logit alone."""
    head = copy.deepcopy(itm_head).requires_grad_(True)
    last = head[-1] if isinstance(head, nn.Sequential) else head
    assert isinstance(last, nn.Linear), "ITM heads end in a linear layer"
    last.weight = nn.Parameter(last.weight.detach()[1:].clone())
    last.bias = nn.Parameter(last.bias.detach()[1:].clone())
    last.out_features = 1
    return head


def sample_texts(ids_NT: Tensor, negatives: int) -> tuple[Tensor, Tensor]:
    """Return (N, K) indices of texts, the own one first, and whether each is one to compare with.

    False texts are sampled without replacement among the texts with other tokens.
    """
    count = len(ids_NT)
    own_N = torch.arange(count, device=ids_NT.device)
    differs_NN = (ids_NT[:, None] != ids_NT[None]).any(dim=2)
    order_NN = torch.rand(count, count).to(ids_NT.device).masked_fill(~differs_NN, -1.0)
    chosen_NK = order_NN.topk(min(negatives, count), dim=1).indices
    text_NK = torch.cat([own_N[:, None], chosen_NK], dim=1)
    allowed_NK = torch.cat(
        [torch.ones_like(own_N[:, None], dtype=torch.bool), differs_NN.gather(1, chosen_NK)], dim=1
    )
    return text_NK, allowed_NK


def create_retrieval(
    start: Path | str,
    *,
    image_size: int | None = None,
    max_tokens: int | None = None,
    negatives: int = 15,
    head_lr_mult: float | None = None,
) -> RetrievalModel:
    """Create a retrieval model from the checkpoint of a fusion-encoder, or of a head on one.

    Arguments and errors (CheckpointError, ConfigError) are those of `create_fused_classifier` and
    `RetrievalConfig`.
    """
    model = open_fusion(start, None, image_size, max_tokens)
    return RetrievalModel.on(model, negatives=negatives, head_lr_mult=head_lr_mult)


# Fine-tuning head of a text encoder: one linear layer (Gu et al. 2021, Section 3.3).
#
# Letters: C classes (1 for a score), S mentions (2).

TextPool = Literal["first", "mentions", "starts", "tokens"]


class TextHead(nn.Module):
    """A text encoder with dropout and a linear layer on its last layer's states.

    There is no pooler: "first" is the state of the first token, which the paper calls the [CLS]
    encoding. The sequence heads of transformers read a dense layer with tanh behind it instead.

    Args:
        encoder: trained with the head.
        outputs: number of classes, 1 for a score.
        pool: "first", the first token; "mentions", the mean over each of two mentions, side by
            side; "starts", the first token of each; "tokens", every token.
        dropout: probability, before the linear layer.
    """

    def __init__(
        self, encoder: TextEncoder, outputs: int, pool: TextPool = "first", dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.pool = pool
        mentions = 2 if pool in ("mentions", "starts") else 1
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(mentions * encoder.token_dim, outputs)
        nn.init.normal_(self.linear.weight, std=0.02)
        nn.init.zeros_(self.linear.bias)

    def forward(
        self,
        ids_BT: Tensor,
        mask_BT: Tensor,
        types_BT: Tensor | None = None,
        mention_BST: Tensor | None = None,
    ) -> Tensor:
        """Return logits (B, C), or (B, T, C) with pool "tokens".

        Args:
            ids_BT, mask_BT: token ids, and True on real tokens.
            types_BT: 1 on the second text of a pair; None where all are 0.
            mention_BST: True on the tokens of the first and of the second mention, for "mentions"
                and "starts".

        Raises ConfigError without mentions where they are needed, and for types with an encoder
        that has none.
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
            raise ConfigError(
                f"pool {self.pool!r} needs the mentions of the text", "missing", field="mention_BST"
            )
        weight_BST = mention_BST.to(tokens_BTD.dtype)
        if self.pool == "starts":
            weight_BST = weight_BST * (weight_BST.cumsum(dim=2) == 1)
        weight_BST = weight_BST / weight_BST.sum(dim=2, keepdim=True).clamp(min=1)
        return torch.einsum("bst,btd->bsd", weight_BST, tokens_BTD).flatten(1)
