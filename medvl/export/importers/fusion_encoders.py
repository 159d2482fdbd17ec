"""Key tables of fusion-encoders that medvl has."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from medvl.export.importers.backbones import (
    TEXT,
    bert,
    clip_image_tower,
    position_counter,
    sequential_resnet,
    tied_word_head,
    vision_transformer,
    word_head,
)
from medvl.export.importers.importer import (
    Importer,
    attention_heads,
    count,
    encoder_fields,
    image_arguments,
    text_arguments,
)
from medvl.export.importers.key_map import (
    KeyRule,
    MappedTensors,
    Shapes,
    ZeroTensor,
    drop,
    is_close,
    keep,
    same,
)
from medvl.models.fusion_encoders.albef import ALBEFConfig
from medvl.models.fusion_encoders.lxmert import LXMERTConfig
from medvl.models.fusion_encoders.m3ae import M3AEConfig
from medvl.models.fusion_encoders.medvill import MedViLLConfig
from medvl.models.fusion_encoders.parts.heads import sinusoids
from medvl.models.fusion_encoders.ptunifier import PTUnifierConfig
from medvl.models.fusion_encoders.streams import DualStreamConfig
from medvl.models.fusion_encoders.vilt import ViLTConfig
from medvl.models.fusion_encoders.visualbert import VisualBERTConfig

DECODER_POSITIONS = "mim_head.positions_ND"


def keep_decoder_positions(config: Any, mapped: MappedTensors) -> tuple[Any, MappedTensors]:
    """Return the config and the tensors with the file's positions of the pixel decoder, unless they
    are MAE's.

    MRM's released code takes frequencies from 1 down to 0.1 only, M3AE's those of MAE, down to 1 /
    10,000.
    """
    table_ND = mapped.tensors.get(DECODER_POSITIONS)
    if table_ND is None or not _is_mae(table_ND):
        return dataclasses.replace(config, stored_positions=table_ND is not None), mapped
    tensors = {name: tensor for name, tensor in mapped.tensors.items() if name != DECODER_POSITIONS}
    why = "equal to MAE's sines and cosines, which medvl computes"
    left_out = {**mapped.left_out, **dict.fromkeys(mapped.sources[DECODER_POSITIONS], why)}
    sources = {name: keys for name, keys in mapped.sources.items() if name != DECODER_POSITIONS}
    return config, dataclasses.replace(mapped, tensors=tensors, sources=sources, left_out=left_out)


def _is_mae(table_ND: Tensor) -> bool:
    if table_ND.ndim != 2 or table_ND.shape[1] % 4:
        return False
    side = round(max(len(table_ND) - 1, 0) ** 0.5)
    return is_close(table_ND, sinusoids((side, side), table_ND.shape[1]))


def bert_attention(source: str, target: str) -> list[KeyRule]:
    """Return the rules of BERT's attention with its residual and LayerNorm."""
    return [
        *(
            keep(f"{source}.self.{name}.*", f"{target}.{name}.*")
            for name in ("query", "key", "value")
        ),
        keep(f"{source}.output.dense.*", f"{target}.out.*"),
        keep(f"{source}.output.LayerNorm.*", f"{target}.norm.*"),
    ]


def bert_feed_forward(inner: str, outer: str, target: str) -> list[KeyRule]:
    """Return the rules of BERT's feed-forward layer, whose two linear layers are `inner.dense`
    and `outer.dense`.
    """
    return [
        keep(f"{inner}.dense.*", f"{target}.inner.*"),
        keep(f"{outer}.dense.*", f"{target}.outer.*"),
        keep(f"{outer}.LayerNorm.*", f"{target}.norm.*"),
    ]


def _bert_embeddings(source: str) -> list[KeyRule]:
    return [
        position_counter(f"{source}."),
        keep(f"{source}.**", f"{TEXT}embeddings.**"),
    ]


def co_attention_layer(source: str, target: str) -> list[KeyRule]:
    """Return the rules of a layer of BERT with cross-attention."""
    return [
        *bert_attention(f"{source}.attention", f"{target}.attention"),
        *bert_attention(f"{source}.crossattention", f"{target}.cross_attention"),
        *bert_feed_forward(f"{source}.intermediate", f"{source}.output", f"{target}.feed_forward"),
    ]


def pixel_decoder() -> list[KeyRule]:
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
        keep("mim_head.decoder_pos_embed", DECODER_POSITIONS, change="drop axis"),
        keep("mim_head.mask_token", "mim_head.mask_token", change="flatten"),
        keep("mim_head.decoder_embed.*", "mim_head.embed.*"),
        keep("mim_head.decoder_norm.*", "mim_head.norm.*"),
        keep("mim_head.decoder_pred.*", "mim_head.pixels.*"),
        *(
            keep(f"{block}.{source}", f"mim_head.blocks.*.{target}")
            for source, target in names.items()
        ),
    ]


def _streams(shapes: Shapes) -> dict[str, Any]:
    intermediate, width = shapes["fusion.image_layers.0.feed_forward.inner.weight"]
    return {
        **encoder_fields(shapes, {}, {"name": "roberta"}),
        "width": width,
        "layers": count(shapes, "fusion.image_layers."),
        "heads": attention_heads(width),
        "intermediate": intermediate,
    }


def m3ae_fields(shapes: Shapes) -> dict[str, Any]:
    """Return the fields of M3AE's config that the shapes determine."""
    decoder = shapes["mim_head.embed.weight"][0]
    return {
        **_streams(shapes),
        "decoder_width": decoder,
        "decoder_layers": count(shapes, "mim_head.blocks."),
        "decoder_heads": attention_heads(decoder),
        "mim_layer": min(M3AEConfig.mim_layer, count(shapes, "fusion.image_layers.")),
    }


def _ptunifier(shapes: Shapes) -> PTUnifierConfig:
    size = shapes["image_prompts.prompts_RD"][0]
    selected = {
        name: min(getattr(PTUnifierConfig, name), size)
        for name in ("image_prompts", "text_prompts")
    }
    return PTUnifierConfig(**_streams(shapes), prompts=size, **selected)


def _medvill(shapes: Shapes) -> MedViLLConfig:
    return MedViLLConfig(**encoder_fields(shapes, {}, {"name": "bert"}))


def _meter(
    image: str,
    text: str,
    sides: tuple[str, str],
    names: Mapping[str, str],
    text_layer: str = "fusion.text_layers.*",
) -> list[KeyRule]:
    """Return the rules of two encoders, two streams with co-attention, and the heads for words and
    matching.

    Args:
        image, text: names of CLIP's image tower and of the text encoder.
        sides: names of the image's and of the text's layers and poolers, before `_layers` and
            `_pooler`.
        names: those of the projections (image_input, text_input), types (modality) and heads (mlm,
            itm).
        text_layer: name of a layer of the text's stream in medvl.
    """
    vision, language = sides
    return [
        *clip_image_tower(image),
        *bert(f"{text}."),
        keep(f"{names['text_input']}.*", "text_input.*"),
        keep(f"{names['image_input']}.*", "image_input.project.*"),
        keep(f"{names['modality']}.weight", "fusion.modality.weight"),
        *co_attention_layer(f"{language}_layers.*", text_layer),
        *co_attention_layer(f"{vision}_layers.*", "fusion.image_layers.*"),
        keep(f"{language}_pooler.dense.*", "fusion.text_pooler.dense.*"),
        keep(f"{vision}_pooler.dense.*", "fusion.image_pooler.dense.*"),
        *word_head(names["mlm"], "mlm_head"),
        keep(f"{names['mlm']}.decoder.weight", "mlm_head.words.weight"),
        keep(f"{names['itm']}.fc.*", "itm_head.*"),
    ]


def m3ae_streams(text_layer: str = "fusion.text_layers.*") -> list[KeyRule]:
    """Return the rules of M3AE without its pixel decoder; `text_layer` is medvl's name of a
    layer of the text.
    """
    names = {
        "text_input": "multi_modal_language_proj",
        "image_input": "multi_modal_vision_proj",
        "modality": "modality_type_embeddings",
        "mlm": "mlm_head",
        "itm": "itm_head",
    }
    sides = "multi_modal_vision", "multi_modal_language"
    return [
        *_meter("vision_encoder", "language_encoder", sides, names, text_layer),
        *(
            drop(f"{head}_head.**", "a downstream head")
            for head in ("vqa", "cls", "irtr", "mlc", "clm")
        ),
    ]


_METER = Importer(
    name="meter",
    title="METER (Dou et al. 2022): CLIP ViT-B/16 without its last block, RoBERTa, six layers "
    "of co-attention",
    source="zdou0830/METER @ 14a23be, meter/modules/meter_module.py",
    table=(
        *_meter(
            "vit_model",
            "text_transformer",
            ("cross_modal_image", "cross_modal_text"),
            {
                "text_input": "cross_modal_text_transform",
                "image_input": "cross_modal_image_transform",
                "modality": "token_type_embeddings",
                "mlm": "mlm_score",
                "itm": "itm_score",
            },
        ),
        *(
            drop(f"{head}.**", "a downstream head")
            for head in ("vqa_classifier", "snli_classifier", "rank_output")
        ),
    ),
    images={"resize": "bicubic_antialias"},
    system=lambda shapes: DualStreamConfig(**_streams(shapes)),
    note="Models with a Swin Transformer, and those fine-tuned on NLVR2 (three types of "
    "tokens), are refused.",
)
_M3AE = Importer(
    name="m3ae",
    title="M3AE (Chen et al. 2022): CLIP ViT-B/16 without its last block, RoBERTa, six layers "
    "of co-attention",
    source="zhjohnchan/M3AE @ 14da377",
    table=(*m3ae_streams(), *pixel_decoder()),
    images={"resize": "bicubic_antialias"},
    system=lambda shapes: M3AEConfig(**m3ae_fields(shapes)),
    settle=keep_decoder_positions,
)
_MEDVILL = Importer(
    name="medvill",
    title="MedViLL (Moon et al. 2022): ResNet-50, BERT",
    source="MedViLL's train_origin.py; save_pretrained",
    table=(
        *_bert_embeddings("enc.txt_embeddings"),
        keep("enc.img_embeddings.img_embeddings.*", "image_input.*"),
        same("enc.img_embeddings.**", "enc.txt_embeddings.**"),
        *sequential_resnet("enc.img_encoder.model."),
        keep("enc.encoder.layer.**", f"{TEXT}encoder.layer.**"),
        keep("enc.pooler.dense.*", "pooler.dense.*"),
        *word_head("mlm.predictions", "mlm_head"),
        same("mlm.predictions.decoder.weight", "enc.txt_embeddings.word_embeddings.weight"),
        keep("itm.linear.*", "itm_head.*"),
    ),
    system=_medvill,
    note="The vocabulary head was published with a LayerNorm epsilon of 1e-5; here it is 1e-12. "
    "The file does not "
    "contain the attention mask of its training: the config has the paper's best one, bar.",
)

_PTUNIFIER = Importer(
    name="ptunifier",
    title="PTUnifier (Chen et al. 2023): M3AE's encoders and fusion-encoder, with pools of prompts",
    source="zhjohnchan/PTUnifier @ eee60eb",
    table=(
        *m3ae_streams(),
        keep("pseudo_vision_token_pool", "image_prompts.prompts_RD"),
        keep("pseudo_language_token_pool", "text_prompts.prompts_RD"),
        *(
            keep(f"itc_head.{source}_{part}.*", f"itc_head.{target}.{number}.*")
            for source, target in (("vision", "image"), ("language", "text"))
            for number, part in enumerate(("ln", "proj"))
        ),
    ),
    images={"resize": "bicubic_antialias"},
    system=_ptunifier,
    note="The released code trains neither the pools nor the contrastive head, which are then "
    "random in its files. Its "
    "co-attention and vocabulary head have the LayerNorm epsilon of the text encoder, 1e-5; "
    "here it is 1e-12.",
)


def _joint_text(shapes: Shapes) -> dict[str, Any]:
    text = text_arguments(shapes, {"name": "bert"})
    return {
        "text_encoder": text.pop("name"),
        "vocab_size": text.pop("vocab_size", None),
        "text_arguments": text,
    }


def _visualbert(shapes: Shapes) -> VisualBERTConfig:
    return VisualBERTConfig(
        image_encoder=f"regions:{shapes['image_input.weight'][1]}", **_joint_text(shapes)
    )


def _lxmert(shapes: Shapes) -> LXMERTConfig:
    width, features = shapes["image_input.project.weight"]
    return LXMERTConfig(
        image_encoder=f"regions:{features}+4",
        region_classes=shapes["object_head.weight"][0],
        image_layers=count(shapes, "image_layers."),
        layers=count(shapes, "cross_layers."),
        heads=attention_heads(width),
        intermediate=shapes["cross_layers.0.text_feed_forward.inner.weight"][0],
        **_joint_text(shapes),
    )


def _vilt(shapes: Shapes) -> ViLTConfig:
    image = image_arguments(shapes, {})
    embeddings = f"{TEXT}embeddings."
    words, width = shapes[f"{embeddings}word_embeddings.weight"]
    positions = shapes[f"{embeddings}position_embeddings.weight"][0]
    return ViLTConfig(
        image_encoder=image.pop("name"),
        image_size=image.pop("image_size"),
        image_arguments=image,
        vocab_size=words,
        text_arguments={
            "num_hidden_layers": 0,
            "hidden_size": width,
            "max_position_embeddings": positions,
        },
        max_tokens=positions,
    )


_VISUALBERT = Importer(
    name="visualbert",
    title="VisualBERT (Li et al. 2019): BERT over words and regions",
    source="transformers' VisualBertForPreTraining",
    table=(
        keep("visual_bert.embeddings.visual_token_type_embeddings.*", "image_types.*"),
        keep("visual_bert.embeddings.visual_position_embeddings.*", "image_positions.*"),
        keep("visual_bert.embeddings.visual_projection.*", "image_input.*"),
        *_bert_embeddings("visual_bert.embeddings"),
        keep("visual_bert.encoder.layer.**", f"{TEXT}encoder.layer.**"),
        keep("visual_bert.pooler.dense.*", "pooler.dense.*"),
        *tied_word_head(
            "cls.predictions", "visual_bert.embeddings.word_embeddings.weight", "mlm_head"
        ),
        keep("cls.seq_relationship.*", "itm_head.*", change="reverse"),
    ),
    system=_visualbert,
)
_REGIONS = "lxmert.encoder.r_layers.*"
_BOTH = "lxmert.encoder.x_layers.*"
_CROSS = {"lang": "text", "visn": "image"}
_LXMERT = Importer(
    name="lxmert",
    title="LXMERT (Tan and Bansal 2019): layers over words, over regions, and across both",
    source="transformers' LxmertForPreTraining",
    table=(
        *_bert_embeddings("lxmert.embeddings"),
        keep("lxmert.encoder.layer.**", f"{TEXT}encoder.layer.**"),
        keep("lxmert.encoder.visn_fc.visn_fc.*", "image_input.project.*"),
        keep("lxmert.encoder.visn_fc.visn_layer_norm.*", "image_input.norm.*"),
        keep("lxmert.encoder.visn_fc.box_fc.*", "image_input.project_boxes.*"),
        keep("lxmert.encoder.visn_fc.box_layer_norm.*", "image_input.norm_boxes.*"),
        *bert_attention(f"{_REGIONS}.attention", "image_layers.*.attention"),
        *bert_feed_forward(
            f"{_REGIONS}.intermediate", f"{_REGIONS}.output", "image_layers.*.feed_forward"
        ),
        *(
            keep(
                f"{_BOTH}.visual_attention.{source}.*", f"cross_layers.*.cross_attention.{target}.*"
            )
            for source, target in {
                **{f"att.{name}": name for name in ("query", "key", "value")},
                "output.dense": "out",
                "output.LayerNorm": "norm",
            }.items()
        ),
        *(
            rule
            for old, new in _CROSS.items()
            for rule in (
                *bert_attention(f"{_BOTH}.{old}_self_att", f"cross_layers.*.{new}_attention"),
                *bert_feed_forward(
                    f"{_BOTH}.{old}_inter",
                    f"{_BOTH}.{old}_output",
                    f"cross_layers.*.{new}_feed_forward",
                ),
            )
        ),
        keep("lxmert.pooler.dense.*", "pooler.dense.*"),
        *tied_word_head("cls.predictions", "lxmert.embeddings.word_embeddings.weight", "mlm_head"),
        keep("cls.seq_relationship.*", "itm_head.*"),
        keep("obj_predict_head.transform.dense.*", "region_head.0.*"),
        keep("obj_predict_head.transform.LayerNorm.*", "region_head.2.*"),
        keep("obj_predict_head.decoder_dict.obj.*", "object_head.*"),
        keep("obj_predict_head.decoder_dict.feat.*", "feature_head.*"),
        drop(
            "obj_predict_head.decoder_dict.attr.*",
            "attributes of objects, which medvl's detectors do not have",
        ),
        drop("answer_head.**", "a downstream head"),
    ),
    system=_lxmert,
)
_VILT = Importer(
    name="vilt",
    title="ViLT (Kim et al. 2021): a ViT-B/32 over words and patches",
    source="dandelin/ViLT, vilt/modules/vilt_module.py",
    table=(
        *vision_transformer("transformer."),
        *_bert_embeddings("text_embeddings"),
        keep("token_type_embeddings.weight", "modality.weight"),
        keep("pooler.dense.*", "pooler.dense.*"),
        *word_head("mlm_score", "mlm_head"),
        keep("mlm_score.decoder.weight", "mlm_head.words.weight"),
        keep("itm_score.fc.*", "itm_head.*"),
        drop("mpp_score.**", "a pretraining head that medvl's ViLT does not have"),
    ),
    images={"resize": "bicubic_antialias"},
    system=_vilt,
)

IMPORTERS = (_M3AE, _METER, _MEDVILL, _PTUNIFIER, _VISUALBERT, _LXMERT, _VILT)


# Key table of ALBEF's pretraining checkpoints, with its moving average.

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_TEXT_LAYERS = 6
_LAYERS = 12
_TEACHER = "momentum.module."


def _towers(suffix: str, target: str) -> list[KeyRule]:
    """Return the rules of the parts that the model and its moving average share.

    Args:
        suffix: end of the names in the file: "" or "_m".
        target: start of the names in medvl.
    """
    text = f"text_encoder{suffix}"
    bert = f"{text}.bert"
    words = f"{text}.cls.predictions"
    image = [
        keep(rule.source, f"{target}{rule.target}")
        for rule in vision_transformer(f"visual_encoder{suffix}.")
    ]
    fusion = [
        rule
        for layer in range(_TEXT_LAYERS, _LAYERS)
        for rule in co_attention_layer(
            f"{bert}.encoder.layer.{layer}", f"{target}fusion.{layer - _TEXT_LAYERS}"
        )
    ]
    return [
        *image,
        *fusion,
        position_counter(f"{bert}.embeddings."),
        keep(f"{bert}.embeddings.**", f"{target}{TEXT}embeddings.**"),
        *(
            keep(f"{bert}.encoder.layer.{layer}.**", f"{target}{TEXT}encoder.layer.{layer}.**")
            for layer in range(_TEXT_LAYERS)
        ),
        *tied_word_head(words, f"{bert}.embeddings.word_embeddings.weight", f"{target}mlm_head"),
        keep(f"vision_proj{suffix}.*", f"{target}image_head.*"),
        keep(f"text_proj{suffix}.*", f"{target}text_head.*"),
    ]


def _albef(shapes: Shapes) -> ALBEFConfig:
    fields = encoder_fields(shapes, {}, {"name": "bert"})
    intermediate, width = shapes["fusion.0.feed_forward.inner.weight"]
    return ALBEFConfig(
        **{
            **fields,
            "image_arguments": {**fields["image_arguments"], "mean": _CLIP_MEAN, "std": _CLIP_STD},
        },
        layers=count(shapes, "fusion."),
        heads=attention_heads(width),
        intermediate=intermediate,
        projection_dim=shapes["image_head.weight"][0],
    )


_EMPTY = "the queue of past pairs starts empty, as in every training of medvl"
_ALBEF = Importer(
    name="albef",
    title="ALBEF (Li et al. 2021): ViT-B/16, the lower half of a BERT, its upper half with "
    "cross-attention",
    source="salesforce/ALBEF @ 90541c9, models/model_pretrain.py",
    table=(
        *_towers("", ""),
        *_towers("_m", _TEACHER),
        keep("temp", "itc_head.temperature"),
        keep("itm_head.*", "itm_head.*"),
        *(
            drop(name, "past pairs of the published training")
            for name in ("image_queue", "text_queue", "queue_ptr")
        ),
    ),
    images={"resize": "bicubic_antialias"},
    cleaning="albef",
    closing=False,
    system=_albef,
    zeros=(
        *(
            ZeroTensor(name=f"itc_head.queue.{name}", why=_EMPTY)
            for name in ("image_QE", "text_QE", "names_Q", "seen")
        ),
        ZeroTensor(
            name="momentum.n_averaged",
            why="a training starts a moving average of its own from the model",
        ),
    ),
    note="When training continues, the moving average starts from the model again, and the "
    "queue is empty.",
)

ALBEF_IMPORTERS = (_ALBEF,)
