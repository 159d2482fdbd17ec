"""What overlap and findings do not show of a text: repeated sentences, contradictions, sides and
severities.

    repeated_sentences   sentences that an earlier one of the report equals, a report
    contradictions       findings that a report both asserts and denies, a report
    equal_sides          of the findings that a report and its reference both assert and place on a
                         side, the share whose sides are equal
    opposite_sides       of the same, the share that is left in one and right in the other
    equal_severities     of the findings that both assert as mild, moderate or severe, the share
                         whose severities are equal

"Bilateral" is left and right. Findings, sides and severities are read by the labeler.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from medvl.data.reports.labeler import find_mentions
from medvl.data.reports.sentences import split_sentences
from medvl.data.reports.statements import places_of, severities_of
from medvl.eval.core.metric_rows import MetricGroup, MetricRow, mean_metrics
from medvl.eval.core.metrics import Array
from medvl.eval.report_generation.metrics import REPORT, words
from medvl.schema import NEGATIVE, POSITIVE

REPEATED = "repeated_sentences"
CONTRADICTIONS = "contradictions"
EQUAL_SIDES = "equal_sides"
OPPOSITE_SIDES = "opposite_sides"
EQUAL_SEVERITIES = "equal_severities"
CONTENTS = (REPEATED, CONTRADICTIONS, EQUAL_SIDES, OPPOSITE_SIDES, EQUAL_SEVERITIES)
"""Names of the metrics."""
_BOTH = frozenset(("left", "right"))


def _repeated_sentences(text: str) -> int:
    """Return how many sentences of a text equal an earlier one, in their words."""
    sentences = [tuple(words(sentence)) for sentence in split_sentences(text)]
    known = [sentence for sentence in sentences if sentence]
    return len(known) - len(set(known))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """What a text repeats, contradicts, and says of the findings that it asserts."""

    repeated: int
    """Sentences that equal an earlier one, in their words."""
    contradictions: int
    """Findings that are asserted and also denied, on no side or on the same one."""
    sides: Mapping[str, frozenset[str]]
    """Left and right of each asserted finding that is placed on a side."""
    grades: Mapping[str, frozenset[str]]
    """Severities (`medvl.data.reports.statements.SEVERITIES`) of each finding that has one."""


def read_contents(text: str) -> Contents:
    """Return the contents of a text."""
    mentions = list(find_mentions(text))
    found: dict[int, set[tuple[str, str]]] = {POSITIVE: set(), NEGATIVE: set()}
    sides_of: dict[str, frozenset[str]] = {}
    grades: dict[str, frozenset[str]] = {}
    for mention, (sides, _), severity in zip(
        mentions, places_of(mentions), severities_of(mentions), strict=True
    ):
        finding = mention.finding
        if mention.value in found:
            found[mention.value].add((finding, " ".join(sides)))
        if mention.value != POSITIVE:
            continue
        if named := _BOTH if "bilateral" in sides else _BOTH & {*sides}:
            sides_of[finding] = sides_of.get(finding, frozenset()) | named
        if severity:
            grades[finding] = grades.get(finding, frozenset()) | {severity}
    denied = found[NEGATIVE]
    both = {name for name, side in found[POSITIVE] if {(name, side), (name, "")} & denied}
    return Contents(
        repeated=_repeated_sentences(text), contradictions=len(both), sides=sides_of, grades=grades
    )


def content_metrics(
    texts: Sequence[Contents], references: Sequence[Contents], *, subgroup: str = ""
) -> list[MetricGroup]:
    """Return the metrics of this module of pairs of texts."""
    counts_N2 = np.array([[float(text.repeated), float(text.contradictions)] for text in texts])
    sides_N3 = np.zeros((len(texts), 3))  # placed in both, equal, opposite
    grades_N2 = np.zeros((len(texts), 2))  # graded in both, equal
    for row, (text, reference) in enumerate(zip(texts, references, strict=True)):
        for finding in text.sides.keys() & reference.sides.keys():
            ours, theirs = text.sides[finding], reference.sides[finding]
            sides_N3[row] += (1, ours == theirs, not ours & theirs)
        for finding in text.grades.keys() & reference.grades.keys():
            grades_N2[row] += (1, text.grades[finding] == reference.grades[finding])
    return [
        mean_metrics(REPEATED, counts_N2[:, :1], [REPORT], subgroup=subgroup),
        mean_metrics(CONTRADICTIONS, counts_N2[:, 1:], [REPORT], subgroup=subgroup),
        _shares((EQUAL_SIDES, OPPOSITE_SIDES), sides_N3, subgroup),
        _shares((EQUAL_SEVERITIES,), grades_N2, subgroup),
    ]


def _shares(metrics: Sequence[str], counts_NC: Array, subgroup: str) -> MetricGroup:
    """Return the sums of the columns behind the first one over that of the first."""
    reports = int((counts_NC[:, 0] > 0).sum())
    rows = [
        MetricRow(metric=metric, target=REPORT, subgroup=subgroup, n=reports) for metric in metrics
    ]

    def statistic(counts_NR: Array) -> Array:
        total_RC = counts_NR.T @ counts_NC
        known_R1 = total_RC[:, :1]
        return np.where(known_R1 > 0, total_RC[:, 1:] / np.maximum(known_R1, 1), np.nan)

    return MetricGroup(rows, statistic)
