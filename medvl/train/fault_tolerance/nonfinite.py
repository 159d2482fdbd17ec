"""Protection of the weights from non-finite values and loss spikes."""

import collections
import statistics
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def propagate_nonfinite(loss: Tensor) -> Tensor:
    """Return the loss with an all-NaN gradient where the loss is not finite.

    A loss can be infinite while its gradient is finite or zero, and on one rank only. The NaN gradient reaches every
    rank in DDP's reduction, so that one check of the gradient norm covers losses and gradients of all ranks.
    """
    return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)


class LossSpikeDetector:
    """Detector of losses far above the median of recent ones. A mean would be raised by the spike itself."""

    WINDOW, FEWEST = 64, 16
    """Number of recent losses, and the fewest that make a comparison."""

    def __init__(self, factor: float, losses: Iterable[float] = ()) -> None:
        self._factor = factor
        self._losses = collections.deque(losses, maxlen=self.WINDOW)

    def observe(self, loss: float) -> bool:
        """Return whether a loss is above `factor` times the median; if not, add it to the recent losses."""
        spike = len(self._losses) >= self.FEWEST and loss > self._factor * statistics.median(self._losses)
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

    The forward pass itself changes them (running statistics, queues), so skipping the update is not enough. Buffers of
    modules with `written_once` (`QueryBook`) are left as they are.
    """

    def __init__(self, model: nn.Module) -> None:
        kept = (module for module in model.modules() if not getattr(module, "written_once", False))
        # Listed once: torch's walk through all modules takes milliseconds, in which a GPU waits in every step.
        self._by_module = [module._buffers for module in kept]
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
        return [buffer for buffers in self._by_module for buffer in buffers.values() if buffer is not None]


def _copy(to: list[Tensor], source: list[Tensor]) -> None:
    """Copy lists of tensors in one kernel per dtype."""
    with torch.no_grad():
        for kind in {buffer.dtype for buffer in source}:
            pairs = [(a, b) for a, b in zip(to, source, strict=True) if b.dtype is kind]
            torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])
