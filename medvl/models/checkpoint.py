"""Checkpoints of models: `config.json`, `model.safetensors` and the tokenizer. Weights never
need pickle.
"""

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import medvl
from medvl.common.config_io import differences, from_dict, to_dict, upgrade_settings
from medvl.common.files import new_folder, new_path, write_atomic
from medvl.data.convert.options import ShardOptions
from medvl.data.tokenizer.tokenizer import load_tokenizer
from medvl.data.transforms.image import EvalTransform, OriginalTransform
from medvl.data.volumes.options import VolumeOptions
from medvl.data.volumes.transform import OriginalVolumeTransform, VolumeTransform
from medvl.encoders.base import has_lora
from medvl.errors import CheckpointError, ConfigError, WeightsError
from medvl.models.base import LORA_FIELDS, System
from medvl.models.card import model_card
from medvl.models.checkpoint_folder import (
    ANCESTORS,
    CARD,
    CONFIG,
    FORMAT,
    MARKER,
    MODEL_FILES,
    TOKENIZER,
    TRAIN_MANIFEST,
    TRAIN_STATE,
    WEIGHTS,
    check_fit,
    check_marker,
    check_version,
    complete_folder,
    described_model,
    find_checkpoint,
    limited_allocation,
    load_weights,
    manifests_of,
    read_config,
    read_weights,
    record_training,
    recorded_run,
    recording_modules,
)
from medvl.models.registry import system

_log = logging.getLogger(__name__)


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
            earlier training: evaluators refuse data that shares a patient with one of them. With
            `marker`, the name of the file that the caller writes last, the checkpoint is not loaded
            without that file.
        licence, results: entries of the card (`medvl.models.card`).
        weights: False leaves out `model.safetensors`, where ranks write the weights in parts
            (`medvl.models.checkpoint_folder`).
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
        "format": FORMAT,
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

    `folder` is a checkpoint, a run (its best checkpoint), `hf-hub:OWNER/NAME`, or `demo`, a small
    model of synthetic radiographs that is part of medvl (`find_checkpoint`). Low-rank updates of
    the training (`lora_image`, `lora_text`, `lora_language`) are merged into the weights.

    Raises CheckpointError when the checkpoint is incomplete, a file differs from what training
    wrote, or a weight is missing, unexpected or of another shape; a file that needs pickle is
    refused.
    """
    folder = complete_folder(folder)
    description = described_model(folder)
    try:
        cls = system(description["name"])
        stored: Any = from_dict(cls.Config, description["settings"])
        config = cls.loaded_config(stored)
    except (ConfigError, TypeError, KeyError) as error:
        reason = f"{folder / CONFIG} does not describe a model of this version of medvl: {error}"
        raise CheckpointError(reason, getattr(error, "code", "malformed")) from error
    has_tokenizer = (folder / TOKENIZER).is_dir()
    tokenizer = (
        load_tokenizer(folder / TOKENIZER, max_tokens=config.max_tokens) if has_tokenizer else None
    )
    try:
        with limited_allocation(folder, cls.outside_files(stored)):
            model = cls.build(config, pretrained=False, tokenizer=tokenizer)
    except WeightsError as error:
        message = f"{folder} needs weights that are not in it: {error}"
        raise CheckpointError(message, error.code) from error
    embeddings = getattr(getattr(model, "text_encoder", None), "vocab_size", None)
    if tokenizer is not None and isinstance(embeddings, int) and tokenizer.vocab_size > embeddings:
        message = (
            f"{folder / TOKENIZER} has {tokenizer.vocab_size} ids, the model {embeddings} "
            f"embeddings"
        )
        raise CheckpointError(f"{message}: copy the checkpoint again", "mismatch")
    load_weights(model, folder)
    manifests = record_training(model, folder)
    model.provenance = recorded_run(folder)
    if (folder / TRAIN_MANIFEST).is_file():
        options = manifests[0].get("options", {})
        model.transform = _for_originals(model.transform, options, folder / TRAIN_MANIFEST)
    return model.eval()


def _for_originals(transform: Any, options: Mapping[str, Any], source: Path) -> Any:
    """Return a transform for original files, which applies first what the shards of the training
    did; the same one where `options` of the manifest `source` lack it.

    Raises CheckpointError for impossible values.
    """
    image = {
        name: options[name]
        for name in ("short_side", "image_format", "quality", "color", "crop_background")
        if name in options
    }
    described = len(image) >= 4  # manifests state crop_background only where it is used
    volume = options.get("volume")
    modality = options.get("modality", "CT")
    try:
        if described:
            ShardOptions(**image)
        shards = from_dict(VolumeOptions, volume) if isinstance(volume, dict) else None
    except (ConfigError, TypeError) as error:
        message = f"{source} has impossible options of the shards: {error}"
        raise CheckpointError(message, "malformed") from error
    if described and isinstance(transform, EvalTransform):
        return OriginalTransform(**transform.settings(), **image)
    if shards is not None and isinstance(transform, VolumeTransform):
        return OriginalVolumeTransform(
            size=transform.size,
            organs=transform.organs,
            shards=shards,
            shards_modality=str(modality),
        )
    return transform


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
        check_fit(model.get_submodule(name), part, f"{name} of {folder / WEIGHTS}")
    for name, part in states.items():
        model.get_submodule(name).load_state_dict(part, strict=True)
        record_training(model.get_submodule(name), folder)


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
        settings = upgrade_settings(description["settings"], model.config)
        updates = LORA_FIELDS.values()  # of a training, which the weights of a checkpoint contain
        for field, old, new in differences(settings, to_dict(model.config)):
            if field in updates:
                continue
            _log.warning("%s was trained with %s %r, this model has %r", folder, field, old, new)
        check_version(model, folder)
        _load_with_optional_parts(model, folder)
        record_training(model, folder)
    else:
        load_towers(model, folder)


def _load_with_optional_parts(model: System, folder: Path) -> None:
    """Load all weights; `optional_parts` that only one side has are left out, or stay as they
    are.
    """
    optional = tuple(f"{part}." for part in model.optional_parts)
    own = model.state_dict()
    tensors = read_weights(folder, merge=not has_lora(model))
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
    check_fit(model, state, str(folder / WEIGHTS))
    model.load_state_dict(state, strict=True)


def _load_but_words(model: System, folder: Path) -> None:
    """Load all weights of the same system, or the shared encoders of another, except parameters
    of single words.
    """
    description = described_model(folder)
    tensors = read_weights(folder)
    own = model.state_dict()
    if description["name"] == model.name:
        check_version(model, folder)
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
    check_fit(model, rest | state, str(folder / WEIGHTS))
    model.load_state_dict(rest | state, strict=True)
    record_training(model, folder)


def _check_start(model: System, folder: Path | str, *, words: bool = True) -> Path:
    """Return the folder of a complete checkpoint; with `words`, one with the vocabulary of the
    model.

    Raises CheckpointError otherwise.
    """
    folder = complete_folder(folder)
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
    with new_folder(out) as aside:
        for path in (
            file for pattern in MODEL_FILES for file in folder.glob(pattern) if file.name != WEIGHTS
        ):
            copy = aside / path.relative_to(folder)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
        config = read_config(folder)
        files = [name for name in config.get("files", []) if name != MARKER]
        (aside / CONFIG).write_text(
            json.dumps({**config, "files": files}, indent=1, sort_keys=True) + "\n"
        )
        safetensors.torch.save_file(tensors, aside / WEIGHTS)
    return out


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
    _add_training(other, model)
    return model


def _add_training(source: System, target: System) -> None:
    """Add the training data of a model to that of one of the same structure, whose weights it
    was mixed into.
    """
    theirs = recording_modules(source)
    for name, module in recording_modules(target).items():
        more = [each for each in theirs[name].trained_on if each not in module.trained_on]
        module.trained_on = (*module.trained_on, *more)
