"""What keeps a run from ruin: bad values that do not reach the model, and signals that end it in order."""

import collections
import os
import signal
import statistics
import threading
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Self

import torch
from torch import Tensor, nn


def propagate_nonfinite(loss: Tensor) -> Tensor:
    """The loss, with a gradient that is NaN throughout where the loss is not finite.

    A loss can be infinite while its gradient is finite or zero, on one rank only. With this the gradient tells: after
    DDP's reduction every rank sees it, and one check of the gradient norm covers losses and gradients of all ranks.
    """
    return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)


class LossSpikeDetector:
    """Losses far above what they have been lately. They are no sum or mean, which one spike would pull up: a median."""

    WINDOW, FEWEST = 64, 16
    """Updates that a loss is compared with, and how many there must be for a comparison."""

    def __init__(self, factor: float, losses: Iterable[float] = ()) -> None:
        self._factor = factor
        self._losses = collections.deque(losses, maxlen=self.WINDOW)

    def judge(self, loss: float) -> bool:
        """Whether a loss is above `factor` times the median; one that is not joins those of later comparisons."""
        spike = len(self._losses) >= self.FEWEST and loss > self._factor * statistics.median(self._losses)
        if not spike:
            self._losses.append(loss)
        return spike

    def state_dict(self) -> list[float]:
        """The losses that the next one is compared with."""
        return list(self._losses)

    def load_state_dict(self, losses: Iterable[float]) -> None:
        """Go on from what `state_dict` gave."""
        self._losses = collections.deque(losses, maxlen=self.WINDOW)


class BufferGuard:
    """The buffers of a model as they were before a step, to go back to when its values were not finite.

    The forward pass itself changes them (running statistics, queues), so skipping the update is not enough.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._saved: list[Tensor] = []

    def take(self) -> None:
        """Remember the buffers."""
        buffers = list(self._model.buffers())
        if [buffer.shape for buffer in buffers] != [saved.shape for saved in self._saved]:
            self._saved = [torch.empty_like(buffer) for buffer in buffers]
        _copy(self._saved, buffers)

    def restore(self) -> None:
        """Put back what `take` remembered."""
        _copy(list(self._model.buffers()), self._saved)


def _copy(to: list[Tensor], source: list[Tensor]) -> None:
    """Copy lists of tensors in a few kernels, whatever their number."""
    with torch.no_grad():
        for kind in {buffer.dtype for buffer in source}:
            pairs = [(a, b) for a, b in zip(to, source, strict=True) if b.dtype is kind]
            torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])


class StopSignals:
    """SIGTERM and SIGINT ask a run to end after its step; the second one ends the process at once.

    Only within its context, and only in the main thread: elsewhere Python allows no handlers and the signals do what
    they did before.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        """Name of the signal that has come."""
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if callable(handler) or isinstance(handler, int) else signal.SIG_DFL)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.requested = signal.Signals(number).name
