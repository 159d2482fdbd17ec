"""Key maps of fusion-encoders that medvl has, whole."""

from typing import Any

from medvl.export.importers.backbones import TEXT, bert, clip_image, sequential_resnet
from medvl.export.importers.encoders_from_shapes import count, heads, image_arguments, text_arguments
from medvl.export.importers.key_map import Line, Shapes, drop, keep, same
from medvl.export.importers.registry import Importer
from medvl.models.fusion_encoders.config import M3AEConfig, MedViLLConfig

_CLIP_LEFTOVER = "left over of CLIP's text tower, never used"
_MASKED_WORDS = {
    "transform.dense.*": "dense.*",
    "transform.LayerNorm.*": "norm.*",
    "bias": "bias",
}


def _bert_attention(theirs: str, ours: str) -> list[Line]:
    """One attention of a BERT layer as the fusion-encoder names it."""
    return [
        *(keep(f"{theirs}.self.{name}.*", f"{ours}.{name}.*") for name in ("query", "key", "value")),
        keep(f"{theirs}.output.dense.*", f"{ours}.out.*"),
        keep(f"{theirs}.output.LayerNorm.*", f"{ours}.norm.*"),
    ]


def _co_attention(theirs: str, ours: str) -> list[Line]:
    """The layers of one stream."""
    return [
        *_bert_attention(f"{theirs}.*.attention", f"{ours}.*.attention"),
        *_bert_attention(f"{theirs}.*.crossattention", f"{ours}.*.cross_attention"),
        keep(f"{theirs}.*.intermediate.dense.*", f"{ours}.*.feed_forward.inner.*"),
        keep(f"{theirs}.*.output.dense.*", f"{ours}.*.feed_forward.outer.*"),
        keep(f"{theirs}.*.output.LayerNorm.*", f"{ours}.*.feed_forward.norm.*"),
    ]


def _pixel_decoder() -> list[Line]:
    """CLIP's blocks by timm's names."""
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
        drop("mim_head.decoder_pos_embed", "a fixed table of sines and cosines, computed anew"),
        keep("mim_head.mask_token", "mim_head.mask_token", change="flattened"),
        keep("mim_head.decoder_embed.*", "mim_head.embed.*"),
        keep("mim_head.decoder_norm.*", "mim_head.norm.*"),
        keep("mim_head.decoder_pred.*", "mim_head.pixels.*"),
        *(keep(f"{block}.{theirs}", f"mim_head.blocks.*.{ours}") for theirs, ours in names.items()),
    ]


def _towers(shapes: Shapes, text_preset: str) -> dict[str, Any]:
    """The part of a fusion-encoder's configuration that both towers decide."""
    image, text = image_arguments(shapes, {}), text_arguments(shapes, {"name": text_preset})
    image.pop("projection", None)
    found = {
        "image_encoder": image.pop("name"),
        "text_encoder": text.pop("name"),
        "vocab_size": text.pop("vocab_size", None),
    }
    if "image_size" in image:
        found["image_size"] = image.pop("image_size")
    return {**found, "image_arguments": image, "text_arguments": text}


def _m3ae(shapes: Shapes) -> M3AEConfig:
    layers = count(shapes, "fusion.text_layers.")
    intermediate, width = shapes["fusion.text_layers.0.feed_forward.inner.weight"]
    decoder = shapes["mim_head.embed.weight"][0]
    return M3AEConfig(
        **_towers(shapes, "roberta"),
        width=width,
        layers=layers,
        heads=heads(width),
        intermediate=intermediate,
        decoder_width=decoder,
        decoder_layers=count(shapes, "mim_head.blocks."),
        decoder_heads=heads(decoder),
        mim_layer=min(M3AEConfig.mim_layer, layers),
    )


def _medvill(shapes: Shapes) -> MedViLLConfig:
    return MedViLLConfig(**_towers(shapes, "bert"))


_M3AE = Importer(
    name="m3ae",
    title="M3AE (Chen et al. 2022): CLIP ViT-B/16 without its last block, RoBERTa, six layers of co-attention",
    source="zhjohnchan/M3AE @ 14da377",
    table=(
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
        *(keep(f"mlm_head.{theirs}", f"mlm_head.{ours}") for theirs, ours in _MASKED_WORDS.items()),
        keep("mlm_head.decoder.weight", "mlm_head.words.weight"),
        *_pixel_decoder(),
        keep("itm_head.fc.*", "itm_head.*"),
        *(drop(f"{head}_head.**", "a downstream head") for head in ("vqa", "cls", "irtr")),
    ),
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
        *(keep(f"mlm.predictions.{theirs}", f"mlm_head.{ours}") for theirs, ours in _MASKED_WORDS.items()),
        same("mlm.predictions.decoder.weight", "enc.txt_embeddings.word_embeddings.weight"),
        keep("itm.linear.*", "itm_head.*"),
    ),
    system=_medvill,
    note="The head over the vocabulary was published with a LayerNorm epsilon of 1e-5; here it is 1e-12. The file does "
    "not say which attention mask it was trained with: the configuration says the paper's best, bar.",
)

IMPORTERS = (_M3AE, _MEDVILL)
