"""Weights cut over the ranks, for models that do not fit (FSDP: Zhao et al., arXiv 2304.11277; torch's `fully_shard`).

    on each of W ranks     1/W of weights, gradients and optimiser state; of one block at a time the whole weights
    in each host's memory  the whole model, as it was given to `train`: it is what is judged and saved

So a checkpoint is the same whether a run was sharded or not, on however many ranks, and evaluators meet a plain model.
The whole one is on the device while it is judged: 4 bytes a parameter, where training would take 16 without shards.

Scalars, such as a temperature, are not cut: every rank has them, and their gradients are averaged as DDP averages them.
"""

import collections
import contextlib
import copy
import functools
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.export import register_dataclass
from torch.optim.swa_utils import AveragedModel

from medvl.errors import ConfigError, TrainingError
from medvl.schema import Batch, Losses
from medvl.train.optim.optimizer import parameter_name
from medvl.train.parallel.distributed import RankInfo, average_gradients, broadcast, shared_buffers

_SHOWN_KEYS = 8
_CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)


class FSDPModel:
    """This rank's part of a model, and the whole model in host memory.

    Rank 0's weights and buffers become everyone's, as with DDP. Methods are calls of all ranks, but for `check`,
    `place` and `own_parts`.

    Attributes:
        whole: the model that was given. Training leaves it behind; `gather` brings it up to date.
        module: the model that is trained, its parameters cut along their first dimension.

    Args:
        whole: a model on the CPU, set up for training.
        world: two ranks or more.

    Raises ConfigError for a model that changes its weights in its forward pass, where most of them are not.
    """

    def __init__(self, whole: nn.Module, world: RankInfo) -> None:
        if any(isinstance(module, AveragedModel) for module in whole.modules()):
            raise ConfigError(
                f"shard_weights: {getattr(whole, 'name', type(whole).__name__)} moves an average of its weights in its "
                "forward pass, where a rank has parts of them only: leave it unset"
            )
        _losses_are_a_tree()
        self.whole, self._world = whole, world
        for tensor in (*whole.parameters(), *whole.buffers()):
            broadcast([tensor], world.hosts)
        self.module, self._scalars = _twin(whole, world.device)
        mesh = init_device_mesh(world.device.type, (world.size,))
        for module in (*repeated_blocks(self.module), self.module):
            fully_shard(module, mesh=mesh, ignored_params=set(self._scalars))
        assert isinstance(self.module, FSDPModule)
        # What a rank's samples do not speak to has no gradient there (no masked word, say): a zero, then.
        self.module.set_reduce_scatter_unused_params(True)

    def check(self, batch: Batch) -> None:
        """Raises TrainingError where no sample of this rank has an image, or none a text.

        The model would then leave out an encoder here while other ranks wait for this one's share of its weights.
        """
        for what, has_B in (("an image", batch.has_image_B), ("a text", batch.has_text_B)):
            if has_B is not None and not has_B.any():
                raise TrainingError(
                    f"shard_weights: none of the {len(batch)} samples of rank {self._world.rank} has {what} "
                    f"({', '.join(batch.keys[:_SHOWN_KEYS])}): the ranks would wait for each other. Take larger "
                    "batches, leave such samples out of the data, or leave it unset"
                )

    def share_buffers(self) -> None:
        """Rank 0's running statistics become those of all ranks, as DDP has it before each update."""
        broadcast(shared_buffers(self.module))

    @contextlib.contextmanager
    def reduction(self, on: bool) -> Iterator[None]:
        """Whether the gradients of a backward pass within this context are averaged, or kept for the next one's."""
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(on)
        yield
        if on:
            average_gradients(self._scalars, self._world)

    def clip(self, parameters: Sequence[nn.Parameter], clip_norm: float | None) -> Tensor:
        """Norm of the gradient over all parameters, before it is scaled down to `clip_norm`; the same on all ranks."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        parts = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
        scalars = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
        square = torch.nn.utils.get_total_norm(parts).to(self._world.device).square()
        dist.all_reduce(square)
        norm = (square + torch.nn.utils.get_total_norm(scalars).to(square.device).square()).sqrt()
        if clip_norm is not None:  # as torch.nn.utils.clip_grads_with_norm_ does, which takes no mixture of kinds
            torch._foreach_mul_([*parts, *scalars], (clip_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @torch.no_grad()
    def gather(self) -> None:
        """The whole model gets the weights and buffers of now."""
        for parameter, part in zip(self.whole.parameters(), self.module.parameters(), strict=True):
            parameter.copy_(_full(part))
        for buffer, own in zip(self.whole.buffers(), self.module.buffers(), strict=True):
            buffer.copy_(own)

    @torch.no_grad()
    def place(self) -> None:
        """Each rank takes its part of the whole model, which is the same on all of them."""
        for parameter, part in zip(self.whole.parameters(), self.module.parameters(), strict=True):
            _local(part).copy_(_local(_cut_like(parameter, part)))
        for buffer, own in zip(self.whole.buffers(), self.module.buffers(), strict=True):
            own.copy_(buffer)

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """The whole model has the weights of now, and is on the device within this context."""
        self.gather()
        self.whole.to(self._world.device)
        try:
            yield
        finally:
            self.whole.to("cpu")

    def full_state(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors of what `optimizer_tensors` gives, on rank 0 and in host memory; nothing on the other ranks."""
        found = {}
        for name, tensor in tensors.items():
            full = _full(tensor)  # one after the other: no more than one of them is whole on the device
            if self._world.is_main:
                found[name] = full.cpu()
        return found

    def own_parts(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of each tensor of an optimiser's whole state; what fits no parameter stays as it is."""
        parameters = dict(self.module.named_parameters())
        found = {}
        for name, tensor in tensors.items():
            parameter = parameters.get(parameter_name(name))
            fits = parameter is not None and parameter.shape == tensor.shape
            found[name] = _cut_like(tensor, parameter) if fits else tensor
        return found


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that a network is a row of: members of a list or sequence, several there of one class.

    Transformer layers and residual blocks, for which `fully_shard` gathers weights one after the other. Of blocks
    within blocks (the stages of a CNN) it is the innermost; what has no modules of its own, such as a linear layer,
    is no block.
    """
    found: dict[nn.Module, None] = {}  # an ordered set
    for container in model.modules():
        if not isinstance(container, _CONTAINERS):
            continue
        kinds = collections.Counter(map(type, container.children()))
        found |= {child: None for child in container.children() if kinds[type(child)] > 1 and any(child.children())}
    with_parameters = [block for block in found if any(True for _ in block.parameters())]
    return [block for block in with_parameters if not any(inner in found for inner in list(block.modules())[1:])]


def _twin(whole: nn.Module, device: torch.device) -> tuple[nn.Module, list[nn.Parameter]]:
    """A copy of a model and its scalars, which are on the device. Its other parameters share the memory of the model's
    own until they are cut, so that nothing is there twice."""
    twins, scalars = {}, []
    for parameter in whole.parameters():
        data = parameter.detach().contiguous() if parameter.ndim else parameter.detach().to(device, copy=True)
        twins[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
        if not parameter.ndim:
            scalars.append(twins[id(parameter)])
    return copy.deepcopy(whole, twins), scalars


@functools.cache
def _losses_are_a_tree() -> None:
    """Let `fully_shard` find the tensors of what a model returns: its backward pass begins at them."""
    register_dataclass(Losses)


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _cut_like(tensor: Tensor, parameter: Tensor | None) -> Tensor:
    """The tensor, cut as the parameter is; every rank has it, so nothing is sent."""
    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(tensor.detach(), parameter.device_mesh, parameter.placements, src_data_rank=None)
