"""What all lines share: device, sizes, time limit, and the shards of phantom images."""

import contextlib
import dataclasses
import math
import multiprocessing
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch

from measure import phantom_shards
from measure.phantom_shards import FULL, TINY, DataSize

# Internals on purpose: the lines run parts of the training loop alone.
from medvl.train.optim.optimizer import Precision
from medvl.train.parallel.distributed import RankInfo

T = TypeVar("T")
LARGE_BYTES = 100 * 10**9
"""Memory of a GPU that takes the largest batches."""
_AGAIN = 20.0
"""Seconds until `OutOfTime` is raised again."""


class OutOfTime(BaseException):
    """Raised within a line at the total time limit.

    It is no `Exception`, so that contenders, which record their errors, do not take it for one.
    """


@dataclasses.dataclass(kw_only=True)
class Bench:
    """State of one call."""

    ranks: RankInfo
    dry_run: bool
    """Whether sizes are tiny and nothing is compiled."""
    folder: Path
    """Temporary folder."""
    kept: Path
    """Folder of the shards, which later calls find again."""
    end: float
    """Time limit, on the clock of `time.monotonic`; infinite without one."""
    ceiling_tflops: float = 0.0
    """Measured rate of a large bf16 matrix product."""
    _maker: "subprocess.Popen[bytes] | None" = None

    @property
    def device(self) -> torch.device:
        """Device of the models."""
        return self.ranks.device

    def size(self, full: T, tiny: T) -> T:
        """Return the size to measure, or that of a dry run."""
        return tiny if self.dry_run else full

    def large_batch(self, full: int, tiny: int) -> int:
        """Return the size of a batch whose steps take up to 90 GB: half of it on a smaller GPU,
        tiny in a dry run.
        """
        if self.dry_run:
            return tiny
        return (
            full
            if torch.cuda.get_device_properties(self.device).total_memory >= LARGE_BYTES
            else full // 2
        )

    @property
    def precision(self) -> Precision:
        """bf16 autocast on the device."""
        return Precision("bf16", self.device)

    def apart(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return the value of a function that runs in a process of its own, whose memory nothing
        else has touched; in a dry run it runs in this one.
        """
        if self.dry_run:
            return function(*arguments)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(function, arguments)

    def remaining(self) -> float:
        """Return the seconds until the time limit."""
        return self.end - time.monotonic()

    @property
    def data_size(self) -> DataSize:
        """Number and size of the phantom images."""
        return self.size(FULL, TINY)

    def start_data(self) -> None:
        """Start to write the shards in another process, unless they exist; nothing may be timed
        before `data`. In a dry run they are written in this one.
        """
        if self._maker is not None or self._data.is_dir():
            return
        size = self.data_size
        if self.dry_run:
            phantom_shards.write(self._data, size.patients, size.pixels)
            return
        program, numbers = phantom_shards.__file__, (str(size.patients), str(size.pixels))
        command = [sys.executable, program, str(self._data), *numbers]
        with self._maker_log.open("wb") as log:
            self._maker = subprocess.Popen(command, stdout=log, stderr=log)

    def data(self) -> Path:
        """Return the folder of training shards, after they are written. Raises RuntimeError if
        that failed.
        """
        self.start_data()
        if self._maker is not None and self._maker.wait():
            end = self._maker_log.read_text(errors="replace")[-300:]
            raise RuntimeError(
                f"phantom_shards.py ended with status {self._maker.returncode}: {end}"
            )
        return self._data / "train"

    @property
    def _data(self) -> Path:
        return self.kept / f"shards-{self.data_size.patients}-{self.data_size.pixels}"

    @property
    def _maker_log(self) -> Path:
        return self.folder / "phantom_shards.log"

    def close(self) -> None:
        """End the process that writes shards, if it still runs."""
        if self._maker is not None and self._maker.poll() is None:
            self._maker.terminate()
            self._maker.wait()


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in this block after so many seconds. Only for the main thread.

    It is raised again later if it is lost, as in an object's `__del__`.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    if math.isinf(seconds):
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(0.001, seconds), _AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
