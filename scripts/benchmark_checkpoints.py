"""Benchmark of a sharded model's checkpoint: gathered and written by rank 0, or written by every
rank.

    python scripts/benchmark_checkpoints.py --ranks 2 --parameters 50

A stack of linear layers with AdamW's moments, 12 bytes per parameter, is sharded over processes of
this machine. Memory is what a rank's resident memory grows by at most during a save, sampled every
5 ms.
"""

import argparse
import multiprocessing
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from medvl.train import OptimConfig

# Internals on purpose: the benchmark times parts of a checkpoint alone.
from medvl.train.fault_tolerance import checkpoint
from medvl.train.fault_tolerance.checkpoint import Checkpoints, save_parts
from medvl.train.optim.optimizer import build_optimizer, optimizer_tensors
from medvl.train.parallel.distributed import RankInfo, join
from medvl.train.parallel.model import FSDPModel

_PAGE = os.sysconf("SC_PAGE_SIZE")
_LAYERS = 8


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
    """Measure both kinds of checkpoints on this rank; rank 0 prints them."""
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

        for number in range(rounds):
            for name, save in (("gathered", gathered), ("in parts", parts)):
                report(ranks, f"{number + 1} {name}", *measure(save))


def report(ranks: RankInfo, name: str, seconds: float, megabytes: float) -> None:
    """Print the time of rank 0, and the memory of rank 0 and of the others."""
    rows = ranks.exchange(megabytes)
    if ranks.is_main:
        print(
            f"{name:12} {seconds:7.2f} s   rank 0 +{rows[0]:6.0f} MB   others "
            f"+{max(rows[1:]):6.0f} MB",
            flush=True,
        )


def start(rank: int, ranks: int, port: int, folder: Path, parameters: float, rounds: int) -> None:
    """Run one rank in a process of its own."""
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_PORT": port,
    }
    os.environ.update(
        {name: str(value) for name, value in numbers.items()}, MASTER_ADDR="localhost"
    )
    checkpoint.model_files = Files
    run(folder, parameters, rounds)


def main() -> None:
    """Start the ranks and wait for them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--parameters", type=float, default=50, help="millions")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="folder on the storage to measure")
    arguments = parser.parse_args()
    print(f"{arguments.ranks} ranks, {arguments.parameters:g} million parameters", flush=True)
    with socket.socket() as free, tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
        free.close()
        shared = (arguments.ranks, port, Path(folder), arguments.parameters * 1e6, arguments.rounds)
        fork = multiprocessing.get_context("fork")
        processes = [
            fork.Process(target=start, args=(rank, *shared)) for rank in range(arguments.ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit("a rank failed")


if __name__ == "__main__":
    main()
