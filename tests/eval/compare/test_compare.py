"""Comparison of runs: compatibility checks, paired differences compared with a loop, output
files.
"""

import csv
import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.errors import raises
from helpers.eval_fakes import FakeLoader, FakeModel, make_source
from helpers.html_pages import check_resources, read
from sklearn.metrics import roc_auc_score

from medvl.cli import main as cli
from medvl.errors import EvaluationError
from medvl.eval import zero_shot
from medvl.eval.compare.compare import Comparison, Run, compare, find_runs, short_names
from medvl.eval.compare.items import read_items
from medvl.eval.compare.page import format_comparison, write_comparison
from medvl.eval.core.metric_rows import MetricRow, measure
from medvl.eval.core.metrics import resample_counts
from medvl.eval.core.results import Results, read_results, write_results
from medvl.eval.grounding.protocol import label_mean_metrics
from medvl.eval.retrieval.image_text import image_text_retrieval
from medvl.eval.zero_shot_classification.protocol import ZeroShotResult

NAMES = ("Edema", "Fracture")


def evaluated(seed: int, patients: int | None = None) -> ZeroShotResult:
    """Return a zero-shot evaluation of 40 random images."""
    rng = np.random.default_rng(0)
    source = make_source((rng.random((40, 2)) < 0.5).astype(float), NAMES, patients=patients)
    pixels = np.random.default_rng(seed)
    source.images = [
        pixels.integers(0, 256, image.shape, dtype=np.uint8) for image in source.images
    ]
    return zero_shot(FakeModel(), FakeLoader(source), resamples=20, smallest_subgroup=3)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of two training runs with a zero-shot evaluation of 16 patients each."""
    folder = tmp_path_factory.mktemp("runs")
    for number, name in enumerate(("first", "second")):
        result = evaluated(number, patients=16)
        write_results(result.results, folder / name / "eval" / "zero_shot", result.predictions())
    return folder


def compared(*folders: Path, **settings: Any) -> Comparison:
    ((_, runs),) = find_runs(folders).items()
    return compare(runs, **settings)


def test_paired_difference_matches_loop(home: Path) -> None:
    comparison = compared(home / "first", home / "second", resamples=60, seed=3)
    row = comparison.differences[0]["auroc/Edema"]
    first, second = evaluated(0, patients=16).images, evaluated(1, patients=16).images
    order = np.argsort([sample.key for sample in first.samples])
    labels_N = first.labels_NL[order, 0]
    scores = [
        images.scores_NL[order, list(images.names).index("Edema")] for images in (first, second)
    ]
    values = []
    for counts_NR in resample_counts(40, 60, 3, [first.samples[n].patient for n in order]):
        for counts_N in counts_NR.T:
            drawn = np.repeat(np.arange(40), counts_N.astype(int))
            both = [roc_auc_score(labels_N[drawn], score[drawn]) for score in scores]
            values.append(both[1] - both[0])
    assert row.value == pytest.approx(
        roc_auc_score(labels_N, scores[1]) - roc_auc_score(labels_N, scores[0])
    )
    assert (row.low, row.high) == pytest.approx(tuple(np.quantile(values, [0.025, 0.975])))
    assert {"auroc/macro", "average_precision/macro"} <= set(comparison.differences[0])
    assert comparison.notes == ()


def test_subgroups_are_paired(home: Path) -> None:
    comparison = compared(home / "first", home / "second", resamples=20)
    names = [name for name in comparison.rows if name.startswith("auroc/macro (sex: ")]
    assert names
    for name in names:
        first, second = (comparison.value(number, name) for number in range(2))
        assert first is not None
        assert second is not None
        row = comparison.differences[0][name]
        assert row.value == pytest.approx(second.value - first.value)
        assert row.low <= row.value <= row.high
    assert [name.startswith("auroc/macro") for name in comparison.rows[:1]] == [True], (
        "means come first"
    )


def test_predictions_without_subgroups_are_paired_over_all_images(
    home: Path, tmp_path: Path
) -> None:
    for name in ("first", "second"):
        shutil.copytree(home / name, tmp_path / name)
        path = tmp_path / name / "eval" / "zero_shot" / "predictions.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        kept = [{key: value for key, value in line.items() if key != "subgroups"} for line in lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in kept))
    (differences,) = compared(tmp_path / "first", tmp_path / "second", resamples=5).differences
    assert "auroc/macro" in differences
    assert not [name for name in differences if "sex" in name]


def test_separators_of_unicode_within_a_prediction_end_no_line(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "first", tmp_path / "first")
    path = tmp_path / "first" / "eval" / "zero_shot" / "predictions.jsonl"
    lines = [{**json.loads(line), "note": "a\u2028b\x85"} for line in path.read_text().splitlines()]
    path.write_text(
        "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8"
    )
    (differences,) = compared(home / "first", tmp_path / "first", resamples=5).differences
    assert differences["auroc/macro"].value == 0


def test_page_has_summary_differences_curves_and_subgroups(home: Path, tmp_path: Path) -> None:
    comparison = compared(home / "first", home / "second", resamples=20)
    path = write_comparison([comparison], tmp_path)[1]
    check_resources(path)
    reader = read(path)
    contents = [attributes["href"] for tag, attributes in reader.tags if tag == "a"][:6]
    assert contents == [
        *("#summary-zero-shot", "#differences-by-class", "#differences-by-subgroup", "#roc-curves"),
        *("#auroc", "#auroc-in-subgroups"),
    ]
    assert [text for text in reader.text if text in (*NAMES, "all")][:3] == ["all", *NAMES], (
        "the filter"
    )
    alternatives = [attributes["alt"] for tag, attributes in reader.tags if tag == "img"]
    assert len(alternatives) == 2 + len(NAMES)
    row = comparison.value(1, "auroc/Edema")
    assert row is not None
    assert any(
        text.startswith("ROC curves of the runs for Edema") and f"second {row.value:.3f}" in text
        for text in alternatives
    )
    with (tmp_path / "index_files" / "auroc.csv").open(newline="") as file:
        lines = {line["name"]: line for line in csv.DictReader(file)}
    assert list(lines) == ["Mean over classes", *NAMES]
    difference = comparison.differences[0]["auroc/Edema"]
    assert float(lines["Edema"]["second minus first low"]) == pytest.approx(
        difference.low, abs=1e-5
    )
    assert (tmp_path / "index_files" / "differences-zero-shot-by-class.pdf").is_file()


def test_paired_interval_excludes_zero_where_separate_intervals_overlap(tmp_path: Path) -> None:
    """One run is better by 0.01 on every phrase, and the variation between phrases is much
    larger.
    """
    rng = np.random.default_rng(0)
    hard = rng.random(60)
    for name, better in (("a", 0.0), ("b", 0.01)):
        write_grounding(tmp_path / name, hard + better)
    row = compared(tmp_path / "a", tmp_path / "b").differences[0]["cnr/overall"]
    assert (row.low, row.value, row.high) == pytest.approx((0.01, 0.01, 0.01))
    assert (
        read_results(tmp_path / "a").row("cnr", "overall").high
        > read_results(tmp_path / "b").row("cnr", "overall").low
    )


def write_grounding(
    folder: Path, cnr_N: np.ndarray, *, named: bool = True, **settings: Any
) -> Results:
    lines = [
        {"key": f"k{number // 2}", "phrase": number % 2, "label": "Edema", "cnr": float(value)}
        | ({"patient": f"p{number % 20}"} if named else {})
        for number, value in enumerate(cnr_N)
    ]
    block = label_mean_metrics("cnr", cnr_N, ["Edema"] * len(cnr_N))
    fields: dict[str, Any] = {
        "protocol": "grounding",
        "protocol_version": 1,
        "rows": measure([block], len(cnr_N), resamples=50),
        "config": {"maps": "similarity", "resamples": 50},
        "inputs": {"checkpoint": folder.name, "manifest": "f" * 64},
        "packages": {},
    }
    results = Results(**{**fields, **settings})
    write_results(results, folder, lines)
    return results


def test_compare_rejects_other_inputs_without_force(tmp_path: Path) -> None:
    write_grounding(tmp_path / "a", np.ones(4))
    write_grounding(tmp_path / "b", np.ones(4), inputs={"checkpoint": "b", "manifest": "0" * 64})
    with raises(EvaluationError, "mismatch", "runs", names="manifest"):
        compared(tmp_path / "a", tmp_path / "b")
    assert (
        "b and a differ in manifest" in compared(tmp_path / "a", tmp_path / "b", force=True).notes
    )
    write_grounding(tmp_path / "c", np.ones(4), protocol_version=2)
    with raises(EvaluationError, "mismatch", "runs", names="version 2"):
        compared(tmp_path / "a", tmp_path / "c")


def test_compare_notes_differing_settings(tmp_path: Path) -> None:
    write_grounding(tmp_path / "a", np.ones(4))
    write_grounding(tmp_path / "b", np.ones(4), config={"maps": "attention", "resamples": 7})
    assert compared(tmp_path / "a", tmp_path / "b").notes == (
        "maps: similarity (a), attention (b)",
    )


def test_compare_notes_unpaired_items_and_missing_patients(tmp_path: Path) -> None:
    write_grounding(tmp_path / "a", np.arange(4.0))
    write_grounding(tmp_path / "b", np.arange(6.0))
    comparison = compared(tmp_path / "a", tmp_path / "b")
    assert comparison.differences == ({},)
    assert comparison.notes == (
        "b is not paired with a: their predictions are for different items",
    )
    (tmp_path / "b" / "predictions.jsonl").unlink()
    assert "has no predictions" in compared(tmp_path / "a", tmp_path / "b").notes[0]
    for name in ("c", "d"):
        write_grounding(tmp_path / name, np.arange(4.0), named=False)
    assert "predictions without patients" in compared(tmp_path / "c", tmp_path / "d").notes[0]


def test_read_items_rejects_predictions_of_other_results(tmp_path: Path) -> None:
    results = write_grounding(tmp_path / "a", np.ones(4))
    other = write_grounding(tmp_path / "b", np.zeros(4))
    path = tmp_path / "a" / "predictions.jsonl"
    path.write_text((tmp_path / "b" / "predictions.jsonl").read_text())
    with raises(EvaluationError, "mismatch", names="cnr/overall"):
        read_items(tmp_path / "a", results)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, lines[0]]))
    with raises(EvaluationError, "malformed", names="predictions.jsonl"):
        read_items(tmp_path / "a", other)
    path.write_text('{"key": 1}\n')
    with raises(EvaluationError, "malformed", names="none with phrase"):
        read_items(tmp_path / "a", results)
    assert read_items(tmp_path / "a", dataclasses.replace(results, protocol="another")) is None


def test_read_items_gives_the_metrics_of_both_directions(tmp_path: Path) -> None:
    source = make_source(np.zeros((12, 1)), ["Edema"], patients=2)
    loader = FakeLoader(source, texts=[f"text {number // 2}" for number in range(12)])
    result = image_text_retrieval(FakeModel(), loader, resamples=20)
    write_results(result.results, tmp_path, result.predictions())
    items = read_items(tmp_path, result.results)
    assert items is not None
    assert (items.unit, set(items.groups or ())) == ("patient", {"p0", "p1"})
    of_p1_N1 = np.array([[float(group == "p1")] for group in items.groups or ()])
    drawn = dict(zip(items.rows, items.statistic(of_p1_N1)[0], strict=True))
    assert np.isnan(drawn["median_rank/text_to_image"]), (
        "each text is drawn with its first image, of the other patient"
    )
    assert drawn["median_rank/image_to_text"] > 0
    metrics = ("recall@1", "recall@5", "recall@10", "median_rank", "mrr")
    whole = [row.name for group in items.without_subgroups for row in group.rows]
    assert whole == [
        f"{name}/{side}" for side in ("image_to_text", "text_to_image") for name in metrics
    ]


def test_retrieval_of_an_earlier_version_is_paired_by_texts_and_says_so(tmp_path: Path) -> None:
    loader = FakeLoader(
        make_source(np.zeros((12, 0)), ()), texts=[f"text {number // 2}" for number in range(12)]
    )
    result = image_text_retrieval(FakeModel(), loader, resamples=20)
    lines = [
        {name: value for name, value in line.items() if name != "patient"}
        for line in result.predictions()
    ]
    earlier = dataclasses.replace(result.results, protocol_version=1)
    for name in ("a", "b"):
        write_results(earlier, tmp_path / name, lines)
    write_results(result.results, tmp_path / "c", result.predictions())
    items = read_items(tmp_path / "a", earlier)
    assert items is not None
    assert (items.unit, len(set(items.groups or ()))) == ("text", 6)
    (runs,) = find_runs([tmp_path / "a", tmp_path / "b"]).values()
    assert any("each text is resampled" in note for note in compare(runs, resamples=5).notes)
    (mixed,) = find_runs([tmp_path / "a", tmp_path / "c"]).values()
    with raises(EvaluationError, "mismatch", "runs"):
        compare(mixed)


# Finding and naming runs


def test_find_runs_accepts_any_folder_of_a_run(home: Path) -> None:
    (home / "first" / "best").mkdir(exist_ok=True)
    places = [home / "first" / "best", home / "second" / "eval" / "zero_shot" / "results.json"]
    runs = find_runs(places)["zero_shot"]
    assert [run.name for run in runs] == ["first", "second"]
    with raises(EvaluationError, "not_found", names="nothing"):
        find_runs([home / "first" / "eval" / "zero_shot" / "nothing"])


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/r/a/eval/x", "/r/b/eval/x"], ["a", "b"]),
        (["/r/a/1/x", "/r/b/2/x"], ["a/1", "b/2"]),
        (["/r/a", "/r/a/b"], ["a", "b"]),
        (["/r/a", "/r/a"], ["1 a", "2 a"]),
        (["/r/a"], ["a"]),
    ],
)
def test_short_names_are_unique(paths: list[str], names: list[str]) -> None:
    shortened = short_names([Path(path) for path in paths])
    assert len(set(shortened)) == len(shortened)
    assert shortened == names


# What is written


def test_comparison_shows_values_differences_and_arrows(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, better in (("a", 0.0), ("b", 0.1), ("c", -0.2)):
        write_grounding(tmp_path / name, rng.random(60) * 0.01 + 0.5 + better)
    comparison = compared(tmp_path / "a", tmp_path / "b", tmp_path / "c", resamples=100)
    text = format_comparison(comparison)
    assert "b difference" in text
    paths = write_comparison([comparison], tmp_path / "out", date="2026-01-01")
    content: list[Mapping[str, Any]] = json.loads(paths[0].read_text())
    row = content[0]["rows"][0]
    assert row["name"] == "cnr/overall"
    assert [value["n"] for value in row["values"]] == [60, 60, 60]
    assert row["differences"][0]["value"] == pytest.approx(0.1, abs=0.01)
    html = paths[1].read_text()
    for word in ("b minus a", "c minus a", "▲ +0.1", "▼ -0.", "2026-01-01", "Edema"):
        assert word in html


def test_comparison_shows_dash_for_missing_rows(tmp_path: Path) -> None:
    write_grounding(tmp_path / "a", np.ones(4))
    extra = MetricRow(metric="miou", target="overall", value=0.5, n=4)
    own = read_results(tmp_path / "a")
    b = Run("b", tmp_path / "a", dataclasses.replace(own, rows=(*own.rows, extra)))
    comparison = compare([Run("a", tmp_path / "a", own), b], resamples=10)
    assert comparison.rows == ("cnr/overall", "cnr/macro", "miou/overall", "cnr/Edema"), (
        "means first"
    )
    assert comparison.as_json()["rows"][2]["values"][0] is None
    assert "–" in write_comparison([comparison], tmp_path / "out")[1].read_text()
    noted = dataclasses.replace(comparison, notes=("maps: attention (a), similarity (b)",))
    assert "maps: attention (a)" in write_comparison([noted], tmp_path / "noted")[1].read_text()


def test_compare_command_prints_table_and_paths(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "report"
    cli.main(
        [
            "compare",
            str(home / "first"),
            str(home / "second"),
            "--out",
            str(out),
            "--resamples",
            "20",
        ]
    )
    printed = capsys.readouterr().out
    before = printed[: printed.index("auroc/Edema ")]
    assert before.count("second difference") == 2, (
        "the means are a table of their own, before that of the classes"
    )
    assert str(out / "index.html") in printed
    assert (out / "comparison.json").is_file()
