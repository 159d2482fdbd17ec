"""Texts by organ, and whether they state that all is normal."""

import pytest

from medvl.data.reports.organs import is_normal, organ_texts, organs_named, template_of


@pytest.mark.parametrize(
    ("text", "organs", "normal"),
    [
        ("There is a pericardial effusion.", ("heart",), False),
        ("Pericardial effusion-thickening was not observed.", ("heart",), True),
        ("No pleural effusion, pneumothorax or consolidation.", ("lung",), True),
        ("Mass, nodule and infiltration were not detected in both lungs.", ("lung",), True),
        ("Nodule in the right lung, effusion is not observed.", ("lung",), False),
        ("No effusion is seen, nodule in the right lung is present.", ("lung",), False),
        ("Lungs are clear but a 5 mm nodule is seen.", ("lung",), False),
        ("The heart is enlarged without effusion.", ("heart",), False),
        ("Heart contour and size are normal.", ("heart",), True),
        ("Calcified plaques are seen in the wall of the aorta.", ("aorta",), False),
        ("Hiatal hernia.", ("esophagus",), False),
        ("Not Nodule.", ("lung",), True),
        ("Pulmonary artery diameter is normal.", (), True),
        ("Status post CABG.", (), False),
        ("", (), False),
    ],
)
def test_organ_and_normality_of_a_sentence(
    text: str, organs: tuple[str, ...], normal: bool
) -> None:
    assert organs_named(text) == organs
    assert is_normal(text) == normal


def test_a_report_is_parted_by_organ() -> None:
    found = organ_texts(
        {
            "findings": "The heart is enlarged. No nodule is seen. The aorta is normal.",
            "impression": "The heart is enlarged.",
            "technique": "The lung window shows a nodule.",
        }
    )
    assert found == {
        "heart": {
            "conclusion": "The heart is enlarged.",
            "description": "The heart is enlarged.",
            "normal": False,
        },
        "lung": {"description": "No nodule is seen.", "normal": True},
        "aorta": {"description": "The aorta is normal.", "normal": True},
    }


def test_normality_is_what_the_text_states_and_not_its_beginning() -> None:
    opening = template_of("lung")
    given = {"description": {"lung": f"{opening} A nodule is seen.", "heart": opening}}
    found = organ_texts({"findings": "The aorta is dilated."}, given)
    assert not found["lung"]["normal"]
    assert found["heart"]["normal"]
    assert "aorta" not in found, "the file is in place of the findings"
    stated = {"conclusion": {"lung": {"text": "A nodule is seen.", "normal": True}}}
    assert organ_texts({}, stated)["lung"]["normal"], "a flag of the file counts"
