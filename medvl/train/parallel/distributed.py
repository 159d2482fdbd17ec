"""Ranks: the process group, exchange of decisions, and collectives on tensors.

Two kinds of traffic. Gradients and embeddings use the device's backend (nccl, or gloo on the CPU).
Decisions (stop, the metric of an evaluator, which checkpoint) are JSON over a gloo group with a
timeout of a day, so that the ranks can wait while rank 0 evaluates or writes.
"""

import contextlib
import dataclasses
import datetime
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from medvl.common.process import keep_freed_memory
from medvl.common.ranks import exchange_bytes, rank_and_world
from medvl.data.transforms.operations import augment_batch
from medvl.errors import ConfigError, TrainingError
from medvl.schema import Batch

_log = logging.getLogger(__name__)

_HOST_TIMEOUT = datetime.timedelta(days=1)
_group_numbers = itertools.count()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankInfo:
    """This process among the ranks of a run."""

    rank: int
    size: int
    """Number of ranks."""
    local_size: int
    """Number of ranks on this machine."""
    device: torch.device
    hosts: Any = None
    """The gloo group for decisions; None on one rank."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes, logs and evaluates."""
        return self.rank == 0

    def exchange(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks, in rank order. Collective call."""
        if self.size == 1:
            return [value]
        return [json.loads(data) for data in exchange_bytes(json.dumps(value).encode(), self.hosts)]

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks, on its device. Collective call."""
        if self.size == 1:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def from_main(self, value: Any) -> Any:
        """Return rank 0's value on every rank. Collective call."""
        return self.exchange(value if self.is_main else None)[0]

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on at least one rank. Collective call, cheap enough for
        every step.
        """
        if self.size == 1:
            return flag
        flags = torch.tensor([int(flag)])
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.hosts)
        return bool(flags)

    def on_all(self, function: Callable[[], Any]) -> list[Any]:
        """Run a function on every rank and return its JSON values, in rank order. Collective call.

        Raises the function's error on the ranks that have one, and TrainingError with the first one
        on the others.
        """
        value = None
        error = None
        try:
            value = function()
        except Exception as caught:  # raised again below, after the other ranks were informed
            error = caught
        results = self.exchange(
            [error and f"{type(error).__name__}: {error}", getattr(error, "code", "worker"), value]
        )
        if error is not None:
            raise error
        for rank, (message, code, _) in enumerate(results):
            if message:
                raise TrainingError(f"rank {rank} failed: {message}", code)
        return [value for _, _, value in results]

    def on_main(self, function: Callable[[], Any]) -> Any:
        """Run a function on rank 0 and return its JSON value on every rank. Collective call.

        Raises the function's error on rank 0, and TrainingError with its message on the other
        ranks.
        """
        return self.on_all(function if self.is_main else lambda: None)[0]

    def check_equal(self, own: Mapping[str, Any]) -> None:
        """Raise TrainingError where the JSON values of another rank differ. Collective call."""
        for rank, other in enumerate(self.exchange(own)):
            if other != own:
                names = ", ".join(name for name in own if other[name] != own[name])
                message = f"ranks {self.rank} and {rank} differ in {names}"
                raise TrainingError(
                    f"{message}; start all ranks with the same command and data", "mismatch"
                )


@contextlib.contextmanager
def join(device: Literal["auto", "cpu", "cuda"] = "auto") -> Iterator[RankInfo]:
    """Join the ranks that torchrun started; a process without torchrun is a single rank.

    On a CPU, this process keeps freed memory from now on (`medvl.common.process`). On exit the
    process groups that were created here are destroyed: in a process group of the caller's, the one
    for decisions alone. Raises ConfigError where a GPU is requested and this rank has none.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    target = choose_device(device, local_rank)
    if target.type == "cuda":
        torch.cuda.set_device(target)
    else:
        keep_freed_memory()  # before gloo starts its threads
    rank, size = rank_and_world()
    starting = size > 1 and not dist.is_initialized()
    if starting:
        _init_process_group("cpu:gloo,cuda:nccl" if target.type == "cuda" else "gloo")
    hosts = None
    try:
        if size > 1:
            hosts = dist.new_group(backend="gloo", timeout=_HOST_TIMEOUT)
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        yield RankInfo(rank=rank, size=size, local_size=local_size, device=target, hosts=hosts)
    finally:
        if starting:
            dist.destroy_process_group()
        elif hosts is not None:
            dist.destroy_process_group(hosts)


def _init_process_group(backend: str) -> None:
    """Initialise the process group under an unused prefix of torchrun's store.

    torchrun reuses its store across restarts: without a fresh prefix the ranks would find the
    addresses of the killed processes, and fail or wait for half an hour. The same holds for the
    second group of one process. With TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which a lost node needs
    to be replaced, each start has a store of its own; the agents' counts of restarts differ then,
    so they are not part of the prefix.
    """
    rank, size = rank_and_world()
    store, _, _ = next(rendezvous("env://"))
    reused = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if reused else "0"
    prefixed = dist.PrefixStore(f"medvl/restart {restart}/group {next(_group_numbers)}", store)
    dist.init_process_group(backend, store=prefixed, rank=rank, world_size=size)


def unshared_buffers(model: nn.Module) -> list[str]:
    """Return the names of the buffers that are equal on all ranks by construction, so that they
    need no broadcast.

    They belong to modules with `same_on_all_ranks`: a momentum queue is filled with the same rows
    everywhere, and broadcasting its megabytes in every step would be wasted.
    """
    return [
        f"{prefix}.{name}".removeprefix(".")
        for prefix, module in model.named_modules()
        if getattr(module, "same_on_all_ranks", False)
        for name, _ in module.named_buffers()
    ]


def shared_buffers(model: nn.Module) -> list[Tensor]:
    """Return the buffers that rank 0 broadcasts before each step: all but `unshared_buffers`."""
    unshared = set(unshared_buffers(model))
    return [buffer for name, buffer in model.named_buffers() if name not in unshared]


@torch.no_grad()
def broadcast(tensors: Sequence[Tensor], group: Any = None) -> None:
    """Copy rank 0's values to all ranks, in one message per dtype. Collective call."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same_dtype in by_dtype.values():
        flat = torch.cat([tensor.flatten() for tensor in same_dtype])
        dist.broadcast(flat, src=0, group=group)
        pieces = flat.split([tensor.numel() for tensor in same_dtype])
        torch._foreach_copy_(
            same_dtype, [piece.view_as(t) for piece, t in zip(pieces, same_dtype, strict=True)]
        )


def average_gradients(parameters: Sequence[nn.Parameter], ranks: RankInfo) -> None:
    """Replace each gradient by its mean over the ranks, as DDP does. Collective call.

    Ranks without a gradient count as zero; a parameter that has none on any rank keeps None.
    """
    if ranks.size == 1 or not parameters:
        return
    has_gradient = torch.tensor(
        [parameter.grad is not None for parameter in parameters], dtype=torch.uint8
    )
    dist.all_reduce(has_gradient, dist.ReduceOp.MAX, group=ranks.hosts)
    used = [
        parameter for parameter, flag in zip(parameters, has_gradient.tolist(), strict=True) if flag
    ]
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in used]
    for work in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
        work.wait()
    torch._foreach_div_(gradients, ranks.size)
    for parameter, gradient in zip(used, gradients, strict=True):
        parameter.grad = gradient


@contextlib.contextmanager
def machine_settings(
    ranks: RankInfo, num_threads: int | None, deterministic: bool, precision: str
) -> Iterator[None]:
    """Set torch's CPU threads and GPU algorithms for a run; restore them on exit.

    Without `num_threads`, the ranks on a CPU share the cores that are idle at the start: torch's
    threads wait for each other actively, so that one of them on a busy core slows down all.
    torchrun gives each of several ranks one thread, which would leave cores idle; a single rank
    takes at most the threads that torch has. On a GPU, 16-bit runs multiply what remains in float32
    (above all the losses) in TensorFloat32 (10 bits), which is eight times as fast; and cuDNN
    benchmarks its algorithms for each shape of a convolution unless they must be deterministic, or
    (`Step`) batches have ever new numbers of images.
    """
    threads_before = torch.get_num_threads()
    algorithms_before = torch.are_deterministic_algorithms_enabled()
    matmul_before = torch.get_float32_matmul_precision()
    benchmark_before = torch.backends.cudnn.benchmark
    try:
        if ranks.device.type == "cuda":
            torch.backends.cudnn.benchmark = not deterministic
            if precision != "fp32":
                torch.set_float32_matmul_precision("high")
        if (threads := _threads(ranks, num_threads, threads_before)) is not None:
            torch.set_num_threads(threads)
        if deterministic:
            torch.use_deterministic_algorithms(True)
        yield
    finally:
        torch.set_num_threads(threads_before)
        torch.use_deterministic_algorithms(algorithms_before)
        torch.set_float32_matmul_precision(matmul_before)
        torch.backends.cudnn.benchmark = benchmark_before


def _threads(ranks: RankInfo, setting: int | None, available: int) -> int | None:
    """Return the number of CPU threads of each rank; None leaves torch's."""
    if setting is not None or ranks.device.type != "cpu" or (ranks.size == 1 and available == 1):
        return setting
    most = available if ranks.size == 1 else max(1, cpu_cores() // ranks.local_size)
    threads = max(1, min(most, ranks.on_main(idle_cores) // ranks.local_size))
    if threads < most:
        _log.info("%d threads per rank instead of %d: other cores are busy", threads, most)
    return threads


def cpu_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def idle_cores() -> int:
    """Return how many of this process's cores no other process uses, rounded; measured for a
    quarter of a second.

    All cores count as idle on systems other than Linux.
    """
    if not Path("/proc/stat").is_file():
        return cpu_cores()
    start = time.perf_counter()
    idle_before = _idle_seconds()
    time.sleep(0.25)
    idle = (_idle_seconds() - idle_before) / (time.perf_counter() - start)
    return max(0, min(cpu_cores(), round(idle)))


def _idle_seconds() -> float:
    """Return the seconds that this process's cores were idle since the start of the machine, by
    Linux's count.
    """
    names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    rows = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    # idle, and waiting for a disk
    ticks = sum(int(row[4]) + int(row[5]) for row in rows if row and row[0] in names)
    return ticks / os.sysconf("SC_CLK_TCK")


def choose_device(device: Literal["auto", "cpu", "cuda"], local_rank: int) -> torch.device:
    """Return the GPU of a rank, or the CPU if there is none. Raises ConfigError where a rank
    lacks a GPU.
    """
    count = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if count == 0 and device != "cuda":
        return torch.device("cpu")
    if local_rank >= count:  # a CPU rank among GPU ranks could not communicate with them
        raise ConfigError(
            f"local rank {local_rank} has no GPU, there are {count}; start fewer ranks, or set "
            f"device to 'cpu'",
            "unsupported",
            field="device",
        )
    return torch.device("cuda", local_rank)


# Transfer of batches to the device, the next one while the device computes; and augmentation that
# is left to it.


def place(batch: Batch, device: torch.device, channels_last: bool) -> Batch:
    """Copy a batch to the device, and augment its images there where that is left to it; in the
    model's memory format.

    A batch that is in place is returned as it is, and copies from page-locked memory do not block.
    """
    batch = augment_batch(batch.to(device, non_blocking=True))
    if channels_last:
        image_BCHW = batch.image_BCHW.contiguous(memory_format=torch.channels_last)
        batch = dataclasses.replace(batch, image_BCHW=image_BCHW)
    return batch


class SideStream:
    """`place` on a CUDA stream of its own, concurrent with computation. On a CPU it is `place`
    alone.
    """

    def __init__(self, device: torch.device, channels_last: bool) -> None:
        self._device = device
        self._channels_last = channels_last
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, batch: Batch) -> Batch:
        """Start to copy a batch. It must not be used before `receive`."""
        with torch.cuda.stream(self._stream):
            return place(batch, self._device, self._channels_last)

    def receive(self, batch: Batch) -> Batch:
        """Make the compute stream wait for the copy that `send` started, then return the batch."""
        if self._stream is not None:
            computing = torch.cuda.current_stream(self._device)
            computing.wait_stream(self._stream)
            for field in dataclasses.fields(batch):
                value = getattr(batch, field.name)
                if isinstance(value, Tensor):
                    # keeps the side stream from reusing its memory during the step
                    value.record_stream(computing)
        return batch


def side_stream(device: torch.device, channels_last: bool) -> SideStream | None:
    """Return a side stream for a GPU; None on a CPU, where copying ahead gains nothing."""
    return SideStream(device, channels_last) if device.type == "cuda" else None


# Stream of training batches for the steps, with the time spent waiting for them.


class TrainLoader(Protocol):
    """Interface of a loader of training batches.

    Worker processes must be in process groups of their own (`os.setpgid(0, 0)` in the worker's
    init): Ctrl-C and torchrun signal the whole group, and a worker killed by the signal would end
    the run in the middle of a step.
    """

    @property
    def global_batch(self) -> int:
        """Pairs of one batch over all ranks."""

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch on this rank."""

    def __iter__(self) -> Iterator[Batch]:
        """Yield the rest of the current epoch; afterwards the loader is at the start of the next
        one.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the position, counted in yielded batches, and a fingerprint of the data, as
        JSON values.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position without reading what is before it. Raises ConfigError where it
        belongs to other data.
        """


class BatchStream:
    """Endless batches, grouped into updates of `accumulate` micro-batches; the last update of an
    epoch may have fewer.

    With a side stream the next batch is sent to the device as soon as the step has queued its work
    on the current one: when the step requests another, before it waits for the device. Prefetching
    stops at the end of an epoch, where a validation or the end of the run may follow. `state_dict`
    ignores the prefetched batch.
    """

    def __init__(
        self, loader: TrainLoader, accumulate: int, side: SideStream | None = None
    ) -> None:
        if loader.steps_per_epoch < 1:
            raise TrainingError(
                "the train loader has no batch in an epoch; use a smaller batch or more data",
                "empty",
            )
        self.loader = loader
        self.wait_seconds = 0.0
        """Time spent waiting for batches so far; with a side stream, the device may work during
        that time.
        """
        self._accumulate = accumulate
        self.side = side
        self._iterator: Iterator[Batch] | None = None
        self._prefetched: Batch | None = None
        self._position: dict[str, Any] = {}
        """Position of the loader before it yielded the prefetched batch."""

    @property
    def steps_per_epoch(self) -> int:
        """Updates of an epoch."""
        return -(-self.loader.steps_per_epoch // self._accumulate)

    def micro_batches(self, step: int) -> int:
        """Return the number of micro-batches of update number `step`."""
        first = step % self.steps_per_epoch * self._accumulate
        return min(self._accumulate, self.loader.steps_per_epoch - first)

    def take(self, step: int) -> Iterator[Batch]:
        """Yield the micro-batches of update number `step`; updates must be taken in order.

        Raises TrainingError where the loader yields fewer or more batches than it announced.
        """
        first = step % self.steps_per_epoch * self._accumulate
        for number in range(first, first + self.micro_batches(step)):
            batch = self._prefetched
            self._prefetched = None
            if batch is None:
                batch = self._next(at_start=number == 0)
            elif self.side is not None:
                batch = self.side.receive(batch)
            yield batch
            if self.side is not None and number + 1 < self.loader.steps_per_epoch:
                self._position = self.loader.state_dict()
                self._prefetched = self.side.send(self._next(at_start=False))

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position after the last batch taken."""
        return self.loader.state_dict() if self._prefetched is None else self._position

    def _next(self, at_start: bool) -> Batch:
        start = time.perf_counter()
        try:
            return self._from_loader(at_start)
        finally:
            self.wait_seconds += time.perf_counter() - start

    def _from_loader(self, at_start: bool) -> Batch:
        batch = next(self._iterator, None) if self._iterator is not None else None
        expected = self.loader.steps_per_epoch
        if batch is not None:
            if at_start:
                raise TrainingError(
                    f"the train loader has more than its {expected} batches of an epoch", "mismatch"
                )
            return batch
        if self._iterator is not None and not at_start:
            message = f"the train loader ended before its {expected} batches of an epoch"
            advice = (
                "a batch in which no sample has the image or text that is read is left "
                "out: use a larger batch"
            )
            raise TrainingError(f"{message}; {advice}", "mismatch")
        # at the end of an epoch the rest is empty: take the next epoch
        for _ in range(2 if at_start else 1):
            self._iterator = iter(self.loader)
            batch = next(self._iterator, None)
            if batch is not None:
                return batch
        raise TrainingError("the train loader yields no batch", "empty")
