"""Key table of MRM, whose file has its encoders, its decoder of pixels and its head for masked words."""

from medvl.export.importers.backbones import TEXT, bert, tied_word_head, vision_transformer
from medvl.export.importers.encoders_from_shapes import bert_fields, count
from medvl.export.importers.fusion_encoders import DECODER_POSITIONS, keep_decoder_positions
from medvl.export.importers.importer import Importer
from medvl.export.importers.key_map import Shapes, keep
from medvl.models.fusion_encoders.mrm import MRMConfig

_BERT = "bert_encoder.model."


def _mrm(shapes: Shapes) -> MRMConfig:
    fields, values = bert_fields(shapes, "bert"), shapes["mim_head.pixels.weight"][0]
    patch = fields["image_arguments"].get("patch_size", 16)
    return MRMConfig(
        **fields,
        target_scale=round((values / (3 * patch**2)) ** 0.5),
        max_tokens=shapes[f"{TEXT}embeddings.position_embeddings.weight"][0],
        decoder_width=shapes["mim_head.mask_token"][0],
        decoder_layers=count(shapes, "mim_head.blocks."),
    )


IMPORTERS = (
    Importer(
        name="mrm",
        title="MRM (Zhou et al. 2023): ViT-B/16 at 224 pixels, a BERT of six layers",
        source="RL4M/MRM-pytorch @ e2f458e and yangzhou12/BenchX @ b874fa6",
        table=(
            *vision_transformer(""),
            *bert(f"{_BERT}bert."),
            *tied_word_head(f"{_BERT}cls.predictions", f"{_BERT}bert.embeddings.word_embeddings.weight"),
            keep("bert_mlp.*", "image_to_words.*"),
            keep("mask_token", "mim_head.mask_token", change="flatten"),
            keep("decoder_pos_embed", DECODER_POSITIONS, change="drop axis"),
            keep("decoder_embed.*", "mim_head.embed.*"),
            keep("decoder_blocks.**", "mim_head.blocks.**"),
            keep("decoder_norm.*", "mim_head.norm.*"),
            keep("decoder_pred.*", "mim_head.pixels.*"),
        ),
        system=_mrm,
        images={"shrink_antialias": False},
        settle=keep_decoder_positions,
        note="Its ViT was trained with fixed positions, which are in the file; further training changes them.",
    ),
)
