"""The step of every system at its published size."""

from benchmark_systems import SYSTEMS

from gpu_lines.bench import Bench
from gpu_lines.fusion import system_contender
from gpu_lines.line import Line, Report, Row, report
from gpu_lines.timing import measure_in_turns

SIZE, EACH = 32, 15.0
"""Samples of a step, and the seconds that a system takes at most."""
DRY_RUN = ("mavl", "mrm")


def measure_systems(bench: Bench) -> Report:
    """Measure medvl's step of each system in bf16, one after another, until the time is up."""
    rows: list[Row] = []
    left = list(bench.size(tuple(SYSTEMS), DRY_RUN))
    while left and bench.remaining() > bench.size(EACH, 0.0):
        name = left.pop(0)
        recipe, preset = SYSTEMS[name]
        contender = system_contender(bench, recipe, bench.size(SIZE, 2), preset=preset, name=name)
        rows += measure_in_turns(bench, [contender], steps=8, rounds=1)
    note = f"no time was left for {', '.join(left)}" if left else ""
    return report(rows, {"systems": sum(row.error is None for row in rows)}, note)


LINES = {
    "systems": Line(
        name="systems",
        measures=f"the steps of all systems at published size, B = {SIZE}, 64 tokens, six "
        f"statements",
        stock="not measured",
        seconds=240,
        function=measure_systems,
        optional=True,
    )
}
