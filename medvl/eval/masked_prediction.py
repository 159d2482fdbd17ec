"""Masked prediction of a language model with a word head: one word of a report sentence is hidden
and filled in.

Protocol "masked_prediction", version 3:

* Items are words of the sentences of reports that name a finding, a side, a severity or a negation
  (`words`); each is hidden alone, in its own copy of its sentence. Equal sentences count once.
  Words beyond the model's longest text, and those that share a token with other text, are left out
  and counted.
* All pieces of the word are replaced by the mask token, so that the model knows their number.
  "accuracy@1" is the share of words whose pieces are all the most probable ones at their places,
  "accuracy@5" the share whose pieces are all among the five most probable ones.
* "floor@k" is the share of the k most frequent words of the kind: the accuracy of a model that
  knows the kind and the frequencies of these sentences, but does not read the sentence. "gain@k" is
  the accuracy minus the floor, paired.
* "nll" is the negative log-likelihood of the word in nats: the sum over its pieces, all hidden, so
  that models with different vocabularies can be compared. It also differs between models that
  predict none of the words yet.
* "all" is the share of all words, "macro" the mean of the kinds.
* A side is seldom known from a sentence alone: an accuracy near its floor is expected there.
* Intervals: patients are resampled with all sentences that occurred first in their reports.

Shape letters: N words, B words of a batch, T tokens, K kinds.
"""

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from medvl.data.reports.sentences import split_sentences
from medvl.data.shards.source import ShardSource
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.text import choose_sections
from medvl.errors import ConfigError, EvaluationError
from medvl.eval.core.full_pass import Source, samples_by_key
from medvl.eval.core.metric_rows import MetricGroup, label_mean_metrics, measure, subgroups_of
from medvl.eval.core.metrics import Array
from medvl.eval.core.open import RunOptions, Setup
from medvl.eval.core.results import (
    LineFields,
    Lines,
    PageHeader,
    Results,
    WritePage,
    checkpoint_sha256,
    number,
)
from medvl.eval.evaluation import ModelEvaluation
from medvl.eval.html.page import (
    Card,
    Cards,
    Choice,
    Deck,
    Page,
    Section,
    header_facts,
    headline,
    write_page,
)
from medvl.eval.html.tables import Table, metric_cell
from medvl.eval.registry import register_evaluation
from medvl.models.base import evaluating
from medvl.models.language.base import LanguageModel
from medvl.schema import Sample

# Words that are hidden in report sentences, by kind.

_WORDS: Mapping[str, str] = {
    "finding": (
        "effusions? pneumothora(?:x|ces) o?edema consolidations? atelecta(?:sis|ses) cardiomegaly "
        "opacit(?:y|ies) opacifications? pneumonias? fractures? nodules? mass(?:es)? lesions? "
        "infiltrates? infiltrations? emphysema fibrosis thickening congestion hernia granulomas? "
        "collapse scoliosis"
    ),
    "side": "left right bilateral bilaterally unilateral left-sided right-sided",
    "severity": (
        "mild moderate severe small large tiny minimal trace slight subtle marked massive "
        "extensive mildly moderately severely slightly minimally markedly"
    ),
    "negation": "no not without negative denies neither nor absent",
}
KINDS = tuple(_WORDS)
_HIDDEN = re.compile(
    "|".join(rf"(?P<{kind}>\b(?:{'|'.join(words.split())})\b)" for kind, words in _WORDS.items()),
    re.IGNORECASE,
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


def hidden_words(
    samples: Iterable[Sample], sections: Sequence[str], limit: int | None = None
) -> Sentences:
    """Return the distinct sentences that contain words of some kind, the first `limit` of them, and
    these words.

    Sentences are equal if they differ in case and white space only; the texts of a study count
    once.
    """
    texts: list[str] = []
    found_in: list[Sample] = []
    words: list[HiddenWord] = []
    for text, sample in _distinct(samples, sections):
        sample_words = [
            HiddenWord(
                len(texts), match.start(), match.end(), match[0].lower(), str(match.lastgroup)
            )
            for match in _HIDDEN.finditer(text)
        ]
        if sample_words:
            texts.append(text)
            found_in.append(sample)
            words += sample_words
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


PROTOCOL = "masked_prediction"
PROTOCOL_VERSION = 3
KS = (1, 5)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MaskedPredictionResult:
    """Results, with the sentences, the hidden words and the model's words."""

    results: Results
    sentences: Sentences
    words: tuple[HiddenWord, ...]
    """Words that were evaluated."""
    filled: tuple[str, ...]
    """The most probable pieces of each word, decoded."""
    right_NK: Array
    """Whether the word is within the first k, for the k of `KS`."""
    nll_N: Array
    """Negative log-likelihood of each word, in nats."""

    def predictions(self) -> Iterator[dict[str, Any]]:
        """Yield item, patient, subgroups, kind, word, the model's word and scores of each hidden
        word, no sentences.
        """
        scored = zip(
            self.words, self.filled, self.right_NK.tolist(), self.nll_N.tolist(), strict=True
        )
        for word, filled, right_K, nll in scored:
            sample = self.sentences.samples[word.sentence]
            names = {"item": f"{word.sentence}:{word.start}", "patient": sample.patient}
            right = {f"right@{k}": bool(value) for k, value in zip(KS, right_K, strict=True)}
            words = {"kind": word.kind, "word": word.word, "filled": filled}
            yield {**names, "subgroups": subgroups_of(sample), **words, **right, "nll": nll}


def evaluate_masked_prediction(
    model: LanguageModel,
    source: Source,
    *,
    sections: Sequence[str] = ("findings", "impression"),
    limit: int | None = None,
    batch: int = 64,
    resamples: int = 1000,
    seed: int = 0,
    checkpoint: str | Path | None = None,
) -> MaskedPredictionResult:
    """Evaluate a language model by the protocol of this module.

    Args:
        model: language model with a tokenizer that has a mask token.
        source: samples with texts.
        sections: sections of the reports.
        limit: maximum number of distinct sentences, from the start; None for all.
        batch: words per forward pass.
        resamples, seed: number and seed of the bootstrap resamples.
        checkpoint: the model's, whose hash is recorded.

    Raises ConfigError for a model without a mask token, EvaluationError if no sentence has a word
    to hide.
    """
    tokenizer = model.tokenizer
    if tokenizer is None or tokenizer.mask_id is None:
        raise ConfigError(
            f"{model.name} has no vocabulary with a mask token", "missing", field="tokenizer"
        )
    sentences = hidden_words(
        (sample for _, sample in samples_by_key(source).values()), sections, limit
    )
    placed = _place(tokenizer, sentences)
    if not placed:
        message = "no sentence has a word to hide; give shards with reports, or other sections"
        raise EvaluationError(message, "empty", field="data")
    with evaluating(model):
        filled, right_NK, nll_N = _fill(model, tokenizer, tokenizer.mask_id, placed, batch)
    words = tuple(item.word for item in placed)
    kinds = [word.kind for word in words]
    patients = [sentences.samples[word.sentence].patient for word in words]
    groups = [*_groups(words, kinds, right_NK), label_mean_metrics("nll", nll_N, kinds)]
    results = Results(
        protocol=PROTOCOL,
        protocol_version=PROTOCOL_VERSION,
        rows=measure(groups, len(words), resamples=resamples, seed=seed, groups=patients),
        config={"sections": list(sections), "limit": limit, "resamples": resamples, "seed": seed},
        inputs={
            "checkpoint": None if checkpoint is None else checkpoint_sha256(checkpoint),
            "manifest": source.fingerprint,
        },
        details={
            "sentences": len(sentences.texts),
            "words": len(words),
            "left_out": len(sentences.words) - len(words),
            "of_several_pieces": sum(len(item.pieces) > 1 for item in placed),
        },
    )
    return MaskedPredictionResult(
        results=results,
        sentences=sentences,
        words=words,
        filled=filled,
        right_NK=right_NK,
        nll_N=nll_N,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Placed:
    """A word with its sentence in tokens."""

    word: HiddenWord
    ids: list[int]
    """Token ids of the whole sentence, with the first and the last token."""
    pieces: range
    """Places of the word's pieces."""


def _place(tokenizer: Tokenizer, sentences: Sentences) -> list[_Placed]:
    """Return the words that are whole tokens of their sentences, in the order of the data."""
    encoded = [tokenizer.encode_whole(text) for text in sentences.texts]
    placed = []
    for word in sentences.words:
        ids, offsets = encoded[word.sentence]
        within = [
            at for at, (start, end) in enumerate(offsets) if start < word.end and end > word.start
        ]
        if not within or len(ids) + 2 > tokenizer.max_tokens:
            continue
        text = sentences.texts[word.sentence]
        # some pieces begin with their blank
        covered = text[offsets[within[0]][0] : offsets[within[-1]][1]].strip()
        known = tokenizer.unk_id is None or tokenizer.unk_id not in [ids[at] for at in within]
        if covered.lower() == word.word and known:
            whole = [tokenizer.cls_id, *ids, tokenizer.sep_id]
            placed.append(_Placed(word, whole, range(within[0] + 1, within[-1] + 2)))
    return placed


def _fill(
    model: LanguageModel, tokenizer: Tokenizer, mask_id: int, placed: Sequence[_Placed], batch: int
) -> tuple[tuple[str, ...], Array, Array]:
    """Return the most probable word of each item, whether the true one is within the first k,
    and its nll.
    """
    order = sorted(range(len(placed)), key=lambda at: len(placed[at].ids))
    filled = [""] * len(placed)
    right_NK = np.zeros((len(placed), len(KS)))
    nll_N = np.zeros(len(placed))
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        items = [placed[row] for row in rows]
        ids_BT, mask_BT = _masked(items, tokenizer.pad_id, mask_id)
        row_P = torch.tensor([row for row, item in enumerate(items) for _ in item.pieces])
        place_P = torch.tensor([place for item in items for place in item.pieces])
        truth_P = torch.tensor([item.ids[place] for item in items for place in item.pieces])
        states_BTD = model.text_encoder(
            ids_BT.to(model.device), mask_BT.to(model.device)
        ).tokens_BTD
        log_share_PV = (
            model.score_words(states_BTD[row_P, place_P]).float().log_softmax(dim=1).cpu()
        )
        best_PK = log_share_PV.topk(max(KS), dim=1).indices
        nll_P = -log_share_PV.gather(1, truth_P[:, None])[:, 0]
        nll_N[rows] = torch.zeros(len(items)).index_add_(0, row_P, nll_P).numpy()
        for row, item_right_K, best in zip(
            rows, *_by_item(row_P, truth_P, best_PK, len(items)), strict=True
        ):
            right_NK[row], filled[row] = item_right_K, tokenizer.decode(best)
    return tuple(filled), right_NK, nll_N


def _masked(items: Sequence[_Placed], pad_id: int, mask_id: int) -> tuple[Tensor, Tensor]:
    """Return (ids_BT, mask_BT) of the sentences with their words hidden."""
    longest = max(len(item.ids) for item in items)
    ids_BT = torch.full((len(items), longest), pad_id)
    for row, item in enumerate(items):
        ids_BT[row, : len(item.ids)] = torch.tensor(item.ids)
        ids_BT[row, item.pieces.start : item.pieces.stop] = mask_id
    length_B = torch.tensor([len(item.ids) for item in items])
    return ids_BT, torch.arange(longest)[None] < length_B[:, None]


def _by_item(
    row_P: Tensor, truth_P: Tensor, best_PK: Tensor, items: int
) -> tuple[Array, list[list[int]]]:
    """Return (items, len(KS)) of 1 where all pieces of an item are right, and the first choice
    of its pieces.
    """
    hit_PK = best_PK == truth_P[:, None]
    columns = []
    for k in KS:
        wrong_B = torch.zeros(items).index_add_(0, row_P, (~hit_PK[:, :k].any(dim=1)).float())
        columns.append((wrong_B == 0).double())
    firsts = [best_PK[row_P == row, 0].tolist() for row in range(items)]
    right_NK: Array = torch.stack(columns, dim=1).numpy()
    return right_NK, firsts


def _groups(
    words: Sequence[HiddenWord], kinds: Sequence[str], right_NK: Array
) -> list[MetricGroup]:
    """Return accuracy, floor and gain at every k, of all words, of the mean of the kinds, and of
    each kind.
    """
    frequent = {
        kind: [
            word
            for word, _ in Counter(one.word for one in words if one.kind == kind).most_common(
                max(KS)
            )
        ]
        for kind in sorted(set(kinds))
    }
    groups = []
    for column, k in enumerate(KS):
        floor_N = np.array([float(word.word in frequent[word.kind][:k]) for word in words])
        for name, value_N in (
            ("accuracy", right_NK[:, column]),
            ("floor", floor_N),
            ("gain", right_NK[:, column] - floor_N),
        ):
            groups.append(label_mean_metrics(f"{name}@{k}", value_N, kinds))
    return groups


# Page of masked prediction: accuracy beside the floor by kind of word, frequent words, and
# examples.

_LIMITS = (
    "A research evaluation of a language model, not for clinical use.",
    "The floor counts the words of these sentences themselves. Words of several pieces are "
    "harder than words of one, "
    "so that accuracies of models with different vocabularies differ by their vocabularies too.",
)
_NAMES = {"overall": "All words", "macro": "Mean of the kinds"}


def write_masked_prediction_page(
    result: MaskedPredictionResult, path: str | Path, header: PageHeader, *, examples: int = 6
) -> Path:
    """Write the page as one HTML file and return its path.

    Args:
        result: result of `evaluate_masked_prediction`.
        path: path of the file; its folder is created if missing.
        header: display names of model and data, and the date.
        examples: wrong words of each kind; 0 for a page without sentences.
    """
    results = result.results
    details = result.results.details
    present = [kind for kind in KINDS if any(row.target == kind for row in results.rows)]
    targets = ["overall", "macro", *present]
    metrics = ("accuracy@1", "floor@1", "gain@1", "accuracy@5", "floor@5", "nll")
    sections: list[Section] = [
        Table(
            title="Summary",
            columns=[
                "",
                "Right at first",
                "Floor",
                "Gain",
                "Within five",
                "Floor of five",
                "Nats",
                "Words",
            ],
            rows=[
                [
                    _NAMES.get(target, target.capitalize()),
                    *(
                        metric_cell(results.row(metric, target), bar=metric == "gain@1")
                        for metric in metrics
                    ),
                    f"{results.row('accuracy@1', target).n:,}",
                ]
                for target in targets
            ],
            caption="Floor: the most frequent word of the kind, or one of the five most "
            "frequent ones, without reading "
            "the sentence. Gain: accuracy minus floor, paired. Nats: negative log-likelihood of "
            "the word, lower is "
            "better.",
            strong_rows=2,
        ),
        _frequent_words(result),
    ]
    if examples:
        sections.append(_mistakes(result, present, examples))
    page = Page(
        title=f"Masked prediction: {header.model}",
        subtitle=f"{header.data}: {details['words']:,} hidden words of {details['sentences']:,} "
        f"distinct sentences",
        headlines=[
            headline(f"{kind}: right at first", results.row("accuracy@1", kind)) for kind in present
        ],
        facts=header_facts(results, header, units="patients"),
        sections=sections,
        limits=_LIMITS,
    )
    return write_page(page, path)


def _frequent_words(result: MaskedPredictionResult) -> Table:
    counts = Counter((word.kind, word.word) for word in result.words)
    right = Counter(
        (word.kind, word.word)
        for word, first in zip(result.words, result.right_NK[:, 0], strict=True)
        if first
    )
    return Table(
        title="Frequent words",
        columns=["", "Kind", "Words", "Right at first"],
        rows=[
            [word, kind, f"{count:,}", f"{right[kind, word] / count:.3f}"]
            for (kind, word), count in counts.most_common(20)
        ],
    )


def _mistakes(result: MaskedPredictionResult, kinds: list[str], examples: int) -> Cards:
    decks = []
    for kind in kinds:
        of_kind = np.array([word.kind == kind for word in result.words])
        wrong = np.flatnonzero(of_kind & (result.right_NK[:, 0] == 0))
        shown = wrong[np.linspace(0, len(wrong) - 1, min(examples, len(wrong))).astype(int)]
        if len(shown):
            cards = [_card(result, int(at)) for at in shown]
            decks.append(
                Deck(
                    title=f"{kind.capitalize()}: {len(wrong):,} wrong words",
                    cards=cards,
                    good=False,
                )
            )
    return Cards(title="Mistakes", decks=decks, caption="The model's word, then the true one (✓).")


def _card(result: MaskedPredictionResult, at: int) -> Card:
    word = result.words[at]
    text = result.sentences.texts[word.sentence]
    choices = [
        Choice(text=result.filled[at] or "(nothing)", score=None, right=False),
        Choice(text=word.word, score=None, right=True),
    ]
    return Card(
        title=f"{text[: word.start]}____{text[word.end :]}",
        pictures=[],
        choices=choices,
        lines=[],
        tags=[],
    )


@register_evaluation("masked-prediction")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedPrediction(ModelEvaluation):
    """Evaluate a language model on report sentences: findings, sides, severities and negations are
    hidden.

    The checkpoint is one of recipes/pubmedbert.py, bioalbert.py or continue_bert.py, or imported
    with its head (`medvl import bert_mlm`); the shards have texts.
    """

    protocols = (PROTOCOL,)
    lines = LineFields(item=("item",))
    fits = (LanguageModel,)
    advice = "give a language model with a head for masked words"

    sections: tuple[str, ...] = ("findings", "impression")
    """sections of the reports; for a report without any of them, the sections that describe the
    image
    """
    limit: int | None = None
    """maximum number of distinct sentences, from the start; default all"""
    examples: int = 6
    """wrong words of each kind on the page; 0 for a page without sentences"""

    def evaluate(
        self, model: LanguageModel, source: ShardSource, setup: Setup
    ) -> MaskedPredictionResult:
        """Return the accuracy of each kind of word."""
        assert isinstance(setup.options, RunOptions)
        return evaluate_masked_prediction(
            model,
            source,
            sections=self.sections,
            limit=self.limit,
            batch=setup.options.batch,
            resamples=setup.resamples,
            checkpoint=self.checkpoint,
        )

    def page(self, result: MaskedPredictionResult, source: ShardSource) -> WritePage:
        return functools.partial(write_masked_prediction_page, result, examples=self.examples)

    @staticmethod
    def metric_groups(lines: Lines, results: Results) -> list[MetricGroup]:
        """Return accuracy and negative log-likelihood, of all words and by kind."""
        kinds = [line["kind"] for line in lines]
        metrics = {
            field: field.replace("right", "accuracy")
            for field in lines[0]
            if field.startswith("right@")
        }
        return [
            label_mean_metrics(metric, np.array([number(line[field]) for line in lines]), kinds)
            for field, metric in {**metrics, "nll": "nll"}.items()
        ]
