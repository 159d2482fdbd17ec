"""Weights of a checkpoint: one safetensors file, or the parts that the ranks of a sharded run wrote side by side.

    model.safetensors                                          one process wrote all
    weights/shard-00001-model-00001-of-00001.safetensors, ...  each rank wrote its own (`torch.distributed.checkpoint`)

Both are read without pickle, by any number of processes.
"""

import contextlib
import json
import math
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from medvl.common import folders
from medvl.common.files import MARKER, check_marker
from medvl.common.untrusted import ANYWHERE, parse_json, read_json
from medvl.encoders.pretrained import check_finite
from medvl.errors import CheckpointError
from medvl.models.allocation import AllocationLimit, elements_of
from medvl.models.locate import CONFIG, MODEL_FILES, TRAIN_STATE, WEIGHT_PARTS, WEIGHTS, find_checkpoint, weight_files


def limited_allocation(folder: Path) -> AllocationLimit:
    """Return a context for building the model of a checkpoint's configuration. Raises CheckpointError."""
    files = weight_files(folder)
    with _weights_errors(folder):
        _check_regular(files)
        elements = elements_of(files)
    message = f"{files[0]} does not fit the configuration beside it, whose model has far more parameters"
    return AllocationLimit(elements, CheckpointError(message, "mismatch"))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the complete weights of a checkpoint.

    Raises CheckpointError where they are missing or damaged, or a value is NaN or infinite ("nonfinite").
    """
    if (folder / WEIGHT_PARTS).is_dir():
        tensors = join_parts(folder / WEIGHT_PARTS)
    else:
        with _weights_errors(folder):
            _check_regular([folder / WEIGHTS])
            tensors = safetensors.torch.load_file(folder / WEIGHTS)
    check_finite(tensors, str(folder), CheckpointError)
    return tensors


def join_parts(folder: Path) -> dict[str, Tensor]:
    """Return the complete tensors of a folder of parts. Raises CheckpointError where one is missing or damaged."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader, TensorStorageMetadata  # takes a second

    _check_regular(sorted(folder.iterdir()))
    try:
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
        tensors: dict[str, Tensor] = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            if math.prod(entry.size) != sum(math.prod(chunk.sizes) for chunk in entry.chunks):
                raise CheckpointError(f"{folder} lacks a part of {name}: a file is missing or damaged", "malformed")
            tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        for path in {Path(part.relative_path) for part in (metadata.storage_data or {}).values()}:
            with safetensors.safe_open(path, framework="pt") as file:
                offsets = parse_json(file.metadata()["DCP_SHARDING_INFO"])
                for name, entry in offsets.items():
                    part = file.get_tensor(name)
                    starts = zip(entry["saved_offsets"], part.shape, strict=True)
                    tensors[name][tuple(slice(start, start + length) for start, length in starts)] = part
    except (safetensors.SafetensorError, OSError, ValueError, LookupError, TypeError) as error:
        message = f"{folder} has no complete parts of a checkpoint ({type(error).__name__}): it is damaged"
        raise CheckpointError(message, "malformed") from None
    return tensors


def consolidate(checkpoint: Path | str, out: Path) -> Path:
    """Write the model of a checkpoint with weights in one `model.safetensors`, and return its folder.

    The state of the training is left out: a run resumes from its own checkpoints, on any number of ranks. The complete
    weights are held in memory.

    Args:
        checkpoint: a checkpoint of a training run or the run (`find_checkpoint`).
        out: a new folder.

    Raises CheckpointError where the checkpoint is incomplete or damaged, or `out` exists.
    """
    folder = find_checkpoint(checkpoint)
    if out.exists():
        raise CheckpointError(f"{out} exists; choose another folder", "exists", field="out")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist", "not_found")
    if not (folder / MARKER).is_file():
        raise CheckpointError(f"{folder} has no {MARKER}, without which a missing part is not noticed", "missing")
    check_marker(folder, exclude=TRAIN_STATE)
    tensors = read_weights(folder)
    with folders.new_folder(out) as aside:
        for path in (found for pattern in MODEL_FILES for found in folder.glob(pattern) if found.name != WEIGHTS):
            copy = aside / path.relative_to(folder)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
        config = read_json(folder / CONFIG, CheckpointError)
        files = [name for name in config.get("files", []) if name != MARKER]
        (aside / CONFIG).write_text(json.dumps({**config, "files": files}, indent=1, sort_keys=True) + "\n")
        safetensors.torch.save_file(tensors, aside / WEIGHTS)
    return out


def _check_regular(files: Iterable[Path]) -> None:
    """Raise CheckpointError "not_a_file" for a pipe, device or socket, at which a reader would wait for ever."""
    for path in files:
        ANYWHERE.open(path, CheckpointError).close()


@contextlib.contextmanager
def _weights_errors(folder: Path) -> Iterator[None]:
    """Raise CheckpointError for a file of weights that is missing or damaged."""
    path = folder / WEIGHTS
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: {folder} is not a complete checkpoint", "not_found") from None
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        message = f"{path} is not a complete safetensors file ({error}): it is damaged or another format"
        raise CheckpointError(message, "malformed") from None
