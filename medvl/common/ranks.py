"""Rank of this process and number of ranks, for loaders."""

import os

import torch.distributed as dist

from medvl.errors import ConfigError


def rank_and_world() -> tuple[int, int]:
    """Return (rank, number of ranks) of this process, from the process group or else from torchrun's environment."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def check_ranks(rank: int | None, world: int | None, *, train: bool) -> tuple[int, int]:
    """Return the rank and number of ranks of a loader; both None means those of this process.

    Raises:
        ConfigError: one of the two is missing ("missing"), the rank is not below `world` ("out_of_range"), or a
            training loader ignores the other ranks of its process group ("conflict").
    """
    actual = rank_and_world()
    if rank is None and world is None:
        return actual
    if rank is None or world is None:
        field = "rank" if rank is None else "world"
        raise ConfigError("expected rank and world together; give both, or neither", "missing", field=field)
    if not 0 <= rank < world:
        raise ConfigError(f"expected a rank from 0 to {world - 1}, got {rank}", "out_of_range", field="rank")
    if train and world == 1 < actual[1]:
        message = f"got world=1 in a group of {actual[1]} ranks, which would all train on the same samples"
        raise ConfigError(f"{message}; leave out rank and world", "conflict", field="world")
    return rank, world
