"""Key table of MRM, whose file has its encoders, its decoder of pixels and its head for masked words."""

from medvl.export.importers.backbones import TEXT, WORD_HEAD, bert, vision_transformer
from medvl.export.importers.encoders_from_shapes import count, image_arguments, text_arguments
from medvl.export.importers.importer import Importer
from medvl.export.importers.key_map import Shapes, drop, keep, same
from medvl.models.fusion_encoders.mrm import MRMConfig

_BERT = "bert_encoder.model."


def _mrm(shapes: Shapes) -> MRMConfig:
    image, text = dict(image_arguments(shapes, {})), dict(text_arguments(shapes, {"name": "bert"}))
    side, values = image.pop("image_size"), shapes["mim_head.pixels.weight"][0]
    patch = image.get("patch_size", 16)
    text.pop("vocab_size", None)
    return MRMConfig(
        image_encoder=image.pop("name"),
        image_arguments=image,
        image_size=side,
        target_scale=round((values / (3 * patch**2)) ** 0.5),
        text_encoder=text.pop("name"),
        text_arguments=text,
        vocab_size=shapes[f"{TEXT}embeddings.word_embeddings.weight"][0],
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
            same(f"{_BERT}cls.predictions.decoder.weight", f"{_BERT}bert.embeddings.word_embeddings.weight"),
            same(f"{_BERT}cls.predictions.decoder.bias", f"{_BERT}cls.predictions.bias"),
            *(keep(f"{_BERT}cls.predictions.{source}", f"word_head.{name}") for source, name in WORD_HEAD.items()),
            keep("bert_mlp.*", "image_to_words.*"),
            keep("mask_token", "mim_head.mask_token", change="flatten"),
            drop("decoder_pos_embed", "sines and cosines, which are computed"),
            keep("decoder_embed.*", "mim_head.embed.*"),
            keep("decoder_blocks.**", "mim_head.blocks.**"),
            keep("decoder_norm.*", "mim_head.norm.*"),
            keep("decoder_pred.*", "mim_head.pixels.*"),
        ),
        system=_mrm,
        note="Its ViT was trained with fixed positions, which are in the file; LayerNorms of the decoder add 1e-5.",
    ),
)
