"""The screen for identifiers in texts: what counts as which kind, and its time."""

import time

import pytest

from medvl.data.privacy import CODES, find_identifiers, free_texts


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("Mr. Smith, 97 year old, seen 14-Mar-2015.", {"name": 1, "age": 1, "date": 1}),
        ("SSN 123-45-6789, pager 12345, accession CR15-00123.", {"number": 2, "phone": 1}),
        ("Lungs are clear.\nJohn Smith, MD", {"name": 1}),
        (
            "Device serial number 12345 at 12 Main Street, Boston, MA 02139.",
            {"number": 1, "address": 2},
        ),
        ("Discussed with Dr. Chen at Mayo Clinic, room 312.", {"doctor": 1, "place": 2}),
        ("Mail js@hospital.org, www.hospital.org, 10.1.2.3.", {"email": 1, "url": 2}),
        ("An age of 89, a line to T8, 3/4 of the lung, 5-6 mm, in 2015.", {}),
    ],
)
def test_kinds(text: str, counts: dict[str, int]) -> None:
    assert find_identifiers(text) == counts


@pytest.mark.parametrize(
    "part", ["A", "A ", "a.", "1", "1.", "1-", "Aa ", "A.B.", "dr. ", "12 Main ", "x" * 40 + " ", "Smith, ", "(1", "+1 2", "\n"]
)  # fmt: skip
def test_the_time_is_linear(part: str) -> None:
    def seconds(length: int) -> float:
        text = part * (length // len(part))
        start = time.process_time()
        find_identifiers(text)
        return time.process_time() - start

    assert seconds(40_000) < 25 * seconds(4_000) + 0.1


def test_free_texts_of_extra_fields_are_the_words_and_numbers_without_codes() -> None:
    extra = {
        "note": "a",
        "list": ["b", {"c": 12345678}],
        "flag": True,
        "score": 0.5,
        "nothing": None,
    }
    extra |= dict.fromkeys(CODES, "C0032285")
    assert list(free_texts(extra)) == ["a", "b", "12345678"]
    assert list(free_texts({"id": "2" * 20})) == [], "a hash that has digits alone"
    assert list(free_texts({"id": "2" * 16})) == ["2" * 16]
