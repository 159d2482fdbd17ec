"""Uncertain and missing labels: every rule on a table small enough to read."""

import numpy as np
import pytest
from helpers.errors import raises

from medvl.errors import EvaluationError
from medvl.eval import LabelPolicy

NAN = np.nan
NAMES = ("Atelectasis", "Cardiomegaly", "Pneumonia", "No Finding", "Support Devices")
TABLE = np.array(
    [
        [1, 0, NAN, NAN, NAN],
        [-1, -1, -1, NAN, 1],
        [NAN, NAN, NAN, 1, 1],
        [NAN, NAN, NAN, NAN, NAN],
        [0, 1, NAN, 1, 0],  # a contradiction
    ]
)


@pytest.mark.parametrize(
    ("uncertain", "row"), [("ignore", [NAN] * 3), ("zeros", [0] * 3), ("ones", [1] * 3), ("per_class", [1, 0, NAN])]
)
def test_uncertain_labels_become_what_the_policy_says(uncertain, row):
    resolved = LabelPolicy(uncertain=uncertain).resolve(TABLE, NAMES)
    np.testing.assert_array_equal(resolved.labels_NL[1, :3], row)
    np.testing.assert_array_equal(resolved.labels_NL[0, :2], [1, 0])


def test_missing_labels_are_negative_or_left_out():
    policy = {"uncertain": "ignore", "no_finding": "labelled"}
    negative = LabelPolicy(missing="negative", **policy).resolve(TABLE, NAMES).labels_NL
    np.testing.assert_array_equal(np.isnan(negative), TABLE == -1)
    np.testing.assert_array_equal(negative[np.isnan(TABLE)], 0)
    ignored = LabelPolicy(missing="ignore", **policy).resolve(TABLE, NAMES).labels_NL
    np.testing.assert_array_equal(np.isnan(ignored), np.isnan(TABLE) | (TABLE == -1))


def test_no_finding_implies_negatives_and_a_pathology_implies_a_finding():
    labels_NL = LabelPolicy(missing="ignore").resolve(TABLE, NAMES).labels_NL
    expected = [
        [1, 0, NAN, 0, NAN],  # atelectasis: not a normal study
        [NAN, NAN, NAN, NAN, 1],  # a device alone, or an uncertain pathology, says nothing
        [0, 0, 0, 1, 1],  # normal: no pathology, and the device stays
        [NAN, NAN, NAN, NAN, NAN],
        [0, 1, 0, 1, 0],
    ]
    np.testing.assert_array_equal(labels_NL, expected)


def test_contradictions_are_counted_and_kept():
    resolved = LabelPolicy().resolve(TABLE, NAMES)
    assert resolved.contradictions == 1
    assert resolved.labels_NL[4].tolist() == [0, 1, 0, 1, 0]
    assert LabelPolicy(no_finding="labelled").resolve(TABLE, NAMES).contradictions == 1


def test_every_image_is_accounted_for():
    resolved = LabelPolicy().resolve(TABLE, NAMES)
    assert resolved.counts["Atelectasis"] == {
        "positive": 1, "negative": 3, "left_out": 1, "uncertain": 1, "missing": 2,
    }  # fmt: skip
    for column in resolved.counts.values():
        assert column["positive"] + column["negative"] + column["left_out"] == len(TABLE)


def test_the_table_itself_is_left_alone():
    before = TABLE.copy()
    LabelPolicy().resolve(TABLE, NAMES)
    np.testing.assert_array_equal(TABLE, before)


def test_labels_of_any_other_name_follow_the_same_rules():
    resolved = LabelPolicy(uncertain="per_class", missing="ignore").resolve([[1, -1], [NAN, 0]], ("CT", "MR"))
    np.testing.assert_array_equal(resolved.labels_NL, [[1, NAN], [NAN, 0]])
    assert resolved.contradictions == 0


@pytest.mark.parametrize("field", ["uncertain", "missing", "no_finding"])
def test_unknown_rules_are_named_with_the_choice(field):
    with raises(EvaluationError, "unknown_name", field):
        LabelPolicy(**{field: "maybe"})


def test_tables_that_are_no_label_tables():
    with raises(EvaluationError, "out_of_range", "labels"):
        LabelPolicy().resolve([[2.0]], ("Edema",))
    with raises(EvaluationError, "mismatch", "labels"):
        LabelPolicy().resolve([[1.0, 0.0]], ("Edema",))


def test_the_name_says_the_whole_policy():
    assert LabelPolicy().name == "uncertain: ignore, missing: negative, no finding: implied"
