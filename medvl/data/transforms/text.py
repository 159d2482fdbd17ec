"""Which text of a report a sample is trained with. Each policy is a frozen value; its randomness is handed in."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, get_args

import numpy as np

from medvl.data.reports.sentences import split_sentences
from medvl.errors import ConfigError

_WORD = re.compile(r"\w+")
REPORT_SECTIONS = ("findings", "impression")
Missing = Literal["other_sections", "literal", "no_text"]
"""What stands for a text when none of its sections is there: the report's other sections; the words "NO IMPRESSION", or
whatever the first section is called; or nothing, and losses of pairs leave the sample out (`Batch.has_text_B`)."""


class TextPolicy(Protocol):
    """Chooses a text for one sample."""

    def __call__(self, sections: Mapping[str, str], rng: np.random.Generator) -> str: ...


def choose_sections(sections: Mapping[str, str], wanted: Sequence[str]) -> list[str]:
    """The wanted sections that are there, in the wanted order; all of them where none is.

    The fallback serves captions, tables with columns of their own, and the reports that have neither findings nor
    impression (their last paragraph stands in).
    """
    chosen = [sections[name] for name in wanted if sections.get(name)]
    return chosen or [text for text in sections.values() if text]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RandomSentence:
    """One sentence, drawn uniformly (ConVIRT, section 3; GLoRIA likewise)."""

    min_tokens: int = 3
    """Shorter sentences, counted in words, are left out unless the text has no other."""
    sections: tuple[str, ...] = REPORT_SECTIONS

    def __call__(self, sections: Mapping[str, str], rng: np.random.Generator) -> str:
        texts = choose_sections(sections, self.sections)
        sentences = [sentence for text in texts for sentence in split_sentences(text)]
        long_enough = [sentence for sentence in sentences if len(_WORD.findall(sentence)) >= self.min_tokens]
        candidates = long_enough or sentences
        if not candidates:
            return " ".join(texts)
        return candidates[int(rng.integers(len(candidates)))]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WholeText:
    """The sections joined, nothing drawn: retrieval and validation of whole reports."""

    sections: tuple[str, ...] = REPORT_SECTIONS
    missing: Missing = "other_sections"
    """CheXzero says so: `WholeText(sections=("impression",), missing="literal")`. Every image without an impression has
    then the same text, and they are negatives of each other."""

    def __post_init__(self) -> None:
        if self.missing not in get_args(Missing):
            raise ConfigError(f"missing must be one of {', '.join(get_args(Missing))}, got {self.missing!r}")

    def __call__(self, sections: Mapping[str, str], rng: np.random.Generator) -> str:
        if self.missing == "other_sections" or any(sections.get(name) for name in self.sections):
            return " ".join(choose_sections(sections, self.sections))
        return f"NO {self.sections[0].upper()}" if self.missing == "literal" else ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RandomSection:
    """One section as a whole, drawn uniformly: a figure's caption, or one of the paragraphs that refer to it.

    M3AE makes an item of every (image, text) pair, so that a figure with five references is seen five times an epoch;
    here each figure is seen once, with another text each time.
    """

    min_tokens: int = 3
    """Shorter texts, counted in words, are left out unless the figure has no other (M3AE)."""

    def __call__(self, sections: Mapping[str, str], rng: np.random.Generator) -> str:
        texts = choose_sections(sections, tuple(sections))
        long_enough = [text for text in texts if len(_WORD.findall(text)) >= self.min_tokens]
        candidates = long_enough or texts
        return candidates[int(rng.integers(len(candidates)))] if candidates else ""
