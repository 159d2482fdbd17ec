"""Statements on separate lines, wrapped prose, and joined texts."""

import textwrap

import numpy as np
import pytest
from helpers.list_forms import ITEM_FORMS, NUMBER_FORMS, listed

from medvl.data import label_report
from medvl.data.reports.sections import parse_report
from medvl.data.reports.sentences import join_texts, one_line, split_sentences
from medvl.data.transforms.text import (
    RandomSentence,
    ShuffledSentences,
    SwappedSentences,
    WholeText,
)

TEXTS = ("No pneumothorax", "Small left pleural effusion", "Mild cardiomegaly")
FORMS = (*ITEM_FORMS, *NUMBER_FORMS)


def bare(text: str) -> tuple[str, ...]:
    return tuple(sentence.rstrip(".;,") for sentence in split_sentences(text))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("end", ["", ".", ";", ","])
def test_items_are_sentences(form: str, end: str) -> None:
    for texts in (TEXTS, tuple(text.upper() for text in TEXTS)):
        items = listed(form + end, texts)
        for text in (items, items.replace("\n", "\r\n"), items.replace("\n", "\r")):
            assert bare(text) == texts
            assert label_report(text) == {
                "Cardiomegaly": 1,
                "Pneumothorax": 0,
                "Pleural Effusion": 1,
            }
        stored = parse_report(f"FINDINGS:\n{items}\nIMPRESSION: Normal.").findings or ""
        assert bare(stored) == texts


@pytest.mark.parametrize(
    "form", [form for form in FORMS if form not in ("{n}.{}", "{n}-{}", "{n} {}", "{n})", "({n})")]
)
def test_items_in_small_letters_are_sentences(form: str) -> None:
    texts = tuple(text.lower() for text in TEXTS)
    assert bare(listed(form, texts)) == texts


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("No pneumothorax\nsmall left effusion", ("No pneumothorax", "small left effusion")),
        ("NO PNEUMOTHORAX\nCARDIOMEGALY", ("NO PNEUMOTHORAX", "CARDIOMEGALY")),
        ("no effusion\natelectasis at the left "
         "base", ("no effusion", "atelectasis at the left base")),
        ("Effusion on the left\nNo pneumothorax", ("Effusion on the left", "No pneumothorax")),
        ("Heart:\nEnlarged\nLungs:\nNo "
         "consolidation", ("Heart: Enlarged", "Lungs: No consolidation")),
        ("HEART\nEnlarged\nLUNGS\nClear", ("HEART Enlarged", "LUNGS Clear")),
        ("Heart        enlarged\nLungs        clear", ("Heart enlarged", "Lungs clear")),
        ("Lungs clear.\nHeart normal\nNo "
         "effusion.", ("Lungs clear.", "Heart normal", "No effusion")),
        ("Nodule\n> 3 cm", ("Nodule > 3 cm",)),
        ("+PPD", ("+PPD",)),
        ("13 - 14 mm nodule", ("13 - 14 mm nodule",)),
    ],
)  # fmt: skip
def test_statements_on_lines(text: str, sentences: tuple[str, ...]) -> None:
    assert (
        tuple(
            sentence.rstrip(".") if sentence.endswith("No effusion.") else sentence
            for sentence in split_sentences(text)
        )
        == sentences
    )


@pytest.mark.parametrize(
    "text",
    [
        "There is "
        "no\npneumothorax", "THERE IS "
                            "NO\nPNEUMOTHORAX", "No "
                                                "focal\nconsolidation", "NO FOCAL\nCONSOLIDATION",
        "There is a right\nPICC in "
        "place", "no evidence of pneumonia\nor "
                 "effusion", "Seen by Dr.\nMiller today", "The lungs\nare clear",
        "There is a 3\ncm "
        "nodule", "A nodule measuring\n3 "
                  "cm", "Evidence of left lower lobe\npneumonia", "Tip of the\n___ catheter",
        "compared with the study of\nMarch "
        "2014", "opacity overlying\nthe heart", "Right lower lobe\n(RLL) consolidation",
        "Low lung volumes, otherwise\nno acute "
        "disease", "A Swan-Ganz catheter and left subclavian\nPICC are seen",
        "Right-to-left\nmediastinal shift", "Images were\nreviewed by\n2 readers",
    ],
)  # fmt: skip
def test_wrapped_lines_are_one_sentence(text: str) -> None:
    assert split_sentences(text) == [" ".join(text.split())]
    assert one_line(text) == " ".join(text.split())


PROSE = """The lungs are well expanded. There is no focal consolidation, pleural effusion or pneumothorax. A right PICC line
ends at the cavoatrial junction. The cardiac silhouette is moderately enlarged, and there is mild pulmonary vascular congestion.
Left subclavian Port-A-Cath terminates in the mid SVC. Again seen are small bilateral pleural effusions, left greater than right,
with adjacent atelectasis. Compared with ___, the ET tube has been removed. Old healed fractures of the right 5th and 6th ribs are
noted. There is no free air below the right hemidiaphragm. Findings were discussed with Dr. Smith at 3:00 PM on March 14 by
telephone. No new opacity is seen in the left lung. Heart size is normal and the mediastinal contours are unremarkable. Calcified
granuloma is identified in the right upper lobe measuring 5 mm in diameter."""


@pytest.mark.parametrize("width", range(20, 110, 3))
def test_prose_has_the_same_sentences_at_every_width(width: int) -> None:
    for prose in (PROSE, PROSE.upper(), PROSE.lower()):
        text = " ".join(prose.split())
        wrapped = textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
        assert split_sentences(wrapped) == split_sentences(text)
        assert one_line(wrapped) == text


def test_joined_texts_never_share_a_sentence() -> None:
    sections = {"findings": "Lungs show no consolidation", "impression": "Cardiomegaly"}
    text = join_texts(sections.values())
    assert text == "Lungs show no consolidation. Cardiomegaly"
    assert label_report(text) == {"Cardiomegaly": 1, "Consolidation": 0}
    rng = np.random.default_rng(0)
    assert WholeText()(sections, rng) == text
    for policy in (
        RandomSentence(min_tokens=1),
        SwappedSentences(min_tokens=1),
        ShuffledSentences(),
    ):
        drawn = {sentence for _ in range(20) for sentence in split_sentences(policy(sections, rng))}
        assert drawn == set(sections.values())


@pytest.mark.parametrize(
    "end",
    [
        "",
        ".",
        ",",
        ";",
        ":",
        " ",
        "\n",
        "?",
        "!",
        ".)",
        ' ."',
        " -",
        " 4 cm.",
        " 4 cm",
        " vs.",
        " etc.",
        " Dr.",
        " ___",
    ],
)
@pytest.mark.parametrize(
    "start",
    [
        "Cardiomegaly",
        "cardiomegaly",
        "1. Cardiomegaly",
        "- cardiomegaly",
        "___ cardiomegaly",
        "3 nodules",
    ],
)
@pytest.mark.parametrize("separator", [" ", "\n"])
def test_joined_texts_are_divided_whatever_their_ends(end: str, start: str, separator: str) -> None:
    before = len(split_sentences(f"No consolidation{end}"))
    sentences = split_sentences(join_texts([f"No consolidation{end}", " ", start], separator))
    assert len(sentences) == before + 1
    assert sentences[-1] == start.removeprefix("1. ").removeprefix("- ")


def test_no_text_is_joined_to_nothing() -> None:
    assert join_texts([]) == join_texts(["", " "]) == ""
    assert join_texts(["", "Clear", ""]) == "Clear"
