"""Examples of correct and wrong answers for the page, each with the model's answers and
attention maps.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from medvl.data.annotations import Question
from medvl.data.loading.collate import Collate
from medvl.data.loading.items import Item, ItemMaker
from medvl.data.loading.readers import region_views
from medvl.data.loading.sources import color_for
from medvl.data.loading.studies import QuestionSource
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.text import WholeText
from medvl.errors import MedvlError
from medvl.eval.html.page import (
    Card,
    Cards,
    Choice,
    ColorScale,
    Deck,
    Picture,
    shrink,
    thumbnail_uri,
)
from medvl.eval.html.plots import color_ends, draw_map, peak_ratio
from medvl.eval.vqa.accuracy import MODEL, VQAResult
from medvl.eval.vqa.predictions import Prediction
from medvl.models import VQA
from medvl.models.base import evaluating
from medvl.models.downstream.vqa.attention import question_attention
from medvl.schema import Batch

# Explanations of single questions: the next best answers, and attention maps.

_log = logging.getLogger(__name__)
_BATCH = 8  # a small batch, because attention maps are (B, T, P)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Explanation of one question. h, w cells of the grid of the model's input."""

    answers: tuple[tuple[str, float], ...]
    """The most likely answers with their scores (0 to 1), best first."""
    rank: int | None
    """Rank of the right answer among all answers of the model, from 1; None: it is not in the
    vocabulary.
    """
    transform: EvalTransform
    """Transform from the image to the model's input."""
    maps: tuple[tuple[str, NDArray[np.float32]], ...] = ()
    """(name of the query, map_hw): share of its attention on each cell. Empty if the image has
    no grid.
    """


def explain(
    model: VQA, source: QuestionSource, ids: Collection[str], *, answers: int = 4
) -> dict[str, Explanation]:
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
            explanations |= dict(
                zip(names, _explanations(model, batch.to(model.device), answers), strict=True)
            )
    return explanations


def _batches(
    model: VQA, source: QuestionSource, ids: Collection[str]
) -> Iterator[tuple[list[str], Batch]]:
    """Yield question ids and batches of the chosen questions, collated as by the loader."""
    assert model.tokenizer is not None, "needed by answer_questions"
    maker = ItemMaker(
        model.transform, WholeText(sections=("question",)), source.label_names, 0, model.inputs
    )
    collate = Collate(model.tokenizer, model.inputs)
    color = color_for(source, model.transform)
    positions = [
        position for position, entry in enumerate(source.questions) if entry.question.id in ids
    ]
    for start in range(0, len(positions), _BATCH):
        rows: dict[str, Item] = {}
        for position in positions[start : start + _BATCH]:
            name = source.questions[position].question.id
            try:
                rows[name] = _item(maker, source, position, color)
            except (MedvlError, OSError):
                _log.warning(
                    "question %s is not explained: its image could not be read again", name
                )
        batch, _ = collate(list(rows.values()))
        if batch is not None:
            yield list(rows), batch


def _item(maker: ItemMaker, source: QuestionSource, position: int, color: bool) -> Item:
    sample = source.sample(position)
    if maker.inputs.regions:
        return maker.row(sample, region_views([source.regions(position)]), 0)
    return maker(sample, source.pixels(position, color), 0)


def _explanations(model: VQA, batch: Batch, answers: int) -> list[Explanation]:
    score_BV = model.answer_logits(batch).float()
    # a decoder returns log-likelihoods of answers, a classifier independent logits
    probability_BV = (
        score_BV.exp() if model.config.head in ("ranking", "generation") else score_BV.sigmoid()
    )
    best = probability_BV.topk(min(answers, probability_BV.shape[1]), dim=1)
    right_BV = batch.labels_BL == 1
    rank_B = (score_BV > score_BV.masked_fill(~right_BV, -torch.inf).amax(dim=1, keepdim=True)).sum(
        dim=1
    ) + 1
    attention = question_attention(model.fusion_model, batch)
    maps = {
        "Summary token": attention.pooled_BP.cpu().numpy(),
        "Words": attention.words_BP.cpu().numpy(),
    }
    return [
        Explanation(
            answers=tuple(
                (model.config.answers[index], score)
                for index, score in zip(
                    best.indices[row].tolist(), best.values[row].tolist(), strict=True
                )
            ),
            rank=int(rank_B[row]) if right_BV[row].any() else None,
            maps=tuple(
                (name, map_BP[row].reshape(attention.grid))
                for name, map_BP in maps.items()
                if attention.grid
            ),
            transform=model.transform,
        )
        for row in range(len(batch))
    ]


Pixels = Callable[[str], NDArray[np.uint8]]
"""Question id -> its image (H, W) or (H, W, 3)."""
Explain = Callable[[Collection[str]], Mapping[str, Explanation]]
"""Question ids -> explanation of each question that can be explained."""
_SIZE = (
    300  # longer side of the images of a card, in pixels; they are displayed at about half of it
)
_HEATMAP_CAPTION = (
    " Heatmaps show the attention to the image in the last fusion layer: of the pooled token, "
    "and of the question's "
    "words. Color starts at the mean over the cells and is full at the peak, or at twice the "
    "mean if the peak is "
    "lower; the ring is at the peak. The text below gives the peak as a multiple of the mean, "
    "and the share of "
    "attention on the image. "
    "Dark borders are outside of the model's crop."
)


def choose_examples(
    result: VQAResult, each: int = 6, seed: int = 0
) -> dict[tuple[bool, str], list[int]]:
    """Return (correct, "closed" or "open") -> indices of random questions, `each` of every
    combination if possible.

    Question types alternate, so that rare ones are shown. An answer with full credit is correct.
    """
    questions = result.data.questions
    credit_N = result.credits[MODEL]
    order = np.random.default_rng(seed).permutation(len(questions))
    examples: dict[tuple[bool, str], list[int]] = {}
    for correct in (True, False):
        for answer_type in ("closed", "open"):
            by_kind: dict[str, list[int]] = {}
            for index in order.tolist():
                question = questions[index]
                if question.answer_type == answer_type and (credit_N[index] >= 1) == correct:
                    by_kind.setdefault(question.kind, []).append(index)
            turns = [
                (turn, number, index)
                for number, indices in enumerate(by_kind.values())
                for turn, index in enumerate(indices[:each])
            ]
            examples[correct, answer_type] = [index for _, _, index in sorted(turns)[:each]]
    return examples


def example_cards(
    result: VQAResult,
    pixels: Pixels | None,
    explain: Explain | None,
    examples: Mapping[tuple[bool, str], Sequence[int]],
) -> Cards:
    """Return the section of the page, with one deck of cards for each combination of
    `choose_examples`.
    """
    questions = result.data.questions
    ids = [questions[index].id for indices in examples.values() for index in indices]
    explanations = {} if explain is None else explain(ids)
    decks = []
    for (correct, answer_type), indices in examples.items():
        cards = [
            _card(result, index, pixels, explanations.get(questions[index].id)) for index in indices
        ]
        if cards:
            title = f"{'Correct' if correct else 'Wrong'}, {answer_type}"
            decks.append(Deck(title=title, cards=cards, good=correct))
    caption = "Random questions, alternating between question types."
    if any(explanation.maps for explanation in explanations.values()):
        caption += _HEATMAP_CAPTION
    return Cards(title="Correct and wrong answers", decks=decks, caption=caption)


def _card(
    result: VQAResult, index: int, pixels: Pixels | None, explanation: Explanation | None
) -> Card:
    question = result.data.questions[index]
    prediction = result.systems[MODEL].get(question.id)
    credit = functools.partial(result.protocol.credit, question=question)
    choices = []
    if prediction is not None:
        right = credit(prediction.answer) >= 1
        choices.append(Choice(text=prediction.answer, score=_probability(prediction), right=right))
    if explanation is not None:
        choices += [
            Choice(text=answer, score=score, right=credit(answer) >= 1)
            for answer, score in explanation.answers
            if prediction is None or answer != prediction.answer
        ]
    lines = [("True answer", question.answer or "(the data set has none)")]
    if prediction is None:
        lines.append(("Model", "(no answer)"))
    if explanation is not None and not result.credits[MODEL][index] >= 1:
        lines.append(
            (
                "Its rank",
                "not in the vocabulary" if explanation.rank is None else str(explanation.rank),
            )
        )
    if not float(result.credits[MODEL][index]).is_integer():
        lines.append(("Credit", f"{result.credits[MODEL][index]:.2f}"))
    return Card(
        title=question.question,
        pictures=_pictures(question, pixels, explanation),
        choices=choices,
        lines=lines,
        tags=[
            tag
            for tag in (question.kind, question.organ, question.phrasing, f"id {question.id}")
            if tag
        ],
    )


def _probability(prediction: Prediction) -> float | None:
    """Return the score if it is between 0 and 1; files of predictions may hold other values."""
    score: object = prediction.score
    return float(score) if isinstance(score, int | float) and 0 <= score <= 1 else None


def _pictures(
    question: Question, pixels: Pixels | None, explanation: Explanation | None
) -> list[Picture]:
    if pixels is None:
        return []
    try:
        image = shrink(pixels(question.id), _SIZE)
    except (MedvlError, OSError):
        _log.warning("the image of question %s is not shown: it could not be read", question.id)
        return []
    about = f"question {question.id} ({question.kind or 'no type'})"
    pictures = [
        Picture(
            source=thumbnail_uri(image, _SIZE),
            alternative=f"the image of {about}",
            lines=("Image",),
        )
    ]
    if explanation is not None:
        box = explanation.transform.box(*image.shape[:2])
        for name, map_hw in explanation.maps:
            drawn = draw_map(image, map_hw, box, peak=True)
            row, column = np.unravel_index(np.argmax(map_hw), map_hw.shape)
            place = (
                f"{(column + 0.5) / map_hw.shape[1]:.0%} from the left and "
                f"{(row + 0.5) / map_hw.shape[0]:.0%} down"
            )
            scale = ColorScale(
                low="mean", high=f"{color_ends(map_hw)[1] / (float(map_hw.mean()) or 1):.1f}× mean"
            )
            line = f"peak {peak_ratio(map_hw):.1f}×, sum {map_hw.sum():.0%}"
            alternative = (
                f"attention heat map ({name}) of {about}: highest {place} of the crop, {line}"
            )
            source = thumbnail_uri(drawn, _SIZE)
            pictures.append(
                Picture(source=source, alternative=alternative, lines=(name, line), scale=scale)
            )
    return pictures
