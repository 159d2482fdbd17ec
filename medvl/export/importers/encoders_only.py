"""Key tables of systems whose encoders alone are imported."""

from medvl.encoders.presets import IMAGENET_MEAN, IMAGENET_STD
from medvl.export.importers import backbones
from medvl.export.importers.backbones import TEXT_PROJECTION, bert, resnet, sequential_resnet
from medvl.export.importers.importer import Importer
from medvl.export.importers.key_map import drop, keep

_HEAD = "a projection into this system's shared space: only its encoders are imported"
_SCALE = "the temperature of this system's loss"
_STATISTICS = (
    f"The pixel statistics are ImageNet's ({IMAGENET_MEAN}, {IMAGENET_STD}), the encoder's "
    f"default; those of this "
    "system are not known."
)
_FUSION = "the fusion-encoder of this system: only its encoders are imported"

_METER_TOWERS = (
    *backbones.clip_image_tower("vision_encoder"),
    *bert("language_encoder."),
    drop("multi_modal_**", _FUSION),
    drop("modality_type_embeddings.weight", _FUSION),
    *(
        drop(f"{head}_head.**", "a pretraining head")
        for head in ("mlm", "mim", "itm", "itc", "align")
    ),
    *(drop(f"{head}_head.**", "a downstream head") for head in ("vqa", "cls", "irtr")),
)

IMPORTERS = (
    Importer(
        name="arl_encoders",
        title="ARL's encoders alone: CLIP ViT-B/16 without its last block, RoBERTa",
        source="zhjohnchan/ARL @ 527fe06",
        image={},
        text={"name": "roberta"},
        table=_METER_TOWERS,
    ),
    Importer(
        name="medklip_image",
        title="MedKLIP's image encoder alone: the first three stages of a ResNet-50",
        source="MediaBrain-SJTU/MedKLIP @ 8e60b03",
        image={},
        table=(
            *sequential_resnet("res_features."),
            drop("res_l*.*", "the projection of the grid, for the complete system"),
            drop("decoder.**", "the decoder of entities, for the complete system"),
            *(
                drop(f"{name}.*", "a head of the decoder of entities, for the complete system")
                for name in ("disease_embedding_layer", "cl_fc", "classifier")
            ),
        ),
        note="The file has no text encoder; medklip takes that of Bio_ClinicalBERT beside it.",
    ),
    Importer(
        name="prior",
        title="PRIOR (Cheng et al. 2023): ResNet-50 on grey images, Bio_ClinicalBERT",
        source="QtacierP/PRIOR @ 086bf2e",
        image={},
        text={"name": "bioclinicalbert"},
        table=(
            *resnet("image_encoder.encoder."),
            drop("image_encoder.atten_pool.**", "attention pooling, which medvl does not have"),
            *bert("text_encoder.encoder."),
            drop("global_text_attention.**", "attention over sentences, which medvl does not have"),
            *(
                drop(f"{level}_{side}_projection.*", _HEAD)
                for level in ("global", "local")
                for side in ("image", "text")
            ),
            drop("logit_scale", _SCALE),
            drop("local_logit_scale", _SCALE),
            *(
                drop(
                    name, "a part of its local and reconstruction tasks, which medvl does not have"
                )
                for name in (
                    "prototype_queries",
                    "predictor.**",
                    "sentence_**",
                    "image_decoder.**",
                    "local_cross_**",
                )
            ),
        ),
        note=_STATISTICS,
    ),
    Importer(
        name="mflag",
        title="M-FLAG (Liu et al. 2023): ResNet-50, CXR-BERT",
        source="yangzhou12/BenchX @ b874fa6",
        image={},
        text={"name": "cxrbert"},
        table=(
            *resnet("encoder."),
            *bert("lm_model.bert."),
            keep("lm_model.cls_projection_head.**", f"{TEXT_PROJECTION}**"),
            *backbones.vocabulary_head("lm_model.cls.predictions."),
            drop("proj_*.**", _HEAD),
        ),
        note=_STATISTICS,
    ),
)
