"""Weights of a checkpoint: one safetensors file, or the parts that the ranks of a sharded run wrote
side by side.

    model.safetensors                                          one process wrote all
    weights/shard-00001-model-00001-of-00001.safetensors, ...
        each rank wrote its own (`torch.distributed.checkpoint`)

Both are read without pickle, by any number of processes.
"""

import contextlib
import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from medvl.common import files as folders
from medvl.common.files import MARKER, check_marker, sha256
from medvl.common.hub import HUB_PREFIX, fetch_snapshot, is_hub_id
from medvl.common.untrusted import ANYWHERE, parse_json, read_json
from medvl.encoders.pretrained import check_finite
from medvl.encoders.regions import RegionEncoder
from medvl.errors import CheckpointError, MedvlError, WeightsError

# Limit of the memory that building a model can allocate, from the size of the weights that it is
# built for.

_FACTOR = 4
_SLACK = 2**26
"""Limit of the elements that building a model may allocate: a multiple of those of the weights,
plus a constant for buffers that are not saved.
"""


class AllocationLimit(TorchDispatchMode):
    """Context in which new tensors may have a few times a number of elements, all together.

    The sizes in a configuration, or in the names of a file's tensors, are not checked before the
    model is built. So that damaged or foreign ones cannot exhaust the memory, each new tensor is
    measured on the meta device before it is allocated.

    Args:
        elements: number of elements of the weights.
        error: raised within the context where the limit is exceeded.
    """

    def __init__(self, elements: int, error: MedvlError) -> None:
        super().__init__()
        self._left = _FACTOR * elements + _SLACK
        self._error = error

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, counting the elements that it allocates if it creates a tensor from
        nothing.
        """
        kwargs = dict(kwargs or {})
        if "device" in kwargs and torch.device(kwargs["device"] or "cpu").type != "meta":
            self._count(func, args, kwargs)
        return func(*args, **kwargs)

    def _count(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        try:
            plan = func(*args, **{**kwargs, "device": torch.device("meta")})
            self._left -= plan.numel() if isinstance(plan, Tensor) else 0
        except RuntimeError:  # more bytes than 64 bits can count
            self._left = -1
        if self._left < 0:
            raise self._error


def elements_of(files: Iterable[Path]) -> int:
    """Return the number of elements in safetensors files. Raises what `safetensors.safe_open`
    does for damaged ones.
    """
    elements = 0
    for path in files:
        with safetensors.safe_open(path, framework="pt") as file:
            names = file.keys()
            elements += sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    return elements


# Folder of a checkpoint from the argument of a user: a checkpoint, a run, or a model on the
# Hugging Face hub.

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer"
TRAIN_MANIFEST = "train_manifest.json"
WEIGHT_PARTS = "weights"
"""Folder of a checkpoint whose weights were written by several ranks, each its own part, instead
of one file.
"""
TRAIN_STATE = "train_state"
"""Folder of a checkpoint with the state of the training run, which a model does not need."""
ANCESTORS = "ancestor_manifests.json"
"""File of a checkpoint with the training manifests of the checkpoints that its run started from,
and of theirs.
"""
CARD = "README.md"
"""File of a checkpoint with its model card."""
MODEL_FILES = (CONFIG, WEIGHTS, f"{TOKENIZER}/*", TRAIN_MANIFEST, ANCESTORS, CARD)
"""Files of a checkpoint that make up the model; the others belong to the training run."""
BEST = "best"
LAST = "last"
"""Links in the folder of a run."""
_SHOWN_CHECKPOINTS = 5
_REVISION = re.compile(r"[\w./-]{1,96}", re.ASCII)


def find_checkpoint(source: Path | str) -> Path:
    """Return the folder of a checkpoint.

    Args:
        source: the folder of a checkpoint; or of a run, for its best checkpoint, or its last one
            where it has no best; or `hf-hub:OWNER/NAME[@REVISION]`, which is downloaded. Other
            paths are returned as they are.

    Raises CheckpointError "not_found" for a model of the hub that is not available.
    """
    name = str(source)
    if not on_hub(source):
        return _of_run(Path(source))
    if not _is_hub_name(name.removeprefix(HUB_PREFIX)):
        message = f"expected {HUB_PREFIX}OWNER/NAME, or with @REVISION at the end, got {name!r}"
        raise CheckpointError(message, "malformed")
    hub_id, _, revision = name.removeprefix(HUB_PREFIX).partition("@")
    try:
        return fetch_snapshot(hub_id, revision or None, (*MODEL_FILES, MARKER))
    except WeightsError as error:
        raise CheckpointError(str(error), error.code) from error


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint's weights: one, or the parts of several ranks."""
    return sorted((folder / WEIGHT_PARTS).glob("*.safetensors")) or [folder / WEIGHTS]


def weights_sha256(folder: Path) -> str:
    """Return the sha256 of a checkpoint's weights; of weights in several parts that of their
    hashes.
    """
    hashes = [sha256(file) for file in weight_files(folder)]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def nearby_checkpoints(folder: Path) -> str:
    """Return advice that names the runs and checkpoints in a folder, the first five; "" where
    there are none.
    """
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    names = [str(entry) for entry in entries if (_of_run(entry) / CONFIG).is_file()]
    more = ", ..." if len(names) > _SHOWN_CHECKPOINTS else ""
    return f"give one of {', '.join(names[:_SHOWN_CHECKPOINTS])}{more}" if names else ""


def on_hub(source: Path | str) -> bool:
    """Return whether `find_checkpoint` takes a name from the hub: one that begins with
    `hf-hub:`.
    """
    return str(source).startswith(HUB_PREFIX)


def hub_advice(source: Path | str) -> str:
    """Return advice for a path that does not exist, but may be meant as the name of a model on
    the hub; else "".
    """
    name = str(source)
    is_possible = not on_hub(source) and not Path(source).exists() and _is_hub_name(name)
    return f"for a model of the hub write {HUB_PREFIX}{name}" if is_possible else ""


def _is_hub_name(name: str) -> bool:
    hub_id, at, revision = name.partition("@")
    return is_hub_id(hub_id) and (not at or _REVISION.fullmatch(revision) is not None)


def _of_run(folder: Path) -> Path:
    if (folder / CONFIG).is_file():
        return folder
    return next(
        (folder / name for name in (BEST, LAST) if (folder / name / CONFIG).is_file()), folder
    )


def limited_allocation(folder: Path) -> AllocationLimit:
    """Return a context for building the model of a checkpoint's configuration. Raises
    CheckpointError.
    """
    files = weight_files(folder)
    with _weights_errors(folder):
        _check_regular(files)
        elements = elements_of(files)
    message = (
        f"{files[0]} does not fit the configuration beside it, whose model has far more parameters"
    )
    return AllocationLimit(elements, CheckpointError(message, "mismatch"))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the complete weights of a checkpoint.

    Raises CheckpointError where they are missing or damaged, or a value is NaN or infinite
    ("nonfinite").
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
    """Return the complete tensors of a folder of parts. Raises CheckpointError where one is
    missing or damaged.
    """
    from torch.distributed.checkpoint import (
        HuggingFaceStorageReader,
        TensorStorageMetadata,
    )  # takes a second

    _check_regular(sorted(folder.iterdir()))
    try:
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
        tensors: dict[str, Tensor] = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            if math.prod(entry.size) != sum(math.prod(chunk.sizes) for chunk in entry.chunks):
                raise CheckpointError(
                    f"{folder} lacks a part of {name}: a file is missing or damaged", "malformed"
                )
            tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        for path in {Path(part.relative_path) for part in (metadata.storage_data or {}).values()}:
            with safetensors.safe_open(path, framework="pt") as file:
                offsets = parse_json(file.metadata()["DCP_SHARDING_INFO"])
                for name, entry in offsets.items():
                    part = file.get_tensor(name)
                    starts = zip(entry["saved_offsets"], part.shape, strict=True)
                    tensors[name][
                        tuple(slice(start, start + length) for start, length in starts)
                    ] = part
    except (safetensors.SafetensorError, OSError, ValueError, LookupError, TypeError) as error:
        message = (
            f"{folder} has no complete parts of a checkpoint ({type(error).__name__}): it "
            f"is damaged"
        )
        raise CheckpointError(message, "malformed") from None
    return tensors


def consolidate(checkpoint: Path | str, out: Path) -> Path:
    """Write the model of a checkpoint with weights in one `model.safetensors`, and return its
    folder.

    The state of the training is left out: a run resumes from its own checkpoints, on any number of
    ranks. The complete weights are held in memory.

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
        raise CheckpointError(
            f"{folder} has no {MARKER}, without which a missing part is not noticed", "missing"
        )
    check_marker(folder, exclude=TRAIN_STATE)
    tensors = read_weights(folder)
    with folders.new_folder(out) as aside:
        for path in (
            found
            for pattern in MODEL_FILES
            for found in folder.glob(pattern)
            if found.name != WEIGHTS
        ):
            copy = aside / path.relative_to(folder)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
        config = read_json(folder / CONFIG, CheckpointError)
        files = [name for name in config.get("files", []) if name != MARKER]
        (aside / CONFIG).write_text(
            json.dumps({**config, "files": files}, indent=1, sort_keys=True) + "\n"
        )
        safetensors.torch.save_file(tensors, aside / WEIGHTS)
    return out


def _check_regular(files: Iterable[Path]) -> None:
    """Raise CheckpointError "not_a_file" for a pipe, device or socket, at which a reader would
    wait for ever.
    """
    for path in files:
        ANYWHERE.open(path, CheckpointError).close()


@contextlib.contextmanager
def _weights_errors(folder: Path) -> Iterator[None]:
    """Raise CheckpointError for a file of weights that is missing or damaged."""
    path = folder / WEIGHTS
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: {folder} is not a complete checkpoint", "not_found"
        ) from None
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        message = (
            f"{path} is not a complete safetensors file ({error}): it is damaged or another format"
        )
        raise CheckpointError(message, "malformed") from None


# Training data of a model's weights: its modules record the manifests of the shards that they
# were trained on.
#
# Systems, their encoders and the parts of image generators have an attribute `trained_on`.
# Whatever copies weights from one model to another copies it too, so that evaluations refuse the
# patients of every earlier training.

Manifests = Iterable[Mapping[str, Any]]
"""Manifests of shards, as JSON objects."""


def recording_modules(model: nn.Module) -> dict[str, Any]:
    """Return the modules that record their training data, by name; the name of `model` itself is
    "".
    """
    return {name: module for name, module in model.named_modules() if "trained_on" in vars(module)}


def manifests_of(model: nn.Module) -> list[Mapping[str, Any]]:
    """Return the manifests that a model's modules record, each once; a loaded checkpoint's own
    comes first.
    """
    recorded = [each for module in recording_modules(model).values() for each in module.trained_on]
    return [each for number, each in enumerate(recorded) if each not in recorded[:number]]


def generator_manifests(manifests: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the manifests of the training data of the generators of synthetic images, theirs
    included.
    """
    generators = [
        each
        for manifest in manifests
        for one in manifest.get("generators", ())
        for each in one["trained_on"]
    ]
    return [*generators, *generator_manifests(generators)] if generators else []


def record_training(model: nn.Module, manifests: Manifests, detector: str | None) -> None:
    """Record in all modules of a model the training data of the weights that they were loaded with.

    Args:
        model: a system, or a part of one.
        manifests: the training data.
        detector: hash of the detector whose regions the weights were trained with; None: unknown,
            or pixels.
    """
    for module in recording_modules(model).values():
        module.trained_on = tuple(manifests)
        if isinstance(module, RegionEncoder):
            module.detector = detector


def copy_training(source: nn.Module, target: nn.Module) -> None:
    """Record in a model the training data, and the detector, of another one whose weights it got.

    Each module takes what the module of the same name records; modules that the source lacks stay
    as they are.
    """
    theirs = recording_modules(source)
    for name, module in recording_modules(target).items():
        if name in theirs:
            module.trained_on = theirs[name].trained_on
            if isinstance(module, RegionEncoder):
                module.detector = theirs[name].detector


def add_training(source: nn.Module, target: nn.Module) -> None:
    """Add the training data of a model to that of one of the same structure, whose weights it
    was mixed into.
    """
    theirs = recording_modules(source)
    for name, module in recording_modules(target).items():
        more = [each for each in theirs[name].trained_on if each not in module.trained_on]
        module.trained_on = (*module.trained_on, *more)
