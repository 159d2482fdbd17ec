"""Vocabularies of words, and the cleaning of reports for them."""

import re
from pathlib import Path

import pytest
from helpers.errors import raises

from medvl.data.tokenizer.files import clean_report, clean_report_as_r2gen
from medvl.data.tokenizer.tokenizer import load_tokenizer, train_words
from medvl.errors import ConfigError

REPORT = (
    '1. Nodule of 3.2 cm, at T11. The heart is "normal".\n2. No effusion/edema.. 3. XXXX '
    "__ (stable)."
)


def released(text: str) -> str:
    """Clean one replacement after another, as described by the published procedure for
    MIMIC-CXR.
    """
    text = text.replace("\n", " ")
    for pair, count in (("__", 7), ("  ", 6), ("..", 8)):
        for _ in range(count):
            text = text.replace(pair, pair[0])
    text = text.replace("1. ", "")
    for number in "2345":
        text = text.replace(f". {number}. ", ". ")
    for number in "2345":
        text = text.replace(f" {number}. ", ". ")
    parts = []
    for part in text.strip().lower().split(". "):
        for mark in "\"/\\'":
            part = part.replace(mark, "")
        parts.append(re.sub(r"[.,?;*!%^&_+():-\[\]{}]", "", part.strip()))
    return " . ".join(parts) + " ."


def test_decimal_points_and_numbers_in_words_stay() -> None:
    assert clean_report(REPORT) == (
        "nodule of 3.2 cm at t11 . the heart is normal . no effusionedema . xxxx stable ."
    )
    assert (
        clean_report("Mid-lung opacity, 10% of 2.5 x 1.25 cm")
        == "mid-lung opacity 10 of 2.5 x 1.25 cm ."
    )
    assert clean_report(" \n .. ") == ""


@pytest.mark.parametrize(
    "text", [REPORT, "", "Clear lungs.", "One.  Two. 2. Three 4. four", "See 11. 12. at 1.5 cm"]
)
def test_released_cleaner_with_its_defects(text: str) -> None:
    assert clean_report_as_r2gen(text).split() == released(text).split()
    assert "32" in clean_report_as_r2gen(REPORT).split()


def test_words_below_the_threshold_are_unknown(tmp_path: Path) -> None:
    texts = ["No effusion.", "No effusion of 3.2 cm.", "No nodule of 3.2 cm."]
    tokenizer = train_words(texts, min_frequency=2, max_tokens=7)
    assert sorted(tokenizer.vocabulary, key=tokenizer.vocabulary.__getitem__) == [
        *("<end>", ".", "3.2", "<unk>", "cm", "effusion", "no", "of"),
    ]
    assert (tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id) == (
        0,
        0,
        0,
        None,
    )
    ids_BT, mask_BT = tokenizer(["No nodule.", "No effusion of 3.2 cm. No cm.", ""])
    assert ids_BT.tolist() == [[0, 6, 3, 1, 0, 0, 0], [0, 6, 5, 7, 2, 4, 0], [0, 0, 0, 0, 0, 0, 0]]
    assert mask_BT.sum(dim=1).tolist() == [5, 7, 2]
    assert tokenizer.decode([6, 5, 7, 2, 4, 1]) == "no effusion of 3.2 cm ."
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again(["No effusion of 3.2 cm. No cm."])[0].tolist() == ids_BT[1:2].tolist()
    assert (again.pad_id, again.unk_id) == (0, 3)
    published = train_words(texts, min_frequency=2, cleaning="r2gen")
    assert "32" in published.vocabulary
    with raises(ConfigError, "empty", "texts"):
        train_words(texts, min_frequency=5)
