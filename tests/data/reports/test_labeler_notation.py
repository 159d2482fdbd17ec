"""Spelling of marks and boxes, sentences that belong together, and places of characters."""

import pytest

from medvl.data.reports.labeler import sentence_runs, single_marks, spell


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("  No \u00a0 PNEUMOTHORAX\n seen ", "no pneumothorax seen"),
        ("Isn\u2019t seen; can't exclude", "is not seen; can't exclude"),
        ("**Effusion:** none", "effusion: none"),
        ("\u2212ve for air\u2013space disease", "-ve for air-space disease"),
        ("Fracture(s), lens(es)", "fracture, lens"),
        ("\u2205 effusion", "\u00f8 effusion"),
        ("[ ] Edema [x] Mass", "no edema ; mass;"),
        ("Edema [ ] Mass [x]", "edema none; mass yes;"),
        ("Edema (-), mass (+)", "edema none; , mass yes;"),
        ("Edema -, mass +", "edema none, mass"),
        ("Edema: [ ] yes [x] no", "edema: no"),
        ("Edema: [ ] yes [ ] no", "edema: none"),
        ("The [ ] lobe is clear", "the [ ] lobe is clear"),
        ("\u0130 effusion", "i effusion"),
        ("", ""),
        ("[x]", ";"),
    ],
)
def test_spelling(sentence: str, expected: str) -> None:
    assert " ".join(spell(sentence)[0].split()) == expected


@pytest.mark.parametrize(
    "sentence",
    ["No  effusion isn't seen", "[ ] effusion [x] edema", "\u0130 **effusion** (-)", "[x]"],
)
def test_places_of_characters_after_spelling(sentence: str) -> None:
    text, places = spell(sentence)
    assert len(places) == len(sentence)
    assert places == sorted(places)
    assert all(0 <= place < len(text) for place in places)
    for word in ("effusion", "edema"):
        start = sentence.find(word)
        if start >= 0:
            assert text[places[start] : places[start + len(word) - 1] + 1] == word


def test_questions_and_names_go_with_their_answers() -> None:
    sentences = [
        "Edema?",
        "No.",
        "Mass?",
        "The lungs are clear.",
        "Effusion:",
        "None seen.",
        "Neg.",
        "for edema",
        "No.",
    ]
    assert sentence_runs(sentences) == [(0, 2), (2, 3), (3, 4), (4, 6), (6, 8), (8, 9)]
    assert sentence_runs([]) == []
    assert single_marks("edema?? mass?") == "edema ? mass?"
