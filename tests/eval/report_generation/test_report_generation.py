"""Scores of generated reports against other libraries and naive formulas; the command."""

import dataclasses
import json
import math
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from helpers.errors import raises
from helpers.fusion_samples import shaken, tiny_model, tiny_tokenizer
from helpers.html_pages import check_resources, read
from nltk.translate.bleu_score import corpus_bleu
from sklearn.metrics import precision_recall_fscore_support

from medvl.cli import main as cli
from medvl.data.loading.loader import open_loader
from medvl.data.loading.sources import FileSource
from medvl.data.reports.labeler import CONVENTIONS, label_report
from medvl.data.transforms.text import WholeText
from medvl.errors import ConfigError, EvaluationError
from medvl.eval import (
    GeneratedReport,
    ReportEval,
    evaluate_reports,
    generate_reports,
    read_results,
    write_report_page,
)
from medvl.eval.core.metric_rows import measure
from medvl.eval.core.metrics import bootstrap_indices
from medvl.eval.core.results import PageHeader, Results
from medvl.eval.report_generation import generate
from medvl.eval.report_generation.generate import mbr_select
from medvl.eval.report_generation.metrics import (
    CONTENTS,
    Cider,
    common_subsequence,
    overlap_metrics,
    positive_findings,
    report_scores,
    words,
    words_and_stops,
)
from medvl.eval.report_generation.protocol import OTHER_IMAGES
from medvl.models.checkpoint import save
from medvl.models.fusion_encoders.medvill import MedViLL
from medvl.models.text_decoding import Decoding
from medvl.phantom import World, compose_report
from medvl.schema import FINDINGS, Sample


def phantom_texts(seed: int, patients: int) -> list[str]:
    reports = [
        compose_report(study)
        for patient in World(seed).patients(patients)
        for study in patient.studies
    ]
    return [
        f"{report.findings} {report.impression}".strip() for report in reports if report.impression
    ]


def generated_reports(
    generated: list[str], references: list[str], patients: list[str] | None = None
) -> list[GeneratedReport]:
    return [
        GeneratedReport(
            key=str(n),
            patient=patients[n] if patients else str(n),
            reference=reference,
            generated=text,
        )
        for n, (text, reference) in enumerate(zip(generated, references, strict=True))
    ]


@pytest.fixture(scope="module")
def pairs() -> list[GeneratedReport]:
    """Reports of one world paired with references of another; some are empty; two studies per
    patient.
    """
    references, generated = phantom_texts(1, 40), phantom_texts(2, 60)[: len(phantom_texts(1, 40))]
    generated[3], generated[8] = "", "  .  "
    generated[5] = references[5]
    return generated_reports(generated, references, [str(n // 2) for n in range(len(references))])


@pytest.fixture(scope="module")
def plain(pairs: list[GeneratedReport]) -> Results:
    """Results of these reports without intervals."""
    return evaluate_reports(pairs, resamples=0).results


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A 3.2 cm nodule.", ["a", "3", ".", "2", "cm", "nodule"]),
        ("a 3. 2 cm nodule .", ["a", "3", ".", "2", "cm", "nodule"]),
        ("a 32 cm nodule", ["a", "32", "cm", "nodule"]),
        ("Re\u0301sume\u0301", ["r\u00e9sum\u00e9"]),
        ("Right-sided PICC; new since ___.", ["right", "sided", "picc", "new", "since"]),
        ("", []),
    ],
)
def test_words_are_normalized(text: str, expected: list[str]) -> None:
    assert words(text) == expected


@pytest.mark.real
def test_metrics_with_stops_count_full_stops_as_published(real_data: Path) -> None:
    """COCO's code on these reports, split at spaces, as their authors score them: stops as words
    are all of the gap.
    """
    for name, published in (
        ("aamn", (0.4664, 0.3041, 0.2120, 0.1551)),
        ("hi_ia", (0.4079, 0.2717, 0.1999, 0.1525)),
    ):
        folder = real_data / "generated_reports_iu" / name
        references, generated = (
            (folder / f"{part}.csv").read_text().splitlines() for part in ("gts", "res")
        )
        rows = measure(overlap_metrics(generated, references), len(references), resamples=0)
        values = {row.metric: row.value for row in rows}
        with_stops = [values[f"corpus_bleu_{order}_with_stops"] for order in range(1, 5)]
        assert with_stops == pytest.approx(published, abs=1e-3)
        assert values["corpus_bleu_1"] < published[0] - 0.03
        assert values["mean_rouge_l_beta_1.2"] < values["mean_rouge_l_beta_1.2_with_stops"] - 0.03


def test_words_and_stops_of_a_text() -> None:
    text = "Heart: normal. 3.2 cm nodule... No effusion . . ok"
    assert " ".join(words_and_stops(text)) == "heart normal . 3 . 2 cm nodule . no effusion . ok"
    assert [word for word in words_and_stops("no mass.\n___ 12. a") if word != "."] == words(
        "no mass.\n___ 12. a"
    )
    generated, references = (
        ["No effusion. Normal heart.", "Clear."],
        ["no effusion . Normal heart .", "clear ."],
    )
    results = evaluate_reports(generated_reports(generated, references), resamples=0).results
    for order in range(1, 3):
        assert results.row(f"corpus_bleu_{order}_with_stops", "report").value == pytest.approx(1)


def test_bleu_equals_nltk_corpus_bleu(pairs: list[GeneratedReport], plain: Results) -> None:
    references = [[words(report.reference)] for report in pairs]
    generated = [words(report.generated) for report in pairs]
    for order in range(1, 5):
        row = plain.row(f"corpus_bleu_{order}", "report")
        assert row.value == pytest.approx(
            corpus_bleu(references, generated, [1 / order] * order), abs=2e-4
        )
        assert row.n == len(pairs)
        assert math.isnan(row.low)


def findings_of(results: Results) -> set[str]:
    """Return the findings whose F1 is defined."""
    return {
        row.target
        for row in results.rows
        if row.metric == "f1" and not row.subgroup and not np.isnan(row.value)
    }


def test_intervals_equal_those_of_explicit_resamples(pairs: list[GeneratedReport]) -> None:
    single = [dataclasses.replace(report, patient=report.key) for report in pairs[:20]]
    results = evaluate_reports(single, resamples=12, seed=3).results
    values: dict[str, list[float]] = {
        "corpus_bleu_2": [],
        "mean_rouge_l": [],
        "micro": [],
        "macro": [],
    }
    for drawn in bootstrap_indices(20, 12, 3):
        resampled = evaluate_reports([single[index] for index in drawn], resamples=0).results
        for name in ("corpus_bleu_2", "mean_rouge_l"):
            values[name].append(resampled.row(name, "report").value)
        values["micro"].append(resampled.row("f1", "micro").value)
        if findings_of(resampled) == findings_of(
            results
        ):  # the macro is over the same findings in every resample
            values["macro"].append(resampled.row("f1", "macro").value)
    assert len(values["macro"]) < 12
    for name, drawn_values in values.items():
        row = (
            results.row("f1", name)
            if name[0] == "m" and "_" not in name
            else results.row(name, "report")
        )
        assert (row.low, row.high) == pytest.approx(
            tuple(np.quantile(drawn_values, (0.025, 0.975)))
        )
        assert row.low < row.value < row.high


def test_common_subsequence_equals_a_naive_search() -> None:
    rng = random.Random(0)

    def naive(a: str, b: str) -> int:
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
        assert common_subsequence(a, b) == naive(a, b)


def test_scores_of_one_report_match_their_formulas() -> None:
    texts = words("no left effusion"), words("there is no effusion")
    rouge, weighted, meteor, *_ = report_scores(*texts, Cider([texts[1]]))
    assert rouge == pytest.approx(2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4))
    assert weighted == pytest.approx((1 + 1.44) * (2 / 3) * (2 / 4) / (2 / 4 + 1.44 * 2 / 3))
    assert meteor == pytest.approx(
        10 * (2 / 3) * (2 / 4) / (2 / 4 + 9 * 2 / 3) * (1 - 0.5 * (2 / 2) ** 3)
    )
    assert report_scores(["effusion"], ["effusions"], Cider([["effusions"]]))[2] == pytest.approx(
        0.5
    )  # a stem match, one chunk of one word
    assert report_scores([], ["effusion"], Cider([["effusion"]])) == (0.0,) * 5


def test_clinical_f1_equals_scikit_learn(pairs: list[GeneratedReport], plain: Results) -> None:
    reference_NL, generated_NL = (
        positive_findings([label_report(getattr(report, side)) for report in pairs], "negative")
        for side in ("reference", "generated")
    )
    kept = (reference_NL | generated_NL).any(axis=0)
    by_label = precision_recall_fscore_support(reference_NL, generated_NL, zero_division=0)
    for average in ("micro", "macro"):
        columns = kept if average == "macro" else np.ones_like(kept)
        expected = precision_recall_fscore_support(
            reference_NL[:, columns], generated_NL[:, columns], average=average, zero_division=0
        )
        values = [plain.row(metric, average).value for metric in ("precision", "recall", "f1")]
        assert values == pytest.approx(list(expected[:3]))
        five = [
            FINDINGS.index(name)
            for name in (
                "Atelectasis",
                "Cardiomegaly",
                "Consolidation",
                "Edema",
                "Pleural Effusion",
            )
        ]
        expected = precision_recall_fscore_support(
            reference_NL[:, five], generated_NL[:, five], average=average, zero_division=0
        )
        values = [
            plain.row(metric, f"{average} of five").value
            for metric in ("precision", "recall", "f1")
        ]
        assert values == pytest.approx(list(expected[:3]))
    for column, finding in enumerate(FINDINGS):
        row = plain.row("recall", finding)
        assert row.n_positive == int(reference_NL[:, column].sum())
        assert (
            math.isnan(row.value)
            if not kept[column]
            else row.value == pytest.approx(by_label[1][column])
        )


def test_uncertain_findings_follow_the_option() -> None:
    reports = generated_reports(
        ["Possible pneumonia.", "Pneumonia."],
        ["Pneumonia in the left lung.", "Possible pneumonia."],
    )
    assert evaluate_reports(reports, resamples=0).results.row("f1", "Pneumonia").value == 0
    assert (
        evaluate_reports(reports, resamples=0, uncertain="positive")
        .results.row("f1", "Pneumonia")
        .value
        == 1
    )


def test_findings_follow_the_conventions(tmp_path: Path) -> None:
    reports = generated_reports(["Probable edema.", "No edema."], ["Edema.", "No edema."])
    found = {name: evaluate_reports(reports, resamples=0, conventions=name) for name in CONVENTIONS}
    assert {name: each.results.row("f1", "Edema").value for name, each in found.items()} == {
        "chexpert": 0, "doubtful": 0, "indexed": 1}  # fmt: skip
    for name, each in found.items():
        assert each.results.config["conventions"] == name
        (line, _) = each.predictions()
        assert line[
            "reference_findings" if line["reference"] == "Probable edema." else "generated_findings"
        ] == {"Edema": 1 if name == "indexed" else -1}
        page = write_report_page(each, tmp_path / f"{name}.html", PageHeader(model="m", data="d"))
        agreeing = 2 if name == "indexed" else 1
        assert f"Findings agree with the reference: {agreeing} of 2" in read(page).text
    assert evaluate_reports(reports, resamples=0).results.config == found["chexpert"].results.config
    with raises(
        EvaluationError, "unknown_name", "conventions", names="chexpert, doubtful, indexed"
    ):
        evaluate_reports(reports, conventions="radiologists")


def test_perfect_and_empty_reports_have_the_extreme_scores() -> None:
    references = phantom_texts(4, 20)
    perfect = evaluate_reports(generated_reports(references, references), resamples=20).results
    empty = evaluate_reports(
        generated_reports([""] * len(references), references), resamples=20
    ).results
    for row in perfect.rows:
        if not row.subgroup and not math.isnan(row.value) and row.metric not in CONTENTS:
            best = 10 if "cider" in row.metric else 1
            assert row.value == pytest.approx(best, abs=0.01 * best), (
                row.name
            )  # METEOR has a small penalty for one chunk
            assert empty.row(row.metric, row.target).value == 0
            assert empty.row(row.metric, row.target).n == len(references)
    assert empty.details["empty"] == len(references)
    assert empty.details["distinct"] == 1
    assert perfect.row("equal_sides", "report").value == 1
    assert perfect.row("opposite_sides", "report").value == 0
    assert perfect.row("f1", "micro", OTHER_IMAGES).value < 0.8


def test_constant_reports_score_the_same_as_the_other_images_baseline(
    pairs: list[GeneratedReport],
) -> None:
    same = [dataclasses.replace(report, generated="The lungs are clear.") for report in pairs]
    results = evaluate_reports(same, resamples=0).results
    for row in results.rows:
        if not row.subgroup:
            np.testing.assert_equal(
                results.row(row.metric, row.target, OTHER_IMAGES).value, row.value
            )


@pytest.mark.parametrize(
    ("patients", "expected"),
    [
        ("abcd", [2, 3, 0, 1]),
        ("aaab", [3, 3, 3, 1]),  # half of the images further is the same patient
        ("abb", [1, 0, 0]),
        ("ab", [1, 0]),
        ("aaa", None),
        ("a", None),
    ],
)
def test_the_other_image_is_of_another_patient(patients: str, expected: list[int] | None) -> None:
    references = ["Edema.", "Pneumonia.", "Fracture.", "Normal."][: len(patients)]
    reports = [
        dataclasses.replace(report, patient=patient)
        for report, patient in zip(generated_reports(references, references), patients, strict=True)
    ]
    results = evaluate_reports(reports, resamples=0).results
    rows = [row for row in results.rows if row.subgroup == OTHER_IMAGES]
    assert bool(rows) == (expected is not None)
    if expected is not None:
        others = [references[at] for at in expected]
        moved = [
            dataclasses.replace(report, generated=text)
            for report, text in zip(reports, others, strict=True)
        ]
        same = evaluate_reports(moved, resamples=0).results
        for row in rows:
            np.testing.assert_equal(row.value, same.row(row.metric, row.target).value)


def test_mbr_select_returns_the_text_with_most_agreement() -> None:
    effusion, edema = "There is a left pleural effusion.", "There is pulmonary edema."
    normal = "No acute cardiopulmonary abnormality."
    assert mbr_select([normal, effusion, "Small right pleural effusion.", edema]) == 1
    assert mbr_select([normal, f"{effusion} {edema}", effusion, edema]) == 1
    assert mbr_select([edema]) == 0
    uncertain = "Possible left pleural effusion."
    assert mbr_select([uncertain, edema, effusion, effusion]) == 2
    assert mbr_select([edema, uncertain, effusion], uncertain="positive") == 1
    likely = "Probable left pleural effusion."
    assert [mbr_select([edema, likely, effusion], conventions=name) for name in CONVENTIONS] == [
        0,
        0,
        1,
    ]
    with pytest.raises(ValueError, match="texts"):
        mbr_select([])


def test_one_of_several_samples_is_selected_per_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_generator()
    loader = loader_of(model, samples(tmp_path, ["Clear lungs.", "Cardiomegaly.", "No change."]))
    candidates: list[list[str]] = []

    def last(texts: list[str], *, conventions: str) -> int:
        assert conventions == "indexed"
        candidates.append(texts)
        return len(texts) - 1

    monkeypatch.setattr(generate, "mbr_select", last)
    decodings = {"consensus": Decoding(samples=4, max_tokens=6)}
    reports = generate.generate_by_decoding(model, loader, decodings, conventions="indexed")[
        "consensus"
    ]
    assert [len(texts) for texts in candidates] == [4, 4, 4]
    assert sorted(report.generated for report in reports) == sorted(
        texts[3] for texts in candidates
    )


def test_missing_reports_and_references_are_refused() -> None:
    with raises(EvaluationError, "empty"):
        evaluate_reports([])
    with raises(EvaluationError, "empty", names="first that of 1"):
        evaluate_reports(generated_reports(["a", "b"], ["one", "___"]))


def tiny_generator() -> MedViLL:
    model = tiny_model(
        "medvill", tiny_tokenizer(), attention="seq2seq", objective="report", max_tokens=12
    )
    assert isinstance(model, MedViLL)
    return shaken(model)


def samples(folder: Path, texts: list[str]) -> list[Sample]:
    import cv2

    created = []
    for number, text in enumerate(texts):
        rng = np.random.default_rng(number)
        cv2.imwrite(
            str(folder / f"{number}.png"),
            cv2.resize(rng.integers(0, 256, (4, 4), np.uint8), (80, 70)),
        )
        created.append(
            Sample(
                key=f"k{number}", corpus="c", split="test", patient=f"p{number // 2}",
                study=f"s{number}", image=folder / f"{number}.png",
                sections={"indication": "Pneumonia?"} | ({"findings": text} if text else {}),
            )
        )  # fmt: skip
    return created


def loader_of(model: MedViLL, created: list[Sample], **settings: object):
    return open_loader(
        FileSource(created, ()), batch=2, image=model.transform, text=WholeText(),
        tokenizer=model.tokenizer, train=False, **settings,
    )  # fmt: skip


LONG = " ".join(["There is a small left effusion."] * 40)


def test_references_are_complete_and_do_not_affect_generation(tmp_path: Path) -> None:
    """References are longer than the model's maximum and have words outside of its vocabulary."""
    model = tiny_generator()
    texts = [LONG, "Zygomatic xylophones.", "", "No pneumothorax.", "The heart is enlarged."]
    reports = generate_reports(model, loader_of(model, samples(tmp_path, texts)))
    assert [report.reference for report in reports] == [text for text in texts if text]
    assert [report.key for report in reports] == ["k0", "k1", "k3", "k4"]
    others = generate_reports(
        model, loader_of(model, samples(tmp_path, ["Edema.", LONG, "x", "No.", "Clear lungs."]))
    )
    generated = {report.key: report.generated for report in others}
    assert {report.key: report.generated for report in reports} == {
        key: generated[key] for key in ("k0", "k1", "k3", "k4")
    }
    assert len(set(generated.values())) > 1
    assert model.training


def test_unreadable_image_gets_an_empty_report(tmp_path: Path) -> None:
    model = tiny_generator()
    created = samples(tmp_path, ["Edema.", "No edema.", "Edema.", "Edema."])
    (tmp_path / "1.png").write_bytes(b"no image")
    reports = generate_reports(model, loader_of(model, created, max_skipped=2))
    assert len(reports) == 4
    assert reports[1].generated == ""
    assert reports[0].generated != ""


def test_report_eval_returns_scores_during_training(tmp_path: Path) -> None:
    model = tiny_generator()
    scores = ReportEval(
        loader_of(model, samples(tmp_path, ["Edema.", "No edema."])), decoding=Decoding(beams=2)
    )(model)
    assert set(scores) == {
        "report/corpus_bleu_4",
        "report/mean_rouge_l",
        "report/f1_micro",
        "report/f1_macro",
    }
    assert model.training


def test_report_generation_command_writes_reproducible_files(
    mimic_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shards, run = tmp_path / "shards", tmp_path / "run" / "best"
    cli.main(
        ["shards", "mimic-cxr", "--root", str(mimic_root), "--out", str(shards), "--workers", "1"]
    )
    run.mkdir(parents=True)
    save(tiny_generator(), run)
    common = [
        "eval",
        "report-generation",
        "--data",
        str(shards / "train"),
        "--workers",
        "0",
        "--resamples",
        "20",
    ]
    capsys.readouterr()
    cli.main([*common, "--checkpoint", str(run), "--beams", "2", "--max-tokens", "6"])
    printed = capsys.readouterr().out
    assert "corpus bleu 4" in printed
    assert "micro of five" in printed
    out = run / "eval" / "report_generation"
    results = read_results(out)
    assert results.protocol == "report_generation"
    assert results.config["decodings"] == {
        "greedy": dataclasses.asdict(Decoding(max_tokens=6)),
        "beam search": dataclasses.asdict(Decoding(beams=2, max_tokens=6)),
    }
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


def test_models_that_cannot_generate_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tiny_model("dual_stream", tiny_tokenizer()), tmp_path)
    with pytest.raises(SystemExit):
        cli.main(
            ["eval", "report-generation", "--checkpoint", str(tmp_path), "--data", str(tmp_path)]
        )
    assert "is a dual_stream" in capsys.readouterr().err
    without = tiny_model("medvill", None)
    with raises(ConfigError, "missing", "tokenizer"):
        generate_reports(without, loader_of(tiny_generator(), samples(tmp_path, ["Edema."])))


def test_page_shows_reports_beside_their_references(tmp_path: Path) -> None:
    long = "Small left pleural effusion. " + "The heart is normal in size. " * 8
    texts = [("Edema.", "Edema."), (long, "Edema."), ("No edema.", "")]
    reports = [
        GeneratedReport(key=f"k{n}", patient=f"p{n}", reference=reference, generated=generated)
        for n, (reference, generated) in enumerate(texts)
    ]
    path = write_report_page(
        evaluate_reports(reports, resamples=5),
        tmp_path / "index.html",
        PageHeader(model="m", data="d"),
    )
    check_resources(path)
    text = read(path).text
    assert "Findings agree with the reference: 1 of 3" in text
    assert "Findings differ from the reference: 2 of 3" in text
    assert long.strip() in text
    for name, findings in (("Missed", "Pleural Effusion"), ("Added", "Edema"), ("Both", "Edema")):
        assert text[text.index(name) + 1] == findings
    assert "(empty)" in text
