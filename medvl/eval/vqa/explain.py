"""What a model thought of single questions: the answers that came next, and where it looked."""

import dataclasses
import logging
from collections.abc import Collection, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from medvl.data.loading.collate import Collate, Item, ItemMaker
from medvl.data.loading.vqa_source import QuestionSource
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.text import WholeText
from medvl.errors import MedvlError
from medvl.models import VQA
from medvl.models.downstream.vqa.attention import question_attention
from medvl.models.eval_mode import evaluating
from medvl.schema import Batch

_log = logging.getLogger(__name__)
_BATCH = 8  # attention of few questions at a time: maps are (B, T, P)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Of one question. h, w cells of the grid of the model's input."""

    answers: tuple[tuple[str, float], ...]
    """The likeliest ones with their scores (0 to 1), best first."""
    rank: int | None
    """Of the right answer among all that the model can give, from 1; None: it cannot give it."""
    transform: EvalTransform
    """What made the model's input of the image."""
    maps: tuple[tuple[str, NDArray[np.float32]], ...] = ()
    """(whose attention, map_hw): share of it that each cell gets. Empty where the image has no grid."""


def explain(model: VQA, source: QuestionSource, ids: Collection[str], *, answers: int = 4) -> dict[str, Explanation]:
    """Question id -> explanation, for those of `ids` whose image can be read.

    Args:
        model: in any mode.
        source: the questions, with the model's answers as their labels.
        ids: of questions.
        answers: how many of the likeliest answers are told.
    """
    found: dict[str, Explanation] = {}
    with evaluating(model):
        for names, batch in _batches(model, source, ids):
            found |= dict(zip(names, _explained(model, batch.to(model.device), answers), strict=True))
    return found


def _batches(model: VQA, source: QuestionSource, ids: Collection[str]) -> Iterator[tuple[list[str], Batch]]:
    """As the loader makes them, of the chosen questions alone."""
    assert model.tokenizer is not None, "it has answered questions"
    maker = ItemMaker(model.transform, WholeText(sections=("question",)), source.label_names, seed=0)
    collate = Collate(model.tokenizer)
    places = [place for place, asked in enumerate(source.questions) if asked.question.id in ids]
    for start in range(0, len(places), _BATCH):
        rows: dict[str, Item] = {}
        for place in places[start : start + _BATCH]:
            name = source.questions[place].question.id
            try:
                rows[name] = maker(source.sample(place), source.pixels(place), 0)
            except (MedvlError, OSError):
                _log.warning("question %s is not explained: its image could not be read again", name)
        batch, _ = collate(list(rows.values()))
        if batch is not None:
            yield list(rows), batch


def _explained(model: VQA, batch: Batch, answers: int) -> list[Explanation]:
    score_BV = model.answer_logits(batch).float()
    # a decoder gives the log-likelihood of writing an answer, a classifier judges every one by itself
    share_BV = score_BV.exp() if model.config.head in ("ranking", "generation") else score_BV.sigmoid()
    best = share_BV.topk(min(answers, share_BV.shape[1]), dim=1)
    right_BV = batch.labels_BL == 1
    rank_B = (score_BV > score_BV.masked_fill(~right_BV, -torch.inf).amax(dim=1, keepdim=True)).sum(dim=1) + 1
    looks = question_attention(model.fusion_model, batch)
    maps = {"Summary token": looks.pooled_BP.cpu().numpy(), "Words": looks.words_BP.cpu().numpy()}
    return [
        Explanation(
            answers=tuple(
                (model.config.answers[place], score)
                for place, score in zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True)
            ),
            rank=int(rank_B[row]) if right_BV[row].any() else None,
            maps=tuple((name, map_BP[row].reshape(looks.grid)) for name, map_BP in maps.items() if looks.grid),
            transform=model.transform,
        )
        for row in range(len(batch))
    ]
