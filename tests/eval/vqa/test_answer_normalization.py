"""medvl's answer normalizer and those of published systems."""

import pytest
from hypothesis import example, given, strategies as st

import medvl
from medvl.eval import normalize_answer
from medvl.eval.vqa.protocol import NORMALIZERS


@pytest.mark.parametrize(
    ("text", "medvl_1", "vqa_v2", "mevf", "mumc"),
    [
        ("X-ray", "x ray", "x ray", "xray", "xray"),
        ("x ray", "x ray", "x ray", "xray", "xray"),
        ("the right lung", "right lung", "right lung", "right lung", "the right lung"),
        ("T2-weighted", "t2 weighted", "t2 weighted", "t2 weighted", "t2-weighted"),
        ("3.5 cm", "3.5 cm", "3.5 cm", "3.5 cm", "35 cm"),
        ("A/P", "a/p", "p", "p", "a/p"),
        ("one", "1", "1", "1", "one"),
        ("Two", "2", "2", "2", "two"),
        (
            "cardiomegaly;edema",
            "cardiomegaly edema",
            "cardiomegaly edema",
            "cardiomegaly edema",
            "cardiomegalyedema",
        ),
        ("vitamin A", "vitamin a", "vitamin", "vitamin", "vitamin a"),
    ],
)
def test_normalizers_give_known_outputs(text, medvl_1, vqa_v2, mevf, mumc):
    assert normalize_answer(text) == medvl_1
    assert (NORMALIZERS["vqa_v2"](text), NORMALIZERS["mevf"](text), NORMALIZERS["mumc"](text)) == (
        vqa_v2,
        mevf,
        mumc,
    )


@pytest.mark.parametrize(
    "same",
    [
        ("xray", "X-Ray", "x  ray", " X ray."),
        ("Crohn's disease", "crohn\u2019s disease", "Crohns disease"),
        (
            "right lower lobe",
            "Right-lower lobe",
            "the right lower lobe",
            "right\nlower lobe",
            "right lower lobe.",
        ),
        ("left, right", "left; right", "left right"),
        ("A/P", "a / p", "A-P"),
        ("3-5 cm", "3\u20135 cm"),
        ("1,000", "1000"),
        ("p.a.", "PA"),
        ("Yes", "yes", "YES ", "yes!"),
    ],
)
def test_normalize_answer_merges_equivalent_answers(same):
    assert len({normalize_answer(text) for text in same}) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [("3.5 "
      "cm", "35 "
            "cm"), ("AP", "P"), ("vitamin "
                                 "A", "vitamin"), ("-3", "3"), ("3-5 cm", "35 cm"), ("a-p", "p"),
     ("T1", "T2"), ("left", "left and right"), ("1.0", "10"), ("a-line", "line")],
)  # fmt: skip
def test_normalize_answer_keeps_different_answers_distinct(one, other):
    assert normalize_answer(one) != normalize_answer(other)


@example("A..0")
@example("a-p-l")
@given(st.text(alphabet="aAbx thean-ry.,;:/'()T2 3510%\u2013\u2019", max_size=30))
def test_normalize_answer_is_idempotent(text):
    once = normalize_answer(text)
    assert normalize_answer(once) == once
    assert once == once.strip().lower()


def test_normalize_answer_is_public():
    assert medvl.eval.normalize_answer is normalize_answer
