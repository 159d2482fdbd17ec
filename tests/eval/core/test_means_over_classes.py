"""Means over classes: a fixed set of classes in all resamples, named in the results."""

from typing import Any

import numpy as np
import pytest
from helpers.errors import raises
from helpers.eval_fakes import FakeLoader, FakeModel, make_source

from medvl.errors import EvaluationError
from medvl.eval import bootstrap_auroc, write_zero_shot_page, zero_shot
from medvl.eval.compare.compare import compare, find_runs
from medvl.eval.core.metric_rows import decision_metrics, measure, ranking_metrics
from medvl.eval.core.metrics import mean_over_labels, resample_counts
from medvl.eval.core.results import PageHeader, write_results

NAMES = ("Edema", "Fracture")


@pytest.fixture
def rare() -> tuple[np.ndarray, np.ndarray]:
    """Scores and labels of 29 items: Edema is balanced, Fracture has 28 positives and one
    negative.
    """
    rng = np.random.default_rng(1)
    labels_NL = np.stack([np.arange(29) % 2, np.arange(29) != 3], axis=1).astype(float)
    scores_NL = rng.random((29, 2)) + 0.3 * labels_NL
    scores_NL[3, 1] = np.sort(scores_NL[:, 1])[5] + 1e-6
    return scores_NL, labels_NL


def test_the_mean_is_over_the_same_classes_in_every_resample(
    rare: tuple[np.ndarray, np.ndarray],
) -> None:
    scores_NL, labels_NL = rare
    group = ranking_metrics("auroc", scores_NL, labels_NL, NAMES, means={"macro": NAMES})
    *_, macro = measure([group], 29, resamples=500)
    counts_NR = np.concatenate(list(resample_counts(29, 500, 0)), axis=1)
    of_classes = [group.statistic(counts_NR)[:, column] for column in (0, 1)]
    both_R = np.mean(of_classes, axis=0)
    assert np.isnan(both_R).mean() == pytest.approx(
        1 / np.e, abs=0.06
    )  # resamples without the only negative
    assert (macro.low, macro.high) == pytest.approx(tuple(np.nanpercentile(both_R, (2.5, 97.5))))
    assert macro.value == pytest.approx(
        bootstrap_auroc(scores_NL, labels_NL, resamples=0)[0].mean()
    )


def test_a_mean_over_several_rare_classes_has_no_interval() -> None:
    labels_NL = np.zeros((40, 4))
    labels_NL[np.arange(4), np.arange(4)] = 1
    scores_NL = np.random.default_rng(0).random((40, 4))
    names = list("abcd")
    rows = measure(
        [ranking_metrics("auroc", scores_NL, labels_NL, names, means={"macro": names})],
        40,
        resamples=200,
    )
    assert not np.isnan(rows[-1].value)
    assert np.isnan(rows[-1].low)


def test_classes_of_one_kind_are_in_no_mean() -> None:
    labels_NL = np.stack([np.arange(20) % 2, np.ones(20)], axis=1).astype(float)
    scores_NL = np.random.default_rng(0).random((20, 2))
    rows = measure(
        [ranking_metrics("auroc", scores_NL, labels_NL, NAMES, means={"macro": NAMES})],
        20,
        resamples=50,
    )
    assert rows[2].value == rows[0].value
    assert (rows[2].low, rows[2].high) == (rows[0].low, rows[0].high)
    assert (
        mean_over_labels(np.array([[0.5, np.nan], [np.nan, 1.0]]), np.array([True, False]))[0]
        == 0.5
    )
    assert np.isnan(mean_over_labels(np.ones((1, 2)), np.array([False, False]))).all()


def test_decisions_are_averaged_over_chosen_classes() -> None:
    labels_NL = np.stack([np.arange(20) % 2, np.arange(20) < 5], axis=1).astype(float)
    predicted_NL = np.random.default_rng(0).random((20, 2)) < 0.5
    rows = {
        row.name: row
        for row in measure([decision_metrics(predicted_NL, labels_NL, NAMES)], 20, resamples=50)
    }
    assert rows["f1/macro"].value == pytest.approx(
        (rows["f1/Edema"].value + rows["f1/Fracture"].value) / 2
    )
    only = decision_metrics(predicted_NL, labels_NL, NAMES, mean_of=["Edema"])
    rows = {row.name: row for row in measure([only], 20, resamples=50)}
    assert (rows["f1/macro"].value, rows["f1/macro"].low) == (
        rows["f1/Edema"].value,
        rows["f1/Edema"].low,
    )


def evaluated(**settings: Any) -> Any:
    labels_NL = np.stack([np.arange(60) % 2, np.arange(60) < 2], axis=1).astype(float)
    source = make_source(labels_NL, NAMES)
    return zero_shot(FakeModel(), FakeLoader(source), "chexpert_pairs", resamples=40, **settings)


def test_results_name_the_classes_of_means_and_warn_of_few_patients(tmp_path: Any) -> None:
    result = evaluated()
    details = result.results.details
    assert details["means"] == {"macro": list(NAMES)}
    assert details["few_patients"] == {"Fracture": {"positive": 2, "negative": 58}}
    page = write_zero_shot_page(
        result, tmp_path / "index.html", PageHeader(model="m", data="d")
    ).read_text()
    for text in (result.table(), page):
        assert "Fracture (2 with, 58 without)" in text


def test_small_classes_leave_the_means_on_request(tmp_path: Any) -> None:
    result = evaluated(smallest_class=10)
    assert result.results.details["means"] == {"macro": ["Edema"]}
    assert result.results.config["smallest_class"] == 10
    assert result.results.row("auroc", "macro").value == result.results.row("auroc", "Edema").value
    assert "Fracture (fewer than 10 positive or negative images)" in result.table()
    assert "Warning" not in result.table()
    with raises(EvaluationError, "empty", field="smallest_class"):
        evaluated(smallest_class=50)
    for name, each in (("all", evaluated()), ("large", result)):
        write_results(each.results, tmp_path / name, each.predictions())
    ((_, runs),) = find_runs([tmp_path / "all", tmp_path / "large"]).items()
    compared = compare(runs, resamples=20)
    assert "auroc/Edema" in compared.differences[0]
    assert "auroc/macro" not in compared.differences[0]  # over other classes
    assert any("over other classes" in note for note in compared.notes)
    ((_, runs),) = find_runs([tmp_path / "large"]).items()
    assert compare(runs, resamples=20).runs[0].results.row("auroc", "macro").value == pytest.approx(
        result.results.row("auroc", "Edema").value
    )
