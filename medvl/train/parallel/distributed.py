"""Ranks: who this process is, how it talks to the others, and the model as DDP wants it.

Two kinds of traffic. Gradients and embeddings go over the device's backend (nccl, or gloo on the CPU). Decisions (stop,
the metric of an evaluator, which checkpoint) go as JSON over a gloo group of the hosts, whose timeout is a day: ranks
may wait for rank 0 to evaluate or to write without any collective running out of time.
"""

import contextlib
import dataclasses
import datetime
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from medvl.errors import ConfigError, TrainingError

_HOST_TIMEOUT = datetime.timedelta(days=1)
_meetings = itertools.count()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankInfo:
    """This process among the ranks of a run."""

    rank: int
    size: int
    local_size: int
    """Ranks on this machine."""
    device: torch.device
    hosts: Any = None
    """The gloo group for decisions; None on one rank."""

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that writes, logs and evaluates."""
        return self.rank == 0

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order; JSON values only. All ranks must call it together."""
        if self.size == 1:
            return [value]
        payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(payload)]), group=self.hosts)
        longest = int(max(lengths))
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(texts, torch.nn.functional.pad(payload, (0, longest - len(payload))), group=self.hosts)
        return [json.loads(bytes(text[: int(length)].tolist())) for text, length in zip(texts, lengths, strict=True)]

    def from_main(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return self.exchange(value if self.is_main else None)[0]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on one rank at least. Cheap enough for every step."""
        if self.size == 1:
            return flag
        flags = torch.tensor([int(flag)])
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.hosts)
        return bool(flags)

    def on_main(self, function: Callable[[], Any]) -> Any:
        """Run a function on rank 0 only; what it returns (a JSON value) or raises is every rank's.

        Raises what the function raised, and TrainingError with its text on the other ranks.
        """
        value, error = None, None
        if self.is_main:
            try:
                value = function()
            except Exception as caught:  # raised again below, once the other ranks know
                error = caught
        failure, value = self.from_main([error and f"{type(error).__name__}: {error}", value])
        if error is not None:
            raise error
        if failure:
            raise TrainingError(f"rank 0 cannot go on: {failure}")
        return value


def rank_and_world() -> tuple[int, int]:
    """(rank, number of ranks) of this process: what loaders are opened with, before `train` joins the ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


@contextlib.contextmanager
def join(device: Literal["auto", "cpu", "cuda"] = "auto") -> Iterator[RankInfo]:
    """The ranks that torchrun started, or this process alone. Leaves them at the end if it was it that joined them.

    Raises ConfigError where a GPU is asked for and there is none.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    chosen = _choose_device(device, local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    rank, size = rank_and_world()
    starting = size > 1 and not dist.is_initialized()
    if starting:
        _meet("cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo")
    try:
        hosts = dist.new_group(backend="gloo", timeout=_HOST_TIMEOUT) if size > 1 else None
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        yield RankInfo(rank=rank, size=size, local_size=local_size, device=chosen, hosts=hosts)
    finally:
        if starting:
            dist.destroy_process_group()


def _meet(backend: str) -> None:
    """Start talking to the other ranks, under names in torchrun's store that nobody has used before.

    torchrun keeps one store for all lives of its ranks. There the ranks of a new life would find the addresses of the
    dead ones, and call those: they fail, or wait for half an hour. Likewise the second group of one process.
    """
    rank, size = rank_and_world()
    store, _, _ = next(rendezvous("env://"))
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    names = dist.PrefixStore(f"medvl/life {life}/meeting {next(_meetings)}", store)
    dist.init_process_group(backend, store=names, rank=rank, world_size=size)


def distribute(model: nn.Module, world: RankInfo, find_unused_parameters: bool) -> nn.Module:
    """The model in DDP on several ranks, or itself. Rank 0's weights and buffers become everyone's.

    DDP takes rank 0's buffers to the other ranks before each step, so the running statistics that a checkpoint holds
    are all there are, and a resumed run needs no more. Not those of a module that says `same_on_all_ranks`: a momentum
    queue is filled with the same rows everywhere, and its megabytes would travel in every step for nothing.
    """
    if world.size == 1:
        return model
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, _alike(model))
    on_gpu = world.device.type == "cuda"
    return DistributedDataParallel(
        model,
        device_ids=[world.device.index] if on_gpu else None,
        find_unused_parameters=find_unused_parameters,
        gradient_as_bucket_view=True,
    )


def shared_buffers(model: nn.Module) -> list[Tensor]:
    """Buffers that rank 0 takes to the other ranks before each step; see `distribute`."""
    alike = set(_alike(model))
    return [buffer for name, buffer in model.named_buffers() if name not in alike]


def _alike(model: nn.Module) -> list[str]:
    """Names of the buffers that are the same on all ranks by themselves."""
    return [
        f"{prefix}.{name}".removeprefix(".")
        for prefix, module in model.named_modules()
        if getattr(module, "same_on_all_ranks", False)
        for name, _ in module.named_buffers()
    ]


@torch.no_grad()
def broadcast(tensors: Sequence[Tensor], group: Any = None) -> None:
    """Rank 0's values become those of all ranks, in one message a dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for alike in by_dtype.values():
        flat = torch.cat([tensor.flatten() for tensor in alike])
        dist.broadcast(flat, src=0, group=group)
        pieces = flat.split([tensor.numel() for tensor in alike])
        torch._foreach_copy_(alike, [piece.view_as(tensor) for piece, tensor in zip(pieces, alike, strict=True)])


def average_gradients(parameters: Sequence[nn.Parameter], world: RankInfo) -> None:
    """Each gradient becomes its mean over the ranks, as DDP has it. All ranks must call it together.

    Where only some ranks have a gradient, the others count as zero; where none has one, it stays None.
    """
    if world.size == 1 or not parameters:
        return
    has_one = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
    dist.all_reduce(has_one, dist.ReduceOp.MAX, group=world.hosts)
    learned = [parameter for parameter, one in zip(parameters, has_one.tolist(), strict=True) if one]
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in learned]
    for waiting in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
        waiting.wait()
    torch._foreach_div_(gradients, world.size)
    for parameter, gradient in zip(learned, gradients, strict=True):
        parameter.grad = gradient


@contextlib.contextmanager
def machine_settings(world: RankInfo, num_threads: int | None, deterministic: bool, precision: str) -> Iterator[None]:
    """CPU threads, and by what algorithms a GPU computes, for the time of a run.

    torchrun gives each of several ranks one thread, whatever the machine has; on a CPU that would leave cores idle.
    On a GPU a run in 16 bits rounds what it still multiplies in float32 to TensorFloat32 (10 bits; the losses, above
    all), eight times as fast; and cuDNN tries its algorithms for each shape of a convolution, unless they are to be
    deterministic.
    """
    threads_before = torch.get_num_threads()
    algorithms_before = torch.are_deterministic_algorithms_enabled()
    products_before, trials_before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    if world.device.type == "cuda":
        torch.backends.cudnn.benchmark = not deterministic
        if precision != "fp32":
            torch.set_float32_matmul_precision("high")
    if num_threads is None and world.size > 1 and world.device.type == "cpu":
        num_threads = max(1, _cores() // world.local_size)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    if deterministic:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(threads_before)
        torch.use_deterministic_algorithms(algorithms_before)
        torch.set_float32_matmul_precision(products_before)
        torch.backends.cudnn.benchmark = trials_before


def _choose_device(device: Literal["auto", "cpu", "cuda"], local_rank: int) -> torch.device:
    count = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if count == 0 and device != "cuda":
        return torch.device("cpu")
    if local_rank >= count:  # never a CPU among GPUs: the ranks could not talk to each other
        raise ConfigError(f"local rank {local_rank} has no GPU, there are {count}: start fewer ranks, or use the cpu")
    return torch.device("cuda", local_rank)


def _cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
