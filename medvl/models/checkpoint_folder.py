"""The folder of a checkpoint: where it is, whether it is complete, and what its files hold.

    config.json                         system, settings and training
    train_manifest.json                 manifest of the training data
    ancestor_manifests.json             manifests of earlier training
    tokenizer/                          files of the tokenizer
    model.safetensors                   weights, if one process wrote all
    weights/shard-00001-model-00001-of-00001.safetensors, ...
        weights, if each rank wrote its own (`torch.distributed.checkpoint`)
    complete.json                       written last, by a training

All are read without pickle, by any number of processes. `medvl.models.checkpoint` writes them, and
makes models of them.
"""

import contextlib
import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from medvl.common.files import sha256
from medvl.common.hub import HUB_PREFIX, fetch_snapshot, is_hub_id
from medvl.common.untrusted import ANYWHERE, parse_json, read_json
from medvl.data.shards.format import Manifest
from medvl.encoders.base import LORA_SCALE, has_lora, merge_lora_weights
from medvl.encoders.pretrained import check_finite
from medvl.encoders.regions import RegionEncoder
from medvl.errors import CheckpointError, MedvlError, WeightsError
from medvl.models.registry import list_models

FORMAT = 2
"""Version of the files; another one is refused."""
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
MARKER = "complete.json"
"""File of a checkpoint that is written last: size and sha256 of all others."""
BEST = "best"
LAST = "last"
"""Links in the folder of a run."""
DEMO = "demo"
"""Name of the checkpoint in the package: a small ConVIRT that the phantom corpus trained."""
_SHOWN_CHECKPOINTS = 5
_SHOWN = 4
_PICKLES = (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".tar")
_GIVE_RUN = "give a run or a checkpoint, such as runs/convirt or runs/convirt/best"
_REVISION = re.compile(r"[\w./-]{1,96}", re.ASCII)


def find_checkpoint(source: Path | str) -> Path:
    """Return the folder of a checkpoint.

    Args:
        source: the folder of a checkpoint; or of a run, for its best checkpoint, or its last one
            where it has no best; or `hf-hub:OWNER/NAME[@REVISION]`, which is downloaded; or
            `demo`, which is part of medvl, unless a folder has this name. Others are left as is.

    Raises CheckpointError "not_found" for a model of the hub that is not available.
    """
    name = str(source)
    kind = kind_of(source)
    if kind == "demo":
        return Path(__file__).parent / DEMO
    if kind == "folder":
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
    """Return the sha256 of a checkpoint's weights; of several parts that of their hashes."""
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


def kind_of(source: Path | str) -> Literal["demo", "hub", "folder"]:
    """Return what the name of a checkpoint stands for: the demo, unless a folder has its name; a
    model of the hub, which begins with `hf-hub:`; or the folder of a checkpoint or run.
    """
    if str(source).startswith(HUB_PREFIX):
        return "hub"
    return "demo" if str(source) == DEMO and not Path(source).exists() else "folder"


def hub_advice(source: Path | str) -> str:
    """Return advice for a path that does not exist, but may be meant as the name of a model on
    the hub; else "".
    """
    name = str(source)
    is_possible = kind_of(source) == "folder" and not Path(source).exists() and _is_hub_name(name)
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


def check_marker(folder: Path, *, exclude: str | None = None) -> None:
    """Compare the files of a checkpoint with its marker, optionally without those of one subfolder.

    Raises CheckpointError that names the first file that differs.
    """
    marker = folder / MARKER
    try:
        recorded = _json(marker)["files"]
        for name, entry in recorded.items():
            path = folder / name
            if exclude is not None and name.startswith(f"{exclude}/"):
                continue
            if (
                not path.is_file()
                or path.stat().st_size != entry["bytes"]
                or sha256(path) != entry["sha256"]
            ):
                raise CheckpointError(
                    f"{path} differs from {MARKER}: the checkpoint is damaged", "mismatch"
                )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{marker} is damaged ({type(error).__name__})", "malformed"
        ) from error


def complete_folder(folder: Path | str) -> Path:
    """Return the folder of a checkpoint whose files are as training wrote them.

    Raises CheckpointError if there is none, or a file differs from the marker.
    """
    folder = check_folder(Path(folder))
    if (folder / MARKER).exists():  # training writes it, `save` alone does not
        check_marker(folder, exclude=TRAIN_STATE)
    return folder


def described_model(folder: Path | str) -> Mapping[str, Any]:
    """Return `name` and `settings` of a checkpoint's model. Raises CheckpointError when there is
    none.
    """
    folder = check_folder(Path(folder))
    description: Mapping[str, Any] = read_config(folder)["model"]
    if not isinstance(description.get("name"), str) or not isinstance(
        description.get("settings"), dict
    ):
        raise CheckpointError(
            f"{folder / CONFIG} has no name or no settings of a model", "malformed"
        )
    return description


def recorded_run(folder: Path) -> Mapping[str, Any]:
    """Return how a checkpoint was trained, as `save` got it. Raises CheckpointError."""
    return read_config(folder).get("run") or {}


def detector_of(folder: Path | str) -> str | None:
    """Return the hash of the detector whose regions a checkpoint was trained with; None for models
    of pixels.

    Raises CheckpointError when the checkpoint cannot be read.
    """
    run: Any = read_config(check_folder(Path(folder))).get("run")
    try:
        regions = run["data"]["train"]["regions"]
        return None if regions is None else str(regions["sha256"])
    except (KeyError, TypeError):
        return None


def train_manifests(folder: Path | str) -> list[Manifest]:
    """Return the manifests of all data that a checkpoint was trained on: its own run's, then those
    of its ancestors.

    After a manifest of synthetic images come those of their generators' training data
    (`Manifest.lineage`). Empty for weights of unknown origin. Raises CheckpointError or ShardError
    when one is damaged.
    """
    folder = find_checkpoint(folder)
    contents = read_training(folder)
    manifests = [Manifest.parse(content, str(folder / TRAIN_MANIFEST)) for content in contents]
    return [manifest for each in manifests for manifest in each.lineage()]


def read_training(folder: Path) -> list[Any]:
    """Return the JSON of all manifests that a checkpoint holds. Raises CheckpointError when a
    file is damaged.
    """
    manifests: list[Any] = []
    for path in (folder / TRAIN_MANIFEST, folder / ANCESTORS):
        try:
            content = _json(path)
        except FileNotFoundError:
            continue
        manifests += content if isinstance(content, list) else [content]
    return manifests


def check_folder(folder: Path) -> Path:
    """Return the folder of a checkpoint (`find_checkpoint`). Raises CheckpointError where there
    is none.
    """
    folder = find_checkpoint(folder)
    if folder.is_file():
        kind = (
            "it may need pickle, which can run foreign code"
            if folder.suffix in _PICKLES
            else "it is a file"
        )
        message = f"{folder} is not loaded: {kind}; give a folder with {CONFIG} and {WEIGHTS}"
        raise CheckpointError(message, "unsupported")
    if not folder.is_dir():
        advice = nearby_checkpoints(folder.parent) or _GIVE_RUN
        if hub := hub_advice(folder):
            advice = f"{hub}; {advice}"
        if str(folder) in list_models():
            advice = (
                f"it is the name of a system, and create_model({str(folder)!r}) makes a "
                f"new model; {advice}"
            )
        raise CheckpointError(f"{folder} does not exist; {advice}", "not_found")
    return folder


def _json(path: Path) -> Any:
    """Return the content of a JSON file. Raises FileNotFoundError and CheckpointError."""
    return read_json(path, CheckpointError)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of `config.json`.

    Raises CheckpointError where it is missing, damaged or of another version, or the checkpoint
    lacks one of its files.
    """
    path = folder / CONFIG
    try:
        config = _json(path)
    except FileNotFoundError:
        advice = nearby_checkpoints(folder) or _GIVE_RUN
        message = f"{path} is missing: {folder} is not a checkpoint of medvl; {advice}"
        raise CheckpointError(message, "not_found") from None
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        raise CheckpointError(f"{path} is not the configuration of a medvl model", "malformed")
    if config.get("format") != FORMAT:
        message = (
            f"{path}: expected format {FORMAT}, got {config.get('format')}; train or import again"
        )
        raise CheckpointError(message, "version")
    _check_complete(folder, config)
    return config


def _check_complete(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError "missing" where a checkpoint was copied in part.

    Its configuration lists the files that belong to it: without its manifest, patients of its
    training would be tested on unnoticed. A checkpoint of an earlier version of medvl that holds
    the state of its training needs the marker.
    """
    files = config.get("files", [MARKER] if (folder / TRAIN_STATE).exists() else [])
    missing = (
        [name for name in files if not (folder / str(name)).exists()]
        if isinstance(files, list)
        else [CONFIG]
    )
    if missing:
        message = (
            f"{folder} lacks {', '.join(map(str, missing))}: it was copied in part. Copy "
            f"the whole folder again; "
        )
        raise CheckpointError(
            f"{message}model.save_pretrained writes a model without its training", "missing"
        )


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


def limited_allocation(folder: Path, outside: Sequence[Path] = ()) -> AllocationLimit:
    """Return a context for building a checkpoint's model. Raises CheckpointError."""
    files = [*weight_files(folder), *outside]
    with _weights_errors(folder):
        _check_regular(files)
        elements = elements_of(files)
    message = (
        f"{files[0]} does not fit the configuration beside it, whose model has far more parameters"
    )
    return AllocationLimit(elements, CheckpointError(message, "mismatch"))


def read_weights(folder: Path, *, merge: bool = True) -> dict[str, Tensor]:
    """Return the complete weights of a checkpoint, with low-rank updates merged or as stored.

    Raises CheckpointError where they are missing or damaged, or a value is not finite.
    """
    if (folder / WEIGHT_PARTS).is_dir():
        tensors = join_parts(folder / WEIGHT_PARTS)
    else:
        with _weights_errors(folder):
            _check_regular([folder / WEIGHTS])
            tensors = safetensors.torch.load_file(folder / WEIGHTS)
    check_finite(tensors, str(folder), CheckpointError)
    return merge_lora_weights(tensors, LORA_SCALE) if merge else tensors


def join_parts(folder: Path) -> dict[str, Tensor]:
    """Return the complete tensors of a folder of parts. Raises CheckpointError where one is
    missing or damaged.
    """
    # takes a second
    from torch.distributed.checkpoint import HuggingFaceStorageReader, TensorStorageMetadata

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


def load_weights(model: nn.Module, folder: Path | str) -> None:
    """Load the weights of a checkpoint strictly into a model, merged ones where the model has no
    low-rank updates. Raises CheckpointError naming the first differences.
    """
    check_version(model, Path(folder))
    outside: Mapping[str, Tensor] = getattr(model, "outside_weights", dict)()
    tensors = {**outside, **read_weights(Path(folder), merge=False)}
    tensors = tensors if has_lora(model) else merge_lora_weights(tensors, LORA_SCALE)
    check_fit(model, tensors, str(Path(folder) / WEIGHTS))
    model.load_state_dict(tensors, strict=True)


def check_fit(module: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Raise CheckpointError unless the tensors have exactly the names and shapes of the
    module's.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    differences = [f"missing {name}" for name in expected if name not in shapes]
    differences += [f"unexpected {name}" for name in shapes if name not in expected]
    for name, shape in expected.items():
        if shapes.get(name, shape) != shape:
            differences.append(f"{name}: expected {shape}, got {shapes[name]}")
    if differences:
        more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        reason = f"{source} does not fit the model: {'; '.join(differences[:_SHOWN])}{more}"
        raise CheckpointError(reason, "mismatch")


def check_version(model: nn.Module, folder: Path) -> None:
    """Raise CheckpointError unless the weights of a checkpoint have the layout of the model's
    system.
    """
    expected = getattr(model, "weights_version", 1)
    version = described_model(folder).get("version", 1)
    if version != expected:
        system_name = getattr(model, "name", type(model).__name__)
        message = (
            f"{folder / CONFIG}: expected version {expected} of the weights of "
            f"{system_name}, got {version}"
        )
        raise CheckpointError(f"{message}; train or import again", "version")


# Training data of a model's weights: its modules record the manifests of the shards that they
# were trained on.
#
# Systems, their encoders and the parts of image generators have an attribute `trained_on`.
# Whatever copies weights from one model to another copies it too, so that evaluations refuse the
# patients of every earlier training.


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


def record_training(model: nn.Module, folder: Path) -> list[Any]:
    """Record in all modules of a model, or of a part of one, the training data of the checkpoint
    whose weights they were loaded with, and its detector; return the manifests (`read_training`).
    """
    manifests = read_training(folder)
    detector = detector_of(folder)
    for module in recording_modules(model).values():
        module.trained_on = tuple(manifests)
        if isinstance(module, RegionEncoder):
            module.detector = detector
    return manifests


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
