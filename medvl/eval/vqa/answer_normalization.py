"""When are two answers the same? One normaliser of ours, fixed, and those of published systems under their names.

The published ones are kept with their faults, since a number can only be reproduced with the rule that gave it:

* `vqa_v2` (M3AE, METER, LLaVA-Med, after the VQA v2 challenge) drops the words a, an, the anywhere, so "A/P" becomes
  "p" and "vitamin A" becomes "vitamin". Its table of English contractions is left out: no answer of VQA-RAD is in it.
* `mevf` (MEVF, PubMedCLIP) is `vqa_v2` with "x ray" written as one word.
* `mumc` (MUMC, M2I2) deletes punctuation wherever it stands, so "3.5 cm" becomes "35 cm" and "cardiomegaly;edema" one
  word.
* `lower` folds case and trims, `raw` only trims.
"""

import re
import unicodedata
from collections.abc import Callable, Mapping

from medvl.errors import EvaluationError

Normalizer = Callable[[str], str]

NORMALIZER = "medvl-1"
"""The name of `normalize_answer`. Any change to what it does takes a new name."""

_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_DIGITS = {word: str(number) for number, word in enumerate(_NUMBERS)}
_QUOTES = re.compile(r"[\"'`\u2018\u2019\u201c\u201d]")
_DASHES = re.compile(r"[\u2010-\u2015\u2212]")
_X_RAY = re.compile(r"\bx[\s-]*ray(s?)\b")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_POINTS = re.compile(r"(?<!\d)\.(?!\d)|(?<=\d)\.(?!\d)|(?<=[^\W\d])\.(?=\d)")  # all but that of a decimal
_LETTER_PAIR = re.compile(r"\b([^\W\d])-([^\W\d])\b")
_HYPHENS = re.compile(r"(?<!\ba)(?:(?<=[^\W\d])-|-(?=[^\W\d])|-(?!\d))")  # not of ranges, signs, "a-line"
_SEPARATORS = re.compile(r"[,;:!?()\[\]{}_]")
_SLASH = re.compile(r"\s*/\s*")
_ARTICLE = re.compile(r"^(?:a|an|the) (?=\S)")


def normalize_answer(text: str) -> str:
    """The form in which two answers are compared; applying it twice changes nothing.

    Case, white space and the kind of quotes and dashes do not count. "X-ray", "x ray" and "xray" are one word. A hyphen
    is a space ("T2-weighted"), between single letters a slash ("A-P"). Lists are read over their commas and
    semicolons. Decimals (3.5 cm), signs and ranges (3-5) and what stands beside a slash (A/P) stay. An article is
    dropped only where it opens the answer ("the right lung", not "vitamin A"), and a number word becomes a digit only
    where it is the whole answer ("two").
    """
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
    """The normaliser of that name. Raises `EvaluationError` naming those there are."""
    if name not in NORMALIZERS:
        raise EvaluationError(f"no normaliser {name!r}: name one of {', '.join(NORMALIZERS)}")
    return NORMALIZERS[name]
