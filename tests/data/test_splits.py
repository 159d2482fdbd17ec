"""Splits by patient hash: stable, of the right size, provably disjoint."""

import pytest

from medvl.data.splits import check_disjoint, check_fractions, hash_split
from medvl.errors import ConfigError, SplitError

PATIENTS = [f"{number:020x}" for number in range(20_000)]
SECOND_LETTERS = "rrrearrarrrraarrearrrrae"  # of the first splits: r train, a validate, e test


def test_shares_are_those_asked_for() -> None:
    fractions = {"train": 0.7, "validate": 0.1, "test": 0.2}
    splits = [hash_split(patient, fractions) for patient in PATIENTS]
    for name, fraction in fractions.items():
        assert splits.count(name) / len(splits) == pytest.approx(fraction, abs=0.01)


def test_a_patient_keeps_its_split() -> None:
    """Pinned: a change of the hash would move patients of existing corpora from test to train."""
    assert "".join(hash_split(patient)[1] for patient in PATIENTS[:24]) == SECOND_LETTERS


def test_disjoint_splits_pass_and_shared_patients_are_counted() -> None:
    check_disjoint({"train": ["a", "b"], "test": ["c"]}, "corpus")
    with pytest.raises(
        SplitError, match=r"corpus: .*2 in both train and test \(first by hash: a\).*1 in both train and v"
    ):
        check_disjoint({"train": ["b", "a", "c"], "test": ["a", "b"], "validate": ["c", "c"]}, "corpus")


@pytest.mark.parametrize("fractions", [{}, {"train": 1.2, "test": -0.2}, {"train": 0.5, "test": 0.4}])
def test_fractions_must_make_sense(fractions: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="expected split fractions"):
        check_fractions(fractions)
