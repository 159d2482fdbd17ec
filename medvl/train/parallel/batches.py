"""Stream of training batches for the steps, with the time spent waiting for them."""

import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from medvl.errors import TrainingError
from medvl.schema import Batch
from medvl.train.parallel.prefetch import SideStream


class TrainLoader(Protocol):
    """Interface of a loader of training batches.

    Worker processes must be in process groups of their own (`os.setpgid(0, 0)` in the worker's init): Ctrl-C and
    torchrun signal the whole group, and a worker killed by the signal would end the run in the middle of a step.
    """

    @property
    def global_batch(self) -> int:
        """Pairs of one batch over all ranks."""

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch on this rank."""

    def __iter__(self) -> Iterator[Batch]:
        """Yield the rest of the current epoch; afterwards the loader is at the start of the next one."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position, counted in yielded batches, and a fingerprint of the data, as JSON values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position without reading what is before it. Raises ConfigError where it belongs to other data."""


class BatchStream:
    """Endless batches, grouped into updates of `accumulate` micro-batches; the last update of an epoch may have fewer.

    With a side stream the next batch is sent to the device as soon as the step has queued its work on the current one:
    when the step requests another, before it waits for the device. Prefetching stops at the end of an epoch, where a
    validation or the end of the run may follow. `state_dict` ignores the prefetched batch.
    """

    def __init__(self, loader: TrainLoader, accumulate: int, side: SideStream | None = None) -> None:
        if loader.steps_per_epoch < 1:
            raise TrainingError("the train loader has no batch in an epoch; use a smaller batch or more data", "empty")
        self.loader = loader
        self.wait_seconds = 0.0
        """Time spent waiting for batches so far; with a side stream, the device may work during that time."""
        self._accumulate, self.side = accumulate, side
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
            batch, self._prefetched = self._prefetched, None
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
        started = time.perf_counter()
        try:
            return self._from_loader(at_start)
        finally:
            self.wait_seconds += time.perf_counter() - started

    def _from_loader(self, at_start: bool) -> Batch:
        batch = next(self._iterator, None) if self._iterator is not None else None
        expected = self.loader.steps_per_epoch
        if batch is not None:
            if at_start:
                raise TrainingError(f"the train loader has more than its {expected} batches of an epoch", "mismatch")
            return batch
        if self._iterator is not None and not at_start:
            message = f"the train loader ended before its {expected} batches of an epoch"
            advice = "a batch in which no sample has the image or text that is read is left out: use a larger batch"
            raise TrainingError(f"{message}; {advice}", "mismatch")
        for _ in range(2 if at_start else 1):  # at the end of an epoch the rest is empty, then the next one follows
            self._iterator = iter(self.loader)
            batch = next(self._iterator, None)
            if batch is not None:
                return batch
        raise TrainingError("the train loader yields no batch", "empty")
