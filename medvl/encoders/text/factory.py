"""Creation of text encoders by name.

A name is a preset (`medvl.encoders.presets`); `hf:TYPE` for an encoder of transformers by model
type (`hf:bert`, `hf:distilbert`, `hf:clip_text_model`, ...), also with fields of its configuration
(`hf:bert{"hidden_size": 192}`); a local folder with a `config.json`, or `hf:FOLDER`;
`open_clip:NAME` for the text encoder of an open_clip model; `static` for a table of word vectors.
Values of `pretrained` are described in `medvl.encoders.pretrained`; for `static` it is a file in
GloVe's or word2vec's format.
"""

import dataclasses
import difflib
import fnmatch
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medvl.encoders.hugging_face import TEXT_KINDS, local_folder, parse_fields
from medvl.encoders.presets import TEXT_PRESETS, TextPreset
from medvl.encoders.pretrained import (
    CLIP_SCALARS,
    CLIP_TEXT_PARTS,
    KeyMap,
    Pretrained,
    load_strictly,
    locate_weights,
    read_source,
    split_set,
    unused_blocks,
    with_set,
)
from medvl.encoders.text.adapters import (
    ClipAdapter,
    MatrixHead,
    TextBackbone,
    TowerAdapter,
    text_projection,
)
from medvl.encoders.text.builders import (
    build_hugging_face,
    build_open_clip,
    build_static,
    build_text_tower,
    fill_word_vectors,
    read_dimension,
    read_folder,
)
from medvl.encoders.text.encoder import Pool, Reduce, TextEncoder, TextOptions
from medvl.errors import ConfigError, WeightsError

_LOG = logging.getLogger(__name__)
_FAMILIES = ("hf", "open_clip", "static")
_HEADS = ("cls.", "lm_head.", "predictions.", "sop_classifier.", "classifier.")
"""Key prefixes of the pretraining and classification heads of BERT-like models."""
_IMAGE_KEYS = ("visual.", *CLIP_SCALARS)
_PROJECTIONS = ("cls_projection_head.", "text.proj.", "text_projection", "text.text_projection")
_NOT_BUILT = ("backbone.pooler.", "backbone.embeddings.position_ids")
"""Pooler, which is not built (KAD's is in its text head), and the counter of positions of older
transformers.
"""
_MEDVL_LAYOUT = (("backbone.", "backbone."), ("projection.", "projection."))
_TOWER_IMAGE_KEYS = ("vision_model.", "visual_projection.")
_TOWER_HEADS = ("text_model.head.", "head.")
_TOWER_LAYOUTS = (
    _MEDVL_LAYOUT,
    (("text_model.head.", "projection."), ("text_model.", "backbone.")),
    (("text_projection.", "projection."), ("text_model.", "backbone.")),
    (("text_model.", "backbone."),),
    (("head.", "projection."), ("", "backbone.")),
    (("", "backbone."),),
)
"""SigLIP and CLIP of transformers: with or without a projection, with or without a prefix."""


def create_text_encoder(
    name: str | Path,
    *,
    pretrained: Pretrained = False,
    weights: str | None = None,
    vocab_size: int | None = None,
    pad_id: int | None = None,
    layers: Sequence[int] = (-1,),
    reduce: Reduce = "mean",
    pool: Pool | None = None,
    projection: bool = False,
    vocabulary: Mapping[str, int] | None = None,
    **arguments: Any,
) -> TextEncoder:
    """Create a text encoder by name.

    Args:
        name: a preset, `hf:TYPE`, a local folder, `open_clip:NAME` or `static` (see the module's
            docstring).
        pretrained: weights to load (see `medvl.encoders.pretrained`). Random weights are drawn as
            the library does it, from torch's global generator: seed it.
        weights: name of a set of weights in the file, where it has several: `state_dict_ema`,
            `teacher`.
        vocab_size, pad_id: number of token ids, and id of padding. Default: the preset's.
        layers: states that are combined into `tokens_BTD`: 0 the embeddings, 1 the first layer, -1
            the last. GLoRIA sums the last four, MedCLIP averages (1, 2, -1).
        reduce: "mean" or "sum" over `layers`.
        pool: "cls", the first token; "mean" or "max" over real tokens; "eos", the last real token.
            Default: the published model's own; else "eos" for the text towers of CLIP and SigLIP
            (open_clip, transformers) and "cls" for all others.
        projection: project `pooled_BD` with the published model's head (CXR-BERT, CLIP,
            BiomedCLIP).
        vocabulary: word -> id, for `static` with a file: words in the file get their vectors.
        arguments: sizes and other fields by Hugging Face's names (`num_hidden_layers=6`,
            `hidden_size=256`), for open_clip too; `dimension` for `static`. An encoder with fewer
            layers than its published file loads the lower ones.

    Raises:
        ConfigError: the name or an argument is unknown ("unknown_name", with the nearest names in
            the message) or out of range ("out_of_range").
        WeightsError: the weights are not available ("not_found"), do not fit ("mismatch"), have
            values that are not finite ("nonfinite"), or the file has several sets of them
            ("conflict").
    """
    pretrained = with_set(pretrained, weights)
    family, model, preset, fields = _resolve(str(name))
    folder = local_folder(str(name), TEXT_PRESETS)
    options = TextOptions(
        name=f"{family}:{model}" if preset is None and family == "hf" else str(name),
        vocab_size=vocab_size,
        pad_id=pad_id,
        layers=tuple(layers),
        reduce=reduce,
        pool=pool or (preset.pool if preset else "eos" if _has_end(family, model) else "cls"),
        projection=projection,
        arguments=arguments if preset else {**fields, **arguments},
    )
    if family == "static":
        return _create_static(options, pretrained, vocabulary)
    if vocabulary is not None:
        raise ConfigError(
            "vocabulary is only used with name='static'", "conflict", field="vocabulary"
        )
    language = _build(family, model, fields, options, preset)
    encoder = TextEncoder(language, options)
    if pretrained is not False:
        _load(
            encoder,
            language,
            preset,
            folder if folder is not None and pretrained is True else pretrained,
        )
    return encoder


def text_has_projection(name: str) -> bool:
    """Return whether `create_text_encoder` can build this encoder with `projection=True`.

    Raises:
        ConfigError: "unknown_name".
    """
    family, model, preset, _ = _resolve(name)
    return _has_end(family, model) or (preset is not None and preset.projection is not None)


def _has_end(family: str, model: str) -> bool:
    """Return whether an encoder is the text tower of a CLIP or SigLIP, which pool a text's end."""
    return family == "open_clip" or (family == "hf" and model in TEXT_KINDS)


def text_encoder_fields(name: str) -> dict[str, Any]:
    """Return the fields of the backbone's configuration that a name sets, without the defaults of
    its type.

    Raises:
        ConfigError: "unknown_name".
    """
    return _resolve(name)[3]


def list_text_encoders(pattern: str = "*") -> list[str]:
    """Return the names of presets that match a wildcard, sorted."""
    return sorted(fnmatch.filter(TEXT_PRESETS, pattern))


def without_folder(name: str) -> str:
    """Return the name of the same encoder that does not depend on a local folder:
    `hf:TYPE{FIELDS}` for one.
    """
    folder = local_folder(name, TEXT_PRESETS)
    if folder is None:
        return name
    model, fields = read_folder(folder)
    return f"hf:{model}{json.dumps(fields)}"


def _resolve(name: str) -> tuple[str, str, TextPreset | None, dict[str, Any]]:
    """Return (family, model, preset, fields of its configuration) of a name."""
    preset = TEXT_PRESETS.get(name)
    if preset is not None:
        family, _, model = preset.model.partition(":")
        return family, model, preset, dict(preset.arguments)
    if (folder := local_folder(name, TEXT_PRESETS)) is not None:
        model, fields = read_folder(folder)
        return "hf", model, None, fields
    family, separator, model = name.partition(":")
    if family == "hf" and model.endswith("}"):
        model, _, text = model.partition("{")
        return family, model, None, parse_fields("{" + text)
    if family in _FAMILIES and (separator or family == "static"):
        return family, model, None, {}
    near = difflib.get_close_matches(name, TEXT_PRESETS, n=3)
    hint = (
        f"did you mean {', '.join(near)}?"
        if near
        else f"the presets are {', '.join(TEXT_PRESETS)}."
    )
    message = (
        f"unknown text encoder {name!r}: {hint} Others: hf:TYPE, open_clip:NAME, static, "
        f"or a local folder"
    )
    raise ConfigError(message, "unknown_name", field="name")


def _build(
    family: str,
    model: str,
    fields: Mapping[str, Any],
    options: TextOptions,
    preset: TextPreset | None,
) -> TextBackbone:
    arguments = {**fields, **options.arguments}
    if options.vocab_size is not None:
        arguments["vocab_size"] = options.vocab_size
    if options.pad_id is not None:
        arguments["pad_token_id"] = options.pad_id
    if family == "open_clip":
        language = build_open_clip(model, arguments, options.projection)
    elif model in TEXT_KINDS:
        language = build_text_tower(model, arguments, options.projection)
    else:
        language = build_hugging_face(model, arguments)
    if not options.projection or language.projection is not None:
        return language
    if preset is None or preset.projection is None:
        raise ConfigError(
            f"{options.name} has no projection over its text vector",
            "unsupported",
            field="projection",
        )
    head, width = text_projection(preset.projection, language.width)
    return dataclasses.replace(language, projection=head, projected_width=width)


def _create_static(
    options: TextOptions, pretrained: Pretrained, vocabulary: Mapping[str, int] | None
) -> TextEncoder:
    """Create a table of word vectors, filled from a file if one is given."""
    if options.projection:
        raise ConfigError("a static table has no projection", "unsupported", field="projection")
    path = (
        None
        if pretrained is False
        else locate_weights("static", pretrained, None, "load word vectors by path")
    )
    arguments = dict(options.arguments)
    if path is not None:
        if vocabulary is None:
            raise ConfigError(
                "a file of word vectors needs a vocabulary", "missing", field="vocabulary"
            )
        arguments["dimension"] = read_dimension(path)
    vocab_size = options.vocab_size or (max(vocabulary.values()) + 1 if vocabulary else None)
    if vocab_size is None or "dimension" not in arguments:
        raise ConfigError(
            "a static table needs vocab_size and dimension, or a file and a vocabulary", "missing"
        )
    options = dataclasses.replace(options, vocab_size=vocab_size, arguments=arguments)
    language = build_static(vocab_size, options.pad_id or 0, arguments)
    if path is not None and vocabulary is not None:
        filled = fill_word_vectors(language.net.get_parameter("weight"), path, vocabulary)
        _LOG.info("%s: vectors for %d of %d words of the vocabulary", path, filled, len(vocabulary))
    return TextEncoder(language, options)


def _load(
    encoder: TextEncoder, language: TextBackbone, preset: TextPreset | None, pretrained: Pretrained
) -> None:
    """Load weights from a file of medvl, of Hugging Face, or of a whole open_clip model."""
    if preset is not None and language.positions_start_after_padding:
        published = preset.arguments["pad_token_id"]
        if encoder.pad_id != published:
            need = f"need pad_id {published} (positions count from it), got {encoder.pad_id}"
            message = (
                f"published weights of {encoder.name} {need}: use its own tokenizer, or "
                f"random weights"
            )
            raise ConfigError(message, "conflict", field="pad_id")
    published, note = (preset.weights, preset.note) if preset else (None, "")
    source, tensors = read_source(encoder.name, pretrained, published, note)
    names = [name for name, _ in language.net.named_parameters()]
    upper = [] if language.block_prefix is None else unused_blocks(language.block_prefix, names)
    is_tower = isinstance(language.adapter, TowerAdapter)
    unused = () if language.projection is not None else _PROJECTIONS
    keys = KeyMap(
        layouts=_layouts(language),
        ignored_keys=[
            *_HEADS,
            *_IMAGE_KEYS,
            *(_TOWER_IMAGE_KEYS if is_tower else ()),
            *unused,
            *(_TOWER_HEADS if is_tower and unused else ()),
        ],
        ignored_names=[*_NOT_BUILT, *(f"backbone.{block}" for block in upper)],
    )
    try:
        load_strictly(encoder, tensors, keys, source)
    except WeightsError as error:
        folder = split_set(pretrained)[0]
        if (
            error.code != "mismatch"
            or preset is None
            or not (Path(folder) / "config.json").is_file()
        ):
            raise
        advice = f"text_encoder {folder!r} takes its sizes from the folder of these weights"
        raise WeightsError(f"{error}; {advice}", error.code) from error


def _layouts(language: TextBackbone) -> Sequence[Sequence[tuple[str, str]]]:
    """Return the layouts of files for this backbone."""
    if isinstance(language.adapter, ClipAdapter):
        return _clip_layouts(language)
    return _TOWER_LAYOUTS if isinstance(language.adapter, TowerAdapter) else _bert_layouts(language)


def _bert_layouts(language: TextBackbone) -> list[Sequence[tuple[str, str]]]:
    """Return the layouts of a file of medvl, an open_clip model, a Hugging Face model with
    heads, and one without.
    """
    prefix = f"{getattr(language.net, 'base_model_prefix', 'bert')}."
    return [
        _MEDVL_LAYOUT,
        [("text.transformer.", "backbone."), ("text.proj.", "projection.")],
        [(prefix, "backbone."), ("cls_projection_head.", "projection.")],
        [("", "backbone.")],
    ]


def _clip_layouts(language: TextBackbone) -> list[Sequence[tuple[str, str]]]:
    """Return the layouts of a file of medvl, and the two in which open_clip stores a text
    encoder.
    """
    head = ("text_projection.", "projection.")  # a linear layer, or a bare matrix in the first CLIP
    if isinstance(language.projection, MatrixHead):
        head = ("text_projection", "projection.matrix")
    root = [*((part, f"backbone.{part}") for part in CLIP_TEXT_PARTS), head]
    return [_MEDVL_LAYOUT, [(f"text.{source}", target) for source, target in root], root]
