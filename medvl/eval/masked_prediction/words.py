"""Words that are hidden in report sentences, by kind."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from medvl.data.reports.sentences import split_sentences
from medvl.data.transforms.text import choose_sections
from medvl.schema import Sample

_WORDS: Mapping[str, str] = {
    "finding": (
        "effusions? pneumothora(?:x|ces) o?edema consolidations? atelecta(?:sis|ses) cardiomegaly opacit(?:y|ies) "
        "opacifications? pneumonias? fractures? nodules? mass(?:es)? lesions? infiltrates? infiltrations? emphysema "
        "fibrosis thickening congestion hernia granulomas? collapse scoliosis"
    ),
    "side": "left right bilateral bilaterally unilateral left-sided right-sided",
    "severity": (
        "mild moderate severe small large tiny minimal trace slight subtle marked massive extensive mildly moderately "
        "severely slightly minimally markedly"
    ),
    "negation": "no not without negative denies neither nor absent",
}
KINDS = tuple(_WORDS)
_HIDDEN = re.compile(
    "|".join(rf"(?P<{kind}>\b(?:{'|'.join(words.split())})\b)" for kind, words in _WORDS.items()), re.IGNORECASE
)


class HiddenWord(NamedTuple):
    """A word that is hidden in a sentence."""

    sentence: int
    """Index among the sentences."""
    start: int
    end: int
    word: str
    """In lower case."""
    kind: str


class Sentences(NamedTuple):
    """Distinct sentences in the order of the data, each with the sample of its first occurrence."""

    texts: tuple[str, ...]
    samples: tuple[Sample, ...]
    words: tuple[HiddenWord, ...]


def hidden_words(samples: Iterable[Sample], sections: Sequence[str], limit: int | None = None) -> Sentences:
    """Return the distinct sentences that contain words of some kind, the first `limit` of them, and these words.

    Sentences are equal if they differ in case and white space only; the texts of a study count once.
    """
    texts: list[str] = []
    found_in: list[Sample] = []
    words: list[HiddenWord] = []
    for text, sample in _distinct(samples, sections):
        found = [
            HiddenWord(len(texts), match.start(), match.end(), match[0].lower(), str(match.lastgroup))
            for match in _HIDDEN.finditer(text)
        ]
        if found:
            texts.append(text)
            found_in.append(sample)
            words += found
        if len(texts) == limit:
            break
    return Sentences(tuple(texts), tuple(found_in), tuple(words))


def _distinct(samples: Iterable[Sample], sections: Sequence[str]) -> Iterator[tuple[str, Sample]]:
    """Yield each distinct sentence with its sample."""
    seen: set[str] = set()
    studies: set[str] = set()
    for sample in samples:
        if sample.study in studies:
            continue
        studies.add(sample.study)
        for text in choose_sections(sample.sections, sections):
            for sentence in split_sentences(text):
                collapsed = " ".join(sentence.split())
                if collapsed.lower() not in seen:
                    seen.add(collapsed.lower())
                    yield collapsed, sample
