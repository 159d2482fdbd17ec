"""Measurement of a run's speed and of what limits it: `medvl doctor RECIPE`.

Each part of the training is measured on its own, then all together, with the run's model, data, step and settings. The
learning rate is zero, so the weights do not change, and nothing is left in the run folder.
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

from medvl.common.seeding import preserve_generators
from medvl.data.loading.loader import Loader, SampleDataset
from medvl.data.loading.profile import Stages, time_stages
from medvl.errors import ConfigError
from medvl.schema import Batch
from medvl.train.doctor.timers import flops_per_sample, matmul_flops, peak_memory, seconds_each, seconds_of, synchronize
from medvl.train.loop.trainer import Training
from medvl.train.parallel.distributed import cpu_cores, join, machine_settings
from medvl.train.run import Run

_KEPT_UPDATES = 4
"""Updates whose batches are kept on the device to measure the step alone."""
_PREFETCHED = 4
"""Maximum number of batches that a worker of the loader prefetches."""
_WARM_UP = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examination:
    """Measurements of a run. A pair is a sample of the run: an image with its text, question or labels."""

    device: str
    precision: str
    cores: int
    """CPU cores available to the process."""
    threads: int
    """CPU threads of torch."""
    workers: int
    """Prefetching processes."""
    pairs: int
    """Pairs of one update."""
    parameters: int
    gflop_per_pair: float
    """Operations of forward and backward pass."""
    ceiling_tflops: float
    """Measured rate of a large matrix product in the run's precision."""
    model_rate: float
    """Pairs per second of the step alone, with inputs on the device."""
    loader_rate: float
    """Pairs per second of the loader alone."""
    rate: float
    """Pairs per second of the run."""
    wait_share: float
    """Fraction of the run's time spent waiting for the loader."""
    transfer_seconds: float
    """Time to copy the batches of one update to the device."""
    real_tokens: float
    """Fraction of token positions that are not padding."""
    first_batch_seconds: float
    """Time until the first batch, including the start of the workers."""
    first_step_seconds: float
    """Time of the first step, including compilation, tuning and allocation."""
    checkpoint_seconds: float
    """Time for which a checkpoint stops the run."""
    peak_gb: float
    """Peak memory in 1e9 bytes: allocated on a GPU, resident on a CPU."""
    memory_gb: float | None
    """Memory of the GPU in 1e9 bytes; None on a CPU."""
    stages: Stages | None
    """Times of the loader's stages; None for a streaming loader."""

    @property
    def mfu(self) -> float:
        """Fraction of the measured ceiling that the step alone reaches."""
        return self.model_rate * self.gflop_per_pair / 1e3 / self.ceiling_tflops

    @property
    def efficiency(self) -> float:
        """Rate of the run divided by the rate of the slower of loader and step."""
        return self.rate / min(self.model_rate, self.loader_rate)


def examine(run: Run, seconds: float = 10.0) -> Examination:
    """Measure a run on one rank for about six times `seconds`. Raises ConfigError under torchrun with several ranks."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError("the doctor examines one rank; start it without torchrun", "unsupported")
    settings = run.settings.train
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(join(settings.device))
        stack.enter_context(machine_settings(ranks, settings.num_threads, settings.deterministic, settings.precision))
        stack.enter_context(preserve_generators(ranks.device))
        config = dataclasses.replace(
            settings,
            run_dir=stack.enter_context(_temporary_folder(settings.run_dir)),
            resume="never",
            tensorboard=False,
            wandb=None,
        )
        training = Training(run.model, run.data.train, ranks, run.settings.optim, config)
        stack.callback(training.close)
        return _measure(training, run, run.settings.data.workers, seconds)


@contextlib.contextmanager
def _temporary_folder(run_dir: Path) -> Iterator[Path]:
    """Yield a temporary folder on the disk of the run folder."""
    parent = next(parent for parent in run_dir.absolute().parents if parent.is_dir())
    with tempfile.TemporaryDirectory(dir=parent, prefix=".medvl-doctor-") as folder:
        yield Path(folder)


def _measure(training: Training, run: Run, workers: int, seconds: float) -> Examination:
    stream, device, config = training.state.stream, training.state.ranks.device, training.config
    numbers = itertools.count()
    side, stream.side = stream.side, None  # no prefetching while the parts are measured one by one
    started = time.perf_counter()
    updates = [list(stream.take(next(numbers)))]
    first_batch = (time.perf_counter() - started) / len(updates[0])
    kept = min(_KEPT_UPDATES, stream.steps_per_epoch)
    updates += [list(stream.take(next(numbers))) for _ in range(1, kept)]
    step = _measure_step(training, updates, seconds)
    prefetched = -(-_PREFETCHED * workers // config.accumulate)
    loader_rate = measure_loader(training, numbers, prefetched, seconds)
    stream.side = side
    rate, wait_share = measure_run(training, numbers, seconds)
    loader, on_gpu = run.data.train, device.type == "cuda"
    return Examination(
        device=torch.cuda.get_device_name(device) if on_gpu else "CPU",
        precision=training.state.precision.kind,
        cores=cpu_cores(),
        threads=torch.get_num_threads(),
        workers=workers,
        pairs=sum(map(len, updates[0])),
        parameters=sum(parameter.numel() for parameter in training.state.model.whole.parameters()),
        loader_rate=loader_rate,
        rate=rate,
        wait_share=wait_share,
        real_tokens=_real_tokens([batch.mask_BT for batches in updates for batch in batches]),
        first_batch_seconds=first_batch,
        checkpoint_seconds=seconds_of(lambda: training.save(must=True), device),
        memory_gb=torch.cuda.get_device_properties(device).total_memory / 1e9 if on_gpu else None,
        stages=time_stages(loader, min(config.micro_batch, 64)) if _reads_images(loader) else None,
        **step,
    )


def _reads_images(loader: object) -> bool:
    return isinstance(loader, Loader) and isinstance(loader.samples, SampleDataset)


def _measure_step(training: Training, updates: Sequence[list[Batch]], seconds: float) -> dict[str, float]:
    """Measure the step alone on batches that are on the device, and the time to copy them there."""
    device, precision = training.state.ranks.device, training.state.precision
    placed = [[training.step.place(batch) for batch in batches] for batches in updates]
    flops = flops_per_sample(training.state.model.whole, placed[0][0], precision)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    def step(number: int) -> None:
        batches = placed[number % len(placed)]
        training.step(number, 0.0, batches, len(batches))

    first = seconds_of(lambda: step(0), device)
    seconds_each(step, device, 0, least=len(placed))  # one pass over all text lengths
    pairs = sum(map(len, (batch for batches in placed for batch in batches))) / len(placed)
    return {
        "gflop_per_pair": flops / 1e9,
        "first_step_seconds": first,
        "model_rate": pairs / seconds_each(step, device, seconds, least=len(placed)),
        "peak_gb": peak_memory(device) / 1e9,
        "ceiling_tflops": matmul_flops(device, precision, seconds / 4) / 1e12,
        "transfer_seconds": seconds_each(
            lambda _: [training.step.place(batch) for batch in updates[0]], device, seconds / 4
        ),
    }


def measure_loader(training: Training, numbers: Iterator[int], prefetched: int, seconds: float) -> float:
    """Return pairs per second of the loader alone, after its prefetched updates are consumed."""
    for _ in range(prefetched):
        _ = list(training.state.stream.take(next(numbers)))
    pairs, started = 0, time.perf_counter()
    while not pairs or time.perf_counter() - started < seconds:
        pairs += sum(map(len, training.state.stream.take(next(numbers))))
    return pairs / (time.perf_counter() - started)


def measure_run(training: Training, numbers: Iterator[int], seconds: float) -> tuple[float, float]:
    """Return pairs per second of the run, and the fraction of time that it waited for the loader."""
    stream, device = training.state.stream, training.state.ranks.device

    def update() -> int:
        number = next(numbers)
        return training.step(number, 0.0, stream.take(number), stream.micro_batches(number)).pairs

    for _ in range(_WARM_UP):
        update()
    synchronize(device)
    pairs, started, waited = 0, time.perf_counter(), stream.wait_seconds
    while not pairs or time.perf_counter() - started < seconds:
        pairs += update()
    synchronize(device)
    elapsed = time.perf_counter() - started
    return pairs / elapsed, (stream.wait_seconds - waited) / elapsed


def _real_tokens(masks: Sequence[Tensor]) -> float:
    """Return the fraction of real tokens; 1.0 without padding or without text."""
    positions = sum(mask_BT.numel() for mask_BT in masks)
    return sum(int(mask_BT.sum()) for mask_BT in masks) / positions if positions else 1.0
