"""Cost of a training step with packed and with padded texts, for the systems of the benchmark
`phantom-quick`.

    # the data
    medvl benchmark phantom-quick --out bench --systems convirt --set budget.steps=1 --tasks zero-shot
    OMP_NUM_THREADS=1 python scripts/benchmark_packing.py --out bench
    OMP_NUM_THREADS=1 python scripts/benchmark_packing.py --out bench --systems albef,ptunifier
        --repeats 9

Forward and backward passes of the settings of the benchmark over its first three batches, in turns,
without a loader and without an optimiser; the median processor seconds of each kind. Both kinds
have the same losses and gradients (tests/encoders/test_packing.py,
tests/models/fusion_encoders/test_packed_streams.py). Weights are random.
"""

import argparse
import dataclasses
import itertools
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from medvl.benchmark import Store, plan_runs, read_benchmark
from medvl.benchmark.execute import prepare_run  # internals on purpose: a run without its training
from medvl.benchmark.settings import RUN, Run
from medvl.common.process import keep_freed_memory
from medvl.encoders import TextEncoder
from medvl.models.fusion_encoders.parts.encoder import DualStream

_BATCHES = 3


def main() -> None:
    """Print a row for every system whose text encoder can pack."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of a benchmark phantom-quick, with its data"
    )
    parser.add_argument("--systems", default="all")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    keep_freed_memory()
    config = read_benchmark("phantom-quick", {"systems": arguments.systems.split(",")})
    print("| system | real tokens | padded, s | packed, s | |\n|---|---:|---:|---:|---:|")
    for run in plan_runs(config, arguments.out.absolute()).runs:
        if run.settings["train"]["packed_text"]:
            real, padded, packed = measure(run, Store(arguments.out.absolute()), arguments.repeats)
            print(
                f"| {run.name} | {real:.2f} | {padded:.2f} | {packed:.2f} | "
                f"{padded / packed:.2f} |",
                flush=True,
            )


def measure(run: Run, store: Store, repeats: int) -> tuple[float, float, float]:
    """Return the share of real tokens, and the processor seconds of a padded and of a packed
    step.
    """
    alone = dataclasses.replace(run, settings=without_references(run.settings))
    prepared = prepare_run(alone, store)
    model, batches = prepared.model.train(), list(itertools.islice(prepared.data.train, _BATCHES))
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(repeats + 1):
        for is_packed in seconds:
            pack(model, is_packed)
            started = time.process_time()
            step(model, number, batches[number % len(batches)])
            seconds[is_packed].append(time.process_time() - started)
    real = statistics.mean(batch.mask_BT.float().mean().item() for batch in batches)
    padded, packed = (
        statistics.median(each[1:]) for each in seconds.values()
    )  # the first one warms up
    return real, padded, packed


def step(model: Any, number: int, batch: Any) -> None:
    """Compute the losses of a batch and their gradients."""
    if hasattr(model, "before_step"):
        model.before_step(number)
    model.zero_grad()
    model(batch).total.backward()


def pack(model: torch.nn.Module, enabled: bool) -> None:
    """Pack the texts of a model, or pad them."""
    for module in model.modules():
        if isinstance(module, (TextEncoder, DualStream)):
            module.pack(enabled)


def without_references(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without the checkpoints of other runs."""
    return {
        name: without_references(value)
        if isinstance(value, Mapping)
        else None
        if isinstance(value, str) and value.startswith(RUN)
        else value
        for name, value in settings.items()
    }


if __name__ == "__main__":
    main()
