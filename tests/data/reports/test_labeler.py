"""The rule labeler on single sentences, the phantom's labels, and the MeSH terms of real reports."""

from collections import Counter
from pathlib import Path

import pytest

from medvl.data.reports.labeler import find_mentions, label_report
from medvl.data.reports.labeler_lexicon import MENTIONS
from medvl.data.reports.openi_xml import iter_openi_reports
from medvl.phantom import World, compose_report
from medvl.phantom.language.reports import Report
from medvl.schema import FINDINGS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("There is a small left pleural effusion.", {"Pleural Effusion": 1}),
        ("No focal consolidation, pleural effusion, or pneumothorax.", {"Consolidation": 0, "Pleural Effusion": 0, "Pneumothorax": 0}),
        ("No consolidation, large effusion or pneumothorax.", {"Consolidation": 0, "Pleural Effusion": 0, "Pneumothorax": 0}),
        ("No pneumothorax, small left effusion.", {"Pneumothorax": 0, "Pleural Effusion": 1}),
        ("No pneumothorax but a moderate effusion.", {"Pneumothorax": 0, "Pleural Effusion": 1}),
        ("No pneumothorax; atelectasis is unchanged.", {"Pneumothorax": 0, "Atelectasis": 1}),
        ("Cardiomegaly without edema.", {"Cardiomegaly": 1, "Edema": 0}),
        ("No change in the right pneumothorax.", {"Pneumothorax": 1}),
        ("The effusion has not significantly changed.", {"Pleural Effusion": 1}),
        ("The left effusion has resolved.", {"Pleural Effusion": 0}),
        ("Previously seen pneumonia is no longer seen.", {"Pneumonia": 0}),
        ("Pneumonia, edema, or effusion is not seen.", {"Pneumonia": 0, "Edema": 0, "Pleural Effusion": 0}),
        ("Opacity in the right lung base may represent pneumonia.", {"Lung Opacity": 1, "Pneumonia": -1}),
        ("Patchy opacity in the lingula, pneumonia cannot be excluded.", {"Lung Opacity": 1, "Pneumonia": -1}),
        ("Early pneumonia is not excluded.", {"Pneumonia": -1}),
        ("No effusion, possible edema.", {"Pleural Effusion": 0, "Edema": -1}),
        ("Scarring versus effusion.", {"Pleural Effusion": -1}),
        ("There is no pleural line to suggest pneumothorax.", {"Pneumothorax": 0}),
        ("The heart is mildly enlarged.", {"Cardiomegaly": 1}),
        ("The heart is not enlarged.", {"Cardiomegaly": 0}),
        ("The heart may be enlarged.", {"Cardiomegaly": -1}),
        ("Heart size is within normal limits.", {"Cardiomegaly": 0}),
        ("Heart size is at the upper limits of normal.", {}),
        ("The cardiomediastinal silhouette is normal.", {"Cardiomegaly": 0, "Enlarged Cardiomediastinum": 0}),
        ("The lungs are clear.", {"Lung Opacity": 0}),
        ("The lungs are not clear.", {}),
        ("Costophrenic angles are sharp. Osseous structures are intact.", {"Pleural Effusion": 0, "Fracture": 0}),
        ("Small pericardial effusion.", {}),
        ("No effusion. Small left effusion.", {"Pleural Effusion": 1}),
        ("Possible pneumonia. No pneumonia.", {"Pneumonia": -1}),
        ("The trachea is midline. Kerley B lines.", {}),
        ("ET tube ends 4 cm above the carina.", {"Support Devices": 1}),
        ("The chest tube has been removed.", {"Support Devices": 0}),
        ("NO\nPNEUMOTHORAX.", {"Pneumothorax": 0}),
    ],
)  # fmt: skip
def test_label_report_on_sentences(text: str, expected: dict[str, int]) -> None:
    labels = label_report(text)
    labels.pop("No Finding", None)
    assert labels == expected


def test_no_finding_ignores_devices() -> None:
    assert label_report("No pneumothorax. PICC in place.") == {"No Finding": 1, "Pneumothorax": 0, "Support Devices": 1}
    assert label_report("No acute cardiopulmonary process.") == {"No Finding": 1}
    assert "No Finding" not in label_report("Possible pneumonia.")
    assert label_report(" ") == {}


def test_mentions_have_phrase_and_cue() -> None:
    opacity, pneumonia = find_mentions("Left basilar opacity is concerning for pneumonia.")
    assert (opacity.finding, opacity.value, opacity.phrase, opacity.cue) == ("Lung Opacity", 1, "opacity", "")
    assert (pneumonia.value, pneumonia.phrase, pneumonia.cue) == (-1, "pneumonia", "concerning for")
    assert pneumonia.sentence == "left basilar opacity is concerning for pneumonia."


def test_lexicon_has_every_finding_once() -> None:
    assert {*MENTIONS, "No Finding"} == set(FINDINGS)
    entries = [entry for table in MENTIONS.values() for entry in table]
    assert len(entries) == len(set(entries))


def phantom_reports(patients: int) -> list[Report]:
    return [compose_report(study) for patient in World(11).patients(patients) for study in patient.studies]


def test_labels_of_phantom_reports_match_their_truth() -> None:
    """Precision and recall are above 0.95 for every label and value with at least ten reports."""
    correct, predicted, expected = Counter[tuple[str, int]](), Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for report in phantom_reports(400):
        if not report.findings and not report.impression:
            continue  # its text has no headings
        labels = set(label_report(f"{report.findings} {report.impression}").items())
        truth = set(report.labels.items())
        predicted.update(labels)
        expected.update(truth)
        correct.update(labels & truth)
    frequent = [key for key, count in expected.items() if count >= 10]
    assert len({finding for finding, value in frequent if value == 1}) == len(FINDINGS)
    assert len(frequent) > 30
    rates_of = {key: (correct[key] / predicted[key], correct[key] / expected[key]) for key in frequent}
    assert {key: rates for key, rates in rates_of.items() if min(rates) <= 0.95} == {}


MESH = {
    "Atelectasis": {"Pulmonary Atelectasis"},
    "Cardiomegaly": {"Cardiomegaly"},
    "Consolidation": {"Consolidation"},
    "Fracture": {"Fractures, Bone"},
    "Lung Opacity": {"Opacity", "Airspace Disease", "Infiltrate"},
    "Pleural Effusion": {"Pleural Effusion", "Hydropneumothorax", "Hemopneumothorax"},
    "Pneumothorax": {"Pneumothorax", "Hydropneumothorax", "Hemopneumothorax"},
}
"""Findings with MeSH terms of the same meaning in Open-i."""


@pytest.mark.real
def test_labels_agree_with_openi_indexing(real_data: Path) -> None:
    correct, predicted, expected = Counter[str](), Counter[str](), Counter[str]()
    for report in iter_openi_reports(real_data / "openi" / "NLMCXR_reports.tgz"):
        text = " ".join(report.sections.get(name, "") for name in ("findings", "impression"))
        if not text.strip() or report.mesh_major == ("No Indexing",):
            continue
        terms = {term.split("/")[0] for term in report.mesh_major}
        truth = {finding for finding, names in MESH.items() if names & terms}
        labels = {finding for finding, value in label_report(text).items() if value == 1} & set(MESH)
        predicted.update(labels)
        expected.update(truth)
        correct.update(labels & truth)
    for finding in MESH:
        precision, recall = correct[finding] / predicted[finding], correct[finding] / expected[finding]
        assert precision > 0.85, (finding, precision, recall)
        assert recall > 0.8, (finding, precision, recall)
