"""Errors of torch that end a run, told in terms of what can be done about them."""

import contextlib
from collections.abc import Iterator

import torch

from medvl.data.loading.worker_errors import worker_error
from medvl.errors import TrainingError
from medvl.train.config import TrainConfig
from medvl.train.parallel.distributed import RankInfo

_NO_HOST_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory")
"""What torch's allocator for the CPU says, in its texts."""


@contextlib.contextmanager
def explained(world: RankInfo, config: TrainConfig) -> Iterator[None]:
    """Within this context, running out of memory is a TrainingError with the peak and the settings that need less, and
    the death of a loader's worker, which torch may report anywhere in the main thread, is a LoaderError."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise TrainingError(_out_of_memory(world, config)) from error
    except RuntimeError as error:
        if any(text in str(error) for text in _NO_HOST_MEMORY):
            raise TrainingError(_out_of_memory(world, config)) from error
        explanation = worker_error(error)
        if explanation is None:
            raise
        raise explanation from error


def _out_of_memory(world: RankInfo, config: TrainConfig) -> str:
    local = config.micro_batch // world.size
    part = max(1, min(local, config.grad_cache or local) // 2)
    advice = [
        f"set train.accumulate to {2 * config.accumulate} (the same global batch, but contrastive negatives from half "
        "as many pairs)",
        f"or train.grad_cache to {part} (all negatives, more time; contrastive dual-encoders only)",
    ]
    if config.precision == "fp32" and world.device.type == "cuda":
        advice.append("or train.precision to bf16")
    if world.size > 1 and not config.shard_weights:
        advice.append("or set train.shard_weights (each rank holds its share of weights and optimiser state)")
    advice.append("or take more ranks or a smaller model")
    return (
        f"rank {world.rank} ran out of memory on {_peak(world.device)} with {local} pairs a rank and micro-batch: "
        f"{', '.join(advice)}. The last checkpoint is whole: the same command goes on from it where the setting that "
        "is changed is not one that decides the weights"
    )


def _peak(device: torch.device) -> str:
    if device.type != "cuda":
        return "the CPU"
    peak, total = torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    return f"{device} (peak {peak / 2**30:.1f} of {total / 2**30:.1f} GiB)"
