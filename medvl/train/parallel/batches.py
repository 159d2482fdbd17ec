"""Batches of the train loader as the steps want them, and how long the steps waited for them."""

import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from medvl.errors import TrainingError
from medvl.schema import Batch
from medvl.train.parallel.prefetch import SideStream


class TrainLoader(Protocol):
    """What `train` needs of a loader of training batches.

    Worker processes must be in process groups of their own (`os.setpgid(0, 0)` in the worker's init): Ctrl-C and
    torchrun send their signals to the whole group, and a worker that dies of one ends the run in the middle of a step.
    """

    @property
    def global_batch(self) -> int:
        """Pairs of one batch over all ranks."""

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch on this rank."""

    def __iter__(self) -> Iterator[Batch]:
        """The rest of the current epoch; at its end the loader stands at the start of the next one."""

    def state_dict(self) -> dict[str, Any]:
        """The position, counted in batches handed out, and what it is a position of; JSON values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position at once. Raises where it is that of other data."""


class BatchStream:
    """Endless batches, cut into updates of `accumulate` micro-batches; an epoch's last update may have fewer.

    With a side stream the next batch is sent to the device as soon as the step has queued its work on this one: at the
    time when a step asks for more, which it does before it waits for the device. Never past the end of an epoch, where
    there may be a validation first, or nothing more. `state_dict` gives the position after the last batch that a step
    has taken, whatever is on its way.
    """

    def __init__(self, loader: TrainLoader, accumulate: int, side: SideStream | None = None) -> None:
        if loader.steps_per_epoch < 1:
            raise TrainingError("the train loader has no batch in an epoch: it needs a smaller batch or more data")
        self.loader = loader
        self.wait_seconds = 0.0
        """Time that steps have waited for batches so far; with a side stream the device may have been busy."""
        self._accumulate, self.side = accumulate, side
        self._iterator: Iterator[Batch] | None = None
        self._coming: Batch | None = None
        self._position: dict[str, Any] = {}
        """Of the loader before it gave the batch that is coming."""

    @property
    def steps_per_epoch(self) -> int:
        """Updates of an epoch."""
        return -(-self.loader.steps_per_epoch // self._accumulate)

    def micro_batches(self, step: int) -> int:
        """Micro-batches of update number `step`."""
        first = step % self.steps_per_epoch * self._accumulate
        return min(self._accumulate, self.loader.steps_per_epoch - first)

    def take(self, step: int) -> Iterator[Batch]:
        """The micro-batches of update number `step`; updates are taken in order.

        Raises TrainingError where the loader ends before or after its promised number of batches.
        """
        first = step % self.steps_per_epoch * self._accumulate
        for number in range(first, first + self.micro_batches(step)):
            batch, self._coming = self._coming, None
            if batch is None:
                batch = self._next(at_start=number == 0)
            elif self.side is not None:
                batch = self.side.receive(batch)
            yield batch
            if self.side is not None and number + 1 < self.loader.steps_per_epoch:
                self._position = self.loader.state_dict()
                self._coming = self.side.send(self._next(at_start=False))

    def state_dict(self) -> dict[str, Any]:
        """The loader's position after the last batch taken."""
        return self.loader.state_dict() if self._coming is None else self._position

    def _next(self, at_start: bool) -> Batch:
        started = time.perf_counter()
        try:
            return self._from_loader(at_start)
        finally:
            self.wait_seconds += time.perf_counter() - started

    def _from_loader(self, at_start: bool) -> Batch:
        batch = next(self._iterator, None) if self._iterator is not None else None
        if batch is not None:
            if at_start:
                raise TrainingError(f"the train loader has more than its {self.loader.steps_per_epoch} batches")
            return batch
        if self._iterator is not None and not at_start:
            raise TrainingError(f"the train loader ended before its {self.loader.steps_per_epoch} batches")
        for _ in range(2 if at_start else 1):  # at the very end of an epoch there is an empty rest, then the next one
            self._iterator = iter(self.loader)
            batch = next(self._iterator, None)
            if batch is not None:
                return batch
        raise TrainingError("the train loader gives no batch")
