"""Measurement of a run's speed and of what limits it: `medvl doctor RECIPE`.

Each part of the training is measured on its own, then all together, with the run's model, data,
step and settings. The learning rate is zero, so the weights do not change, and nothing is left in
the run folder.
"""

import contextlib
import dataclasses
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from medvl.common.process import peak_resident_bytes
from medvl.common.seeding import preserve_generators
from medvl.data.loading.loader import Loader, SampleDataset
from medvl.data.loading.profile import STAGES, Stages, time_stages
from medvl.errors import ConfigError
from medvl.schema import Batch
from medvl.train.loop.trainer import Training
from medvl.train.optim.optimizer import Precision
from medvl.train.parallel.distributed import cpu_cores, join, machine_settings
from medvl.train.run import Run, Settings

# Timers and counters of operations and memory.

COUNTED = 8
"""Samples whose operations are counted: all but the similarity matrix of a contrastive loss
grows with the batch.
"""


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_each(
    function: Callable[[int], object], device: torch.device, seconds: float, least: int = 3
) -> float:
    """Return the mean time of `function(0)`, `function(1)`, ..., called for `seconds` and at least
    `least` times.

    The device is synchronised at the start and the end only, so that calls overlap as in a run.
    """
    synchronize(device)
    started = time.perf_counter()
    calls = 0
    while calls < least or time.perf_counter() - started < seconds:
        function(calls)
        calls += 1
    synchronize(device)
    return (time.perf_counter() - started) / calls


def seconds_of(function: Callable[[], object], device: torch.device) -> float:
    """Return the time of one call, including its work on the device."""
    synchronize(device)
    started = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - started


def matmul_flops(device: torch.device, precision: Precision, seconds: float = 1.0) -> float:
    """Return the operations per second of a large matrix product in the precision of the run: a
    reachable ceiling.

    The matrices are 8,192 squared on a GPU and 1,536 squared on a CPU. The fastest product within
    `seconds` counts, because other programs may use the machine.
    """
    size = 8192 if device.type == "cuda" else 1536
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, generator=generator) for _ in range(2))
    with precision.autocast():
        # converts to the dtype of products in the run
        left = (left @ right).mul(1 / size)
        right = right
        right = right.to(left.dtype)
        out = left @ right
        best = float("inf")
        until = time.perf_counter() + seconds
        while time.perf_counter() < until or best == float("inf"):
            best = min(best, seconds_of(lambda: torch.mm(left, right, out=out), device))
    return 2 * size**3 / best


def flops_per_sample(model: nn.Module, batch: Batch, precision: Precision) -> float:
    """Return the operations per sample of forward and backward pass, multiply and add as two, as
    counted by torch.

    Only matrix products and convolutions count. Attention is counted in its unfused form, without
    the recomputation of a fused kernel. The model is called uncompiled, and its gradients are
    cleared afterwards.
    """
    few = first_rows(batch, COUNTED)
    return count_operations(lambda: model.forward(few).total, model, precision) / len(few)


def count_operations(loss: Callable[[], Tensor], model: nn.Module, precision: Precision) -> int:
    """Return the operations of a loss of a model and of its backward pass, counted as
    `flops_per_sample` does.
    """
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        with precision.autocast():
            value = loss()
        value.backward()
    for parameter in model.parameters():
        parameter.grad = None
    return counter.get_total_flops()


def first_rows(batch: Batch, count: int) -> Batch:
    """Return the first samples of a batch; the complete batch where samples share images."""
    if batch.image_of_B is not None:
        return batch
    size = len(batch)

    def cut(value: Any) -> Any:
        return value[:count] if isinstance(value, Tensor | list) and len(value) == size else value

    fields = dataclasses.fields(batch)
    return dataclasses.replace(
        batch, **{field.name: cut(getattr(batch, field.name)) for field in fields}
    )


def peak_memory(device: torch.device) -> int:
    """Return the peak memory so far in bytes: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_bytes()


_KEPT_UPDATES = 4
"""Updates whose batches are kept on the device to measure the step alone."""
_PREFETCHED = 4
"""Maximum number of batches that a worker of the loader prefetches."""
_WARM_UP = 2
_VOLUMES = 16
"""Volumes whose stored size is read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examination:
    """Measurements of a run. A pair is a sample of the run: an image with its text, question or
    labels.
    """

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
    volume_bytes: tuple[float, float] | None = None
    """Mean bytes of a volume in its shard, and in a batch; None for images."""

    @property
    def mfu(self) -> float:
        """Fraction of the measured ceiling that the step alone reaches."""
        return self.model_rate * self.gflop_per_pair / 1e3 / self.ceiling_tflops

    @property
    def efficiency(self) -> float:
        """Rate of the run divided by the rate of the slower of loader and step."""
        return self.rate / min(self.model_rate, self.loader_rate)


def examine(run: Run, seconds: float = 10.0) -> Examination:
    """Measure a run on one rank for about six times `seconds`. Raises ConfigError under torchrun
    with several ranks.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError("the doctor examines one rank; start it without torchrun", "unsupported")
    settings = run.settings.train
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(join(settings.device))
        stack.enter_context(
            machine_settings(
                ranks, settings.num_threads, settings.deterministic, settings.precision
            )
        )
        stack.enter_context(preserve_generators(ranks.device))
        config = dataclasses.replace(
            settings,
            run_dir=stack.enter_context(_temporary_folder(settings.run_dir)),
            resume="never",
            tensorboard=False,
            wandb=None,
        )
        training = Training(
            run.model, run.data.train, ranks, run.settings.optim, config, rewards=run.rewards
        )
        stack.callback(training.close)
        return _measure(training, run, run.settings.data.workers, seconds)


@contextlib.contextmanager
def _temporary_folder(run_dir: Path) -> Iterator[Path]:
    """Yield a temporary folder on the disk of the run folder."""
    parent = next(parent for parent in run_dir.absolute().parents if parent.is_dir())
    with tempfile.TemporaryDirectory(dir=parent, prefix=".medvl-doctor-") as folder:
        yield Path(folder)


def _measure(training: Training, run: Run, workers: int, seconds: float) -> Examination:
    stream = training.state.stream
    device = training.state.ranks.device
    config = training.config
    numbers = itertools.count()
    # no prefetching while the parts are measured one by one
    side = stream.side
    stream.side = None
    started = time.perf_counter()
    updates = [list(stream.take(next(numbers)))]
    first_batch = (time.perf_counter() - started) / len(updates[0])
    count = min(_KEPT_UPDATES, stream.steps_per_epoch)
    updates += [list(stream.take(next(numbers))) for _ in range(1, count)]
    step = _measure_step(training, updates, seconds)
    prefetched = -(-_PREFETCHED * workers // config.accumulate)
    loader_rate = measure_loader(training, numbers, prefetched, seconds)
    stream.side = side
    rate, wait_share = measure_run(training, numbers, seconds)
    loader = run.data.train
    on_gpu = device.type == "cuda"
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
        volume_bytes=_volume_bytes(loader, updates[0][0]),
        **step,
    )


def _reads_images(loader: object) -> bool:
    return isinstance(loader, Loader) and isinstance(loader.samples, SampleDataset)


def _volume_bytes(loader: Any, batch: Batch) -> tuple[float, float] | None:
    """Return the mean bytes of volumes in their shards, of some spread over the source, and in a
    batch; None for images.
    """
    if batch.image_BCDHW is None:
        return None
    source = loader.samples.source
    places = np.linspace(0, len(source) - 1, min(len(source), _VOLUMES)).astype(int).tolist()
    stored = [source.volume_bytes(place) for place in places]
    return sum(stored) / len(stored), sum(each[0].nbytes for each in batch.embedded)


def _measure_step(
    training: Training, updates: Sequence[list[Batch]], seconds: float
) -> dict[str, float]:
    """Measure the step alone on batches that are on the device, and the time to copy them there."""
    device = training.state.ranks.device
    precision = training.state.precision
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


def measure_loader(
    training: Training, numbers: Iterator[int], prefetched: int, seconds: float
) -> float:
    """Return pairs per second of the loader alone, after its prefetched updates are consumed."""
    for _ in range(prefetched):
        _ = list(training.state.stream.take(next(numbers)))
    pairs = 0
    started = time.perf_counter()
    while not pairs or time.perf_counter() - started < seconds:
        pairs += sum(map(len, training.state.stream.take(next(numbers))))
    return pairs / (time.perf_counter() - started)


def measure_run(training: Training, numbers: Iterator[int], seconds: float) -> tuple[float, float]:
    """Return pairs per second of the run, and the fraction of time that it waited for the
    loader.
    """
    stream = training.state.stream
    device = training.state.ranks.device

    def update() -> int:
        number = next(numbers)
        return training.step(number, 0.0, stream.take(number), stream.micro_batches(number)).pairs

    for _ in range(_WARM_UP):
        update()
    synchronize(device)
    pairs = 0
    started = time.perf_counter()
    waited = stream.wait_seconds
    while not pairs or time.perf_counter() - started < seconds:
        pairs += update()
    synchronize(device)
    elapsed = time.perf_counter() - started
    return pairs / elapsed, (stream.wait_seconds - waited) / elapsed


def _real_tokens(masks: Sequence[Tensor]) -> float:
    """Return the fraction of real tokens; 1.0 without padding or without text."""
    positions = sum(mask_BT.numel() for mask_BT in masks)
    return sum(int(mask_BT.sum()) for mask_BT in masks) / positions if positions else 1.0


# Diagnosis of an examination: the part that limits the run, and options that would help.

Limit = Literal["disk", "decode", "augmentation", "text", "loading", "transfer", "compute", "cores"]

_LABELS: dict[Limit, str] = {
    "disk": "disk: reading the shards",
    "decode": "decode: JSON and images",
    "augmentation": "augmentation of the images",
    "text": "text: choosing and tokenising",
    "loading": "loading: its stages are unknown",
    "transfer": "transfer to the GPU",
    "compute": "compute: the step itself",
    "cores": "cores: loader and step share them",
}
_SLOW_TRANSFER = 0.1
"""Fraction of a step's time from which the transfer of its batches is reported as the limit."""
_GOOD_EFFICIENCY = 0.95
"""Efficiency below which loader and step compete for cores."""
_MUCH_PADDING = 0.7
"""Fraction of real tokens below which padding is mentioned."""
_FREE_MEMORY = 0.5
"""Fraction of the GPU's memory below which a larger batch is suggested."""


def limit(exam: Examination) -> Limit:
    """Return the part that limits the speed of the run.

    `cores`: each part alone is fast enough, but they compete for CPU cores. `loading`: the loader,
    with unknown stages.
    """
    if exam.loader_rate < exam.model_rate:
        return slowest_stage(exam)
    update = exam.pairs / exam.model_rate
    if exam.transfer_seconds > _SLOW_TRANSFER * update:
        return "transfer"
    if (
        exam.device == "CPU"
        and exam.efficiency < _GOOD_EFFICIENCY
        and exam.workers + exam.threads > exam.cores
    ):
        return "cores"
    return "compute"


def slowest_stage(exam: Examination) -> Limit:
    """Return the slowest stage of the loader."""
    stages = exam.stages
    if stages is None:
        return "loading"
    known: tuple[Literal["disk", "decode", "augmentation", "text"], ...] = (
        "disk",
        "decode",
        "augmentation",
        "text",
    )
    return max(known, key=lambda name: getattr(stages, name))


def advice(exam: Examination, settings: Settings) -> list[str]:
    """Return options that would help, each with its cost, the most helpful first."""
    part = limit(exam)
    if part == "compute":
        return list(_faster_step(exam, settings))
    if part == "transfer":
        return [
            "the GPU waits for its inputs: images are copied as uint8 already; check whether "
            "the link is shared"
        ]
    if part == "cores":
        return [
            f"{exam.workers} workers and {exam.threads} threads share {exam.cores} cores: fewer "
            "--data.workers, or --train.num-threads so that both fit"
        ]
    return list(_faster_loader(exam, settings.data, part))


def _faster_step(exam: Examination, settings: Settings) -> Iterator[str]:
    train = settings.train
    if exam.memory_gb is not None:
        if train.precision == "fp32":
            yield "--train.precision bf16: matrix products in 16 bits"
        if not train.channels_last:
            yield "--train.channels-last True: faster convolutions, if the image encoder has any"
        if not train.compile and train.grad_cache is None:
            yield "--train.compile True: a minute at the start, then fused kernels"
        if exam.peak_gb < _FREE_MEMORY * exam.memory_gb:
            yield (
                f"--train.global-batch: {exam.peak_gb:.0f} of {exam.memory_gb:.0f} GB are used, "
                f"a larger batch would "
                "fit (it changes the number of negatives, and may need another learning rate)"
            )
    if exam.real_tokens < _MUCH_PADDING and not train.packed_text:
        yield (
            f"{1 - exam.real_tokens:.0%} of the token positions are padding: --train.packed-text "
            "True leaves it out (BERT family), a smaller --model.max-tokens cuts the longest texts"
        )
    if train.grad_cache is not None:
        yield "--train.grad-cache: a larger part, or None where the batch fits"


def _faster_loader(exam: Examination, data: Any, part: Limit) -> Iterator[str]:
    image = getattr(data, "image", None)
    spare = exam.cores - exam.workers - (exam.threads if exam.device == "CPU" else 1)
    if spare > 0 and part != "disk":
        workers = min(
            exam.workers + spare,
            -(-exam.workers * int(exam.model_rate) // max(1, int(exam.loader_rate))),
        )
        yield (
            f"--data.workers {max(workers, exam.workers + 1)}: {exam.cores} cores, "
            f"{exam.workers} workers"
        )
    elif part != "disk":
        yield f"all {exam.cores} cores are used by {exam.workers} workers: use more cores"
    if part == "disk":
        yield "shards on a local disk or in memory: they are read again in every epoch"
    elif part == "decode":
        size = getattr(image, "size", None)
        if exam.volume_bytes is not None:
            yield "smaller stored volumes: medvl shards --spacing and --size"
            return
        if exam.memory_gb is not None and getattr(image, "decode", "device") != "device":
            yield (
                "--data.image.on-device True --data.image.decode device: decoding and all "
                "augmentation on the GPU, from shards of JPEG files"
            )
        yield f"smaller stored images: medvl shards --short-side, for training at {size} pixels"
    elif part == "augmentation":
        if exam.memory_gb is not None and getattr(image, "on_device", True) is False:
            yield "--data.image.on-device True: all of it but the crop on the GPU"
        yield "a weaker --data.image: blur and affine cost the most"
    elif part == "text":
        yield "shorter texts, or a text policy that takes one section"
    else:
        yield "medvl shards instead of webdataset tars (medvl shards webdataset)"


def describe(exam: Examination, settings: Settings) -> str:
    """Return the examination as a table, with the limit and the advice at its end."""
    unit = "GPU memory" if exam.memory_gb is not None else "resident memory"
    rows = [
        ("device", f"{exam.device}, {exam.precision}; {exam.cores} cores, {exam.workers} workers"),
        (
            "model",
            f"{exam.parameters / 1e6:.1f} million parameters, {exam.gflop_per_pair:.2f} GFLOP "
            f"per pair",
        ),
        (
            "step alone",
            f"{exam.model_rate:.1f} pairs/s, {1000 * exam.pairs / exam.model_rate:.1f} ms of "
            f"{exam.pairs}",
        ),
        ("loader alone", f"{exam.loader_rate:.1f} images/s"),
        ("end to end", f"{exam.rate:.1f} pairs/s, {exam.efficiency:.2f} of the slower one"),
        ("waiting for data", f"{exam.wait_share:.1%} of the time"),
        ("MFU", f"{exam.mfu:.1%} of a measured {exam.ceiling_tflops:.3g} TFLOP/s"),
        ("peak memory", f"{exam.peak_gb:.2f} GB ({unit})"),
        ("real tokens", f"{exam.real_tokens:.0%} of the positions"),
        (
            "first batch, first step",
            f"{exam.first_batch_seconds:.1f} s, {exam.first_step_seconds:.1f} s",
        ),
        ("transfer", f"{1000 * exam.transfer_seconds:.2f} ms per update"),
        ("checkpoint", f"stops the run for {exam.checkpoint_seconds:.2f} s"),
    ]
    if exam.stages is not None:
        costs = ", ".join(f"{name} {1000 * getattr(exam.stages, name):.2f}" for name in STAGES)
        rows.append(("per sample, on one core", f"{costs} ms"))
    if exam.volume_bytes is not None:
        stored, read = (size / 1e6 for size in exam.volume_bytes)
        rows.append(("a volume", f"{stored:.3g} MB in its shard, {read:.3g} MB in a batch"))
    lines = [f"{name:24}{value}" for name, value in rows]
    suggestions = advice(exam, settings) or [
        "no option would help: use a faster device, or a smaller model"
    ]
    return "\n".join(
        [
            *lines,
            f"{'the limit':24}{_LABELS[limit(exam)]}",
            *(f"{'':24}{line}" for line in suggestions),
        ]
    )
