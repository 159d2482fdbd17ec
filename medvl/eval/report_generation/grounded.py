"""Reports with boxes against their references, as RadFact, with the labeler in place of a language
model (Bannur et al., arXiv 2406.04449, section 5).

A sentence is entailed by another report if that report states each finding of the sentence, with
its polarity and its side. Its evidence are the sentences that state one of them. A sentence that
names no finding of the labeler is left out. Rows of both directions, precision of the generated
report and recall of the reference, and the F1 of both means:

* logical: share of sentences that are entailed.
* spatial: share of sentences with boxes that are entailed, and whose boxes lie with more than half
  of their pixels in the boxes of the evidence.
* grounding: the same among the sentences with boxes that are entailed.

Boxes are drawn on masks of 224 by 224. A report without a sentence that counts has no value.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from medvl.data.grounded import Box4, GroundedReport, GroundedSentence
from medvl.data.reports.labeler import CHEXPERT, Conventions, find_mentions
from medvl.data.reports.statements import places_of
from medvl.eval.core.metric_rows import MetricGroup, MetricRow, mean_metrics
from medvl.eval.core.metrics import Array
from medvl.schema import NEGATIVE

Judge = Callable[[str, Sequence[str]], list[int] | None]
"""(sentence, sentences of the other report) -> indices of its evidence, empty where it is not
entailed; None where the sentence is not judged.
"""
KINDS = ("logical", "spatial", "grounding")
_SIZE = 224
_COVERED = 0.5
_BOTH = frozenset({"left", "right"})


def labeler_judge(conventions: Conventions = CHEXPERT) -> Judge:
    """Return the judge by the rule-based labeler."""

    def judge(sentence: str, others: Sequence[str]) -> list[int] | None:
        statements = _statements(sentence, conventions)
        if not statements:
            return None
        other_statements = [_statements(other, conventions) for other in others]
        evidence = set()
        for each in statements:
            saying = [
                row for row, stated in enumerate(other_statements) if _is_stated(each, stated)
            ]
            if not saying:
                return []
            evidence |= set(saying)
        return sorted(evidence)

    return judge


def grounded_metrics(
    generated: Sequence[GroundedReport],
    references: Sequence[GroundedReport],
    judge: Judge | None = None,
) -> list[MetricGroup]:
    """Return logical, spatial and grounding precision, recall and F1, by the labeler unless another
    judge is given.
    """
    judge = judge or labeler_judge()
    pairs = list(zip(generated, references, strict=True))
    precision_NK = np.array(
        [_shares(ours.sentences, theirs.sentences, judge) for ours, theirs in pairs]
    )
    recall_NK = np.array(
        [_shares(theirs.sentences, ours.sentences, judge) for ours, theirs in pairs]
    )
    groups = []
    for column, kind in enumerate(KINDS):
        sides = [
            mean_metrics(f"{kind}_{name}", value_NK[:, column, None], ["report"])
            for name, value_NK in (("precision", precision_NK), ("recall", recall_NK))
        ]
        groups += [*sides, _f1(f"{kind}_f1", sides)]
    return groups


def _statements(text: str, conventions: Conventions) -> set[tuple[str, int, frozenset[str]]]:
    """Return (finding, value, sides) of the mentions in a text."""
    mentions = find_mentions(text, conventions)
    places = places_of(mentions)
    return {
        (mention.finding, mention.value, _BOTH if "bilateral" in sides else frozenset(sides))
        for mention, (sides, _) in zip(mentions, places, strict=True)
    }


def _is_stated(
    statement: tuple[str, int, frozenset[str]], stated: set[tuple[str, int, frozenset[str]]]
) -> bool:
    """Return whether a statement follows from one of the others: a finding on the left from one on
    both sides, no finding on the left from none at all.
    """
    finding, value, sides = statement
    return any(
        (other, other_value) == (finding, value)
        and (sides <= other_sides or (value == NEGATIVE and not other_sides))
        for other, other_value, other_sides in stated
    )


def _shares(
    sentences: Sequence[GroundedSentence], others: Sequence[GroundedSentence], judge: Judge
) -> list[float]:
    """Return the shares of `KINDS` of one report's sentences; NaN without any that counts."""
    texts = [other.text for other in others]
    entailed = []
    placed = []
    for sentence in sentences:
        evidence = judge(sentence.text, texts)
        if evidence is None:
            continue
        entailed.append(bool(evidence))
        if sentence.boxes:
            there = [box for row in evidence for box in others[row].boxes]
            placed.append((bool(evidence), _is_covered(sentence.boxes, there)))
    covered = [inside for _, inside in placed]
    return [
        _mean(entailed),
        _mean(covered),
        _mean([inside for logical, inside in placed if logical]),
    ]


def _is_covered(boxes: Sequence[Box4], others: Sequence[Box4]) -> bool:
    """Return whether more than half of the pixels of the boxes are in the others; a box narrower
    than a pixel has none.
    """
    ours_HW, theirs_HW = _mask(boxes), _mask(others)
    pixels = int(ours_HW.sum())
    return pixels > 0 and int((ours_HW & theirs_HW).sum()) / pixels > _COVERED


def _mask(boxes: Sequence[Box4]) -> NDArray[np.bool_]:
    mask_HW = np.zeros((_SIZE, _SIZE), np.bool_)
    for box in boxes:
        left, top, right, bottom = (int(place * _SIZE) for place in box)
        mask_HW[top:bottom, left:right] = True
    return mask_HW


def _mean(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _f1(name: str, sides: Sequence[MetricGroup]) -> MetricGroup:
    """Return the F1 of the means of precision and recall."""

    def statistic(counts_NR: Array) -> Array:
        precision_R1, recall_R1 = (side.statistic(counts_NR) for side in sides)
        total_R1 = precision_R1 + recall_R1
        return np.where(
            total_R1 > 0,
            2 * precision_R1 * recall_R1 / np.where(total_R1 > 0, total_R1, 1),
            total_R1,
        )

    n = min(side.rows[0].n for side in sides)
    return MetricGroup([MetricRow(metric=name, target="report", n=n)], statistic)
