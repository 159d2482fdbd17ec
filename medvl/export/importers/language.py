"""Key tables of text models with their pretraining heads: BERT's and ALBERT's, as transformers stores them."""

import functools
from typing import Any

from medvl.data.transforms.text_sequences import PairTask
from medvl.export.importers import backbones
from medvl.export.importers.backbones import TEXT
from medvl.export.importers.encoders_from_shapes import attention_heads, child_shapes, text_arguments
from medvl.export.importers.importer import Importer
from medvl.export.importers.key_map import KeyRule, Shapes, drop, keep, same
from medvl.models.language.albert_text import AlbertTextConfig
from medvl.models.language.masked_text import MaskedTextConfig

_SOURCE = "huggingface/transformers, models/bert and models/albert"
_NO_TASK = "the file has no head for pairs of segments, so its pooler is not trained with one"
_LAYERS = {768: 12, 1024: 24, 2048: 24, 4096: 12}
"""Width of a published ALBERT -> number of its layers, which share their parameters."""
_HEADS = {2048: 16, 4096: 64}
"""Width -> attention heads where they are not 64 wide."""

BERT_WORDS = tuple(backbones.tied_word_head("cls.predictions", "bert.embeddings.word_embeddings.weight"))
BERT_PAIRS = (keep("bert.pooler.dense.*", "pooler.*"), keep("cls.seq_relationship.*", "pair_head.*"))
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
ALBERT_PAIRS = (keep("albert.pooler.*", "pooler.*"), keep("sop_classifier.classifier.*", "pair_head.*"))
_ALBERT = (
    backbones.position_counter("albert.embeddings."),
    keep("albert.embeddings.**", f"{TEXT}embeddings.**"),
    keep("albert.encoder.**", f"{TEXT}encoder.**"),
)
_PROJECTION = drop("cls_projection_head.**", "CXR-BERT's projection into BioViL's space; the importer cxrbert keeps it")


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
    return AlbertTextConfig(text_arguments=sizes, vocab_size=words, max_tokens=positions, pairs=pairs)


_DEPTH = "The file does not contain the number of layers, which share parameters: 12, or 24 at a width of 1024 or 2048."

IMPORTERS = (
    Importer(
        name="bert_mlm",
        title="BERT with its head for masked words (PubMedBERT, BioBERT, Bio_ClinicalBERT, CXR-BERT)",
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
            drop("sop_classifier.classifier.*", "the head for pairs of segments; albert_mlm_sop keeps it"),
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
