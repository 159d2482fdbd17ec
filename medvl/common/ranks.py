"""Rank of this process and number of ranks, and exchange of bytes between ranks."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from medvl.errors import ConfigError


def rank_and_world() -> tuple[int, int]:
    """Return (rank, number of ranks) of this process, from the process group or else from
    torchrun's environment.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def exchange_bytes(payload: bytes, group: Any = None) -> list[bytes]:
    """Return the bytes of all ranks of a group that has a backend for the CPU, in rank order.
    Collective call.
    """
    own = (
        torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        if payload
        else torch.zeros(0, dtype=torch.uint8)
    )
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(own)]), group=group)
    longest = int(max(lengths))
    parts = [torch.zeros(longest, dtype=torch.uint8) for _ in lengths]
    dist.all_gather(parts, pad(own, (0, longest - len(own))), group=group)
    return [
        part[: int(length)].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)
    ]


def check_ranks(rank: int | None, world: int | None, *, train: bool) -> tuple[int, int]:
    """Return the rank and number of ranks of a loader; both None means those of this process.

    Raises:
        ConfigError: one of the two is missing ("missing"), the rank is not below `world`
            ("out_of_range"), or a training loader ignores the other ranks of its process group
            ("conflict").
    """
    actual = rank_and_world()
    if rank is None and world is None:
        return actual
    if rank is None or world is None:
        field = "rank" if rank is None else "world"
        raise ConfigError(
            "expected rank and world together; give both, or neither", "missing", field=field
        )
    if not 0 <= rank < world:
        raise ConfigError(
            f"expected a rank from 0 to {world - 1}, got {rank}", "out_of_range", field="rank"
        )
    if train and world == 1 < actual[1]:
        message = (
            f"got world=1 in a group of {actual[1]} ranks, which would all train on the "
            f"same samples"
        )
        raise ConfigError(f"{message}; leave out rank and world", "conflict", field="world")
    return rank, world
