"""Large contrastive batches in the memory of small ones (GradCache: Gao et al., arXiv 2101.06983,
section 3.2).

    encode every part, without a graph     embeddings of the complete batch
    loss over all of them, backward        a gradient for every embedding, and for the temperature
    encode every part again, with a graph  backward from its embeddings' gradients

The gradient equals that of the complete batch up to the order of sums. A part draws the same random
numbers (dropout) both times. Batch norm is the exception: it uses the statistics of a part, as
under any other splitting of a batch.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from medvl.errors import ConfigError
from medvl.models.dual_encoders.bases.base import DualEncoder
from medvl.models.dual_encoders.bases.pairs import Pairs
from medvl.schema import Batch, Losses
from medvl.train.fault_tolerance.guards import BufferGuard, propagate_nonfinite
from medvl.train.optim.optimizer import Precision


class GradCache:
    """Forward and backward pass of a batch in parts.

    The gradients are those of this rank, before averaging
    (`medvl.train.parallel.distributed.average_gradients`).

    Args:
        model: a contrastive dual-encoder, whose loss depends on the embeddings of a batch only.
        part: maximum number of pairs encoded at a time.
        precision: as for the step.

    Raises ConfigError for any other model.
    """

    def __init__(self, model: nn.Module, part: int, precision: Precision) -> None:
        if not (isinstance(model, DualEncoder) and model.compares_pairs):
            raise ConfigError(
                "grad_cache needs a contrastive dual-encoder, whose loss depends on the "
                "embeddings only (ConVIRT, "
                f"CLIP, GLoRIA, ...), got {getattr(model, 'name', type(model).__name__)}; leave "
                f"it unset",
                "unsupported",
                field="grad_cache",
            )
        self._model = model
        self._part = part
        self._precision = precision
        self._buffers = BufferGuard(model)

    def __call__(self, batch: Batch, count: int, seed_part: Callable[[int], None]) -> Losses:
        """Add the gradient of the total loss divided by `count` to the parameters; return the
        losses.

        `seed_part` seeds the generators for a part, given its number.
        """
        parts = list(_split(batch, self._part))
        with torch.no_grad():
            self._buffers.save()
            encoded = [self._encode(part, number, seed_part) for number, part in enumerate(parts)]
            # so that running statistics are updated by the second pass only
            self._buffers.restore()
        leaves = [[tensor.requires_grad_() for tensor in pairs.tensors()] for pairs in encoded]
        with self._precision.autocast():
            losses = self._model.pair_losses(Pairs.cat(encoded))
        self._precision.backward(propagate_nonfinite(losses.total) / count)
        for number, (part, cached) in enumerate(zip(parts, leaves, strict=True)):
            embeddings = self._encode(part, number, seed_part).tensors()
            # Embeddings of a frozen encoder have no graph, and a level of weight 0 has no gradient.
            pairs = [
                (embedding, leaf.grad)
                for embedding, leaf in zip(embeddings, cached, strict=True)
                if embedding.requires_grad and leaf.grad is not None
            ]
            torch.autograd.backward(
                [embedding for embedding, _ in pairs], [gradient for _, gradient in pairs]
            )
        return losses

    def _encode(self, part: Batch, number: int, seed_part: Callable[[int], None]) -> Pairs:
        seed_part(number)
        with self._precision.autocast():
            return self._model.encode_pairs(part)


def _split(batch: Batch, size: int) -> Iterator[Batch]:
    """Yield the rows of a batch in as few and as even parts as possible, so that batch norms
    have rows enough.
    """
    columns = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    parts = -(-len(batch) // size)
    for number in range(parts):
        rows = slice(number * len(batch) // parts, (number + 1) * len(batch) // parts)
        part: dict[str, Any] = {
            name: None if column is None else column[rows] for name, column in columns.items()
        }
        yield Batch(**part)
