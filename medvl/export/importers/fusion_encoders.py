"""Key tables of fusion-encoders that medvl has."""

from typing import Any

from medvl.export.importers.backbones import TEXT, WORD_HEAD, bert, clip_image, sequential_resnet
from medvl.export.importers.encoders_from_shapes import attention_heads, count, image_arguments, text_arguments
from medvl.export.importers.importer import Importer
from medvl.export.importers.key_map import KeyRule, Shapes, drop, keep, same
from medvl.models.fusion_encoders.m3ae import M3AEConfig
from medvl.models.fusion_encoders.medvill import MedViLLConfig
from medvl.models.fusion_encoders.ptunifier import PTUnifierConfig

_CLIP_LEFTOVER = "a remainder of CLIP's text encoder, never used"


def _bert_attention(source: str, target: str) -> list[KeyRule]:
    return [
        *(keep(f"{source}.self.{name}.*", f"{target}.{name}.*") for name in ("query", "key", "value")),
        keep(f"{source}.output.dense.*", f"{target}.out.*"),
        keep(f"{source}.output.LayerNorm.*", f"{target}.norm.*"),
    ]


def _co_attention(source: str, target: str) -> list[KeyRule]:
    return [
        *_bert_attention(f"{source}.*.attention", f"{target}.*.attention"),
        *_bert_attention(f"{source}.*.crossattention", f"{target}.*.cross_attention"),
        keep(f"{source}.*.intermediate.dense.*", f"{target}.*.feed_forward.inner.*"),
        keep(f"{source}.*.output.dense.*", f"{target}.*.feed_forward.outer.*"),
        keep(f"{source}.*.output.LayerNorm.*", f"{target}.*.feed_forward.norm.*"),
    ]


def _pixel_decoder() -> list[KeyRule]:
    """Return the rules of the pixel decoder: CLIP's names -> timm's."""
    block = "mim_head.decoder.resblocks.*"
    names = {
        "attn.in_proj_weight": "attn.qkv.weight",
        "attn.in_proj_bias": "attn.qkv.bias",
        "attn.out_proj.*": "attn.proj.*",
        "ln_1.*": "norm1.*",
        "ln_2.*": "norm2.*",
        "mlp.c_fc.*": "mlp.fc1.*",
        "mlp.c_proj.*": "mlp.fc2.*",
    }
    return [
        drop("mim_head.decoder_pos_embed", "a fixed table of sines and cosines, which medvl computes"),
        keep("mim_head.mask_token", "mim_head.mask_token", change="flatten"),
        keep("mim_head.decoder_embed.*", "mim_head.embed.*"),
        keep("mim_head.decoder_norm.*", "mim_head.norm.*"),
        keep("mim_head.decoder_pred.*", "mim_head.pixels.*"),
        *(keep(f"{block}.{source}", f"mim_head.blocks.*.{target}") for source, target in names.items()),
    ]


def _encoders(shapes: Shapes, text_preset: str) -> dict[str, Any]:
    image, text = image_arguments(shapes, {}), text_arguments(shapes, {"name": text_preset})
    image.pop("projection", None)
    fields = {
        "image_encoder": image.pop("name"),
        "text_encoder": text.pop("name"),
        "vocab_size": text.pop("vocab_size", None),
    }
    if "image_size" in image:
        fields["image_size"] = image.pop("image_size")
    return {**fields, "image_arguments": image, "text_arguments": text}


def _streams(shapes: Shapes) -> dict[str, Any]:
    intermediate, width = shapes["fusion.text_layers.0.feed_forward.inner.weight"]
    return {
        **_encoders(shapes, "roberta"),
        "width": width,
        "layers": count(shapes, "fusion.text_layers."),
        "heads": attention_heads(width),
        "intermediate": intermediate,
    }


def _m3ae(shapes: Shapes) -> M3AEConfig:
    decoder = shapes["mim_head.embed.weight"][0]
    return M3AEConfig(
        **_streams(shapes),
        decoder_width=decoder,
        decoder_layers=count(shapes, "mim_head.blocks."),
        decoder_heads=attention_heads(decoder),
        mim_layer=min(M3AEConfig.mim_layer, count(shapes, "fusion.text_layers.")),
    )


def _ptunifier(shapes: Shapes) -> PTUnifierConfig:
    size = shapes["image_prompts.prompts_RD"][0]
    selected = {name: min(getattr(PTUnifierConfig, name), size) for name in ("image_prompts", "text_prompts")}
    return PTUnifierConfig(**_streams(shapes), prompts=size, **selected)


def _medvill(shapes: Shapes) -> MedViLLConfig:
    return MedViLLConfig(**_encoders(shapes, "bert"))


_METER = (
    *clip_image("vision_encoder.visual."),
    drop("vision_encoder.positional_embedding", _CLIP_LEFTOVER),
    drop("vision_encoder.token_embedding.weight", _CLIP_LEFTOVER),
    drop("vision_encoder.ln_final.*", _CLIP_LEFTOVER),
    *bert("language_encoder."),
    keep("multi_modal_language_proj.*", "text_input.*"),
    keep("multi_modal_vision_proj.*", "image_input.project.*"),
    keep("modality_type_embeddings.weight", "fusion.modality.weight"),
    *_co_attention("multi_modal_language_layers", "fusion.text_layers"),
    *_co_attention("multi_modal_vision_layers", "fusion.image_layers"),
    keep("multi_modal_language_pooler.dense.*", "fusion.text_pooler.dense.*"),
    keep("multi_modal_vision_pooler.dense.*", "fusion.image_pooler.dense.*"),
    *(keep(f"mlm_head.{source}", f"mlm_head.{target}") for source, target in WORD_HEAD.items()),
    keep("mlm_head.decoder.weight", "mlm_head.words.weight"),
    keep("itm_head.fc.*", "itm_head.*"),
    *(drop(f"{head}_head.**", "a downstream head") for head in ("vqa", "cls", "irtr", "mlc", "clm")),
)
"""Both encoders, two streams and the heads for words and matching, as in METER's code."""

_M3AE = Importer(
    name="m3ae",
    title="M3AE (Chen et al. 2022): CLIP ViT-B/16 without its last block, RoBERTa, six layers of co-attention",
    source="zhjohnchan/M3AE @ 14da377",
    table=(*_METER, *_pixel_decoder()),
    system=_m3ae,
)
_MEDVILL = Importer(
    name="medvill",
    title="MedViLL (Moon et al. 2022): ResNet-50, BERT",
    source="MedViLL's train_origin.py; save_pretrained",
    table=(
        drop("enc.txt_embeddings.position_ids", "a counter that older transformers stored"),
        keep("enc.txt_embeddings.**", f"{TEXT}embeddings.**"),
        keep("enc.img_embeddings.img_embeddings.*", "image_input.*"),
        same("enc.img_embeddings.**", "enc.txt_embeddings.**"),
        *sequential_resnet("enc.img_encoder.model."),
        keep("enc.encoder.layer.**", f"{TEXT}encoder.layer.**"),
        keep("enc.pooler.dense.*", "pooler.dense.*"),
        *(keep(f"mlm.predictions.{source}", f"mlm_head.{target}") for source, target in WORD_HEAD.items()),
        same("mlm.predictions.decoder.weight", "enc.txt_embeddings.word_embeddings.weight"),
        keep("itm.linear.*", "itm_head.*"),
    ),
    system=_medvill,
    note="The vocabulary head was published with a LayerNorm epsilon of 1e-5; here it is 1e-12. The file does not "
    "contain the attention mask of its training: the config has the paper's best one, bar.",
)

_PTUNIFIER = Importer(
    name="ptunifier",
    title="PTUnifier (Chen et al. 2023): M3AE's encoders and fusion-encoder, with pools of prompts",
    source="zhjohnchan/PTUnifier @ eee60eb",
    table=(
        *_METER,
        keep("pseudo_vision_token_pool", "image_prompts.prompts_RD"),
        keep("pseudo_language_token_pool", "text_prompts.prompts_RD"),
        *(
            keep(f"itc_head.{source}_{part}.*", f"itc_head.{target}.{number}.*")
            for source, target in (("vision", "image"), ("language", "text"))
            for number, part in enumerate(("ln", "proj"))
        ),
    ),
    system=_ptunifier,
    note="The released code trains neither the pools nor the contrastive head, which are then random in its files.",
)

IMPORTERS = (_M3AE, _MEDVILL, _PTUNIFIER)
