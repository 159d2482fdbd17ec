"""Language models at random weights: Hugging Face encoders, open_clip's text towers, static tables.

Every library initialises as it always does, from torch's global generator.
"""

import dataclasses
import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from medvl.encoders.image.open_clip_models import CUSTOM
from medvl.encoders.text.adapters import (
    AlbertAdapter,
    BertAdapter,
    ClipAdapter,
    Language,
    LanguageAdapter,
    StaticAdapter,
    WholeAdapter,
)
from medvl.encoders.text.projections import MatrixHead
from medvl.errors import ConfigError

_BERT_LIKE = ("bert", "roberta", "camembert", "xlm-roberta")
_WITH_POOLER = (*_BERT_LIKE, "albert")
_SIZES = {
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "max_position_embeddings": "context_length",
    "pad_token_id": "pad_id",
}
"""Hugging Face's names of sizes -> open_clip's: one vocabulary for both."""
UNBOUNDED = 1_000_000
"""`max_tokens` of an encoder without positions."""


def read_folder(folder: Path) -> tuple[str, dict[str, Any]]:
    """(model type, fields in which it differs from the type's defaults) of a Hugging Face folder's `config.json`.

    Code that a folder brings along is never run. Raises ConfigError when the file is missing or describes no model
    that transformers itself has.
    """
    import transformers

    path = folder / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        model_type = "bert" if content["model_type"] == "cxr-bert" else str(content["model_type"])  # a plain BERT
        known = transformers.AutoConfig.for_model(model_type).to_dict()
    except FileNotFoundError:
        raise ConfigError(f"{folder} holds no config.json: it is not a folder of a Hugging Face model") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} does not describe a model of transformers: {error}") from None
    fields = {
        key: value
        for key, value in content.items()
        if key in known and key != "model_type" and isinstance(value, bool | int | float | str) and value != known[key]
    }
    fields.pop("dtype", None)
    return model_type, fields


def build_hugging_face(model_type: str, arguments: Mapping[str, Any]) -> Language:
    """An encoder of transformers from its model type and the fields of its configuration.

    Attention runs through torch's `scaled_dot_product_attention`. The pooler of a BERT is not built: none of the
    published systems uses it.

    Raises ConfigError when the type or a field is unknown, or the values do not go together.
    """
    import transformers

    try:
        known = transformers.AutoConfig.for_model(model_type).to_dict()
    except (KeyError, ValueError) as error:
        raise ConfigError(f"transformers has no model type {model_type!r}: {error}") from None
    _check_fields(f"hf:{model_type}", arguments, known)
    options = {"add_pooling_layer": False} if model_type in _WITH_POOLER else {}
    try:
        config = transformers.AutoConfig.for_model(model_type, **arguments)
        net: Any = transformers.AutoModel.from_config(config, attn_implementation="sdpa", **options)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise ConfigError(f"transformers cannot build {model_type} with {dict(arguments)}: {error}") from error
    adapter: LanguageAdapter = WholeAdapter()
    if model_type in _BERT_LIKE:
        adapter = BertAdapter()
    elif model_type == "albert":
        adapter = AlbertAdapter()
    padding = config.pad_token_id or 0
    counts_from_padding = hasattr(getattr(net, "embeddings", None), "padding_idx")  # RoBERTa and its kin
    return Language(
        net=net,
        adapter=adapter,
        width=config.hidden_size,
        vocab_size=config.vocab_size,
        pad_id=padding,
        max_tokens=config.max_position_embeddings - (padding + 1 if counts_from_padding else 0),
        num_layers=config.num_hidden_layers,
        blocks="encoder.layer." if model_type in _BERT_LIKE else None,
        counts_from_padding=counts_from_padding,
    )


def build_open_clip(name: str, arguments: Mapping[str, Any], projection: bool) -> Language:
    """The text tower of an open_clip model, its sizes by Hugging Face's names or open_clip's.

    Args:
        name: open_clip's name of the model, or "custom" for one that `arguments` describes.
        arguments: fields of `open_clip.CLIPTextCfg`, and `embed_dim`, that differ from the named model's.
        projection: whether the tower's projection into the shared space is kept.

    Raises ConfigError when the name or a field is unknown, or the tower is another library's model.
    """
    import open_clip

    config: Any = {"embed_dim": 512, "text_cfg": {}} if name == CUSTOM else open_clip.get_model_config(name)
    if config is None:
        near = difflib.get_close_matches(name, open_clip.list_models(), n=3)
        raise ConfigError(f"open_clip has no model {name!r}: did you mean {', '.join(near) or 'another'}?")
    known = [field.name for field in dataclasses.fields(open_clip.CLIPTextCfg)]
    fields = {_SIZES.get(key, key): value for key, value in arguments.items()}
    embed_dim = int(fields.pop("embed_dim", config["embed_dim"]))
    tower = config["text_cfg"] | fields
    _check_fields(f"open_clip:{name}", tower, known)
    if tower.get("hf_model_name") or tower.get("embed_cls"):
        raise ConfigError(f"the text tower of {name} is no plain open_clip Transformer: take a preset or hf:TYPE")
    smallest = {"layers": 1, "width": 64, "patch_size": 32, "image_size": 32}
    try:  # the whole model is the library's public way to a tower: the other one is made as small as can be
        net: Any = open_clip.CustomTextCLIP(embed_dim, smallest, tower, quick_gelu=bool(config.get("quick_gelu"))).text
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise ConfigError(f"open_clip cannot build the text tower of {name} with {dict(arguments)}: {error}") from error
    head = _take_projection(net) if projection else None
    net.text_projection = None
    return Language(
        net=net,
        adapter=ClipAdapter(net),
        width=net.width,
        vocab_size=net.vocab_size,
        pad_id=net.pad_id,
        max_tokens=net.context_length,
        num_layers=len(net.transformer.resblocks),
        blocks="transformer.resblocks.",
        projection=head,
        projected_width=embed_dim,
    )


def uses_clip_tokenizer(name: str) -> bool:
    """Whether the text tower of a model of open_clip has CLIP's own vocabulary: one that names no other."""
    fields = _text_fields(name)
    return fields is not None and not fields.get("hf_tokenizer_name")


def uses_canonical_text(name: str) -> bool:
    """Whether a model of open_clip was given texts in lower case and without punctuation (SigLIP)."""
    options = (_text_fields(name) or {}).get("tokenizer_kwargs") or {}
    return options.get("clean") == "canonicalize"


def _text_fields(name: str) -> Any:
    import open_clip

    return (open_clip.get_model_config(name) or {}).get("text_cfg")


def build_static(vocab_size: int, pad_id: int, arguments: Mapping[str, Any]) -> Language:
    """A table of word vectors. Raises ConfigError for an argument other than `dimension`."""
    _check_fields("static", arguments, ["dimension"])
    dimension = int(arguments["dimension"])
    return Language(
        net=nn.Embedding(vocab_size, dimension),
        adapter=StaticAdapter(),
        width=dimension,
        vocab_size=vocab_size,
        pad_id=pad_id,
        max_tokens=UNBOUNDED,
        num_layers=0,
    )


def _take_projection(net: Any) -> nn.Module | None:
    head = net.text_projection
    return MatrixHead(head) if isinstance(head, nn.Parameter) else head


def _check_fields(name: str, fields: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for field in fields:
        if field not in known:
            near = difflib.get_close_matches(field, known, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else f"it has {', '.join(sorted(known)[:12])}, ..."
            raise ConfigError(f"{name} has no argument {field!r}: {hint}")
