"""Calibration of zero-shot scores: the fit against a reference, files, and the command."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.eval_fakes import FakeLoader, FakeModel, make_source, text_vector
from helpers.label_shards import make_shards
from sklearn.linear_model import LogisticRegression

import medvl
from medvl.cli import main as cli
from medvl.data import train_wordpiece
from medvl.errors import EvaluationError
from medvl.eval.zero_shot_classification import calibration as fit
from medvl.eval.zero_shot_classification.prompts import ClassPrompts, load_prompts

PROMPTS = load_prompts("chexpert_pairs")


@pytest.mark.parametrize("shift", [0.0, 40.0])
def test_fit_is_the_likeliest_logistic_function_of_platts_targets(shift: float) -> None:
    rng = np.random.default_rng(0)
    positive_N = rng.random(300) < 0.2
    logit_N = rng.normal(size=300) + 1.5 * positive_N + shift
    target_N = np.where(
        positive_N, (positive_N.sum() + 1) / (positive_N.sum() + 2), 1 / ((~positive_N).sum() + 2)
    )
    reference = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(
        np.tile(logit_N, 2)[:, None],
        np.repeat([1, 0], 300),
        sample_weight=np.concatenate([target_N, 1 - target_N]),
    )
    slope, intercept = fit.fit_platt(logit_N, positive_N)
    assert slope == pytest.approx(reference.coef_[0, 0], rel=1e-4)
    assert intercept == pytest.approx(reference.intercept_[0], rel=1e-4)


def test_fit_is_finite_where_classes_do_not_overlap() -> None:
    slope, intercept = fit.fit_platt(
        np.concatenate([np.full(20, -3.0), np.full(20, 3.0)]), np.arange(40) >= 20
    )
    assert 0 < 1 / (1 + np.exp(-(slope * 3 + intercept))) < 1
    assert 1 / (1 + np.exp(-(slope * 3 + intercept))) == pytest.approx(21 / 22, abs=1e-6)


def labelled(count: int = 400) -> tuple[FakeModel, FakeLoader]:
    """Return a model and images whose score of Edema has little to do with the label's
    frequency.
    """
    rng = np.random.default_rng(1)
    source = make_source(
        np.stack([rng.random(count) < 0.1, rng.random(count) < 0.5], axis=1), ["Edema", "Fracture"]
    )
    sides = PROMPTS.classes["Edema"]
    away = text_vector(sides.positive[0]) - text_vector(sides.negative[0])
    for number, sample in enumerate(source.samples):
        toward = 60 * away * (1 if sample.labels["Edema"] else -1)
        source.images[number] = np.clip(128 + 20 * rng.normal(size=16) + toward, 0, 255).astype(
            np.uint8
        )[None]
    return FakeModel(), FakeLoader(source)


def test_calibration_lowers_the_error_on_patients_it_was_not_fitted_on(tmp_path: Path) -> None:
    model, loader = labelled()
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    result = fit.calibrate(model, loader, PROMPTS, checkpoint=tmp_path)
    edema = result.findings["Edema"]
    assert (edema.images, edema.positives) == (
        400,
        sum(sample.labels["Edema"] for sample in loader.source.samples),
    )
    assert edema.ece_after < edema.ece_before
    assert edema.brier_after < edema.brier_before
    low, high = edema.probability(0.4), edema.probability(0.6)
    assert 0 < low < high < 1
    path = fit.write_calibration(result, tmp_path / "a" / "b.json")
    assert fit.read_calibration(path) == result
    assert "Edema" in fit.calibration_table(result)


def test_images_of_one_patient_are_left_out(tmp_path: Path) -> None:
    model, loader = labelled()
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    loader.source.samples = [
        dataclasses.replace(sample, patient="one") for sample in loader.source.samples
    ]
    with raises(EvaluationError, "empty", names="two patients"):
        fit.calibrate(model, loader, PROMPTS.select(["Edema"]), checkpoint=tmp_path)


def test_findings_without_enough_images_or_reversed_are_left_out(tmp_path: Path) -> None:
    model, loader = labelled(60)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    for sample in loader.source.samples:
        sample.labels["Edema"] = 0
    with raises(EvaluationError, "empty"):
        fit.calibrate(model, loader, PROMPTS.select(["Edema"]), checkpoint=tmp_path)
    model, loader = labelled()
    for sample in loader.source.samples:
        sample.labels["Edema"] = 1 - sample.labels["Edema"]
        sample.labels["Fracture"] = 1 - sample.labels["Edema"]
    findings, left_out = fit._fit_all(
        fit.score_images(model, loader, PROMPTS.select(["Edema"]), fit.LabelPolicy())
    )
    assert not findings
    assert "likelier" in left_out["Edema"]


def uninformative() -> tuple[FakeModel, FakeLoader]:
    """Return a model and images whose scores have nothing to do with the label, but for a slope
    above 0 by chance.
    """
    rng = np.random.default_rng(1)
    source = make_source((rng.random((36, 1)) < 0.5).astype(float), ["Edema"])
    source.images = [rng.integers(100, 156, image.shape, dtype=np.uint8) for image in source.images]
    return FakeModel(), FakeLoader(source)


def test_a_calibration_that_is_worse_is_not_used(tmp_path: Path) -> None:
    model, loader = uninformative()
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    result = fit.calibrate(model, loader, PROMPTS.select(["Edema"]), checkpoint=tmp_path)
    assert not result.findings
    assert "Brier score on patients outside of the fit" in result.left_out["Edema"]
    path = fit.write_calibration(result, tmp_path / "c.json")
    assert fit.read_calibration(path) == result
    assert "Edema: uncalibrated, its Brier score" in fit.calibration_table(result)
    assert "no finding could be calibrated" in fit.describe_calibration(result)


def test_a_worse_fit_in_the_file_of_an_earlier_version_is_not_used(tmp_path: Path) -> None:
    fitted = fit.FindingCalibration(slope=1.0, intercept=0.0, images=30, positives=10,
        brier_before=0.249,
                                    brier_after=0.293, ece_before=0.1, ece_after=0.2)  # fmt: skip
    better = dataclasses.replace(fitted, brier_after=0.2)
    whole = fit.Calibration(prompts="p", prompts_sha256="0", checkpoint_sha256="1",
        data={"corpus": "c", "split": "s"},
                            findings={"Edema": fitted, "Fracture": better},
                            left_out={})  # fmt: skip
    read = fit.read_calibration(fit.write_calibration(whole, tmp_path / "c.json"))
    assert list(read.findings) == ["Fracture"]
    assert "from 0.249 to 0.293" in read.left_out["Edema"]
    assert "Edema: its Brier score" in fit.describe_calibration(read)


def test_texts_have_the_calibration_of_the_finding_whose_sentences_they_are_scored_with() -> None:
    fitted = fit.FindingCalibration(slope=1.0, intercept=0.0, images=30, positives=10,
        brier_before=0.3,
                                    brier_after=0.2, ece_before=0.2, ece_after=0.1)  # fmt: skip
    whole = fit.Calibration(prompts="p", prompts_sha256="0", checkpoint_sha256="1", data={},
        left_out={},
                            findings={"Edema": fitted})  # fmt: skip
    sentences = {
        "edema": PROMPTS.classes["Edema"],
        "a mass": ClassPrompts(("There is a mass.",), ("No mass.",)),
    }
    assert whole.of_texts(PROMPTS, sentences) == {"edema": fitted}
    competing = load_prompts("chexpert_classes")
    assert whole.of_texts(competing, {"Edema": competing.classes["Edema"]}) == {}
    assert whole.of_texts(competing, competing.classes) == {"Edema": fitted}


def test_labels_that_the_prompts_do_not_list_are_calibrated(tmp_path: Path) -> None:
    model, loader = labelled()
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    others = ClassPrompts(positive=("There is {}.",), negative=("There is no {}.",))
    one = dataclasses.replace(PROMPTS.select(["Edema"]), other_classes=others)
    result = fit.calibrate(model, loader, one, checkpoint=tmp_path)
    assert {*result.findings, *result.left_out} == {"Edema", "Fracture"}


def test_only_probabilities_are_calibrated(tmp_path: Path) -> None:
    model, loader = labelled(60)
    with raises(EvaluationError, "unsupported", "prompts"):
        fit.calibrate(model, loader, load_prompts("gloria_published"), checkpoint=tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[]",
        '{"calibration_version": 1, "findings": {"a": {}}}',
        '{"calibration_version": 1, "findings": {}}',
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "c.json").write_text(content)
    with raises(EvaluationError, "malformed", names="c.json"):
        fit.read_calibration(tmp_path / "c.json")


def test_other_versions_and_missing_files_are_refused(tmp_path: Path) -> None:
    with raises(EvaluationError, "not_found"):
        fit.read_calibration(tmp_path / "c.json")
    (tmp_path / "c.json").write_text('{"calibration_version": 9}')
    with raises(EvaluationError, "version"):
        fit.read_calibration(tmp_path / "c.json")


def test_command_writes_beside_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = train_wordpiece(PROMPTS.texts(), vocab_size=150)
    sizes = {
        "image_encoder": "resnet_tiny",
        "text_encoder": "tiny_bert",
        "image_size": 32,
        "frozen_text_layers": 0,
    }
    best = tmp_path / "run" / "best"
    best.mkdir(parents=True)
    torch.manual_seed(1)  # weights under which bright images score higher
    medvl.models.save(medvl.create_model("convirt", tokenizer=tokenizer, **sizes), best)
    shards = make_shards(tmp_path / "data")
    arguments = [
        "eval",
        "calibrate",
        "--checkpoint",
        str(best),
        "--data",
        str(shards / "train"),
        "--prompts",
        "chexpert_pairs",
    ]
    cli.main([*arguments, "--workers", "0", "--device", "cpu"])
    assert fit.read_calibration(tmp_path / "run/best/eval/calibration/chexpert_pairs.json").findings
    assert "Edema" in capsys.readouterr().out
