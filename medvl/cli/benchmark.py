"""`medvl benchmark`: all systems on all tasks, from a file or a preset to a site of pages."""

import dataclasses
import datetime
import itertools
import sys
import tomllib
from pathlib import Path
from typing import Any, Literal

import tyro

from medvl.cli.eval import print_results
from medvl.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChangeOptions:
    """Values that override those of the file."""

    systems: str = ""
    """names of systems, separated by commas; override those of the file"""
    seeds: tuple[int, ...] = ()
    """seeds; override those of the file"""
    tasks: str = ""
    """names of tasks, separated by commas; override those of the file"""
    steps: int | None = None
    """training steps; override those of the file"""
    set: tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]] = ()
    """other values of the file to override, as NAME=VALUE: corpora.0.root=quickstart; may be
    given several times
    """

    def changes(self) -> dict[str, Any]:
        """Return the values by dotted name."""
        given = {
            "systems": _names(self.systems),
            "seeds": list(self.seeds) or None,
            "tasks": _names(self.tasks),
            "budget.steps": self.steps,
        }
        named = {name: value for name, value in given.items() if value is not None}
        return dict(map(_setting, itertools.chain(*self.set))) | named


def benchmark(
    source: str,
    changes: tyro.conf.OmitArgPrefixes[ChangeOptions],
    *,
    out: Path = Path("benchmark"),
    dry_run: bool = False,
    seconds: float = 1.0,
    engine: Literal["local", "ray", "slurm"] = "local",
    jobs: int = 1,
    gpus: tuple[str, ...] = (),
    sbatch: str = "",
    retry_failed: bool = False,
) -> None:
    """Train and evaluate systems by a TOML file or a preset, with one store of results and a site
    of pages.

    Finished runs are not repeated, and interrupted ones continue. The exit status is 1 if anything
    failed.

    Args:
        source: a .toml file, the name of a preset (`medvl list benchmarks`), or a folder
            OUT/runs/KEY, to execute this run alone, as SLURM job arrays do.
        changes: values that override those of the file.
        out: folder of data, runs, results.jsonl and the pages.
        dry_run: list the runs with hours and memory, which are measured on the corpora that exist,
            the hours of their evaluations where others of the same task have finished, and the
            errors of models that cannot be built; the exit status is 1 if there is one.
        seconds: seconds of each measurement of --dry-run; 0 lists only what earlier runs have
            measured.
        engine: processes of this machine, a cluster of Ray, or scripts for SLURM.
        jobs: processes of this machine at a time; 0 executes all runs in this process.
        gpus: GPUs of this machine; each runs one process. With ray, the first is the number of GPUs
            of a run.
        sbatch: options of the job arrays, joined by =, such as --sbatch="--gpus=1 --time=08:00:00".
        retry_failed: repeat the runs and evaluations that failed.
    """
    from medvl.benchmark.config import read_benchmark
    from medvl.benchmark.plan import plan_runs
    from medvl.benchmark.store import RUN, Store

    if jobs < 0:
        raise ConfigError(f"jobs must be at least 0, got {jobs}", "out_of_range", field="jobs")
    if (Path(source) / RUN).is_file():
        _execute_alone(Path(source))
        return
    plan = plan_runs(read_benchmark(source, changes.changes()), out.absolute())
    store = Store(out.absolute())
    if dry_run:
        _describe(plan, store, seconds)
        return
    if retry_failed:
        for run in plan.runs:
            store.clear_failures(run)
    _make_data(plan, store)
    store.write_runs(plan)
    if engine == "slurm" and any(store.state(run) == "to do" for run in plan.runs):
        from medvl.benchmark.execute import write_slurm

        submit, *scripts = write_slurm(plan, store, sbatch)
        print(
            f"Wrote {submit} and {len(scripts)} job arrays. Next: bash {submit}; afterwards the "
            f"same command again"
        )
        return
    _execute(plan, store, engine, jobs, gpus)
    if _publish(plan, store):
        sys.exit(1)


def _describe(plan: Any, store: Any, seconds: float) -> None:
    """Print the runs. The exit status is 1 if a model cannot be built."""
    from medvl.benchmark.estimate import check_data, describe_plan, model_errors

    check_data(plan, store)
    errors = model_errors(plan, store)
    print(describe_plan(plan, store, seconds, errors))
    if errors:
        sys.exit(1)


def _execute(plan: Any, store: Any, engine: str, jobs: int, gpus: tuple[str, ...]) -> None:
    if engine == "ray":
        from medvl.benchmark.execute import execute_with_ray

        execute_with_ray(plan, store, gpus_per_run=float(gpus[0]) if gpus else 0.0)
    else:
        from medvl.benchmark.execute import execute_locally

        execute_locally(plan, store, jobs=jobs, gpus=gpus)


def _publish(plan: Any, store: Any) -> bool:
    """Write results.jsonl and the pages, and print the tables. Return whether anything failed or
    is unfinished.
    """
    from medvl.benchmark.pages.write import print_site, write_site

    site = write_site(plan, store)
    print(print_site(site))
    left = sum(store.state(run) == "to do" for run in plan.runs)
    if left:
        print(
            f"{left} of {len(plan.runs)} runs are not finished; run the same command again to "
            f"resume"
        )
    return bool(site.failures or left)


def _make_data(plan: Any, store: Any) -> None:
    """Create missing data of the corpora that unfinished runs need, and compare them with those
    of finished runs.
    """
    from medvl.benchmark.estimate import check_data
    from medvl.benchmark.plan import make_corpus

    left = [run for run in plan.runs if store.state(run) == "to do"]
    for corpus in {run.corpus.name: run.corpus for run in left}.values():
        make_corpus(corpus, runs=[run for run in left if run.corpus.name == corpus.name])
    check_data(plan, store)


def _execute_alone(folder: Path) -> None:
    from medvl.benchmark.execute import IN_USE, execute_run

    try:
        done = execute_run(folder)
    except ConfigError as error:
        if error.code != "in_use":
            raise
        print(f"medvl: {error}", file=sys.stderr)
        sys.exit(IN_USE)
    if not done:
        sys.exit(1)


def _names(text: str) -> list[str] | None:
    """Return the names of a list separated by commas; None without any."""
    return [name.strip() for name in text.split(",") if name.strip()] or None


def _setting(text: str) -> tuple[str, Any]:
    """Return name and value of NAME=VALUE; a value that is not TOML is a text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"expected NAME=VALUE, got {text!r}", "malformed", field="set")
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name, value


# `medvl compare`: the evaluations of several runs side by side.


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
        runs: folders of training runs or of evaluations, or results.json files; the first is the
            reference.
        out: folder for comparison.json and index.html.
        force: compare even if data or settings of the evaluations differ.
        resamples: resamples of the paired bootstrap.
        all: print all rows; by default, those that fit on one screen.
    """
    if not runs:
        raise ConfigError(
            "expected runs or evaluations: medvl compare RUN RUN ...", "missing", field="runs"
        )
    from medvl.eval.compare import compare as library
    from medvl.eval.compare.page import format_comparison, write_comparison

    by_protocol = library.find_runs(runs).values()
    comparisons = [
        library.compare(of_protocol, force=force, resamples=resamples)
        for of_protocol in by_protocol
    ]
    paths = write_comparison(comparisons, out, date=datetime.date.today().isoformat())
    print_results("\n\n".join(map(format_comparison, comparisons)), paths, everything=all)
