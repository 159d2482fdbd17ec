"""Checkpoints of models: `config.json`, `model.safetensors` and the tokenizer. Weights never need pickle."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor, nn

import medvl
from medvl.common.config_io import from_dict, to_dict
from medvl.common.files import MARKER, check_marker
from medvl.data.shards.format import Manifest
from medvl.data.tokenizer.tokenizer import load_tokenizer
from medvl.errors import CheckpointError, ConfigError
from medvl.models.base import System, TwoTowers
from medvl.models.registry import system

CONFIG, WEIGHTS, TOKENIZER, TRAIN_MANIFEST = "config.json", "model.safetensors", "tokenizer", "train_manifest.json"
TRAIN_STATE = "train_state"
"""Folder of a checkpoint with the state of the training run, which a model does not need."""
_FORMAT = 2
_PICKLES = (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".tar")
_SHOWN = 4
_TOWERS = ("image_encoder", "text_encoder")
"""Submodules that all pretrained systems have."""


def save(model: System, folder: Path, run: Mapping[str, Any] | None = None) -> None:
    """Write the model into an existing folder.

    Args:
        model: a system.
        folder: gets `config.json`, `model.safetensors` and, if the model has a tokenizer, `tokenizer/`.
        run: how the model was trained (recipe, data, versions); JSON values only. The manifest of the training data,
            under `train_manifest`, gets a file of its own: evaluators refuse data that shares a patient with it.
    """
    run = dict(run or {})
    manifest = run.pop(TRAIN_MANIFEST.removesuffix(".json"), None)
    if manifest is not None:
        (folder / TRAIN_MANIFEST).write_text(json.dumps(manifest, sort_keys=True) + "\n")
    config = {
        "format": _FORMAT,
        "medvl": medvl.__version__,
        "model": {"name": model.name, "settings": to_dict(model.config)},
        "run": run,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    safetensors.torch.save_file(tensors, folder / WEIGHTS)
    if model.tokenizer is not None:
        model.tokenizer.save(folder / TOKENIZER)


def load(folder: Path | str) -> System:
    """Load the model of a checkpoint directory, in eval mode, with `.tokenizer` and `.transform`.

    Raises CheckpointError when the checkpoint is incomplete, a file differs from what training wrote, or a weight is
    missing, unexpected or of another shape; a file that needs pickle is refused.
    """
    folder = _check_folder(Path(folder))
    if (folder / MARKER).is_file():  # training writes it, `save` alone does not
        check_marker(folder, exclude=TRAIN_STATE)
    described = _read_config(folder)["model"]
    try:
        cls = system(described["name"])
        config: Any = from_dict(cls.Config, described["settings"])
    except (ConfigError, TypeError, KeyError) as error:
        reason = f"{folder / CONFIG} does not describe a model of this version of medvl: {error}"
        raise CheckpointError(reason, getattr(error, "code", "malformed")) from error
    has_tokenizer = (folder / TOKENIZER).is_dir()
    tokenizer = load_tokenizer(folder / TOKENIZER, max_tokens=config.max_tokens) if has_tokenizer else None
    model = cls.build(config, pretrained=False, tokenizer=tokenizer)
    load_weights(model, folder)
    return model.eval()


def train_manifest(folder: Path | str) -> Manifest | None:
    """Return the manifest of a checkpoint's training data; None without one. Raises ShardError when it is damaged."""
    path = Path(folder) / TRAIN_MANIFEST
    return Manifest.read(path.parent, path.name) if path.is_file() else None


def load_weights(model: nn.Module, folder: Path | str) -> None:
    """Load `model.safetensors` strictly into a model. Raises CheckpointError naming the first differences."""
    tensors = _read_weights(Path(folder))
    _check_fit(model, tensors, str(Path(folder) / WEIGHTS))
    model.load_state_dict(tensors, strict=True)


def load_towers(model: TwoTowers, folder: Path | str) -> None:
    """Load the image encoder and the text encoder of a checkpoint of any system into a model, and nothing else.

    Raises CheckpointError when the checkpoint is incomplete, or its encoders or vocabulary differ from the model's.
    """
    folder = _check_start(model, folder)
    tensors = _read_weights(folder)
    towers = {
        name: {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}
        for name in _TOWERS
    }
    for name, tower in towers.items():
        _check_fit(model.get_submodule(name), tower, f"{name} of {folder / WEIGHTS}")
    for name, tower in towers.items():  # both or none
        model.get_submodule(name).load_state_dict(tower, strict=True)


def warm_start(model: TwoTowers, folder: Path | str) -> None:
    """Load all weights of a checkpoint of the same system into a model, or the encoders of another system's.

    Raises CheckpointError as `load_weights` and `load_towers` do.
    """
    folder = _check_start(model, folder)
    if _read_config(folder)["model"].get("name") == model.name:
        load_weights(model, folder)
    else:
        load_towers(model, folder)


def _check_start(model: TwoTowers, folder: Path | str) -> Path:
    """Return the folder of a complete checkpoint with the model's vocabulary. Raises CheckpointError otherwise."""
    folder = _check_folder(Path(folder))
    if (folder / MARKER).is_file():
        check_marker(folder, exclude=TRAIN_STATE)
    mine = None if model.tokenizer is None else model.tokenizer.vocabulary
    folder_has_one = (folder / TOKENIZER).is_dir()
    if mine is not None and folder_has_one and load_tokenizer(folder / TOKENIZER).vocabulary != mine:
        message = f"{folder} has another vocabulary: create the model with tokenizer={str(folder / TOKENIZER)!r}"
        raise CheckpointError(message, "mismatch", field="tokenizer")
    return folder


def _read_weights(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: {folder} is not a complete checkpoint", "not_found") from None
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        message = f"{path} is not a complete safetensors file ({error}): it is damaged or another format"
        raise CheckpointError(message, "malformed") from None
    return tensors


def _check_fit(module: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Raise CheckpointError unless the tensors have exactly the names and shapes of the module's."""
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


def _check_folder(folder: Path) -> Path:
    if folder.is_file():
        kind = "it may need pickle, which can run foreign code" if folder.suffix in _PICKLES else "it is a file"
        message = f"{folder} is not loaded: {kind}; give a folder with {CONFIG} and {WEIGHTS}"
        raise CheckpointError(message, "unsupported")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist", "not_found")
    return folder


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: {folder} is not a checkpoint of medvl", "not_found") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}): it is damaged", "malformed") from error
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        raise CheckpointError(f"{path} is not the configuration of a medvl model", "malformed")
    if config.get("format") != _FORMAT:
        message = f"{path}: expected format {_FORMAT}, got {config.get('format')}; train or import again"
        raise CheckpointError(message, "version")
    return config
