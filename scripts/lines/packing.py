"""ALBEF's training step with packed and with padded texts, on the benchmark `phantom-quick`.

Forward and backward passes with the settings of the benchmark over its first three batches, in
turns, without a loader and without an optimiser; median CPU seconds. Both kinds have the same
losses and gradients (tests/encoders/test_packing.py,
tests/models/fusion_encoders/test_packed_streams.py). Weights are random.
"""

import dataclasses
import itertools
import shlex
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from measure.bench import Bench
from measure.line import Line, Report, TableRow, report

from medvl.benchmark import CorpusConfig, Store, plan_runs, read_benchmark
from medvl.benchmark.execute import prepare_run

# Internals on purpose: a run and its data without the training.
from medvl.benchmark.plan import medvl_command
from medvl.benchmark.settings import RUN
from medvl.cli.main import main
from medvl.common.process import keep_freed_memory
from medvl.encoders import TextEncoder
from medvl.models.fusion_encoders.parts.encoder import DualStream

_BATCHES = 3
CREATED = ("shards/test/manifest.json", "vocab/tokenizer.json")
"""What the steps of the benchmark create that ALBEF reads."""
TINY_PHANTOM = {"1600": "16", "256": "64", "160": "64"}
"""Patients and pixels of the benchmark's phantom -> those of a dry run."""


def measure_albef(bench: Bench) -> Report:
    """Measure ALBEF's step: the share of real tokens, and the CPU seconds of both kinds."""
    keep_freed_memory()
    out = bench.kept / "phantom-quick"
    changes = {"systems": ["albef"], **bench.size({}, {"budget.batch": 4})}
    plan = plan_runs(read_benchmark("phantom-quick", changes), out)
    run = next(run for run in plan.runs if run.name == "albef")
    run = dataclasses.replace(run, settings=without_references(run.settings))
    for arguments in data_commands(run.corpus):
        if bench.dry_run:
            alone = ["--workers", "1"] if arguments[0] != "vocab" else []
            main([TINY_PHANTOM.get(word, word) for word in arguments] + alone)
        else:
            medvl_command(arguments)
    prepared = prepare_run(run, Store(out), bench.folder / "albef")
    model, batches = prepared.model.train(), list(itertools.islice(prepared.data.train, _BATCHES))
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(bench.size(3, 1) + 1):
        for is_packed in seconds:
            pack(model, is_packed)
            started = time.process_time()
            step(model, number, batches[number % len(batches)])
            seconds[is_packed].append(time.process_time() - started)
    real = statistics.mean(batch.mask_BT.float().mean().item() for batch in batches)
    # The first step warms up.
    padded, packed = (statistics.median(each[1:]) for each in seconds.values())
    return report([], {"padded s": padded, "packed s": packed, "share of real tokens": real})


def data_commands(corpus: CorpusConfig) -> list[list[str]]:
    """Return the arguments of the commands that make the pairs and the vocabulary of a corpus, if
    they are missing.
    """
    root = Path(corpus.root or "")
    return [
        shlex.split(line.replace("{root}", str(root)))
        for step in corpus.make
        if step.creates in CREATED and not (root / step.creates).exists()
        for line in step.run
    ]


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


LINES = (
    Line(
        name="albef-packed",
        device="cpu",
        measures="ALBEF's step on packed texts, beside padded ones",
        unit="s",
        rows=(
            TableRow(
                title="ALBEF, packed text",
                peer="padded text: {padded s:.2f} s",
                ours="{packed s:.2f} s",
            ),
        ),
        seconds=120,
        function=measure_albef,
    ),
)
