"""Lists and predictions of ReXrank: reading, writing, and scores by study."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.errors import raises
from PIL import Image

import medvl
from medvl.cli import main as cli
from medvl.data.tokenizer.tokenizer import train_words
from medvl.errors import EvaluationError
from medvl.eval import read_results, read_rexrank, write_rexrank
from medvl.eval.report_generation.rexrank import list_source, predicted_sections
from medvl.models import save

LIST: dict[str, dict[str, Any]] = {
    "p10/s1": {
        "image_path": ["/p10/s1/a.jpg", "/p10/s1/b.jpg"],
        "key_image_path": "/p10/s1/a.jpg",
        "frontal_lateral": ["Frontal", math.nan],
        "section_findings": "There is edema. Heart is large.",
        "section_impression": math.nan,
        "context": "Age:61 Gender:F Indication:nan Comparison: None",
        "subject_id": 10,
    },
    "p10/s2": {
        "image_path": ["p10/s2/a.jpg"],
        "key_image_path": "p10/s2/a.jpg",
        "section_findings": "Clear lungs.",
        "section_impression": "No acute disease \u2265 1.",
        "context": math.nan,
        "subject_id": 10.0,
    },
    "p11/s1": {
        "image_path": ["p11/s1/a.jpg"],
        "section_findings": math.nan,
        "section_impression": "Pneumothorax.",
        "subject_id": math.nan,
    },
}
TEXTS = {
    "p10/s1": "Findings: There is edema. Impression: Edema.",
    "p10/s2": "Findings: Clear lungs. Impression: None",
    "p11/s1": "Impression: Pneumothorax.",
}


@pytest.fixture
def list_path(tmp_path: Path) -> Path:
    path = tmp_path / "list.json"
    path.write_text(json.dumps(LIST))
    assert "NaN" in path.read_text()
    return path


def test_a_list_is_read_as_data(list_path: Path) -> None:
    first, second, third = read_rexrank(list_path).values()
    assert first.images == ("p10/s1/a.jpg", "p10/s1/b.jpg")
    assert first.key_image == "p10/s1/a.jpg"
    assert first.sections == {"findings": "There is edema. Heart is large."}
    assert first.context == {"age": "61", "gender": "F"}  # "nan" and "None" are no text
    assert (first.patient, second.patient, third.patient) == ("10", "10", "p11")
    assert first.prediction is None
    assert third.key_image is None
    assert third.sections == {"impression": "Pneumothorax."}


def test_predictions_keep_every_field_and_the_order(list_path: Path, tmp_path: Path) -> None:
    out = write_rexrank(list_path, tmp_path / "out.json", dict(reversed(TEXTS.items())))
    written = json.loads(out.read_text())
    assert list(written) == list(LIST)
    for study, fields in written.items():
        assert list(fields) == [*LIST[study], "model_prediction"]
        assert fields.pop("model_prediction") == TEXTS[study]
    assert json.dumps(written) == json.dumps(LIST)  # NaN is equal in text only
    assert [study.prediction for study in read_rexrank(out).values()] == list(TEXTS.values())
    with raises(EvaluationError, "missing", "texts", names="p10/s2"):
        write_rexrank(list_path, out, {"p10/s1": "x", "p11/s1": "y"})
    with raises(EvaluationError, "mismatch", "texts", names="p99"):
        write_rexrank(list_path, out, {**TEXTS, "p99": "y"})


@pytest.mark.parametrize(
    ("text", "findings", "both"),
    [
        ("Findings: A. Impression: B.", "A.", "A. B."),
        ("FINDINGS:A. IMPRESSION:B.", "A.", "A. B."),
        ("A. Impression: B.", "A.", "A. B."),
        ("No headings.", "No headings.", "No headings."),
        ("Findings: None Impression: B.", "", "B."),
        ("Impression: B.", "", "B."),
    ],
)
def test_sections_of_a_prediction(text: str, findings: str, both: str) -> None:
    assert predicted_sections(text, ["findings"]) == findings
    assert predicted_sections(text, ["findings", "impression"]) == both


def test_the_command_scores_studies_by_section(list_path: Path, tmp_path: Path) -> None:
    out = write_rexrank(list_path, tmp_path / "out.json", TEXTS)
    command = ["eval", "report-generation", "--rexrank", str(out), "--resamples", "5"]
    cli.main([*command, "--sections", "findings", "--out", str(tmp_path / "findings")])
    findings = read_results(tmp_path / "findings")
    assert findings.details["reports"] == 2  # the third study has no findings
    assert findings.details["patients"] == 1
    assert findings.details["without_reference"] == 1
    assert findings.row("f1", "Edema").value == 1
    assert findings.row("recall", "Cardiomegaly").value == 0
    cli.main([*command, "--sections", "findings", "impression", "--out", str(tmp_path / "both")])
    both = read_results(tmp_path / "both")
    assert both.details["reports"] == 3
    assert both.row("f1", "Pneumothorax").value == 1
    difference = both.row("f1", "micro", "minus baseline: one report")
    expected = both.row("f1", "micro").value - both.row("f1", "micro", "baseline: one report").value
    assert difference.value == pytest.approx(expected)
    with pytest.raises(SystemExit):
        cli.main([*command, "--predictions", str(out)])


@pytest.mark.parametrize("name", ["cxrmate", "r2gen"])
def test_a_checkpoint_answers_a_list(name: str, list_path: Path, tmp_path: Path) -> None:
    """Every study gets one text, of its key image or, where the model reads several, of all.

    A list has no priors, so a model that may read one reads none.
    """
    images = tmp_path / "images"
    for number, path in enumerate(["p10/s1/a.jpg", "p10/s1/b.jpg", "p10/s2/a.jpg", "p11/s1/a.jpg"]):
        (images / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (64, 64), 60 * number).save(images / path)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"image_encoder": "timm:test_vit", "image_arguments": {"depth": 1},
        "image_size": 64, "width": 16, "layers": 1, "heads": 2, "intermediate": 24,
        "max_tokens": 8, "views": 3 if name == "cxrmate" else 1}  # fmt: skip
    sizes |= (
        {"prompt": ("indication",), "prior": True} if name == "cxrmate" else {"memory_heads": 2}
    )
    words = train_words(["edema . pneumothorax . clear lungs ."], min_frequency=1)
    model = medvl.create_model(name, tokenizer=words, **sizes)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    save(model, checkpoint)
    command = ["eval", "report-generation", "--checkpoint", str(checkpoint), "--rexrank",
               str(list_path), "--sections", "findings", "--resamples", "5"]  # fmt: skip
    out = tmp_path / "out"
    for _ in range(2):  # again over its own results
        cli.main([*command, "--images", str(images), "--workers", "0", "--out", str(out)])
    answered = read_rexrank(out / "prediction.json")
    assert [*answered] == [*LIST]
    assert all(study.prediction is not None for study in answered.values())
    assert all(str(study.prediction).startswith("Findings: ") for study in answered.values())
    assert read_results(out).details["reports"] == 2
    source = list_source(read_rexrank(list_path), images)
    assert [source.sample(n).extra["image_number"] for n in range(4)] == [0, 2, 0, 1]
    assert source.sample(0).view == "Frontal"
    with pytest.raises(SystemExit):  # a checkpoint needs the images
        cli.main([*command, "--out", str(tmp_path / "none")])
    studies = read_rexrank(list_path)
    for paths, code in ((("../list.json",), "not_found"), ((), "empty")):
        odd = dataclasses.replace(studies["p10/s1"], images=paths, views=(None,) * len(paths))
        with raises(EvaluationError, code, names="p10/s1"):
            list_source({"p10/s1": odd}, images)
    with raises(EvaluationError, "empty", "rexrank"):
        list_source({}, images)
    (images / "p11/s1/a.jpg").unlink()
    with raises(EvaluationError, "not_found", "images"):
        list_source(studies, images)


def test_damaged_files_are_refused(list_path: Path, tmp_path: Path) -> None:
    for content in ("[]", "{", '{"a": 1}', '{"a": {"image_path": 3}}', '{"a": Infinity}'):
        list_path.write_text(content)
        with raises(EvaluationError, "malformed"):
            read_rexrank(list_path)
    with raises(EvaluationError, "not_found", "rexrank"):
        read_rexrank(tmp_path / "none.json")
    list_path.write_text(json.dumps(LIST))
    with pytest.raises(SystemExit):  # a list without predictions
        cli.main(["eval", "report-generation", "--rexrank", str(list_path)])
