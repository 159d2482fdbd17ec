"""`medvl report`: the evaluations of several runs side by side."""

import datetime
from pathlib import Path

from medvl.cli.eval_common import print_report


def report(runs: tuple[Path, ...], *, out: Path = Path("report"), force: bool = False, resamples: int = 1000) -> None:
    """Set the evaluations of several runs side by side, with paired differences from the first.

    Args:
        runs: folders of training runs or of evaluations, or results.json files; the first is compared with.
        out: gets comparison.json and index.html.
        force: compare what was evaluated on other data, or otherwise, all the same.
        resamples: of the paired bootstrap.
    """
    from medvl.eval.compare.compare import compare, find_runs
    from medvl.eval.compare.page import format_comparison, write_report

    found = [compare(of_protocol, force=force, resamples=resamples) for of_protocol in find_runs(runs).values()]
    paths = write_report(found, out, date=datetime.date.today().isoformat())
    print_report("\n\n".join(map(format_comparison, found)), paths)
