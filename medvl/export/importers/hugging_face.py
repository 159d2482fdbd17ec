"""Systems in folders of transformers: SigLIP and CLIP as `save_pretrained` writes them.

The configuration, the image processor and the tokenizer of the folder describe the system; the
weights keep the names of transformers. What the files say and medvl cannot honour is refused.
"""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from medvl.common.untrusted import read_json
from medvl.data.tokenizer.files import CONFIG_FILE as TOKENIZER_CONFIG, MODEL_FILE
from medvl.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.operations import Kernel
from medvl.encoders.hugging_face import (
    CONFIG_FILE,
    IMAGE_KINDS,
    PROCESSOR_FILES,
    Preparation,
    check_size,
    find_image_tower,
    read_config,
    read_processor,
    read_tower,
)
from medvl.encoders.text.factory import text_encoder_fields
from medvl.errors import ConfigError
from medvl.export.importers import backbones
from medvl.export.importers.backbones import IMAGE, TEXT, TEXT_PROJECTION
from medvl.export.importers.importer import Importer
from medvl.export.importers.key_map import KeyRule, keep
from medvl.models.dual_encoders.clip import CLIPConfig
from medvl.models.dual_encoders.siglip import SigLIPConfig

_SENTENCEPIECE = "spiece.model"
_WORDS = ("vocab.json", "merges.txt")
_OLD_END = 2
"""`eos_token_id` of CLIP's configurations before August 2023: the highest id of a text is its
end.
"""

SIGLIP_RULES: tuple[KeyRule, ...] = (
    backbones.position_counter("vision_model.embeddings."),
    backbones.position_counter("text_model.embeddings."),
    keep("vision_model.**", f"{IMAGE}**"),
    keep("text_model.head.*", f"{TEXT_PROJECTION}*"),
    keep("text_model.**", f"{TEXT}**"),
    keep("logit_scale", "logit_scale", change="scalar"),
    keep("logit_bias", "logit_bias", change="scalar"),
)
CLIP_RULES: tuple[KeyRule, ...] = (
    backbones.position_counter("vision_model.embeddings."),
    backbones.position_counter("text_model.embeddings."),
    keep("vision_model.**", f"{IMAGE}vision_model.**"),
    keep("visual_projection.weight", f"{IMAGE}visual_projection.weight"),
    keep("text_model.**", f"{TEXT}**"),
    keep("text_projection.weight", f"{TEXT_PROJECTION}weight"),
    keep("logit_scale", "logit_scale", change="scalar"),
)


def read_image_transform(folder: Path | str, *, resize: Kernel | None = None) -> EvalTransform:
    """Return the preparation of images that the image processor in a folder of transformers
    describes; `resize` is another kernel than its own.

    For an encoder alone (`create_image_encoder("hf:FOLDER", pretrained=True)`).

    Raises ConfigError: "not_found" without the file of a processor, "unsupported" for what medvl
    cannot honour.
    """
    arguments = _prepared(Path(folder)).transform()
    return EvalTransform(**{**arguments, **({} if resize is None else {"resize": resize})})


def _prepared(folder: Path) -> Preparation:
    prepared = read_processor(folder)
    if prepared is None:
        message = (
            f"{folder} has no {PROCESSOR_FILES[0]}, which says how images are prepared; copy it "
            f"from the model's repository"
        )
        raise ConfigError(message, "not_found", field="file")
    return prepared


def _siglip(folder: Path) -> SigLIPConfig:
    return SigLIPConfig(**_fields(folder, "siglip"))


def _clip(folder: Path) -> CLIPConfig:
    return CLIPConfig(**_fields(folder, "clip"))


def _fields(folder: Path, kind: str) -> dict[str, Any]:
    """Return the fields of a system's config that the files of a folder determine."""
    _check_kind(folder, kind)
    tower = find_image_tower(str(folder))
    prepared = _prepared(folder)
    check_size(tower)
    text_kind, text = read_tower(folder, "text")
    return {
        "image_encoder": dataclasses.replace(tower, mean=None, std=None).describe(),
        "text_encoder": f"hf:{text_kind}{json.dumps(text)}",
        "image_size": prepared.size,
        **{name: value for name, value in prepared.transform().items() if name != "size"},
        "image_mean": prepared.mean,
        "image_std": prepared.std,
        "max_tokens": text["max_position_embeddings"],
        "vocab_size": text["vocab_size"],
    }


def _check_kind(folder: Path, kind: str) -> None:
    """Raise ConfigError ("unsupported"), with the right call, for a model of another type."""
    model_type = read_config(folder)["model_type"]
    if model_type == kind:
        return
    calls = {"siglip": "medvl import hf-siglip", "clip": "medvl import hf-clip"}
    advice = f"expected {kind!r}"
    if model_type in calls:
        advice = f"use {calls[model_type]}"
    elif model_type in IMAGE_KINDS:
        advice = "it is an image encoder: create_image_encoder('hf:FOLDER', pretrained=True)"
    elif model_type.endswith("_text_model"):
        advice = "it is a text encoder: create_text_encoder('hf:FOLDER', pretrained=True)"
    elif model_type == "siglip2":
        advice = "images of unequal numbers of patches (NaFlex); take a SigLIP 2 of one size"
    message = (
        f"{folder / CONFIG_FILE}: model_type {model_type!r} is not imported as hf-{kind}: {advice}"
    )
    raise ConfigError(message, "unsupported", field="system")


def read_folder_tokenizer(folder: Path, config: Any) -> Tokenizer | None:
    """Return the tokenizer in a folder of transformers; None without one.

    Case, cleaning, padding and length are those of its class and files.

    Raises:
        ConfigError: "unsupported" for a rule that medvl does not have, or ends of texts that the
            text encoder does not pool; as `load_tokenizer` for damaged files.
    """
    settings = _tokenizer_settings(folder)
    if (folder / MODEL_FILE).is_file():
        tokenizer = load_tokenizer(folder)
    elif all((folder / name).is_file() for name in _WORDS):
        tokenizer = _clip_tokenizer(folder)
    elif (folder / _SENTENCEPIECE).is_file():
        message = (
            f"{folder / _SENTENCEPIECE} needs the sentencepiece library, which medvl does not use; "
            f"give a folder with the {MODEL_FILE} of the same vocabulary as tokenizer"
        )
        raise ConfigError(message, "unsupported", field="tokenizer")
    else:
        return None
    return _fitting(tokenizer, config, folder, settings)


def _fitting(
    tokenizer: Tokenizer, config: Any, folder: Path, settings: dict[str, Any]
) -> Tokenizer:
    """Return the tokenizer with the length of texts that its files and the text encoder allow."""
    path = folder / TOKENIZER_CONFIG
    fields = text_encoder_fields(config.text_encoder)
    is_siglip = isinstance(config, SigLIPConfig)
    if settings.get("padding_side", "right") != "right":
        message = f"{path}: medvl pads on the right; expected padding_side 'right', got 'left'"
        raise ConfigError(message, "unsupported", field="padding_side")
    positions = fields["max_position_embeddings"]
    longest = settings.get("model_max_length", positions)
    shorter = isinstance(longest, int) and longest < positions
    if is_siglip and shorter:
        message = (
            f"{path}: texts are padded to model_max_length {longest}, the text encoder of "
            f"{folder / CONFIG_FILE} to max_position_embeddings {positions}; expected equal lengths"
        )
        raise ConfigError(message, "unsupported", field="model_max_length")
    end = fields.get("eos_token_id")
    last = tokenizer.vocab_size - 1
    if not is_siglip and tokenizer.sep_id != (last if end == _OLD_END else end):
        rule = "the highest id of the text" if end == _OLD_END else f"the token {end}"
        message = (
            f"{folder / CONFIG_FILE}: its text encoder pools {rule} (eos_token_id {end}), but its "
            f"tokenizer ends texts with {tokenizer.sep_id} of {tokenizer.vocab_size} ids; correct "
            f"eos_token_id, or give its own tokenizer"
        )
        raise ConfigError(message, "unsupported", field="tokenizer")
    return tokenizer.with_max_tokens(longest if shorter else positions)


def _tokenizer_settings(folder: Path) -> dict[str, Any]:
    path = folder / TOKENIZER_CONFIG
    try:
        settings = read_json(path, ConfigError)
    except FileNotFoundError:
        return {}
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: expected a JSON object", "malformed", field="tokenizer")
    return settings


def _clip_tokenizer(folder: Path) -> Tokenizer:
    """Return CLIP's tokenizer with the words and merges of a folder without `tokenizer.json`."""
    import transformers

    try:
        backend: Any = transformers.CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError) as error:
        message = f"{' and '.join(_WORDS)} of {folder} cannot be read: {error}; get them again"
        raise ConfigError(message, "malformed", field="tokenizer") from None
    with tempfile.TemporaryDirectory() as temporary:
        backend.save_pretrained(temporary)
        return load_tokenizer(temporary)


IMPORTERS = (
    Importer(
        name="hf-clip",
        title="a CLIPModel of transformers, in the folder of its files (XrayCLIP, PubMedCLIP)",
        source="huggingface/transformers 5.24, models/clip",
        table=CLIP_RULES,
        configure=_clip,
        read_tokenizer=read_folder_tokenizer,
    ),
    Importer(
        name="hf-siglip",
        title="a SiglipModel of transformers, in the folder of its files (MedSigLIP, XraySigLIP)",
        source="huggingface/transformers 5.24, models/siglip",
        table=SIGLIP_RULES,
        configure=_siglip,
        read_tokenizer=read_folder_tokenizer,
    ),
)
