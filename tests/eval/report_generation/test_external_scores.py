"""Files of CheXbert, RadGraph and CXR-Report-Metric, and reports of other systems."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.errors import raises

from medvl.cli import main as cli
from medvl.errors import EvaluationError
from medvl.eval import GeneratedReport, evaluate_reports, read_results
from medvl.eval.core.metric_rows import MetricGroup, measure
from medvl.eval.report_generation.external import (
    chexbert_metrics,
    radcliq_v1,
    radgraph_scores,
    read_radgraph,
    read_scores,
)
from medvl.eval.report_generation.protocol import ONE_REPORT, OTHER_IMAGES, Reference, read_reports
from medvl.schema import FINDINGS

GENERATED = ["There is edema.", "No edema.", "Cardiomegaly."]
REFERENCES = ["There is edema and cardiomegaly.", "Edema.", "Clear lungs."]
TEXTS = list(zip(GENERATED, REFERENCES, strict=True))


def write_chexbert(path: Path, texts: list[str], labels: list[dict[str, object]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["Report Impression", *reversed(FINDINGS)])
        writer.writeheader()
        for text, row in zip(texts, labels, strict=True):
            writer.writerow(
                {"Report Impression": text, **{name: row.get(name, "") for name in FINDINGS}}
            )
    return path


def values(groups: MetricGroup | list[MetricGroup]) -> dict[str, float]:
    groups = groups if isinstance(groups, list) else [groups]
    return {row.name: row.value for row in measure(groups, 3, resamples=0)}


def test_chexbert_labels_give_clinical_f1(tmp_path: Path) -> None:
    ours = write_chexbert(
        tmp_path / "g.csv",
        GENERATED,
        [{"Edema": "1.0"}, {"Edema": "0.0"}, {"Cardiomegaly": "-1.0"}],
    )
    theirs = write_chexbert(
        tmp_path / "r.csv",
        REFERENCES,
        [{"Edema": "1.0", "Cardiomegaly": "1.0"}, {"Edema": "1.0"}, {"No Finding": "1.0"}],
    )
    found = values(chexbert_metrics(ours, theirs, TEXTS))
    assert found["f1/Edema (CheXbert)"] == pytest.approx(2 / 3)
    assert found["precision/micro of five (CheXbert)"] == 1
    assert found["recall/micro of five (CheXbert)"] == pytest.approx(1 / 3)
    uncertain = values(chexbert_metrics(ours, theirs, TEXTS, "positive"))
    assert uncertain["precision/micro of five (CheXbert)"] == pytest.approx(1 / 2)
    with raises(EvaluationError, "mismatch", "chexbert", names="row 1"):
        chexbert_metrics(theirs, ours, TEXTS)
    with raises(EvaluationError, "mismatch", "chexbert"):
        chexbert_metrics(ours, theirs, TEXTS[:2])
    (tmp_path / "bad.csv").write_text("Report Impression,Edema\nx,1\n")
    with raises(EvaluationError, "missing", "chexbert"):
        chexbert_metrics(tmp_path / "bad.csv", theirs, TEXTS)
    with raises(EvaluationError, "not_found", "chexbert"):
        chexbert_metrics(tmp_path / "none.csv", theirs, TEXTS)


def annotation(*entities: tuple[str, str, list[list[str]]]) -> dict[str, Any]:
    return {"text": "", "entities": {
        str(number): {"tokens": tokens, "label": label, "start_ix": 0, "end_ix": 0,
        "relations": relations} for number, (tokens, label, relations) in enumerate(entities, 1)
    }}  # fmt: skip


def test_radgraph_f1_at_three_levels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the reward levels of the package radgraph 0.1.18: one side has a relation that the
    other lacks.
    """
    small = ("small", "OBS-DP", [["modify", "2"]])
    ours = [
        annotation(small, ("effusion", "OBS-DP", [["located_at", "3"]]), ("left", "ANAT-DP", [])),
        annotation(),
        annotation(),
    ]
    theirs = [
        annotation(small, ("effusion", "OBS-DP", []), ("right", "ANAT-DP", [])),
        annotation(),
        annotation((*small[:2], [])),
    ]
    files = [tmp_path / "g.json", tmp_path / "r.json"]
    for path, side in zip(files, (ours, theirs), strict=True):
        path.write_text(json.dumps({str(number): report for number, report in enumerate(side)}))
    found = radgraph_scores(*(read_radgraph(path, 3) for path in files))
    assert {name: score_N.tolist() for name, score_N in found.items()} == {
        "radgraph_f1_simple": pytest.approx([2 / 3, 0, 0]),  # small, effusion of three and three
        "radgraph_f1_partial": pytest.approx([1 / 3, 0, 0]),  # small with a relation
        "radgraph_f1_complete": pytest.approx([1 / 3, 0, 0]),  # small modifies effusion
    }
    command_with_radgraph(tmp_path, files, capsys)
    with raises(EvaluationError, "mismatch", "radgraph"):
        read_radgraph(files[0], 4)
    for content in (
        "[]",
        "{",
        '{"0": {}}',
        '{"0": {"entities": {"1": {"tokens": "a", "label": "b", "relations": [["m", "9"]]}}}}',
    ):
        files[0].write_text(content)
        with raises(EvaluationError, "malformed", "radgraph"):
            read_radgraph(files[0], 1)


def command_with_radgraph(
    folder: Path, files: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Check the floors of RadGraph's scores, and that `medvl compare` pairs the scores by report."""
    lines = [
        {"key": str(row), "generated": ours, "reference": theirs}
        for row, (ours, theirs) in enumerate(TEXTS)
    ]
    path = folder / "reports.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    cli.main(["eval", "report-generation", "--predictions", str(path), "--resamples", "5",
              "--radgraph", *map(str, files), "--out", str(folder / "scores")])  # fmt: skip
    results = read_results(folder / "scores")
    assert results.row("mean_radgraph_f1_simple", "report").value == pytest.approx(2 / 9)
    # The third reference, "small", is one of the three entities of the first image's report.
    other = results.row("mean_radgraph_f1_simple", "report", OTHER_IMAGES)
    assert other.value == pytest.approx(2 * 1 / (1 + 3) / 3)
    one = results.row("mean_radgraph_f1_simple", "report", ONE_REPORT)
    assert 1 / 3 <= one.value <= 1
    with (folder / "scores" / "predictions.jsonl").open() as file:
        scores = [json.loads(line)["scores"]["radgraph_f1_simple"] for line in file]
    assert scores == pytest.approx([2 / 3, 0, 0])
    shutil.copytree(folder / "scores", folder / "again")
    cli.main(["compare", str(folder / "scores"), str(folder / "again"), "--all",
              "--out", str(folder / "compared")])  # fmt: skip
    assert "mean radgraph f1 simple" in " ".join(capsys.readouterr().out.split())


def test_scores_by_report_are_averaged(tmp_path: Path) -> None:
    path = tmp_path / "report_scores.csv"
    path.write_text(
        "study_id,report,bertscore,radgraph_combined\n0,a,0.5,0.2\n1,b,0.7,0.4\n2,c,0.6,0.3\n"
    )
    found = {name: score_N.tolist() for name, score_N in read_scores(path, 3).items()}
    assert found == {"bertscore": [0.5, 0.7, 0.6], "radgraph_combined": [0.2, 0.4, 0.3]}
    with raises(EvaluationError, "mismatch", "scores"):
        read_scores(path, 2)
    path.write_text("study_id,bertscore\n0,x\n")
    with raises(EvaluationError, "malformed", "bertscore"):
        read_scores(path, 1)
    path.write_text("study_id\n0\n")
    with raises(EvaluationError, "missing", "scores"):
        read_scores(path, 1)


def test_scores_of_radeval_are_its_lists(tmp_path: Path) -> None:
    path = tmp_path / "radeval.json"
    path.write_text('{"bleu": 0.3, "radcliq_v1": [1.5, NaN, 0.5], "green": [1, 0, 1]}')
    found = read_scores(path, 3)
    assert list(found) == ["radcliq_v1", "green"]
    assert found["green"].tolist() == [1, 0, 1]
    assert np.isnan(found["radcliq_v1"]).tolist() == [False, True, False]
    with raises(EvaluationError, "mismatch", "scores"):
        read_scores(path, 2)
    for content, code in (("[]", "malformed"), ('{"bleu": 0.3}', "missing"), ("{", "malformed")):
        path.write_text(content)
        with raises(EvaluationError, code, "scores"):
            read_scores(path, 3)


def radcliq(radgraph: float, bertscore: float, chexbert: float, bleu2: float) -> float:
    parts = {"radgraph_N": radgraph, "bertscore_N": bertscore, "chexbert_N": chexbert}
    (value,) = radcliq_v1(**{name: [part] for name, part in parts.items()}, bleu2_N=[bleu2])
    return float(value)


def test_radcliq_v1_is_the_published_regression() -> None:
    assert radcliq(0, 0, 0, 0) == pytest.approx(2.4501, abs=1e-4)
    assert radcliq(1, 1, 1, 1) == pytest.approx(-1.4407, abs=1e-4)
    slopes = [radcliq(*(float(i == part) for i in range(4))) - radcliq(0, 0, 0, 0)
              for part in range(4)]  # fmt: skip
    assert slopes == pytest.approx([-1.24522, -1.65085, -0.99477, 0], abs=1e-5)
    with raises(EvaluationError, "mismatch"):
        radcliq_v1(radgraph_N=[0.1], bertscore_N=[0.1], chexbert_N=[0.1], bleu2_N=[0.1, 0.2])


@pytest.mark.real
def test_radcliq_v1_equals_the_public_code_on_real_reports(real_data: Path, tmp_path: Path) -> None:
    """The 590 scores that CXR-Report-Metric wrote for MoERad's reports, from their parts."""
    path = real_data / "generated_reports_iu" / "moerad" / "report_scores.csv"
    published = read_scores(path, 590)["RadCliQ-v1"]
    with path.open(newline="") as file:
        rows = [{k: v for k, v in row.items() if k != "RadCliQ-v1"} for row in csv.DictReader(file)]
    with (tmp_path / "parts.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    np.testing.assert_allclose(
        read_scores(tmp_path / "parts.csv", 590)["RadCliQ-v1"], published, atol=1e-6
    )


def test_the_command_scores_reports_of_another_system(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"key": str(row), "generated": ours, "reference": theirs}
        for row, (ours, theirs) in enumerate(TEXTS)
    ]
    path = tmp_path / "reports.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    labels: list[dict[str, object]] = [{"Edema": 1}, {}, {}]
    files = [str(write_chexbert(tmp_path / f"{side}.csv", texts, labels))
             for side, texts in (("g", GENERATED), ("r", REFERENCES))]  # fmt: skip
    cli.main(["eval", "report-generation", "--predictions", str(path), "--out",
        str(tmp_path / "out"), "--resamples", "5", "--all",
              "--chexbert", *files])  # fmt: skip
    printed = capsys.readouterr().out
    assert "mean cider d" in printed
    assert "CheXbert" in printed
    results = read_results(tmp_path / "out")
    assert results.row("f1", "Edema", "CheXbert").value == 1
    assert set(results.inputs) == {"predictions", "chexbert_generated", "chexbert_references"}
    again = read_reports(tmp_path / "out" / "predictions.jsonl")
    assert [(report.generated, report.reference) for report in again] == TEXTS
    plain = evaluate_reports([GeneratedReport(key=str(n), patient=str(n), generated=g, reference=r)
                              for n, (g, r) in enumerate(TEXTS)], resamples=0)  # fmt: skip
    assert (
        plain.results.row("mean_cider_d", "report").value
        == results.row("mean_cider_d", "report").value
    )


def test_runs_of_the_command_with_different_conventions_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [("Edema.", "Probable edema."), ("No edema.", "No edema."), ("Effusion.", "Effusion.")]
    lines = [
        {"key": str(row), "generated": ours, "reference": theirs}
        for row, (ours, theirs) in enumerate(texts)
    ]
    (tmp_path / "reports.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = [
        "eval",
        "report-generation",
        "--predictions",
        str(tmp_path / "reports.jsonl"),
        "--resamples",
        "5",
    ]
    cli.main([*command, "--out", str(tmp_path / "default")])
    cli.main([*command, "--out", str(tmp_path / "indexed"), "--conventions", "indexed"])
    f1 = [read_results(tmp_path / name).row("f1", "Edema").value for name in ("default", "indexed")]
    assert f1 == [0, 1]
    capsys.readouterr()
    folders = [str(tmp_path / name) for name in ("default", "indexed")]
    cli.main(["compare", *folders, "--out", str(tmp_path / "compared")])
    assert "conventions: chexpert (default), indexed (indexed)" in " ".join(
        capsys.readouterr().out.split()
    )
    with pytest.raises(SystemExit):
        cli.main([*command, "--out", str(tmp_path / "no"), "--conventions", "people"])
    assert "indexed" in capsys.readouterr().err


def test_separators_of_unicode_within_a_report_end_no_line(tmp_path: Path) -> None:
    path = tmp_path / "reports.jsonl"
    lines = [
        {"key": key, "generated": "No edema.\u2028Clear.\x85", "reference": "Clear."}
        for key in "ab"
    ]
    path.write_text(
        "\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8"
    )
    assert [(report.key, report.generated) for report in read_reports(path)] == [
        ("a", lines[0]["generated"]), ("b", lines[1]["generated"])
    ]  # fmt: skip


def test_malformed_files_of_reports_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "reports.jsonl"
    for line, code in (
        ('{"key": "a"}', "malformed"),
        ('{"key": "a", "generated": 3, "reference": "x"}', "wrong_type"),
    ):
        path.write_text(line)
        with raises(EvaluationError, code):
            read_reports(path)
    path.write_text('{"key": "a", "generated": "x"}\n{"key": "a", "generated": "x"}\n')
    references = {"a": Reference("p", "Edema."), "b": Reference("p", "Clear.")}
    with raises(EvaluationError, "conflict", "key"):
        read_reports(path, references)
    path.write_text('{"key": "c", "generated": "x"}\n')
    with raises(EvaluationError, "malformed"):
        read_reports(path, references)
    path.write_text('{"key": "a", "generated": "Edema"}\n')
    reports = read_reports(path, references)
    assert [(report.key, report.generated) for report in reports] == [("a", "Edema"), ("b", "")]
