"""Single cases for the page: a sample of hits and misses, each with what the model said and where it looked."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from medvl.data.annotations.questions import Question
from medvl.errors import MedvlError
from medvl.eval.html.overlay import draw_map, peak_ratio
from medvl.eval.html.page import Card, Cards, Choice, Deck, Picture, shrink, thumbnail_uri
from medvl.eval.vqa.evaluate import MODEL, VQAResult
from medvl.eval.vqa.explain import Explanation
from medvl.eval.vqa.predictions import Prediction

_log = logging.getLogger(__name__)

Pixels = Callable[[str], NDArray[np.uint8]]
"""Question id -> its image (H, W) or (H, W, 3)."""
Explain = Callable[[Collection[str]], Mapping[str, Explanation]]
"""Question ids -> an explanation of each that can be explained."""
_SIZE = 300
"""Longer side of the images of a card, in pixels; they are shown at about half of it."""
_HEAT = (
    " Heat is attention over the image in the last fusion layer: of the token that sums up image and question, and of "
    "the question's words. It begins at the mean over the cells and is full at the peak, or at twice the mean where no "
    "cell has as much. Beneath it: the peak as a multiple of the mean, and the share of all attention that goes to the "
    "cells. Dark borders were cropped away before the model saw the image."
)


def choose_examples(result: VQAResult, each: int = 6, seed: int = 0) -> dict[tuple[bool, str], list[int]]:
    """(hit, "closed" or "open") -> places of judged questions, drawn without regard to anything but their type.

    Question types take turns, so that rare ones are seen; a hit has full credit. `each` of every combination, fewer
    where there are no more.
    """
    questions, credit_N = result.data.questions, result.credits[MODEL]
    order = np.random.default_rng(seed).permutation(len(questions))
    chosen: dict[tuple[bool, str], list[int]] = {}
    for hit in (True, False):
        for answer_type in ("closed", "open"):
            by_kind: dict[str, list[int]] = {}
            for place in order.tolist():
                question = questions[place]
                if question.answer_type == answer_type and (credit_N[place] >= 1) == hit:
                    by_kind.setdefault(question.kind, []).append(place)
            turns = [
                (turn, number, place)
                for number, places in enumerate(by_kind.values())
                for turn, place in enumerate(places[:each])
            ]
            chosen[hit, answer_type] = [place for _, _, place in sorted(turns)[:each]]
    return chosen


def show_cases(
    result: VQAResult, pixels: Pixels | None, explain: Explain | None, chosen: Mapping[tuple[bool, str], Sequence[int]]
) -> Cards:
    """The section of the page: a deck of cards for every combination that occurs."""
    questions = result.data.questions
    ids = [questions[place].id for places in chosen.values() for place in places]
    explained = {} if explain is None else explain(ids)
    decks = []
    for (hit, answer_type), places in chosen.items():
        cards = [_card(result, place, pixels, explained.get(questions[place].id)) for place in places]
        if cards:
            title = f"{'Hits' if hit else 'Misses'}, {answer_type}"
            decks.append(Deck(title=title, cards=cards, good=hit))
    caption = "Drawn at random, question types in turn."
    if any(explanation.maps for explanation in explained.values()):
        caption += _HEAT
    return Cards(title="Hits and misses", decks=decks, caption=caption)


def _card(result: VQAResult, place: int, pixels: Pixels | None, explanation: Explanation | None) -> Card:
    question = result.data.questions[place]
    said = result.systems[MODEL].get(question.id)
    protocol = result.protocol
    right = protocol.accepted(question)
    choices = []
    if said is not None:
        choices.append(Choice(text=said.answer, score=_share(said), right=protocol.normalize(said.answer) in right))
    if explanation is not None:
        choices += [
            Choice(text=answer, score=score, right=protocol.normalize(answer) in right)
            for answer, score in explanation.answers
            if said is None or answer != said.answer
        ]
    lines = [("True answer", question.answer or "(the data set has none)")]
    if said is None:
        lines.append(("Model", "(no answer)"))
    if explanation is not None and not result.credits[MODEL][place] >= 1:
        rank = "not among the answers it knows" if explanation.rank is None else str(explanation.rank)
        lines.append(("Its rank", rank))
    if not float(result.credits[MODEL][place]).is_integer():
        lines.append(("Credit", f"{result.credits[MODEL][place]:.2f}"))
    return Card(
        title=question.question,
        pictures=_pictures(question, pixels, explanation),
        choices=choices,
        lines=lines,
        tags=[tag for tag in (question.kind, question.organ, question.phrasing, f"id {question.id}") if tag],
    )


def _share(said: Prediction) -> float | None:
    """Its score, where that is a share: a file of predictions may hold anything."""
    score: object = said.score
    return float(score) if isinstance(score, int | float) and 0 <= score <= 1 else None


def _pictures(question: Question, pixels: Pixels | None, explanation: Explanation | None) -> list[Picture]:
    if pixels is None:
        return []
    try:
        image = shrink(pixels(question.id), _SIZE)
    except (MedvlError, OSError):
        _log.warning("the image of question %s is not shown: it could not be read", question.id)
        return []
    pictures = [Picture(source=thumbnail_uri(image, _SIZE), alternative=f"image of question {question.id}")]
    if explanation is not None:
        box = explanation.transform.box(*image.shape[:2])
        for name, map_hw in explanation.maps:
            drawn = draw_map(image, map_hw, box)
            line = f"peak {peak_ratio(map_hw):.1f}×, sum {map_hw.sum():.0%}"
            picture = Picture(source=thumbnail_uri(drawn, _SIZE), alternative=f"attention: {name}", lines=(name, line))
            pictures.append(picture)
    return pictures
