"""Visual question answering on any fusion-encoder, by a classifier over a vocabulary of answers or by a decoder."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.encoders import parameter_groups
from medvl.errors import ConfigError
from medvl.models.base import System
from medvl.models.checkpoint import load, load_towers
from medvl.models.downstream.vqa.config import DecoderConfig, Head, VQAConfig
from medvl.models.downstream.vqa.heads import AnswerPredictions, create_head
from medvl.models.downstream.vqa.image_size import at_image_size
from medvl.models.factory import create_model
from medvl.models.fusion_encoders.base import FusionModel
from medvl.models.fusion_encoders.config import StreamConfig
from medvl.models.fusion_encoders.layers.encoder import Pooler
from medvl.models.registry import register_system
from medvl.schema import Batch, Inputs, Losses


@register_system("vqa")
class VQA(System):
    """A fusion-encoder with the answer head `config.head` (`medvl.models.downstream.vqa.heads`).

    The text of a batch is the question and its labels are the answers: column v of `labels_BL` is 1 if answer v of
    `config.answers` is right (`medvl.data.loading.vqa_source.QuestionSource`).

    Pretraining heads, and poolers that the answer head does not read, are kept and frozen, so that a checkpoint of this
    model can initialise another pretraining.
    """

    Config = VQAConfig

    def __init__(self, config: VQAConfig, fusion_model: FusionModel) -> None:
        super().__init__(config, transform=fusion_model.transform, tokenizer=fusion_model.tokenizer)
        self.fusion_model = fusion_model
        self.inputs = Inputs(regions=fusion_model.inputs.regions)
        self.answer_head = create_head(config, fusion_model)
        for name, child in fusion_model.named_children():
            if name.endswith("head"):
                child.requires_grad_(False)
        for module in fusion_model.modules():
            if isinstance(module, Pooler):  # frozen in a MedViLL that was trained for reports
                module.requires_grad_(self.answer_head.reads_pooled)

    @classmethod
    def build(cls, config: VQAConfig, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """See the base class."""
        settings = dict(config.settings)
        if config.vocab_size is not None:
            settings["vocab_size"] = config.vocab_size
        model = create_model(config.fusion, pretrained=pretrained, tokenizer=tokenizer, **settings)
        if not isinstance(model, FusionModel):
            message = f"fusion must name a fusion-encoder such as dual_stream or m3ae, got {config.fusion!r}"
            raise ConfigError(message, "wrong_type", field="fusion")
        return cls(config, model)

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
        """Put a new head on a fusion-encoder, which is not copied. Raises as `create_vqa`."""
        settings = dataclasses.asdict(fusion_model.config) | {"image_weights": None, "text_weights": None}
        config = VQAConfig(
            fusion=fusion_model.name,
            settings=settings,
            answers=tuple(answers),
            head=head,
            decoder=decoder or DecoderConfig(),
            head_lr_mult=head_lr_mult,
            max_tokens=settings["max_tokens"],
            vocab_size=settings["vocab_size"],
        )
        return cls(config, fusion_model)

    def forward(self, batch: Batch) -> Losses:
        """Return the loss of the answers; the labels of an answer outside the vocabulary are zeros."""
        return Losses.sum(
            answers=self.answer_head.loss(self.fusion_model.features(batch), batch.labels_BL.nan_to_num(0.0))
        )

    def answer_logits(self, batch: Batch) -> Tensor:
        """(B, V): scores of `config.answers`. A decoder's are log-likelihoods, minus infinity for answers off the
        shortlist."""
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
            message = f"expected as many images as questions, got {len(image_BCHW)} and {len(questions)}"
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

    def parameter_groups(self, lr: float, weight_decay: float) -> list[dict[str, Any]]:
        """Return the fusion model's groups, and the head at `head_lr_mult` times `lr`."""
        groups = self.fusion_model.parameter_groups(lr, weight_decay)
        head = parameter_groups(self.answer_head, lr * self.config.effective_head_lr_mult, weight_decay)
        return [*groups, *({**group, "name": f"answer_head: {group['name']}"} for group in head)]


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
        start: checkpoint of a fusion-encoder, which is used completely; of a VQA model, whose head is replaced; or of a
            dual-encoder, whose towers are used under a new fusion-encoder.
        answers: the normalised vocabulary.
        fusion: sizes of that new fusion-encoder; its settings of the encoders are replaced by those of `start`.
        image_size: side of the images in pixels, to which learned positions are interpolated; None is that of `start`.
        head: see `VQAConfig`.
        decoder: for the heads "ranking" and "generation"; ALBEF's sizes by default.
        head_lr_mult: learning rate of the head, as a multiple of the encoders'; None is the head's published one.

    Raises:
        CheckpointError: `start` is not a complete checkpoint.
        ConfigError: the vocabulary has fewer than two answers, or the head or the image size does not fit the model.
    """
    model = load(start)
    if isinstance(model, VQA):
        model = model.fusion_model
    if not isinstance(model, FusionModel):
        model = _on_towers(model, fusion, start)
    if image_size is not None:
        model = at_image_size(model, image_size)
    return VQA.on(model, answers, head=head, decoder=decoder, head_lr_mult=head_lr_mult)


def _on_towers(model: System, fusion: StreamConfig, start: Path | str) -> FusionModel:
    """Put a new fusion-encoder on the towers of a dual-encoder's checkpoint."""
    names = ("image_encoder", "text_encoder", "image_size", "fit", "max_tokens", "vocab_size")
    config = dataclasses.replace(fusion, **{name: getattr(model.config, name) for name in names})
    fusion_model = create_model(config, tokenizer=model.tokenizer)
    assert isinstance(fusion_model, FusionModel)
    load_towers(fusion_model, start)
    return fusion_model
