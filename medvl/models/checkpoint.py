"""Checkpoints of models: `config.json`, `model.safetensors` and the tokenizer. Weights never
need pickle.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

import medvl
from medvl.common.config_io import differences, former_fields, from_dict, to_dict
from medvl.common.files import MARKER, check_marker, new_path, write_atomic
from medvl.common.untrusted import read_json
from medvl.data.convert.options import ShardOptions
from medvl.data.shards.format import Manifest
from medvl.data.tokenizer.tokenizer import load_tokenizer
from medvl.data.transforms.image import EvalTransform, OriginalTransform
from medvl.errors import CheckpointError, ConfigError
from medvl.models.base import System
from medvl.models.card import model_card
from medvl.models.registry import list_models, system
from medvl.models.weights import (
    ANCESTORS,
    CARD,
    CONFIG,
    TOKENIZER,
    TRAIN_MANIFEST,
    TRAIN_STATE,
    WEIGHTS,
    add_training,
    find_checkpoint,
    hub_advice,
    limited_allocation,
    manifests_of,
    nearby_checkpoints,
    read_weights,
    record_training,
)

_log = logging.getLogger(__name__)
_FORMAT = 2
_PICKLES = (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".tar")
_SHOWN = 4
_GIVE_RUN = "give a run or a checkpoint, such as runs/convirt or runs/convirt/best"


def save(
    model: System,
    folder: Path,
    run: Mapping[str, Any] | None = None,
    *,
    licence: str | None = None,
    results: Mapping[str, float] | None = None,
    weights: bool = True,
) -> None:
    """Write the model into an existing folder, with a model card.

    Args:
        model: a system.
        folder: gets `config.json`, `model.safetensors`, `README.md` and, if the model has a
            tokenizer, `tokenizer/`.
        run: how the model was trained (recipe, data, versions); JSON values only. The manifest of
            the training data, under `train_manifest`, gets a file of its own, and so do those of
            earlier training (`medvl.models.weights`): evaluators refuse data that shares a patient
            with one of them. With `marker`, the name of the file that the caller writes last, the
            checkpoint is not loaded without that file.
        licence, results: entries of the card (`medvl.models.card`).
        weights: False leaves out `model.safetensors`, where ranks write the weights in parts
            (`medvl.models.weights`).
    """
    run = dict(run or {})
    marker = run.pop("marker", None)
    manifest = json.loads(json.dumps(run.pop(TRAIN_MANIFEST.removesuffix(".json"), None)))
    if manifest is not None:
        write_atomic(folder / TRAIN_MANIFEST, json.dumps(manifest, sort_keys=True) + "\n")
    ancestors = [each for each in manifests_of(model) if each != manifest]
    if ancestors:
        write_atomic(folder / ANCESTORS, json.dumps(ancestors, sort_keys=True) + "\n")
    config: dict[str, Any] = {
        "format": _FORMAT,
        "medvl": medvl.__version__,
        "model": {
            "name": model.name,
            "version": model.weights_version,
            "settings": to_dict(model.config),
        },
        "run": run,
        "files": [
            *([] if manifest is None else [TRAIN_MANIFEST]),
            *([ANCESTORS] if ancestors else []),
            *([TOKENIZER] if model.tokenizer is not None else []),
            *([] if marker is None else [marker]),
        ],
    }
    write_atomic(folder / CONFIG, json.dumps(config, indent=1, sort_keys=True) + "\n")
    settings = config["model"]["settings"]
    manifests = [*([] if manifest is None else [manifest]), *ancestors]
    dual = hasattr(model, "similarity")
    card = model_card(
        model.name, settings, manifests, run, dual=dual, licence=licence, results=results
    )
    write_atomic(folder / CARD, card)
    if model.tokenizer is not None:
        model.tokenizer.save(folder / TOKENIZER)
    if weights:
        tensors = {
            name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()
        }
        with new_path(folder / WEIGHTS) as path:
            safetensors.torch.save_file(tensors, path)


def load(folder: Path | str) -> System:
    """Load a model in eval mode, with `.tokenizer` and `.transform`.

    `folder` is a checkpoint, a run (its best checkpoint), or `hf-hub:OWNER/NAME`
    (`find_checkpoint`).

    Raises CheckpointError when the checkpoint is incomplete, a file differs from what training
    wrote, or a weight is missing, unexpected or of another shape; a file that needs pickle is
    refused.
    """
    folder = _check_folder(Path(folder))
    if (folder / MARKER).exists():  # training writes it, `save` alone does not
        check_marker(folder, exclude=TRAIN_STATE)
    description = described_model(folder)
    try:
        cls = system(description["name"])
        config: Any = from_dict(cls.Config, description["settings"])
    except (ConfigError, TypeError, KeyError) as error:
        reason = f"{folder / CONFIG} does not describe a model of this version of medvl: {error}"
        raise CheckpointError(reason, getattr(error, "code", "malformed")) from error
    has_tokenizer = (folder / TOKENIZER).is_dir()
    tokenizer = (
        load_tokenizer(folder / TOKENIZER, max_tokens=config.max_tokens) if has_tokenizer else None
    )
    with limited_allocation(folder):
        model = cls.build(config, pretrained=False, tokenizer=tokenizer)
    embeddings = getattr(getattr(model, "text_encoder", None), "vocab_size", None)
    if tokenizer is not None and isinstance(embeddings, int) and tokenizer.vocab_size > embeddings:
        message = (
            f"{folder / TOKENIZER} has {tokenizer.vocab_size} ids, the model {embeddings} "
            f"embeddings"
        )
        raise CheckpointError(f"{message}: copy the checkpoint again", "mismatch")
    load_weights(model, folder)
    _record_training(model, folder)
    model.provenance = _read_config(folder).get("run") or {}
    model.transform = _transform_of_originals(model, folder)
    return model.eval()


def _transform_of_originals(model: System, folder: Path) -> EvalTransform:
    """Return the model's transform, which prepares original images as the shards of its training
    were made.

    Without a training manifest, original images go through the model's transform only.
    """
    if not (folder / TRAIN_MANIFEST).is_file():
        return model.transform
    options = _read_training(folder)[0].get("options", {})
    fields = {
        name: options[name]
        for name in ("short_side", "image_format", "quality", "color")
        if name in options
    }
    if len(fields) < 4:
        return model.transform
    try:
        ShardOptions(**fields)
    except (ConfigError, TypeError) as error:
        message = f"{folder / TRAIN_MANIFEST} has impossible options of the shards: {error}"
        raise CheckpointError(message, "malformed") from error
    return OriginalTransform(**model.transform.settings(), **fields)


def train_manifests(folder: Path | str) -> list[Manifest]:
    """Return the manifests of all data that a checkpoint was trained on: its own run's, then those
    of its ancestors.

    After a manifest of synthetic images come those of their generators' training data
    (`Manifest.lineage`). Empty for weights of unknown origin. Raises CheckpointError or ShardError
    when one is damaged.
    """
    folder = find_checkpoint(folder)
    manifests = [
        Manifest.parse(content, str(folder / TRAIN_MANIFEST)) for content in _read_training(folder)
    ]
    return [manifest for each in manifests for manifest in each.lineage()]


def load_weights(model: nn.Module, folder: Path | str) -> None:
    """Load the weights of a checkpoint strictly into a model. Raises CheckpointError naming the
    first differences.
    """
    _check_version(model, Path(folder))
    tensors = read_weights(Path(folder))
    _check_fit(model, tensors, str(Path(folder) / WEIGHTS))
    model.load_state_dict(tensors, strict=True)


def load_towers(model: System, folder: Path | str) -> None:
    """Load the model's `shared_encoders` from a checkpoint of any system, such as both encoders,
    and nothing else.

    From a checkpoint of a text encoder (`masked_text`), only the text encoder is loaded. Raises
    CheckpointError when the checkpoint is incomplete, or its encoders or vocabulary differ from the
    model's.
    """
    folder = _check_start(model, folder)
    theirs = _shared_encoders(folder) or model.shared_encoders
    shared = [name for name in model.shared_encoders if name in theirs]
    if not shared:
        message = (
            f"{folder} has {' and '.join(theirs)}, {model.name} shares "
            f"{' and '.join(model.shared_encoders)}"
        )
        raise CheckpointError(f"{message}: nothing to load", "mismatch")
    load_parts(model, folder, shared)


def load_parts(model: System, folder: Path | str, parts: Sequence[str]) -> None:
    """Load modules of a model from the modules of the same names in a checkpoint of any system, all
    or none.

    Raises CheckpointError when the checkpoint is incomplete, or a module or the vocabulary differs
    from the model's.
    """
    folder = _check_start(model, folder, words="text_encoder" in parts)
    tensors = read_weights(folder)
    states = {
        name: {
            key.removeprefix(f"{name}."): tensor
            for key, tensor in tensors.items()
            if key.startswith(f"{name}.")
        }
        for name in parts
    }
    for name, part in states.items():
        _check_fit(model.get_submodule(name), part, f"{name} of {folder / WEIGHTS}")
    for name, part in states.items():
        model.get_submodule(name).load_state_dict(part, strict=True)
        _record_training(model.get_submodule(name), folder)


def warm_start(model: System, folder: Path | str) -> None:
    """Load all weights of a checkpoint of the same system into a model, or the encoders of another
    system's.

    With `config.new_vocabulary`, the model's table of words and their biases stay as they are.
    Raises CheckpointError as `load_weights` and `load_towers` do.
    """
    new_words = getattr(model.config, "new_vocabulary", False)
    folder = _check_start(model, folder, words=not new_words)
    description = described_model(folder)
    if new_words:
        _load_but_words(model, folder)
    elif description["name"] == model.name:
        former = former_fields(type(model.config))
        settings = {**former, **description["settings"]}
        for field, old, new in differences(settings, {**former, **to_dict(model.config)}):
            _log.warning("%s was trained with %s %r, this model has %r", folder, field, old, new)
        _check_version(model, folder)
        _load_with_optional_parts(model, folder)
        _record_training(model, folder)
    else:
        load_towers(model, folder)


def _load_with_optional_parts(model: System, folder: Path) -> None:
    """Load all weights; `optional_parts` that only one side has are left out, or stay as they
    are.
    """
    optional = tuple(f"{part}." for part in model.optional_parts)
    own = model.state_dict()
    tensors = read_weights(folder)
    state = {
        name: tensor
        for name, tensor in tensors.items()
        if name in own or not name.startswith(optional)
    }
    state |= {
        name: tensor
        for name, tensor in own.items()
        if name not in state and name.startswith(optional)
    }
    _check_fit(model, state, str(folder / WEIGHTS))
    model.load_state_dict(state, strict=True)


def _load_but_words(model: System, folder: Path) -> None:
    """Load all weights of the same system, or the shared encoders of another, except parameters
    of single words.
    """
    description = described_model(folder)
    tensors = read_weights(folder)
    own = model.state_dict()
    if description["name"] == model.name:
        _check_version(model, folder)
    words = {name for name in own if name.endswith(("word_embeddings.weight", "word_head.bias"))}
    start = (
        ""
        if description["name"] == model.name
        else tuple(f"{name}." for name in model.shared_encoders)
    )
    rest = {
        name: tensor for name, tensor in own.items() if name in words or not name.startswith(start)
    }
    state = {
        name: tensor
        for name, tensor in tensors.items()
        if name.startswith(start) and name not in words
    }
    _check_fit(model, rest | state, str(folder / WEIGHTS))
    model.load_state_dict(rest | state, strict=True)
    _record_training(model, folder)


def described_model(folder: Path | str) -> Mapping[str, Any]:
    """Return `name` and `settings` of a checkpoint's model. Raises CheckpointError when there is
    none.
    """
    folder = _check_folder(Path(folder))
    description: Mapping[str, Any] = _read_config(folder)["model"]
    if not isinstance(description.get("name"), str) or not isinstance(
        description.get("settings"), dict
    ):
        raise CheckpointError(
            f"{folder / CONFIG} has no name or no settings of a model", "malformed"
        )
    return description


def _check_start(model: System, folder: Path | str, *, words: bool = True) -> Path:
    """Return the folder of a complete checkpoint; with `words`, one with the vocabulary of the
    model.

    Raises CheckpointError otherwise.
    """
    folder = _check_folder(Path(folder))
    if (folder / MARKER).exists():
        check_marker(folder, exclude=TRAIN_STATE)
    shares_words = (
        "text_encoder" in model.shared_encoders or described_model(folder)["name"] == model.name
    )
    mine = (
        model.tokenizer.vocabulary
        if model.tokenizer is not None and shares_words and words
        else None
    )
    folder_has_one = (folder / TOKENIZER).is_dir()
    if (
        mine is not None
        and folder_has_one
        and load_tokenizer(folder / TOKENIZER).vocabulary != mine
    ):
        message = (
            f"{folder} has another vocabulary: create the model with "
            f"tokenizer={str(folder / TOKENIZER)!r}"
        )
        raise CheckpointError(message, "mismatch", field="tokenizer")
    return folder


def _shared_encoders(folder: Path) -> tuple[str, ...]:
    """Return the encoders that the system of a checkpoint shares; empty for a system of another
    version.
    """
    try:
        return system(described_model(folder)["name"]).shared_encoders
    except ConfigError:
        return ()


def detector_of(folder: Path | str) -> str | None:
    """Return the hash of the detector whose regions a checkpoint was trained with; None for models
    of pixels.

    Raises CheckpointError when the checkpoint cannot be read.
    """
    run: Any = _read_config(_check_folder(Path(folder))).get("run")
    try:
        regions = run["data"]["train"]["regions"]
        return None if regions is None else str(regions["sha256"])
    except (KeyError, TypeError):
        return None


def _record_training(model: nn.Module, folder: Path) -> None:
    """Record in a model, or a part of one, the training data of the checkpoint that it was
    loaded from.
    """
    record_training(model, _read_training(folder), detector_of(folder))


def _read_training(folder: Path) -> list[Any]:
    """Return the JSON of all manifests that a checkpoint holds. Raises CheckpointError when a
    file is damaged.
    """
    manifests: list[Any] = []
    for path in (folder / TRAIN_MANIFEST, folder / ANCESTORS):
        try:
            content = read_json(path, CheckpointError)
        except FileNotFoundError:
            continue
        manifests += content if isinstance(content, list) else [content]
    return manifests


def _check_fit(module: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
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


def _check_version(model: nn.Module, folder: Path) -> None:
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


def _check_folder(folder: Path) -> Path:
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


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = read_json(path, CheckpointError)
    except FileNotFoundError:
        advice = nearby_checkpoints(folder) or _GIVE_RUN
        message = f"{path} is missing: {folder} is not a checkpoint of medvl; {advice}"
        raise CheckpointError(message, "not_found") from None
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        raise CheckpointError(f"{path} is not the configuration of a medvl model", "malformed")
    if config.get("format") != _FORMAT:
        message = (
            f"{path}: expected format {_FORMAT}, got {config.get('format')}; train or import again"
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


# Interpolation of a model's weights before and after fine-tuning (WiSE-FT, Wortsman et al., arXiv
# 2109.01903).
#
#     model = interpolate("checkpoints/siglip", "runs/siglip-mimic/best", 0.5)
#
# Continued training on radiographs degrades a model's earlier abilities. A point between the
# start and the end keeps most of both; choose the share on validation data of both kinds.


def interpolate(start: Path | str, end: Path | str, share: float) -> System:
    """Return the model of `end` with weights interpolated from those of `start` (share 0) to those
    of `end` (share 1).

    Counters and other integers are copied from `end`. The model has the training manifests of both,
    so that evaluations refuse the patients of either.

    Raises ConfigError for a share outside of [0, 1], CheckpointError as `load` does, or where the
    two are not the same system with weights of the same names and shapes and the same vocabulary.
    """
    if not 0 <= share <= 1:
        raise ConfigError(
            f"share must be within [0, 1], got {share}", "out_of_range", field="share"
        )
    model = load(end)
    other = load(start)
    ours = model.state_dict()
    theirs = other.state_dict()
    shapes, their_shapes = (
        {name: tensor.shape for name, tensor in each.items()} for each in (ours, theirs)
    )
    if model.name != other.name or shapes != their_shapes:
        different = sorted(
            name for name in {*shapes, *their_shapes} if shapes.get(name) != their_shapes.get(name)
        )
        detail = (
            f"a {other.name} and a {model.name}, {len(different)} weights differ: "
            f"{', '.join(different[:3])}"
        )
        raise CheckpointError(f"{start} and {end} cannot be interpolated: {detail}", "mismatch")
    words, their_words = (
        None if each.tokenizer is None else each.tokenizer.vocabulary for each in (model, other)
    )
    if words != their_words:
        raise CheckpointError(
            f"{start} and {end} have different vocabularies", "mismatch", field="tokenizer"
        )
    with torch.no_grad():
        for name, tensor in ours.items():
            if tensor.is_floating_point():
                tensor.copy_(torch.lerp(theirs[name].to(tensor.dtype), tensor, share))
    add_training(other, model)
    return model
