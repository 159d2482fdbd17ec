"""Visual question answering on any fusion-encoder, by a classifier over a vocabulary of answers
or by a decoder.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from medvl.errors import ConfigError
from medvl.losses.pairs.image_text import ramped_alpha
from medvl.models.downstream.fused_classifier import FusionTask, described_fusion, open_fusion
from medvl.models.downstream.vqa.decoder import DecoderConfig, Head, VQAConfig
from medvl.models.downstream.vqa.heads import AnswerPredictions, DecoderHead, create_head
from medvl.models.fusion_encoders.bases.base import FusionModel, StreamConfig
from medvl.models.registry import register_system
from medvl.schema import Batch, Losses


class Answerer(nn.Module):
    """The modules of a model that have a moving average: fusion-encoder and decoder, shared and
    not copied.
    """

    def __init__(self, fusion_model: FusionModel, answer_head: DecoderHead) -> None:
        super().__init__()
        self.fusion_model = fusion_model
        self.answer_head = answer_head


@register_system("vqa")
class VQA(FusionTask):
    """A fusion-encoder with the answer head `config.head` (`medvl.models.downstream.vqa.heads`).

    The text of a batch is the question and its labels are the answers: column v of `labels_BL` is 1
    if answer v of `config.answers` is right (`medvl.data.loading.studies.QuestionSource`).

    Attributes:
        momentum: with a decoder and `config.decoder.alpha`, the moving average (`Answerer`) of
            fusion-encoder and head, which gives soft targets in training; else None. It starts as a
            copy in the first step.
    """

    Config = VQAConfig
    head_name = "answer_head"

    def __init__(self, config: VQAConfig, fusion_model: FusionModel) -> None:
        super().__init__(config, fusion_model)
        self.answer_head = create_head(config, fusion_model)
        self.freeze_unread(reads_pooled=self.answer_head.reads_pooled)
        self.momentum: AveragedModel | None = None
        if isinstance(self.answer_head, DecoderHead) and config.decoder.alpha:
            average = get_ema_multi_avg_fn(config.decoder.momentum)
            self.momentum = AveragedModel(
                Answerer(fusion_model, self.answer_head), multi_avg_fn=average
            )
            self.momentum.requires_grad_(False)

    @classmethod
    def on(
        cls,
        fusion_model: FusionModel,
        answers: Sequence[str],
        *,
        head: Head = "classifier",
        decoder: DecoderConfig | None = None,
        head_lr_mult: float | None = None,
    ) -> Self:
        """Put a new head on a fusion-encoder, which is not copied unless `for_reading` changes it.

        Raises as `create_vqa`.
        """
        fusion_model = fusion_model.for_reading()
        config = VQAConfig(
            **described_fusion(fusion_model),
            answers=tuple(answers),
            head=head,
            decoder=decoder or DecoderConfig(),
            head_lr_mult=head_lr_mult,
        )
        return cls(config, fusion_model)

    def forward(self, batch: Batch) -> Losses:
        """Return the loss of the answers; the labels of an answer outside the vocabulary are zeros.

        Raises ConfigError in training mode if `before_step` was never called for the moving
        average.
        """
        fused = self.fusion_model.features(batch)
        target_BV = batch.labels_BL.nan_to_num(0.0)
        head = self.answer_head
        if self.momentum is None or not self.training or not isinstance(head, DecoderHead):
            return Losses.sum(answers=head.loss(fused, target_BV))
        steps = int(self.momentum.n_averaged)
        if not steps:
            message = (
                "expected before_step(step) before the forward pass of each optimiser "
                "step; call it in your loop"
            )
            raise ConfigError(message, "missing", field="before_step")
        teacher: Any = self.momentum.module
        with torch.no_grad():
            teacher_NV, *_ = teacher.answer_head.score_targets(
                teacher.fusion_model.features(batch), target_BV
            )
        alpha = ramped_alpha(steps - 1, self.config.decoder.ramp_steps, self.config.decoder.alpha)
        return Losses.sum(answers=head.distilled_loss(fused, target_BV, teacher_NV, alpha))

    @torch.no_grad()
    def before_step(self, step: int) -> None:
        """Move the moving average towards the model."""
        if self.momentum is not None and isinstance(self.answer_head, DecoderHead):
            self.momentum.update_parameters(Answerer(self.fusion_model, self.answer_head))

    def answer_logits(self, batch: Batch) -> Tensor:
        """(B, V): scores of `config.answers`. A decoder's are log-likelihoods, minus infinity for
        answers off the shortlist.
        """
        return self.answer_head.scores(self.fusion_model.features(batch))

    def predict(self, batch: Batch) -> AnswerPredictions:
        """Return the answer to each question of a batch."""
        return self.answer_head.predict(self.fusion_model.features(batch))

    @torch.no_grad()
    def answer(self, image_BCHW: Tensor, questions: Sequence[str]) -> list[str]:
        """Return the likeliest answer to each question about its image.

        Raises ConfigError without a tokenizer, and for unequal numbers of images and questions.
        """
        if len(image_BCHW) != len(questions):
            message = (
                f"expected as many images as questions, got {len(image_BCHW)} and {len(questions)}"
            )
            raise ConfigError(message, "mismatch", field="questions")
        ids_BT, mask_BT = self.tokenize(list(questions))
        batch = Batch(
            keys=[str(number) for number in range(len(questions))],
            image_BCHW=image_BCHW.to(self.device),
            ids_BT=ids_BT,
            mask_BT=mask_BT,
            labels_BL=torch.empty(len(questions), 0),
            texts=list(questions),
        )
        return self.predict(batch).answers


def create_vqa(
    start: Path | str,
    answers: Sequence[str],
    *,
    fusion: StreamConfig,
    image_size: int | None = None,
    head: Head = "classifier",
    decoder: DecoderConfig | None = None,
    head_lr_mult: float | None = None,
) -> VQA:
    """Create a VQA model with a new head from a checkpoint of a dual-encoder or fusion-encoder.

    Args:
        start: checkpoint of a fusion-encoder, which is used completely; of a VQA model, whose head
            is replaced; or of a dual-encoder, whose towers are used under a new fusion-encoder.
        answers: the normalised vocabulary.
        fusion: sizes of that new fusion-encoder; its settings of the encoders are replaced by those
            of `start`.
        image_size: side of the images in pixels, to which learned positions are interpolated; None:
            as in `start`.
        head: see `VQAConfig`.
        decoder: sizes of the decoder of the heads "ranking" and "generation"; ALBEF's by default.
        head_lr_mult: learning rate of the head, as a multiple of the encoders'; None is the head's
            published one.

    Raises:
        CheckpointError: `start` is not a complete checkpoint.
        ConfigError: the vocabulary has fewer than two answers, or the head or the image size does
            not fit the model.
    """
    model = open_fusion(start, fusion, image_size)
    return VQA.on(model, answers, head=head, decoder=decoder, head_lr_mult=head_lr_mult)
