"""Fine-tuning of image-text matching: a rank head scores the candidate texts of an image.

`RetrievalModel` compares an image's own text with false texts (METER, M3AE), `ChoiceModel` the
options of a question with each other. Both heads start as the "match" logit of the
fusion-encoder's ITM head, which stays as it is, so that an untrained model scores as matching does.
"""

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from medvl import losses
from medvl.common.config_io import check_within
from medvl.errors import ConfigError
from medvl.models.base import System, complete_rows, evaluating, mean_count
from medvl.models.downstream.fused_classifier import (
    FusionTask,
    FusionTaskConfig,
    described_fusion,
    open_fusion,
)
from medvl.models.fusion_encoders.bases.base import FusionConfig, FusionModel
from medvl.models.registry import register_system
from medvl.schema import Batch, Losses

_HEAD_LR_MULT = 5.0
"""Learning rate of a rank head, as a multiple of the encoders' (M3AE)."""


def match_logit(itm_head: nn.Module) -> nn.Module:
    """Return a copy of an ITM head with its "match" logit alone."""
    head = copy.deepcopy(itm_head).requires_grad_(True)
    last = head[-1] if isinstance(head, nn.Sequential) else head
    assert isinstance(last, nn.Linear), "ITM heads end in a linear layer"
    last.weight = nn.Parameter(last.weight.detach()[1:].clone())
    last.bias = nn.Parameter(last.bias.detach()[1:].clone())
    last.out_features = 1
    return head


class RankAsMatch(nn.Module):
    """A rank head as an ITM head: the log-odds of a match are the rank score."""

    def __init__(self, rank_head: nn.Module) -> None:
        super().__init__()
        self.rank_head = rank_head

    def forward(self, pooled_BD: Tensor) -> Tensor:
        """(B, D) to (B, 2)."""
        score_B1 = self.rank_head(pooled_BD)
        return torch.cat([torch.zeros_like(score_B1), score_B1], dim=1)


def as_matcher(model: System) -> System:
    """Return the fusion-encoder of a model with a rank head, with that head in place of its ITM
    head, for evaluators; another system as it is. Nothing is copied.
    """
    if not isinstance(model, RetrievalModel | ChoiceModel):
        return model
    fusion_model = model.fusion_model
    fusion_model.itm_head = RankAsMatch(model.rank_head)
    fusion_model.can_match = True
    return fusion_model


# Retrieval.


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrievalConfig(FusionTaskConfig):
    """A rank head on a fusion-encoder, for an image's own text among others."""

    published_head_lr_mult = _HEAD_LR_MULT
    negatives: int = 15
    """False texts for each image."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "(0, inf)", "negatives")


@register_system("retrieval")
class RetrievalModel(FusionTask):
    """One score for each pair; softmax cross-entropy over an image's own text and
    `config.negatives` false ones.

    False texts are other texts of the batch, encoded once, where M3AE reads 15 more texts for each
    image; texts equal to the own one are never false. With fewer texts in a batch, all of them are
    used.

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
        """Return the loss over the samples with an image and a text; 0 if there are fewer
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


# Multiple choice.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoiceConfig(FusionTaskConfig):
    """A rank head on a fusion-encoder, for the options of a question."""

    published_head_lr_mult = _HEAD_LR_MULT


@register_system("choices")
class ChoiceModel(FusionTask):
    """One score for each option of a question, softmax cross-entropy over the options.

    Each option is fused with the image as one text, the question and the option, so that scores do
    not depend on the order of the options. An untrained model scores as `medvl eval multiple-choice
    --score matching` does.

    The texts of a batch are `Batch.statement_ids_BST`, and its labels are 1 for the right option, 0
    for others and NaN where a question has fewer (`medvl.data.loading.studies.OptionSource`).

    B questions, O options of a question, T tokens of a question with an option.
    """

    Config = ChoiceConfig
    head_name = "rank_head"

    def __init__(self, config: ChoiceConfig, fusion_model: FusionModel) -> None:
        super().__init__(config, fusion_model)
        self.inputs = dataclasses.replace(self.inputs, statements=True)
        self.rank_head = match_logit(fusion_model.itm_head)

    @classmethod
    def on(cls, fusion_model: FusionModel, *, head_lr_mult: float | None = None) -> Self:
        """Put the head on a fusion-encoder, which is not copied unless `for_reading` changes it.

        Raises ConfigError for a value out of range.
        """
        fusion_model = fusion_model.for_reading()
        config = ChoiceConfig(**described_fusion(fusion_model), head_lr_mult=head_lr_mult)
        return cls(config, fusion_model)

    def forward(self, batch: Batch) -> Losses:
        """Return the loss of the options (`losses.option_choice`)."""
        scores_BO = self.option_scores(batch)
        return Losses.sum(
            options=losses.option_choice(scores_BO, batch.labels_BL, mean_count(batch))
        )

    def loss_counts(self, batch: Batch) -> Tensor:
        """Return (1,) float32: how many questions the loss of a batch is a sum over."""
        return (batch.labels_BL == 1).any(dim=1).sum().float()[None]

    def option_scores(self, batch: Batch) -> Tensor:
        """(B, O): the score of each option; meaningless where a question has fewer options.

        Raises ConfigError for a batch without options.
        """
        ids_BOT = batch.statement_ids_BST
        mask_BOT = batch.statement_mask_BST
        if ids_BOT is None or mask_BOT is None:
            message = "expected texts of options: open the loader with inputs=model.inputs"
            raise ConfigError(message, "missing", field="statement_ids_BST")
        # Padding repeats the first option, as a BERT reads no text without tokens.
        is_option_BO1 = mask_BOT.any(dim=2, keepdim=True)
        ids_BOT = ids_BOT.where(is_option_BO1, ids_BOT[:, :1])
        mask_BOT = mask_BOT.where(is_option_BO1, mask_BOT[:, :1])
        model = self.fusion_model
        text = model.text_tokens(ids_BOT.flatten(0, 1), mask_BOT.flatten(0, 1))
        questions, options, _ = ids_BOT.shape
        row_N = torch.arange(questions, device=ids_BOT.device).repeat_interleave(options)
        fused = model.fuse(text, model.images_of_rows(batch).rows(row_N))
        scores_N1: Tensor = self.rank_head(fused.pooled_BD)
        return scores_N1.view(questions, options)

    @torch.no_grad()
    def score_options(
        self, image_BCHW: Tensor, questions: Sequence[str], options: Sequence[Sequence[str]]
    ) -> list[Tensor]:
        """Return the scores (O,) of the options of each question about its image.

        Raises ConfigError without a tokenizer, for a question without options, and for unequal
        numbers of images, questions and lists of options.
        """
        if not len(image_BCHW) == len(questions) == len(options):
            counts = f"{len(image_BCHW)}, {len(questions)} and {len(options)}"
            message = f"expected as many images, questions and lists of options, got {counts}"
            raise ConfigError(message, "mismatch", field="options")
        sizes = [len(each) for each in options]
        if not all(sizes):
            message = "expected options of each question, got an empty list"
            raise ConfigError(message, "empty", field="options")
        texts = [
            f"{question} {option}"
            for question, several in zip(questions, options, strict=True)
            for option in several
        ]
        ids_NT, mask_NT = self.tokenize(texts)
        batch = self.make_batch(image_BCHW, questions, ids_NT, mask_NT)
        batch.statement_ids_BST = pad_sequence(ids_NT.split(sizes), True)
        batch.statement_mask_BST = pad_sequence(mask_NT.split(sizes), True)
        with evaluating(self):
            scores_BO = self.option_scores(batch).float().cpu()
        return [row[:size] for row, size in zip(scores_BO, sizes, strict=True)]


def create_choices(
    start: Path | str,
    *,
    fusion: FusionConfig | None = None,
    image_size: int | None = None,
    max_tokens: int | None = None,
    head_lr_mult: float | None = None,
) -> ChoiceModel:
    """Create a model of multiple choice from a checkpoint of a fusion-encoder or dual-encoder.

    Arguments and errors (CheckpointError, ConfigError) are those of `create_fused_classifier`.
    """
    model = open_fusion(start, fusion, image_size, max_tokens)
    return ChoiceModel.on(model, head_lr_mult=head_lr_mult)
