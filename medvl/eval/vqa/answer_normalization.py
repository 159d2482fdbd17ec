"""Answer normalization: medvl's normalizer and those of published systems, by name.

The published ones keep their faults, because a number can only be reproduced with its own rule:

* `vqa_v2` (M3AE, METER, M2I2, LLaVA-Med, after the VQA v2 challenge) removes the words a, an, the anywhere, so "A/P"
  becomes "p" and "vitamin A" becomes "vitamin". Its table of English contractions is omitted: no answer of VQA-RAD is
  in it.
* `mevf` (MEVF, PubMedCLIP) is `vqa_v2` with "x ray" written as one word. M2I2 trains with these answers, too.
* `mumc` (MUMC) deletes all punctuation, so "3.5 cm" becomes "35 cm" and "cardiomegaly;edema" one word. The released
  rule keeps blanks at both ends, which are removed here.
* `lower` lowercases and strips, `raw` only strips.
"""

import re
import unicodedata
from collections.abc import Callable, Mapping

from medvl.common.checks import check_choice
from medvl.errors import EvaluationError

Normalizer = Callable[[str], str]

NORMALIZER = "medvl-2"
"""Name of `normalize_answer`; any change of its behavior requires a new name."""

_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_DIGITS = {word: str(number) for number, word in enumerate(_NUMBERS)}
_QUOTES = re.compile(r"[\"'`\u2018\u2019\u201c\u201d]")
_DASHES = re.compile(r"[\u2010-\u2015\u2212]")
_X_RAY = re.compile(r"\bx[\s-]*ray(s?)\b")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_POINTS = re.compile(r"(?<!\d)\.(?!\d)|(?<=\d)\.(?!\d)|(?<=[^\W\d])\.(?=\d)")  # all except decimal points
_LETTER_PAIR = re.compile(r"\b([^\W\d])-([^\W\d])\b")
_HYPHENS = re.compile(r"(?<!\ba)(?:(?<=[^\W\d])-|-(?=[^\W\d])|-(?!\d))")  # except in ranges, signs, "a-line"
_SEPARATORS = re.compile(r"[,;:!?()\[\]{}_]")
_SLASH = re.compile(r"\s*/\s*")
_ARTICLE = re.compile(r"^(?:a|an|the) (?=\S)")


def normalize_answer(text: str) -> str:
    """Return the normalized form in which answers are compared. The function is idempotent.

    Case, white space and the style of quotes and dashes are ignored. "X-ray", "x ray" and "xray" are equal. A hyphen
    becomes a space ("T2-weighted"), between single letters a slash ("A-P"). Commas and semicolons of lists become
    spaces. Decimals (3.5 cm), signs, ranges (3-5) and slashes (A/P) are kept. An article is removed only at the start
    ("the right lung", not "vitamin A"), and a number word becomes a digit only if it is the complete answer ("two").
    """
    while (normalized := _apply_rules(text)) != text:  # a rule may make room for an earlier one: "a..0", "a-p-l"
        text = normalized
    return text


def _apply_rules(text: str) -> str:
    """Return the text after one pass of all rules."""
    text = unicodedata.normalize("NFKC", text).lower()
    text = _DASHES.sub("-", _QUOTES.sub("", text))
    text = _X_RAY.sub(r"x ray\1", text)
    text = _POINTS.sub("", _THOUSANDS.sub("", text))
    text = _HYPHENS.sub(" ", _LETTER_PAIR.sub(r"\1/\2", text))
    text = _SLASH.sub("/", _SEPARATORS.sub(" ", text))
    text = " ".join(text.split())
    while (shorter := _ARTICLE.sub("", text)) != text:
        text = shorter
    return _DIGITS.get(text, text)


_SPACED = ';/[]"{}()=+\\_-><@`,?!'
_DIGIT_COMMA = re.compile(r"\d,\d")
_POINT = re.compile(r"\.(?!\d)")
_VQA_WORDS = {**_DIGITS, "none": "0"}
_MUMC_DELETED = re.compile(r"[,.'!?\"()*#:;~]")


def _vqa_v2(text: str) -> str:
    before = text
    for mark in _SPACED:
        beside_space = f"{mark} " in before or f" {mark}" in before
        text = text.replace(mark, "" if beside_space or _DIGIT_COMMA.search(before) else " ")
    words = [_VQA_WORDS.get(word, word) for word in _POINT.sub("", text).lower().split()]
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def _mevf(text: str) -> str:
    return _vqa_v2(text).replace("x ray", "xray")


def _mumc(text: str) -> str:
    text = _MUMC_DELETED.sub("", text.lower())
    return text.replace("x ray", "xray").replace("x-ray", "xray").replace(" - ", "-").strip()


NORMALIZERS: Mapping[str, Normalizer] = {
    NORMALIZER: normalize_answer,
    "raw": str.strip,
    "lower": lambda text: text.strip().lower(),
    "vqa_v2": _vqa_v2,
    "mevf": _mevf,
    "mumc": _mumc,
}


def get_normalizer(name: str) -> Normalizer:
    """Return the normalizer of that name. Raises `EvaluationError` if there is none."""
    check_choice(name, NORMALIZERS, "normalizer", error=EvaluationError)
    return NORMALIZERS[name]
