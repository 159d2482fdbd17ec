"""Scores of written reports: against other libraries and plain formulas; from a checkpoint to its files."""

import dataclasses
import json
import math
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from helpers.fusion_samples import shaken, tiny_model, tiny_tokenizer
from nltk.translate.bleu_score import corpus_bleu
from sklearn.metrics import precision_recall_fscore_support

from medvl.cli import main as cli
from medvl.data.loading.loader import open_loader
from medvl.data.loading.sources import FileSource
from medvl.data.reports.labeler import label_report
from medvl.data.transforms.text import WholeText
from medvl.errors import ConfigError, EvaluationError
from medvl.eval import ReportEval, WrittenReport, judge_reports, read_results, write_reports
from medvl.eval.core.bootstrap import bootstrap_indices
from medvl.eval.report_generation import generate
from medvl.eval.report_generation.clinical_f1 import asserted
from medvl.eval.report_generation.consensus import mbr_select
from medvl.eval.report_generation.evaluate import OTHERS
from medvl.eval.report_generation.nlg_metrics import common_subsequence, report_scores, words
from medvl.models.checkpoint import save
from medvl.models.fusion_encoders.medvill import MedViLL
from medvl.models.text_decoding import Decoding
from medvl.phantom import World, compose_report
from medvl.schema import FINDINGS, Sample


def phantom_texts(seed: int, patients: int) -> list[str]:
    reports = [compose_report(study) for patient in World(seed).patients(patients) for study in patient.studies]
    return [f"{report.findings} {report.impression}".strip() for report in reports if report.impression]


def written(generated: list[str], references: list[str], patients: list[str] | None = None) -> list[WrittenReport]:
    return [
        WrittenReport(key=str(n), patient=patients[n] if patients else str(n), reference=meant, generated=said)
        for n, (said, meant) in enumerate(zip(generated, references, strict=True))
    ]


@pytest.fixture(scope="module")
def pairs() -> list[WrittenReport]:
    """Reports of one world judged as if they were of another, some of them empty, two studies a patient."""
    references, generated = phantom_texts(1, 40), phantom_texts(2, 60)[: len(phantom_texts(1, 40))]
    generated[3], generated[8] = "", "  .  "
    generated[5] = references[5]
    return written(generated, references, [str(n // 2) for n in range(len(references))])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A 3.2 cm nodule.", ["a", "3", ".", "2", "cm", "nodule"]),
        ("a 3. 2 cm nodule .", ["a", "3", ".", "2", "cm", "nodule"]),
        ("a 32 cm nodule", ["a", "32", "cm", "nodule"]),
        ("Right-sided PICC; new since ___.", ["right", "sided", "picc", "new", "since"]),
        ("", []),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    assert words(text) == expected


def test_bleu_is_the_corpus_level_one(pairs: list[WrittenReport]) -> None:
    results = judge_reports(pairs, resamples=0).results
    references = [[words(report.reference)] for report in pairs]
    said = [words(report.generated) for report in pairs]
    for order in range(1, 5):
        row = results.row(f"corpus_bleu_{order}", "report")
        assert row.value == pytest.approx(corpus_bleu(references, said, [1 / order] * order), abs=2e-4)
        assert row.n == len(pairs)
        assert math.isnan(row.low)


def test_intervals_come_from_counts_of_each_report(pairs: list[WrittenReport]) -> None:
    """The very resamples, each judged as a corpus of its own."""
    single = [dataclasses.replace(report, patient=report.key) for report in pairs[:20]]
    results = judge_reports(single, resamples=12, seed=3).results
    values: dict[str, list[float]] = {"corpus_bleu_2": [], "mean_rouge_l": [], "micro": [], "macro": []}
    for drawn in bootstrap_indices(20, 12, 3):
        again = judge_reports([single[place] for place in drawn], resamples=0).results
        for name in ("corpus_bleu_2", "mean_rouge_l"):
            values[name].append(again.row(name, "report").value)
        for name in ("micro", "macro"):
            values[name].append(again.row("f1", name).value)
    for name, drawn_values in values.items():
        row = results.row("f1", name) if name[0] == "m" and "_" not in name else results.row(name, "report")
        assert (row.low, row.high) == pytest.approx(tuple(np.quantile(drawn_values, (0.025, 0.975))))
        assert row.low < row.value < row.high


def test_the_longest_common_subsequence() -> None:
    rng = random.Random(0)

    def plain(a: str, b: str) -> int:
        @cache
        def longest(i: int, j: int) -> int:
            if i == len(a) or j == len(b):
                return 0
            if a[i] == b[j]:
                return 1 + longest(i + 1, j + 1)
            return max(longest(i + 1, j), longest(i, j + 1))

        return longest(0, 0)

    for _ in range(60):
        a, b = ("".join(rng.choices("abcd", k=rng.randint(0, 14))) for _ in range(2))
        assert common_subsequence(a, b) == plain(a, b)


def test_scores_of_a_report_by_hand() -> None:
    rouge, weighted, meteor = report_scores(words("no left effusion"), words("there is no effusion"))
    assert rouge == pytest.approx(2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4))
    assert weighted == pytest.approx((1 + 1.44) * (2 / 3) * (2 / 4) / (2 / 4 + 1.44 * 2 / 3))
    assert meteor == pytest.approx(10 * (2 / 3) * (2 / 4) / (2 / 4 + 9 * 2 / 3) * (1 - 0.5 * (2 / 2) ** 3))
    assert report_scores(["effusion"], ["effusions"])[2] == pytest.approx(0.5)  # by its stem, one chunk of one word
    assert report_scores([], ["effusion"]) == (0.0, 0.0, 0.0)


def test_findings_against_scikit_learn(pairs: list[WrittenReport]) -> None:
    results = judge_reports(pairs, resamples=0).results
    meant_NL, said_NL = (
        asserted([label_report(getattr(report, side)) for report in pairs], "negative")
        for side in ("reference", "generated")
    )
    kept = (meant_NL | said_NL).any(axis=0)
    by_label = precision_recall_fscore_support(meant_NL, said_NL, zero_division=0)
    for average in ("micro", "macro"):
        columns = kept if average == "macro" else np.ones_like(kept)
        expected = precision_recall_fscore_support(
            meant_NL[:, columns], said_NL[:, columns], average=average, zero_division=0
        )
        found = [results.row(metric, average).value for metric in ("precision", "recall", "f1")]
        assert found == pytest.approx(list(expected[:3]))
        five = [
            FINDINGS.index(name)
            for name in ("Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Pleural Effusion")
        ]
        expected = precision_recall_fscore_support(
            meant_NL[:, five], said_NL[:, five], average=average, zero_division=0
        )
        found = [results.row(metric, f"{average} of five").value for metric in ("precision", "recall", "f1")]
        assert found == pytest.approx(list(expected[:3]))
    for column, finding in enumerate(FINDINGS):
        row = results.row("recall", finding)
        assert row.n_positive == int(meant_NL[:, column].sum())
        assert math.isnan(row.value) if not kept[column] else row.value == pytest.approx(by_label[1][column])


def test_doubt_counts_as_told() -> None:
    reports = written(["Possible pneumonia.", "Pneumonia."], ["Pneumonia in the left lung.", "Possible pneumonia."])
    assert judge_reports(reports, resamples=0).results.row("f1", "Pneumonia").value == 0
    assert judge_reports(reports, resamples=0, doubt="positive").results.row("f1", "Pneumonia").value == 1


def test_the_perfect_and_the_empty_writer() -> None:
    references = phantom_texts(4, 20)
    perfect = judge_reports(written(references, references), resamples=20).results
    empty = judge_reports(written([""] * len(references), references), resamples=20).results
    for row in perfect.rows:
        if not row.subgroup and not math.isnan(row.value):
            assert row.value == pytest.approx(1, abs=0.01), row.name  # METEOR takes a little off for its one chunk
            assert empty.row(row.metric, row.target).value == 0
            assert empty.row(row.metric, row.target).n == len(references)
    assert empty.details["empty"] == len(references)
    assert empty.details["distinct"] == 1
    assert perfect.row("f1", "micro", OTHERS).value < 0.8


def test_what_looks_at_no_image_is_shown_beside(pairs: list[WrittenReport]) -> None:
    """A writer that says the same of everything scores the same beside the wrong images."""
    same = [dataclasses.replace(report, generated="The lungs are clear.") for report in pairs]
    results = judge_reports(same, resamples=0).results
    for row in results.rows:
        if not row.subgroup:
            np.testing.assert_equal(results.row(row.metric, row.target, OTHERS).value, row.value)


def test_who_agrees_most_speaks_for_all() -> None:
    effusion, edema = "There is a left pleural effusion.", "There is pulmonary edema."
    normal = "No acute cardiopulmonary abnormality."
    assert mbr_select([normal, effusion, "Small right pleural effusion.", edema]) == 1
    assert mbr_select([normal, f"{effusion} {edema}", effusion, edema]) == 1
    assert mbr_select([edema]) == 0
    doubted = "Possible left pleural effusion."
    assert mbr_select([doubted, edema, effusion, effusion]) == 2
    assert mbr_select([edema, doubted, effusion], doubt="positive") == 1
    with pytest.raises(ValueError, match="no text"):
        mbr_select([])


def test_of_several_draws_one_is_kept_for_each_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_writer()
    loader = loader_of(model, samples(tmp_path, ["Clear lungs.", "Cardiomegaly.", "No change."]))
    seen: list[list[str]] = []

    def last(texts: list[str]) -> int:
        seen.append(texts)
        return len(texts) - 1

    monkeypatch.setattr(generate, "mbr_select", last)
    reports = generate.write_reports(model, loader, decoding=Decoding(samples=4, max_tokens=6))
    assert [len(texts) for texts in seen] == [4, 4, 4]
    assert sorted(report.generated for report in reports) == sorted(texts[3] for texts in seen)


def test_nothing_to_judge_is_an_error() -> None:
    with pytest.raises(EvaluationError, match="there is no report to judge"):
        judge_reports([])
    with pytest.raises(EvaluationError, match="1 references hold no word, first that of 1"):
        judge_reports(written(["a", "b"], ["one", "___"]))


def tiny_writer() -> MedViLL:
    model = tiny_model("medvill", tiny_tokenizer(), attention="seq2seq", objective="report", max_tokens=12)
    assert isinstance(model, MedViLL)
    return shaken(model)


def samples(folder: Path, texts: list[str]) -> list[Sample]:
    import cv2

    made = []
    for number, text in enumerate(texts):
        rng = np.random.default_rng(number)
        cv2.imwrite(str(folder / f"{number}.png"), cv2.resize(rng.integers(0, 256, (4, 4), np.uint8), (80, 70)))
        made.append(
            Sample(
                key=f"k{number}", corpus="c", split="test", patient=f"p{number // 2}", study=f"s{number}",
                image=folder / f"{number}.png", sections={"findings": text} if text else {},
            )
        )  # fmt: skip
    return made


def loader_of(model: MedViLL, made: list[Sample], **settings: object):
    return open_loader(
        FileSource(made, ()), batch=2, image=model.transform, text=WholeText(), tokenizer=model.tokenizer, train=False,
        **settings,
    )  # fmt: skip


LONG = " ".join(["There is a small left effusion."] * 40)


def test_references_are_whole_and_reach_no_word(tmp_path: Path) -> None:
    """Far longer than what the model can take, in words that its vocabulary lacks; and other references, same reports."""
    model = tiny_writer()
    texts = [LONG, "Zygomatic xylophones.", "", "No pneumothorax.", "The heart is enlarged."]
    reports = write_reports(model, loader_of(model, samples(tmp_path, texts)))
    assert [report.reference for report in reports] == [text for text in texts if text]
    assert [report.key for report in reports] == ["k0", "k1", "k3", "k4"]
    others = write_reports(model, loader_of(model, samples(tmp_path, ["Edema.", LONG, "x", "No.", "Clear lungs."])))
    generated = {report.key: report.generated for report in others}
    assert {report.key: report.generated for report in reports} == {
        key: generated[key] for key in ("k0", "k1", "k3", "k4")
    }
    assert len(set(generated.values())) > 1
    assert model.training


def test_an_image_that_cannot_be_read_has_an_empty_report(tmp_path: Path) -> None:
    model = tiny_writer()
    made = samples(tmp_path, ["Edema.", "No edema.", "Edema.", "Edema."])
    (tmp_path / "1.png").write_bytes(b"no image")
    reports = write_reports(model, loader_of(model, made, max_skipped=2))
    assert len(reports) == 4
    assert reports[1].generated == ""
    assert reports[0].generated != ""


def test_scores_while_training(tmp_path: Path) -> None:
    model = tiny_writer()
    found = ReportEval(loader_of(model, samples(tmp_path, ["Edema.", "No edema."])), decoding=Decoding(beams=2))(model)
    assert set(found) == {"report/corpus_bleu_4", "report/mean_rouge_l", "report/f1_micro", "report/f1_macro"}
    assert model.training


def test_from_a_checkpoint_to_its_files(
    mimic_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shards, run = tmp_path / "shards", tmp_path / "run" / "best"
    cli.main(["shards", "mimic-cxr", "--root", str(mimic_root), "--out", str(shards), "--workers", "1"])
    run.mkdir(parents=True)
    save(tiny_writer(), run)
    common = ["eval", "report-generation", "--data", str(shards / "train"), "--workers", "0", "--resamples", "20"]
    capsys.readouterr()
    cli.main([*common, "--checkpoint", str(run), "--beams", "2", "--max-tokens", "6"])
    printed = capsys.readouterr().out
    assert "corpus bleu 4" in printed
    assert "micro of five" in printed
    out = run.parent / "eval" / "report_generation"
    results = read_results(out)
    assert results.protocol == "report_generation"
    assert results.config["decoding"] == dataclasses.asdict(Decoding(beams=2, max_tokens=6))
    assert set(results.inputs) == {"checkpoint", "manifest"}
    assert results.details["reports"] == 3
    assert results.details["without_reference"] == 0
    lines = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    assert all(len(words(line["generated"])) <= 6 for line in lines)
    assert {line["reference_findings"].get("Pleural Effusion") for line in lines} == {1, None}
    first = (out / "results.json").read_bytes()
    cli.main([*common, "--checkpoint", str(run), "--beams", "2", "--max-tokens", "6"])
    assert (out / "results.json").read_bytes() == first


def test_who_writes_nothing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tiny_model("dual_stream", tiny_tokenizer()), tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["eval", "report-generation", "--checkpoint", str(tmp_path), "--data", str(tmp_path)])
    assert "is a dual_stream" in capsys.readouterr().err
    without = tiny_model("medvill", None)
    with pytest.raises(ConfigError, match="a model without a tokenizer writes no text"):
        write_reports(without, loader_of(tiny_writer(), samples(tmp_path, ["Edema."])))
