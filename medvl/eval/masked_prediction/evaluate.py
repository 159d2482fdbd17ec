"""Masked prediction of a language model with a word head: one word of a report sentence is hidden and filled in.

Protocol "masked_prediction", version 3:

* Items are words of the sentences of reports that name a finding, a side, a severity or a negation (`words`); each is
  hidden alone, in its own copy of its sentence. Equal sentences count once. Words beyond the model's longest text, and
  those that share a token with other text, are left out and counted.
* All pieces of the word are replaced by the mask token, so that the model knows their number. "accuracy@1" is the share
  of words whose pieces are all the most probable ones at their places, "accuracy@5" the share whose pieces are all
  among the five most probable ones.
* "floor@k" is the share of the k most frequent words of the kind: the accuracy of a model that knows the kind and the
  frequencies of these sentences, but does not read the sentence. "gain@k" is the accuracy minus the floor, paired.
* "nll" is the negative log-likelihood of the word in nats: the sum over its pieces, all hidden, so that models with
  different vocabularies can be compared. It also differs between models that predict none of the
  words yet.
* "all" is the share of all words, "macro" the mean of the kinds.
* A side is seldom known from a sentence alone: an accuracy near its floor is expected there.
* Intervals: patients are resampled with all sentences that occurred first in their reports.

Shape letters: N words, B words of a batch, T tokens, K kinds.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.errors import ConfigError, EvaluationError
from medvl.eval.core.full_pass import samples_by_key
from medvl.eval.core.interfaces import Source
from medvl.eval.core.metric_rows import MetricGroup, label_mean_metrics, measure
from medvl.eval.core.metrics import Array
from medvl.eval.core.results import Results, checkpoint_sha256
from medvl.eval.core.subgroups import subgroups_of
from medvl.eval.masked_prediction.words import HiddenWord, Sentences, hidden_words
from medvl.models.eval_mode import evaluating
from medvl.models.language.base import LanguageModel

PROTOCOL, PROTOCOL_VERSION = "masked_prediction", 3
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
        """Yield item, patient, subgroups, kind, word, the model's word and scores of each hidden word, no sentences."""
        scored = zip(self.words, self.filled, self.right_NK.tolist(), self.nll_N.tolist(), strict=True)
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

    Raises ConfigError for a model without a mask token, EvaluationError if no sentence has a word to hide.
    """
    tokenizer = model.tokenizer
    if tokenizer is None or tokenizer.mask_id is None:
        raise ConfigError(f"{model.name} has no vocabulary with a mask token", "missing", field="tokenizer")
    sentences = hidden_words((sample for _, sample in samples_by_key(source).values()), sections, limit)
    placed = _place(tokenizer, sentences)
    if not placed:
        message = "no sentence has a word to hide; give shards with reports, or other sections"
        raise EvaluationError(message, "empty", field="data")
    with evaluating(model):
        filled, right_NK, nll_N = _fill(model, tokenizer, tokenizer.mask_id, placed, batch)
    words = tuple(item.word for item in placed)
    kinds, patients = [word.kind for word in words], [sentences.samples[word.sentence].patient for word in words]
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
        results=results, sentences=sentences, words=words, filled=filled, right_NK=right_NK, nll_N=nll_N
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
        within = [at for at, (start, end) in enumerate(offsets) if start < word.end and end > word.start]
        if not within or len(ids) + 2 > tokenizer.max_tokens:
            continue
        text = sentences.texts[word.sentence]
        covered = text[offsets[within[0]][0] : offsets[within[-1]][1]].strip()  # some pieces begin with their blank
        known = tokenizer.unk_id is None or tokenizer.unk_id not in [ids[at] for at in within]
        if covered.lower() == word.word and known:
            whole = [tokenizer.cls_id, *ids, tokenizer.sep_id]
            placed.append(_Placed(word, whole, range(within[0] + 1, within[-1] + 2)))
    return placed


def _fill(
    model: LanguageModel, tokenizer: Tokenizer, mask_id: int, placed: Sequence[_Placed], batch: int
) -> tuple[tuple[str, ...], Array, Array]:
    """Return the most probable word of each item, whether the true one is within the first k, and its nll."""
    order = sorted(range(len(placed)), key=lambda at: len(placed[at].ids))
    filled, right_NK, nll_N = [""] * len(placed), np.zeros((len(placed), len(KS))), np.zeros(len(placed))
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        items = [placed[row] for row in rows]
        ids_BT, mask_BT = _masked(items, tokenizer.pad_id, mask_id)
        row_P = torch.tensor([row for row, item in enumerate(items) for _ in item.pieces])
        place_P = torch.tensor([place for item in items for place in item.pieces])
        truth_P = torch.tensor([item.ids[place] for item in items for place in item.pieces])
        states_BTD = model.text_encoder(ids_BT.to(model.device), mask_BT.to(model.device)).tokens_BTD
        log_share_PV = model.score_words(states_BTD[row_P, place_P]).float().log_softmax(dim=1).cpu()
        best_PK = log_share_PV.topk(max(KS), dim=1).indices
        nll_P = -log_share_PV.gather(1, truth_P[:, None])[:, 0]
        nll_N[rows] = torch.zeros(len(items)).index_add_(0, row_P, nll_P).numpy()
        for row, item_right_K, best in zip(rows, *_by_item(row_P, truth_P, best_PK, len(items)), strict=True):
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


def _by_item(row_P: Tensor, truth_P: Tensor, best_PK: Tensor, items: int) -> tuple[Array, list[list[int]]]:
    """Return (items, len(KS)) of 1 where all pieces of an item are right, and the first choice of its pieces."""
    hit_PK = best_PK == truth_P[:, None]
    columns = []
    for k in KS:
        wrong_B = torch.zeros(items).index_add_(0, row_P, (~hit_PK[:, :k].any(dim=1)).float())
        columns.append((wrong_B == 0).double())
    firsts = [best_PK[row_P == row, 0].tolist() for row in range(items)]
    right_NK: Array = torch.stack(columns, dim=1).numpy()
    return right_NK, firsts


def _groups(words: Sequence[HiddenWord], kinds: Sequence[str], right_NK: Array) -> list[MetricGroup]:
    """Return accuracy, floor and gain at every k, of all words, of the mean of the kinds, and of each kind."""
    frequent = {
        kind: [word for word, _ in Counter(one.word for one in words if one.kind == kind).most_common(max(KS))]
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
