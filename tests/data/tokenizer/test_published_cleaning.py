"""Texts as released code cleans them, and texts without [SEP]: values of the released rules, and
round trips.
"""

import re
from pathlib import Path

import pytest
from helpers.errors import raises

from medvl.data import load_tokenizer
from medvl.data.tokenizer.files import clean_as_albef, clean_words
from medvl.data.tokenizer.tokenizer import Tokenizer, train_wordpiece
from medvl.errors import ConfigError

TEXTS = [
    "There is pleural effusion",
    "1. No effusion.\n2. Small left-sided pneumothorax.",
    "Normal. The heart is enlarged; 3.2 cm nodule (RUL)?",
    "Is/are there x-ray findings -yes/no?",
    "Caf\u00e9-au-lait spots ~ 5 #6: 'ok' \"quoted\"!",
    "A: B; C, D.  E\tF",
    " ".join(f"word{number}" for number in range(40)),
    "",
]


def released_caption(caption: str) -> str:
    """ALBEF's rule for captions, step by step: marks deleted, two marks to blanks, blanks
    joined, 30 words.
    """
    for mark in ",.'!?\"()*#:;~":
        caption = caption.lower().replace(mark, "")
    caption = re.sub(r"\s{2,}", " ", caption.replace("-", " ").replace("/", " ")).strip(" \n")
    return " ".join(caption.split(" ")[:30])


@pytest.mark.parametrize("text", TEXTS)
def test_captions_and_questions_are_cleaned_as_by_albef(text: str) -> None:
    assert clean_as_albef(text).split() == released_caption(text).split()
    assert len(clean_as_albef(text).split()) <= 30


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("There is pleural effusion", "there is pleural effusion"),
        (
            "1. No effusion.\n2. Small left-sided pneumothorax.",
            "no effusion small left sided pneumothorax",
        ),
        (
            "Normal. The heart is enlarged.",
            "the heart is enlarged",
        ),  # a sentence of one word is removed
        ("Edema", "edema"),  # but not all of a text
        ("Edema. Effusion.", "edema effusion"),
        ("Caf\u00e9 au lait", "caf au lait"),
        ("\u80ba effusion on the left", "effusion on the left"),
        ("___ year old", "___ year old"),
        ("...", ""),
        ("", ""),
    ],
)
def test_words_are_those_of_the_released_code(text: str, expected: str) -> None:
    assert clean_words(text) == expected


def tokenizer() -> Tokenizer:
    return train_wordpiece(
        [*TEXTS, "left lung - right"], vocab_size=120, min_frequency=1, max_tokens=12
    )


def test_texts_end_without_sep_and_answers_with_it(tmp_path: Path) -> None:
    """The maximum length counts the tokens that are there; also after saving and loading."""
    closed = tokenizer()
    opened = closed.as_published(cleaning="albef", closing=False)
    opened.save(tmp_path / "words")
    for each in (opened, load_tokenizer(tmp_path / "words")):
        ids, mask = each(["Left lung, right?", "left - lung"])
        expected, _ = closed(["left lung right", "left lung"])
        assert ids[0, mask[0]].tolist() == expected[0][expected[0] != closed.pad_id].tolist()[:-1]
        assert ids[1, mask[1]].tolist() == closed(["left lung"])[0][0].tolist()[:-1]
        assert each([TEXTS[6]])[0].shape == (1, 12)
        assert each.sep_id not in each([TEXTS[6]])[0]
        assert each([""])[0].tolist() == [[each.cls_id]]
        answers = each.for_answers()
        assert answers(["left - lung"])[0].tolist() == closed(["left - lung"])[0].tolist()
        assert answers.for_answers() is answers
        assert each.word_ids(ids, mask)[0, mask[0]].tolist() == [
            -1,
            *each.word_ids(ids, mask)[0, 1 : mask[0].sum()],
        ]
    assert closed.for_answers() is closed


def test_tokenizers_that_clean_texts_keep_their_cleaning() -> None:
    clip = load_tokenizer("clip").as_published(cleaning="albef")
    assert clip(["Left-lung"])[0].tolist() == load_tokenizer("clip")(["Left-lung"])[0].tolist()


@pytest.mark.parametrize("value", ['"no"', "0", "null"])
def test_damaged_settings_are_refused(value: str, tmp_path: Path) -> None:
    tokenizer().as_published(cleaning=None, closing=False).save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(path.read_text().replace('"medvl_closing": false', f'"medvl_closing": {value}'))
    with raises(ConfigError, "wrong_type", "medvl_closing"):
        load_tokenizer(tmp_path)
