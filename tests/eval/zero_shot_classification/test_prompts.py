"""Prompt files: content of the built-in sets, and validation of user files."""

import hashlib
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.errors import raises
from helpers.eval_fakes import WIDTH, FakeModel
from helpers.shard_plans import OPTIONS, make_plan

from medvl.cli.main import main
from medvl.data import statement
from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.errors import EvaluationError
from medvl.eval import list_prompts, load_prompts
from medvl.eval.zero_shot_classification import prompts
from medvl.eval.zero_shot_classification.protocol import PromptScorer, common_classes
from medvl.schema import COMPETITION_FINDINGS, FINDINGS, Embeddings

OURS = ("chexpert_classes", "chexpert_ensemble", "chexpert_pairs")
DENIED = re.compile(
    r"\b(no|not|without|neither|free|normal|clear|intact|unremarkable|well aerated|fully)\b",
    re.IGNORECASE,
)
TOPIC = {
    "Atelectasis": "atelecta|collapse|volume|linear",
    "Cardiomegaly": "heart|cardi",
    "Consolidation": "consolidation|airspace",
    "Edema": "edema|congestion|fluid",
    "Enlarged Cardiomediastinum": "mediast",
    "Fracture": "fracture|osseous|ribs",
    "Lung Lesion": "nodul|mass|lesion",
    "Lung Opacity": "opacit|lungs are clear",
    "No Finding": "chest|abnormal|lung|disease|cardiopulmonary|heart|rib|effusion",
    "Pleural Effusion": "effusion|costophrenic|pleural (space|fluid)",
    "Pleural Other": "pleura|fibrothorax",
    "Pneumonia": "pneumonia|infect|infiltrate",
    "Pneumothorax": "pneumothorax|pleural line",
    "Support Devices": "device|tube|catheter|pacemaker|lines?",
}


def valid_file(**changes) -> dict:
    data = {
        "name": "modality",
        "version": 1,
        "description": "CT against MR.",
        "scoring": "class_softmax",
        "temperature": 0.1,
        "ensemble": "similarity_mean",
        "classes": {"CT": {"positive": ["A CT image."]}, "MR": {"positive": ["An MR image."]}},
    }
    return {**data, **changes}


def written(folder: Path, data: object) -> Path:
    path = folder / "mine.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_built_in_prompt_sets_load_by_name():
    assert set(OURS) <= set(list_prompts())
    assert [load_prompts(name).name for name in list_prompts()] == list_prompts()


def test_chexzero_template_matches_published_prompts():
    """The published "no No Finding" prompt inverts the label, so ours differs."""
    template = load_prompts("chexzero_template")
    assert sorted({*template.classes, "No Finding"}) == sorted(FINDINGS)
    assert (template.scoring, template.temperature) == ("pair_softmax", 1.0)
    for finding, sides in template.classes.items():
        assert (sides.positive, sides.negative) == ((finding,), (f"no {finding}",))


@pytest.mark.parametrize("name", OURS)
def test_prompt_sentences_are_distinct_per_finding(name):
    prompt_set = load_prompts(name)
    assert sorted(prompt_set.classes) == sorted(FINDINGS)
    assert (
        prompt_set.sha256
        == hashlib.sha256((prompts._FOLDER / f"{name}.json").read_bytes()).hexdigest()
    )
    positives = [sentence for sides in prompt_set.classes.values() for sentence in sides.positive]
    assert len(set(positives)) == len(positives)
    for finding, sides in prompt_set.classes.items():
        for sentence in (*sides.positive, *sides.negative):
            assert re.search(TOPIC[finding], sentence, re.IGNORECASE), (finding, sentence)
            assert re.fullmatch(r"[A-Z][^.]*\.", sentence), sentence


@pytest.mark.parametrize("name", OURS)
def test_labeler_agrees_with_positive_and_negative_prompts(name):
    for finding, sides in load_prompts(name).classes.items():
        denied, affirmed = (
            (sides.positive, sides.negative)
            if finding == "No Finding"
            else (sides.negative, sides.positive)
        )
        for sentence in denied:
            assert DENIED.search(sentence), (finding, sentence)
        if finding != "No Finding":
            for sentence in affirmed:
                assert not DENIED.search(sentence), (finding, sentence)


@pytest.mark.parametrize("name", OURS)
def test_no_finding_prompts_describe_normal_study(name):
    """CheXzero's template inverts this label: AUROC 0.07."""
    sides = load_prompts(name).classes["No Finding"]
    for sentence in sides.positive:
        assert re.search(r"\b(normal|clear|unremarkable|no)\b", sentence, re.IGNORECASE)
    findings = "|".join(topic for finding, topic in TOPIC.items() if finding != "No Finding")
    for sentence in sides.negative:
        assert re.search(f"abnormal|not normal|{findings}", sentence, re.IGNORECASE)
        assert not re.search(r"\bno\b", sentence, re.IGNORECASE)


def test_select_keeps_order_and_rejects_unknown_classes():
    full_set = load_prompts("chexpert_classes")
    five = full_set.select(COMPETITION_FINDINGS)
    assert tuple(five.classes) == COMPETITION_FINDINGS
    assert five.sha256 == full_set.sha256
    with raises(EvaluationError, "unknown_name", names="Hernia"):
        full_set.select(["Edema", "Hernia"])
    with raises(EvaluationError, "malformed", "classes"):
        full_set.select(["Edema"])


def test_texts_are_distinct_and_ordered(tmp_path):
    shared = {
        "A": {"positive": ["one", "two"], "negative": ["none"]},
        "B": {"positive": ["two"], "negative": ["none", "three"]},
    }
    prompt_set = load_prompts(written(tmp_path, valid_file(scoring="margin", classes=shared)))
    assert prompt_set.texts() == ("one", "two", "none", "three")
    assert not prompt_set.gives_probabilities


def test_prompt_file_loads_by_path(tmp_path):
    path = written(tmp_path, valid_file())
    for given in (path, str(path)):
        prompt_set = load_prompts(given)
        assert prompt_set.classes["MR"].positive == ("An MR image.",)
        assert prompt_set.temperature == 0.1
        assert prompt_set.gives_probabilities


NEGATIVE = {"positive": ["yes"], "negative": ["no"]}


@pytest.mark.parametrize(
    ("data", "code", "field", "names"),
    [
        ("{", "malformed", "prompts", ""),
        ('{"name": "a", "name": "b"}', "malformed", "prompts", "name"),
        ([], "malformed", "fields", "list"),
        (valid_file(extra=1), "malformed", "fields", "'extra'"),
        (valid_file(version="1"), "wrong_type", "version", "str"),
        (valid_file(version=True), "wrong_type", "version", "bool"),
        (
            valid_file(scoring="softmax"),
            "unknown_name",
            "scoring",
            "pair_softmax, class_softmax, margin",
        ),
        (valid_file(ensemble="mean"), "unknown_name", "ensemble", "similarity_mean"),
        (valid_file(temperature=0), "out_of_range", "temperature", ""),
        (valid_file(classes={"CT": ["A CT image."]}), "malformed", "classes", "'CT'"),
        (valid_file(classes={"CT": {"positive": []}}), "malformed", "positive", "'CT'"),
        (valid_file(classes={"CT": {"positive": ["  "]}}), "malformed", "positive", "'CT'"),
        (valid_file(classes={"CT": {"positive": ["a", "a"]}}), "malformed", "classes", "'a'"),
        (
            valid_file(classes={"CT": {"positive": {"parts": [["a"], []]}}}),
            "malformed",
            "positive",
            "'CT'",
        ),
        (
            valid_file(classes={"CT": {"positive": {"lists": [["a"]]}}}),
            "malformed",
            "positive",
            "'CT'",
        ),
        (
            valid_file(classes={"CT": {"positive": {"parts": [["a", "a"], ["b"]]}}}),
            "malformed",
            "classes",
            "'a b'",
        ),
        (valid_file(classes={"CT": NEGATIVE, "MR": NEGATIVE}), "conflict", "scoring", "'CT'"),
        (valid_file(classes={"CT": {"positive": ["a"]}}), "malformed", "classes", ""),
        (valid_file(scoring="pair_softmax"), "malformed", "classes", "['CT', 'MR']"),
        (valid_file(scoring="margin", classes={}), "malformed", "classes", ""),
    ],
)
def test_load_prompts_rejects_invalid_files(tmp_path, data, code, field, names):
    with raises(EvaluationError, code, field, names=names) as caught:
        load_prompts(written(tmp_path, data))
    assert "mine.json" in str(caught.value)


def test_optional_fields_may_be_left_out(tmp_path):
    data = valid_file()
    for field in ("version", "description", "ensemble"):
        del data[field]
    prompt_set = load_prompts(written(tmp_path, data))
    assert (prompt_set.version, prompt_set.description, prompt_set.ensemble) == (
        1,
        "",
        "similarity_mean",
    )
    del data["scoring"], data["temperature"]
    with raises(EvaluationError, "malformed", "fields", names="missing 'scoring', 'temperature'"):
        load_prompts(written(tmp_path, data))


def test_example_of_the_guide_is_valid(tmp_path):
    guide = (Path(__file__).parents[3] / "docs/pages/guides/evaluation.md").read_text(
        encoding="utf-8"
    )
    (example,) = re.findall(r"```json\n(.*?)```", guide, re.DOTALL)
    (tmp_path / "devices.json").write_text(example)
    assert list(load_prompts(tmp_path / "devices.json").classes) == ["pacemaker", "tube"]


def test_errors_of_prompts_come_before_the_model_is_loaded(tmp_path, deid, monkeypatch, capsys):
    def load(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("medvl.eval.zero_shot_classification.evaluation.load_ensemble", load)
    monkeypatch.setattr("medvl.eval.core.open.detector_of", lambda checkpoint: None)
    write_shards(
        make_plan(tmp_path / "images", 2), deid, ShardRun(out=tmp_path / "out", workers=1), OPTIONS
    )
    (tmp_path / "broken.json").write_text("{")
    common = [
        "eval",
        "zero-shot",
        "--checkpoint",
        str(tmp_path),
        "--data",
        str(tmp_path / "out/train"),
    ]
    for path, message in (
        (tmp_path / "broken.json", "JSON"),
        (written(tmp_path, valid_file()), "(CT, MR), got even"),
    ):
        with pytest.raises(SystemExit):
            main([*common, "--prompts", str(path)])
        assert message in capsys.readouterr().err


def test_load_prompts_lists_known_names():
    with raises(EvaluationError, "unknown_name", "prompts", names="chexpert_classes, chexpert_ens"):
        load_prompts("chexpert")


def test_statements_are_those_of_training_and_scored_alone(tmp_path):
    prompts_of = load_prompts("statements")
    assert {name: sides.positive for name, sides in prompts_of.classes.items()} == {
        name: (statement(name),) for name in FINDINGS
    }
    assert not prompts_of.gives_probabilities
    model = FakeModel().eval().requires_grad_(False)
    images = Embeddings(torch.eye(WIDTH)[:3])
    scores_NL = PromptScorer(model, prompts_of)(images)
    expected_NL = model.similarity(
        images, model.embed_texts([statement(name) for name in FINDINGS])
    )
    torch.testing.assert_close(scores_NL, expected_NL.double())
    both = {"CT": {"positive": ["A CT image."], "negative": ["An MR image."]}}
    with raises(EvaluationError, "conflict", "scoring"):
        load_prompts(written(tmp_path, valid_file(scoring="positive", classes=both)))


def test_labels_that_a_set_does_not_list_have_its_sentences_of_other_classes(tmp_path):
    """Published figures of RadZero and CARZero are of the labels of ChestX-ray14, PadChest and
    other corpora.
    """
    names = ("Edema", "Laminar Atelectasis", "Mass")
    statements = load_prompts("statements").for_labels(names)
    assert list(statements.classes) == [*FINDINGS, "Laminar Atelectasis", "Mass"]
    assert statements.classes["Laminar Atelectasis"].positive == (statement("Laminar Atelectasis"),)
    assert list(load_prompts("statements").for_labels(names, ("Mass", "Edema")).classes) == [
        "Mass",
        "Edema",
    ]
    assert load_prompts("chexpert_pairs").for_labels(names) == load_prompts("chexpert_pairs")
    pair = {"positive": ["A {} is seen."], "negative": ["No {}."]}
    both = {"CT": {"positive": ["CT."], "negative": ["MR."]}}
    path = written(tmp_path, valid_file(scoring="margin", classes=both, other_classes=pair))
    (sentences,) = load_prompts(path).for_labels(("Mass",), ("Mass",)).classes.values()
    assert (sentences.positive, sentences.negative) == (("A mass is seen.",), ("No mass.",))
    for chosen, field, code in (
        (("Hernia",), "labels", "unknown_name"),
        (("Mass",), "labels", "unknown_name"),
    ):
        with raises(EvaluationError, code, field):
            load_prompts("chexpert_pairs").for_labels(names, chosen)
    for others, field, code in (
        ({"positive": ["There is a mass."]}, "other_classes", "malformed"),
        ({"positive": ["{}"], "negative": ["no {}"]}, "scoring", "conflict"),
        (["{}"], "other_classes", "wrong_type"),
    ):
        with raises(EvaluationError, code, field):
            load_prompts(written(tmp_path, valid_file(other_classes=others)))


def test_labels_without_sentences_lead_to_the_set_for_any_label() -> None:
    """Labels of a hospital's own table, which the sets for findings of chest radiographs do not
    have.
    """
    names = ("covid", "Lungenrundherd")

    def source(*labels: str) -> Any:
        return SimpleNamespace(label_names=labels)

    prompts = load_prompts("chexpert_ensemble")
    with raises(EvaluationError, "unknown_name", "labels", names="--prompts statements"):
        prompts.for_labels(names, ("covid",))
    with raises(EvaluationError, "mismatch", "prompts", names="--prompts statements"):
        common_classes(prompts, source(*names))
    with raises(EvaluationError, "mismatch", "prompts", names="data with labels"):
        common_classes(prompts, source())
    with raises(EvaluationError, "unknown_name", "labels", names="did you mean 'covid'"):
        prompts.for_labels(names, ("covd",))
    statements = load_prompts("statements").for_labels(names, ("covid",))
    assert common_classes(statements, source(*names)) == ("covid",)
