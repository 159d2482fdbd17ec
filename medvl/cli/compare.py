"""`medvl compare`: the evaluations of several runs side by side."""

import datetime
from pathlib import Path

from medvl.cli.eval.options import print_results
from medvl.errors import ConfigError


def compare(
    runs: tuple[Path, ...],
    *,
    out: Path = Path("comparison"),
    force: bool = False,
    resamples: int = 1000,
    all: bool = False,
) -> None:
    """Compare the evaluations of several runs, with paired differences from the first.

    Args:
        runs: folders of training runs or of evaluations, or results.json files; the first is the reference.
        out: folder for comparison.json and index.html.
        force: compare even if data or settings of the evaluations differ.
        resamples: resamples of the paired bootstrap.
        all: print all rows; by default, those that fit on one screen.
    """
    if not runs:
        raise ConfigError("expected runs or evaluations: medvl compare RUN RUN ...", "missing", field="runs")
    from medvl.eval.compare import compare as library
    from medvl.eval.compare.page import format_comparison, write_comparison

    by_protocol = library.find_runs(runs).values()
    comparisons = [library.compare(of_protocol, force=force, resamples=resamples) for of_protocol in by_protocol]
    paths = write_comparison(comparisons, out, date=datetime.date.today().isoformat())
    print_results("\n\n".join(map(format_comparison, comparisons)), paths, everything=all)
