"""A model on one or more ranks: DDP and FSDP behind one small class."""

import abc
import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from medvl.models.base import System
from medvl.schema import Batch, Losses
from medvl.train.parallel.distributed import RankInfo, broadcast, unshared_buffers

STATE_SEPARATOR = "::"
"""Between the name of a parameter and that of its optimiser state, in keys of a checkpoint."""


class ParallelModel(abc.ABC):
    """A model whose training is spread over the ranks. Methods are collective calls except where noted.

    Attributes:
        whole: the model as given to `train`; it is evaluated, saved, and loaded from checkpoints.
        trained: the model whose parameters the optimiser updates; it is `whole` unless weights are sharded.
        ranks: this process among the ranks.
        sharded: whether each rank holds a part of the weights, so that `trained` differs from `whole`.
    """

    sharded = False

    def __init__(self, whole: nn.Module, trained: nn.Module, ranks: RankInfo) -> None:
        self.whole, self.trained, self.ranks = whole, trained, ranks
        self.ddp: DistributedDataParallel | None = None

    def leave_group(self) -> None:
        """Release DDP before the process group is destroyed; the model can still be used, but not trained.

        DDP's reducer holds the group. If it is freed after the group was destroyed, it can wait forever for a thread of
        gloo, because it holds the GIL. The traceback of an error may keep the DDP module, so the reducer is released
        for itself.
        """
        if self.ddp is not None:
            del self.ddp.reducer, self.ddp.logger
            self.ddp = None

    @abc.abstractmethod
    def forward(self, batch: Batch) -> Losses:
        """Return the losses of this rank's batch."""

    @abc.abstractmethod
    def reduction(self, on: bool) -> contextlib.AbstractContextManager[None]:
        """Average the gradients of a backward pass over the ranks, or keep them on this rank for the next pass."""

    @abc.abstractmethod
    def clip(
        self, parameters: Sequence[nn.Parameter], clip_norm: float | None, clip_value: float | None = None
    ) -> Tensor:
        """Scale gradients down to `clip_norm`, then limit each value; return their norm before that, over all ranks."""

    @abc.abstractmethod
    def evaluation(self) -> contextlib.AbstractContextManager[nn.Module]:
        """Return a context with `whole` on the device, its weights and buffers current and equal on all ranks."""

    @abc.abstractmethod
    def gather(self) -> None:
        """Bring the weights and buffers of `whole` up to date before it is saved; nothing to do without shards."""

    @abc.abstractmethod
    def load_from_whole(self) -> None:
        """Copy the weights and buffers of `whole` into `trained`, where they are two. Not collective."""

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights and buffers of `trained`, the buffers those of rank 0; a rank's part where sharded."""
        return self.trained.state_dict()

    def full_state(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return complete tensors of an optimiser's state, at least on rank 0."""
        return tensors

    def local_state(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return this rank's part of an optimiser's complete state. Not collective."""
        return tensors

    @abc.abstractmethod
    def check(self, batch: Batch) -> None:
        """Raise TrainingError for a batch that this kind of parallelism cannot process. Not collective."""

    @torch.no_grad()
    def before_step(self, step: int) -> None:
        """Call the model's `before_step`; a plain module has none."""
        if isinstance(self.trained, System):
            self.trained.before_step(step)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Call the model's `after_step`; a plain module has none."""
        if isinstance(self.trained, System):
            self.trained.after_step(step)


class DDPModel(ParallelModel):
    """A model on its device with all weights on every rank: in DDP on several ranks, by itself on one (`ddp` is None).

    Rank 0's weights and buffers are copied to all ranks at the start. DDP broadcasts rank 0's buffers before each step,
    so the running statistics in a checkpoint are those of every rank; see `unshared_buffers` for the exception.
    """

    def __init__(self, model: nn.Module, ranks: RankInfo, find_unused_parameters: bool = False) -> None:
        super().__init__(model, model, ranks)
        if ranks.size > 1:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, unshared_buffers(model))
            self.ddp = DistributedDataParallel(
                model,
                device_ids=[ranks.device.index] if ranks.device.type == "cuda" else None,
                find_unused_parameters=find_unused_parameters,
                gradient_as_bucket_view=True,
            )

    def forward(self, batch: Batch) -> Losses:
        """Return the losses of this rank's batch, through DDP where there are several ranks."""
        losses: Losses = (self.ddp or self.trained)(batch)
        return losses

    def reduction(self, on: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context in which DDP averages gradients (`on`) or leaves them on this rank."""
        return contextlib.nullcontext() if on or self.ddp is None else self.ddp.no_sync()

    def clip(
        self, parameters: Sequence[nn.Parameter], clip_norm: float | None, clip_value: float | None = None
    ) -> Tensor:
        """Scale gradients down to `clip_norm`, then limit each value; return their norm before that.

        DDP has averaged the gradients, so the norm is the same on all ranks.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
        if clip_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, clip_value)
        return norm

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[nn.Module]:
        """Yield the model, its buffers those of rank 0."""
        if self.ranks.size > 1:  # rank 0's buffers are those that a checkpoint holds
            broadcast(list(self.whole.buffers()))
        yield self.whole

    def gather(self) -> None:
        """Return at once: `whole` is the model that is trained."""

    def load_from_whole(self) -> None:
        """Return at once: `whole` is the model that is trained."""

    def check(self, batch: Batch) -> None:
        """Return at once: every batch can be processed."""


def parameter_name(key: str) -> str:
    """Return the parameter name in a key of `optimizer_tensors`."""
    return key.rpartition(STATE_SEPARATOR)[0]
