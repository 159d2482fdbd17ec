"""How fast a run is, and what keeps it from being faster: `medvl doctor RECIPE`.

Every part of the training is measured on its own and then all of them together, with the run's own model, data, step
and settings. The weights are not touched (the learning rate is zero) and nothing is left in the run's folder.
"""

import contextlib
import dataclasses
import itertools
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from medvl.common.seeding import caller_keeps_generators
from medvl.data.loading.loader import Loader
from medvl.data.loading.profile import Stages, time_stages
from medvl.errors import ConfigError
from medvl.schema import Batch
from medvl.train.doctor.timers import (
    flops_of_a_sample,
    matmul_flops,
    peak_memory,
    seconds_each,
    seconds_of,
    synchronize,
)
from medvl.train.loop.trainer import Training
from medvl.train.parallel.distributed import join, machine_settings
from medvl.train.run import Run

_KEPT = 4
"""Updates whose batches stay on the device, for the steps that wait for no data."""
_AHEAD = 4
"""Batches that a worker of the loader has ready at most."""
_WARM = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examination:
    """What was measured. A pair is an image with its text, or a question, or its labels: a sample of the run."""

    device: str
    precision: str
    cores: int
    """CPU cores that the process may use."""
    threads: int
    """Of them, those that torch uses."""
    workers: int
    """Processes that read ahead."""
    pairs: int
    """Of one update."""
    parameters: int
    gflop_a_pair: float
    """Forward and backward."""
    ceiling_tflops: float
    """Of a large matrix product, measured, in the run's precision."""
    model_rate: float
    """Pairs a second of the step alone, its inputs on the device."""
    loader_rate: float
    """Pairs a second of the loader alone."""
    rate: float
    """Pairs a second of the run."""
    wait_share: float
    """Of the run's time, spent waiting for the loader."""
    transfer_seconds: float
    """To bring the batches of one update to the device."""
    real_tokens: float
    """Share of the token positions that are no padding."""
    first_batch_seconds: float
    """Until the loader gave its first batch: starting its workers."""
    first_step_seconds: float
    """Of the first step, with whatever is compiled, tuned and allocated in it."""
    checkpoint_seconds: float
    """For which a checkpoint stops the run."""
    peak_gb: float
    """Memory at most, in 1e9 bytes: allocated on a GPU, resident on a CPU."""
    memory_gb: float | None
    """Of the GPU."""
    stages: Stages | None
    """None for a loader that streams."""

    @property
    def mfu(self) -> float:
        """Share of the measured ceiling that the step alone reaches."""
        return self.model_rate * self.gflop_a_pair / 1e3 / self.ceiling_tflops

    @property
    def efficiency(self) -> float:
        """The run's rate as a share of what the slower of loader and step allows."""
        return self.rate / min(self.model_rate, self.loader_rate)


def examine(run: Run, seconds: float = 10.0) -> Examination:
    """Measure a run for about six times so many seconds, on one rank.

    Raises ConfigError under torchrun with several ranks, and what opening the data raises.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError("the doctor examines one rank: start it without torchrun")
    settings = run.settings.train
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(join(settings.device))
        stack.enter_context(machine_settings(world, settings.num_threads, settings.deterministic, settings.precision))
        stack.enter_context(caller_keeps_generators(world.device))
        config = dataclasses.replace(
            settings,
            run_dir=stack.enter_context(_folder(settings.run_dir)),
            resume="never",
            tensorboard=False,
            wandb=None,
        )
        training = Training(run.model, run.data.train, world, run.settings.optim, config, None, (), {})
        stack.callback(training.journal.close)
        return _measure(training, run, run.settings.data.workers, seconds)


@contextlib.contextmanager
def _folder(run_dir: Path) -> Iterator[Path]:
    """A folder on the disk that the run would write to, gone in the end."""
    home = next(parent for parent in run_dir.absolute().parents if parent.is_dir())
    with tempfile.TemporaryDirectory(dir=home, prefix=".medvl-doctor-") as folder:
        yield Path(folder)


def _measure(training: Training, run: Run, workers: int, seconds: float) -> Examination:
    device, config, numbers = training.world.device, training.config, itertools.count()
    side, training.feed.side = training.feed.side, None  # each part by itself: no batch is sent ahead
    started = time.perf_counter()
    updates = [list(training.feed.take(next(numbers)))]
    first_batch = (time.perf_counter() - started) / len(updates[0])
    kept = min(_KEPT, training.feed.steps_per_epoch)
    updates += [list(training.feed.take(next(numbers))) for _ in range(1, kept)]
    step = _measure_step(training, updates, seconds)
    ahead = -(-_AHEAD * workers // config.accumulate)
    loader_rate = _loader_rate(training, numbers, ahead, seconds)
    training.feed.side = side
    rate, wait_share = _rate(training, numbers, seconds)
    loader, on_gpu = run.data.train, device.type == "cuda"
    return Examination(
        device=torch.cuda.get_device_name(device) if on_gpu else "CPU",
        precision=config.precision,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        workers=workers,
        pairs=sum(map(len, updates[0])),
        parameters=sum(parameter.numel() for parameter in training.model.parameters()),
        loader_rate=loader_rate,
        rate=rate,
        wait_share=wait_share,
        real_tokens=_real_tokens([batch.mask_BT for batches in updates for batch in batches]),
        first_batch_seconds=first_batch,
        checkpoint_seconds=seconds_of(lambda: training.save(must=True), device),
        memory_gb=torch.cuda.get_device_properties(device).total_memory / 1e9 if on_gpu else None,
        stages=time_stages(loader, min(config.micro_batch, 64)) if isinstance(loader, Loader) else None,
        **step,
    )


def _measure_step(training: Training, updates: Sequence[list[Batch]], seconds: float) -> dict[str, float]:
    """The step alone on batches that are on the device already, and how long it took to bring them there."""
    device, precision = training.world.device, training.state.precision
    placed = [[training.step.place(batch) for batch in batches] for batches in updates]
    flops = flops_of_a_sample(training.model, placed[0][0], precision)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    def step(number: int) -> None:
        batches = placed[number % len(placed)]
        training.step(number, 0.0, batches, len(batches))

    first = seconds_of(lambda: step(0), device)
    seconds_each(step, device, 0, least=len(placed))  # every length of text once
    pairs = sum(map(len, (batch for batches in placed for batch in batches))) / len(placed)
    return {
        "gflop_a_pair": flops / 1e9,
        "first_step_seconds": first,
        "model_rate": pairs / seconds_each(step, device, seconds, least=len(placed)),
        "peak_gb": peak_memory(device) / 1e9,
        "ceiling_tflops": matmul_flops(device, precision, seconds / 4) / 1e12,
        "transfer_seconds": seconds_each(
            lambda _: [training.step.place(batch) for batch in updates[0]], device, seconds / 4
        ),
    }


def _loader_rate(training: Training, numbers: Iterator[int], ahead: int, seconds: float) -> float:
    """Pairs a second of the loader alone, once the updates that it has read ahead are used up."""
    for _ in range(ahead):
        _ = list(training.feed.take(next(numbers)))
    pairs, started = 0, time.perf_counter()
    while not pairs or time.perf_counter() - started < seconds:
        pairs += sum(map(len, training.feed.take(next(numbers))))
    return pairs / (time.perf_counter() - started)


def _rate(training: Training, numbers: Iterator[int], seconds: float) -> tuple[float, float]:
    """Pairs a second of the run as it is, and the share of the time that it waited for the loader."""
    feed, device = training.feed, training.world.device

    def update() -> int:
        number = next(numbers)
        return training.step(number, 0.0, feed.take(number), feed.micro_batches(number)).pairs

    for _ in range(_WARM):
        update()
    synchronize(device)
    pairs, started, waited = 0, time.perf_counter(), feed.wait_seconds
    while not pairs or time.perf_counter() - started < seconds:
        pairs += update()
    synchronize(device)
    elapsed = time.perf_counter() - started
    return pairs / elapsed, (feed.wait_seconds - waited) / elapsed


def _real_tokens(masks: Sequence[Tensor]) -> float:
    """1.0 where nothing is padded, and where there is no text."""
    positions = sum(mask_BT.numel() for mask_BT in masks)
    return sum(int(mask_BT.sum()) for mask_BT in masks) / positions if positions else 1.0
