"""Creation of a model by name, by configuration, or from a checkpoint."""

import dataclasses
import fnmatch
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from medvl.common.config_io import from_dict
from medvl.common.files import new_folder
from medvl.common.hub import HUB_PREFIX, hub_errors, is_hub_id
from medvl.data.tokenizer.files import has_tokenizer
from medvl.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from medvl.data.transforms.image import EvalTransform, OriginalTransform
from medvl.encoders.base import LORA_SCALE, add_lora
from medvl.encoders.image.factory import without_image_folder
from medvl.encoders.presets import IMAGE_PRESETS, TEXT_PRESETS
from medvl.encoders.pretrained import hub_address, installed_file, split_set
from medvl.encoders.text.builders import uses_canonical_text, uses_clip_tokenizer
from medvl.encoders.text.factory import without_folder
from medvl.errors import CheckpointError, ConfigError
from medvl.models.base import LORA_FIELDS, System, SystemConfig, has_towers
from medvl.models.checkpoint import load, save, warm_start
from medvl.models.checkpoint_folder import (
    MODEL_FILES,
    TOKENIZER,
    described_model,
    find_checkpoint,
    hub_advice,
    kind_of,
    manifests_of,
)
from medvl.models.registry import system

_LOG = logging.getLogger(__name__)


def create_model(
    name: str | Path | SystemConfig,
    *,
    pretrained: bool | None = None,
    tokenizer: Tokenizer | Path | str | None = None,
    init_from: Path | str | None = None,
    **settings: Any,
) -> System:
    """Create a system by name or configuration, or load one from a checkpoint directory.

    Args:
        name: "convirt", ...; or a configuration such as `ConVIRTConfig(...)`; or a checkpoint, as
            `load` takes it.
        pretrained: True starts both encoders from their presets' published weights (hub, pinned
            revision); None and False initialise at random from torch's generator and never use the
            network. An encoder whose weights are named by `image_weights` or `text_weights` starts
            from those in either case.
        tokenizer: the tokenizer or its folder. Default: that of `init_from` or `text_weights`; with
            `pretrained`, the text encoder's own from the hub; else none, and the model takes token
            ids only.
        init_from: checkpoint to start from: all weights of the same system, which replace
            `pretrained`, or the image and text encoder of another system.
        settings: fields of the system's configuration that differ from the published ones; weights
            of your own are `image_weights=FILE` and `text_weights=FILE_OR_FOLDER`.

    Raises:
        ConfigError: the name or a setting is unknown, or the tokenizer does not fit the text
            encoder.
        WeightsError: pretrained weights are not available or do not fit.
        CheckpointError: `init_from` is not a complete checkpoint, or does not fit the model.
    """
    if isinstance(name, str | Path) and (Path(name).is_dir() or kind_of(name) == "hub"):
        if settings or (pretrained, tokenizer, init_from) != (None, None, None):
            raise ConfigError(
                f"{name} is a checkpoint with its own settings and tokenizer: leave them out",
                "conflict",
            )
        return load(name)
    if pretrained not in (None, False, True):
        message = (
            f"expected True or False, got {str(pretrained)!r}; use image_weights and "
            f"text_weights for own weights"
        )
        raise ConfigError(message, "wrong_type", field="pretrained")
    cls, config = _configuration(name, settings)
    own = [
        part
        for part in ("image_weights", "text_weights")
        if getattr(config, part, None) is not None
    ]
    continues = False
    own_text = "text_weights" in own
    if init_from is not None:
        if own:
            raise ConfigError(f"give init_from or {own[0]}, not both", "conflict", field=own[0])
        config, continues = _continued(cls, config, Path(init_from))
    takes_words = continues or "text_encoder" in cls.shared_encoders
    folder = _words_folder(config, init_from if takes_words else None)
    new_words = getattr(config, "new_vocabulary", False)
    if new_words and tokenizer is None:
        raise ConfigError(
            "new_vocabulary needs its tokenizer; give one", "missing", field="tokenizer"
        )
    tokenizer = _open_tokenizer(tokenizer, folder, config, bool(pretrained))
    if tokenizer is not None:
        # the rows of a static table are the tokenizer's words
        is_table = getattr(config, "text_encoder", "") == "static"
        has_words = continues or (not is_table and (bool(pretrained) or own_text))
        config = _fit_vocabulary(config, tokenizer, has_words and not new_words)
        if own_text and not new_words and folder is not None and has_tokenizer(folder):
            _compare_vocabularies(tokenizer, folder)
    if own:
        model = _from_own_weights(
            cls.build(config, pretrained=False, tokenizer=tokenizer), bool(pretrained)
        )
    else:
        model = cls.build(
            config, pretrained=bool(pretrained) and not continues, tokenizer=tokenizer
        )
    continues_updates = init_from is not None and _has_updates_alone(model, Path(init_from))
    if continues_updates:
        model = _with_lora(model)
    if init_from is not None:
        warm_start(model, init_from)
    return _without_folder(model) if continues_updates else _with_lora(_without_folder(model))


def _has_updates_alone(model: System, folder: Path) -> bool:
    """Return whether a checkpoint of the same system has low-rank updates without the weights that
    they belong to. Raises CheckpointError where those are other weights than the model's.
    """
    description = described_model(folder)
    settings = description["settings"]
    lacks_weights = settings.get("store_language") is False and settings.get("lora_language")
    if description["name"] != model.name or not lacks_weights:
        return False
    if settings.get("language_sha256") != getattr(model.config, "language_sha256", ""):
        message = f"{folder} has updates of another language model, or this model stores its own"
        advice = "set language_weights to the same folder, and store_language to False"
        raise CheckpointError(f"{message}; {advice}", "mismatch", field="language_weights")
    return True


def _with_lora(model: System) -> System:
    """Add the low-rank updates of the configuration, on top of the weights that are loaded."""
    for part, field in LORA_FIELDS.items():
        if rank := getattr(model.config, field, 0):
            encoder = model.get_submodule(part)
            try:
                adapted = add_lora(
                    encoder,
                    rank,
                    LORA_SCALE * rank,
                    model.lora_layers.get(part),
                    dropout=getattr(model.config, "lora_dropout", 0.0),
                )
            except ConfigError as error:
                message = f"{field} {rank}: {error}; leave {field} 0, or freeze fewer layers"
                raise ConfigError(message, error.code, field=field) from error
            layers = [encoder.get_submodule(f"{name}.base_layer") for name in adapted]
            if not all(isinstance(layer, nn.Linear) for layer in layers):
                message = f"{field} needs linear layers, which {part} does not have"
                raise ConfigError(message, "unsupported", field=field)
    return model


def _without_folder(model: System) -> System:
    """Describe encoders that were named by a local folder in the settings, so that checkpoints do
    not need it.
    """
    names = {
        part: getattr(model.config, part)
        for part in ("image_encoder", "text_encoder")
        if isinstance(getattr(model.config, part, None), str)
    }
    changes = {
        part: (without_image_folder if part == "image_encoder" else without_folder)(name)
        for part, name in names.items()
    }
    if changes != names:
        model.config = dataclasses.replace(model.config, **changes)
    return model


def _open_tokenizer(
    tokenizer: Tokenizer | Path | str | None, folder: Path | None, config: Any, pretrained: bool
) -> Tokenizer | None:
    """Return the given tokenizer, or the one of `folder`, or that of the published weights of
    the text encoder.
    """
    if tokenizer is None and folder is not None and has_tokenizer(folder):
        tokenizer = folder
    if tokenizer is None:
        return _published_tokenizer(config, pretrained)
    if isinstance(tokenizer, str | Path):
        family, _, model = getattr(config, "text_encoder", "").partition(":")
        canonical = family == "open_clip" and uses_canonical_text(model)
        return load_tokenizer(
            tokenizer, max_tokens=config.max_tokens, cleaning="canonical" if canonical else None
        )
    return tokenizer


def _published_tokenizer(config: Any, pretrained: bool) -> Tokenizer | None:
    """Return the tokenizer of the hub repository that `text_weights` names, or with `pretrained`
    the text encoder's.
    """
    name = getattr(config, "text_encoder", "")
    address = hub_address(getattr(config, "text_weights", None))
    if address is not None and (name in TEXT_PRESETS or name.startswith("hf:")):
        hub_id, revision = address
        return load_tokenizer(hub_id, revision=revision, max_tokens=config.max_tokens)
    return preset_tokenizer(name, config.max_tokens) if pretrained or address is not None else None


def _compare_vocabularies(tokenizer: Tokenizer, folder: Path) -> None:
    """Warn if the weights in a folder have another vocabulary, which may be of equal size (BERT,
    PubMedBERT).
    """
    if load_tokenizer(folder).vocabulary != tokenizer.vocabulary:
        _LOG.warning(
            "the weights in %s have another vocabulary than the tokenizer: words get the "
            "vectors of other words",
            folder,
        )


def _words_folder(config: Any, init_from: Path | str | None) -> Path | None:
    """Return the folder that may have the vocabulary of the weights that a model starts from."""
    if init_from is not None:
        return find_checkpoint(init_from) / TOKENIZER
    own = getattr(config, "text_weights", None)
    return None if own is None else Path(split_set(own)[0])


def _from_own_weights(model: System, pretrained: bool) -> System:
    """Load the weights that the model's config names; `pretrained` applies to an encoder without
    any.
    """
    config: Any = model.config
    published = pretrained and has_towers(model)
    own_image, own_text = (getattr(config, f"{part}_weights", None) for part in ("image", "text"))
    model.load_encoders(
        own_image or (pretrained and hasattr(config, "image_weights")), own_text or published
    )
    return model


def _continued(cls: type[System], config: Any, folder: Path) -> tuple[Any, bool]:
    """Return the config, with the vocabulary size of a checkpoint of the same system, and
    whether it is of that one.
    """
    if not cls.shared_encoders:
        message = (
            f"init_from needs a system with an image or a text encoder, got {cls.name}; "
            f"use its own function"
        )
        raise ConfigError(message, "unsupported", field="init_from")
    description = described_model(folder)
    if description["name"] != cls.name:
        return config, False
    if config.vocab_size is None and not getattr(config, "new_vocabulary", False):
        config = dataclasses.replace(config, vocab_size=description["settings"].get("vocab_size"))
    return config, True


def _configuration(
    name: str | Path | SystemConfig, settings: Mapping[str, Any]
) -> tuple[type[System], Any]:
    if isinstance(name, str | Path):
        if advice := hub_advice(name):
            raise ConfigError(f"there is no folder {name}; {advice}", "unknown_name", field="name")
        cls = system(str(name))
        return cls, from_dict(cls.Config, settings)
    if not hasattr(name, "system"):
        kind = type(name).__name__
        raise ConfigError(
            f"expected a name or the configuration of a system, got a {kind}",
            "wrong_type",
            field="name",
        )
    cls = system(name.system)
    return cls, from_dict(cls.Config, {**vars(name), **settings})


def preset_tokenizer(text_encoder: str, max_tokens: int | None) -> Tokenizer | None:
    """Return the published tokenizer of a text encoder; None if there is none. Raises
    WeightsError offline.
    """
    preset = TEXT_PRESETS.get(text_encoder)
    if preset is None:
        family, _, model = text_encoder.partition(":")
        clip = family == "open_clip" and uses_clip_tokenizer(model)
        return load_tokenizer("clip", max_tokens=max_tokens) if clip else None
    if preset.tokenizer is not None:
        return load_tokenizer(preset.tokenizer, max_tokens=max_tokens)
    if (weights := installed_file(preset.weights)) is not None:
        return load_tokenizer(weights.parent, max_tokens=max_tokens)
    if preset.hub_id is None:
        return None
    return load_tokenizer(preset.hub_id, revision=preset.revision, max_tokens=max_tokens)


def _fit_vocabulary(config: Any, tokenizer: Tokenizer, pretrained: bool) -> Any:
    """Return the config with as many embeddings as the tokenizer has ids, unless published
    weights fix the number.
    """
    if config.vocab_size is None and not pretrained:
        return dataclasses.replace(config, vocab_size=tokenizer.vocab_size)
    if config.vocab_size is not None and config.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids and the text encoder "
            f"{config.vocab_size} embeddings: "
            "take the text encoder's own tokenizer, or raise vocab_size",
            "mismatch",
            field="tokenizer",
        )
    return config


# Models in folders and on the Hugging Face hub, by the names that transformers and open_clip use.


def create_model_and_transforms(
    name: str | Path | SystemConfig, **settings: Any
) -> tuple[System, EvalTransform, Tokenizer | None]:
    """Return a model, its image transform and its tokenizer; the arguments are those of
    `create_model`.

    open_clip returns a training and a validation transform; here the second value prepares images
    for inference, and training augments in the loader.
    """
    model = create_model(name, **settings)
    return model, model.transform, model.tokenizer


def get_tokenizer(name: str | Path, *, max_tokens: int | None = None) -> Tokenizer:
    """Return the tokenizer of a checkpoint (as `load` takes it), of a system's default text
    encoder, or of a preset.

    Those of presets come from the hub at a pinned revision, or from the local cache.

    Raises ConfigError if there is no such name, or it has no tokenizer; WeightsError if it
    cannot be downloaded.
    """
    if Path(name).is_dir() or kind_of(name) == "hub":
        folder = find_checkpoint(name)
        folder = folder / TOKENIZER if (folder / TOKENIZER).is_dir() else folder
        if not has_tokenizer(folder):
            raise CheckpointError(
                f"{name} has no tokenizer: the model takes token ids only", "not_found"
            )
        return load_tokenizer(folder, max_tokens=max_tokens)
    encoder = (
        str(name)
        if str(name) in TEXT_PRESETS
        else getattr(system(str(name)).Config, "text_encoder", None)
    )
    tokenizer = None if encoder is None else preset_tokenizer(encoder, max_tokens)
    if tokenizer is None:
        raise ConfigError(
            f"{name} has no published tokenizer; use load_tokenizer(FOLDER)",
            "unsupported",
            field="name",
        )
    return tokenizer


def from_pretrained(name: Path | str, *, revision: str | None = None) -> System:
    """Load a model in eval mode, as `load`; `revision` is a commit, branch or tag of a model on the
    hub.

    With a revision, `hf-hub:` may be left out.

    Raises CheckpointError as `load`, ConfigError for a revision of a local folder.
    """
    if revision is None:
        return load(name)
    if Path(name).exists():
        raise ConfigError(
            f"{name} is a folder, which has no revisions; leave it out",
            "conflict",
            field="revision",
        )
    return load(f"{HUB_PREFIX}{str(name).removeprefix(HUB_PREFIX)}@{revision}")


def save_pretrained(
    model: System,
    folder: Path | str,
    *,
    licence: str | None = None,
    results: Mapping[str, float] | None = None,
    run: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model into a new folder that `load` reads, with a model card (README.md).

    Args:
        model: any system.
        folder: must not exist, or be empty.
        licence: SPDX identifier of the weights' licence for the card, such as "mit"; None: not
            stated.
        results: metric -> value for the card.
        run: how the model was trained (`medvl.models.save`); None: the record that the model was
            loaded with.

    Raises ConfigError if the folder has files.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder} exists and is not empty: give a new folder", "exists", field="folder"
        )
    entries = dict(model.provenance if run is None else run)
    if "train_manifest" not in entries and isinstance(model.transform, OriginalTransform):
        entries["train_manifest"] = manifests_of(model)[0]
    with new_folder(folder) as aside:
        save(model, aside, entries, licence=licence, results=results)
    return folder


def push_to_hub(
    model: System,
    hub_id: str,
    *,
    private: bool = True,
    revision: str | None = None,
    message: str = "Upload a model of medvl",
    token: str | None = None,
    licence: str | None = None,
    results: Mapping[str, float] | None = None,
) -> str:
    """Upload a model with its model card to the Hugging Face hub; return its name for `load`, with
    the commit.

    The manifests of the training data go along (names of corpora, counts, salted hashes of
    patients), and in `config.json` the settings of the run, with its paths.

    Args:
        model: any system.
        hub_id: OWNER/NAME; created if it does not exist.
        private: whether a new repository is private. The hub's own default is public.
        revision: existing branch; None is the default branch.
        message: title of the commit.
        token: token of the hub; None takes the one of `hf auth login`, or $HF_TOKEN.
        licence, results: as in `save_pretrained`.

    Raises:
        ConfigError: `hub_id` is not OWNER/NAME.
        WeightsError: the hub cannot be reached or refuses the upload.
    """
    import huggingface_hub

    hub_id = hub_id.removeprefix(HUB_PREFIX)
    if not is_hub_id(hub_id):
        raise ConfigError(f"expected OWNER/NAME, got {hub_id!r}", "malformed", field="hub_id")
    with tempfile.TemporaryDirectory() as temporary:
        folder = save_pretrained(model, Path(temporary) / "model", licence=licence, results=results)
        api = huggingface_hub.HfApi(token=token)
        with hub_errors(
            f"{hub_id} cannot be uploaded",
            "; log in with `hf auth login`, or give a token that may write",
        ):
            api.create_repo(hub_id, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=hub_id, folder_path=folder, revision=revision, commit_message=message,
                allow_patterns=list(MODEL_FILES),
            )  # fmt: skip
    return f"{HUB_PREFIX}{hub_id}@{commit.oid}"


def list_pretrained(match: str = "*") -> list[tuple[str, str]]:
    """Return (encoder, weights) of all published weights that medvl names, sorted; `weights` is
    OWNER/NAME@COMMIT or a download address.

    `create_image_encoder(encoder, pretrained=True)` and `create_text_encoder` load them, and
    `create_model(..., pretrained=True)` starts from them. Complete systems that others published
    are read from their files by `medvl import` (`medvl import --list`). `match` is a wildcard for
    the encoder's name.
    """
    presets: Mapping[str, Any] = {**IMAGE_PRESETS, **TEXT_PRESETS}
    named = {name: preset.weights for name, preset in presets.items() if preset.weights is not None}
    return [(name, named[name].address) for name in sorted(fnmatch.filter(named, match))]
