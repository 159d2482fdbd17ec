"""Key tables of dual-encoders that medvl has: encoders, heads and temperature."""

import dataclasses
import difflib
from typing import Any

from medvl.errors import ConfigError
from medvl.export.importers import backbones
from medvl.export.importers.backbones import TEXT, TEXT_PROJECTION, bert, resnet, sequential_resnet
from medvl.export.importers.importer import Importer, bert_fields, encoder_fields
from medvl.export.importers.key_map import Change, KeyRule, Shapes, ZeroTensor, drop, keep
from medvl.models.dual_encoders.biovil import BioViLConfig
from medvl.models.dual_encoders.biovil_t import BioViLTConfig
from medvl.models.dual_encoders.chexzero import CheXzeroConfig
from medvl.models.dual_encoders.clip import CLIPConfig
from medvl.models.dual_encoders.convirt import ConVIRTConfig
from medvl.models.dual_encoders.cxrclip import CXRCLIPConfig
from medvl.models.dual_encoders.gloria import GLoRIAConfig
from medvl.models.dual_encoders.lovt import LoVTConfig
from medvl.models.dual_encoders.medclip import MedCLIPConfig
from medvl.models.dual_encoders.mgca import MGCAConfig
from medvl.models.dual_encoders.siglip import SigLIPConfig

MEDCLIP_RESNET_HEAD = "vision_model.model.fc"
"""Name of the image head beside a ResNet; beside Swin it has another one."""
_SIZES = ("input_resolution", "context_length", "vocab_size")

_OPEN_CLIP: tuple[KeyRule, ...] = (
    *backbones.clip_image("visual."),
    *backbones.clip_text("text."),
    *backbones.clip_text(""),
    keep("logit_scale", "logit_scale", change="scalar"),
    keep("logit_bias", "logit_bias", change="scalar"),
    *(drop(name, "a size, not a parameter") for name in _SIZES),
)


def _chexzero(shapes: Shapes) -> CLIPConfig:
    return CheXzeroConfig(**encoder_fields(shapes, {}, {}))


def _biomedclip(shapes: Shapes) -> CLIPConfig:
    fields = encoder_fields(shapes, {"name": "biomedclip"}, {"name": "biomedclip_text"})
    return CLIPConfig(**fields, max_tokens=256)


def _medclip(shapes: Shapes) -> MedCLIPConfig:
    fields = encoder_fields(shapes, {}, {"name": "bioclinicalbert"})
    return MedCLIPConfig(**fields, projection_dim=shapes["image_head.weight"][0])


def _cxrclip(shapes: Shapes) -> CXRCLIPConfig:
    swin = any(".relative_position_bias_table" in name for name in shapes)
    return CXRCLIPConfig(
        **encoder_fields(shapes, {}, {"name": "bioclinicalbert"}),
        projection_dim=shapes["image_head.weight"][0],
        image_pool="first" if swin else "encoder",
    )


def _gloria(shapes: Shapes) -> GLoRIAConfig:
    return GLoRIAConfig(
        **bert_fields(shapes, "bioclinicalbert"), projection_dim=shapes["image_head.weight"][0]
    )


def _mgca(shapes: Shapes) -> MGCAConfig:
    fields = bert_fields(shapes, "bioclinicalbert")
    if "image_size" in fields:  # a ViT, which takes images of its own size only
        fields |= {"encoder_size": None, "patch_level": -1}
    return MGCAConfig(
        **fields,
        projection_dim=shapes["image_head.outer.weight"][0],
        hidden_dim=shapes["image_head.inner.weight"][0],
        num_prototypes=shapes["prototype_layer.weight"][0],
    )


def _lovt(shapes: Shapes) -> LoVTConfig:
    return LoVTConfig(
        **bert_fields(shapes, "bioclinicalbert"),
        max_tokens=shapes[f"{TEXT}embeddings.position_embeddings.weight"][0],
        projection_dim=shapes["image_head.outer.weight"][0],
        hidden_dim=shapes["image_head.inner.weight"][0],
        frozen_text_layers=0,
    )


def _convirt(shapes: Shapes) -> ConVIRTConfig:
    return ConVIRTConfig(
        **bert_fields(shapes, "bioclinicalbert"),
        projection_dim=shapes["image_head.2.weight"][0],
        **_convirt_heads(shapes),
    )


def _convirt_heads(shapes: Shapes) -> dict[str, Any]:
    """Return the heads' hidden width if it differs from that of their input."""
    widths = {shapes[f"{side}_head.0.weight"] for side in ("image", "text")}
    if all(hidden == width for hidden, width in widths):
        return {}
    return {"hidden_dim": max(hidden for hidden, _ in widths)}


def _convirt_pytorch(shapes: Shapes) -> ConVIRTConfig:
    return dataclasses.replace(_convirt(shapes), text_pool="mean")


def open_clip_importer(model: str) -> Importer:
    """Return the importer of an open_clip model whose image and text encoder are both open_clip's
    own.

    Raises ConfigError if open_clip has no such model.
    """
    import open_clip

    fields = open_clip.get_model_config(model)
    if fields is None:
        near = difflib.get_close_matches(model, open_clip.list_models(), n=3)
        message = f"open_clip has no model {model!r}: did you mean {', '.join(near) or 'another'}?"
        raise ConfigError(message, "unknown_name", field="system")
    text = fields.get("text_cfg", {})
    name = f"open_clip:{model}"
    size = fields["vision_cfg"].get("image_size", 224)

    def system(shapes: Shapes) -> CLIPConfig:
        config = SigLIPConfig if "logit_bias" in shapes else CLIPConfig
        tokens = text.get("context_length", 77)
        return config(image_encoder=name, text_encoder=name, image_size=size, max_tokens=tokens)

    return Importer(
        name=name,
        title=f"open_clip's {model}",
        source="mlfoundations/open_clip @ 89fb801",
        table=_OPEN_CLIP,
        images={"resize": "bicubic_antialias"},
        system=system,
        tokenizer=None if text.get("hf_tokenizer_name") else "clip",
    )


def _relu_head(first: str, second: str, side: str) -> list[KeyRule]:
    return [keep(f"{first}.*", f"{side}_head.0.*"), keep(f"{second}.*", f"{side}_head.2.*")]


def _batch_norm_heads(source: str, whole: str, local: str) -> list[KeyRule]:
    """Return the rules of the two heads of one side of MGCA."""
    layers = {"0.weight": "inner.weight", "0.bias": "inner.bias", "1.*": "norm.*"}
    layers |= {"3.weight": "outer.weight", "3.bias": "outer.bias", "4.*": "output_norm.*"}
    return [
        keep(f"{source}.{kind}_embed.head.{key}", f"{target}.{name}", change=_kernel(kind, name))
        for kind, target in (("global", whole), ("local", local))
        for key, name in layers.items()
    ]


def _lovt_side(model: str, whole: str, local: str, pool: str) -> list[KeyRule]:
    """Return the rules of the heads and the pooling of one side of LoVT."""
    rules = [keep(f"{model}.encoder.global_aggregator.**", f"{pool}.**")]
    layers = {
        "projection_before.weight": "inner.weight",
        "projection_before.bias": "inner.bias",
        "norm.*": "norm.*",
    }
    layers |= {"projection_after.weight": "outer.weight", "projection_after.bias": "outer.bias"}
    rules += [
        keep(f"{model}.project_{kind}.{key}", f"{target}.{name}", change=_kernel(kind, name))
        for kind, target in (("global", whole), ("local", local))
        for key, name in layers.items()
    ]
    return rules


def _kernel(kind: str, name: str) -> Change:
    """Return the change of a layer's weight: local heads have convolutions of width 1 over
    tokens or regions.
    """
    return (
        "conv1d to linear"
        if kind == "local" and name in ("inner.weight", "outer.weight")
        else "none"
    )


_GLORIA_TOWERS = (*resnet("gloria.img_encoder.model."), *bert("gloria.text_encoder.model."))
_GLORIA = Importer(
    name="gloria",
    title="GLoRIA (Huang et al. 2021): ResNet-50, Bio_ClinicalBERT",
    source="marshuang80/gloria; Lightning, prefix gloria.",
    table=(
        *_GLORIA_TOWERS,
        keep("gloria.img_encoder.global_embedder.*", "image_head.*"),
        keep(
            "gloria.img_encoder.local_embedder.weight",
            "region_head.weight",
            change="conv to linear",
        ),
    ),
    system=_gloria,
)
_GLORIA_ENCODERS = Importer(
    name="gloria_encoders",
    title="GLoRIA's encoders alone: for its ResNet-18, whose regions do not have the width of "
    "their projection",
    source=_GLORIA.source,
    image={"image_size": 299, "mean": (0.5,), "std": (0.5,)},
    text={"name": "bioclinicalbert", "layers": (-1, -2, -3, -4), "reduce": "sum"},
    table=(
        *_GLORIA_TOWERS,
        drop("gloria.img_encoder.global_embedder.*", "the projection of the whole image"),
        drop("gloria.img_encoder.local_embedder.*", "the projection of regions"),
    ),
)

_CONVIRT_NOTE = (
    "The pixel statistics are ImageNet's, the encoder's default; those of the "
    "published code are not known."
)

IMPORTERS = (
    _GLORIA,
    _GLORIA_ENCODERS,
    Importer(
        name="chexzero",
        title="CheXzero (Tiu et al. 2022): CLIP ViT-B/32, or its ViT of 320 pixels",
        source="rajpurkarlab/CheXzero @ 5c341db; the names of OpenAI's CLIP",
        table=_OPEN_CLIP,
        system=_chexzero,
        tokenizer="clip",
    ),
    Importer(
        name="biomedclip",
        title="BiomedCLIP (Zhang et al. 2023): ViT-B/16, PubMedBERT",
        source="mlfoundations/open_clip @ 89fb801",
        table=(
            *backbones.clip_image("visual."),
            *bert("text.transformer."),
            keep("text.proj.**", f"{TEXT_PROJECTION}**"),
            keep("logit_scale", "logit_scale", change="scalar"),
        ),
        images={"resize": "bicubic_antialias"},
        system=_biomedclip,
    ),
    Importer(
        name="medclip",
        title="MedCLIP (Wang et al. 2022): ResNet-50 or Swin-T, Bio_ClinicalBERT",
        source="MedCLIP's MedCLIPModel.from_pretrained",
        table=(
            keep(f"{MEDCLIP_RESNET_HEAD}.weight", "image_head.weight"),
            keep("vision_model.projection_head.weight", "image_head.weight"),
            *backbones.hugging_face_swin("vision_model.model."),
            *resnet("vision_model.model."),
            *bert("text_model.model."),
            keep("text_model.projection_head.weight", "text_head.weight"),
            keep("logit_scale", "logit_scale", change="scalar"),
        ),
        images={"resize": "bicubic_antialias", "pad_first": True},
        system=_medclip,
        note="The released code averages over padding as well; here the mean is over real tokens.",
    ),
    Importer(
        name="cxrclip",
        title="CXR-CLIP (You et al. 2023): ResNet-50 or Swin-T, Bio_ClinicalBERT",
        source="Soombit-ai/cxr-clip @ 3118885",
        table=(
            *resnet("image_encoder.resnet."),
            *backbones.hugging_face_swin("image_encoder.image_encoder."),
            *bert("text_encoder.text_encoder."),
            keep("image_projection.projection.*", "image_head.*"),
            keep("text_projection.projection.*", "text_head.*"),
            keep("logit_scale", "logit_scale", change="scalar"),
        ),
        system=_cxrclip,
        note="Pixels are normalised as published: by ImageNet's statistics for a ResNet, by 0.5 "
        "and 0.5 for a Swin.",
    ),
    Importer(
        name="lovt",
        title="LoVT (Mueller et al. 2022): ResNet-50, Bio_ClinicalBERT",
        source="LoVT's repository, src/models; Lightning, no prefix",
        table=(
            *resnet("model_a.encoder.feature_extractor.backbone_layers."),
            *bert("model_b.encoder.language_model."),
            *_lovt_side("model_a", "image_head", "region_head", "region_pool"),
            *_lovt_side("model_b", "text_head", "word_head", "sentence_pool"),
            *(
                keep(f"ll_attention.{key}_projection.*", f"cross_attention.{name}.*")
                for key, name in {"key": "key", "value": "value", "output": "out"}.items()
            ),
            keep("ll_attention.norm.*", "cross_attention.norm.*"),
            drop(
                "loss_module.**",
                "tables of the local loss, which depend on the sizes of its inputs",
            ),
            drop("chexpert_bin_*.**", "online evaluation"),
        ),
        system=_lovt,
        note="The released code divides a report's query by the longest report of its batch; "
        "here it is the mean. "
        f"{_CONVIRT_NOTE}",
    ),
    Importer(
        name="mgca",
        title="MGCA (Wang et al. 2022): ResNet-50 or ViT-B/16, the lower half of Bio_ClinicalBERT",
        source="HKU-MedAI/MGCA; Lightning, no prefix",
        table=(
            *backbones.vision_transformer("img_encoder_q.model."),
            *resnet("img_encoder_q.model."),
            drop(
                "text_encoder_q.model.encoder.layer.*.crossattention.**",
                "cross-attention, unused for text alone",
            ),
            *bert("text_encoder_q.model."),
            *_batch_norm_heads("img_encoder_q", "image_head", "region_head"),
            *_batch_norm_heads("text_encoder_q", "text_head", "word_head"),
            keep("prototype_layer.weight", "prototype_layer.weight"),
            drop(
                "*_local_atten_layer.**",
                "attention between words and patches, for an option that MGCA does not use",
            ),
        ),
        system=_mgca,
        zeros=(
            ZeroTensor(
                name=f"{TEXT}embeddings.token_type_embeddings.weight",
                why="its BERT has no token types: adding zeros is the same",
            ),
        ),
        note="The released code removes punctuation and has the last token, [SEP], among the "
        "words.",
    ),
    Importer(
        name="convirt_pytorch",
        title="ConVIRT-pytorch (unofficial): ResNet-50, Bio_ClinicalBERT, mean over tokens",
        source="edreisMD/ConVIRT-pytorch @ c99ca5f",
        table=(
            *sequential_resnet("res_features."),
            *bert("bert_model."),
            *_relu_head("res_l1", "res_l2", "image"),
            *_relu_head("bert_l1", "bert_l2", "text"),
        ),
        system=_convirt_pytorch,
        note=_CONVIRT_NOTE,
    ),
    Importer(
        name="convirt_lovt",
        title="ConVIRT as in LoVT's repository: ResNet-50, Bio_ClinicalBERT, max over tokens",
        source="LoVT's repository, src/models; Lightning, no prefix",
        table=(
            *resnet("model_a.encoder.feature_extractor.backbone_layers."),
            *bert("model_b.encoder.language_model."),
            *_relu_head(
                "model_a.project_global.projection_before",
                "model_a.project_global.projection_after",
                "image",
            ),
            *_relu_head(
                "model_b.project_global.projection_before",
                "model_b.project_global.projection_after",
                "text",
            ),
            drop("model_*.project_local.**", "local projections, which its ConVIRT never trains"),
            drop(
                "ll_attention.**",
                "attention between regions and sentences, which its ConVIRT never trains",
            ),
            drop("chexpert_bin_*.**", "online evaluation"),
        ),
        system=lambda shapes: dataclasses.replace(_convirt(shapes), fit="pad"),
        note=f"Its maximum is over sentences first, here over all tokens at once. {_CONVIRT_NOTE}",
    ),
    Importer(
        name="convirt_vilmedic",
        title="ConVIRT as in ViLMedic and BenchX: ResNet-50, Bio_ClinicalBERT",
        source="yangzhou12/BenchX @ b874fa6, its table of prefixes",
        table=(
            *resnet("visual.model."),
            *bert("linguistic.encoder."),
            *_relu_head("vis_proj.0", "vis_proj.2", "image"),
            *_relu_head("lin_proj.0", "lin_proj.2", "text"),
        ),
        system=_convirt,
        note=f"Its keys were not published, only their prefixes; a file with other keys is "
        f"refused. {_CONVIRT_NOTE}",
    ),
)


# Key tables of BioViL and BioViL-T: an image model and a text model in files of their own,
# together or apart.

_SOURCE = "microsoft/hi-ml @ b67c1d2"
_HEAD = "a projection of image or words, for the complete system"
_NOTE = (
    "The training code was not released: temperatures and weights of the losses in the "
    "config are not confirmed."
)


def _biovil(shapes: Shapes) -> BioViLConfig:
    return BioViLConfig(**_settings(shapes))


def _biovil_t(shapes: Shapes) -> BioViLTConfig:
    blocks = {name.split(".")[2] for name in shapes if name.startswith("pooler.blocks.")}
    return BioViLTConfig(
        **_settings(shapes),
        pooler_dim=shapes["patch_head.weight"][0],
        pooler_blocks=max(len(blocks), 1),
    )


def _settings(shapes: Shapes) -> dict[str, Any]:
    positions = shapes[f"{TEXT}embeddings.position_embeddings.weight"][0]
    return {
        **bert_fields(shapes, "cxrbert"),
        "max_tokens": min(BioViLConfig.max_tokens, positions),
        "projection_dim": shapes["image_head.outer.weight"][0],
    }


def _pooler() -> list[KeyRule]:
    """Return the rules of the pooler over an image and its prior image."""
    source = "encoder.vit_pooler.blocks.*"
    target = "pooler.blocks.*"
    qkv = (
        keep(f"{source}.attn.proj_{name}.weight", f"{target}.attn.qkv.weight", part=(index, 3))
        for index, name in enumerate("qkv")
    )
    same_names = ("norm1.*", "norm2.*", "attn.proj.*", "mlp.fc1.*", "mlp.fc2.*")
    return [
        *qkv,
        *(keep(f"{source}.{name}", f"{target}.{name}") for name in same_names),
        keep("encoder.vit_pooler.type_embed", "pooler.type_embed"),
        keep("encoder.vit_pooler.norm_post.*", "pooler.norm.*"),
        keep("encoder.backbone_to_vit.weight", "patch_head.weight", change="conv to linear"),
        keep("encoder.missing_previous_emb", "missing_prior", change="flatten"),
    ]


_RESNET = (
    drop(
        "encoder.encoder.fc.*",
        "the ImageNet classifier, which BioViL's loader requires but never uses",
    ),
    *resnet("encoder.encoder."),
)
_PROJECTOR = (
    keep("projector.model.0.weight", "image_head.inner.weight", change="conv to linear"),
    keep("projector.model.1.*", "image_head.norm.*"),
    keep("projector.model.3.weight", "image_head.outer.weight", change="conv to linear"),
    keep("projector.model.3.bias", "image_head.outer.bias"),
)
_TEXT = (*bert("bert."), keep("cls_projection_head.**", f"{TEXT_PROJECTION}**"))
_WORDS = backbones.tied_word_head("cls.predictions", "bert.embeddings.word_embeddings.weight")

BIOVIL_IMPORTERS = (
    Importer(
        name="biovil",
        title="BioViL (Boecking et al. 2022): its image file and CXR-BERT's text file",
        source=_SOURCE,
        table=(*_RESNET, *_PROJECTOR, *_TEXT, *_WORDS),
        images={"resize": "bilinear_antialias"},
        system=_biovil,
        text_file="the text model",
        note=_NOTE,
    ),
    Importer(
        name="biovil_t",
        title="BioViL-T (Bannur et al. 2023): its image file and its text file",
        source=_SOURCE,
        table=(*_pooler(), *_RESNET, *_PROJECTOR, *_TEXT, *_WORDS),
        images={"resize": "bilinear_antialias"},
        system=_biovil_t,
        text_file="the text model",
        note=_NOTE,
    ),
    Importer(
        name="biovil_image",
        title="BioViL's ResNet-50 alone, from its image file",
        source=_SOURCE,
        image={"image_size": 480, "mean": (0.0,), "std": (1.0,)},
        table=(*_RESNET, drop("projector.**", _HEAD)),
        note="The text model is cxrbert's; biovil takes both files.",
    ),
    Importer(
        name="biovil_t_image",
        title="BioViL-T's ResNet-50 alone, from its image file",
        source=_SOURCE,
        image={"image_size": 448, "mean": (0.0,), "std": (1.0,)},
        table=(
            drop(
                "encoder.backbone_to_vit.weight",
                "input of the pooler over two images, for the complete system",
            ),
            drop("encoder.vit_pooler.**", "the pooler over two images, for the complete system"),
            drop(
                "encoder.missing_previous_emb",
                "the placeholder for a missing earlier image, for the pooler",
            ),
            *_RESNET,
            drop("projector.**", _HEAD),
        ),
        note="The text model is cxrbert's; biovil_t takes both files.",
    ),
    Importer(
        name="cxrbert",
        title="CXR-BERT, the text model of BioViL and BioViL-T, with its projection",
        source=_SOURCE,
        text={"name": "cxrbert"},
        table=(*_TEXT, *backbones.vocabulary_head("cls.predictions.")),
    ),
)
