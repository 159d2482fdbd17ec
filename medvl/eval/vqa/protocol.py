"""Protocols of VQA evaluations by name: medvl's, and those of published numbers, each with its
flaw.

`mumc` is the evaluator that MUMC's authors released in 2023, with their paper; `mumc_2024` is a
later one of theirs, which compares whole answers.

A protocol defines the normalizer, the source of the answer vocabulary, which questions are
included, what closed means and when an answer is right. Every included question stays in the
denominator: one whose answer is not in the vocabulary, or that has no prediction, is wrong.
"""

import dataclasses
import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from medvl.common.config_io import check_choice
from medvl.data.annotations import Question
from medvl.errors import EvaluationError

# Answer normalization: medvl's normalizer and those of published systems, by name.
#
# The published ones keep their faults, because a number can only be reproduced with its own rule:
#
# * `vqa_v2` (M3AE, METER, M2I2, LLaVA-Med, after the VQA v2 challenge) removes the words a, an,
#   the anywhere, so "A/P"
#   becomes "p" and "vitamin A" becomes "vitamin". Its table of English contractions is omitted:
#   no answer of VQA-RAD is
#   in it.
# * `mevf` (MEVF, PubMedCLIP) is `vqa_v2` with "x ray" written as one word. M2I2 trains with these
#   answers, too.
# * `mumc` (MUMC) deletes all punctuation, so "3.5 cm" becomes "35 cm" and "cardiomegaly;edema"
#   one word. The released
#   rule keeps blanks at both ends, which are removed here.
# * `lower` lowercases and strips, `raw` only strips.

Normalizer = Callable[[str], str]

NORMALIZER = "medvl-2"
"""Name of `normalize_answer`; any change of its behavior requires a new name."""

_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_DIGITS = {word: str(number) for number, word in enumerate(_NUMBERS)}
_QUOTES = re.compile(r"[\"'`\u2018\u2019\u201c\u201d]")
_DASHES = re.compile(r"[\u2010-\u2015\u2212]")
_X_RAY = re.compile(r"\bx[\s-]*ray(s?)\b")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_POINTS = re.compile(
    r"(?<!\d)\.(?!\d)|(?<=\d)\.(?!\d)|(?<=[^\W\d])\.(?=\d)"
)  # all except decimal points
_LETTER_PAIR = re.compile(r"\b([^\W\d])-([^\W\d])\b")
_HYPHENS = re.compile(
    r"(?<!\ba)(?:(?<=[^\W\d])-|-(?=[^\W\d])|-(?!\d))"
)  # except in ranges, signs, "a-line"
_SEPARATORS = re.compile(r"[,;:!?()\[\]{}_]")
_SLASH = re.compile(r"\s*/\s*")
_ARTICLE = re.compile(r"^(?:a|an|the) (?=\S)")


def normalize_answer(text: str) -> str:
    """Return the normalized form in which answers are compared. The function is idempotent.

    Case, white space and the style of quotes and dashes are ignored. "X-ray", "x ray" and "xray"
    are equal. A hyphen becomes a space ("T2-weighted"), between single letters a slash ("A-P").
    Commas and semicolons of lists become spaces. Decimals (3.5 cm), signs, ranges (3-5) and slashes
    (A/P) are kept. An article is removed only at the start ("the right lung", not "vitamin A"), and
    a number word becomes a digit only if it is the complete answer ("two").
    """
    while (
        normalized := _apply_rules(text)
    ) != text:  # a rule may make room for an earlier one: "a..0", "a-p-l"
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


Closed = Literal["field", "yes_no", "predicted"]
Match = Literal["exact", "any_of", "part_of", "llava_med"]
PROTOCOL = "medvl"
"""Protocol of comparable numbers."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VQAProtocol:
    """Rules of a VQA evaluation."""

    name: str
    version: int = 1
    normalizer: str = NORMALIZER
    vocabulary: tuple[str, ...] = ("train",)
    """Splits whose answers form a classifier's vocabulary; empty for models that generate
    answers.
    """
    phrasing: tuple[str, ...] = ()
    """Phrasings of the included questions of VQA-RAD (freeform, para, frame); empty includes all.
    Other corpora have no phrasings, and all of their questions are included.
    """
    closed: Closed = "field"
    """A question is closed by the dataset's field, if its answer is yes or no, or as predicted
    by the model.
    """
    match: Match = "exact"
    """Equal after normalization; equal to any alternative (VQA-Med 2019: separated by `#`, with
    optional parts in brackets); equal to the right answer or to a part of it (MUMC in 2023); or as
    in LLaVA-Med v1.0.
    """
    flaw: str = ""
    """Why its numbers are not comparable; empty for comparable ones."""

    def __post_init__(self) -> None:
        get_normalizer(self.normalizer)

    def normalize(self, answer: str) -> str:
        """Return an answer in normalized form."""
        return NORMALIZERS[self.normalizer](answer)

    def includes(self, question: Question) -> bool:
        """Return whether the question is in the denominator."""
        has_phrasing = question.phrasing in _RAD_PHRASINGS
        return not (self.phrasing and has_phrasing) or question.phrasing in self.phrasing

    def is_closed(self, question: Question, predicted_type: str | None = None) -> bool:
        """Return whether the question is closed. Raises EvaluationError if a required predicted
        type is missing.
        """
        if self.closed == "yes_no":
            return self.normalize(question.answer) in ("yes", "no")
        if self.closed == "predicted":
            if predicted_type not in ("closed", "open"):
                message = (
                    f"protocol {self.name} uses predicted answer types: expected closed or open "
                    f"for question "
                    f"{question.id}, got {predicted_type!r}"
                )
                raise EvaluationError(message, "missing", field="answer_type")
            return predicted_type == "closed"
        return question.answer_type == "closed"

    def accepted(self, question: Question) -> set[str]:
        """Return the right answers, normalized; several if the protocol allows alternatives,
        none if it is empty.
        """
        answers = {question.answer}
        if self.match == "any_of":
            alternatives = question.answer.split("#")
            answers = {*alternatives, *(_BRACKETS.sub(" ", answer) for answer in alternatives)}
        return {self.normalize(answer) for answer in answers} - {""}

    def credit(self, answer: str, question: Question) -> float:
        """Return the credit of an answer, 0 to 1; 0 for a question whose reference answer is
        empty.
        """
        normalized = self.normalize(answer)
        accepted = self.accepted(question)
        if self.match == "llava_med" and accepted:
            return _llava_med(normalized, min(accepted), question.answer_type)
        if self.match == "part_of":
            return float(any(normalized in right for right in accepted))
        return float(normalized in accepted)

    def credits(
        self, questions: Sequence[Question], answers: Mapping[str, str]
    ) -> NDArray[np.float64]:
        """Return the credit of the answer to each question (N,); 0 without an answer.

        `answers` are those of a system, by question id.
        """
        return np.array(
            [
                self.credit(answers[question.id], question) if question.id in answers else 0.0
                for question in questions
            ]
        )

    def highest_credits(
        self, questions: Sequence[Question], known: Collection[str] | None
    ) -> NDArray[np.float64]:
        """Return the highest credit of any known answer to each question (N,); of any answer
        where `known` is None.
        """
        credits = []
        for question in questions:
            right = self.accepted(question)
            if known is not None and self.match == "part_of":
                credits.append(float(any(answer in one for one in right for answer in known)))
                continue
            possible = right if known is None else right.intersection(known)
            credits.append(max((self.credit(answer, question) for answer in possible), default=0.0))
        return np.array(credits)

    def closed_questions(
        self, questions: Sequence[Question], predicted_types: Mapping[str, str | None]
    ) -> NDArray[np.bool_]:
        """Return which questions are closed (N,). Without a predicted answer type, by question id,
        the dataset's field is used.
        """
        return np.array(
            [
                self.is_closed(question, predicted_types.get(question.id, question.answer_type))
                for question in questions
            ],
            np.bool_,
        )

    def with_leak(self, leaked: Sequence[str], split: str) -> "VQAProtocol":
        """Return the protocol with a flaw that states the answers that a vocabulary has from the
        evaluated split.
        """
        if not leaked:
            return self
        flaw = (
            f"the model's vocabulary has {len(leaked)} answers of {split} that no other split "
            f"has, such as {leaked[0]!r}"
        )
        return dataclasses.replace(self, flaw="; ".join(filter(None, (self.flaw, flaw))))

    def check_answer_types(self) -> None:
        """Raise EvaluationError if the protocol needs predicted answer types: models of medvl do
        not predict them.
        """
        if self.closed == "predicted":
            message = (
                f"protocol {self.name} needs a predicted answer type of each question, "
                f"and the model predicts none"
            )
            raise EvaluationError(
                f"{message}; choose another protocol", "unsupported", field="protocol"
            )


_BRACKETS = re.compile(r"\([^()]*\)")
_RAD_PHRASINGS = ("freeform", "para", "frame")


def _llava_med(answer: str, right: str, answer_type: str) -> float:
    """Return the credit of an answer as in LLaVA-Med v1.0's `run_eval.py` and
    `evaluate_metrics.py`.

    Closed: 1 if the output contains "yes" or "no", and the right answer; the released script leaves
    a wrong answer with "yes" or "no" out of its denominator, and here it stays. Open: recall of the
    right words; a shared word counts by its occurrences in the output, and a missed one by its
    occurrences in the right answer.
    """
    if answer_type == "closed":
        return float(("yes" in answer or "no" in answer) and right in answer)
    given = answer.split()
    words = right.split()
    hits = sum(word in words for word in given)
    missed = sum(word not in given for word in words)
    return hits / (hits + missed)


_EVERY_SPLIT = ("train", "validate", "test")

_ALL = (
    VQAProtocol(name=PROTOCOL),
    VQAProtocol(name="vqa_med_2019", match="any_of"),
    VQAProtocol(
        name="m3ae",
        normalizer="vqa_v2",
        vocabulary=_EVERY_SPLIT,
        flaw="test answers are in the vocabulary",
    ),
    VQAProtocol(
        name="mevf",
        normalizer="mevf",
        phrasing=("freeform",),
        flaw="includes freeform questions only",
    ),
    VQAProtocol(
        name="pubmedclip",
        normalizer="mevf",
        vocabulary=("train", "test"),
        closed="predicted",
        flaw="test answers are in the vocabulary; questions are closed or open as the model "
        "predicts",
    ),
    VQAProtocol(
        name="mumc",
        version=2,
        normalizer="mumc",
        vocabulary=_EVERY_SPLIT,
        match="part_of",
        flaw='test answers are in the vocabulary; part of the right answer is enough ("no" for '
        '"normal"), and so is an '
        "empty answer; the normalizer joins lists and removes decimal points",
    ),
    VQAProtocol(
        name="mumc_2024",
        normalizer="mumc",
        vocabulary=_EVERY_SPLIT,
        flaw="test answers are in the vocabulary; the normalizer joins lists and removes "
        "decimal points",
    ),
    VQAProtocol(
        name="m2i2",
        version=2,
        normalizer="vqa_v2",
        vocabulary=_EVERY_SPLIT,
        phrasing=("freeform",),
        flaw="test answers are in the vocabulary; includes freeform questions only",
    ),
    VQAProtocol(
        name="yes_no",
        closed="yes_no",
        flaw="counts closed questions with answers other than yes and no as open",
    ),
    VQAProtocol(
        name="llava_med",
        normalizer="vqa_v2",
        vocabulary=(),
        match="llava_med",
        flaw='closed: substrings count ("normal" contains "no"); open: token recall, which '
        "favors long outputs",
    ),
)
PROTOCOLS: Mapping[str, VQAProtocol] = {protocol.name: protocol for protocol in _ALL}
PUBLISHED_PROTOCOLS = tuple(protocol.name for protocol in _ALL if protocol.flaw)
"""Protocols for reproducing published numbers."""


def get_protocol(name: str) -> VQAProtocol:
    """Return the protocol of that name. Raises `EvaluationError` if there is none."""
    check_choice(name, PROTOCOLS, "protocol", error=EvaluationError)
    return PROTOCOLS[name]


# Answer vocabulary of a classifier.


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerVocabulary:
    """Normalized answers by decreasing frequency; ties in alphabetical order."""

    answers: tuple[str, ...]
    normalizer: str
    splits: tuple[str, ...]
    """Splits that the answers come from; empty for those of a model, which has no record of
    them.
    """

    @classmethod
    def build(
        cls, questions: Iterable[Question], protocol: VQAProtocol, *, min_count: int = 1
    ) -> "AnswerVocabulary":
        """Build the vocabulary from the splits that the protocol names, by default train alone.

        `splits` are those of them that have questions.

        Raises EvaluationError if they have no answer, or the protocol names none because answers
        are generated.
        """
        if not protocol.vocabulary:
            message = f"protocol {protocol.name} has no vocabulary, because answers are generated"
            raise EvaluationError(
                f"{message}; choose another protocol", "unsupported", field="protocol"
            )
        subset = [question for question in questions if question.split in protocol.vocabulary]
        counts = Counter(protocol.normalize(question.answer) for question in subset)
        counts.pop("", None)
        kept = [answer for answer, count in counts.items() if count >= min_count]
        if not kept:
            raise EvaluationError(
                f"{', '.join(protocol.vocabulary)} has no answers for a vocabulary", "empty"
            )
        answers = sorted(kept, key=lambda answer: (-counts[answer], answer))
        split_names = {question.split for question in subset}
        splits = tuple(split for split in protocol.vocabulary if split in split_names)
        return cls(tuple(answers), protocol.normalizer, splits)

    @classmethod
    def of_model(cls, answers: Iterable[str], protocol: VQAProtocol) -> "AnswerVocabulary":
        """Return the answers of a model, in its order, as the protocol compares them."""
        normalized = dict.fromkeys(map(protocol.normalize, answers))
        return cls(tuple(answer for answer in normalized if answer), protocol.normalizer, ())

    def leaked(
        self, questions: Iterable[Question], split: str, protocol: VQAProtocol
    ) -> tuple[str, ...]:
        """Return the answers that are right for a question of a split and for none of the other
        splits.
        """
        evaluated: set[str] = set()
        others: set[str] = set()
        for question in questions:
            (evaluated if question.split == split else others).update(protocol.accepted(question))
        return tuple(answer for answer in self.answers if answer in evaluated - others)

    def __len__(self) -> int:
        return len(self.answers)

    def index(self) -> dict[str, int]:
        """Return normalized answer -> class."""
        return {answer: number for number, answer in enumerate(self.answers)}

    @property
    def fingerprint(self) -> str:
        """Return the sha256 of the answers in order."""
        return hashlib.sha256(json.dumps(self.answers).encode()).hexdigest()
