"""Splits by patient hash: fractions, stability, and the check that splits are disjoint."""

import math

import pytest
from helpers.errors import raises

from medvl.data.splits import check_disjoint, check_fractions, hash_split
from medvl.errors import ConfigError, SplitError

PATIENTS = [f"{number:020x}" for number in range(20_000)]
SECOND_LETTERS = "rrrearrarrrraarrearrrrae"  # of the first 24 splits: r train, a validate, e test


def test_hash_split_follows_the_fractions() -> None:
    fractions = {"train": 0.7, "validate": 0.1, "test": 0.2}
    splits = [hash_split(patient, fractions) for patient in PATIENTS]
    for name, fraction in fractions.items():
        assert splits.count(name) / len(splits) == pytest.approx(fraction, abs=0.01)


def test_hash_split_is_stable() -> None:
    """Pinned values: another hash would move patients of existing corpora from test to train."""
    assert "".join(hash_split(patient)[1] for patient in PATIENTS[:24]) == SECOND_LETTERS


def test_check_disjoint_counts_shared_patients() -> None:
    check_disjoint({"train": ["a", "b"], "test": ["c"]}, "corpus")
    with raises(SplitError, "leak", names="2 in both train and test (first by hash: a)") as caught:
        check_disjoint(
            {"train": ["b", "a", "c"], "test": ["a", "b"], "validate": ["c", "c"]}, "corpus"
        )
    assert "1 in both train and validate" in str(caught.value)


@pytest.mark.parametrize(
    "fractions",
    [
        {},
        {"train": 1.2, "test": -0.2},
        {"train": 0.5, "test": 0.4},
        {"train": math.nan, "test": 0.5},
    ],
)
def test_invalid_fractions_are_refused(fractions: dict[str, float]) -> None:
    with raises(ConfigError, "out_of_range", "splits"):
        check_fractions(fractions)
