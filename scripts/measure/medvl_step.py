"""medvl's own training step on batches that are on the device."""

from collections.abc import Sequence
from typing import Any

from measure.bench import Bench
from measure.timing import Run, repeat
from medvl.schema import Batch
from medvl.train import OptimConfig, TrainConfig

# Internals on purpose: the step is timed without the rest of the loop.
from medvl.train.loop.step import Step, parallelize
from medvl.train.optim.optimizer import build_optimizer

ADAMW = OptimConfig(optimizer="adamw", lr=1e-5, weight_decay=1e-2)


def medvl_step(
    bench: Bench,
    model: Any,
    batches: Sequence[Batch],
    *,
    optim: OptimConfig = ADAMW,
    **settings: Any,
) -> Run:
    """Return the steps of a training run in bf16, one batch after another.

    `settings` are fields of `TrainConfig`: `channels_last`, `compile`, `packed_text`.
    """
    config = TrainConfig(
        run_dir=bench.folder / "run",
        steps=1,
        global_batch=len(batches[0]),
        precision="bf16",
        **settings,
    )
    parallel = parallelize(model, config, bench.ranks)
    step = Step(
        parallel,
        build_optimizer(model, optim),
        bench.precision,
        seed=config.seed,
        clip_norm=optim.clip_norm,
        channels_last=config.channels_last,
    )
    placed = [step.place(batch) for batch in batches]
    return repeat(lambda number: step(number, optim.lr, [placed[number % len(placed)]], 1))
