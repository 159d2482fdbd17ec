"""Rows beside those of the generated reports: other decodings, labels of the images, and one
report for all.
"""

import csv
import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from helpers.errors import raises
from helpers.fusion_samples import shaken, tiny_model, tiny_tokenizer
from helpers.script_modules import load_script
from sklearn.metrics import f1_score

from medvl.cli import main as cli
from medvl.data.reports.labeler import label_report
from medvl.errors import CorpusError, EvaluationError
from medvl.eval import GeneratedReport, evaluate_reports, read_results
from medvl.eval.report_generation.metrics import positive_findings, words
from medvl.eval.report_generation.protocol import (
    AGAINST_LABELS,
    ONE_REPORT,
    REFERENCE,
    ReportResult,
    constant_report,
)
from medvl.models.checkpoint import save
from medvl.phantom import World, compose_report, read_truth, write_mimic_cxr_jpg
from medvl.schema import COMPETITION_FINDINGS, FINDINGS


@pytest.fixture(scope="module")
def reports() -> list[GeneratedReport]:
    """Impressions with the truth of their images, paired with other impressions."""
    studies = [study for patient in World(1).patients(40) for study in patient.studies]
    composed = [(compose_report(study).impression, study.labels) for study in studies]
    written = [(text, labels) for text, labels in composed if text]
    return [
        GeneratedReport(
            key=str(row),
            patient=str(row // 2),
            reference=text,
            generated=written[row - row % 3][0],
            labels=labels,
        )
        for row, (text, labels) in enumerate(written)
    ]


def test_the_constant_report_has_the_highest_bleu_1_of_all_references(
    reports: list[GeneratedReport],
) -> None:
    references = [report.reference for report in reports]

    def bleu_1(constant: str) -> float:
        pairs = [(Counter(words(constant)), Counter(words(reference))) for reference in references]
        matches = sum((one & other).total() for one, other in pairs) / (
            len(words(constant)) * len(pairs)
        )
        ratio = sum(other.total() for _, other in pairs) / (len(words(constant)) * len(pairs))
        return float(matches * np.exp(min(0, 1 - ratio)))

    chosen = constant_report(references)
    assert bleu_1(chosen) == pytest.approx(max(bleu_1(reference) for reference in references))
    results = evaluate_reports(reports, resamples=0).results
    assert results.row("corpus_bleu_1", "report", ONE_REPORT).value == pytest.approx(bleu_1(chosen))
    same = evaluate_reports(
        [dataclasses.replace(one, generated=chosen) for one in reports], resamples=0
    ).results
    for metric, target in (
        ("corpus_bleu_4", "report"),
        ("mean_rouge_l", "report"),
        ("f1", "micro"),
    ):
        assert results.row(metric, target, ONE_REPORT).value == same.row(metric, target).value


def test_findings_are_also_compared_with_labels_of_the_images(
    reports: list[GeneratedReport],
) -> None:
    """The reports leave out findings of the images, so that a perfect generator has less than 1."""
    results = evaluate_reports(reports, resamples=0).results
    five = [FINDINGS.index(name) for name in COMPETITION_FINDINGS]
    truth_NL = np.array([[report.labels[name] == 1 for name in FINDINGS] for report in reports])
    for subgroup, texts in (
        (AGAINST_LABELS, [report.generated for report in reports]),
        (REFERENCE, [report.reference for report in reports]),
    ):
        read_NL = positive_findings([label_report(text) for text in texts], "negative")
        expected = f1_score(truth_NL[:, five], read_NL[:, five], average="macro", zero_division=0)
        assert results.row("f1", "macro of five", subgroup).value == pytest.approx(expected)
    perfect, generated = (
        results.row("f1", "micro", subgroup).value for subgroup in (REFERENCE, AGAINST_LABELS)
    )
    assert generated < perfect < 1
    unlabeled = [*reports[1:], dataclasses.replace(reports[0], labels=None)]
    assert AGAINST_LABELS not in {
        row.subgroup for row in evaluate_reports(unlabeled, resamples=0).results.rows
    }


def test_other_decodings_have_rows_of_their_own(reports: list[GeneratedReport]) -> None:
    perfect = [dataclasses.replace(report, generated=report.reference) for report in reports]
    result = evaluate_reports(reports, others={"consensus": perfect}, resamples=0)
    row = result.results.row
    assert (
        row("f1", "micro", "consensus").value
        == row("corpus_bleu_4", "report", "consensus").value
        == 1
    )
    assert row("f1", "micro").value < 1
    assert (
        row("f1", "macro", f"consensus, {AGAINST_LABELS}").value
        == row("f1", "macro", REFERENCE).value
    )
    assert result.predictions()[2]["others"] == {"consensus": reports[2].reference}
    with raises(EvaluationError, "mismatch", "others"):
        evaluate_reports(reports, others={"consensus": perfect[1:]}, resamples=0)


def test_the_table_has_the_number_of_distinct_texts(reports: list[GeneratedReport]) -> None:
    constant = [dataclasses.replace(report, generated="The lungs are clear.") for report in reports]
    table = evaluate_reports(constant, others={"beam search": reports}, resamples=0).table()
    distinct = len({tuple(words(report.reference)) for report in reports})
    others = len({tuple(words(report.generated)) for report in reports})
    line = (
        f"distinct texts of {len(reports)}: 1 (generated), {others} (beam search), "
        f"{distinct} (references); the commonest generated text: {len(reports)} times"
    )
    assert table.splitlines()[-1] == line
    assert f"report ({ONE_REPORT})" in table


def test_the_command_evaluates_greedy_beam_and_consensus_against_the_truth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, shards, run = tmp_path / "corpus", tmp_path / "shards", tmp_path / "run" / "best"
    write_mimic_cxr_jpg(corpus, patients=3, seed=3, size=48, split=(0.0, 0.0, 1.0), workers=1)
    cli.main(
        [
            "shards",
            "mimic-cxr",
            "--root",
            str(corpus),
            "--out",
            str(shards),
            "--workers",
            "1",
            "--views",
            "PA",
            "AP",
        ]
    )
    run.mkdir(parents=True)
    save(
        shaken(
            tiny_model(
                "medvill", tiny_tokenizer(), attention="seq2seq", objective="report", max_tokens=12
            )
        ),
        run,
    )
    common = ["eval", "report-generation", "--checkpoint", str(run), "--data", str(shards / "test"),
        "--workers", "0",
              "--resamples", "5", "--max-tokens", "6", "--beams", "2", "--samples",
              "3"]  # fmt: skip
    cli.main([*common, "--phantom-truth", str(corpus)])
    out = run / "eval" / "report_generation"
    results = read_results(out)
    subgroups = {row.subgroup for row in results.rows}
    assert {
        "",
        "beam search",
        "consensus",
        f"consensus, {AGAINST_LABELS}",
        REFERENCE,
        ONE_REPORT,
    } <= subgroups
    assert list(results.config["decodings"]) == ["greedy", "beam search", "consensus"]
    assert results.config["labels"] == "ground truth of the phantom"
    (table,) = (table for table in load_script("results").TABLES if table.name == "reports")
    assert all(
        results.row(*row) for row in table.rows.values()
    )  # scripts/results.py prints a row of each
    truth = {str(row["dicom_id"]): row for row in read_truth(corpus) if row["view"] != "LATERAL"}
    positives = sum(row["labels"]["Cardiomegaly"] for row in truth.values())
    assert results.row("f1", "Cardiomegaly", AGAINST_LABELS).n_positive == positives
    page = (out / "index.html").read_text()
    assert "consensus, against labels" in page
    assert "Distinct texts" in page
    assert "distinct texts of" in capsys.readouterr().out
    other = write_mimic_cxr_jpg(tmp_path / "other", patients=1, seed=4, size=32, workers=1)
    with pytest.raises(SystemExit):
        cli.main([*common, "--phantom-truth", str(other)])
    with raises(CorpusError, "not_found", "root"):
        list(read_truth(tmp_path))


@pytest.mark.real
@pytest.mark.parametrize(("system", "distinct"), [("aamn", 1), ("hi_ia", 2), ("moerad", 23)])
def test_generators_of_iu_reports_are_near_one_report_for_all(
    real_data: Path, system: str, distinct: int
) -> None:
    """Each of these systems repeats a few reports; one reference for all has a higher BLEU-1 than
    any.

    Texts are distinct by their words: two of the last one differ in punctuation only.
    """
    folder = real_data / "generated_reports_iu" / system
    generated = folder / ("preds.csv" if system == "moerad" else "res.csv")

    def texts(path: Path) -> list[str]:
        if system == "moerad":
            with path.open(newline="", encoding="utf-8") as file:
                return [row["report"] for row in csv.DictReader(file)]
        return path.read_text(encoding="utf-8").splitlines()

    pairs = zip(texts(generated), texts(folder / "gts.csv"), strict=True)
    reports = [
        GeneratedReport(key=str(row), patient=str(row), reference=reference, generated=text)
        for row, (text, reference) in enumerate(pairs)
        if words(reference)
    ]
    result: ReportResult = evaluate_reports(reports, resamples=0)
    assert result.results.details["distinct"] == distinct
    floor = result.results.row("corpus_bleu_1", "report", ONE_REPORT).value
    assert floor > 0.45
    assert result.results.row("corpus_bleu_1", "report").value < floor
