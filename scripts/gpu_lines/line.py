"""Data classes of a line: its goals and function, and the report that the function returns."""

import dataclasses
from collections.abc import Callable
from typing import Any

from gpu_lines.bench import Bench


class SkipLine(Exception):
    """Raised by a line that this machine cannot measure; the message is the reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goal:
    """Target of one figure of a line."""

    figure: str
    """Name of the figure with its unit, as in `Report.figures`."""
    value: float
    at_most: bool = False
    """Whether the value is an upper bound."""

    def is_met(self, measured: float) -> bool:
        """Return whether the measured figure reaches the target."""
        return measured <= self.value if self.at_most else measured >= self.value

    def __str__(self) -> str:
        """Return the target in words."""
        bound = "at most" if self.at_most else "at least"
        return f"{bound} {self.value:,g} {self.figure}"


@dataclasses.dataclass(kw_only=True)
class Row:
    """Measurements of one contender. None: not measured."""

    contender: str
    rate: float | None = None
    """Samples per second at the median step."""
    unit: str = "pairs/s"
    ms: float | None = None
    """Median time of a step on the device, from its start to the start of the next one."""
    ms_p10: float | None = None
    ms_p90: float | None = None
    host_ms: float | None = None
    """Mean time of a step by the host's clock."""
    gb: float | None = None
    """Peak memory of the contender in 1e9 bytes, without that of the others."""
    tflops: float | None = None
    """Rate of the counted operations of forward and backward pass."""
    mfu: float | None = None
    """`tflops` divided by the measured rate of a large matrix product."""
    first_step_seconds: float | None = None
    """Time of the first step, with compilation."""
    warm_up_seconds: float | None = None
    """Time of all steps before the timed ones, with compilation for other shapes."""
    profile: dict[str, Any] | None = None
    """Kernels of a few steps (`gpu_lines.profiling.summarize`)."""
    error: str | None = None


@dataclasses.dataclass(kw_only=True)
class Report:
    """Result of a line."""

    rows: list[Row]
    """medvl's row first."""
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    """Figures that the goals name."""
    notes: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table."""

    name: str
    measures: str
    goals: tuple[Goal, ...] = ()
    stock: str
    """Figure of stock code on one H200, from earlier measurements."""
    seconds: float
    """Estimated time on one H200 with 16 cores, including compilation."""
    function: Callable[[Bench], Report]
    optional: bool = False
    """Whether the line runs only if `--lines` matches it."""


def report(rows: list[Row], figures: dict[str, float | None], *notes: str) -> Report:
    """Return a report with the figures that could be measured."""
    known = {name: value for name, value in figures.items() if value is not None}
    return Report(rows=rows, figures=known, notes=[note for note in notes if note])


def ratio(ours: float | None, theirs: float | None) -> float | None:
    """Return a quotient, None where a part of it was not measured."""
    return None if ours is None or not theirs else ours / theirs
