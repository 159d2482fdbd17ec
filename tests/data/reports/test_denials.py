"""Texts with the polarity of their findings exchanged."""

import pytest

from medvl.data.reports.denials import turn_findings
from medvl.data.reports.labeler import label_report


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
            "There is no pleural effusion of the left side. There is pneumothorax.",
        ),
        ("Pneumothorax: none", "There is pneumothorax."),
        ("Possible pneumonia.", "Possible pneumonia."),
        ("Degenerative changes of the spine.", "Degenerative changes of the spine."),
        ("", ""),
    ],
)
def test_sentences_are_turned_round(text: str, turned: str) -> None:
    assert turn_findings(text) == turned


def test_other_sentences_and_white_space_stay() -> None:
    text = "Comparison: none.\n\nNo edema.  The spine is normal.\n Possible pneumonia. "
    expected = "Comparison: none.\n\nEdema.  The spine is normal.\n Possible pneumonia. "
    assert turn_findings(text) == expected


def test_every_finding_of_a_turned_text_has_the_other_value() -> None:
    text = (
        "The lungs are clear. There is mild cardiomegaly, unchanged. Left basal atelectasis is "
        "seen with a small effusion. No pneumothorax or edema; there is a nodule."
    )
    before, after = label_report(text), label_report(turn_findings(text))
    names = before.keys() - {"No Finding", "Lung Opacity"}
    assert len(names) == 6
    assert {name: 1 - before[name] for name in names} == {name: after[name] for name in names}
