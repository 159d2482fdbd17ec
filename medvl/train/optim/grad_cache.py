"""Large contrastive batches in the memory of small ones (GradCache: Gao et al., arXiv 2101.06983, section 3.2).

    encode every part, without a graph           embeddings of the whole batch
    the loss over all of them, backward          a gradient for every embedding, and for the temperature
    encode every part again, with a graph        and go on backward from its embeddings' gradients

The gradient is that of the whole batch at once, but for the order of sums. Both times a part draws the same (dropout).
Batch norm is the exception: it takes the statistics of a part, as it does under any other splitting of a batch.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from medvl.errors import ConfigError
from medvl.models.dual_encoders.base import ContrastiveEncoder
from medvl.models.dual_encoders.pairs import Pairs
from medvl.schema import Batch, Losses
from medvl.train.fault_tolerance.nonfinite import BufferGuard, propagate_nonfinite
from medvl.train.optim.precision import Precision


class GradCache:
    """Forward and backward of a batch in parts.

    The gradients are this rank's: they are not averaged over the ranks yet (`medvl.train.parallel.distributed`).

    Args:
        model: one whose loss asks nothing of a batch but its embeddings.
        part: pairs that are encoded at a time, at most.
        precision: as for the step.

    Raises ConfigError for any other model.
    """

    def __init__(self, model: nn.Module, part: int, precision: Precision) -> None:
        if not isinstance(model, ContrastiveEncoder):
            raise ConfigError(
                f"grad_cache is for models whose loss asks nothing of a batch but its embeddings (ConVIRT, CLIP and "
                f"its kin, GLoRIA): {getattr(model, 'name', type(model).__name__)} is none, leave it unset"
            )
        self._model, self._part, self._precision = model, part, precision
        self._buffers = BufferGuard(model)

    def __call__(self, batch: Batch, count: int, draw: Callable[[int], None]) -> Losses:
        """The losses of the batch; adds the gradient of their total over `count` to the parameters'.

        `draw` seeds the generators for a part, given its number.
        """
        parts = list(_split(batch, self._part))
        with torch.no_grad():
            self._buffers.take()
            encoded = [self._encode(part, number, draw) for number, part in enumerate(parts)]
            self._buffers.restore()  # running statistics count a batch once: in the second pass
        leaves = [[tensor.requires_grad_() for tensor in pairs.tensors()] for pairs in encoded]
        with self._precision.autocast():
            losses = self._model.pair_losses(Pairs.cat(encoded))
        self._precision.backward(propagate_nonfinite(losses.total) / count)
        for number, (part, cached) in enumerate(zip(parts, leaves, strict=True)):
            again = self._encode(part, number, draw).tensors()
            # A frozen tower's embeddings have no graph, and a level of weight 0 no gradient.
            joints = [
                (end, leaf.grad)
                for end, leaf in zip(again, cached, strict=True)
                if end.requires_grad and leaf.grad is not None
            ]
            torch.autograd.backward([end for end, _ in joints], [gradient for _, gradient in joints])
        return losses

    def _encode(self, part: Batch, number: int, draw: Callable[[int], None]) -> Pairs:
        draw(number)
        with self._precision.autocast():
            return self._model.encode_pairs(part)


def _split(batch: Batch, size: int) -> Iterator[Batch]:
    """Rows of a batch in as few parts as there must be, and as even: batch norm dislikes a part of one."""
    columns = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    parts = -(-len(batch) // size)
    for number in range(parts):
        rows = slice(number * len(batch) // parts, (number + 1) * len(batch) // parts)
        part: dict[str, Any] = {name: None if column is None else column[rows] for name, column in columns.items()}
        yield Batch(**part)
