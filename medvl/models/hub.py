"""Models in folders and on the Hugging Face hub, by the names that transformers and open_clip use."""

import fnmatch
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medvl.common.folders import new_folder
from medvl.common.hub import HUB_PREFIX, hub_errors, is_hub_id
from medvl.data.tokenizer.files import has_tokenizer
from medvl.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from medvl.data.transforms.image import EvalTransform, OriginalTransform
from medvl.encoders.presets import IMAGE_PRESETS, TEXT_PRESETS
from medvl.errors import CheckpointError, ConfigError
from medvl.models.base import System, SystemConfig
from medvl.models.checkpoint import load, save
from medvl.models.factory import create_model, preset_tokenizer
from medvl.models.lineage import manifests_of
from medvl.models.locate import MODEL_FILES, TOKENIZER, find_checkpoint, on_hub
from medvl.models.registry import system


def create_model_and_transforms(
    name: str | Path | SystemConfig, **settings: Any
) -> tuple[System, EvalTransform, Tokenizer | None]:
    """Return a model, its image transform and its tokenizer; the arguments are those of `create_model`.

    open_clip returns a training and a validation transform; here the second value prepares images for inference, and
    training augments in the loader.
    """
    model = create_model(name, **settings)
    return model, model.transform, model.tokenizer


def get_tokenizer(name: str | Path, *, max_tokens: int | None = None) -> Tokenizer:
    """Return the tokenizer of a checkpoint (as `load` takes it), of a system's default text encoder, or of a preset.

    Those of presets come from the hub at a pinned revision, or from the local cache.

    Raises ConfigError where there is no such name, or it has no tokenizer; WeightsError if it cannot be downloaded.
    """
    if Path(name).is_dir() or on_hub(name):
        folder = find_checkpoint(name)
        folder = folder / TOKENIZER if (folder / TOKENIZER).is_dir() else folder
        if not has_tokenizer(folder):
            raise CheckpointError(f"{name} has no tokenizer: the model takes token ids only", "not_found")
        return load_tokenizer(folder, max_tokens=max_tokens)
    encoder = str(name) if str(name) in TEXT_PRESETS else getattr(system(str(name)).Config, "text_encoder", None)
    tokenizer = None if encoder is None else preset_tokenizer(encoder, max_tokens)
    if tokenizer is None:
        raise ConfigError(f"{name} has no published tokenizer; use load_tokenizer(FOLDER)", "unsupported", field="name")
    return tokenizer


def from_pretrained(name: Path | str, *, revision: str | None = None) -> System:
    """Load a model in eval mode, as `load`; `revision` is a commit, branch or tag of a model on the hub.

    With a revision, `hf-hub:` may be left out.

    Raises CheckpointError as `load`, ConfigError for a revision of a local folder.
    """
    if revision is None:
        return load(name)
    if Path(name).exists():
        raise ConfigError(f"{name} is a folder, which has no revisions; leave it out", "conflict", field="revision")
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
        licence: SPDX identifier of the weights' licence for the card, such as "mit"; None: not stated.
        results: metric -> value for the card.
        run: how the model was trained (`medvl.models.save`); None: the record that the model was loaded with.

    Raises ConfigError if the folder has files.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty: give a new folder", "exists", field="folder")
    described = dict(model.provenance if run is None else run)
    if "train_manifest" not in described and isinstance(model.transform, OriginalTransform):
        described["train_manifest"] = manifests_of(model)[0]
    with new_folder(folder) as aside:
        save(model, aside, described, licence=licence, results=results)
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
    """Upload a model with its model card to the Hugging Face hub; return its name for `load`, with the commit.

    The manifests of the training data go along (names of corpora, counts, salted hashes of patients), and in
    `config.json` the settings of the run, with its paths.

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
            f"{hub_id} cannot be uploaded", "; log in with `hf auth login`, or give a token that may write"
        ):
            api.create_repo(hub_id, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=hub_id, folder_path=folder, revision=revision, commit_message=message,
                allow_patterns=list(MODEL_FILES),
            )  # fmt: skip
    return f"{HUB_PREFIX}{hub_id}@{commit.oid}"


def list_pretrained(match: str = "*") -> list[tuple[str, str]]:
    """Return (encoder, weights) of all published weights that medvl names, sorted; `weights` is OWNER/NAME@COMMIT.

    `create_image_encoder(encoder, pretrained=True)` and `create_text_encoder` load them, and `create_model(...,
    pretrained=True)` starts from them. Complete systems that others published are read from their files by
    `medvl import` (`medvl import --list`). `match` is a wildcard for the encoder's name.
    """
    presets: Mapping[str, Any] = {**IMAGE_PRESETS, **TEXT_PRESETS}
    named = {name: preset.weights for name, preset in presets.items() if preset.weights is not None}
    return [(name, f"{named[name].hub_id}@{named[name].revision}") for name in sorted(fnmatch.filter(named, match))]
