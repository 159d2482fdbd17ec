"""Fine-tuning of a text encoder with a linear head on one text task (Gu et al. 2021, Section 4.2).

AdamW without weight decay of biases and norms, a linear warm-up over 10 % of the steps and a linear decay to 0, dropout
0.1 before the linear layer and that of the encoder within it (`medvl.eval.text_tasks.open` sets it for the attention),
the gradient's norm at most 1. The last weights are used: the number of epochs is a setting that is chosen on the dev
split, as the learning rate.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.common.checks import check_within
from medvl.common.seeding import derive, preserve_generators, reseed
from medvl.encoders import TextEncoder, parameter_groups
from medvl.eval.text_tasks.encoding import Batch, EncodedTask
from medvl.eval.text_tasks.metrics import Predicted
from medvl.models.downstream.text_head import TextHead, TextPool

_WARMUP, _CLIP_NORM, _WEIGHT_DECAY = 0.1, 1.0, 0.01


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
    """Settings of which the best on the dev split is used; the paper's learning rates and batch sizes."""

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
        optimizer = torch.optim.AdamW(parameter_groups(model, settings.lr, _WEIGHT_DECAY), lr=settings.lr)
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
def predict(model: TextHead, data: EncodedTask, *, batch: int = 64, autocast: torch.dtype | None = None) -> Predicted:
    """Return the prediction of each example, in their order. Words that were truncated get the first tag."""
    device = model.linear.weight.device
    found: list[str | float | tuple[str, ...]] = [""] * len(data)
    for part in data.batches(batch):
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            logits = _logits(model, part.to(device)).float().cpu()
        for row, prediction in zip(part.rows, _decoded(data, part, logits), strict=True):
            found[row] = prediction
    return found


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


def _decoded(data: EncodedTask, batch: Batch, logits: Tensor) -> Sequence[str | float | tuple[str, ...]]:
    labels = data.task.labels
    if data.task.kind == "similarity":
        return [float(score) for score in logits[:, 0]]
    if data.task.kind == "documents":
        chosen_BL = (logits > 0).tolist()
        return [tuple(name for name, on in zip(labels, row, strict=True) if on) for row in chosen_BL]
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
