"""Pairs of a fact and a name of its concept, for contrast of texts (`medvl.data.corpora.concepts`)."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from medvl.data.tokenizer.encoded import pad_rows, row_mask
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.errors import ConfigError
from medvl.schema import Batch

SEGMENTS = "\t"
"""Between the segments of a fact."""


@dataclasses.dataclass(frozen=True, slots=True)
class ConceptPair:
    """One row of a batch."""

    key: str
    concept: str
    fact: list[int]
    name: list[int]


class ConceptPairs:
    """Maker of pairs: [CLS] segment [SEP] segment [SEP] of a fact, and [CLS] name [SEP].

    Of several names one is drawn at random.

    Args:
        tokenizer: tokenizer with BERT's special tokens.
        max_tokens: length of both texts; a longer fact loses the end of its last segment.

    Raises ConfigError where the vocabulary has no special tokens for segments.
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        if not tokenizer.has_pairs:
            message = f"{tokenizer.source} has no [SEP] between two segments: use a BERT or ALBERT vocabulary"
            raise ConfigError(message, "unsupported", field="tokenizer")
        self.tokenizer, self.max_tokens = tokenizer, min(max_tokens, tokenizer.max_tokens)

    def __call__(self, key: str, document: str, text: str, other: Callable[[], str], rng: Any) -> ConceptPair:
        """Return the pair of a sample. Raises ConfigError for a text that is not a fact of `medvl shards concepts`."""
        fact, *names = text.split("\n")
        if not names:
            message = f"sample {key} is not a fact with names: make the shards with `medvl shards concepts`"
            raise ConfigError(message, "wrong_type", field="data.train")
        name = names[int(rng.integers(len(names)))]
        return ConceptPair(key, document, self._row(fact.split(SEGMENTS)), self._row([name]))

    def collate(self, rows: Sequence[ConceptPair]) -> Batch:
        """Return the batch of some pairs: facts are its texts, names its second texts, concepts its studies."""
        facts, names = [row.fact for row in rows], [row.name for row in rows]
        return Batch(
            keys=[row.key for row in rows],
            image_BCHW=torch.zeros(len(rows), 1, 0, 0, dtype=torch.uint8),
            ids_BT=pad_rows(facts, self.tokenizer.pad_id),
            mask_BT=row_mask(facts),
            labels_BL=torch.zeros(len(rows), 0),
            texts=[""] * len(rows),
            studies=[row.concept for row in rows],
            has_image_B=torch.zeros(len(rows), dtype=torch.bool),
            second_ids_BT=pad_rows(names, self.tokenizer.pad_id),
            second_mask_BT=row_mask(names),
        )

    def _row(self, segments: Sequence[str]) -> list[int]:
        ids = [self.tokenizer.cls_id]
        for segment in segments:
            ids += [*self.tokenizer.encode_whole(segment)[0], self.tokenizer.sep_id]
        return ids if len(ids) <= self.max_tokens else [*ids[: self.max_tokens - 1], self.tokenizer.sep_id]
