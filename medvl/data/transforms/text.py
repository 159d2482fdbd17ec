"""Text policies: choice of the part of a report for training, drawn with the generator of the sample."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, get_args, runtime_checkable

import numpy as np

from medvl.common.checks import check_choice, check_within
from medvl.data.reports.headings import CONTEXT_SECTIONS, DESCRIPTIVE_SECTIONS, section_name
from medvl.data.reports.sentences import join_texts, split_sentences

_WORD = re.compile(r"\w+")
REPORT_SECTIONS = ("findings", "impression")
Missing = Literal["other_sections", "literal", "no_text"]
"""Replacement for a text whose sections are all missing: the other sections that describe the image
(`choose_sections`); the literal "NO IMPRESSION" (with the name of the first section); or no text, so that pair losses
leave the sample out (`Batch.has_text_B`)."""


class TextPolicy(Protocol):
    """Function that returns the text of a sample."""

    def __call__(self, sections: Mapping[str, str], rng: np.random.Generator) -> str: ...


@runtime_checkable
class PairPolicy(Protocol):
    """Text policy that also chooses the second text (`Inputs.second_text`); with other policies it is a second draw."""

    def __call__(self, sections: Mapping[str, str], rng: np.random.Generator) -> str: ...

    def other(self, sections: Mapping[str, str], text: str, rng: np.random.Generator) -> str:
        """Return the second text of a sample whose first text is `text`; empty if there is none."""


def choose_sections(sections: Mapping[str, str], names: Sequence[str]) -> list[str]:
    """Return the texts of the sections `names` that exist, in this order, or else those that describe the image.

    Of a report these are findings, impression and the last paragraph (of reports with neither), but no indication,
    history, comparison or addendum: "evaluate for pneumonia" is a question, not a description. Of captions and tables
    with other columns, these are all texts. The result may be empty.
    """
    chosen = [sections[name] for name in names if sections.get(name)]
    if chosen:
        return chosen
    texts = [(section_name(name), text) for name, text in sections.items() if text]
    chosen = [text for wanted in names for name, text in texts if name == wanted]
    if chosen:
        return chosen  # columns such as "section_findings"
    described = [text for name, text in texts if name in DESCRIPTIVE_SECTIONS]
    return described or [text for name, text in texts if name not in CONTEXT_SECTIONS]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RandomSentence:
    """One sentence, drawn uniformly (ConVIRT, section 3; also GLoRIA)."""

    min_tokens: int = 3
    """Shorter sentences, in words, are left out unless the text has no other."""
    sections: tuple[str, ...] = REPORT_SECTIONS

    def __call__(self, sections: Mapping[str, str], rng: np.random.Generator) -> str:
        texts = choose_sections(sections, self.sections)
        candidates = _sentences(texts, self.min_tokens)
        if not candidates:
            return join_texts(texts)
        return candidates[int(rng.integers(len(candidates)))]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SwappedSentences:
    """All sentences in a partly shuffled order (LoVT, arXiv 2112.02889, appendix, and its released code).

    Sentences are divided by blank lines, so that `Batch.sentence_BT` has the same sentences in the new order.
    """

    min_tokens: int = 3
    """Shorter sentences, in words, are left out unless the text has no other."""
    sections: tuple[str, ...] = REPORT_SECTIONS
    swap_probability: float = 0.6
    """Probability of swapping two random sentences, and after each swap of swapping again; 0 keeps the order."""

    def __post_init__(self) -> None:
        check_within(self, "[0, 1)", "swap_probability")

    def __call__(self, sections: Mapping[str, str], rng: np.random.Generator) -> str:
        texts = choose_sections(sections, self.sections)
        sentences = _sentences(texts, self.min_tokens)
        if not sentences:
            return join_texts(texts)
        for _ in range(int(rng.geometric(1 - self.swap_probability)) - 1):
            a, b = rng.integers(len(sentences), size=2).tolist()
            sentences[a], sentences[b] = sentences[b], sentences[a]
        return "\n\n".join(sentences)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShuffledSentences:
    """Some of the sentences in random order, their number drawn uniformly from 1 to all (MaCo, arXiv 2309.05904).

    Sentences are divided by blank lines.
    """

    sections: tuple[str, ...] = REPORT_SECTIONS

    def __call__(self, sections: Mapping[str, str], rng: np.random.Generator) -> str:
        texts = choose_sections(sections, self.sections)
        sentences = _sentences(texts, min_tokens=1)
        if not sentences:
            return join_texts(texts)
        kept = rng.permutation(len(sentences))[: rng.integers(1, len(sentences) + 1)]
        return "\n\n".join(sentences[place] for place in kept.tolist())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WholeText:
    """The joined sections, without randomness, for retrieval and validation with whole reports."""

    sections: tuple[str, ...] = REPORT_SECTIONS
    missing: Missing = "other_sections"
    """CheXzero uses `WholeText(sections=("impression",), missing="literal")`: all images without an impression have the
    same text and are negatives of each other."""
    min_tokens: int = 0
    """Texts of fewer words count as no text, so that pair losses leave the sample out (3 in MGCA)."""

    def __post_init__(self) -> None:
        check_choice(self.missing, get_args(Missing), "missing")

    def __call__(self, sections: Mapping[str, str], rng: np.random.Generator) -> str:
        if self.missing == "other_sections" or any(sections.get(name) for name in self.sections):
            text = join_texts(choose_sections(sections, self.sections))
            return text if len(_WORD.findall(text)) >= self.min_tokens else ""
        return f"NO {self.sections[0].upper()}" if self.missing == "literal" else ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RandomSection:
    """One whole section about the image, drawn uniformly: a figure's caption, or a paragraph that refers to it.

    In M3AE every (image, text) pair is an item, so a figure with five references occurs five times per epoch; here each
    figure occurs once, with a new draw in each epoch.
    """

    min_tokens: int = 3
    """Shorter texts, in words, are left out unless the figure has no other (M3AE)."""

    def __call__(self, sections: Mapping[str, str], rng: np.random.Generator) -> str:
        texts = choose_sections(sections, ())
        long_enough = [text for text in texts if len(_WORD.findall(text)) >= self.min_tokens]
        candidates = long_enough or texts
        return candidates[int(rng.integers(len(candidates)))] if candidates else ""


def _sentences(texts: Sequence[str], min_tokens: int) -> list[str]:
    """Return the sentences with at least `min_tokens` words, or all sentences if there are none."""
    sentences = [sentence for text in texts for sentence in split_sentences(text)]
    return [sentence for sentence in sentences if len(_WORD.findall(sentence)) >= min_tokens] or sentences


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TextPair:
    """Two texts of a sample, each with its own policy, such as impression and findings: the text, and
    `Inputs.second_text`.

    A second text that is equal to the first counts as absent (`Batch.has_second_text_B`).
    """

    first: WholeText | RandomSentence | RandomSection
    second: WholeText | RandomSentence | RandomSection

    def __call__(self, sections: Mapping[str, str], rng: np.random.Generator) -> str:
        return self.first(sections, rng)

    def other(self, sections: Mapping[str, str], text: str, rng: np.random.Generator) -> str:
        """See `PairPolicy`."""
        second = self.second(sections, rng)
        return "" if second == text else second
