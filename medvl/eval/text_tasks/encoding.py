"""Examples of a text task as token ids, once for all runs, and batches of similar lengths.

Letters: B examples of a batch, T tokens, S mentions.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from medvl.data.text_tasks.tasks import TextExample, TextTask
from medvl.data.tokenizer.encoded import IGNORED, Truncation, pad_rows, row_mask
from medvl.data.tokenizer.tokenizer import Tokenizer

_POOL = 50
"""Batches whose examples are sorted by length together."""


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """A batch, padded to its longest example."""

    rows: list[int]
    ids_BT: Tensor
    mask_BT: Tensor
    types_BT: Tensor | None
    mention_BST: Tensor | None
    target: Tensor
    """Tags (B, T) with -100 where there is none, classes (B), labels (B, L), or scores (B)."""

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device."""
        types_BT = None if self.types_BT is None else self.types_BT.to(device)
        mention_BST = None if self.mention_BST is None else self.mention_BST.to(device)
        moved = [tensor.to(device) for tensor in (self.ids_BT, self.mask_BT, self.target)]
        return Batch(self.rows, moved[0], moved[1], types_BT, mention_BST, moved[2])


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedTask:
    """Encoded examples of one split."""

    task: TextTask
    examples: Sequence[TextExample]
    ids: list[list[int]]
    types: list[list[int]] | None
    tags: list[list[int]] | None
    mentions: list[list[list[int]]] | None
    """For both mentions of an example, 1 on its tokens."""
    word_places: list[list[tuple[int, int]]] | None
    """(token, word) of each first piece, for tags."""
    pad_id: int
    cut: int
    """Words without a token, because their sentence was truncated."""

    def __len__(self) -> int:
        return len(self.examples)

    def batches(self, size: int, seed: int | None = None) -> Iterator[Batch]:
        """Yield all examples once: shuffled in pools of similar lengths, or by length without a seed."""
        lengths_N = np.array([len(ids) for ids in self.ids])
        if seed is None:
            order = np.argsort(lengths_N, kind="stable")
            yield from (self._batch(order[start : start + size].tolist()) for start in range(0, len(order), size))
            return
        generator = np.random.default_rng(seed)
        order = generator.permutation(len(lengths_N))
        groups: list[list[int]] = []
        for start in range(0, len(order), size * _POOL):
            pool = order[start : start + size * _POOL]
            pool = pool[np.argsort(lengths_N[pool], kind="stable")]
            groups += [pool[first : first + size].tolist() for first in range(0, len(pool), size)]
        for number in generator.permutation(len(groups)):
            yield self._batch(groups[number])

    def _batch(self, rows: list[int]) -> Batch:
        ids = [self.ids[row] for row in rows]
        ids_BT = pad_rows(ids, self.pad_id)
        types_BT = None if self.types is None else pad_rows([self.types[row] for row in rows], 0)
        mention_BST = None
        if self.mentions is not None:
            mention_BST = torch.stack([pad_rows([self.mentions[row][s] for row in rows], 0) for s in (0, 1)], dim=1)
        return Batch(rows, ids_BT, row_mask(ids), types_BT, mention_BST, self._target(rows))

    def _target(self, rows: list[int]) -> Tensor:
        labels, index = [self.examples[row].label for row in rows], self.task.labels.index
        if self.tags is not None:
            return pad_rows([self.tags[row] for row in rows], IGNORED)
        if self.task.kind == "similarity":
            return torch.tensor([float(label) for label in labels if isinstance(label, int | float)])
        if self.task.kind == "documents":
            named = [label if isinstance(label, tuple) else () for label in labels]
            return torch.tensor([[float(name in of_document) for name in self.task.labels] for of_document in named])
        return torch.tensor([index(str(label)) for label in labels])


def encode_task(
    task: TextTask, examples: Sequence[TextExample], tokenizer: Tokenizer, *, mentions: bool = False
) -> EncodedTask:
    """Encode the examples of a split.

    Args:
        task: their task.
        examples: with the words of sentences, one text, or two.
        tokenizer: truncates to its `max_tokens`; of a question with context the context, of a pair the longer text.
        mentions: also mark the tokens of the two mentions of a relation.

    Raises ConfigError for a tokenizer without pairs or given words where they are needed.
    """
    ids: list[list[int]] = []
    types: list[list[int]] = []
    tags: list[list[int]] = []
    places: list[list[tuple[int, int]]] = []
    marks: list[list[list[int]]] = []
    cut = 0
    tagging, pairs = task.kind in ("entities", "words"), len(examples[0].texts) == 2 if examples else False
    for example in examples:
        if tagging:
            encoded = tokenizer.given_words([example.texts])
            label = example.label if isinstance(example.label, tuple) else ()
            row_T = encoded.labels([[task.labels.index(tag) for tag in label]])[0]
            first = encoded.first_BT[0].nonzero()[:, 0].tolist()
            places.append([(token, int(encoded.word_BT[0, token])) for token in first])
            cut += len(example.texts) - len(first)
            ids.append(encoded.ids_BT[0].tolist())
            tags.append(row_T.tolist())
        elif pairs:
            first_text, second_text = example.texts
            truncation: Truncation = "only_second" if task.name in ("pubmedqa", "bioasq") else "longest_first"
            pair = tokenizer.pairs([first_text], [second_text], truncation=truncation)
            ids.append(pair.ids_BT[0].tolist())
            types.append(pair.types_BT[0].tolist())
        else:
            ids.append(tokenizer(list(example.texts))[0][0].tolist())
            if mentions and example.spans is not None:
                found = [tokenizer.sentence_ids(list(example.texts), [[span]])[0] == 0 for span in example.spans]
                marks.append([mask_T.long().tolist() for mask_T in found])
    has_types = any(1 in row for row in types)
    return EncodedTask(
        task=task,
        examples=examples,
        ids=ids,
        types=types if has_types else None,
        tags=tags if tagging else None,
        mentions=marks if len(marks) == len(examples) and marks else None,
        word_places=places if tagging else None,
        pad_id=tokenizer.pad_id,
        cut=cut,
    )
