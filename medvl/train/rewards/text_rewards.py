"""Rewards of texts against the true ones, 0 to 1.

    findings   F1 of present findings with their sides, read by the labeler; a sentence that repeats
               counts as a false finding, and so does a finding that the text also denies
    severities F1 of present findings with a severity: mild, moderate or severe
    ngrams     mean F1 of n-grams of 1 to 4 words
    novelty    share of trigrams that do not repeat an earlier one
    length     words of the shorter text over those of the longer one
    sentences  how near the sentences of one text are to those of the other, by a text encoder
    radgraph   F1 of RadGraph's entities, by the package radeval

Rewards of meaning alone pay for wrong polarity: "Pleural effusion." is near "No pleural effusion."
Give `sentences` beside `findings` or `radgraph`.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from medvl.data.reports.radeval import open_radeval
from medvl.data.reports.sentences import split_sentences
from medvl.encoders import create_text_encoder
from medvl.errors import ConfigError
from medvl.schema import NEGATIVE, POSITIVE

_NGRAM = 3
_ORDERS = 4
_SENTENCES = 100_000
"""Sentences whose vectors are kept."""
_TEXTS = 10_000
"""Texts whose statements are kept: all texts of an image are compared with one reference."""
_NOTHING = frozenset({("No Finding", "")})

Reward = Callable[[str, str], float]
"""(text, true text) -> 0 to 1."""


def findings_reward(text: str, reference: str) -> float:
    """Return the F1 of present findings with their sides, less repetition and contradiction.

        2 |(A and B) without C| / (|A| + |B| + repeats)

    A and B are the (finding, side) that the text and the reference assert, read by the labeler, or
    {no finding} for one that asserts none. A denied finding is never present, and a side that only
    one text names is another finding.

    `repeats` counts the sentences of the text whose words, or all of whose present findings, it had
    before: as often as the reference has them, at least once. C are those of A that the text, and
    not the reference, also denies, without a side or on the same side. Otherwise it is free to
    write a right finding again, or to append findings to a normal report.
    """
    ours, theirs = _statements(text), _statements(reference)
    present = _findings(ours) or _NOTHING
    expected = _findings(theirs) or _NOTHING
    right = (present & expected) - (_contradictions(ours) - _contradictions(theirs))
    return 2 * len(right) / (len(present) + len(expected) + _repeats(ours, theirs))


def severities_reward(text: str, reference: str) -> float:
    """Return the F1 of (finding, severity) of present findings with a severity, read by the labeler
    (`medvl.data.reports.statements.severities_of`); 1 where neither text has any.
    """
    ours, theirs = (
        frozenset(
            (finding, severity)
            for statement in _statements(each)
            for finding, _, severity in statement.asserted
            if severity
        )
        for each in (text, reference)
    )
    if not ours and not theirs:
        return 1.0
    return 2 * len(ours & theirs) / (len(ours) + len(theirs))


def ngrams_reward(text: str, reference: str) -> float:
    """Return the mean F1 of n-grams of 1 to 4 words, clipped to their count in the other text."""
    scores = []
    for order in range(1, _ORDERS + 1):
        ours, theirs = _ngrams(text, order), _ngrams(reference, order)
        total = ours.total() + theirs.total()
        scores.append(2 * (ours & theirs).total() / total if total else 1.0)
    return sum(scores) / len(scores)


def novelty_reward(text: str, reference: str) -> float:
    """Return the share of trigrams that do not repeat an earlier one, whatever the reference; 1 for
    shorter texts.
    """
    counts = _ngrams(text, _NGRAM)
    return len(counts) / counts.total() if counts else 1.0


def length_reward(text: str, reference: str) -> float:
    """Return the number of words of the shorter text over that of the longer one."""
    lengths = sorted((len(text.split()), len(reference.split())))
    return lengths[0] / lengths[1] if lengths[1] else 1.0


class SentenceReward:
    """How near two sets of sentences are: the mean of the best cosine of each sentence of one text
    with those of the other, both ways, negative ones as 0.

    Each sentence is encoded by itself, so that a text's reward does not depend on other texts.

    Args:
        name: preset of a text encoder, with its published weights.

    Raises ConfigError for an encoder without a tokenizer, WeightsError without weights.
    """

    def __init__(self, name: str) -> None:
        from medvl.models.factory import preset_tokenizer

        tokenizer = preset_tokenizer(name, None)
        if tokenizer is None:
            message = f"{name} has no published tokenizer; take the preset of a text encoder"
            raise ConfigError(message, "unsupported", field="text_encoder")
        self._tokenizer = tokenizer
        with torch.random.fork_rng(devices=[]):
            self._encoder = create_text_encoder(name, pretrained=True).eval().requires_grad_(False)
        self._vector = functools.lru_cache(_SENTENCES)(self._encode)

    def __call__(self, text: str, reference: str) -> float:
        ours, theirs = (
            [self._vector(sentence) for sentence in split_sentences(each)]
            for each in (text, reference)
        )
        if not ours or not theirs:
            return float(not ours and not theirs)
        cosine_NM = (torch.stack(ours) @ torch.stack(theirs).T).clamp(0, 1)
        return float((cosine_NM.amax(dim=1).mean() + cosine_NM.amax(dim=0).mean()) / 2)

    @torch.no_grad()
    def _encode(self, sentence: str) -> Tensor:
        pooled_1D: Tensor = self._encoder(*self._tokenizer([sentence])).pooled_BD
        return torch.nn.functional.normalize(pooled_1D[0].float(), dim=0)


def radgraph_reward() -> Reward:
    """Return the F1 of RadGraph's entities, with whether each has a relation, by RadEval.

    Raises ConfigError as `medvl.data.reports.radeval.open_radeval`.
    """
    scores = open_radeval("radgraph")
    return lambda text, reference: scores([text], [reference])["radgraph_partial"][0]


_OF_TEXTS: Mapping[str, Reward] = {
    "findings": findings_reward,
    "severities": severities_reward,
    "ngrams": ngrams_reward,
    "novelty": novelty_reward,
    "length": length_reward,
}


@functools.cache
def open_reward(name: str, text_encoder: str) -> Reward:
    """Return one of `medvl.train.config.REWARDS`.

    Raises ConfigError as `SentenceReward` and `radgraph_reward`.
    """
    if name == "sentences":
        return SentenceReward(text_encoder)
    return radgraph_reward() if name == "radgraph" else _OF_TEXTS[name]


def text_rewards(
    names: Sequence[str],
    texts: Sequence[str],
    references: Sequence[str],
    ended: Sequence[bool],
    text_encoder: str = "minilm",
) -> Tensor:
    """(R, N) float32: rewards of texts; 0 for an empty text, and for one that did not end.

    Raises as `open_reward`.
    """
    rewards = [open_reward(name, text_encoder) for name in names]
    return torch.tensor(
        [
            [
                reward(text, reference) if text.strip() and has_ended else 0.0
                for text, reference, has_ended in zip(texts, references, ended, strict=True)
            ]
            for reward in rewards
        ]
    )


Words = tuple[str, ...]
Findings = frozenset[tuple[str, str]]
"""(finding, side), "" for no side."""


class Statement(NamedTuple):
    """Findings of a sentence."""

    words: Words
    asserted: frozenset[tuple[str, str, str]]
    """(finding, side, severity) of present findings, "" for no side or severity."""
    denied: Findings


@functools.lru_cache(_TEXTS)
def _statements(text: str) -> tuple[Statement, ...]:
    # Few runs train on rewards, so that most import no labeler.
    from medvl.data.reports.labeler import sentence_runs

    sentences = split_sentences(text)
    runs = (" ".join(sentences[first:end]) for first, end in sentence_runs(sentences))
    return tuple(_statement(each) for each in runs if _words(each))


@functools.lru_cache(_SENTENCES)
def _statement(sentence: str) -> Statement:
    from medvl.data.reports.labeler import find_mentions
    from medvl.data.reports.statements import places_of, severities_of

    mentions = find_mentions(sentence)
    found = [
        (mention.value, mention.finding, " ".join(sides), severity)
        for mention, (sides, _), severity in zip(
            mentions, places_of(mentions), severities_of(mentions), strict=True
        )
    ]
    return Statement(
        _words(sentence),
        frozenset(each[1:] for each in found if each[0] == POSITIVE),
        frozenset(each[1:3] for each in found if each[0] == NEGATIVE),
    )


def _findings(statements: Iterable[Statement]) -> Findings:
    """Return what statements assert, without severities."""
    return frozenset(finding[:2] for each in statements for finding in each.asserted)


def _contradictions(statements: Sequence[Statement]) -> Findings:
    """Return what statements assert and also deny, without a side or on the same side."""
    denied = frozenset(finding for each in statements for finding in each.denied)
    present = _findings(statements)
    return frozenset(each for each in present if each in denied or (each[0], "") in denied)


def _repeats(ours: Sequence[Statement], theirs: Sequence[Statement]) -> int:
    """Return how many statements of a text repeat earlier ones more often than the reference."""
    allowed = Counter(key for each in theirs for key in (each.words, *_findings([each])))
    seen: Counter[Words] = Counter()
    repeats = 0
    for each in ours:
        present = _findings([each])
        is_new = [seen[key] < max(1, allowed[key]) for key in (each.words, *present)]
        repeats += not is_new[0] or (bool(present) and not any(is_new[1:]))
        seen.update((each.words, *present))
    return repeats


def _ngrams(text: str, order: int) -> Counter[Words]:
    words = _words(text)
    return Counter(zip(*(words[start:] for start in range(order)), strict=False))


def _words(text: str) -> Words:
    return tuple(text.lower().replace(".", " ").replace(",", " ").split())
