"""Key tables of systems with a book of queries: KAD's file has its text encoder, MedKLIP's and
MAVL's have none.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from medvl.common.untrusted import ANYWHERE, parse_json, read_limited
from medvl.data.reports.statements import ASPECTS
from medvl.encoders.presets import CLIP_MEAN, CLIP_STD
from medvl.errors import ConfigError
from medvl.export.importers.backbones import (
    IMAGE,
    TEXT,
    bert,
    bert_file,
    hugging_face_dinov2,
    hugging_face_dinov2_layers,
    position_counter,
    resnet,
    sequential_resnet,
    vision_transformer,
)
from medvl.export.importers.importer import (
    EntityFile,
    Importer,
    bert_fields,
    count,
    encoder_fields,
    image_arguments,
    text_arguments,
)
from medvl.export.importers.key_map import Shapes, ZeroTensor, drop, keep, same
from medvl.models.downstream.dense import resize_positions
from medvl.models.dual_encoders.carzero import CARZeroConfig
from medvl.models.dual_encoders.kad import KADConfig
from medvl.models.dual_encoders.mavl import MAVLConfig
from medvl.models.dual_encoders.medklip import MedKLIPConfig
from medvl.models.dual_encoders.radzero import RadZeroConfig

_BOOK = "the book of queries, which the text encoder makes on first use"
_PLACES = "the book of places, which the text encoder makes on first use"
_BOOKS = tuple(
    ZeroTensor(name=f"{book}.{name}", why=why)
    for book, why in (("book", _BOOK), ("places", _PLACES))
    for name in ("vectors_QD", "sha256")
)
_MAX_BYTES = 1 << 24
_STRIDE = 16
"""Pixels of a side of a cell, of a ResNet without its last stage."""
_CLINICAL_BERT = (
    "the text encoder, emilyalsentzer/Bio_ClinicalBERT (pytorch_model.bin or model.safetensors)"
)


def with_entities(config: Any, path: Path) -> tuple[Any, dict[str, Any]]:
    """Return the config of a system with the entities of a JSON file, and no tensors.

    The file is an object, name -> sentence of the query, or a list of names, which keep the
    system's own sentences.

    Raises ConfigError when it cannot be read or is of another form.
    """
    names, sentences = _read_entities(path, 1)
    descriptions = {name: texts[0] for name, texts in sentences.items()}
    return dataclasses.replace(config, entities=names, descriptions=descriptions), {}


def with_aspects(config: Any, path: Path) -> tuple[Any, dict[str, Any]]:
    """Return MAVL's config with the entities of a JSON file, as `with_entities`, and no tensors.

    The values are lists of sentences: the definition, then the aspects.
    """
    names, sentences = _read_entities(path, 1 + len(ASPECTS))
    descriptions = {name: texts[0] for name, texts in sentences.items()}
    aspects = {name: tuple(texts[1:]) for name, texts in sentences.items()}
    return dataclasses.replace(
        config, entities=names, descriptions=descriptions, aspects=aspects
    ), {}


def _read_entities(path: Path, size: int) -> tuple[tuple[str, ...], dict[str, list[str]]]:
    """Return the names of a JSON file, and the sentences of each if it has them, which are
    `size`.
    """
    try:
        with ANYWHERE.open(path, ConfigError) as file:
            content = parse_json(read_limited(file, _MAX_BYTES, ConfigError))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist", "not_found", field="entities") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error})", "malformed", field="entities") from None
    names = list(content) if isinstance(content, dict | list) else []
    values = content if isinstance(content, dict) else {}
    sentences = {name: value if size > 1 else [value] for name, value in values.items()}
    listed = all(isinstance(texts, list) and len(texts) == size for texts in sentences.values())
    words = [*names, *(text for texts in sentences.values() for text in texts)] if listed else []
    if not words or not all(isinstance(text, str) and text.strip() for text in words):
        value = "sentence" if size == 1 else f"list of {size} sentences"
        message = f"{path}: expected an object, name -> {value}, or a list of names"
        raise ConfigError(message, "malformed", field="entities")
    if len(set(names)) < len(names):
        raise ConfigError(f"{path} has an entity twice", "malformed", field="entities")
    return tuple(names), sentences


def _described(shapes: Shapes) -> dict[str, Any]:
    """Return the fields of MedKLIP's config, and MAVL's, that the shapes determine."""
    positions = shapes[f"{TEXT}embeddings.position_embeddings.weight"][0]
    return {
        **bert_fields(shapes, "bioclinicalbert"),
        "max_tokens": min(MedKLIPConfig.max_tokens, positions),
        "projection_dim": shapes["text_head.weight"][0],
        "decoder_layers": count(shapes, "decoder.layers."),
        "decoder_hidden": shapes["decoder.layers.0.linear1.weight"][0],
    }


def _mavl(shapes: Shapes) -> MAVLConfig:
    cells = shapes["pool.position"][0] - 1
    return MAVLConfig(**_described(shapes), image_size=round(cells**0.5) * _STRIDE)


def _kad(shapes: Shapes) -> KADConfig:
    image = image_arguments(shapes, {"image_size": 512})
    text = text_arguments(shapes, {"name": "pubmedbert"})
    # of the third stage, at 224 pixels, or of the last one
    width = shapes["image_head.0.weight"][1]
    return KADConfig(
        image_size=512 if width == 2048 else 224,
        image_arguments={} if width == 2048 else {"patch_level": -2},
        image_encoder=image["name"],
        text_encoder=text["name"],
        vocab_size=shapes[f"{TEXT}embeddings.word_embeddings.weight"][0],
        projection_dim=shapes["presence.weight"][1],
        decoder_hidden=shapes["decoder.layers.0.linear1.weight"][0],
    )


_MEDKLIP = Importer(
    name="medklip",
    title="MedKLIP (Wu et al. 2023): three stages of a ResNet-50, its decoder; Bio_ClinicalBERT "
    "from a second file",
    source="MediaBrain-SJTU/MedKLIP @ 8e60b03, PreTrain_MedKLIP/models/model_MedKLIP.py",
    table=(
        *sequential_resnet("res_features."),
        keep("res_l1.*", "image_head.0.*"),
        keep("res_l2.*", "image_head.2.*"),
        keep("disease_embedding_layer.*", "text_head.*"),
        keep("decoder.**", "decoder.**"),
        keep("classifier.*", "presence.*"),
        keep("cl_fc.*", "place.*"),
        *bert_file(),
    ),
    images={"resize": "bilinear_antialias"},
    system=lambda shapes: MedKLIPConfig(**_described(shapes)),
    text_file=_CLINICAL_BERT,
    entities=EntityFile(
        title="its `observation explanation.json`, name -> sentence", read=with_entities
    ),
    zeros=_BOOKS,
    note="Queries attend to each other: without the entities of its training (75 in "
    "`observation explanation.json` of "
    "its repository), scores are not those of the published system. Its 51 places are replaced "
    "by those of medvl.",
)
_MAVL = Importer(
    name="mavl",
    title="MAVL (Phan et al. 2024): three stages of a ResNet-50, its decoder; Bio_ClinicalBERT "
    "from a second file",
    source="HieuPhan33/CVPR2024_MAVL @ 1597030, Pretrain/models/model_MAVL.py",
    table=(
        *sequential_resnet("backbone."),
        keep("pool.positional_embedding", "pool.position"),
        *(
            keep(f"pool.{name}_proj.{leaf}", f"pool.attention.in_proj_{leaf}", part=(index, 3))
            for index, name in enumerate("qkv")
            for leaf in ("weight", "bias")
        ),
        keep("pool.c_proj.*", "pool.attention.out_proj.*"),
        keep("res_l1.0.*", "image_head.0.*", change="conv to linear"),
        keep("res_l1.1.weight", "image_head.1.weight"),
        keep("res_l2.*", "image_head.2.*", change="conv to linear"),
        keep("disease_embedding_layer.*", "text_head.*"),
        keep("decoder.**", "decoder.**"),
        keep("classifier.*", "presence.*"),
        keep("location_emb.weight", "place.weight", change="kernel to linear"),
        keep("location_emb.bias", "place.bias"),
        keep("temp", "logit_scale"),
        *bert_file(),
    ),
    images={"resize": "bilinear_antialias"},
    system=_mavl,
    text_file=_CLINICAL_BERT,
    entities=EntityFile(
        title="JSON, name -> list of its definition and seven aspects", read=with_aspects
    ),
    zeros=_BOOKS,
    note="Queries attend to each other: without the entities of its training (75, with "
    "`observation explanation.json` "
    "and `gpt4_mimic.json` of its repository), scores are not those of the published system. "
    "Its 51 places are "
    "replaced by those of medvl. Models with a vision Transformer are refused.",
)
_KAD = Importer(
    name="kad",
    title="KAD (Zhang et al. 2023): ResNet-50 at 512 pixels and above, Med-KEBERT",
    source="KAD's A3_CLIP/main.py",
    parts=("image_encoder", "text_encoder", "model"),
    table=(
        *resnet("image_encoder/resnet."),
        *(
            same(f"image_encoder/res_features.{number}.**", f"image_encoder/resnet.{name}.**")
            for number, name in {
                0: "conv1",
                1: "bn1",
                **{stage + 3: f"layer{stage}" for stage in (1, 2, 3, 4)},
            }.items()
        ),
        keep("image_encoder/res_l1.*", "image_head.0.*"),
        keep("image_encoder/res_l2.*", "image_head.2.*"),
        keep("text_encoder/bert_model.pooler.dense.*", "text_head.0.*"),
        *bert("text_encoder/bert_model."),
        keep("text_encoder/mlp_embed.0.*", "text_head.2.*"),
        keep("text_encoder/mlp_embed.2.*", "text_head.4.*"),
        same("model/decoder_norm.**", "model/decoder.norm.**"),
        keep("model/decoder.**", "decoder.**"),
        keep("model/mlp_head.0.*", "presence.*"),
        drop("text_encoder/logit_scale", "the temperature of its first stage"),
        keep("model/logit_scale", "logit_scale", change="scalar"),
    ),
    images={"resize": "bicubic_antialias"},
    system=_kad,
    entities=EntityFile(title="a list of names, or name -> sentence, in JSON", read=with_entities),
    zeros=(
        ZeroTensor(name="book.vectors_QD", why=_BOOK),
        ZeroTensor(name="book.sha256", why=_BOOK),
    ),
    note="Entities are queried by their names. The file does not hold those of its training.",
)

IMPORTERS = (_MEDKLIP, _MAVL, _KAD)


# Key tables of systems that compare statements with the patches of an image: RadZero and CARZero.

_RADZERO_LOSS = "loss_fns.RadZeroLoss."
_PIXELS = RadZeroConfig.image_size
_PATCH = 14


def _at_radzero_size(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the positions of a DINOv2 at 518 pixels, interpolated as its released code does in
    each forward pass.
    """
    name = f"{IMAGE}pos_embed"
    table_1TD = tensors.get(name)
    if table_1TD is None or table_1TD.ndim != 3:
        return {}
    old = round(max(table_1TD.shape[1] - 1, 0) ** 0.5)
    new = _PIXELS // _PATCH
    if old == new or 1 + old**2 != table_1TD.shape[1]:
        return {}
    return {name: resize_positions(table_1TD.float(), (old, old), (new, new))}


def _radzero(shapes: Shapes) -> RadZeroConfig:
    fields = encoder_fields(shapes, {}, {"name": "mpnet"})
    image = {**fields["image_arguments"], "mean": CLIP_MEAN, "std": CLIP_STD}
    return RadZeroConfig(
        **{**fields, "image_arguments": image},
        fit="squash",
        trained_layers=count(shapes, "layers."),
        layer_norm_eps=1e-6,
    )


_RADZERO = Importer(
    name="radzero",
    title="RadZero (Park et al. 2025): DINOv2 ViT-B/14 at 518 pixels, two layers above it, MPNet",
    source="deepnoid-ai/RadZero @ 524ebe1, exp/cxr_pt/model",
    table=(
        *hugging_face_dinov2("vision_model."),
        *hugging_face_dinov2_layers("align_transformer.transformer_layers.layer", "layers"),
        position_counter("text_model.embeddings."),
        drop("text_model.pooler.dense.*", "MPNet's pooler, which the system does not use"),
        keep("text_model.**", f"{TEXT}**"),
        keep(f"{_RADZERO_LOSS}layer_norm.*", "norm.*"),
        keep(f"{_RADZERO_LOSS}loss_temperature", "logit_scale", change="negative"),
    ),
    images={"resize": "bicubic_antialias"},
    system=_radzero,
    computed=_at_radzero_size,
    has_processor=True,
    note="The statistics of its pixels and the kernel of its resize are those of "
    "`preprocessor_config.json` beside the "
    "file; without it, CLIP's and bicubic, the defaults of the image processor that the "
    "released code calls. Models "
    "trained at 224 pixels are imported for 518.",
)


def _carzero(shapes: Shapes) -> CARZeroConfig:
    widths = [shapes[f"score.{number}.0.weight"][0] for number in range(3)]
    return CARZeroConfig(
        **bert_fields(shapes, "biobert"),
        projection_dim=shapes["decoder.norm.weight"][0],
        decoder_layers=count(shapes, "decoder.layers."),
        decoder_hidden=shapes["decoder.layers.0.linear1.weight"][0],
        head_dims=tuple(widths),
        padded_memory=True,
    )


_FUSION = "CARZero.fusion_module."
_LAYER = f"{_FUSION}decoder.layers.*"
_NO_SELF_ATTENTION = "self-attention of queries, which the released code creates and does not call"
_CARZERO = Importer(
    name="carzero",
    title="CARZero (Lai et al. 2024): ViT-B/16, a BERT for clinical texts, a decoder with a "
    "head of four layers",
    source="laihaoran/CARZero @ 3056bb0, "
    "CARZero/models/CARZero_model_dqn_wo_self_atten_gl_mlp.py; Lightning",
    table=(
        *vision_transformer("CARZero.img_encoder.model."),
        *bert("CARZero.text_encoder.model."),
        drop(f"{_FUSION}logit_scale", "a scale that the released code creates and does not use"),
        same(f"{_FUSION}decoder_norm.**", f"{_FUSION}decoder.norm.**"),
        drop(f"{_LAYER}.self_attn.**", _NO_SELF_ATTENTION),
        drop(f"{_LAYER}.norm1.*", f"the norm of the {_NO_SELF_ATTENTION}"),
        keep(f"{_FUSION}decoder.**", "decoder.**"),
        *(keep(f"{_FUSION}mlp_head.{3 * number}.*", f"score.{number}.0.*") for number in range(3)),
        keep(f"{_FUSION}mlp_head.9.*", "score.3.*"),
    ),
    system=_carzero,
    cleaning="words",
    note="Texts are compared as published: with their padding, up to 97 positions, and "
    "lower-cased, without "
    "punctuation. Its variant with a linear head is refused.",
)

STATEMENT_IMPORTERS = (_RADZERO, _CARZERO)
