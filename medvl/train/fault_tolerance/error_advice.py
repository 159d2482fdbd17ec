"""Errors of torch that end a run, translated to errors with advice."""

import contextlib
from collections.abc import Iterator

import torch

from medvl.data.loading.worker_errors import worker_error
from medvl.errors import TrainingError
from medvl.train.config import TrainConfig
from medvl.train.parallel.distributed import RankInfo

_NO_HOST_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory")
"""Messages of torch's CPU allocator when memory runs out."""


@contextlib.contextmanager
def with_advice(ranks: RankInfo, config: TrainConfig) -> Iterator[None]:
    """Translate out-of-memory errors to TrainingError with advice, and the death of a loader worker to LoaderError.

    torch may raise the error of a dead worker anywhere in the main thread.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _out_of_memory(ranks, config) from error
    except RuntimeError as error:
        if any(text in str(error) for text in _NO_HOST_MEMORY):
            raise _out_of_memory(ranks, config) from error
        loader_error = worker_error(error)
        if loader_error is None:
            raise
        raise loader_error from error


def _out_of_memory(ranks: RankInfo, config: TrainConfig) -> TrainingError:
    local = config.micro_batch // ranks.size
    part = max(1, min(local, config.grad_cache or local) // 2)
    advice = [
        f"set train.accumulate to {2 * config.accumulate} (the same global batch, but contrastive negatives from half "
        "as many pairs)",
        f"or train.grad_cache to {part} (all negatives, more time; contrastive dual-encoders only)",
    ]
    if config.precision == "fp32" and ranks.device.type == "cuda":
        advice.append("or train.precision to bf16")
    if ranks.size > 1 and not config.shard_weights:
        advice.append("or train.shard_weights to True (each rank holds a part of weights and optimiser state)")
    advice.append("or use more ranks or a smaller model")
    return TrainingError(
        f"rank {ranks.rank} ran out of memory on {_device_memory(ranks.device)} with {local} pairs per rank and "
        f"micro-batch: {', '.join(advice)}. The last checkpoint is intact: the same command resumes from it unless a "
        "changed setting determines the weights",
        "too_large",
        field="global_batch",
    )


def _device_memory(device: torch.device) -> str:
    if device.type != "cuda":
        return "the CPU"
    peak, total = torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    return f"{device} (peak {peak / 2**30:.1f} of {total / 2**30:.1f} GiB)"
