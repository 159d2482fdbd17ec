"""Key table of ALBEF's pretraining checkpoints, with its moving average."""

from medvl.export.importers.backbones import TEXT, position_counter, tied_word_head, vision_transformer
from medvl.export.importers.encoders_from_shapes import attention_heads, count, encoder_fields
from medvl.export.importers.fusion_encoders import co_attention_layer
from medvl.export.importers.importer import Importer
from medvl.export.importers.key_map import KeyRule, Shapes, ZeroTensor, drop, keep
from medvl.models.fusion_encoders.albef import ALBEFConfig

_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_TEXT_LAYERS, _LAYERS = 6, 12
_TEACHER = "momentum.module."


def _towers(suffix: str, target: str) -> list[KeyRule]:
    """Return the rules of the parts that the model and its moving average share.

    Args:
        suffix: end of the names in the file: "" or "_m".
        target: start of the names in medvl.
    """
    text = f"text_encoder{suffix}"
    bert, words = f"{text}.bert", f"{text}.cls.predictions"
    image = [keep(rule.source, f"{target}{rule.target}") for rule in vision_transformer(f"visual_encoder{suffix}.")]
    fusion = [
        rule
        for layer in range(_TEXT_LAYERS, _LAYERS)
        for rule in co_attention_layer(f"{bert}.encoder.layer.{layer}", f"{target}fusion.{layer - _TEXT_LAYERS}")
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
        **{**fields, "image_arguments": {**fields["image_arguments"], "mean": _CLIP_MEAN, "std": _CLIP_STD}},
        layers=count(shapes, "fusion."),
        heads=attention_heads(width),
        intermediate=intermediate,
        projection_dim=shapes["image_head.weight"][0],
    )


_EMPTY = "the queue of past pairs starts empty, as in every training of medvl"
_ALBEF = Importer(
    name="albef",
    title="ALBEF (Li et al. 2021): ViT-B/16, the lower half of a BERT, its upper half with cross-attention",
    source="salesforce/ALBEF @ 90541c9, models/model_pretrain.py",
    table=(
        *_towers("", ""),
        *_towers("_m", _TEACHER),
        keep("temp", "itc_head.temperature"),
        keep("itm_head.*", "itm_head.*"),
        *(drop(name, "past pairs of the published training") for name in ("image_queue", "text_queue", "queue_ptr")),
    ),
    images={"resize": "bicubic_antialias"},
    cleaning="albef",
    closing=False,
    system=_albef,
    zeros=(
        *(ZeroTensor(name=f"itc_head.queue.{name}", why=_EMPTY) for name in ("image_QE", "text_QE", "names_Q", "seen")),
        ZeroTensor(name="momentum.n_averaged", why="a training starts a moving average of its own from the model"),
    ),
    note="When training continues, the moving average starts from the model again, and the queue is empty.",
)

IMPORTERS = (_ALBEF,)
