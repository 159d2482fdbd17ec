"""Explanations of single questions: the next best answers, and attention maps."""

import dataclasses
import logging
from collections.abc import Collection, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from medvl.data.loading.collate import Collate, Item, ItemMaker
from medvl.data.loading.sources import color_for
from medvl.data.loading.vqa_source import QuestionSource
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.text import WholeText
from medvl.errors import MedvlError
from medvl.models import VQA
from medvl.models.downstream.vqa.attention import question_attention
from medvl.models.eval_mode import evaluating
from medvl.schema import Batch

_log = logging.getLogger(__name__)
_BATCH = 8  # a small batch, because attention maps are (B, T, P)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Explanation of one question. h, w cells of the grid of the model's input."""

    answers: tuple[tuple[str, float], ...]
    """The most likely answers with their scores (0 to 1), best first."""
    rank: int | None
    """Rank of the right answer among all answers of the model, from 1; None: it is not in the vocabulary."""
    transform: EvalTransform
    """Transform from the image to the model's input."""
    maps: tuple[tuple[str, NDArray[np.float32]], ...] = ()
    """(name of the query, map_hw): share of its attention on each cell. Empty if the image has no grid."""


def explain(model: VQA, source: QuestionSource, ids: Collection[str], *, answers: int = 4) -> dict[str, Explanation]:
    """Return question id -> explanation, for those of `ids` whose image can be read.

    Args:
        model: in any mode.
        source: the questions, with the model's answers as labels.
        ids: ids of the questions to explain.
        answers: number of most likely answers.
    """
    explanations: dict[str, Explanation] = {}
    with evaluating(model):
        for names, batch in _batches(model, source, ids):
            explanations |= dict(zip(names, _explanations(model, batch.to(model.device), answers), strict=True))
    return explanations


def _batches(model: VQA, source: QuestionSource, ids: Collection[str]) -> Iterator[tuple[list[str], Batch]]:
    """Yield question ids and batches of the chosen questions, collated as by the loader."""
    assert model.tokenizer is not None, "needed by answer_questions"
    maker = ItemMaker(model.transform, WholeText(sections=("question",)), source.label_names, 0, model.inputs)
    collate = Collate(model.tokenizer, model.inputs)
    color = color_for(source, model.transform)
    positions = [position for position, entry in enumerate(source.questions) if entry.question.id in ids]
    for start in range(0, len(positions), _BATCH):
        rows: dict[str, Item] = {}
        for position in positions[start : start + _BATCH]:
            name = source.questions[position].question.id
            try:
                rows[name] = _item(maker, source, position, color)
            except (MedvlError, OSError):
                _log.warning("question %s is not explained: its image could not be read again", name)
        batch, _ = collate(list(rows.values()))
        if batch is not None:
            yield list(rows), batch


def _item(maker: ItemMaker, source: QuestionSource, position: int, color: bool) -> Item:
    sample = source.sample(position)
    if maker.inputs.regions:
        return maker.row(sample, maker.region_views(source.regions(position)), 0)
    return maker(sample, source.pixels(position, color), 0)


def _explanations(model: VQA, batch: Batch, answers: int) -> list[Explanation]:
    score_BV = model.answer_logits(batch).float()
    # a decoder returns log-likelihoods of answers, a classifier independent logits
    probability_BV = score_BV.exp() if model.config.head in ("ranking", "generation") else score_BV.sigmoid()
    best = probability_BV.topk(min(answers, probability_BV.shape[1]), dim=1)
    right_BV = batch.labels_BL == 1
    rank_B = (score_BV > score_BV.masked_fill(~right_BV, -torch.inf).amax(dim=1, keepdim=True)).sum(dim=1) + 1
    attention = question_attention(model.fusion_model, batch)
    maps = {"Summary token": attention.pooled_BP.cpu().numpy(), "Words": attention.words_BP.cpu().numpy()}
    return [
        Explanation(
            answers=tuple(
                (model.config.answers[index], score)
                for index, score in zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True)
            ),
            rank=int(rank_B[row]) if right_BV[row].any() else None,
            maps=tuple((name, map_BP[row].reshape(attention.grid)) for name, map_BP in maps.items() if attention.grid),
            transform=model.transform,
        )
        for row in range(len(batch))
    ]
