"""Entities of tokenized texts, and the tokens that mention them. B texts, T tokens, N entities of a text."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.schema import FindsEntities


class LinkedEntities(NamedTuple):
    """Entities of a batch of texts."""

    entity_BN: Tensor
    """int64: entities in the order of the text, once for each mention; -1 is padding. N is at least 1."""
    mention_BT: Tensor
    """int64: the column of `entity_BN` that a token is part of, -1 for none."""


class EntityLinker:
    """Finder of entities in token ids, for any vocabulary.

    Texts are spelled from their tokens, so that truncation and every cleaning of the tokenizer are respected, and a
    model finds the same entities in ids as a loader. A mention has all tokens that share a character with it; words
    with an unknown token are not found.

    Args:
        finder: dictionary of the entities.
        tokenizer: the texts' tokenizer.
        most: maximum number of entities of a text; later ones are left out.
    """

    def __init__(self, finder: FindsEntities, tokenizer: Tokenizer, most: int = 24) -> None:
        self.finder, self.tokenizer, self.most = finder, tokenizer, most

    def __call__(self, ids_BT: Tensor, mask_BT: Tensor) -> LinkedEntities:
        """Return the entities of a batch, on the CPU."""
        lengths, spelling = mask_BT.sum(dim=1).tolist(), self.tokenizer.token_texts
        rows = [
            self._link([spelling[number] for number in ids[:length]])
            for ids, length in zip(ids_BT.tolist(), lengths, strict=True)
        ]
        mention_BT = np.full(tuple(ids_BT.shape), -1, np.int64)
        for row, (_, mention_T) in enumerate(rows):
            mention_BT[row, : len(mention_T)] = mention_T
        return LinkedEntities(pad_entities([entities for entities, _ in rows]), torch.from_numpy(mention_BT))

    def _link(self, pieces: Sequence[str]) -> tuple[list[int], np.ndarray]:
        """Return the entities of one text and the mention of each of its tokens."""
        text = "".join(pieces)
        mentions = self.finder.find(text)[: self.most]
        if not mentions:
            return [], np.full(len(pieces), -1, np.int64)
        ends = list(itertools.accumulate(map(len, pieces)))
        end_T = np.array([end - len(piece) + len(piece.rstrip()) for end, piece in zip(ends, pieces, strict=True)])
        start_T = np.array([end - len(piece.lstrip()) for end, piece in zip(ends, pieces, strict=True)])
        start_M, end_M, _ = np.array(mentions).T
        mention_T = np.searchsorted(end_M, start_T, side="right")  # the first that ends behind the token's start
        inside_T = (mention_T < len(mentions)) & (start_M[mention_T.clip(max=len(mentions) - 1)] < end_T)
        return [entity for _, _, entity in mentions], np.where(inside_T & (start_T < end_T), mention_T, -1)


def pad_entities(entities: Sequence[Sequence[int]]) -> Tensor:
    """Return (B, N) int64 from the entities of each row, padded with -1; N is at least 1."""
    width = max([1, *map(len, entities)])
    padded = [[*of_row, *[-1] * (width - len(of_row))] for of_row in entities]
    return torch.tensor(padded, dtype=torch.int64).view(len(entities), width)
