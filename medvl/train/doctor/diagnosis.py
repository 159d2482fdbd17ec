"""Diagnosis of an examination: the part that limits the run, and options that would help."""

from collections.abc import Iterator
from typing import Any, Literal

from medvl.data.loading.profile import STAGES
from medvl.train.doctor.examine import Examination
from medvl.train.run import Settings

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

    `cores`: each part alone is fast enough, but they compete for CPU cores. `loading`: the loader, with unknown stages.
    """
    if exam.loader_rate < exam.model_rate:
        return slowest_stage(exam)
    update = exam.pairs / exam.model_rate
    if exam.transfer_seconds > _SLOW_TRANSFER * update:
        return "transfer"
    if exam.device == "CPU" and exam.efficiency < _GOOD_EFFICIENCY and exam.workers + exam.threads > exam.cores:
        return "cores"
    return "compute"


def slowest_stage(exam: Examination) -> Limit:
    """Return the slowest stage of the loader."""
    stages = exam.stages
    if stages is None:
        return "loading"
    known: tuple[Literal["disk", "decode", "augmentation", "text"], ...] = ("disk", "decode", "augmentation", "text")
    return max(known, key=lambda name: getattr(stages, name))


def advice(exam: Examination, settings: Settings) -> list[str]:
    """Return options that would help, each with its cost, the most helpful first."""
    part = limit(exam)
    if part == "compute":
        return list(_faster_step(exam, settings))
    if part == "transfer":
        return ["the GPU waits for its inputs: images are copied as uint8 already; check whether the link is shared"]
    if part == "cores":
        return [
            f"{exam.workers} workers and {exam.threads} threads share {exam.cores} cores: fewer --data.workers, or "
            "--train.num-threads so that both fit"
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
                f"--train.global-batch: {exam.peak_gb:.0f} of {exam.memory_gb:.0f} GB are used, a larger batch would "
                "fit (it changes the number of negatives, and may need another learning rate)"
            )
    if exam.real_tokens < _MUCH_PADDING and not train.packed_text:
        yield (
            f"{1 - exam.real_tokens:.0%} of the token positions are padding: --train.packed-text True leaves it out "
            "(BERT family), a smaller --model.max-tokens cuts the longest texts"
        )
    if train.grad_cache is not None:
        yield "--train.grad-cache: a larger part, or None where the batch fits"


def _faster_loader(exam: Examination, data: Any, part: Limit) -> Iterator[str]:
    spare = exam.cores - exam.workers - (exam.threads if exam.device == "CPU" else 1)
    if spare > 0 and part != "disk":
        wanted = min(exam.workers + spare, -(-exam.workers * int(exam.model_rate) // max(1, int(exam.loader_rate))))
        yield f"--data.workers {max(wanted, exam.workers + 1)}: {exam.cores} cores, {exam.workers} workers"
    elif part != "disk":
        yield f"all {exam.cores} cores are used by {exam.workers} workers: use more cores"
    if part == "disk":
        yield "shards on a local disk or in memory: they are read again in every epoch"
    elif part == "decode":
        size = getattr(getattr(data, "image", None), "size", None)
        yield f"smaller stored images: medvl shards --short-side, for training at {size} pixels"
    elif part == "augmentation":
        if exam.memory_gb is not None and getattr(getattr(data, "image", None), "on_device", True) is False:
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
        ("model", f"{exam.parameters / 1e6:.1f} million parameters, {exam.gflop_per_pair:.2f} GFLOP per pair"),
        ("step alone", f"{exam.model_rate:.1f} pairs/s, {1000 * exam.pairs / exam.model_rate:.1f} ms of {exam.pairs}"),
        ("loader alone", f"{exam.loader_rate:.1f} images/s"),
        ("end to end", f"{exam.rate:.1f} pairs/s, {exam.efficiency:.2f} of the slower one"),
        ("waiting for data", f"{exam.wait_share:.1%} of the time"),
        ("MFU", f"{exam.mfu:.1%} of a measured {exam.ceiling_tflops:.3g} TFLOP/s"),
        ("peak memory", f"{exam.peak_gb:.2f} GB ({unit})"),
        ("real tokens", f"{exam.real_tokens:.0%} of the positions"),
        ("first batch, first step", f"{exam.first_batch_seconds:.1f} s, {exam.first_step_seconds:.1f} s"),
        ("transfer", f"{1000 * exam.transfer_seconds:.2f} ms per update"),
        ("checkpoint", f"stops the run for {exam.checkpoint_seconds:.2f} s"),
    ]
    if exam.stages is not None:
        costs = ", ".join(f"{name} {1000 * getattr(exam.stages, name):.2f}" for name in STAGES)
        rows.append(("per sample, on one core", f"{costs} ms"))
    lines = [f"{name:24}{value}" for name, value in rows]
    suggestions = advice(exam, settings) or ["no option would help: use a faster device, or a smaller model"]
    return "\n".join([*lines, f"{'the limit':24}{_LABELS[limit(exam)]}", *(f"{'':24}{line}" for line in suggestions)])
