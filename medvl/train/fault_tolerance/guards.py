"""Guards of a training run: non-finite losses, signals, garbage collection, and advice on
errors.
"""

import collections
import contextlib
import gc
import os
import signal
import statistics
import threading
from collections.abc import Iterable, Iterator
from types import FrameType, TracebackType
from typing import Self

import torch
from torch import Tensor, nn

from medvl.common.process import blocked
from medvl.data.loading.workers import worker_error
from medvl.errors import TrainingError
from medvl.train.config import TrainConfig
from medvl.train.parallel.distributed import RankInfo

# Protection of the weights from non-finite values and loss spikes.


def propagate_nonfinite(loss: Tensor) -> Tensor:
    """Return the loss with an all-NaN gradient where the loss is not finite.

    A loss can be infinite while its gradient is finite or zero, and on one rank only. The NaN
    gradient reaches every rank in DDP's reduction, so that one check of the gradient norm covers
    losses and gradients of all ranks.
    """
    return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)


class LossSpikeDetector:
    """Detector of losses far above the median of recent ones. A mean would be raised by the
    spike itself.
    """

    WINDOW = 64
    FEWEST = 16
    """Number of recent losses, and the fewest that make a comparison."""

    def __init__(self, factor: float, losses: Iterable[float] = ()) -> None:
        self._factor = factor
        self._losses = collections.deque(losses, maxlen=self.WINDOW)

    def observe(self, loss: float) -> bool:
        """Return whether a loss is above `factor` times the median; if not, add it to the recent
        losses.
        """
        spike = len(self._losses) >= self.FEWEST and loss > self._factor * statistics.median(
            self._losses
        )
        if not spike:
            self._losses.append(loss)
        return spike

    def state_dict(self) -> list[float]:
        """Return the recent losses."""
        return list(self._losses)

    def load_state_dict(self, losses: Iterable[float]) -> None:
        """Restore the recent losses."""
        self._losses = collections.deque(losses, maxlen=self.WINDOW)


class BufferGuard:
    """Copy of a model's buffers from before a step, to restore when the step is skipped.

    The forward pass itself changes them (running statistics, queues), so skipping the update is not
    enough. Buffers of modules with `written_once` (`QueryBook`) are left as they are.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = (
            module for module in model.modules() if not getattr(module, "written_once", False)
        )
        # Listed once: torch's walk through all modules takes milliseconds, in which a GPU waits in
        # every step.
        self._by_module = [module._buffers for module in modules]
        self._saved: list[Tensor] = []

    def save(self) -> None:
        """Copy the buffers."""
        buffers = self._buffers()
        if [buffer.shape for buffer in buffers] != [saved.shape for saved in self._saved]:
            self._saved = [torch.empty_like(buffer) for buffer in buffers]
        _copy(self._saved, buffers)

    def restore(self) -> None:
        """Restore the buffers of the last `save`."""
        _copy(self._buffers(), self._saved)

    def _buffers(self) -> list[Tensor]:
        return [
            buffer
            for buffers in self._by_module
            for buffer in buffers.values()
            if buffer is not None
        ]


def _copy(to: list[Tensor], source: list[Tensor]) -> None:
    """Copy lists of tensors in one kernel per dtype."""
    with torch.no_grad():
        for kind in {buffer.dtype for buffer in source}:
            pairs = [(a, b) for a, b in zip(to, source, strict=True) if b.dtype is kind]
            torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])


# Errors of torch that end a run, translated to errors with advice.

_NO_HOST_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory")
"""Messages of torch's CPU allocator when memory runs out."""


@contextlib.contextmanager
def with_advice(ranks: RankInfo, config: TrainConfig) -> Iterator[None]:
    """Translate out-of-memory errors to TrainingError with advice, and the death of a loader worker
    to LoaderError.

    torch may raise the error of a dead worker anywhere in the main thread.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _out_of_memory(ranks, config) from error
    except RuntimeError as error:
        if any(text in str(error) for text in _NO_HOST_MEMORY):
            raise _out_of_memory(ranks, config) from error
        loader_error = worker_error(error)
        if loader_error is None:
            raise
        raise loader_error from error


def _out_of_memory(ranks: RankInfo, config: TrainConfig) -> TrainingError:
    local = config.micro_batch // ranks.size
    part = max(1, min(local, config.grad_cache or local) // 2)
    advice = [
        f"set train.accumulate to {2 * config.accumulate} (the same global batch, but contrastive "
        "negatives from half as many pairs)",
        f"or train.grad_cache to {part} (all negatives, more time; contrastive dual-encoders only)",
    ]
    if config.precision == "fp32" and ranks.device.type == "cuda":
        advice.append("or train.precision to bf16")
    if ranks.size > 1 and not config.shard_weights:
        advice.append(
            "or train.shard_weights to True (each rank holds a part of weights and optimiser state)"
        )
    advice.append("or use more ranks or a smaller model")
    return TrainingError(
        f"rank {ranks.rank} ran out of memory on {_device_memory(ranks.device)} with {local} pairs "
        f"per rank and micro-batch: {', '.join(advice)}. The last checkpoint is intact: the same "
        "command resumes from it unless a changed setting determines the weights",
        "too_large",
        field="global_batch",
    )


def _device_memory(device: torch.device) -> str:
    if device.type != "cuda":
        return "the CPU"
    peak = torch.cuda.max_memory_allocated(device)
    total = torch.cuda.get_device_properties(device).total_memory
    return f"{device} (peak {peak / 2**30:.1f} of {total / 2**30:.1f} GiB)"


# SIGTERM and SIGINT as requests to stop a run after its step.

_STOPS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Context manager that records the first SIGTERM or SIGINT; the second one ends the process at
    once.

    Handlers are installed in the main thread only; Python does not allow them elsewhere, where the
    signals keep their effect.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        """Name of the signal that was received."""
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # Blocked for this thread; another one may still take a Ctrl-C between the two handlers.
            with blocked(*_STOPS):
                try:
                    for number in _STOPS:
                        self._before[number] = signal.getsignal(number)
                        signal.signal(number, self._handle)
                except BaseException:
                    self._restore()
                    raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(
                number, handler if callable(handler) or isinstance(handler, int) else signal.SIG_DFL
            )
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.requested = signal.Signals(number).name


# Exclusion of existing objects from Python's garbage collection, which would stall steps.


@contextlib.contextmanager
def freeze_existing_objects() -> Iterator[None]:
    """Freeze existing objects so that full collections skip them.

    A full collection visits every object of the process, libraries and model included, at another
    step on each rank, and all other ranks wait for it. The run itself creates few objects, so
    collection can stay enabled. Forked worker processes also write to fewer shared pages.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
