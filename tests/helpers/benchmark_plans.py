"""Plans of benchmarks whose runs are written and not trained."""

from pathlib import Path

from medvl.benchmark import Plan, Store, plan_runs, read_benchmark


def write_plan(folder: Path, text: str) -> tuple[Plan, Store]:
    """Return the plan of a benchmark's file, with its runs in the store of `folder`."""
    path = folder / "benchmark.toml"
    path.write_text(text)
    plan, store = plan_runs(read_benchmark(path), folder), Store(folder)
    store.write_runs(plan)
    return plan, store
