"""What an examination says: the part that limits the run, and the options that would help."""

from collections.abc import Iterator
from typing import Any, Literal

from medvl.data.loading.profile import STAGES
from medvl.train.doctor.examine import Examination
from medvl.train.run import Settings

Limit = Literal["disk", "decode", "augmentation", "text", "loading", "transfer", "compute", "cores"]

_MEANS: dict[Limit, str] = {
    "disk": "disk: reading the shards",
    "decode": "decode: JSON and images",
    "augmentation": "augmentation of the images",
    "text": "text: choosing and tokenising",
    "loading": "loading from a streamed address",
    "transfer": "transfer to the GPU",
    "compute": "compute: the step itself",
    "cores": "cores: loader and step share them",
}
_TRANSFER = 0.1
"""Share of a step's time from which on bringing its batches to the device counts."""
_HELD = 0.95
"""What the run should reach of the slower of loader and step."""
_PADDED = 0.7
"""Share of real tokens below which padding is worth a word."""
_ROOMY = 0.5
"""Share of the GPU's memory below which a larger batch would fit."""


def limit(found: Examination) -> Limit:
    """Which part the run would have to make faster to be faster.

    `cores`: each part alone would be fast enough, but they share the CPU's cores. `loading`: the loader, of which it
    is not known what takes its time.
    """
    if found.loader_rate < found.model_rate:
        return slowest_stage(found)
    update = found.pairs / found.model_rate
    if found.transfer_seconds > _TRANSFER * update:
        return "transfer"
    if found.device == "CPU" and found.efficiency < _HELD and found.workers + found.threads > found.cores:
        return "cores"
    return "compute"


def slowest_stage(found: Examination) -> Limit:
    """Of the loader."""
    stages = found.stages
    if stages is None:
        return "loading"
    known: tuple[Literal["disk", "decode", "augmentation", "text"], ...] = ("disk", "decode", "augmentation", "text")
    return max(known, key=lambda name: getattr(stages, name))


def advice(found: Examination, settings: Settings) -> list[str]:
    """Options that would help, each with what it costs, the most helpful first."""
    part = limit(found)
    if part == "compute":
        return list(_faster_step(found, settings))
    if part == "transfer":
        return ["the GPU waits for its inputs: images travel as uint8 already; look whether the link is shared"]
    if part == "cores":
        return [
            f"{found.workers} workers and {found.threads} threads share {found.cores} cores: fewer --data.workers, or "
            "--train.num-threads so that both fit"
        ]
    return list(_faster_loader(found, settings.data, part))


def _faster_step(found: Examination, settings: Settings) -> Iterator[str]:
    train = settings.train
    if found.memory_gb is not None:
        if train.precision == "fp32":
            yield "--train.precision bf16: products of matrices in 16 bits"
        if not train.channels_last:
            yield "--train.channels-last True: faster convolutions, where the image encoder has any"
        if not train.compile and train.grad_cache is None:
            yield "--train.compile True: a minute at the start, then fused kernels"
        if found.peak_gb < _ROOMY * found.memory_gb:
            yield (
                f"--train.global-batch: {found.peak_gb:.0f} of {found.memory_gb:.0f} GB are used, a larger batch would "
                "fit (it changes the training: rate and negatives)"
            )
    if found.real_tokens < _PADDED and not train.packed_text:
        packed = "--train.packed-text True leaves them out (BERT and its kin), " if found.memory_gb is not None else ""
        yield (
            f"{1 - found.real_tokens:.0%} of the token positions are padding: {packed}a smaller --model.max-tokens "
            "cuts the longest texts"
        )
    if train.grad_cache is not None:
        yield "--train.grad-cache: a larger part, or None where the batch fits"


def _faster_loader(found: Examination, data: Any, part: Limit) -> Iterator[str]:
    spare = found.cores - found.workers - (found.threads if found.device == "CPU" else 1)
    if spare > 0 and part != "disk":
        wanted = min(found.workers + spare, -(-found.workers * int(found.model_rate) // max(1, int(found.loader_rate))))
        yield f"--data.workers {max(wanted, found.workers + 1)}: {found.cores} cores, {found.workers} workers"
    elif part != "disk":
        yield f"all {found.cores} cores are taken by {found.workers} workers: more cores"
    if part == "disk":
        yield "the shards on a local disk, or in memory: they are read again in every epoch"
    elif part == "decode":
        size = getattr(getattr(data, "image", None), "size", None)
        yield f"smaller stored images: medvl shards --short-side, for a training at {size} pixels"
    elif part == "augmentation":
        yield "a weaker --data.image: blur and affine cost the most"
    elif part == "text":
        yield "shorter texts, or a text policy that takes one section"
    else:
        yield "shards on a local disk instead of a streamed address"


def describe(found: Examination, settings: Settings) -> str:
    """The examination as a table of lines, with the limit and the advice at its end."""
    unit = "GPU memory" if found.memory_gb is not None else "resident memory"
    rows = [
        ("device", f"{found.device}, {found.precision}; {found.cores} cores, {found.workers} workers"),
        ("model", f"{found.parameters / 1e6:.1f} million parameters, {found.gflop_a_pair:.2f} GFLOP a pair"),
        (
            "step alone",
            f"{found.model_rate:.1f} pairs/s, {1000 * found.pairs / found.model_rate:.1f} ms of {found.pairs}",
        ),
        ("loader alone", f"{found.loader_rate:.1f} images/s"),
        ("end to end", f"{found.rate:.1f} pairs/s, {found.efficiency:.2f} of the slower one"),
        ("waiting for data", f"{found.wait_share:.1%} of the time"),
        ("MFU", f"{found.mfu:.1%} of a measured {found.ceiling_tflops:.3g} TFLOP/s"),
        ("peak memory", f"{found.peak_gb:.2f} GB ({unit})"),
        ("real tokens", f"{found.real_tokens:.0%} of the positions"),
        ("first batch, first step", f"{found.first_batch_seconds:.1f} s, {found.first_step_seconds:.1f} s"),
        ("transfer", f"{1000 * found.transfer_seconds:.2f} ms an update"),
        ("checkpoint", f"stops the run for {found.checkpoint_seconds:.2f} s"),
    ]
    if found.stages is not None:
        costs = ", ".join(f"{name} {1000 * getattr(found.stages, name):.2f}" for name in STAGES)
        rows.append(("a sample, on one core", f"{costs} ms"))
    lines = [f"{name:24}{value}" for name, value in rows]
    told = advice(found, settings) or ["none of its options: a faster device, or a smaller model"]
    return "\n".join([*lines, f"{'the limit':24}{_MEANS[limit(found)]}", *(f"{'':24}{line}" for line in told)])
