"""Key tables of report generators."""

import functools

import torch
from torch import Tensor

from medvl.export.importers.backbones import sequential_resnet
from medvl.export.importers.encoders_from_shapes import attention_heads, count, image_arguments
from medvl.export.importers.importer import Importer
from medvl.export.importers.key_map import KeyRule, Shapes, fixed, keep
from medvl.models.report_generators.layers import sines
from medvl.models.report_generators.r2gen import R2GenConfig

_MODEL = "encoder_decoder.model."


def _sines(table_1TD: Tensor) -> Tensor:
    """Return the table of positions that `RelationalMemory` computes, in the shape of the file's."""
    if table_1TD.ndim != 3:
        return table_1TD.new_empty(0)
    return sines(torch.arange(table_1TD.shape[1]), table_1TD.shape[2])[None]


def _attention(source: str, target: str) -> list[KeyRule]:
    names = ("query", "key", "value", "out")
    return [keep(f"{source}.linears.{number}.*", f"{target}.{name}.*") for number, name in enumerate(names)]


def _norm(source: str, target: str) -> list[KeyRule]:
    return [keep(f"{source}.gamma", f"{target}.weight"), keep(f"{source}.beta", f"{target}.bias")]


def _layers(source: str, target: str, attentions: dict[str, str]) -> list[KeyRule]:
    rules = [
        rule for theirs, ours in attentions.items() for rule in _attention(f"{source}.{theirs}", f"{target}.{ours}")
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
        f"{_MODEL}decoder.layers.*", "decoder.layers.*", {"self_attn": "attention", "src_attn": "cross_attention"}
    ),
    keep(f"{_MODEL}decoder.layers.*.sublayer.*.norm.mlp_gamma.*.*", "decoder.layers.*.norms.*.weight_change.*.*"),
    keep(f"{_MODEL}decoder.layers.*.sublayer.*.norm.mlp_beta.*.*", "decoder.layers.*.norms.*.bias_change.*.*"),
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
    "The file has no vocabulary: give --tokenizer, made by `medvl vocab --kind r2gen` from shards of the same "
    "annotation file (`medvl shards r2gen-annotation`), with its threshold."
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


IMPORTERS = (
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
