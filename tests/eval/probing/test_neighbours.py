"""Neighbours, prototypes and few labels: scores by hand, the choice of k, rows and page."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.errors import raises
from helpers.eval_fakes import make_source
from helpers.label_shards import make_shards
from sklearn.neighbors import KNeighborsClassifier

from medvl.cli import main as cli
from medvl.errors import EvaluationError, SplitError
from medvl.eval import evaluate_neighbours, linear_probe, write_neighbours_page
from medvl.eval.compare.items import read_items
from medvl.eval.core.results import PageHeader, read_results
from medvl.eval.probing.features import FeatureTable
from medvl.eval.probing.neighbours import (
    NeighboursResult,
    few_labels,
    knn_scores,
    prototype_scores,
)

NAMES = ("Edema", "Fracture", "Cardiomegaly")


def table(count: int, seed: int, prefix: str) -> FeatureTable:
    """Return noise of which the first three features correlate with the labels, two images a
    patient.
    """
    rng = np.random.default_rng(seed)
    labels_NL = (rng.random((count, 3)) < [0.3, 0.5, 0.2]).astype(float)
    source = make_source(labels_NL, NAMES, patients=count // 2, prefix=prefix)
    x_ND = rng.normal(size=(count, 8))
    x_ND[:, :3] += 2 * labels_NL
    return FeatureTable(
        x_ND=torch.from_numpy(3 + x_ND).float(),
        labels_NL=labels_NL,
        label_names=NAMES,
        samples=tuple(source.samples),
        positions=tuple(range(count)),
        unreadable={},
        fingerprint=prefix * 4,
    )


@pytest.fixture(scope="module")
def sets() -> tuple[FeatureTable, FeatureTable, FeatureTable]:
    return table(300, 0, "train"), table(100, 1, "valid"), table(140, 2, "test")


@pytest.fixture(scope="module")
def result(sets: tuple[FeatureTable, FeatureTable, FeatureTable]) -> NeighboursResult:
    return evaluate_neighbours(*sets, counts=(1, 20), shots=(1, 4), seeds=3, resamples=20)


def unit(*degrees: float) -> torch.Tensor:
    radians = torch.tensor(degrees).double().deg2rad()
    return torch.stack([radians.cos(), radians.sin()], dim=1)


def test_neighbours_by_hand() -> None:
    train_ND = unit(0, 20, 50, 180)
    y_NL = np.array([[1, np.nan, 1], [0, 0, 1], [1, 1, 1], [0, 1, 1]])
    scores = knn_scores(unit(5), train_ND, y_NL, [1, 2, 3, 9])
    weights = [math.exp(math.cos(math.radians(angle)) / 0.07) for angle in (5, 15, 45, 175)]
    assert scores[1][0].tolist() == [1, 0, 1]  # the nearest with a known label
    two = weights[0] / (weights[0] + weights[1])
    assert scores[2][0, 0] == pytest.approx(two)
    assert scores[2][0, 1] == pytest.approx(weights[2] / (weights[1] + weights[2]))
    three = (weights[0] + weights[2]) / sum(weights[:3])
    assert scores[3][0, 0] == pytest.approx(three)
    everything = (weights[0] + weights[2]) / sum(weights)
    assert scores[9][0, 0] == pytest.approx(everything)
    unknown = knn_scores(unit(5, 6), train_ND, np.full((4, 1), np.nan), [2])
    assert unknown[2].tolist() == [[0.5], [0.5]]


def test_neighbours_match_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    train_ND, x_MD = (F.normalize(torch.from_numpy(rng.normal(size=(n, 6)))) for n in (90, 300))
    y_NL = (rng.random((90, 2)) < 0.4).astype(float)
    scores = knn_scores(x_MD, train_ND, y_NL, [7])[7]
    for column in range(2):
        referee = KNeighborsClassifier(
            7, weights=lambda distance: np.exp((1 - distance**2 / 2) / 0.07), algorithm="brute"
        )
        referee.fit(train_ND.numpy(), y_NL[:, column])
        expected_M = referee.predict_proba(x_MD.numpy())[:, 1]
        np.testing.assert_allclose(scores[:, column], expected_M, rtol=1e-9)


def test_prototypes_by_hand() -> None:
    train_ND = unit(0, 60, 90, 180)
    y_NL = np.array([[1, 1, 1], [1, np.nan, 1], [0, 0, 1], [0, np.nan, 1]])
    scores_ML = prototype_scores(unit(10), train_ND, y_NL)
    first = math.cos(math.radians(20)) - math.cos(math.radians(125))  # means at 30 and at 135
    second = math.cos(math.radians(10)) - math.cos(math.radians(80))
    np.testing.assert_allclose(scores_ML, [[first, second, 0]], atol=1e-12)


def test_few_labels_are_nested_and_of_different_patients() -> None:
    y_NL = np.array([[1, 0], [1, 1], [1, 1], [0, 1], [0, 0], [0, np.nan]], dtype=float)
    patients = ["a", "a", "b", "c", "c", "d"]
    few = {
        (count, seed): few_labels(y_NL, ["x", "y"], patients, count, seed)
        for count in (1, 2, 16)
        for seed in range(20)
    }
    for (count, seed), few_NL in few.items():
        known_NL = ~np.isnan(few_NL)
        np.testing.assert_array_equal(few_NL[known_NL], y_NL[known_NL])
        for value in (0, 1):
            rows = np.flatnonzero(few_NL[:, 0] == value)
            assert len(rows) == min(count, 2)
            assert len({patients[row] for row in rows}) == len(rows)
        assert (known_NL <= ~np.isnan(few[16, seed])).all()
    drawn = {tuple(np.flatnonzero(few[1, seed][:, 0] == 1)) for seed in range(20)}
    assert len(drawn) == 3
    renamed = few_labels(y_NL[:, ::-1], ["y", "x"], patients, 1, 7)
    np.testing.assert_array_equal(renamed[:, ::-1], few[1, 7])  # a draw belongs to its finding


def test_k_is_chosen_on_validation_images(
    sets: tuple[FeatureTable, FeatureTable, FeatureTable], result: NeighboursResult
) -> None:
    details = result.results.details
    assert details["k"] == 20
    assert details["validation_auroc"]["20"] > details["validation_auroc"]["1"] > 0.5
    mean_D = sets[0].x_ND.mean(dim=0)
    train_ND, test_MD = (F.normalize(each.x_ND - mean_D, dim=1) for each in (sets[0], sets[2]))
    expected_ML = knn_scores(test_MD, train_ND, sets[0].labels_NL, [20])[20]
    np.testing.assert_array_equal(result.images.scores_NL, expected_ML)


def test_rows_of_all_methods(
    sets: tuple[FeatureTable, FeatureTable, FeatureTable], result: NeighboursResult
) -> None:
    value = {ending: result.results.row(f"auroc{ending}", "macro") for ending in result.columns}
    assert list(value) == ["@knn", "@prototypes", "@1-shot", "@4-shot", "@linear"]
    assert all(row.low < row.value < row.high for row in value.values())
    assert value["@1-shot"].value < value["@4-shot"].value < value["@prototypes"].value
    assert value["@knn"].value == result.results.row("auroc", "macro").value > 0.8
    probe = linear_probe(*sets, fractions=(1.0,), resamples=20)
    for target in ("macro", *NAMES):
        expected = dataclasses.replace(
            probe.results.row("auroc@100%", target), metric="auroc@linear"
        )
        assert result.results.row("auroc@linear", target) == expected
    runs = [
        evaluate_neighbours(*sets, counts=(20,), shots=(4,), seeds=seeds, resamples=0)
        for seeds in (1, 2)
    ]
    first, mean = (run.results.row("auroc@4-shot", "Edema").value for run in runs)
    deviation = runs[1].results.row("auroc_sd@4-shot", "Edema").value
    assert abs(mean - first) == pytest.approx(deviation / math.sqrt(2))  # of two values


def test_the_page_names_every_method(result: NeighboursResult, tmp_path: Path) -> None:
    header = PageHeader(model="resnet", data="phantom")
    text = write_neighbours_page(result, tmp_path / "page.html", header).read_text()
    for title in ("neighbours", "prototypes", "1-shot", "4-shot", "linear probe"):
        assert f"AUROC, {title}" in text
    assert "k = 20, chosen on validation images" in text


def test_bad_settings_and_shared_patients_are_refused(
    sets: tuple[FeatureTable, FeatureTable, FeatureTable],
) -> None:
    for field in ("counts", "shots"):
        with raises(EvaluationError, "out_of_range", field):
            evaluate_neighbours(*sets, **{field: (0,)})
    with raises(EvaluationError, "out_of_range", "seeds"):
        evaluate_neighbours(*sets, seeds=0)
    with raises(EvaluationError, "out_of_range", "counts"):
        evaluate_neighbours(*sets, counts=())
    with raises(SplitError, "leak"):
        evaluate_neighbours(sets[0], sets[1], sets[0])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = make_shards(tmp_path / "data")
    out = tmp_path / "out"
    cli.main(
        [
            *("eval", "neighbours", "--encoder", "resnet_tiny", "--image-size", "32"),
            *("--train", str(shards / "train"), "--valid", str(shards / "validate")),
            *("--test", str(shards / "test"), "--out", str(out), "--shots", "2"),
            *("--resamples", "20", "--workers", "0", "--batch", "8", "--device", "cpu"),
        ]
    )
    assert "auroc@knn" in capsys.readouterr().out
    results = read_results(out / "results.json")
    assert results.protocol == "neighbours"
    assert results.row("auroc@2-shot", "Edema").value > 0.9  # bright against dark
    assert "AUROC, 2-shot" in (out / "index.html").read_text()
    line = json.loads((out / "predictions.jsonl").read_text().splitlines()[0])
    assert set(line["scores"]) == {"Edema", "Fracture"}
    items = read_items(out, results)
    assert items is not None
    paired = {row.name for row in results.rows if "@" in row.metric and not row.subgroup}
    assert paired - set(items.rows) == set()
    assert {name.partition("/")[0] for name in paired} >= {"auroc@prototypes", "auroc_sd@2-shot"}
