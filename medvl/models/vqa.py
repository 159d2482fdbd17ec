"""Visual question answering by a classifier over a vocabulary of answers, on any fusion-encoder."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from medvl import losses
from medvl.data.tokenize import Tokenizer
from medvl.encoders import parameter_groups
from medvl.errors import ConfigError
from medvl.models.base import System
from medvl.models.fusion_configs import StreamConfig
from medvl.models.fusion_model import FusionModel
from medvl.models.registry import create_model
from medvl.models.storage import load, load_towers
from medvl.models.vqa_config import VQAConfig
from medvl.schema import Batch, Losses


class VQA(System):
    """A fusion-encoder, and a two-layer head over the answers on what it pools (METER and M3AE, card 1.1).

    The batch's text is the question and its labels are the answers: column v of `labels_BL` is 1 where answer v of
    `config.answers` is right (`medvl.data.questions.QuestionSource`).

    The heads of pretraining stay with their fusion-encoder, frozen: they take no part here, and a checkpoint of this
    model can start another pretraining. MedViLL's own head (the product of two states, one hidden layer with ReLU) is
    not built: all systems answer through the same one.
    """

    name = VQAConfig.system
    Config = VQAConfig

    def __init__(self, config: VQAConfig, fusion_model: FusionModel) -> None:
        super().__init__(config, transform=fusion_model.transform, tokenizer=fusion_model.tokenizer)
        self.fusion_model = fusion_model
        for name, child in fusion_model.named_children():
            if name.endswith("head"):
                child.requires_grad_(False)
            if name == "pooler":
                child.requires_grad_(True)  # a MedViLL that was trained for reports has frozen it
        width = fusion_model.pooled_dim
        self.answer_head = nn.Sequential(
            nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, len(config.answers))
        )

    @classmethod
    def build(cls, config: VQAConfig, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """Raises ConfigError and WeightsError as `create_model` says."""
        settings = dict(config.settings)
        if config.vocab_size is not None:
            settings["vocab_size"] = config.vocab_size
        made = create_model(config.fusion, pretrained=pretrained, tokenizer=tokenizer, **settings)
        if not isinstance(made, FusionModel):
            raise ConfigError(f"{config.fusion} is no fusion-encoder: take dual_stream, m3ae, ...")
        return cls(config, made)

    @classmethod
    def on(cls, fusion_model: FusionModel, answers: Sequence[str], *, head_rate: float = 50.0) -> Self:
        """A fresh head on a fusion-encoder, which is taken as it is and not copied."""
        settings = dataclasses.asdict(fusion_model.config)
        config = VQAConfig(
            fusion=fusion_model.name,
            settings=settings,
            answers=tuple(answers),
            head_rate=head_rate,
            max_tokens=settings["max_tokens"],
            vocab_size=settings["vocab_size"],
        )
        return cls(config, fusion_model)

    def forward(self, batch: Batch) -> Losses:
        """Every question with its image; an answer outside the vocabulary is a row of zeros."""
        return Losses.sum(answers=losses.answers(self.answer_logits(batch), batch.labels_BL.nan_to_num(0.0)))

    def answer_logits(self, batch: Batch) -> Tensor:
        """(B, V): scores of the answers of `config.answers`."""
        logits_BV: Tensor = self.answer_head(self.fusion_model.features(batch).pooled_BD)
        return logits_BV

    @torch.no_grad()
    def answer(self, image_BCHW: Tensor, questions: Sequence[str]) -> list[str]:
        """The likeliest answer to each question about its image. Raises ConfigError without a tokenizer."""
        if len(image_BCHW) != len(questions):
            raise ConfigError(f"{len(questions)} questions about {len(image_BCHW)} images: give one image a question")
        ids_BT, mask_BT = self.tokenize(list(questions))
        batch = Batch(
            keys=[str(number) for number in range(len(questions))],
            image_BCHW=image_BCHW.to(self.device),
            ids_BT=ids_BT,
            mask_BT=mask_BT,
            labels_BL=torch.empty(len(questions), 0),
            texts=list(questions),
        )
        return [self.config.answers[place] for place in self.answer_logits(batch).argmax(dim=1).tolist()]

    def parameter_groups(self, lr: float, weight_decay: float) -> list[dict[str, Any]]:
        """The fusion model's own groups, and the head at `head_rate` times `lr`."""
        groups = self.fusion_model.parameter_groups(lr, weight_decay)
        head = parameter_groups(self.answer_head, lr * self.config.head_rate, weight_decay)
        return [*groups, *({**group, "name": f"answer_head: {group['name']}"} for group in head)]


def create_vqa(start: Path | str, answers: Sequence[str], *, fusion: StreamConfig, head_rate: float = 50.0) -> VQA:
    """A fresh head over answers on the model of a checkpoint, of either family.

    Args:
        start: checkpoint of a fusion-encoder, which is taken whole; of a VQA model, whose head is replaced; or of a
            dual-encoder, whose towers are taken under a fresh fusion-encoder.
        answers: the vocabulary, normalised.
        fusion: sizes of that fresh fusion-encoder; what it says of the encoders is replaced by what `start` has.
        head_rate: learning rate of the head, as a multiple of the encoders'.

    Raises:
        CheckpointError: `start` is no whole checkpoint.
        ConfigError: the vocabulary has fewer than two answers.
    """
    started = load(start)
    if isinstance(started, VQA):
        started = started.fusion_model
    if isinstance(started, FusionModel):
        return VQA.on(started, answers, head_rate=head_rate)
    names = ("image_encoder", "text_encoder", "image_size", "fit", "max_tokens", "vocab_size")
    config = dataclasses.replace(fusion, **{name: getattr(started.config, name) for name in names})
    fresh = create_model(config, tokenizer=started.tokenizer)
    assert isinstance(fresh, FusionModel)
    load_towers(fresh, start)
    return VQA.on(fresh, answers, head_rate=head_rate)
