"""Fine-tuning of a text encoder with a linear head on one text task (Gu et al. 2021, Section 4.2).

AdamW without weight decay of biases and norms, a linear warm-up over 10 % of the steps and a linear
decay to 0, dropout 0.1 before the linear layer and that of the encoder within it
(`medvl.eval.text_tasks.protocol` sets it for the attention), the gradient's norm at most 1. The
last weights are used: the number of epochs is a setting that is chosen on the dev split, as the
learning rate.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.common.config_io import check_within
from medvl.common.seeding import derive, preserve_generators, reseed
from medvl.data.text_tasks.tasks import TextExample, TextTask
from medvl.data.tokenizer.tokenizer import IGNORED, Tokenizer, Truncation, pad_rows, row_mask
from medvl.encoders import TextEncoder, parameter_groups
from medvl.eval.text_tasks.metrics import Predicted
from medvl.models.language.base import TextHead, TextPool

# Examples of a text task as token ids, once for all runs, and batches of similar lengths.
#
# Letters: B examples of a batch, T tokens, S mentions.

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
        """Yield all examples once: shuffled in pools of similar lengths, or by length without a
        seed.
        """
        lengths_N = np.array([len(ids) for ids in self.ids])
        if seed is None:
            order = np.argsort(lengths_N, kind="stable")
            yield from (
                self._batch(order[start : start + size].tolist())
                for start in range(0, len(order), size)
            )
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
            mention_BST = torch.stack(
                [pad_rows([self.mentions[row][s] for row in rows], 0) for s in (0, 1)], dim=1
            )
        return Batch(rows, ids_BT, row_mask(ids), types_BT, mention_BST, self._target(rows))

    def _target(self, rows: list[int]) -> Tensor:
        labels = [self.examples[row].label for row in rows]
        index = self.task.labels.index
        if self.tags is not None:
            return pad_rows([self.tags[row] for row in rows], IGNORED)
        if self.task.kind == "similarity":
            return torch.tensor(
                [float(label) for label in labels if isinstance(label, int | float)]
            )
        if self.task.kind == "documents":
            named = [label if isinstance(label, tuple) else () for label in labels]
            return torch.tensor(
                [[float(name in of_document) for name in self.task.labels] for of_document in named]
            )
        return torch.tensor([index(str(label)) for label in labels])


def encode_task(
    task: TextTask, examples: Sequence[TextExample], tokenizer: Tokenizer, *, mentions: bool = False
) -> EncodedTask:
    """Encode the examples of a split.

    Args:
        task: their task.
        examples: with the words of sentences, one text, or two.
        tokenizer: truncates to its `max_tokens`; of a question with context the context, of a pair
            the longer text.
        mentions: also mark the tokens of the two mentions of a relation.

    Raises ConfigError for a tokenizer without pairs or given words where they are needed.
    """
    ids: list[list[int]] = []
    types: list[list[int]] = []
    tags: list[list[int]] = []
    places: list[list[tuple[int, int]]] = []
    marks: list[list[list[int]]] = []
    cut = 0
    tagging = task.kind in ("entities", "words")
    pairs = len(examples[0].texts) == 2 if examples else False
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
            truncation: Truncation = (
                "only_second" if task.name in ("pubmedqa", "bioasq") else "longest_first"
            )
            pair = tokenizer.pairs([first_text], [second_text], truncation=truncation)
            ids.append(pair.ids_BT[0].tolist())
            types.append(pair.types_BT[0].tolist())
        else:
            ids.append(tokenizer(list(example.texts))[0][0].tolist())
            if mentions and example.spans is not None:
                masks = [
                    tokenizer.sentence_ids(list(example.texts), [[span]])[0] == 0
                    for span in example.spans
                ]
                marks.append([mask_T.long().tolist() for mask_T in masks])
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


_WARMUP = 0.1
_CLIP_NORM = 1.0
_WEIGHT_DECAY = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneSettings:
    """Settings of one fine-tuning."""

    lr: float = 3e-5
    batch: int = 32
    epochs: int = 20

    def __post_init__(self) -> None:
        check_within(self, "(0, inf)", "lr", "batch", "epochs")

    def __str__(self) -> str:
        return f"lr {self.lr:g}, batch {self.batch}, {self.epochs} epochs"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneGrid:
    """Settings of which the best on the dev split is used; the paper's learning rates and batch
    sizes.
    """

    lrs: tuple[float, ...] = (1e-5, 3e-5, 5e-5)
    batches: tuple[int, ...] = (16, 32)
    epochs: tuple[int, ...] = (20,)

    def __iter__(self) -> Iterator[FinetuneSettings]:
        for lr, batch, epochs in itertools.product(self.lrs, self.batches, self.epochs):
            yield FinetuneSettings(lr=lr, batch=batch, epochs=epochs)


def finetune(
    make_encoder: Callable[[], TextEncoder],
    train: EncodedTask,
    settings: FinetuneSettings,
    *,
    pool: TextPool,
    seed: int,
    device: torch.device,
    autocast: torch.dtype | None = None,
) -> TextHead:
    """Return a fine-tuned model in eval mode; the same seed gives the same weights.

    Args:
        make_encoder: returns a new encoder with the weights to start from.
        train: training examples.
        settings: learning rate, batch size and epochs.
        pool: input of the linear layer; "tokens" for tags.
        seed: seed of the head, dropout and the order of examples.
        device, autocast: device, and dtype of matrix products, None for float32.
    """
    with preserve_generators(device):
        reseed(seed, device)
        model = TextHead(make_encoder(), output_count(train), pool).to(device)
        optimizer = torch.optim.AdamW(
            parameter_groups(model, settings.lr, _WEIGHT_DECAY), lr=settings.lr
        )
        steps = settings.epochs * -(-len(train) // settings.batch)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
        model.train()
        for epoch in range(settings.epochs):
            for batch in train.batches(settings.batch, seed=derive(seed, "order", epoch)):
                with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                    logits = _logits(model, batch.to(device))
                loss = _loss(train, logits.float(), batch.target.to(device))
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP_NORM)
                optimizer.step()
                schedule.step()
    return model.eval()


@torch.no_grad()
def predict(
    model: TextHead, data: EncodedTask, *, batch: int = 64, autocast: torch.dtype | None = None
) -> Predicted:
    """Return the prediction of each example, in their order. Words that were truncated get the
    first tag.
    """
    device = model.linear.weight.device
    predictions: list[str | float | tuple[str, ...]] = [""] * len(data)
    for part in data.batches(batch):
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            logits = _logits(model, part.to(device)).float().cpu()
        for row, prediction in zip(part.rows, _decoded(data, part, logits), strict=True):
            predictions[row] = prediction
    return predictions


def output_count(data: EncodedTask) -> int:
    """Return the number of outputs of the head."""
    return 1 if data.task.kind == "similarity" else len(data.task.labels)


def _rate(step: int, steps: int) -> float:
    warmup = max(1, round(_WARMUP * steps))
    return (step + 1) / warmup if step < warmup else (steps - step) / max(1, steps - warmup)


def _logits(model: TextHead, batch: Batch) -> Tensor:
    logits: Tensor = model(batch.ids_BT, batch.mask_BT, batch.types_BT, batch.mention_BST)
    return logits


def _loss(data: EncodedTask, logits: Tensor, target: Tensor) -> Tensor:
    if data.tags is not None:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())
    if data.task.kind == "similarity":
        return F.mse_loss(logits[:, 0], target)
    if data.task.kind == "documents":
        return F.binary_cross_entropy_with_logits(logits, target)
    return F.cross_entropy(logits, target)


def _decoded(
    data: EncodedTask, batch: Batch, logits: Tensor
) -> Sequence[str | float | tuple[str, ...]]:
    labels = data.task.labels
    if data.task.kind == "similarity":
        return [float(score) for score in logits[:, 0]]
    if data.task.kind == "documents":
        chosen_BL = (logits > 0).tolist()
        return [
            tuple(name for name, on in zip(labels, row, strict=True) if on) for row in chosen_BL
        ]
    best = logits.argmax(dim=-1).tolist()
    if data.word_places is None:
        return [labels[index] for index in best]
    predictions = []
    for row, tags_T in zip(batch.rows, best, strict=True):
        words = [labels[0]] * len(data.examples[row].texts)
        for token, word in data.word_places[row]:
            words[word] = labels[tags_T[token]]
        predictions.append(tuple(words))
    return predictions
