"""One update of the weights."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from medvl.common.seeding import derive, reseed
from medvl.schema import Batch, Losses
from medvl.train.fault_tolerance.nonfinite import BufferGuard, LossSpikeDetector, propagate_nonfinite
from medvl.train.optim.grad_cache import GradCache
from medvl.train.optim.optimizer import set_lr, trainable
from medvl.train.optim.precision import Precision
from medvl.train.parallel.distributed import RankInfo, average_gradients
from medvl.train.parallel.prefetch import place

if TYPE_CHECKING:
    from medvl.train.parallel.fsdp import FSDPModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """What an update was. Tensors stay on the device: nothing here has been waited for but `finite`."""

    losses: list[Losses]
    """Of each micro-batch, detached."""
    grad_norm: Tensor
    """Before clipping, over all ranks."""
    keys: list[list[str]]
    """Sample keys of each micro-batch of this rank."""
    updated: bool
    """Whether the weights were: not where loss or gradient was not finite, or the loss a spike."""
    spike: bool = False
    """Finite, but far above the losses before it."""
    scale_search: bool = False
    """Not finite because fp16's loss scale was still too large, which is no fault of the data."""

    @property
    def pairs(self) -> int:
        """Pairs of this rank."""
        return sum(map(len, self.keys))

    def suspects(self) -> list[str]:
        """Keys of this rank's micro-batches whose loss was not finite."""
        broken = [
            keys for keys, losses in zip(self.keys, self.losses, strict=True) if not bool(losses.total.isfinite())
        ]
        return [key for keys in broken for key in keys]


class Step:
    """Forward, backward, check, update."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        world: RankInfo,
        *,
        seed: int,
        clip_norm: float | None,
        channels_last: bool,
        grad_cache: int | None = None,
        spikes: LossSpikeDetector | None = None,
        shards: "FSDPModel | None" = None,
    ) -> None:
        self.module, self.optimizer, self.precision, self.world = module, optimizer, precision, world
        self._spikes, self._shards = spikes, shards
        self._seed, self._clip_norm, self._channels_last = seed, clip_norm, channels_last
        self._parameters = trainable(optimizer)
        model = module.module if isinstance(module, DistributedDataParallel) else module
        self._cache = None if grad_cache is None else GradCache(model, grad_cache, precision)
        self._buffers = BufferGuard(module)

    def __call__(self, step: int, lr: float, batches: Iterable[Batch], count: int) -> StepResult:
        """Update number `step` with the rate `lr` from `count` micro-batches, whose losses are averaged.

        A loss or gradient that is not finite, on any rank and in any micro-batch, leaves weights, optimiser and buffers
        as they were, and so does a spike. All ranks decide alike because they look at the gradient after its reduction,
        and at the mean of all their losses.
        """
        self._buffers.take()
        if self._shards is not None:
            self._shards.share_buffers()
        losses, keys = [], []
        for micro, batch in enumerate(batches):
            if self._shards is not None:
                self._shards.check(batch)
            draw = functools.partial(self._draw, step, micro, self.world.rank)
            if self._cache is None:
                draw()
                with self._reduction(on=micro == count - 1):
                    with self.precision.autocast():
                        loss = self.module(self.place(batch))
                    self.precision.backward(propagate_nonfinite(loss.total) / count)
            else:
                loss = self._cache(self.place(batch), count, draw)
            losses.append(_detached(loss))
            keys.append(batch.keys)
        if self._cache is not None:
            average_gradients(self._parameters, self.world)  # of many backward passes: DDP would average after one
        self.precision.unscale(self.optimizer)
        grad_norm = self._clip()
        finite = bool(grad_norm.isfinite())  # the step's only wait for the device
        spike = finite and self._spikes is not None and self._spikes.judge(self._mean(losses))
        searching = False
        if finite and not spike:
            set_lr(self.optimizer, lr)
            self.precision.update(self.optimizer)
        else:
            broken = not all(bool(loss.total.isfinite()) for loss in losses)
            searching = not spike and self.precision.skip() and not self.world.any(broken)
            self._buffers.restore()
        self.optimizer.zero_grad(set_to_none=True)
        made = {"updated": finite and not spike, "spike": spike, "scale_search": searching}
        return StepResult(losses=losses, grad_norm=grad_norm, keys=keys, **made)

    def place(self, batch: Batch) -> Batch:
        """The batch on this rank's device, in the model's memory format, if it is not there yet."""
        return place(batch, self.world.device, self._channels_last)

    def _draw(self, *position: int) -> None:
        """Seed the generators for what comes next, wherever the run has been before."""
        reseed(derive(self._seed, "step", *position), self.world.device)

    def _reduction(self, on: bool) -> contextlib.AbstractContextManager[None]:
        """Gradients are reduced in the last micro-batch only."""
        if self._shards is not None:
            return self._shards.reduction(on)
        if on or not isinstance(self.module, DistributedDataParallel):
            return contextlib.nullcontext()
        return self.module.no_sync()

    def _mean(self, losses: list[Losses]) -> float:
        """Of the update's losses, over micro-batches and ranks."""
        mine = float(torch.stack([loss.total for loss in losses]).double().mean())
        return sum(self.world.exchange(mine)) / self.world.size

    def _clip(self) -> Tensor:
        """Norm of the gradient over all parameters, before it is scaled down to `clip_norm`."""
        if self._shards is not None:
            return self._shards.clip(self._parameters, self._clip_norm)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self._clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._clip_norm, norm)
        return norm


def _detached(losses: Losses) -> Losses:
    terms = {name: term.detach() for name, term in losses.terms.items()}
    return Losses(total=losses.total.detach(), terms=terms)
