"""Label policies: every rule on a small table."""

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
    ("uncertain", "row"),
    [("ignore", [NAN] * 3), ("zeros", [0] * 3), ("ones", [1] * 3), ("per_class", [1, 0, NAN])],
)
def test_policy_converts_uncertain_labels(uncertain, row):
    resolved = LabelPolicy(uncertain=uncertain).resolve(TABLE, NAMES)
    np.testing.assert_array_equal(resolved.labels_NL[1, :3], row)
    np.testing.assert_array_equal(resolved.labels_NL[0, :2], [1, 0])


def test_policy_converts_missing_labels():
    policy = {"uncertain": "ignore", "no_finding": "labelled"}
    negative = LabelPolicy(missing="negative", **policy).resolve(TABLE, NAMES).labels_NL
    np.testing.assert_array_equal(np.isnan(negative), TABLE == -1)
    np.testing.assert_array_equal(negative[np.isnan(TABLE)], 0)
    ignored = LabelPolicy(missing="ignore", **policy).resolve(TABLE, NAMES).labels_NL
    np.testing.assert_array_equal(np.isnan(ignored), np.isnan(TABLE) | (TABLE == -1))


def test_policy_fills_labels_implied_by_no_finding():
    labels_NL = LabelPolicy(missing="ignore").resolve(TABLE, NAMES).labels_NL
    expected = [
        [1, 0, NAN, 0, NAN],  # atelectasis: not a normal study
        [NAN, NAN, NAN, NAN, 1],  # a device or an uncertain pathology implies nothing
        [0, 0, 0, 1, 1],  # normal: no pathology, and the device stays
        [NAN, NAN, NAN, NAN, NAN],
        [0, 1, 0, 1, 0],
    ]
    np.testing.assert_array_equal(labels_NL, expected)


def test_policy_counts_contradictions():
    resolved = LabelPolicy().resolve(TABLE, NAMES)
    assert resolved.contradictions == 1
    assert resolved.labels_NL[4].tolist() == [0, 1, 0, 1, 0]
    assert LabelPolicy(no_finding="labelled").resolve(TABLE, NAMES).contradictions == 1


def test_policy_counts_sum_to_all_images():
    resolved = LabelPolicy().resolve(TABLE, NAMES)
    assert resolved.counts["Atelectasis"] == {
        "positive": 1, "negative": 3, "left_out": 1, "uncertain": 1, "missing": 2,
    }  # fmt: skip
    for column in resolved.counts.values():
        assert column["positive"] + column["negative"] + column["left_out"] == len(TABLE)


def test_policy_does_not_modify_input():
    before = TABLE.copy()
    LabelPolicy().resolve(TABLE, NAMES)
    np.testing.assert_array_equal(TABLE, before)


def test_policy_applies_to_other_label_names():
    resolved = LabelPolicy(uncertain="per_class", missing="ignore").resolve(
        [[1, -1], [NAN, 0]], ("CT", "MR")
    )
    np.testing.assert_array_equal(resolved.labels_NL, [[1, NAN], [NAN, 0]])
    assert resolved.contradictions == 0


@pytest.mark.parametrize("field", ["uncertain", "missing", "no_finding"])
def test_policy_rejects_unknown_rules(field):
    with raises(EvaluationError, "unknown_name", field):
        LabelPolicy(**{field: "maybe"})


def test_policy_rejects_invalid_label_tables():
    with raises(EvaluationError, "out_of_range", "labels"):
        LabelPolicy().resolve([[2.0]], ("Edema",))
    with raises(EvaluationError, "mismatch", "labels"):
        LabelPolicy().resolve([[1.0, 0.0]], ("Edema",))


def test_policy_name_lists_all_rules():
    assert LabelPolicy().name == "uncertain: ignore, missing: negative, no finding: implied"
