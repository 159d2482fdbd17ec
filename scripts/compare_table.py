"""Part of `compare_dual.py` and `compare_fusion.py`: the table of all runs."""

import dataclasses
import itertools
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from compare_runs import COST, REFUSAL, ROOT, Run
from results import cell, provenance, replace

from medvl.errors import EvaluationError
from medvl.eval import read_results


@dataclasses.dataclass(frozen=True, slots=True)
class Columns:
    """The evaluations of a table."""

    metrics: Mapping[str, tuple[str, str, str]]
    """Column -> evaluation, metric, target."""

    def table(self, runs: Sequence[Run], home: Path, missing: Mapping[str, str], failed: Mapping[str, str]) -> str:
        """Return the table of all runs, each followed by its random start, and the notes below it."""
        notes: dict[str, str] = {}
        titles = ["", *self.metrics, "pairs/s", "memory, GiB"]
        lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
        seeds = sorted({run.seed for run in runs})
        for name, of_name in itertools.groupby(runs, key=lambda run: run.name):
            several = list(of_name)
            for run in several:
                title = name if len(seeds) == 1 else f"{name}, seed {run.seed}"
                if run.id in failed:
                    notes[title] = f"failed: {failed[run.id]}"
                    lines.append(row(title, ["–"] * (len(titles) - 1)))
                    continue
                lines.append(row(title, [*self.scores(run, "trained", home, notes), *costs(run, home)]))
                lines.append(row(f"{title}, at random", [*self.scores(run, "start", home, notes), "", ""]))
            done = [run for run in several if run.id not in failed]
            if len(done) > 1:
                lines.append(row(f"{name}, mean (lowest to highest)", [*self.means(done, home), "", ""]))
        for name, reason in missing.items():
            notes[name] = reason
            lines.append(row(name, ["–"] * (len(titles) - 1)))
        below = [f"{name}: {reason}." for name, reason in notes.items()]
        return "\n".join([*lines, *(["", *below] if below else [])])

    def scores(self, run: Run, weights: str, home: Path, notes: dict[str, str]) -> Iterator[str]:
        """Yield the cells of an evaluated model; evaluations that do not apply are dashes with a note."""
        for title, (task, metric, target) in self.metrics.items():
            folder = run.results(home, weights, task)
            refusal = folder / REFUSAL
            if refusal.is_file():
                notes[f"{run.name}, {title}"] = refusal.read_text(encoding="utf-8").strip()
                yield "–"
            else:
                yield cell(read_results(folder / "results.json"), metric, target) or "–"

    def means(self, runs: Sequence[Run], home: Path) -> Iterator[str]:
        """Yield the mean of each metric over the seeds of a system, with the lowest and the highest."""
        for task, metric, target in self.metrics.values():
            paths = [run.results(home, "trained", task) / "results.json" for run in runs]
            try:
                values = [read_results(path).row(metric, target).value for path in paths if path.is_file()]
            except EvaluationError:  # no such row in the data
                values = []
            yield f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})" if values else "–"


def row(title: str, cells: Sequence[str]) -> str:
    """Return a line of a table."""
    return f"| {title} | {' | '.join(cells)} |"


def costs(run: Run, home: Path) -> list[str]:
    """Return pairs per second and peak memory."""
    measured = json.loads((home / run.id / COST).read_text(encoding="utf-8"))
    return [f"{measured['pairs_per_second']:.0f}", f"{measured['peak_memory_gb']:.2f}"]


def publish(name: str, lines: str, write: bool) -> None:
    """Print a table; with `write` also replace it in RESULTS.md."""
    print(f"{name}\n{lines}\n")
    if write:
        document = ROOT / "RESULTS.md"
        text = document.read_text(encoding="utf-8")
        document.write_text(replace(text, name, f"{lines}\n\n{provenance()}"), encoding="utf-8")
