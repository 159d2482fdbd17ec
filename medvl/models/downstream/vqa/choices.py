"""Multiple choice on any fusion-encoder: a score of each option of a question, from its matching
head.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from medvl import losses
from medvl.errors import ConfigError
from medvl.models.base import evaluating, mean_count
from medvl.models.downstream.fused_classifier import (
    FusionTask,
    FusionTaskConfig,
    described_fusion,
    open_fusion,
)
from medvl.models.downstream.retrieval import match_logit, ranked_by
from medvl.models.fusion_encoders.bases.base import FusionConfig, FusionModel
from medvl.models.registry import register_system
from medvl.schema import Batch, Losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoiceConfig(FusionTaskConfig):
    """A head of options on a fusion-encoder."""

    head_lr_mult: float | None = None
    """Learning rate of the head, as a multiple of the encoders'; None is 5, as for retrieval
    (M3AE).
    """

    @property
    def effective_head_lr_mult(self) -> float:
        return 5.0 if self.head_lr_mult is None else self.head_lr_mult


@register_system("choices")
class ChoiceModel(FusionTask):
    """One score for each option of a question, softmax cross-entropy over the options.

    Each option is fused with the image as one text, the question and the option, so that scores do
    not depend on the order of the options. The head starts as the "match" logit of the
    fusion-encoder's ITM head: an untrained model scores as `medvl eval multiple-choice --score
    matching` does.

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
        batch = Batch(
            keys=[str(number) for number in range(len(sizes))],
            image_BCHW=image_BCHW.to(self.device),
            ids_BT=ids_NT,
            mask_BT=mask_NT,
            labels_BL=torch.empty(len(sizes), 0),
            texts=list(questions),
            statement_ids_BST=pad_sequence(ids_NT.split(sizes), True),
            statement_mask_BST=pad_sequence(mask_NT.split(sizes), True),
        )
        with evaluating(self):
            scores_BO = self.option_scores(batch).float().cpu()
        return [row[:size] for row, size in zip(scores_BO, sizes, strict=True)]

    def as_matcher(self) -> FusionModel:
        """Return the fusion-encoder with this head in place of its ITM head, for evaluators; it
        is not copied.
        """
        return ranked_by(self.fusion_model, self.rank_head)


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
