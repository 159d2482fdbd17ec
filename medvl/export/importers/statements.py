"""Key tables of systems that compare statements with the patches of an image: RadZero and CARZero."""

from collections.abc import Mapping

from torch import Tensor

from medvl.encoders.presets import CLIP_MEAN, CLIP_STD
from medvl.export.importers.backbones import (
    IMAGE,
    TEXT,
    bert,
    hugging_face_dinov2,
    hugging_face_dinov2_layers,
    position_counter,
    vision_transformer,
)
from medvl.export.importers.encoders_from_shapes import bert_fields, count, encoder_fields
from medvl.export.importers.importer import Importer
from medvl.export.importers.key_map import Shapes, drop, keep, same
from medvl.models.downstream.image_size import resize_positions
from medvl.models.dual_encoders.carzero import CARZeroConfig
from medvl.models.dual_encoders.radzero import RadZeroConfig

_RADZERO_LOSS = "loss_fns.RadZeroLoss."
_PIXELS, _PATCH = RadZeroConfig.image_size, 14


def _at_radzero_size(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the positions of a DINOv2 at 518 pixels, interpolated as its released code does in each forward pass."""
    name = f"{IMAGE}pos_embed"
    table_1TD = tensors.get(name)
    if table_1TD is None or table_1TD.ndim != 3:
        return {}
    old, new = round(max(table_1TD.shape[1] - 1, 0) ** 0.5), _PIXELS // _PATCH
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
    note="The statistics of its pixels and the kernel of its resize are those of `preprocessor_config.json` beside the "
    "file; without it, CLIP's and bicubic, the defaults of the image processor that the released code calls. Models "
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
    title="CARZero (Lai et al. 2024): ViT-B/16, a BERT for clinical texts, a decoder with a head of four layers",
    source="laihaoran/CARZero @ 3056bb0, CARZero/models/CARZero_model_dqn_wo_self_atten_gl_mlp.py; Lightning",
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
    note="Texts are compared as published: with their padding, up to 97 positions, and lower-cased, without "
    "punctuation. Its variant with a linear head is refused.",
)

IMPORTERS = (_RADZERO, _CARZERO)
