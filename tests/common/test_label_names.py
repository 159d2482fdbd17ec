"""Labels in the spellings of data sets: which class they are, and the words that prompts say."""

import pytest
from helpers.errors import raises

from medvl.common.label_names import match_labels, named_as, spoken_name
from medvl.data import statement
from medvl.errors import EvaluationError
from medvl.schema import FINDINGS

SPELLINGS = [
    ("Pleural Effusion", "Pleural_Effusion"),
    ("Pleural Effusion", "pleural-effusion"),
    ("Pleural Effusion", "Pleural Effusion "),
    ("Pleural Effusion", "PLEURAL EFFUSION"),
    ("Pleural Effusion", "PleuralEffusion"),
    ("Pleural Effusion", "pleural.effusion"),
    ("Pleural Effusion", "Pleural\u00a0Effusion"),
    ("Pleural Effusion", "Pleural effusions"),
    ("Pleural Effusion", "finding=pleural_effusion"),
    ("Pleural Effusion", "Effusion"),
    ("Cardiomegaly", "cardiomegaly"),
    ("Cardiomegaly", "has_cardiomegaly"),
    ("Cardiomegaly", "cardiomegaly=1"),
    ("Edema", "Pulmonary oedema"),
    ("Edema", "EDEMA"),
    ("Lung Opacity", "Airspace Opacity"),
    ("Lung Opacity", "lung_opacity"),
    ("Enlarged Cardiomediastinum", "Enlarged Cardiom."),
    ("No Finding", "no_finding"),
    ("No Finding", "NoFinding"),
    ("No Finding", "finding=none"),
    ("Support Devices", "support device"),
    ("Pneumonia", "Pneumonia_present"),
]


@pytest.mark.parametrize(("name", "label"), SPELLINGS)
def test_a_label_is_the_class_whatever_its_spelling(name: str, label: str) -> None:
    assert match_labels(FINDINGS, [label]) == {name: label}
    assert match_labels([label], [name]) == {label: name}
    assert named_as([label, "Other"], FINDINGS) == (name, "Other")


@pytest.mark.parametrize(
    "label",
    [
        "Pleural Thickening",
        "Infiltration",
        "Mass",
        "No Edema",
        "edema=0",
        "Rib fracture",
        "Opacity",
        "",
        "?",
    ],
)
def test_other_findings_match_nothing(label: str) -> None:
    assert match_labels(FINDINGS, [label]) == {}


def test_the_same_name_comes_before_spellings_and_these_before_synonyms() -> None:
    assert match_labels(["Edema"], ["edema", "Edema", "Pulmonary Edema"]) == {"Edema": "Edema"}
    assert match_labels(["Edema"], ["Pulmonary Edema", "edema"]) == {"Edema": "edema"}
    assert match_labels(["Edema", "Pulmonary Edema"], ["Pulmonary Edema"]) == {
        "Pulmonary Edema": "Pulmonary Edema"
    }
    assert match_labels(["Nodule", "Lung Nodule"], ["nodule"]) == {"Nodule": "nodule"}
    # two synonyms may be two things in these data (Chest ImaGenome has lung opacity and airspace
    # opacity)
    assert match_labels(["Edema"], ["Pulmonary Edema", "Lung Edema"]) == {}
    assert match_labels(["Edema"], ["Pulmonary Edema"], synonyms=False) == {}
    with raises(EvaluationError, "conflict", field="labels", names="EDEMA"):
        match_labels(["Edema"], ["edema", "EDEMA"])
    assert named_as(["edema", "EDEMA"], ["Edema"]) == ("edema", "EDEMA")


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("Pleural_Effusion", "pleural effusion"),
        ("finding=mass", "mass"),
        ("Finding: Mass", "mass"),
        ("finding=none", "no finding"),
        ("edema_severity=mild", "mild edema severity"),
        ("pneumonia=yes", "pneumonia"),
        ("pneumonia=0", "no pneumonia"),
        ("pleural-effusion", "pleural effusion"),
        ("PleuralEffusion", "pleural effusion"),
        ("COVID-19", "covid-19"),
        ("Ground-Glass Opacity", "ground-glass opacity"),
        ("x-ray", "x-ray"),
        ("Nodule/Mass", "nodule/mass"),
        ("COPD", "copd"),
        ("label_Edema", "edema"),
        ("Lung  Opacity ", "lung opacity"),
        ("?", "?"),
    ],
)
def test_the_words_of_a_label(label: str, words: str) -> None:
    assert spoken_name(label) == words


def test_statements_say_words() -> None:
    assert statement("Pleural_Effusion") == "There is pleural effusion."
    assert statement("finding=mass", 0) == "There is no mass."
    assert (
        statement("support_devices") == statement("Support Devices") == "There is support device."
    )
