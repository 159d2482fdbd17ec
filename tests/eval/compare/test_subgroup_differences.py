"""Paired differences of subgroups in every task: one model is worse on half of the women, and
nowhere else.

What the tasks have in common is that their lines name the groups of the image; the truth is counted
by hand.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.eval_fakes import FakeSource, make_source
from helpers.html_pages import read
from sklearn.metrics import roc_auc_score

from medvl.data.annotations import Phrase, Question
from medvl.eval.change.protocol import ChangeResult, change_metrics
from medvl.eval.classification.scored_images import ScoredImages, evaluate_scores
from medvl.eval.compare.compare import Comparison, compare, find_runs
from medvl.eval.compare.items import read_items
from medvl.eval.compare.page import format_comparison, write_comparison
from medvl.eval.core.metric_rows import (
    MetricGroup,
    label_mean_metrics,
    measure,
    ranking_metrics,
    subgroups_of,
)
from medvl.eval.core.results import Results, write_results
from medvl.eval.dense.detection import DetectedImage, DetectionResult, detection_groups
from medvl.eval.dense.metrics import (
    AP_CONVENTIONS,
    THRESHOLDS,
    APConvention,
    ImageDetections,
    MaskThreshold,
    mask_areas,
    pixel_auroc,
    stack,
)
from medvl.eval.dense.segmentation import SegmentationResult, SegmentedImage, segmentation_groups
from medvl.eval.grounding.protocol import GroundedPhrase, GroundingResult
from medvl.eval.masked_prediction import HiddenWord, MaskedPredictionResult, Sentences
from medvl.eval.matching import Items, MatchingResult, matching_groups
from medvl.eval.probing.protocol import ProbeResult
from medvl.eval.report_generation.protocol import GeneratedReport, evaluate_reports
from medvl.eval.retrieval.by_class import ClassRetrievalResult, Queries, Query, precision_metrics
from medvl.eval.retrieval.image_text import Gallery, RetrievalResult, rank_rows
from medvl.eval.vqa.accuracy import evaluate_answers
from medvl.eval.vqa.predictions import Prediction, VQAData
from medvl.schema import Sample

COUNT = 48
SOURCE: FakeSource = make_source(
    (np.random.default_rng(0).random((COUNT, 1)) < 0.5).astype(float), ["Edema"]
)
SAMPLES: tuple[Sample, ...] = tuple(SOURCE.samples)
SEX_N = np.array([sample.sex for sample in SAMPLES])
WORSE_N = (SEX_N == "F") & (np.arange(COUNT) % 4 == 0)
"""Half of the women: what the second model gets wrong."""
Made = tuple[Results, Iterable[Mapping[str, Any]]]


def results_of(protocol: str, groups: Sequence[MetricGroup], **config: Any) -> Results:
    rows = measure(groups, COUNT, resamples=0)
    return Results(
        protocol=protocol, protocol_version=1, rows=rows, config=config, inputs={"manifest": "m"}
    )


def of_results(result: Any, results: Results | None = None) -> Made:
    return results or result.results, list(result.predictions())


def grounding(worse_N: np.ndarray) -> Made:
    cnr_N = np.where(worse_N, 0.0, 1.0)
    items = tuple(
        GroundedPhrase(
            position=row, sample=sample, phrase_index=0, phrase=Phrase(text="t", label="Edema",
            boxes=()), metrics={"cnr": float(cnr_N[row])}, box_share=0.1, unseen_share=0.0,
        )
        for row, sample in enumerate(SAMPLES)
    )  # fmt: skip
    groups = [label_mean_metrics("cnr", cnr_N, ["Edema"] * COUNT)]
    return of_results(
        GroundingResult(results=results_of("grounding", groups), items=items, maps={})
    )


def retrieval(worse_N: np.ndarray) -> Made:
    """Every text belongs to two images of one sex, of which both are found, or neither is, if
    one is worse.
    """
    text_of_N = np.arange(COUNT) // 4 * 2 + np.arange(COUNT) % 2
    gallery = Gallery.from_texts(
        [s.key for s in SAMPLES], [str(text) for text in text_of_N], {}, SOURCE
    )
    image_rank_N = np.where(worse_N, 9, 1)
    text_rank_M = np.ones(COUNT // 2, np.int64)
    np.maximum.at(text_rank_M, gallery.text_of_N.numpy(), image_rank_N)
    ranks = (image_rank_N, text_rank_M)
    results = dataclasses.replace(
        results_of("image_text_retrieval", [], ks=[1, 5]),
        rows=rank_rows(gallery, ranks, (1, 5), 0, 0),
    )
    return of_results(RetrievalResult.from_ranks(gallery, ranks, results, SOURCE))


def by_class(worse_N: np.ndarray) -> Made:
    """Of the five nearest images all have the class, or none."""
    asked = [Query(sample.key, sample.patient, subgroups_of(sample)) for sample in SAMPLES]
    precision_Q1 = np.where(worse_N, 0.0, 1.0)[:, None]
    queries = Queries("", {5: precision_Q1}, np.ones((COUNT, 1)), asked)
    results = results_of(
        "image_retrieval", [precision_metrics(5, precision_Q1, ["Edema"], "")], ks=[5]
    )
    results = dataclasses.replace(results, details={"chance": {"Edema": 1.0}})
    return of_results(ClassRetrievalResult(results, ("Edema",), (queries,)))


def matching(worse_N: np.ndarray) -> Made:
    scores_N3 = np.stack(
        [np.where(worse_N, -1.0, 1.0), np.zeros(COUNT), np.full(COUNT, np.nan)], axis=1
    )
    results = results_of("image_text_matching", matching_groups(scores_N3, decides=False))
    items = Items(np.arange(COUNT), (), np.zeros((COUNT, 3), np.int64))
    return of_results(
        MatchingResult(
            results=results, samples=SAMPLES, positions=(), items=items, scores_N3=scores_N3
        )
    )


def vqa(worse_N: np.ndarray) -> Made:
    """Two questions for each image, of which the closed one is always answered."""
    samples = [
        dataclasses.replace(sample, extra={"questions": [
            {"id": f"{row}o", "question": "what?", "answer": "edema", "answer_type": "open",
            "split": "test"}, {"id": f"{row}c", "question": "is it?", "answer": "yes",
            "answer_type": "closed", "split": "test"},
        ]}) for row, sample in enumerate(SAMPLES)
    ]  # fmt: skip
    train = Question(id="t", question="is it?", answer="yes", answer_type="closed", split="train")
    samples.append(
        dataclasses.replace(
            SAMPLES[0], key="t", patient="t", extra={"questions": [train.as_json()]}
        )
    )
    answers = {
        f"{row}o": Prediction("no" if worse else "edema") for row, worse in enumerate(worse_N)
    }
    answers |= {f"{row}c": Prediction("yes") for row in range(COUNT)}
    return of_results(evaluate_answers(VQAData.from_samples(samples), answers, resamples=0))


def reports(worse_N: np.ndarray) -> Made:
    rows = [
        GeneratedReport(
            key=sample.key, patient=sample.patient, reference=f"There is edema, case {row}.",
            generated="Nothing" if worse_N[row] else f"There is edema, case {row}.",
            subgroups=subgroups_of(sample), labels={"Edema": 1},
        )
        for row, sample in enumerate(SAMPLES)
    ]  # fmt: skip
    return of_results(evaluate_reports(rows, resamples=0))


def segmentation(worse_N: np.ndarray) -> Made:
    """The left half is annotated; found by all, but with the right half for the worse."""
    truth_HW = np.arange(8)[None].repeat(8, 0) < 4
    maps = [np.full((8, 8), 0.9) if worse else np.where(truth_HW, 0.9, 0.1) for worse in worse_N]
    areas = [mask_areas(one, truth_HW, THRESHOLDS) for one in maps]
    auroc_N = np.array([pixel_auroc(one, truth_HW) for one in maps])
    images = tuple(
        SegmentedImage(
            position=row,
            sample=sample,
            areas=(areas[row],),
            pixel_auroc_L=auroc_N[row, None],
            map_LHW=None,
        )
        for row, sample in enumerate(SAMPLES)
    )
    at_half = stack(areas).at(THRESHOLDS.index(0.5))
    groups = segmentation_groups({"Edema": at_half}, auroc_N[:, None], "one_if_both_empty")
    results = results_of("segmentation", groups, labels=["Edema"], empty="one_if_both_empty")
    thresholds = {"Edema": MaskThreshold(threshold=0.5, min_share=0.0)}
    dice_N1 = np.where(worse_N, 2 / 3, 1.0)[:, None]
    return of_results(
        SegmentationResult(
            results=results,
            labels=("Edema",),
            images=images,
            thresholds=thresholds,
            dice_NL=dice_N1,
        )
    )


def detection(worse_N: np.ndarray, convention: APConvention = AP_CONVENTIONS["coco"]) -> Made:
    """Every image has a box, found with the same score by all but the worse, whose detection is
    elsewhere.
    """
    box_14 = np.array([[10.0, 10.1, 20.3, 20.2]])
    found = [ImageDetections(box_14 + 50 * worse, np.array([0.5]), box_14) for worse in worse_N]
    images = tuple(
        DetectedImage(position=COUNT - row, sample=sample, detections=(found[row],))
        for row, sample in enumerate(SAMPLES)
    )[::-1]  # the order of the data is not that of the keys
    thresholds = {"Edema": 0.3}
    groups = detection_groups(
        [image.detections for image in images], ["Edema"], convention, thresholds
    )
    settings = {"name": "coco", **dataclasses.asdict(convention)}
    results = results_of("detection", groups, labels=["Edema"], convention=settings)
    results = dataclasses.replace(results, details={"thresholds": thresholds})
    return of_results(
        DetectionResult(results=results, labels=("Edema",), images=images, thresholds=thresholds)
    )


def change(worse_N: np.ndarray) -> Made:
    truth_N1 = (np.arange(COUNT) // 4 % 3)[:, None]
    scores_N1C = np.eye(3)[np.where(worse_N[:, None], (truth_N1 + 1) % 3, truth_N1)]
    results = results_of("change", [change_metrics(scores_N1C, truth_N1, ["Edema"])])
    return of_results(
        ChangeResult(
            results=results, findings=("Edema",), samples=SAMPLES, positions=(),
            scores_NLC=scores_N1C, truth_NL=truth_N1,
        )
    )  # fmt: skip


def hidden(worse_N: np.ndarray) -> Made:
    found = tuple(HiddenWord(row, 0, 4, "left", "side") for row in range(COUNT))
    right_N2 = np.where(worse_N, 0.0, 1.0)[:, None].repeat(2, 1)
    columns = {"accuracy@1": right_N2[:, 0], "nll": 1 - right_N2[:, 0]}
    groups = [
        label_mean_metrics(name, column_N, ["side"] * COUNT) for name, column_N in columns.items()
    ]
    return of_results(
        MaskedPredictionResult(
            results=results_of("masked_prediction", groups), sentences=Sentences(("",) * COUNT,
            SAMPLES, found), words=found, filled=("",) * COUNT, right_NK=right_N2,
            nll_N=1 - right_N2[:, 0],
        )
    )  # fmt: skip


CASES: dict[str, tuple[Callable[[np.ndarray], Made], str, float, float]] = {
    "grounding": (grounding, "cnr/overall", -0.5, -0.25),
    "image_text_retrieval": (retrieval, "recall@1/image_to_text", -0.5, -0.25),
    "texts": (retrieval, "recall@1/text_to_image", -1.0, -0.5),
    "image_retrieval": (by_class, "precision@5/Edema", -0.5, -0.25),
    "image_text_matching": (matching, "above_other/all", -0.5, -0.25),
    "vqa": (vqa, "accuracy/open", -0.5, -0.25),
    "gain": (vqa, "gain_over_question_only/overall", -0.25, -0.125),
    "report_generation": (reports, "recall/Edema", -0.5, -0.25),
    "segmentation": (segmentation, "dice/Edema", -1 / 6, -1 / 12),
    "pooled": (segmentation, "iou_pooled/Edema", 2 / 3 - 1, 0.8 - 1),
    "detection": (detection, "challenge_score/Edema", -0.5, -0.25),
    "change": (change, "accuracy/Edema", -0.5, -0.25),
    "masked_prediction": (hidden, "accuracy@1/overall", -0.5, -0.25),
}
"""Task -> evaluation by the images that go wrong, a row, and its true differences: of women, and
of all.
"""


def compared(make: Callable[[np.ndarray], Made], folder: Path) -> Comparison:
    """Return the comparison of a model that is right everywhere with one that is worse on half
    of the women.
    """
    for name, worse_N in (("first", np.zeros_like(WORSE_N)), ("second", WORSE_N)):
        write_results(make(worse_N)[0], folder / name, make(worse_N)[1])
    ((_, runs),) = find_runs([folder / "first", folder / "second"]).items()
    return compare(runs, resamples=100)


@pytest.mark.parametrize("task", CASES)
def test_the_subgroup_that_became_worse_is_found(task: str, tmp_path: Path) -> None:
    make, name, of_women, of_all = CASES[task]
    comparison = compared(make, tmp_path)
    (differences,) = comparison.differences
    women, men, everyone = (
        differences[f"{name}{ending}"] for ending in (" (sex: F)", " (sex: M)", "")
    )
    assert women.value == pytest.approx(of_women)
    assert women.high < 0
    assert everyone.value == pytest.approx(of_all)
    assert (men.low, men.value, men.high) == (0, 0, 0)
    for number, value in enumerate((0, of_women)):
        row = comparison.value(number, f"{name} (sex: F)")
        assert row is not None
        assert row.low <= row.value <= row.high
        assert row.value - (comparison.value(0, f"{name} (sex: F)") or row).value == pytest.approx(
            value
        )
    attributes = {other.partition(" (")[2].partition(":")[0] for other in differences}
    assert {"sex", "view", "projection", "age"} <= attributes


def probe(worse_N: np.ndarray) -> Made:
    labels_N1 = np.array([[float(sample.labels["Edema"])] for sample in SAMPLES])
    scores_N1 = np.where(worse_N[:, None], 1 - labels_N1, labels_N1)
    images = ScoredImages(
        names=("Edema",),
        scores_NL=scores_N1,
        labels_NL=labels_N1,
        samples=SAMPLES,
        positions=(),
        counts={},
    )
    config = {
        "fractions": [0.1, 1.0],
        "bootstrap_unit": "patient",
        "resamples": 5,
        "seed": 0,
        "smallest_subgroup": 3,
    }
    group = ranking_metrics("auroc", scores_N1, labels_N1, ["Edema"], means=images.means)
    named = MetricGroup(
        [dataclasses.replace(row, metric="auroc@100%") for row in group.rows], group.statistic
    )
    results = evaluate_scores(
        images,
        [named],
        thresholds=None,
        protocol=("linear_probe", 1),
        config=config,
        inputs={"manifest": "m"},
    )
    return of_results(
        ProbeResult(results=results, images=images, thresholds=None, fractions=(0.1, 1.0))
    )


def test_probes_are_compared_by_subgroup(tmp_path: Path) -> None:
    (differences,) = compared(probe, tmp_path).differences
    labels_N = np.array([sample.labels["Edema"] for sample in SAMPLES])
    scores_N = np.where(WORSE_N, 1 - labels_N, labels_N)
    for ending, chosen_N in (("", SEX_N != ""), ("F", SEX_N == "F"), ("M", SEX_N == "M")):
        name = f"auroc/Edema (sex: {ending})" if ending else "auroc@100%/macro"
        expected = roc_auc_score(labels_N[chosen_N], scores_N[chosen_N]) - 1
        assert differences[name].value == pytest.approx(expected)


def test_text_overlap_of_a_subgroup_is_that_of_its_reports(tmp_path: Path) -> None:
    """Corpus BLEU counts over the women's reports; the rarity of CIDEr's n-grams stays that of
    all references.
    """
    comparison = compared(reports, tmp_path)
    rows = [
        GeneratedReport(key=line["key"], patient=line["patient"], reference=line["reference"],
                        generated=line["generated"])
        for line in reports(WORSE_N)[1] if line["subgroups"]["sex"] == "F"
    ]  # fmt: skip
    alone = evaluate_reports(rows, resamples=0).results
    stops = (
        "corpus_bleu_1_with_stops",
        "corpus_bleu_4_with_stops",
        "mean_rouge_l_beta_1.2_with_stops",
    )
    for metric in (
        "corpus_bleu_1",
        "corpus_bleu_4",
        "mean_rouge_l",
        "mean_meteor_exact_stem",
        *stops,
    ):
        assert comparison.differences[0][f"{metric}/report"].value < 0
        row = comparison.value(1, f"{metric}/report (sex: F)")
        assert row is not None
        assert row.value == pytest.approx(alone.row(metric, "report").value)
        assert row.n == len(rows)


def test_every_task_has_the_page_and_the_table_of_subgroups(tmp_path: Path) -> None:
    comparison = compared(vqa, tmp_path)
    page = read(write_comparison([comparison], tmp_path / "page")[1])
    contents = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    own = {"#differences-by-subgroup", "#accuracy-in-subgroups", "#accuracy-baselines-and-variants"}
    assert own <= set(contents)
    lines = [
        line
        for line in format_comparison(comparison).splitlines()
        if line.startswith("accuracy/open (sex: F)")
    ]
    assert any("-0.500" in line for line in lines)
    ((_, runs),) = find_runs([tmp_path / "second"]).items()
    assert "accuracy/overall (age: 40-59)" in compare(runs, resamples=10).rows, (
        "one run has a table as well"
    )


def test_small_subgroups_and_predictions_of_earlier_versions_are_left_out(tmp_path: Path) -> None:
    results, lines = matching(WORSE_N)
    old = [{name: value for name, value in line.items() if name != "patient"} for line in lines]
    few = [
        line | {"subgroups": {"site": "a" if number < 9 else "b"}}
        for number, line in enumerate(lines)
    ]
    for name, chosen in (("old", old), ("few", few)):
        write_results(results, tmp_path / name, chosen)
    assert read_items(tmp_path / "old", results) is None
    items = read_items(tmp_path / "few", results)
    assert items is not None
    assert [name for name in items.rows if "site" in name] == ["above_other/all (site: b)"], (
        "9 items are too few"
    )
    ((_, runs),) = find_runs([tmp_path / "old", tmp_path / "few"]).items()
    assert "earlier version" in compare(runs).notes[0]
