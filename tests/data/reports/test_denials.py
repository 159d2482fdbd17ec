"""Texts with the polarity of their findings exchanged."""

import pytest

from medvl.data.reports.denials import turn_findings
from medvl.data.reports.labeler import label_report
from medvl.schema import FINDINGS


@pytest.mark.parametrize(
    ("text", "turned"),
    [
        ("There is a small left pleural effusion.", "There is no small left pleural effusion."),
        ("There is no evidence of pulmonary edema.", "There is pulmonary edema."),
        ("No focal consolidation or edema.", "Focal consolidation or edema."),
        ("Small left effusion.", "No small left effusion."),
        ("The heart is enlarged.", "The heart is not enlarged."),
        ("The cardiac silhouette is not enlarged.", "The cardiac silhouette is enlarged."),
        ("Chest without pneumothorax.", "Chest with pneumothorax."),
        ("ET tube in place.", "No ET tube in place."),
        ("The heart is normal in size.", "There is cardiomegaly."),
        (
            "Small left effusion, no pneumothorax.",
            "There is no pleural effusion of the left side. There is no pneumothorax.",
        ),
        ("Pneumothorax: none", "There is pneumothorax."),
        ("Possible pneumonia.", "Possible pneumonia."),
        ("Degenerative changes of the spine.", "Degenerative changes of the spine."),
        ("", ""),
    ],
)
def test_sentences_are_turned_round(text: str, turned: str) -> None:
    assert turn_findings(text).text == turned


def test_other_sentences_and_white_space_stay() -> None:
    text = "Comparison: none.\n\nNo edema.  The spine is normal.\n Possible pneumonia. "
    expected = "Comparison: none.\n\nEdema.  The spine is normal.\n Possible pneumonia. "
    assert turn_findings(text).text == expected


def test_affirmed_findings_are_denied_and_all_others_stay() -> None:
    text = (
        "The lungs are clear. There is mild cardiomegaly, unchanged. Left basal atelectasis is "
        "seen with a small effusion, no edema. No pneumothorax; there is a nodule. Possible "
        "pneumonia."
    )
    denial = turn_findings(text)
    before, after = label_report(text), label_report(denial.text)
    turned = {name for name, value in zip(FINDINGS, denial.turned, strict=True) if value == 1}
    assert turned == {"Cardiomegaly", "Atelectasis", "Pleural Effusion", "Lung Lesion"}
    assert set(denial.turned) == {0, 1}
    names = before.keys() - {"No Finding"}
    assert {name: 0 if name in turned else before[name] for name in names} == {
        name: after[name] for name in names
    }
    again = turn_findings(denial.text)  # which affirms none
    assert set(again.turned) == {0, -1}
