"""Key tables of systems with a book of queries: KAD's file has its text encoder, MedKLIP's and MAVL's have none."""

import dataclasses
from pathlib import Path
from typing import Any

from medvl.common.untrusted import ANYWHERE, parse_json, read_limited
from medvl.data.reports.aspects import ASPECTS
from medvl.errors import ConfigError
from medvl.export.importers.backbones import TEXT, bert, bert_file, resnet, sequential_resnet
from medvl.export.importers.encoders_from_shapes import bert_fields, count, image_arguments, text_arguments
from medvl.export.importers.importer import EntityFile, Importer
from medvl.export.importers.key_map import Shapes, ZeroTensor, drop, keep, same
from medvl.models.dual_encoders.kad import KADConfig
from medvl.models.dual_encoders.mavl import MAVLConfig
from medvl.models.dual_encoders.medklip import MedKLIPConfig

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
_CLINICAL_BERT = "the text encoder, emilyalsentzer/Bio_ClinicalBERT (pytorch_model.bin or model.safetensors)"


def with_entities(config: Any, path: Path) -> tuple[Any, dict[str, Any]]:
    """Return the config of a system with the entities of a JSON file, and no tensors.

    The file is an object, name -> sentence of the query, or a list of names, which keep the system's own sentences.

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
    return dataclasses.replace(config, entities=names, descriptions=descriptions, aspects=aspects), {}


def _read_entities(path: Path, size: int) -> tuple[tuple[str, ...], dict[str, list[str]]]:
    """Return the names of a JSON file, and the sentences of each if it has them, which are `size`."""
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
    image, text = image_arguments(shapes, {"image_size": 512}), text_arguments(shapes, {"name": "pubmedbert"})
    width = shapes["image_head.0.weight"][1]  # of the third stage, at 224 pixels, or of the last one
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
    title="MedKLIP (Wu et al. 2023): three stages of a ResNet-50, its decoder; Bio_ClinicalBERT from a second file",
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
    entities=EntityFile(title="its `observation explanation.json`, name -> sentence", read=with_entities),
    zeros=_BOOKS,
    note="Queries attend to each other: without the entities of its training (75 in `observation explanation.json` of "
    "its repository), scores are not those of the published system. Its 51 places are replaced by those of medvl.",
)
_MAVL = Importer(
    name="mavl",
    title="MAVL (Phan et al. 2024): three stages of a ResNet-50, its decoder; Bio_ClinicalBERT from a second file",
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
    entities=EntityFile(title="JSON, name -> list of its definition and seven aspects", read=with_aspects),
    zeros=_BOOKS,
    note="Queries attend to each other: without the entities of its training (75, with `observation explanation.json` "
    "and `gpt4_mimic.json` of its repository), scores are not those of the published system. Its 51 places are "
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
    zeros=(ZeroTensor(name="book.vectors_QD", why=_BOOK), ZeroTensor(name="book.sha256", why=_BOOK)),
    note="Entities are queried by their names. The file does not hold those of its training.",
)

IMPORTERS = (_MEDKLIP, _MAVL, _KAD)
