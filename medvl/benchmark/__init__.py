"""The benchmark: systems trained on the same data, evaluated by every task that fits, in one store
and one site.

    medvl benchmark phantom-quick --out bench --dry-run
    medvl benchmark phantom-quick --out bench

The guide is docs/pages/guides/benchmark.md. Start reading at `config.py`, then `plan.py` and
`execute.py`.

    config.py                    the file of a benchmark, and its presets/
    settings.py                  systems, their recipes, and a recipe's settings in a benchmark
    estimate.py                  checks, hours and memory before any run
    plan.py, store.py            runs, their keys and data, and the folder of results
    real_tables.py               tables of small real collections
    execute.py                   training and evaluations of a run; processes, GPUs, Ray, SLURM
    tasks.py                     evaluations and columns
    ranks.py, pages/             ranks on shared resamples, and the site
"""

from typing import TYPE_CHECKING

from medvl.common.imports import lazy_exports

if TYPE_CHECKING:
    from medvl.benchmark.config import (
        BenchmarkConfig as BenchmarkConfig,
        Budget as Budget,
        CommandTask as CommandTask,
        CorpusConfig as CorpusConfig,
        MakeStep as MakeStep,
        StartConfig as StartConfig,
        Variant as Variant,
        list_benchmarks as list_benchmarks,
        read_benchmark as read_benchmark,
    )
    from medvl.benchmark.execute import (
        execute_locally as execute_locally,
        execute_run as execute_run,
        execute_with_ray as execute_with_ray,
        write_slurm as write_slurm,
    )
    from medvl.benchmark.plan import plan_runs as plan_runs
    from medvl.benchmark.settings import Plan as Plan, Run as Run
    from medvl.benchmark.store import Store as Store
    from medvl.eval.evaluation import Column as Column, EvaluationConfig as EvaluationConfig

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
