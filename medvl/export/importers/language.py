"""Key tables of text models with their pretraining heads: BERT's and ALBERT's, as transformers
stores them.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from medvl.data.transforms.masked_text import PairTask
from medvl.export.importers import backbones
from medvl.export.importers.backbones import TEXT, sequential_resnet
from medvl.export.importers.importer import (
    Importer,
    attention_heads,
    child_shapes,
    count,
    image_arguments,
    text_arguments,
)
from medvl.export.importers.key_map import KeyRule, Shapes, drop, fixed, keep, same
from medvl.models.language.masked_text import AlbertTextConfig, MaskedTextConfig
from medvl.models.report_generators.base import sines
from medvl.models.report_generators.r2gen import R2GenConfig

_SOURCE = "huggingface/transformers, models/bert and models/albert"
_NO_TASK = "the file has no head for pairs of segments, so its pooler is not trained with one"
_LAYERS = {768: 12, 1024: 24, 2048: 24, 4096: 12}
"""Width of a published ALBERT -> number of its layers, which share their parameters."""
_HEADS = {2048: 16, 4096: 64}
"""Width -> attention heads where they are not 64 wide."""

BERT_WORDS = tuple(
    backbones.tied_word_head("cls.predictions", "bert.embeddings.word_embeddings.weight")
)
BERT_PAIRS = (
    keep("bert.pooler.dense.*", "pooler.*"),
    keep("cls.seq_relationship.*", "pair_head.*"),
)
ROBERTA_WORDS = tuple(
    keep(f"lm_head.{source}", f"word_head.{name}")
    for source, name in {"dense.*": "dense.*", "layer_norm.*": "norm.*", "bias": "bias"}.items()
)
ALBERT_WORDS = (
    same("predictions.decoder.weight", "albert.embeddings.word_embeddings.weight"),
    same("predictions.decoder.bias", "predictions.bias"),
    keep("predictions.dense.*", "word_head.dense.*"),
    keep("predictions.LayerNorm.*", "word_head.norm.*"),
    keep("predictions.bias", "word_head.bias"),
)
ALBERT_PAIRS = (
    keep("albert.pooler.*", "pooler.*"),
    keep("sop_classifier.classifier.*", "pair_head.*"),
)
_ALBERT = (
    backbones.position_counter("albert.embeddings."),
    keep("albert.embeddings.**", f"{TEXT}embeddings.**"),
    keep("albert.encoder.**", f"{TEXT}encoder.**"),
)
_PROJECTION = drop(
    "cls_projection_head.**",
    "CXR-BERT's projection into BioViL's space; the importer cxrbert keeps it",
)


def backbone_rules(model_type: str) -> tuple[KeyRule, ...]:
    """Return the rules of an encoder within its pretraining model, for exports."""
    if model_type == "albert":
        return _ALBERT
    return (keep(f"{model_type}.**", f"{TEXT}**"),)


def _masked_text(shapes: Shapes, pairs: PairTask = "none") -> MaskedTextConfig:
    arguments: dict[str, Any] = {**text_arguments(shapes, {"name": "bert"})}
    arguments.pop("vocab_size", None)
    return MaskedTextConfig(
        text_encoder=arguments.pop("name"),
        text_arguments=arguments,
        vocab_size=shapes[f"{TEXT}embeddings.word_embeddings.weight"][0],
        max_tokens=shapes[f"{TEXT}embeddings.position_embeddings.weight"][0],
        pairs=pairs,
    )


def _albert_text(shapes: Shapes, pairs: PairTask = "none") -> AlbertTextConfig:
    encoder = child_shapes(shapes, TEXT)
    words, narrow = encoder["embeddings.word_embeddings.weight"]
    positions = encoder["embeddings.position_embeddings.weight"][0]
    layer = "encoder.albert_layer_groups.0.albert_layers.0."
    width = encoder["encoder.embedding_hidden_mapping_in.weight"][0]
    sizes = {
        "embedding_size": narrow,
        "hidden_size": width,
        "num_hidden_layers": _LAYERS.get(width, 12),
        "num_attention_heads": _HEADS.get(width, attention_heads(width)),
        "intermediate_size": encoder[f"{layer}ffn.weight"][0],
        "max_position_embeddings": positions,
    }
    return AlbertTextConfig(
        text_arguments=sizes, vocab_size=words, max_tokens=positions, pairs=pairs
    )


_DEPTH = (
    "The file does not contain the number of layers, which share parameters: 12, or 24 at "
    "a width of 1024 or 2048."
)

IMPORTERS = (
    Importer(
        name="bert_mlm",
        title="BERT with its head for masked words (PubMedBERT, BioBERT, Bio_ClinicalBERT, "
        "CXR-BERT)",
        source=_SOURCE,
        table=(
            *BERT_WORDS,
            drop("bert.pooler.dense.*", _NO_TASK),
            drop("cls.seq_relationship.*", "the head for pairs of segments; bert_mlm_nsp keeps it"),
            _PROJECTION,
            *backbones.bert("bert."),
        ),
        system=_masked_text,
    ),
    Importer(
        name="bert_mlm_nsp",
        title="BERT with its heads for masked words and next sentence prediction",
        source=_SOURCE,
        table=(*BERT_WORDS, *BERT_PAIRS, *backbones.bert("bert.")),
        system=functools.partial(_masked_text, pairs="next"),
    ),
    Importer(
        name="albert_mlm",
        title="ALBERT with its head for masked words (ALBERT v2, BioALBERT)",
        source=_SOURCE,
        table=(
            *ALBERT_WORDS,
            drop("albert.pooler.*", _NO_TASK),
            drop(
                "sop_classifier.classifier.*",
                "the head for pairs of segments; albert_mlm_sop keeps it",
            ),
            *_ALBERT,
        ),
        system=_albert_text,
        note=_DEPTH,
    ),
    Importer(
        name="albert_mlm_sop",
        title="ALBERT with its heads for masked words and sentence order prediction",
        source=_SOURCE,
        table=(*ALBERT_WORDS, *ALBERT_PAIRS, *_ALBERT),
        system=functools.partial(_albert_text, pairs="order"),
        note=_DEPTH,
    ),
)


# Key tables of report generators.

_MODEL = "encoder_decoder.model."


def _sines(table_1TD: Tensor) -> Tensor:
    """Return the table of positions that `RelationalMemory` computes, in the shape of the
    file's.
    """
    if table_1TD.ndim != 3:
        return table_1TD.new_empty(0)
    return sines(torch.arange(table_1TD.shape[1]), table_1TD.shape[2])[None]


def _attention(source: str, target: str) -> list[KeyRule]:
    names = ("query", "key", "value", "out")
    return [
        keep(f"{source}.linears.{number}.*", f"{target}.{name}.*")
        for number, name in enumerate(names)
    ]


def _norm(source: str, target: str) -> list[KeyRule]:
    return [keep(f"{source}.gamma", f"{target}.weight"), keep(f"{source}.beta", f"{target}.bias")]


def _layers(source: str, target: str, attentions: dict[str, str]) -> list[KeyRule]:
    rules = [
        rule
        for theirs, ours in attentions.items()
        for rule in _attention(f"{source}.{theirs}", f"{target}.{ours}")
    ]
    return [
        *rules,
        keep(f"{source}.feed_forward.w_1.*", f"{target}.feed_forward.0.*"),
        keep(f"{source}.feed_forward.w_2.*", f"{target}.feed_forward.3.*"),
        *_norm(f"{source}.sublayer.*.norm", f"{target}.norms.*"),
    ]


_TABLE = (
    *sequential_resnet("visual_extractor.model."),
    keep("encoder_decoder.att_embed.0.*", "image_input.*"),
    *_layers(f"{_MODEL}encoder.layers.*", "image_layers.layers.*", {"self_attn": "attention"}),
    *_norm(f"{_MODEL}encoder.norm", "image_layers.norm"),
    *_layers(
        f"{_MODEL}decoder.layers.*",
        "decoder.layers.*",
        {"self_attn": "attention", "src_attn": "cross_attention"},
    ),
    keep(
        f"{_MODEL}decoder.layers.*.sublayer.*.norm.mlp_gamma.*.*",
        "decoder.layers.*.norms.*.weight_change.*.*",
    ),
    keep(
        f"{_MODEL}decoder.layers.*.sublayer.*.norm.mlp_beta.*.*",
        "decoder.layers.*.norms.*.bias_change.*.*",
    ),
    *_norm(f"{_MODEL}decoder.norm", "decoder.norm"),
    keep(f"{_MODEL}tgt_embed.0.lut.weight", "decoder.words.weight"),
    fixed(f"{_MODEL}tgt_embed.1.pe", _sines, "sines and cosines"),
    *_attention(f"{_MODEL}rm.attn", "decoder.memory.attention"),
    keep(f"{_MODEL}rm.mlp.*.*", "decoder.memory.mlp.*.*"),
    keep(f"{_MODEL}rm.W.*", "decoder.memory.token_gates.*"),
    keep(f"{_MODEL}rm.U.*", "decoder.memory.memory_gates.*"),
    keep("encoder_decoder.logit.*", "word_head.*"),
)
_NOTE = (
    "The file has no vocabulary: give --tokenizer, made by `medvl vocab --kind r2gen` from shards "
    "of the same annotation file (`medvl shards r2gen-annotation`), with its threshold."
)


def _config(views: int, max_tokens: int, shapes: Shapes) -> R2GenConfig:
    image = image_arguments(shapes, {})
    vocab_size, width = shapes["decoder.words.weight"]
    return R2GenConfig(
        image_encoder=image.pop("name"),
        image_arguments=image,
        views=views,
        max_tokens=max_tokens,
        width=width,
        layers=count(shapes, "decoder.layers."),
        heads=attention_heads(width),
        memory_heads=attention_heads(width),
        intermediate=shapes["decoder.layers.0.feed_forward.0.weight"][0],
        slots=shapes["decoder.layers.0.norms.0.weight_change.0.weight"][1] // width,
        vocab_size=vocab_size,
    )


REPORT_IMPORTERS = (
    Importer(
        name="r2gen",
        title="R2Gen (Chen et al. 2020) for IU X-ray: ResNet-101, two views",
        source="zhjohnchan/R2Gen @ e8cd3cf",
        table=_TABLE,
        images={"resize": "bilinear_antialias"},
        system=functools.partial(_config, 2, R2GenConfig.max_tokens),
        note=_NOTE,
    ),
    Importer(
        name="r2gen_mimic",
        title="R2Gen (Chen et al. 2020) for MIMIC-CXR: ResNet-101, one view",
        source="zhjohnchan/R2Gen @ e8cd3cf",
        table=_TABLE,
        images={"resize": "bilinear_antialias"},
        system=functools.partial(_config, 1, 101),
        note=_NOTE,
    ),
)
