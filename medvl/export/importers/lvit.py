"""Key table of LViT, whose file has no text encoder. Its authors publish no weights, only code that
writes such files.

The released code creates the same modules at each level and calls some of them; the others are left
out.
"""

import functools

from medvl.export.importers.backbones import TEXT, bert_file
from medvl.export.importers.importer import Importer, text_arguments
from medvl.export.importers.key_map import KeyRule, Shapes, drop, keep
from medvl.models.downstream.lvit import PATCHES, LViTConfig

_NET = "network."
_UNUSED = "a module that the released code creates at each level and does not call here"

_UNCALLED = ("head", "norm", "CTBN", "CTBN2", "CTBN3", "embeddings")
"""Modules of a Transformer that no level, or only some levels, call. Earlier rules load those that
are called; one rule drops the rest.
"""


def _conv_norm(source: str, target: str) -> list[KeyRule]:
    """Return the rules of a convolution and its batch normalisation."""
    return [keep(f"{source}.conv.*", f"{target}.0.*"), keep(f"{source}.norm.*", f"{target}.1.*")]


def _transformer_block(source: str, target: str) -> list[KeyRule]:
    names = {
        "norm1.*": "norm1.*",
        "norm2.*": "norm2.*",
        "attn.qkv.*": "qkv.*",
        "attn.proj.*": "project.*",
        "mlp.fc1.*": "mlp.0.*",
        "mlp.fc2.*": "mlp.3.*",
    }
    return [
        keep(f"{source}.Encoder_blocks.0.{old}", f"{target}.{new}") for old, new in names.items()
    ]


def _level(number: int) -> list[KeyRule]:
    """Return the rules of a level, 0 being the finest."""
    one = number + 1
    down, up = (f"{side}{number or ''}" for side in ("downVit", "upVit"))
    convolution = f"{_NET}up.{number}"
    attention = f"up{one}.pixModule"
    return [
        *(
            rule
            for n in (0, 1)
            for rule in _conv_norm(f"down{one}.nConvs.{n}", f"{_NET}down.{number}.{n}")
        ),
        *(
            rule
            for n in (0, 1)
            for rule in _conv_norm(f"up{one}.nConvs.{n}", f"{convolution}.blocks.{n}")
        ),
        keep(f"{attention}.conv_avg.weight", f"{convolution}.attention.mean.weight"),
        keep(f"{attention}.conv_max.weight", f"{convolution}.attention.maximum.weight"),
        keep(f"{attention}.bottleneck.**", f"{convolution}.attention.weigh.**"),
        *_conv_norm(f"reconstruct{one}", f"{_NET}reconstruct.{number}"),
        keep(f"{down}.embeddings.patch_embeddings.*", f"{_NET}embed.{number}.project.*"),
        keep(f"{down}.embeddings.position_embeddings", f"{_NET}embed.{number}.position_1PK"),
        *_transformer_block(down, f"{_NET}down_blocks.{number}"),
        *_transformer_block(up, f"{_NET}up_blocks.{number}"),
        *(_conv_norm(f"{down}.CTBN", f"{_NET}narrow.{number - 1}") if number else ()),
        *(_conv_norm(f"{up}.CTBN2", f"{_NET}widen.{number}") if one < len(PATCHES) else ()),
        # text_module4 is the first of the four convolutions
        keep(f"text_module{one}.*", f"{_NET}text.narrow.{len(PATCHES) - one}.*"),
        *(drop(f"{side}.**", _UNUSED) for side in (f"{attention}.conv_sig", f"pix_module{one}")),
        *(drop(f"{side}.{module}.**", _UNUSED) for side in (down, up) for module in _UNCALLED),
    ]


_TABLE = (
    *_conv_norm("inc", f"{_NET}enter"),
    *_conv_norm("downVit.CTBN3", f"{_NET}text.spread"),
    *(rule for number in range(len(PATCHES)) for rule in _level(number)),
    keep("outc.*", f"{_NET}leave.*"),
    *bert_file(),
)


def _config(label: str, shapes: Shapes) -> LViTConfig:
    cells = shapes[f"{_NET}embed.0.position_1PK"][1]
    text = text_arguments(shapes, {"name": "bert"})
    return LViTConfig(
        labels=(label,),
        image_size=round(cells**0.5) * PATCHES[0],
        width=shapes[f"{_NET}enter.0.weight"][0],
        words=shapes[f"{_NET}text.spread.0.weight"][1],
        vocab_size=shapes[f"{TEXT}embeddings.word_embeddings.weight"][0],
        text_encoder=text.pop("name"),
        text_arguments={name: value for name, value in text.items() if name != "vocab_size"},
    )


IMPORTERS = tuple(
    Importer(
        name=name,
        title=f"LViT (Li et al. 2023) for {corpora}; BERT from a second file",
        source="HUANGLIZI/LViT @ a9b0b41, nets/LViT.py",
        table=_TABLE,
        system=functools.partial(_config, label),
        text_file="the text encoder, BERT-base uncased (pytorch_model.bin or model.safetensors)",
        note="Its authors publish no weights; this is for checkpoints of their code, which "
        "takes word vectors from "
        "another copy of BERT-base uncased (bert_embedding). Give --tokenizer, that of the "
        "second file.",
    )
    for name, corpora, label in (
        ("lvit", "QaTa-COV19 and MosMedData+", "Infection"),
        ("lvit_monuseg", "MoNuSeg", "Nucleus"),
    )
)
