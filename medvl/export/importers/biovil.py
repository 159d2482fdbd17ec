"""Key tables of BioViL and BioViL-T: an image model and a text model in files of their own, together or apart."""

from typing import Any

from medvl.export.importers import backbones
from medvl.export.importers.backbones import TEXT, TEXT_PROJECTION, bert, resnet
from medvl.export.importers.encoders_from_shapes import bert_fields
from medvl.export.importers.importer import Importer
from medvl.export.importers.key_map import KeyRule, Shapes, drop, keep
from medvl.models.dual_encoders.biovil import BioViLConfig
from medvl.models.dual_encoders.biovil_t import BioViLTConfig

_SOURCE = "microsoft/hi-ml @ b67c1d2"
_HEAD = "a projection of image or words, for the complete system"
_NOTE = "The training code was not released: temperatures and weights of the losses in the config are not confirmed."


def _biovil(shapes: Shapes) -> BioViLConfig:
    return BioViLConfig(**_settings(shapes))


def _biovil_t(shapes: Shapes) -> BioViLTConfig:
    blocks = {name.split(".")[2] for name in shapes if name.startswith("pooler.blocks.")}
    return BioViLTConfig(
        **_settings(shapes), pooler_dim=shapes["patch_head.weight"][0], pooler_blocks=max(len(blocks), 1)
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
    source, target = "encoder.vit_pooler.blocks.*", "pooler.blocks.*"
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
    drop("encoder.encoder.fc.*", "the ImageNet classifier, which BioViL's loader requires but never uses"),
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

IMPORTERS = (
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
            drop("encoder.backbone_to_vit.weight", "input of the pooler over two images, for the complete system"),
            drop("encoder.vit_pooler.**", "the pooler over two images, for the complete system"),
            drop("encoder.missing_previous_emb", "the placeholder for a missing earlier image, for the pooler"),
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
