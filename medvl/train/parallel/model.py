"""A model on one or more ranks: DDP and FSDP behind one small class."""

import abc
import collections
import contextlib
import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.export import register_dataclass
from torch.nn.parallel import DistributedDataParallel

from medvl.common.files import wait_for
from medvl.errors import CheckpointError, ConfigError, TrainingError
from medvl.models.base import System
from medvl.schema import Batch, Losses
from medvl.train.parallel.distributed import (
    RankInfo,
    average_gradients,
    broadcast,
    shared_buffers,
    unshared_buffers,
)

if TYPE_CHECKING:
    from medvl.models.report_generators.base import Objective

STATE_SEPARATOR = "::"
"""Between the name of a parameter and that of its optimiser state, in keys of a checkpoint."""


class ParallelModel(abc.ABC):
    """A model whose training is spread over the ranks. Methods are collective calls except where
    noted.

    Attributes:
        whole: the model as given to `train`; it is evaluated, saved, and loaded from checkpoints.
        trained: the model whose parameters the optimiser updates; it is `whole` unless weights are
            sharded.
        ranks: this process among the ranks.
        sharded: whether each rank holds a part of the weights, so that `trained` differs from
            `whole`.
        compiled: whether `trained` runs compiled kernels, or CUDA graphs of them; None: neither.
    """

    sharded = False
    compiled: Literal["kernels", "graphs"] | None = None

    def __init__(self, whole: nn.Module, trained: nn.Module, ranks: RankInfo) -> None:
        self.whole = whole
        self.trained = trained
        self.ranks = ranks
        self.ddp: DistributedDataParallel | None = None

    def leave_group(self) -> None:
        """Release DDP before the process group is destroyed; the model can still be used, but not
        trained.

        DDP's reducer holds the group. If it is freed after the group was destroyed, it can wait
        forever for a thread of gloo, because it holds the GIL. The traceback of an error may keep
        the DDP module, so the reducer is released for itself.
        """
        if self.ddp is not None:
            del self.ddp.reducer, self.ddp.logger
            self.ddp = None

    @abc.abstractmethod
    def forward(self, batch: Batch, objective: "Objective | None" = None) -> Losses:
        """Return the losses of this rank's batch, those of an objective of report generators where
        it is given.
        """

    @abc.abstractmethod
    def reduction(self, on: bool) -> contextlib.AbstractContextManager[None]:
        """Average the gradients of a backward pass over the ranks, or keep them on this rank for
        the next pass.
        """

    @abc.abstractmethod
    def clip(
        self,
        parameters: Sequence[nn.Parameter],
        clip_norm: float | None,
        clip_value: float | None = None,
    ) -> Tensor:
        """Scale gradients down to `clip_norm`, then limit each value; return their norm before
        that, over all ranks.
        """

    @abc.abstractmethod
    def evaluation(self) -> contextlib.AbstractContextManager[nn.Module]:
        """Return a context with `whole` on the device, its weights and buffers current and equal
        on all ranks.
        """

    @abc.abstractmethod
    def gather(self) -> None:
        """Bring the weights and buffers of `whole` up to date before it is saved; nothing to do
        without shards.
        """

    @abc.abstractmethod
    def load_from_whole(self) -> None:
        """Copy the weights and buffers of `whole` into `trained`, where they are two. Not
        collective.
        """

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights and buffers of `trained`, the buffers those of rank 0; a rank's
        part where sharded.
        """
        return self.trained.state_dict()

    def full_state(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return complete tensors of an optimiser's state, at least on rank 0."""
        return tensors

    def local_state(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return this rank's part of an optimiser's complete state. Not collective."""
        return tensors

    @abc.abstractmethod
    def check(self, batch: Batch) -> None:
        """Raise TrainingError for a batch that this kind of parallelism cannot process. Not
        collective.
        """

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
    """A model on its device with all weights on every rank: in DDP on several ranks, by itself on
    one (`ddp` is None).

    Rank 0's weights and buffers are copied to all ranks at the start. DDP broadcasts rank 0's
    buffers before each step, so the running statistics in a checkpoint are those of every rank; see
    `unshared_buffers` for the exception.
    """

    def __init__(
        self, model: nn.Module, ranks: RankInfo, find_unused_parameters: bool = False
    ) -> None:
        super().__init__(model, model, ranks)
        if ranks.size > 1:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
                model, unshared_buffers(model)
            )
            self.ddp = DistributedDataParallel(
                model,
                device_ids=[ranks.device.index] if ranks.device.type == "cuda" else None,
                find_unused_parameters=find_unused_parameters,
                gradient_as_bucket_view=True,
            )

    def forward(self, batch: Batch, objective: "Objective | None" = None) -> Losses:
        """Return the losses of this rank's batch, through DDP if there are several ranks."""
        model = self.ddp or self.trained
        losses: Losses = model(batch) if objective is None else model(batch, objective)
        return losses

    def reduction(self, on: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context in which DDP averages gradients (`on`) or leaves them on this rank."""
        return contextlib.nullcontext() if on or self.ddp is None else self.ddp.no_sync()

    def clip(
        self,
        parameters: Sequence[nn.Parameter],
        clip_norm: float | None,
        clip_value: float | None = None,
    ) -> Tensor:
        """Scale gradients down to `clip_norm`, then limit each value; return their norm before
        that.

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


# Weights sharded over the ranks, for models that do not fit (FSDP: Zhao et al., arXiv 2304.11277;
# `fully_shard`).
#
#     on each of W devices   1/W of weights, gradients and optimiser state; the complete weights
#     of one block at a time
#     in each host's memory  the complete model, as given to `train`: it is evaluated and saved
#
# So a checkpoint does not depend on sharding or the number of ranks, and evaluators get a plain
# model. The complete model is on the device during evaluation: 4 bytes per parameter, where
# unsharded training takes 16.
#
# Scalars, such as a temperature, are not sharded: every rank has them, and their gradients are
# averaged as in DDP.

_SHOWN_KEYS = 8
_UNUSED = "set_reduce_scatter_unused_params"
"""Method of `FSDPModule` that torch 2.11 does not have."""
_CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)


class FSDPModel(ParallelModel):
    """A model with its weights sharded over the ranks, and the complete model in host memory.

    Rank 0's weights and buffers are copied to all ranks at the start. `trained` is a copy of
    `whole` with parameters sharded along their first dimension; training leaves `whole` behind
    until `gather`.

    Args:
        whole: a model on the CPU, set up for training.
        ranks: two ranks or more; one in tests.
        compile: compile the repeated blocks, one by one: the hooks that gather weights run between
            compiled graphs.

    Raises ConfigError on several ranks with a torch that is too old.
    """

    sharded = True

    def __init__(self, whole: nn.Module, ranks: RankInfo, *, compile: bool = False) -> None:
        if ranks.size > 1:
            _check_torch()
        _register_losses()
        for tensor in (*whole.parameters(), *whole.buffers()):
            broadcast([tensor], ranks.hosts)
        trained, self._scalars = _copy_to_shard(whole, ranks.device)
        mesh = init_device_mesh(ranks.device.type, (ranks.size,))
        blocks = repeated_blocks(trained)
        for block in blocks if compile else ():
            block.compile()
        self.compiled = "kernels" if compile else None
        for module in (*blocks, trained):
            fully_shard(module, mesh=mesh, ignored_params=set(self._scalars))
            for method in getattr(module, "forward_methods", ()):
                register_fsdp_forward_method(module, method)
        assert isinstance(trained, FSDPModule)
        if hasattr(trained, _UNUSED):
            # Parameters that a rank's samples do not use (no masked word, say) get zero gradients:
            # no rank hangs.
            trained.set_reduce_scatter_unused_params(True)
        self._fsdp: FSDPModule = trained
        super().__init__(whole, trained, ranks)

    def forward(self, batch: Batch, objective: "Objective | None" = None) -> Losses:
        """Return the losses of this rank's batch; weights are gathered from all ranks block by
        block.
        """
        losses: Losses = (
            self.trained(batch) if objective is None else self.trained(batch, objective)
        )
        return losses

    def check(self, batch: Batch) -> None:
        """Raise TrainingError where no sample of this rank has an image, or none has a text.

        The model would skip an encoder on this rank while other ranks wait for its shard of the
        weights.
        """
        encoders = getattr(self.trained, "shared_encoders", ())
        for part, encoder, has_B in (
            ("an image", "image_encoder", batch.has_image_B),
            ("a text", "text_encoder", batch.has_text_B),
        ):
            if (not encoders or encoder in encoders) and has_B is not None and not has_B.any():
                keys = ", ".join(batch.keys[:_SHOWN_KEYS])
                message = (
                    f"none of the {len(batch)} samples of rank {self.ranks.rank} has "
                    f"{part} ({keys})"
                )
                advice = "use larger batches, leave out such samples, or leave shard_weights unset"
                raise TrainingError(f"{message}; {advice}", "empty", field="shard_weights")

    def before_step(self, step: int) -> None:
        """Copy rank 0's buffers to all ranks, then call the model's `before_step`."""
        broadcast(shared_buffers(self.trained))  # as DDP does
        super().before_step(step)

    @contextlib.contextmanager
    def reduction(self, on: bool) -> Iterator[None]:
        """Scatter averaged gradients to the shards after a backward pass, or accumulate complete
        ones on this rank.
        """
        self._fsdp.set_requires_gradient_sync(on)
        yield
        if on:
            average_gradients(self._scalars, self.ranks)

    def clip(
        self,
        parameters: Sequence[nn.Parameter],
        clip_norm: float | None,
        clip_value: float | None = None,
    ) -> Tensor:
        """Scale gradients down to `clip_norm`, then limit each value; return their norm before
        that, over all ranks.

        The norm is that of the complete gradients: squares are summed over the shards, and scalars
        are not sharded.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        shards = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
        scalars = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
        square = torch.nn.utils.get_total_norm(shards).to(self.ranks.device).square()
        dist.all_reduce(square)
        norm = (square + torch.nn.utils.get_total_norm(scalars).to(square.device).square()).sqrt()
        # torch.nn.utils.clip_grads_with_norm_ does not accept DTensors beside tensors
        if clip_norm is not None:
            torch._foreach_mul_([*shards, *scalars], (clip_norm / (norm + 1e-6)).clamp(max=1.0))
        if clip_value is not None:
            for gradient in (*shards, *scalars):
                gradient.clamp_(-clip_value, clip_value)
        return norm

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[nn.Module]:
        """Move the gathered model to the device within the context; every rank needs the memory
        for it.
        """
        broadcast(list(self.trained.buffers()))
        self.gather()
        self.whole.to(self.ranks.device)
        try:
            yield self.whole
        finally:
            self.whole.to("cpu")

    @torch.no_grad()
    def gather(self) -> None:
        """Copy the weights of all shards, and this rank's buffers, into `whole`. Collective."""
        for parameter, shard in zip(
            self.whole.parameters(), self.trained.parameters(), strict=True
        ):
            parameter.copy_(_full(shard))
        for buffer, own in zip(self.whole.buffers(), self.trained.buffers(), strict=True):
            buffer.copy_(own)

    @torch.no_grad()
    def load_from_whole(self) -> None:
        """Copy this rank's shards and the buffers from the complete model, which is the same on
        all ranks.
        """
        for parameter, shard in zip(
            self.whole.parameters(), self.trained.parameters(), strict=True
        ):
            _local(shard).copy_(_local(_shard_like(parameter, shard)))
        for buffer, own in zip(self.whole.buffers(), self.trained.buffers(), strict=True):
            own.copy_(buffer)

    def weights(self) -> Mapping[str, Tensor]:
        """Return this rank's part of the weights, and rank 0's buffers, which all ranks take
        over.
        """
        broadcast(list(self.trained.buffers()))
        return self.trained.state_dict()

    def full_state(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return complete tensors of an optimiser's state in host memory on rank 0; an empty
        dict on other ranks.
        """
        # one at a time on the device
        complete = ((name, _full(tensor)) for name, tensor in tensors.items())
        return {name: full.cpu() for name, full in complete if self.ranks.is_main}

    def local_state(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return this rank's shard of each tensor; tensors that match no parameter are returned
        as they are.
        """
        parameters = dict(self.trained.named_parameters())
        local = {}
        for name, tensor in tensors.items():
            parameter = parameters.get(parameter_name(name))
            fits = parameter is not None and parameter.shape == tensor.shape
            local[name] = _shard_like(tensor, parameter) if fits else tensor
        return local


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a network: members of a container with several modules of the
    same class.

    These are Transformer layers and residual blocks; `fully_shard` gathers the weights of one at a
    time. Of nested blocks (the stages of a CNN) the innermost are taken. Modules without children
    are not blocks.
    """
    blocks: dict[nn.Module, None] = {}  # an ordered set
    for container in model.modules():
        if not isinstance(container, _CONTAINERS):
            continue
        kinds = collections.Counter(map(type, container.children()))
        blocks |= {
            child: None
            for child in container.children()
            if kinds[type(child)] > 1 and any(child.children())
        }
    with_parameters = [block for block in blocks if any(True for _ in block.parameters())]
    return [
        block
        for block in with_parameters
        if not any(inner in blocks for inner in list(block.modules())[1:])
    ]


def _copy_to_shard(whole: nn.Module, device: torch.device) -> tuple[nn.Module, list[nn.Parameter]]:
    """Return a copy of a model, and its scalars, which are on the device.

    The other parameters share memory with `whole` until they are sharded, so that nothing is held
    twice.
    """
    copies = {}
    scalars = []
    for parameter in whole.parameters():
        data = (
            parameter.detach().contiguous()
            if parameter.ndim
            else parameter.detach().to(device, copy=True)
        )
        copies[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
        if not parameter.ndim:
            scalars.append(copies[id(parameter)])
    return copy.deepcopy(whole, copies), scalars


@functools.cache
def _register_losses() -> None:
    """Register `Losses` as a pytree, so that `fully_shard` finds the tensors at which the
    backward pass begins.
    """
    register_dataclass(Losses)


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard_like(tensor: Tensor, parameter: Tensor | None) -> Tensor:
    """Shard a tensor as the parameter is sharded. Every rank has it already, so nothing is sent."""
    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(
        tensor.detach(), parameter.device_mesh, parameter.placements, src_data_rank=None
    )


def _check_torch() -> None:
    """Raise ConfigError where this torch cannot reduce the gradients of parameters that one rank
    did not use.
    """
    if not hasattr(FSDPModule, _UNUSED):
        reason = (
            "with it, ranks could wait forever for gradients of parameters that one of "
            "them did not use"
        )
        advice = "install a newer one (2.13 has it), or leave shard_weights unset"
        message = f"shard_weights cannot be used with torch {torch.__version__}: {reason}; {advice}"
        raise ConfigError(message, "unsupported", field="shard_weights")


# Tensors of sharded models in files, one per rank, written and read side by side
# (`torch.distributed.checkpoint`).
#
# The files are safetensors; a tensor that is the same on all ranks is in one of them. Any number
# of ranks can read them.


def write_parts(folder: Path, tensors: Mapping[str, Tensor], ranks: RankInfo) -> None:
    """Write this rank's part of the tensors into an existing folder. Collective call.

    Raises CheckpointError on all ranks where one of them cannot write.
    """
    ranks.on_all(lambda: wait_for(folder))
    with _failures(folder, "written"):
        writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
        dcp.save(dict(tensors), storage_writer=writer, process_group=ranks.hosts)


def read_parts(folder: Path, tensors: Mapping[str, Tensor], ranks: RankInfo) -> None:
    """Fill the tensors of this rank from a folder that `write_parts` filled on any number of ranks.
    Collective call.

    Raises CheckpointError on all ranks where a tensor is missing or of another shape, or one of
    them cannot read it.
    """
    with _failures(folder, "read"):
        reader = dcp.HuggingFaceStorageReader(str(folder))
        dcp.load(dict(tensors), storage_reader=reader, process_group=ranks.hosts)


def empty_state(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """Return an empty tensor, sharded as its parameter is, for every entry of an optimiser's
    state in a folder.
    """
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    state: dict[str, Tensor] = {}
    for name, entry in (
        dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata.items()
    ):
        assert isinstance(entry, dcp.TensorStorageMetadata)
        parameter = parameters.get(parameter_name(name))
        dtype = entry.properties.dtype
        if isinstance(parameter, DTensor) and parameter.shape == entry.size:
            state[name] = torch.empty_like(parameter.detach(), dtype=dtype)
        else:
            state[name] = torch.empty(entry.size, dtype=dtype)
    return state


@contextlib.contextmanager
def _failures(folder: Path, verb: str) -> Iterator[None]:
    """Raise CheckpointError for failures on any rank, which torch collects in an exception of
    its own.
    """
    try:
        yield
    except dcp.CheckpointException as failure:
        rank, (error, _) = next(iter(failure.failures.items()))
        message = f"{folder} cannot be {verb} by rank {rank} ({type(error).__name__}: {error})"
        raise CheckpointError(message, "unreadable") from failure
