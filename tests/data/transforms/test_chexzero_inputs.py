"""Inputs of CheXzero: the text of a report without an impression, and the image preprocessing of
its code.
"""

import numpy as np
import pytest
import torch

from medvl.data.reports.sections import parse_report
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.text import RandomSection, RandomSentence, WholeText, choose_sections
from medvl.errors import ConfigError

REPORT = """FINAL REPORT
 FINDINGS: Small left effusion.

 IMPRESSION: To be replaced.

 IMPRESSION:  Left effusion, unchanged.

 RECOMMENDATION(S):  CT.

 NOTIFICATION:  By phone.
"""


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize(
    ("missing", "expected"),
    [("other_sections", "Small left effusion."), ("literal", "NO IMPRESSION"), ("no_text", "")],
)
def test_missing_impression_follows_the_policy(missing: str, expected: str) -> None:
    policy = WholeText(sections=("impression",), missing=missing)
    assert policy({"findings": "Small left effusion."}, rng()) == expected
    assert (
        policy({"findings": "Small left effusion.", "impression": "Effusion."}, rng())
        == "Effusion."
    )


def test_policy_applies_only_if_all_sections_are_missing() -> None:
    policy = WholeText(missing="literal")
    assert policy({"impression": "Effusion."}, rng()) == "Effusion."
    assert policy({"caption": "An axial CT."}, rng()) == "NO FINDINGS"


def test_other_sections_are_the_default() -> None:
    assert WholeText(sections=("impression",))({"caption": "An axial CT."}, rng()) == "An axial CT."


def test_short_texts_count_as_none_on_request() -> None:
    policy = WholeText(sections=("impression", "findings"), min_tokens=3)
    assert (
        policy({"impression": "Effusion.", "findings": "Left, small."}, rng())
        == "Effusion. Left, small."
    )
    assert policy({"impression": "No change."}, rng()) == policy({}, rng()) == ""
    assert WholeText()({"impression": "No change."}, rng()) == "No change."


CONTEXT = {
    "indication": "Evaluate for pneumonia.",
    "comparison": "None.",
    "addendum": "Called.",
    "wet_read": "Clear.",
}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (CONTEXT, []),
        (CONTEXT | {"findings": "Clear."}, ["Clear."]),
        (CONTEXT | {"last_paragraph": "Clear.", "note": "Billed."}, ["Clear."]),
        ({"Reason_for_exam": "Pneumonia?", "FINDINGS": "Clear."}, ["Clear."]),
        ({"REASON FOR EXAM": "Pneumonia?", "text": "Clear."}, ["Clear."]),
        ({"caption": "An axial CT.", "reference-1": "Figure 1."}, ["An axial CT.", "Figure 1."]),
    ],
)
def test_missing_sections_are_replaced_only_by_texts_about_the_image(
    sections: dict[str, str], expected: list[str]
) -> None:
    assert choose_sections(sections, ("impression",)) == expected
    assert WholeText(sections=("impression",))(sections, rng()) == " ".join(expected)
    assert RandomSentence(sections=("impression",))(sections, rng()) in [*expected, ""]
    assert RandomSection(min_tokens=1)(sections, rng()) in [*expected, ""]


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="missing must be one of other_sections, literal, no_text, got 'nan'"
    ):
        WholeText(missing="nan")


def test_last_impression_without_recommendation_is_used() -> None:
    policy = WholeText(sections=("impression",), missing="literal")
    assert policy(parse_report(REPORT).sections, rng()) == "Left effusion, unchanged."


@pytest.mark.parametrize("shape", [(320, 400), (500, 320), (320, 320), (64, 90)])
def test_image_is_resized_to_320_then_to_224(shape: tuple[int, int]) -> None:
    """Padded to a square of 320, then bicubic as in CheXzero's code, compared with torch."""
    image_HW = np.kron(
        rng().integers(0, 256, (shape[0] // 4, shape[1] // 4), dtype=np.uint8),
        np.ones((4, 4), np.uint8),
    )
    image_HW = image_HW[: shape[0], : shape[1]]
    stored_HWC = EvalTransform(size=320, fit="pad").build()(image_HW, rng()).image_HWC
    stored_1CHW = torch.from_numpy(stored_HWC).permute(2, 0, 1)[None].float()
    expected = torch.nn.functional.interpolate(stored_1CHW, size=(224, 224), mode="bicubic").clamp(
        0, 255
    )[0, 0]
    read_HWC = (
        EvalTransform(size=224, fit="pad", stored_size=320).build()(image_HW, rng()).image_HWC
    )
    assert read_HWC.shape == (224, 224, 1)
    assert read_HWC.dtype == np.uint8
    difference = np.abs(read_HWC[:, :, 0] - expected.numpy())
    assert difference.max() <= 1  # rounding to grey levels


def test_stored_size_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="image size must be between"):
        EvalTransform(stored_size=8)
