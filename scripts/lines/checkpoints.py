"""A sharded model's checkpoint: gathered and written by rank 0, or written in parts by every rank.

A stack of linear layers with AdamW's moments, 12 bytes per parameter, is sharded over two processes
of this machine. Memory is what a rank's resident memory grows by at most during a save, sampled
every 5 ms.
"""

import json
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from measure.bench import Bench
from measure.line import Line, Report, TableRow, report
from safetensors.torch import save_file
from torch import nn

from medvl.train import OptimConfig

# Internals on purpose: the benchmark times parts of a checkpoint alone.
from medvl.train.fault_tolerance import checkpoint
from medvl.train.fault_tolerance.checkpoint import Checkpoints, save_parts
from medvl.train.optim.optimizer import build_optimizer, optimizer_tensors
from medvl.train.parallel.distributed import join
from medvl.train.parallel.model import FSDPModel

_PAGE = os.sysconf("SC_PAGE_SIZE")
_LAYERS = 8
RANKS = 2
FIGURES = "figures.json"


class Stack(nn.Sequential):
    """Linear layers with a given number of parameters in all."""

    name, config = "stack", None

    def __init__(self, parameters: float) -> None:
        width = max(1, round((parameters / _LAYERS) ** 0.5))
        super().__init__(*(nn.Linear(width, width, bias=False) for _ in range(_LAYERS)))


class Files:
    """Weights alone, in the file of a checkpoint."""

    def load_weights(self, model: Any, folder: Path) -> None:
        """Nothing is read."""

    def save(
        self, model: Any, folder: Path, run: Mapping[str, Any], *, weights: bool = True
    ) -> None:
        """Write the weights, if they are asked for."""
        if weights:
            save_file(dict(model.state_dict()), folder / "model.safetensors")


def resident() -> int:
    """Return the bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def measure(save: Callable[[], None]) -> tuple[float, float]:
    """Return seconds and peak megabytes of a save beyond the memory before it."""
    before = peak = resident()
    over = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.005):
            peak = max(peak, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    save()
    seconds = time.perf_counter() - started
    over.set()
    watcher.join()
    return seconds, (peak - before) / 1e6


def run(folder: Path, parameters: float, rounds: int) -> None:
    """Measure both kinds of checkpoints on this rank; rank 0 writes the figures to the folder."""
    torch.set_num_threads(1)
    with join("cpu") as ranks:
        model = FSDPModel(Stack(parameters), ranks)
        optimizer = build_optimizer(model.trained, OptimConfig())
        for parameter in model.trained.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        checkpoints = Checkpoints(folder, keep_last=1, run={})
        steps = iter(range(1, 1000))

        def state() -> dict[str, object]:
            return {"step": next(steps), "best": {"step": None}}

        def gathered() -> None:
            model.gather()
            tensors = model.full_state(optimizer_tensors(optimizer, model.trained))
            values = state()
            ranks.on_main(lambda: str(checkpoints.save(model.whole, values, tensors)))

        def parts() -> None:
            save_parts(checkpoints, model, state(), optimizer_tensors(optimizer, model.trained))

        figures: dict[str, float] = {}
        for name, save in [("gathered", gathered), ("in parts", parts)] * rounds:
            seconds, megabytes = measure(save)
            rows = ranks.exchange(megabytes)
            for title, value in (("s", seconds), ("MB", rows[0]), ("MB, others", max(rows[1:]))):
                key = f"{name} {title}"
                figures[key] = min(value, figures.get(key, value))
        if ranks.is_main:
            (folder / FIGURES).write_text(json.dumps(figures))


def start(rank: int, port: int, folder: Path, parameters: float, rounds: int) -> None:
    """Run one rank in a process of its own."""
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": RANKS,
        "LOCAL_WORLD_SIZE": RANKS,
        "MASTER_PORT": port,
    }
    os.environ.update(
        {name: str(value) for name, value in numbers.items()}, MASTER_ADDR="localhost"
    )
    checkpoint.model_files = Files
    run(folder, parameters, rounds)


def measure_parts(bench: Bench) -> Report:
    """Measure both kinds of checkpoints of 50 million parameters; the least of three rounds."""
    folder = bench.folder / "checkpoints"
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = (port, folder, *bench.size((50e6, 3), (1000.0, 1)))
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=start, args=(rank, *shared)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError("expected both ranks to end with status 0; see their messages")
    return report([], json.loads((folder / FIGURES).read_text()))


LINES = (
    Line(
        name="checkpoint-parts",
        device="cpu",
        measures="checkpoint of a sharded model, in parts beside gathered, 50 M parameters",
        unit="MB",
        rows=(
            TableRow(
                title="checkpoint in parts, 50 M parameters, two ranks",
                peer="gathered: {gathered MB:.0f} MB",
                ours="{in parts MB:.0f} MB on rank 0",
            ),
        ),
        seconds=60,
        function=measure_parts,
    ),
)
