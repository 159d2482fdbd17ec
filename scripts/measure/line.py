"""Data classes of a line: its rows in PERFORMANCE.md, its function, and the report of a
measurement.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from measure.bench import Bench

Device = Literal["cpu", "gpu"]


class SkipLine(Exception):
    """Raised by a line that this machine cannot measure; the message is the reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableRow:
    """One row of a table of PERFORMANCE.md.

    `peer` and `ours` are formats over the figures of a report, and over `rows`, its contenders:
    "{plain s:.1f} s", "{rows[1].rate:,.0f} pairs/s".
    """

    title: str
    """First cell, unique in its table."""
    ours: str
    peer: str = ""
    """What medvl is measured beside; empty without a peer."""
    target: str = ""


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
    """Kernels of a few steps (`measure.profiling.summarize`)."""
    error: str | None = None


@dataclasses.dataclass(kw_only=True)
class Report:
    """Result of a line."""

    rows: list[Row]
    """medvl's row first."""
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    """Name -> figure, in the unit that the name ends with."""
    notes: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """A measurement with a name: medvl beside its peer, in turns, on the same inputs."""

    name: str
    device: Device
    measures: str
    unit: str
    """Unit of medvl's figure."""
    rows: tuple[TableRow, ...] = ()
    """Rows of PERFORMANCE.md; a line without rows prints its figures only."""
    seconds: float
    """Estimated time: on a GPU line, on one H200 with 16 cores, including compilation."""
    function: Callable[[Bench], Report]
    """Measures with the sizes of `Bench.size`, which has a second, tiny one for a dry run."""
    optional: bool = False
    """Whether the line runs only if it is named."""

    @property
    def command(self) -> str:
        """Return the command that measures this line."""
        return f"python scripts/benchmark.py {self.name}"


def report(rows: list[Row], figures: Mapping[str, float | None], *notes: str) -> Report:
    """Return a report with the figures that could be measured."""
    known = {name: value for name, value in figures.items() if value is not None}
    return Report(rows=rows, figures=known, notes=[note for note in notes if note])


def ratio(ours: float | None, theirs: float | None) -> float | None:
    """Return a quotient, None where a part of it was not measured."""
    return None if ours is None or not theirs else ours / theirs
