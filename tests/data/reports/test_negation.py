"""Values of mentions of entities."""

import pytest

from medvl.data import EntityFinder, mention_values
from medvl.data.reports.labeler import label_report

FINDER = EntityFinder.of(
    [
        ("pleural effusion", 0),
        ("effusion", 1),
        ("lung", 2),
        ("x-ray", 3),
        ("ET tube", 4),
        ("Ménière disease", 5),
    ]
)
VALUES = {
    "No pleural  effusion or\nx-ray.  The lung is clear; possible effusion.": [0, 0, 1, -1],
    "Effusion isn't seen. ET tube, no  pleural effusion.": [0, 1, 0],
    "Pleural effusion isn\u2019t seen but the lung is small": [0, 1],
    "History of Ménière disease.\n\nEffusion is not excluded.": [None, -1],
    "No effusion in the lung. ___ ET tube": [0, 0, 1],
    "effusion": [1],
    "": [],
}


@pytest.mark.parametrize("text", VALUES)
def test_values_of_mentions_follow_the_cues_of_their_sentence(text: str) -> None:
    assert mention_values(text, FINDER.find(text)) == VALUES[text]


def test_findings_have_the_values_of_the_labeler() -> None:
    text = (
        "Small left effusion. No pneumothorax or focal consolidation, possible edema. Prior "
        "pneumonia has resolved."
    )
    names = {
        "effusion": "Pleural Effusion",
        "pneumothorax": "Pneumothorax",
        "focal consolidation": "Consolidation",
    }
    names |= {"edema": "Edema", "pneumonia": "Pneumonia"}
    mentions = EntityFinder.of((name, number) for number, name in enumerate(names)).find(text)
    labels = label_report(text)
    values = mention_values(text, mentions)
    assert {
        text[start:end]: value for (start, end, _), value in zip(mentions, values, strict=True)
    } == {name: labels.get(finding) for name, finding in names.items()}
