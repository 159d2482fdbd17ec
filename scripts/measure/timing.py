"""Timing of contenders in turns, with their memory and the rate of their operations."""

import contextlib
import dataclasses
import functools
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from measure.bench import Bench
from measure.line import Row
from measure.profiling import profile_steps
from medvl.schema import Batch

# Internals on purpose: the figures are those of `medvl doctor`.
from medvl.train.doctor.examine import flops_per_sample, peak_memory, seconds_of, synchronize

Mark = Callable[[], None]
Run = Callable[[int, Mark], None]
"""Function `run(steps, mark)` that makes steps, and calls `mark` before each of them and after
the last one.
"""

_LEAD = 1
"""Untimed steps at the start of a turn, in which memory is allocated again."""
_ROUND_SECONDS, _FEWEST = 1.0, 4
"""Length of a round of slow steps, and their least number."""
_MS = 1000.0


def repeat(step: Callable[[int], object]) -> Run:
    """Return a run of `step(0)`, `step(1)`, ..., counted on from turn to turn."""
    numbers = itertools.count()

    def run(steps: int, mark: Mark) -> None:
        for _ in range(steps):
            mark()
            step(next(numbers))
        mark()

    return run


class Flops:
    """Operations of a sample, forward and backward: counted on medvl's model and used for all
    contenders of a line.
    """

    def __init__(self) -> None:
        self.per_sample: float | None = None

    def count(self, model: Any, batch: Batch, bench: Bench) -> None:
        """Count the operations of a model, which is moved to the device, as `medvl doctor` does."""
        self.per_sample = flops_per_sample(
            model.to(bench.device), batch.to(bench.device), bench.precision
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to do the work of a line."""

    name: str
    build: Callable[[], Run]
    """Makes model and inputs on the device and returns the steps."""
    samples: int
    """Samples of a step."""
    flops: Flops | None = None
    """Operations of a sample, known when all contenders are built."""
    unit: str = "pairs/s"
    warm_up: int = 2
    """Untimed steps after the first one, so that all shapes are compiled."""
    settings: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """Context in which its steps run."""
    shares: str | None = None
    """Name of an earlier contender whose model this one trains, so that it holds the same
    memory.
    """


class EventClock:
    """Times on the device: a CUDA event for each mark, on the current stream, so that gaps of
    the host count.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)

    def intervals(self) -> list[float]:
        """Return the milliseconds between consecutive marks, after waiting for the device."""
        torch.cuda.synchronize(self._device)
        return [start.elapsed_time(end) for start, end in itertools.pairwise(self._events)]


class HostClock:
    """Times of the host, for a CPU."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def mark(self) -> None:
        """Note the time."""
        self._times.append(time.perf_counter())

    def intervals(self) -> list[float]:
        """Return the milliseconds between consecutive marks."""
        return [_MS * (end - start) for start, end in itertools.pairwise(self._times)]


def make_clock(device: torch.device) -> EventClock | HostClock:
    """Return the clock of a device."""
    return EventClock(device) if device.type == "cuda" else HostClock()


def measure_in_turns(
    bench: Bench,
    contenders: Sequence[Contender],
    *,
    steps: int = 12,
    rounds: int = 3,
    profiled: int = 2,
) -> list[Row]:
    """Measure contenders round by round, then profile a few steps of each, in a dry run of the
    first; errors are recorded in their rows.

    A round has `steps` steps, or fewer of slow ones.
    """
    steps, rounds, profiled = bench.size((steps, rounds, profiled), (1, 1, 1))
    turns: dict[str, _Turns] = {}
    rows = {
        contender.name: Row(contender=contender.name, unit=contender.unit)
        for contender in contenders
    }

    def enter(contender: Contender) -> None:
        turns[contender.name] = _Turns(bench, contender, turns)

    def attempt(contender: Contender, work: Callable[[], None]) -> None:
        try:
            with contender.settings():
                work()
        except Exception as error:  # the others go on
            rows[contender.name].error = describe(error)
            turns.pop(contender.name, None)
        release(bench.device)

    for contender in contenders:
        attempt(contender, functools.partial(enter, contender))
    for _ in range(rounds):
        for contender in contenders:
            if contender.name in turns:
                attempt(contender, functools.partial(turns[contender.name].round, steps))
    for contender in contenders:
        if contender.name in turns:
            row, turn = rows[contender.name], turns[contender.name]
            turn.fill(row)
            # Reading the profile takes longer than the steps of a dry run.
            if contender is contenders[0] or not bench.dry_run:
                attempt(contender, functools.partial(turn.profile, row, profiled))
    return [rows[contender.name] for contender in contenders]


class _Turns:
    """A contender that is ready, with the times of its rounds."""

    def __init__(self, bench: Bench, contender: Contender, others: dict[str, "_Turns"]) -> None:
        self._bench, self._contender, device = bench, contender, bench.device
        before = allocated(device)
        self._run = contender.build()
        started = time.perf_counter()
        self._first = seconds_of(lambda: self._run(1, _ignore), device)
        self._run(bench.size(contender.warm_up, 0), _ignore)
        synchronize(device)
        self._warm_up = time.perf_counter() - started
        self._seconds = seconds_of(lambda: self._run(1, _ignore), device)
        shared = (
            0
            if contender.shares is None or contender.shares not in others
            else others[contender.shares].own
        )
        self.own: int = allocated(device) - before + shared
        """Bytes that the contender holds between its steps."""
        self._ms: list[float] = []
        self._host_ms: list[float] = []
        self._peak = 0

    def round(self, steps: int) -> None:
        """Time some steps."""
        device, clock = self._bench.device, make_clock(self._bench.device)
        steps = min(steps, max(_FEWEST, round(_ROUND_SECONDS / self._seconds)))
        self._run(_LEAD if device.type == "cuda" else 0, _ignore)
        synchronize(device)
        reset_peak(device)
        before = allocated(device)
        started = time.perf_counter()
        self._run(steps, clock.mark)
        synchronize(device)
        self._host_ms.append(_MS * (time.perf_counter() - started) / steps)
        self._ms += clock.intervals()
        self._peak = max(self._peak, peak_memory(device) - before + self.own)

    def fill(self, row: Row) -> None:
        """Enter the measurements into a row."""
        row.ms = statistics.median(self._ms)
        row.ms_p10, row.ms_p90 = percentiles(self._ms)
        row.host_ms = statistics.fmean(self._host_ms)
        row.gb = self._peak / 1e9
        row.rate = _MS * self._contender.samples / row.ms
        row.first_step_seconds, row.warm_up_seconds = self._first, self._warm_up
        set_flops(row, self._contender.flops, self._bench)

    def profile(self, row: Row, steps: int) -> None:
        """Enter a profile into a row."""
        # memory was given back before
        self._run(_LEAD if self._bench.device.type == "cuda" else 0, _ignore)
        row.profile = profile_steps(
            lambda count: self._run(count, _ignore), steps, self._bench.device
        )


def set_flops(row: Row, flops: Flops | None, bench: Bench) -> None:
    """Enter the rate of operations into a row with a rate of samples."""
    if flops is not None and flops.per_sample is not None and row.rate is not None:
        row.tflops = row.rate * flops.per_sample / 1e12
        row.mfu = row.tflops / bench.ceiling_tflops


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the 10th and 90th percentile."""
    if len(values) < 2:
        return values[0], values[0]
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return tenths[0], tenths[-1]


def ceiling_tflops(device: torch.device, side: int) -> float:
    """Return the rate of a square bf16 matrix product on random data, at the median of 50
    products.
    """
    generator = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn(side, side, device=device, generator=generator).bfloat16() for _ in range(2)
    )
    out = torch.empty_like(left)
    clock, run = make_clock(device), repeat(lambda _: torch.mm(left, right, out=out))
    run(10, _ignore)
    run(50, clock.mark)
    return 2 * side**3 / (statistics.median(clock.intervals()) / _MS) / 1e12


def describe(error: BaseException) -> str:
    """Return the kind of an error and the start of its message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def allocated(device: torch.device) -> int:
    """Return the bytes that tensors take on a GPU; 0 on a CPU, where the peak is that of the
    process.
    """
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def reset_peak(device: torch.device) -> None:
    """Start a new measurement of the peak memory of a GPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def release(device: torch.device) -> None:
    """Free what is not used on a GPU, so that another contender finds unfragmented memory."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _ignore() -> None:
    pass
