"""The benchmark: systems trained on the same data, evaluated by every task that fits, in one store and one site.

    medvl benchmark phantom-quick --out bench --dry-run
    medvl benchmark phantom-quick --out bench

The guide is docs/pages/guides/benchmark.md. Start reading at `config.py`, then `plan.py` and `execute.py`.

    config.py            the file of a benchmark       corpora.py           data that is made where it lacks
    systems.py           systems and their recipes     settings.py          settings of a recipe in a benchmark
    plan.py, run.py      runs and their keys           execute.py           training and evaluations of one run
    tasks.py             evaluations and columns       queue.py, spread.py  processes, GPUs, Ray, SLURM
    store.py             folder of results             resamples.py         metrics on shared resamples
    presets/             benchmarks of medvl
"""

from typing import TYPE_CHECKING

from medvl.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from medvl.benchmark.config import (
        BenchmarkConfig as BenchmarkConfig,
        Budget as Budget,
        Column as Column,
        CommandTask as CommandTask,
        CorpusConfig as CorpusConfig,
        EvaluationConfig as EvaluationConfig,
        MakeStep as MakeStep,
        StartConfig as StartConfig,
        Variant as Variant,
        list_benchmarks as list_benchmarks,
        read_benchmark as read_benchmark,
    )
    from medvl.benchmark.execute import execute_run as execute_run
    from medvl.benchmark.plan import Plan as Plan, plan_runs as plan_runs
    from medvl.benchmark.queue import (
        execute_locally as execute_locally,
        execute_with_ray as execute_with_ray,
        write_slurm as write_slurm,
    )
    from medvl.benchmark.settings import Run as Run
    from medvl.benchmark.store import Store as Store

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
