"""Text encoders by name: which there are, and how one is built and filled.

A name is a preset (`medvl.encoders.presets`); `hf:TYPE` for any encoder of transformers by its model type (`hf:bert`,
`hf:distilbert`, ...); a local folder with a `config.json`; `open_clip:NAME` for a text tower; `static` for a table of
word vectors. What `pretrained` may be stands in `medvl.encoders.pretrained`; for `static` it is a file in GloVe's or
word2vec's format.
"""

import dataclasses
import difflib
import fnmatch
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medvl.encoders.presets import TEXT_PRESETS, TextPreset
from medvl.encoders.pretrained import (
    CLIP_SCALARS,
    KeyMap,
    Pretrained,
    beyond,
    load_strictly,
    locate_weights,
    read_tensors,
)
from medvl.encoders.text.adapters import ClipAdapter, Language
from medvl.encoders.text.builders import build_hugging_face, build_open_clip, build_static, read_folder
from medvl.encoders.text.encoder import Pool, Reduce, TextEncoder, TextOptions
from medvl.encoders.text.projections import MatrixHead, text_projection
from medvl.encoders.text.word_vectors import fill_table, vector_width
from medvl.errors import ConfigError

_LOG = logging.getLogger(__name__)
_FAMILIES = ("hf", "open_clip", "static")
_HEADS = ("cls.", "lm_head.", "predictions.", "sop_classifier.", "classifier.")
"""Pretraining and classification heads over a BERT."""
_REST_OF_CLIP = ("visual.", *CLIP_SCALARS)
_PROJECTIONS = ("cls_projection_head.", "text.proj.", "text_projection", "text.text_projection")
_NEVER_BUILT = ("backbone.pooler.", "backbone.embeddings.position_ids")
"""The pooler that none of the published systems uses, and the counter that older transformers stored."""
_OURS = (("backbone.", "backbone."), ("projection.", "projection."))
_CLIP_PARTS = ("transformer.", "token_embedding.", "positional_embedding", "ln_final.")


def create_text_encoder(
    name: str | Path,
    *,
    pretrained: Pretrained = False,
    vocab_size: int | None = None,
    pad_id: int | None = None,
    layers: Sequence[int] = (-1,),
    reduce: Reduce = "mean",
    pool: Pool | None = None,
    projection: bool = False,
    vocabulary: Mapping[str, int] | None = None,
    **arguments: Any,
) -> TextEncoder:
    """A text encoder by name.

    Args:
        name, pretrained: see above. At random it starts as its library does, from torch's global generator: seed it.
        vocab_size, pad_id: number of token ids, and the padding's. Default: the preset's.
        layers: states that `tokens_BTD` combine: 0 the embeddings, 1 the first layer, -1 the last. GLoRIA sums the last
            four, MedCLIP averages (1, 2, -1).
        reduce: "mean" or "sum" over `layers`.
        pool: "cls", the first token; "mean" or "max" over real tokens; "eos", the last real token. Default: the
            published model's own; "eos" for open_clip's towers and "cls" for all others.
        projection: `pooled_BD` goes through the head that the published model has over its text vector (CXR-BERT, CLIP,
            BiomedCLIP).
        vocabulary: word -> id, for `static` with a file: words that the file has get their vectors.
        arguments: sizes and other fields by Hugging Face's names (`num_hidden_layers=6`, `hidden_size=256`), for
            open_clip's towers too; `dimension` for `static`. Fewer layers than the published file has take its lower
            ones.

    Raises:
        ConfigError: the name or an argument is unknown or out of range; the text names the nearest names.
        WeightsError: the weights cannot be had, or do not fit; the text names the first differences.
    """
    family, model, preset, fields = _resolve(str(name))
    is_folder = preset is None and Path(name).is_dir()
    options = TextOptions(
        name=f"{family}:{model}" if is_folder else str(name),
        vocab_size=vocab_size,
        pad_id=pad_id,
        layers=tuple(layers),
        reduce=reduce,
        pool=pool or (preset.pool if preset else _own_pool(family)),
        projection=projection,
        arguments=arguments if preset else {**fields, **arguments},
    )
    if family == "static":
        return _static(options, pretrained, vocabulary)
    if vocabulary is not None:
        raise ConfigError("vocabulary is for static tables of word vectors")
    language = _build(family, model, fields, options, preset)
    encoder = TextEncoder(language, options)
    if pretrained is not False:
        _load(encoder, language, preset, Path(name) if is_folder and pretrained is True else pretrained)
    return encoder


def text_has_projection(name: str) -> bool:
    """Whether `create_text_encoder` can build the encoder with `projection=True`. Raises ConfigError as it does."""
    family, _, preset, _ = _resolve(name)
    return family == "open_clip" or (preset is not None and preset.projection is not None)


def list_text_encoders(pattern: str = "*") -> list[str]:
    """Names of presets that match a wildcard, sorted."""
    return sorted(fnmatch.filter(TEXT_PRESETS, pattern))


def _resolve(name: str) -> tuple[str, str, TextPreset | None, dict[str, Any]]:
    """(family, model, preset, fields of its configuration) of a name."""
    preset = TEXT_PRESETS.get(name)
    if preset is not None:
        family, _, model = preset.model.partition(":")
        return family, model, preset, dict(preset.arguments)
    if Path(name).is_dir():
        model, fields = read_folder(Path(name))
        return "hf", model, None, fields
    family, separator, model = name.partition(":")
    if family in _FAMILIES and (separator or family == "static"):
        return family, model, None, {}
    near = difflib.get_close_matches(name, TEXT_PRESETS, n=3)
    hint = f"did you mean {', '.join(near)}?" if near else f"presets are {', '.join(TEXT_PRESETS)}"
    raise ConfigError(
        f"no text encoder is called {name!r}: {hint} Others: hf:TYPE, open_clip:NAME, static, or a local folder"
    )


def _own_pool(family: str) -> Pool:
    """How open_clip's towers, and how BERT and its kin make one vector of a text."""
    return "eos" if family == "open_clip" else "cls"


def _build(
    family: str, model: str, fields: Mapping[str, Any], options: TextOptions, preset: TextPreset | None
) -> Language:
    arguments = {**fields, **options.arguments}
    if options.vocab_size is not None:
        arguments["vocab_size"] = options.vocab_size
    if options.pad_id is not None:
        arguments["pad_token_id"] = options.pad_id
    if family == "open_clip":
        language = build_open_clip(model, arguments, options.projection)
    else:
        language = build_hugging_face(model, arguments)
    if not options.projection or language.projection is not None:
        return language
    if preset is None or preset.projection is None:
        raise ConfigError(f"{options.name} has no projection over its text vector")
    head, width = text_projection(preset.projection, language.width)
    return dataclasses.replace(language, projection=head, projected_width=width)


def _static(options: TextOptions, pretrained: Pretrained, vocabulary: Mapping[str, int] | None) -> TextEncoder:
    """A table of word vectors, filled from a file where there is one."""
    if options.projection:
        raise ConfigError("a static table has no projection")
    path = None if pretrained is False else locate_weights("static", pretrained, None, "word vectors are given by path")
    arguments = dict(options.arguments)
    if path is not None:
        if vocabulary is None:
            raise ConfigError("a file of word vectors needs vocabulary: the tokenizer's word -> id")
        arguments["dimension"] = vector_width(path)
    vocab_size = options.vocab_size or (max(vocabulary.values()) + 1 if vocabulary else None)
    if vocab_size is None or "dimension" not in arguments:
        raise ConfigError("a static table needs vocab_size and dimension, or a file of vectors and a vocabulary")
    options = dataclasses.replace(options, vocab_size=vocab_size, arguments=arguments)
    language = build_static(vocab_size, options.pad_id or 0, arguments)
    if path is not None and vocabulary is not None:
        found = fill_table(language.net.get_parameter("weight"), path, vocabulary)
        _LOG.info("%s: vectors for %d of %d words of the vocabulary", path, found, len(vocabulary))
    return TextEncoder(language, options)


def _load(encoder: TextEncoder, language: Language, preset: TextPreset | None, pretrained: Pretrained) -> None:
    """Fill an encoder; a file of ours, one of Hugging Face's, or a whole open_clip model."""
    if preset is not None and language.counts_from_padding:
        published = preset.arguments["pad_token_id"]
        if encoder.pad_id != published:
            raise ConfigError(
                f"{encoder.name} counts positions from its padding id, which is {published} in the published weights, "
                f"not {encoder.pad_id}: take its own tokenizer, or start at random"
            )
    path = locate_weights(encoder.name, pretrained, preset.weights if preset else None, preset.note if preset else "")
    names = [name for name, _ in language.net.named_parameters()]
    upper = [] if language.blocks is None else beyond(language.blocks, names)
    keys = KeyMap(
        layouts=_clip_layouts(language) if isinstance(language.adapter, ClipAdapter) else _bert_layouts(language),
        drop=[*_HEADS, *_REST_OF_CLIP, *(() if language.projection is not None else _PROJECTIONS)],
        without=[*_NEVER_BUILT, *(f"backbone.{block}" for block in upper)],
    )
    load_strictly(encoder, read_tensors(path), keys, str(path))


def _bert_layouts(language: Language) -> list[Sequence[tuple[str, str]]]:
    """A file of ours; a whole open_clip model; a Hugging Face model with heads; a bare one."""
    prefix = f"{getattr(language.net, 'base_model_prefix', 'bert')}."
    return [
        _OURS,
        [("text.transformer.", "backbone."), ("text.proj.", "projection.")],
        [(prefix, "backbone."), ("cls_projection_head.", "projection.")],
        [("", "backbone.")],
    ]


def _clip_layouts(language: Language) -> list[Sequence[tuple[str, str]]]:
    """A file of ours; open_clip's two ways to name a text tower."""
    head = ("text_projection.", "projection.")  # a linear layer, or the bare matrix of the first CLIP
    if isinstance(language.projection, MatrixHead):
        head = ("text_projection", "projection.matrix")
    root = [*((part, f"backbone.{part}") for part in _CLIP_PARTS), head]
    return [_OURS, [(f"text.{source}", target) for source, target in root], root]
