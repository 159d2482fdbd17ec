"""Tensors of sharded models in files, one per rank, written and read side by side (`torch.distributed.checkpoint`).

The files are safetensors; a tensor that is the same on all ranks is in one of them. Any number of ranks can read them.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from medvl.common.folders import wait_for
from medvl.errors import CheckpointError
from medvl.train.parallel.distributed import RankInfo
from medvl.train.parallel.model import parameter_name


def write_parts(folder: Path, tensors: Mapping[str, Tensor], ranks: RankInfo) -> None:
    """Write this rank's part of the tensors into an existing folder. Collective call.

    Raises CheckpointError on all ranks where one of them cannot write.
    """
    ranks.on_all(lambda: wait_for(folder))
    with _failures(folder, "written"):
        writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
        dcp.save(dict(tensors), storage_writer=writer, process_group=ranks.hosts)


def read_parts(folder: Path, tensors: Mapping[str, Tensor], ranks: RankInfo) -> None:
    """Fill the tensors of this rank from a folder that `write_parts` filled on any number of ranks. Collective call.

    Raises CheckpointError on all ranks where a tensor is missing or of another shape, or one of them cannot read it.
    """
    with _failures(folder, "read"):
        reader = dcp.HuggingFaceStorageReader(str(folder))
        dcp.load(dict(tensors), storage_reader=reader, process_group=ranks.hosts)


def empty_state(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """Return an empty tensor, sharded as its parameter is, for every entry of an optimiser's state in a folder."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    state: dict[str, Tensor] = {}
    for name, entry in dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata.items():
        assert isinstance(entry, dcp.TensorStorageMetadata)
        parameter, dtype = parameters.get(parameter_name(name)), entry.properties.dtype
        if isinstance(parameter, DTensor) and parameter.shape == entry.size:
            state[name] = torch.empty_like(parameter.detach(), dtype=dtype)
        else:
            state[name] = torch.empty(entry.size, dtype=dtype)
    return state


@contextlib.contextmanager
def _failures(folder: Path, verb: str) -> Iterator[None]:
    """Raise CheckpointError for failures on any rank, which torch collects in an exception of its own."""
    try:
        yield
    except dcp.CheckpointException as failure:
        rank, (error, _) = next(iter(failure.failures.items()))
        message = f"{folder} cannot be {verb} by rank {rank} ({type(error).__name__}: {error})"
        raise CheckpointError(message, "unreadable") from failure
