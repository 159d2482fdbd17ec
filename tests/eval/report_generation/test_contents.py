"""Repeated sentences, and sides and severities of findings that a report and its reference both
have.
"""

import numpy as np
import pytest

from medvl.eval.report_generation.metrics import (
    CONTRADICTIONS,
    EQUAL_SEVERITIES,
    EQUAL_SIDES,
    OPPOSITE_SIDES,
    REPEATED,
    content_metrics,
    read_contents,
)

PAIRS = [
    ("Left pleural effusion. left pleural effusion .", "Small left pleural effusion."),
    ("Right pleural effusion. No pneumothorax.", "Left pleural effusion."),
    ("Bilateral pleural effusions.", "Left pleural effusion. Right pleural effusion."),
    ("Bilateral pleural effusions.", "Left pleural effusion."),
    ("The heart is mildly enlarged.", "Right pleural effusion. The heart is severely enlarged."),
    ("Moderate cardiomegaly.", "Moderately enlarged heart."),
]


def test_repeated_sentences_are_compared_by_their_words() -> None:
    assert read_contents("No edema. no edema . No edema! The heart is large.").repeated == 2
    assert read_contents("").repeated == read_contents("No edema.").repeated == 0


def test_contradictions_are_of_one_finding_and_side() -> None:
    both = read_contents("No pleural effusion or edema. Left effusion. Moderate edema.")
    assert both.contradictions == 2
    neither = read_contents("No left pleural effusion. Right pleural effusion. No edema.")
    assert neither.contradictions == 0


def test_both_sides_are_bilateral() -> None:
    effusion = "Pleural Effusion"
    assert read_contents("Bilateral pleural effusions.").sides == {effusion: {"left", "right"}}
    assert read_contents("No left pleural effusion. The heart is enlarged.").sides == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Bilateral pleural effusions, moderate-sized on the left.", {"moderate"}),
        ("Small effusion and very large pneumothorax.", set()),
        ("Trace effusion. Large pleural effusion.", {"mild", "severe"}),
        ("No large pleural effusion.", set()),
        ("The largest nodule is 2 cm. Left pleural effusion.", set()),
    ],
)
def test_severities_are_of_the_clause_or_of_the_sentence(text: str, expected: set[str]) -> None:
    assert read_contents(text).grades.get("Pleural Effusion", set()) == expected


def test_shares_are_of_findings_that_both_place() -> None:
    texts, references = zip(*PAIRS, strict=True)
    groups = content_metrics(
        [*map(read_contents, texts)], [*map(read_contents, references)], subgroup="x"
    )
    weight_N1 = np.ones((len(PAIRS), 1))
    value_of = {
        row.metric: (row.n, value)
        for group in groups
        for row, value in zip(group.rows, group.statistic(weight_N1)[0], strict=True)
    }
    assert value_of[REPEATED] == (6, pytest.approx(1 / 6))
    assert value_of[CONTRADICTIONS] == (6, 0)
    assert value_of[EQUAL_SIDES] == (4, pytest.approx(0.5))
    assert value_of[OPPOSITE_SIDES] == (4, pytest.approx(0.25))
    assert value_of[EQUAL_SEVERITIES] == (2, pytest.approx(0.5))
    without_N1 = np.array([[0.0], [0], [0], [0], [1], [0]])
    assert np.isnan(groups[2].statistic(without_N1)).all()
