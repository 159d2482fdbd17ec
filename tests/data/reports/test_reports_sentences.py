"""Sentence splitting and laterality on hand-written cases."""

import pytest
from hypothesis import given, settings, strategies as st

from medvl.data.reports.cleaning import swap_laterality
from medvl.data.reports.sentences import split_sentences

SENTENCES = [
    (
        "Basilar opacity, ? pneumonia. Effusion? No.",
        ["Basilar opacity, ? pneumonia.", "Effusion?", "No."],
    ),
    ("Lungs are clear. No effusion.", ["Lungs are clear.", "No effusion."]),
    ("A 3.2 cm mass. Another of 1.5 x 0.8 cm.", ["A 3.2 cm mass.", "Another of 1.5 x 0.8 cm."]),
    ("It measures 4 cm. No change.", ["It measures 4 cm.", "No change."]),
    ("It measures 4 cm. in length.", ["It measures 4 cm. in length."]),
    (
        "Paged to Dr. ___ at 9:30 a.m. on ___. Lungs clear.",
        ["Paged to Dr. ___ at 9:30 a.m. on ___.", "Lungs clear."],
    ),
    (
        "Reviewed with Dr. A. Miller at 3 p.m. The tube ends",
        ["Reviewed with Dr. A. Miller at 3 p.m.", "The tube ends"],
    ),
    ("History of hepatitis C. No ascites.", ["History of hepatitis C.", "No ascites."]),
    ("Opacity, e.g. pneumonia vs. atelectasis.", ["Opacity, e.g. pneumonia vs. atelectasis."]),
    ("Edema vs. Pneumonia, i.e. Infection.", ["Edema vs. Pneumonia, i.e. Infection."]),
    (
        "Tubes, lines, etc. are gone. Others, etc. The",
        ["Tubes, lines, etc. are gone.", "Others, etc.", "The"],
    ),
    ("Rib no. 7 is broken. There is no. 2.", ["Rib no. 7 is broken.", "There is no. 2."]),
    ("1. Small effusion. 2. No pneumothorax.", ["Small effusion.", "No pneumothorax."]),
    (
        "1. Small effusion 2. No pneumothorax 3. Clear",
        ["Small effusion", "No pneumothorax", "Clear"],
    ),
    ("1.Small effusion. 2.No pneumothorax.", ["Small effusion.", "No pneumothorax."]),
    ("(1) Small effusion. (2) 3 mm nodule.", ["Small effusion.", "3 mm nodule."]),
    ("1) Small effusion\n2) No pneumothorax", ["Small effusion", "No pneumothorax"]),
    ("1. Grade 2 injury. 2. No change", ["Grade 2 injury.", "No change"]),
    ("2.5 cm nodule. 1.2 cm nodule.", ["2.5 cm nodule.", "1.2 cm nodule."]),
    ("- Small effusion\n- No pneumothorax", ["Small effusion", "No pneumothorax"]),
    (
        "Small effusion.No pneumothorax.The heart",
        ["Small effusion.", "No pneumothorax.", "The heart"],
    ),
    (
        "Tip at T4.No pneumothorax. L4.L5 is narrow.",
        ["Tip at T4.", "No pneumothorax.", "L4.L5 is narrow."],
    ),
    ("Removed on ___.No change.", ["Removed on ___.", "No change."]),
    ("___ is compared to ___. ___ year old.", ["___ is compared to ___.", "___ year old."]),
    ("___. XXXX XXXX. 12. Clear XXXX.", ["Clear XXXX."]),
    ("The heart\n is\r\nnormal. No\n effusion.", ["The heart is normal.", "No effusion."]),
    ("No full stop\n\nNew paragraph", ["No full stop", "New paragraph"]),
    ("Pneumonia? Yes! Treat.", ["Pneumonia?", "Yes!", "Treat."]),
    ("Normal.. Clear... Stable.", ["Normal..", "Clear...", "Stable."]),
    ("(Seen on ___.) No change.", ["(Seen on ___.)", "No change."]),
    ("the heart is normal. no effusion.", ["the heart is normal.", "no effusion."]),
    (
        "At 10.30 the U.S. was done. M.D. was told.",
        ["At 10.30 the U.S. was done.", "M.D. was told."],
    ),
    ("J. Smith, M.D. reviewed it.", ["J. Smith, M.D. reviewed it."]),
    ("", []),
    (" \n ", []),
    ("...", []),
    ("1. 2. 3.", []),
]


@pytest.mark.parametrize(("text", "sentences"), SENTENCES)
def test_split_sentences(text, sentences):
    assert split_sentences(text) == sentences


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="aBX1 .\n_-)?", max_size=80))
def test_sentences_keep_characters_in_order(text):
    rest = iter(text)
    assert all(character in rest for character in "".join(split_sentences(text)).replace(" ", ""))


def test_long_runs_split_in_linear_time():
    for text in (
        "a." * 50_000,
        "1. " * 50_000,
        " " * 500_000,
        "-" * 300_000,
        "Dr. " * 50_000,
        "\n" * 300_000,
    ):
        assert len(split_sentences(text)) <= 1


SWAPS = [
    ("Left lower lobe opacity.", "Right lower lobe opacity."),
    (
        "RIGHT effusion, left-sided PICC, leftward shift.",
        "LEFT effusion, right-sided PICC, rightward shift.",
    ),
    ("Small effusions, right greater than left.", "Small effusions, left greater than right."),
    ("RLL and LUL opacities, RML clear, rul.", "LLL and RUL opacities, LML clear, lul."),
    ("RIJ line, LUQ clips, R IJ sheath.", "LIJ line, RUQ clips, L IJ sheath."),
    ("R pleural effusion, L PICC, L > R.", "L pleural effusion, R PICC, R > L."),
    ("R>L, (L), R/L, Lt. lung, rt base", "L>R, (R), L/R, Rt. lung, lt base"),
    (
        "Dextroscoliosis, levocurvature, levo-convex.",
        "Levoscoliosis, dextrocurvature, dextro-convex.",
    ),
    (
        "Right heart border, left cardiac silhouette.",
        "Left heart border, right cardiac silhouette.",
    ),
    ("Left main bronchus; right pulmonary artery.", "Right main bronchus; left pulmonary artery."),
    ("Left of midline; right hemidiaphragm.", "Right of midline; left hemidiaphragm."),
    ("Leads in the right atrium, from the right.", "Leads in the right atrium, from the left."),
]

UNTOUCHED = [
    "Bilateral opacities, biapical scarring.",
    "Left ventricular enlargement, right atrial lead, left and right ventricles.",
    "Left anterior descending stent, left main coronary artery, right bundle branch block.",
    "Left heart failure, left-sided heart failure, right heart strain.",
    "The tube was left in place. She left against medical advice.",
    "Left-to-right shunt.",
    "L5 vertebra, L spine, T12-L1, R. Miller, RT was paged, LAD, RCA, LVH.",
    "Levothyroxine, dextrose, leftover, brightly, upright.",
    "No focal consolidation.",
    "",
]


@pytest.mark.parametrize(("text", "swapped"), SWAPS)
def test_swap_laterality_is_symmetric(text, swapped):
    assert swap_laterality(text) == swapped
    assert swap_laterality(swapped) == text


@pytest.mark.parametrize("text", UNTOUCHED)
def test_swap_laterality_keeps_names(text):
    assert swap_laterality(text) == text


WORDS = [
    "left",
    "right",
    "Left",
    "RIGHT",
    "leftward",
    "right-sided",
    "lt",
    "Rt.",
    "L",
    "R",
    "(L)",
    ">",
    "<",
    "/",
    "RLL",
    "lul",
    "LML",
    "RIJ",
    "LUQ",
    "lung",
    "heart",
    "border",
    "failure",
    "ventricle",
    "atrium",
    "coronary",
    "and",
    "to",
    "shunt",
    "in",
    "place",
    "dextro",
    "levo",
    "scoliosis",
    "dextroscoliosis",
    "levocardia",
    ".",
    ",",
    "-",
    "5",
    "L1",
    "base",
    "sided",
    "main",
    "anterior",
    "descending",
    "PICC",
    "the",
    "of",
    "circumflex",
    "LEft",
]


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=14), st.sampled_from([" ", "", "-", ". "]))
def test_swap_laterality_twice_is_the_identity(words, glue):
    text = glue.join(words)
    assert swap_laterality(swap_laterality(text)) == text


def test_superscript_digits_are_not_list_numbers() -> None:
    assert split_sentences("1. Clear lungs ². No effusion.") == ["Clear lungs ².", "No effusion."]
