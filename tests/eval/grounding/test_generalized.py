"""Generalized grounding: boxes from heat maps, thresholds chosen on validation images, metrics of
phrases with none, one or several boxes.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from helpers.errors import raises
from helpers.eval_fakes import FakeLoader, FakeSource
from helpers.grounding_fakes import OracleModel, TransformingLoader

from medvl.data.annotations import all_phrases_of, phrases_of
from medvl.errors import ConfigError, CorpusError, EvaluationError, SplitError
from medvl.eval.core.metric_rows import measure
from medvl.eval.core.open import Setup, SmallBatchOptions
from medvl.eval.core.results import read_results, write_results
from medvl.eval.dense.metrics import ImageDetections
from medvl.eval.grounding.evaluation import Grounding
from medvl.eval.grounding.generalized import (
    GeneralizedResult,
    generalized_grounding,
    groups_of_lines,
    map_boxes,
    mean_place,
    phrase_metrics,
    union_iou,
)
from medvl.eval.grounding.protocol import phrase_grounding
from medvl.schema import Sample

TEXTS = {200: "left effusion", 100: "large heart"}
BOX = {"label": "Mass", "x": 10, "y": 20, "width": 30, "height": 40}
SIZE = {"image_height": 100, "image_width": 200}


def sample(**extra: object) -> Sample:
    labels = {"Mass": 1, "Edema": 0, "No Finding": 0, "Nodule": 1}
    parts: dict[str, Any] = {"corpus": "fake", "split": "test", "study": "s", "patient": "p"}
    return Sample(key="k", labels=labels, extra={**extra, **SIZE}, **parts)


def counts(one: Sample) -> list[tuple[str, str, int]]:
    return [(each.label, each.text, len(each.boxes)) for each in all_phrases_of(one)]


# Phrases with any number of boxes


def test_denied_labels_and_sentences_without_a_place_are_phrases() -> None:
    labels = sample(boxes=[BOX, BOX])
    assert counts(labels) == [("Mass", "Mass", 2), ("Edema", "Edema", 0)]
    assert counts(dataclasses.replace(labels, extra={"labels": 1})) == []
    sentences = [
        {"text": "A mass.", "labels": ["Mass", "Nodule"], "boxes": [BOX]},
        {"text": "Normal heart.", "labels": [], "boxes": []},
        {"text": "Scoliosis.", "labels": ["scoliosis"]},
    ]
    report = sample(sentences=sentences, phrases=[])
    assert counts(report) == [
        ("Mass", "A mass.", 1),
        ("no label", "Normal heart.", 0),
        ("scoliosis", "Scoliosis.", 0),
    ]
    phrases = [{"label": "Mass", "text": "mass", "boxes": [BOX]}, {"label": "x", "text": "x", "boxes": []}]  # fmt: skip
    listed = sample(phrases=phrases)
    assert counts(listed) == [("Mass", "mass", 1), ("x", "x", 0)]
    assert [each.text for each in phrases_of(listed)] == ["mass"]
    with raises(CorpusError, "malformed", "phrases"):
        all_phrases_of(sample(sentences=[{"boxes": []}]))


def test_findings_of_regions_have_the_boxes_of_their_regions() -> None:
    boxes = [BOX | {"label": name} for name in ("left lung", "right lung")]
    findings = ({"edema": 1, "mass": 0}, {"edema": 1, "mass": 0, "cyst": 0}, {"cyst": 1, "scar": 1})
    names = ("left lung", "right lung", "trachea")
    regions = [{"name": name, "findings": each} for name, each in zip(names, findings, strict=True)]
    # The trachea has no box: of a cyst and a scar there, the place is unknown.
    assert counts(sample(boxes=boxes, regions=regions)) == [("edema", "edema", 2), ("mass", "mass", 0)]  # fmt: skip


# Boxes of a map


def test_boxes_are_around_connected_pixels_by_decreasing_peak() -> None:
    map_HW = np.zeros((6, 8), np.float32)
    map_HW[0, 0], map_HW[1, 1] = 0.6, 0.7  # they touch at a corner
    map_HW[4, 5:7], map_HW[5, 6] = 1.0, 0.5
    boxes_D4, peak_D = map_boxes(map_HW, 0.5)
    assert boxes_D4.tolist() == [[5, 4, 7, 6], [0, 0, 2, 2]]
    assert peak_D == pytest.approx([1, 0.7])
    assert map_boxes(map_HW, 0.9)[0].tolist() == [[5, 4, 7, 5]]
    map_HW[0, 0] = np.nan
    assert map_boxes(map_HW, 0.5)[0].tolist()[1] == [1, 1, 2, 2]
    assert len(map_boxes(np.full((3, 3), 0.1, np.float32), 0.5)[0]) == 0


def test_iou_of_unions_is_that_of_their_pixels() -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        masks = []
        sides = []
        for count in (3, 2):
            corner_D2 = rng.integers(0, 8, (count, 2))
            edges_D4 = np.concatenate([corner_D2, corner_D2 + rng.integers(1, 6, (count, 2))], 1)
            mask_HW = np.zeros((16, 16), bool)
            for left, top, right, bottom in edges_D4:
                mask_HW[top:bottom, left:right] = True
            masks.append(mask_HW)
            sides.append(edges_D4.astype(float))
        expected = (masks[0] & masks[1]).sum() / (masks[0] | masks[1]).sum()
        assert union_iou(*sides) == pytest.approx(expected)
    assert union_iou(np.zeros((0, 4)), sides[0]) == 0
    assert np.isnan(union_iou(sides[0], np.zeros((0, 4))))


def test_metrics_of_phrases_match_by_hand() -> None:
    """Two of three predicted boxes count; one hits one of two. Then none, then phrases without."""
    edges = np.array([[0.0, 0, 10, 10], [20, 20, 30, 30], [50, 50, 60, 60]])
    none = np.zeros((0, 4))
    detections = [
        ImageDetections(
            edges, np.array([0.9, 0.8, 0.1]), np.array([[0.0, 0, 10, 8], [70, 70, 80, 80]])
        ),
        ImageDetections(edges[:1], np.array([0.2]), edges[:1]),
        ImageDetections(edges[:1], np.array([0.9]), none),
        ImageDetections(edges[:1], np.array([0.2]), none),
    ]
    values = phrase_metrics(detections, 0.5)
    nan = float("nan")
    expected = {
        "recall": [0.5, 0, nan, nan],
        "precision": [0.5, nan, nan, nan],
        "f1": [0.5, 0, nan, nan],
        "union_iou": [80 / 300, 0, nan, nan],
        "with_box": [1, 0, nan, nan],
        "without_box": [nan, nan, 0, 1],
    }
    for name, value_N in expected.items():
        np.testing.assert_allclose(values[name], value_N)


def test_mean_place_is_what_most_boxes_share() -> None:
    """Two of three boxes share a part. Its box suits wide boxes less than the box of all."""
    one, other = np.array([[0.0, 0, 0.5, 0.5]]), np.array([[0.25, 0, 0.5, 0.5]])
    far = np.array([[0.75, 0.75, 1, 1]])
    np.testing.assert_allclose(mean_place([other, other, one, far], [other]), other)
    np.testing.assert_allclose(mean_place([one, other, other], [one]), one)
    both = mean_place([one, far], [np.concatenate([one, far])])
    np.testing.assert_allclose(sorted(both.tolist()), np.concatenate([one, far]))


# A model that knows the phrases


def make_loader(count: int = 8, first: int = 0) -> FakeLoader:
    """Images of 40 x 80 pixels, published at twice that size, with an effusion in none, one or two
    of 4 x 4 cells, and a heart in every second image.
    """
    samples, pixels = [], []
    for number in range(first, first + count):
        rng = np.random.default_rng(number)
        image_HW = np.zeros((40, 80), np.uint8)
        cells = [(number % 2, 0), (3, number % 4), (1, 3)]
        cells = cells[: number % 3] + cells[2:] * (number % 2)
        boxes: list[list[dict[str, object]]] = [[], []]
        for place, (row, column) in enumerate(cells):
            heart = (row, column) == (1, 3)
            image_HW[10 * row : 10 * row + 10, 20 * column : 20 * column + 20] = 100 if heart else 200  # fmt: skip
            box = {"label": "x", "x": 40 * column, "y": 20 * row, "width": 40, "height": 20}
            boxes[int(heart)].append(box | {"x": 40 * column + (place > 5) * rng.random()})
        phrases = [
            {"label": text, "text": text, "boxes": each}
            for text, each in zip(TEXTS.values(), boxes, strict=True)
        ]
        extra = {"phrases": phrases, "image_height": 80, "image_width": 160}
        parts: dict[str, Any] = {"corpus": "fake", "split": "test", "study": "s", "extra": extra}
        samples.append(Sample(key=f"k{number}", patient=f"p{number}", **parts))
        pixels.append(image_HW)
    return TransformingLoader(FakeSource(samples, pixels, ()), batch=4)


def evaluate(**settings: Any) -> GeneralizedResult:
    loaders = {"loader": make_loader(12), "valid_loader": make_loader(8, first=20)}
    options = {"scores": "peak", "resamples": 20, **loaders, **settings}
    return generalized_grounding(cast(Any, OracleModel(TEXTS)), **options)


@pytest.fixture(scope="module")
def result() -> GeneralizedResult:
    return evaluate()


def test_a_model_that_knows_its_phrases_finds_every_box_and_no_other(
    result: GeneralizedResult,
) -> None:
    row = result.results.row
    for metric in ("recall@0.5", "precision@0.5", "f1@0.5", "with_box", "without_box"):
        assert row(metric, "overall").value == 1
    assert row("auroc", "presence").value == row("ap@0.5", "overall").value == 1
    assert row("union_iou", "overall").value > 0.8
    assert (row("recall@0.5", "2 boxes").value, row("recall@0.5", "2 boxes").n) == (1, 4)
    assert row("recall@0.5", "swapped").value < 0.8
    assert row("ap@0.5", "swapped").value < 0.8
    assert 0.8 < row("f1@0.5", "mean_place").value < 1  # its boxes have few places
    assert row("f1@0.5", "mean_place").n == row("f1@0.5", "overall").n
    details = result.results.details
    assert (details["phrases"], details["phrases_with_boxes"]) == (24, 14)
    assert result.results.config["extent"] == 0.5  # half of the interpolated height is the cell
    pointing = phrase_grounding(cast(Any, OracleModel(TEXTS)), make_loader(12), resamples=0)
    assert pointing.results.row("pointing_game", "overall").n == 14


def test_rows_are_those_of_the_predictions(result: GeneralizedResult, tmp_path: Path) -> None:
    lines = list(result.predictions())
    assert "text" not in lines[0]
    write_results(result.results, tmp_path, lines)
    read = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert read == lines
    groups = groups_of_lines(read, read_results(tmp_path))
    values = {row.name: row.value for row in measure(groups, len(read), resamples=0)}
    expected = {
        row.name: row.value
        for row in result.results.rows
        if row.target not in ("swapped", "mean_place")
    }
    np.testing.assert_allclose(list(values.values()), list(expected.values()))
    assert list(values) == list(expected)


def test_thresholds_come_from_images_of_other_patients() -> None:
    with pytest.raises(SplitError):
        evaluate(valid_loader=make_loader(4))
    with raises(EvaluationError, "unknown_name", "scores"):
        evaluate(scores="mean")
    loader = make_loader(4, first=20)
    for number, one in enumerate(loader.source.samples):
        nowhere = {"phrases": [{"label": "x", "text": "x", "boxes": []}]}
        loader.source.samples[number] = dataclasses.replace(one, extra={**one.extra, **nowhere})
    with raises(EvaluationError, "empty", "valid"):
        evaluate(valid_loader=loader)


def test_generalized_grounding_needs_validation_shards() -> None:
    evaluation = Grounding(checkpoint=Path("c"), data=Path("d"), protocol="generalized")
    with raises(ConfigError, "missing", "valid"):
        evaluation.evaluate(cast(Any, None), cast(Any, None), Setup(SmallBatchOptions()))
