"""Key table of KAD, whose file has its image encoder, its text encoder and its decoder."""

from medvl.export.importers.backbones import TEXT, bert, resnet
from medvl.export.importers.encoders_from_shapes import image_arguments, text_arguments
from medvl.export.importers.importer import Importer
from medvl.export.importers.key_map import Shapes, ZeroTensor, drop, keep, same
from medvl.models.dual_encoders.kad import KADConfig

_BOOK = "the book of queries, which the text encoder makes on first use"


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


IMPORTERS = (
    Importer(
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
        system=_kad,
        zeros=(ZeroTensor(name="book.vectors_QD", why=_BOOK), ZeroTensor(name="book.sha256", why=_BOOK)),
        note="Entities are queried by their names. The file does not hold those of its training.",
    ),
)
