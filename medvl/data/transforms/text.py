"""Text policies: choice of the part of a report for training, drawn with the generator of the
sample.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, get_args, runtime_checkable

import numpy as np

from medvl.common.config_io import check_choice, check_within
from medvl.common.untrusted import read_json
from medvl.data.reports.headings import CONTEXT_SECTIONS, DESCRIPTIVE_SECTIONS, section_name
from medvl.data.reports.sentences import join_texts, split_sentences
from medvl.errors import ConfigError
from medvl.schema import ConventionsName, Sample

if TYPE_CHECKING:
    from medvl.data.reports.labeler import Conventions

REPORT_SECTIONS = ("findings", "impression")
Missing = Literal["other_sections", "literal", "no_text"]
"""Replacement for a text whose sections are all missing: the other sections that describe the image
(`choose_sections`); the literal "NO IMPRESSION" (with the name of the first section); or no text,
so that pair losses leave the sample out (`Batch.has_text_B`).
"""


class TextPolicy(Protocol):
    """Function that returns the text of a sample."""

    def __call__(self, sections: Mapping[str, str], rng: np.random.Generator) -> str: ...


def choose_sections(sections: Mapping[str, str], names: Sequence[str]) -> list[str]:
    """Return the texts of the sections `names` that exist, in this order, or else those that
    describe the image.

    Of a report these are findings, impression and the last paragraph (of reports with neither), but
    no indication, history, comparison or addendum: "evaluate for pneumonia" is a question, not a
    description. Of captions and tables with other columns, these are all texts. The result may be
    empty.
    """
    own_texts = [sections[name] for name in names if sections.get(name)]
    if own_texts:
        return own_texts
    texts = [(section_name(name), text) for name, text in sections.items() if text]
    own_texts = [text for heading in names for name, text in texts if name == heading]
    if own_texts:
        return own_texts  # columns such as "section_findings"
    descriptions = [text for name, text in texts if name in DESCRIPTIVE_SECTIONS]
    return descriptions or [text for name, text in texts if name not in CONTEXT_SECTIONS]


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
    """All sentences in a partly shuffled order (LoVT, arXiv 2112.02889, appendix, and its released
    code).

    Sentences are divided by blank lines, so that `Batch.sentence_BT` has the same sentences in the
    new order.
    """

    min_tokens: int = 3
    """Shorter sentences, in words, are left out unless the text has no other."""
    sections: tuple[str, ...] = REPORT_SECTIONS
    swap_probability: float = 0.6
    """Probability of swapping two random sentences, and after each swap of swapping again; 0
    keeps the order.
    """

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
    """Some of the sentences in random order, their number drawn uniformly from 1 to all (MaCo,
    arXiv 2309.05904).

    Sentences are divided by blank lines.
    """

    sections: tuple[str, ...] = REPORT_SECTIONS

    def __call__(self, sections: Mapping[str, str], rng: np.random.Generator) -> str:
        texts = choose_sections(sections, self.sections)
        sentences = _sentences(texts, min_tokens=1)
        if not sentences:
            return join_texts(texts)
        places = rng.permutation(len(sentences))[: rng.integers(1, len(sentences) + 1)]
        return "\n\n".join(sentences[place] for place in places.tolist())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WholeText:
    """The joined sections, without randomness, for retrieval and validation with whole reports."""

    sections: tuple[str, ...] = REPORT_SECTIONS
    missing: Missing = "other_sections"
    """CheXzero uses `WholeText(sections=("impression",), missing="literal")`: all images without an
    impression have the same text and are negatives of each other.
    """
    min_tokens: int = 0
    """Texts of fewer words count as no text, so that pair losses leave the sample out (3 in
    MGCA).
    """

    def __post_init__(self) -> None:
        check_choice(self.missing, get_args(Missing), "missing")

    def __call__(self, sections: Mapping[str, str], rng: np.random.Generator) -> str:
        if self.missing == "other_sections" or any(sections.get(name) for name in self.sections):
            text = join_texts(choose_sections(sections, self.sections))
            return text if _has_words(text, self.min_tokens) else ""
        return f"NO {self.sections[0].upper()}" if self.missing == "literal" else ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Paraphrases:
    """The joined sections, in which phrases are replaced by others of the same meaning at random.

    Where texts recur, as keywords do, a model learns the map from texts from a few dozen of them,
    and prompts in other words fail. Positives should come from labels then (`positives="labels"`),
    because two wordings of a finding are not equal texts.
    """

    file: Path
    """JSON object of phrases and their paraphrases: {"cataract": ["opacity of the lens"]}. Case
    does not count; of phrases at one place, the longest is replaced.
    """
    rate: float = 0.5
    """Share of the phrases that are replaced."""
    sections: tuple[str, ...] = REPORT_SECTIONS

    def __post_init__(self) -> None:
        check_within(self, "[0, 1]", "rate")

    def check(self) -> None:
        """Raise ConfigError for a missing file ("not_found") or other content ("malformed")."""
        _read_paraphrases(self.file)

    def __call__(self, sections: Mapping[str, str], rng: np.random.Generator) -> str:
        pattern, others_of = _read_paraphrases(self.file)

        def replace(match: re.Match[str]) -> str:
            if rng.random() >= self.rate:
                return match[0]
            others = others_of[match[0].lower()]
            return others[int(rng.integers(len(others)))]

        return pattern.sub(replace, join_texts(choose_sections(sections, self.sections)))


@functools.cache
def _read_paraphrases(file: Path) -> tuple[re.Pattern[str], Mapping[str, Sequence[str]]]:
    """Return the pattern of the phrases, the longest first, and the paraphrases of each in lower
    case.
    """
    try:
        content = read_json(file, ConfigError)
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist", "not_found", field="file") from None
    is_table = isinstance(content, dict) and all(
        phrase.strip() and isinstance(others, list) and others and all(map(_is_phrase, others))
        for phrase, others in content.items()
    )
    if not is_table or not content:
        message = f'{file}: expected {{"PHRASE": ["PARAPHRASE", ...], ...}}, none of them empty'
        raise ConfigError(message, "malformed", field="file")
    others_of = {phrase.lower(): tuple(others) for phrase, others in content.items()}
    phrases = sorted(others_of, key=len, reverse=True)
    pattern = rf"(?<!\w)(?:{'|'.join(map(re.escape, phrases))})(?!\w)"
    return re.compile(pattern, re.IGNORECASE), others_of


def _is_phrase(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RandomSection:
    """One whole section about the image, drawn uniformly: a figure's caption, or a paragraph that
    refers to it.

    In M3AE every (image, text) pair is an item, so a figure with five references occurs five times
    per epoch; here each figure occurs once, with a new draw in each epoch.
    """

    min_tokens: int = 3
    """Shorter texts, in words, are left out unless the figure has no other (M3AE)."""

    def __call__(self, sections: Mapping[str, str], rng: np.random.Generator) -> str:
        texts = choose_sections(sections, ())
        long_enough = [text for text in texts if _has_words(text, self.min_tokens)]
        candidates = long_enough or texts
        return candidates[int(rng.integers(len(candidates)))] if candidates else ""


def _sentences(texts: Sequence[str], min_tokens: int) -> list[str]:
    """Return the sentences with at least `min_tokens` words, or all sentences if there are none."""
    sentences = [sentence for text in texts for sentence in _split(text)]
    return [sentence for sentence in sentences if _has_words(sentence, min_tokens)] or sentences


@functools.lru_cache(1 << 14)
def _split(text: str) -> tuple[str, ...]:
    """Return the sentences of a text. Texts recur in every epoch of a small corpus, and some
    impressions within an epoch; about 16 MB are held in each worker.
    """
    return tuple(split_sentences(text))


def _has_words(text: str, count: int) -> bool:
    """Return whether a text has at least `count` words, without counting all of them."""
    return count < 1 or _words_pattern(count).match(text) is not None


@functools.cache
def _words_pattern(count: int) -> re.Pattern[str]:
    return re.compile(rf"\W*+(?:\w++\W++){{{count - 1}}}\w")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TextPair:
    """Two texts of a sample, each with its own policy, such as impression and findings: the text,
    and `Inputs.second_text`.

    A second text that is equal to the first counts as absent (`Batch.has_second_text_B`).
    """

    first: WholeText | RandomSentence | RandomSection
    second: WholeText | RandomSentence | RandomSection

    def __call__(self, sections: Mapping[str, str], rng: np.random.Generator) -> str:
        return self.first(sections, rng)

    def other(self, sections: Mapping[str, str], text: str, rng: np.random.Generator) -> str:
        """Return the second text (`Inputs.second_text`) of a sample whose first text is `text`;
        empty if there is none. Of other policies it is a second draw.
        """
        second = self.second(sections, rng)
        return "" if second == text else second


# Text policies of systems that compare statements: several short texts of a sample, and labels as
# sentences.

StatementSource = Literal["labeler", "sentences", "labels", "file"]
"""Source of statements: the labeler, which writes "There is [no|possible] X of the Y." for each
mention in the report (`medvl.data.reports.statements`); the report's sentences as they are; the
sample's labels; or a file.
"""


def _conventions(name: ConventionsName) -> "Conventions":
    """Return conventions by name. Most policies need no labeler, so it is imported here."""
    from medvl.data.reports.labeler import conventions_named

    return conventions_named(name)


@runtime_checkable
class SamplePolicy(Protocol):
    """Text policy that reads more of a sample than its sections."""

    def of_sample(self, sample: Sample) -> Mapping[str, str]:
        """Return the sections with which the policy is called in place of the sample's own."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroundedText:
    """All sentences with their boxes, as MAIRA-2 writes them (`medvl.data.grounded`).

    Boxes are those of the centre square of the image, which models have to see: without random
    crops, and with the fit "crop". A sample without sentences has no text.
    """

    def of_sample(self, sample: Sample) -> Mapping[str, str]:
        """See `SamplePolicy`."""
        from medvl.data.grounded import grounded_text

        return {"grounded": grounded_text(sample)}

    def __call__(self, sections: Mapping[str, str], rng: np.random.Generator) -> str:
        return sections["grounded"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Statements:
    """Statements of a report: one, drawn uniformly (CARZero), or all of them (RadZero), by the
    system's `inputs`.

    A sample without statements has no text, so that pair losses leave it out (`Batch.has_text_B`).
    """

    source: StatementSource = "labeler"
    sections: tuple[str, ...] = REPORT_SECTIONS
    file: Path | None = None
    """JSONL with lines {"study": NAME, "statements": [TEXT, ...]}, for the source "file":
    statements that a language model wrote. Studies are named as in the shards.
    """
    most: int = 16
    """Maximum number of statements of a sample; if there are more, this many are drawn."""
    joined: bool = False
    """All statements as one text, in order, in place of one of them (KAD's string of entities)."""
    relabel: bool = False
    """Take labels and places of findings from the statements, for systems that need them (MedKLIP,
    KAD, MAVL): from a file of RadGraph, for example.
    """
    conventions: ConventionsName = "chexpert"
    """What the labeler takes as present and as uncertain (`medvl.data.CONVENTIONS`)."""

    def __post_init__(self) -> None:
        check_choice(self.source, get_args(StatementSource), "source")
        if (self.source == "file") != (self.file is not None):
            raise ConfigError(
                "the source 'file', and no other one, needs a file", "conflict", field="file"
            )
        if self.relabel and self.source == "labels":
            raise ConfigError(
                "relabel needs statements of a text, not of labels", "conflict", field="relabel"
            )
        check_within(self, "[1, inf)", "most")
        _conventions(self.conventions)

    def of_sample(self, sample: Sample) -> Mapping[str, str]:
        """See `SamplePolicy`."""
        from medvl.data.reports.statements import read_statements, statements_of

        if self.file is not None:
            return {"statements": "\n\n".join(read_statements(self.file).get(sample.study, ()))}
        if self.source == "labels":
            return {"statements": _join_labels(sample.labels)}
        text = "\n\n".join(choose_sections(sample.sections, self.sections))
        rules = _conventions(self.conventions)
        statements = (
            statements_of(text, rules) if self.source == "labeler" else split_sentences(text)
        )
        return {"statements": "\n\n".join(dict.fromkeys(statements))}

    def relabelled(self, sample: Sample) -> Sample:
        """Return the sample with the labels and the text of its statements if `relabel` is set,
        else as it is.
        """
        if not self.relabel:
            return sample
        from medvl.data.reports.labeler import label_report

        text = self.of_sample(sample)["statements"]
        labels = label_report(text, _conventions(self.conventions))
        return dataclasses.replace(sample, labels=labels, sections={REPORT_SECTIONS[0]: text})

    def all_of(self, sections: Mapping[str, str], rng: np.random.Generator) -> list[str]:
        """Return the sample's statements in order, for systems that need `Inputs.statements`;
        empty if there is none.
        """
        statements = [text for text in sections["statements"].split("\n\n") if text]
        if len(statements) <= self.most:
            return statements
        return [
            statements[place]
            for place in sorted(rng.choice(len(statements), self.most, replace=False).tolist())
        ]

    def __call__(self, sections: Mapping[str, str], rng: np.random.Generator) -> str:
        statements = (
            self.all_of(sections, rng) if self.joined else sections["statements"].split("\n\n")
        )
        return (
            " ".join(statements) if self.joined else statements[int(rng.integers(len(statements)))]
        )


class OptionTexts:
    """The question as the text, and the question with each option as the statements, of the samples
    of `medvl.data.loading.studies.OptionSource`.
    """

    def all_of(self, sections: Mapping[str, str], rng: np.random.Generator) -> list[str]:
        """Return the question with each option, in their order."""
        return [text for name, text in sections.items() if name != "question"]

    def __call__(self, sections: Mapping[str, str], rng: np.random.Generator) -> str:
        return sections["question"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SectionOrStatement:
    """Findings, impression, or one of the labeler's statements about them, drawn with these
    weights.

    Missing parts have no weight. For captions and other texts without these sections, one text is
    drawn uniformly in place of findings and impression.
    """

    findings: float = 0.4
    impression: float = 0.3
    statement: float = 0.3
    conventions: ConventionsName = "chexpert"
    """What the labeler takes as present and as uncertain (`medvl.data.CONVENTIONS`)."""

    def __post_init__(self) -> None:
        weights = self.findings, self.impression, self.statement
        if min(weights) < 0 or not 0 < sum(weights) < math.inf:
            message = f"weights must be 0 or above, and one of them above 0, got {weights}"
            raise ConfigError(message, "out_of_range", field="findings")
        _conventions(self.conventions)

    def __call__(self, sections: Mapping[str, str], rng: np.random.Generator) -> str:
        from medvl.data.reports.statements import statements_of

        weights = {"findings": self.findings, "impression": self.impression}
        named = {name: weights[name] for name in REPORT_SECTIONS if sections.get(name)}
        texts = [sections[name] for name in named] or choose_sections(sections, ())
        weight_N = np.array(
            list(named.values()) or [sum(weights.values()) / max(1, len(texts))] * len(texts)
        )
        whole = float(weight_N.sum())
        if not whole or rng.random() * (whole + self.statement) >= whole:
            statements = statements_of("\n\n".join(texts), _conventions(self.conventions))
            if statements:
                return statements[int(rng.integers(len(statements)))]
        if not texts:
            return ""
        return texts[int(rng.choice(len(texts), p=weight_N / whole if whole else None))]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TextOrLabels:
    """A text of the report, or of a sample without one the statements of its labels, in random
    order (CXR-CLIP).

    Images with labels only, such as CheXpert's or ChestX-ray14's, can thus be combined with a
    corpus of reports.
    """

    text: RandomSentence | WholeText | RandomSection | SectionOrStatement
    """Policy for reports; it is applied to the labels' statements as well."""
    most_absent: int | None = None
    """Maximum number of statements of absence of a sample; if there are more, this many are drawn.
    Texts of images that have a label for every finding (ChestX-ray14) are nearly equal otherwise.
    None: all of them.
    """

    def __post_init__(self) -> None:
        if self.most_absent is not None:
            check_within(self, "[0, inf)", "most_absent")

    def of_sample(self, sample: Sample) -> Mapping[str, str]:
        """See `SamplePolicy`."""
        names = self.text.sections if isinstance(self.text, RandomSentence | WholeText) else ()
        if choose_sections(sample.sections, names):
            return sample.sections
        absent = {name: value for name, value in sample.labels.items() if value == 0}
        others = {name: value for name, value in sample.labels.items() if value != 0}
        return {"labels": _join_labels(others), "absent labels": _join_labels(absent)}

    def __call__(self, sections: Mapping[str, str], rng: np.random.Generator) -> str:
        if set(sections) != {"labels", "absent labels"}:
            return self.text(sections, rng)
        findings, absent = (
            [text for text in sections[name].split("\n\n") if text] for name in sections
        )
        absent = rng.permutation(absent)[: self.most_absent].tolist()
        return self.text({"labels": " ".join(rng.permutation([*findings, *absent]).tolist())}, rng)


def _join_labels(labels: Mapping[str, int]) -> str:
    return "\n\n".join(label_statements(labels))


def label_statements(labels: Mapping[str, int]) -> list[str]:
    """Return the statement of each label, in their order; "No Finding" is one only if it is
    positive.
    """
    from medvl.data.reports.statements import statement

    return [
        statement(name, value)
        for name, value in labels.items()
        if name != "No Finding" or value == 1
    ]
