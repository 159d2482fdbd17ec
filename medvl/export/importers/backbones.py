"""Key tables of the backbones; the table of a system combines them.

Every function takes the prefix of the backbone's keys in the file and returns rules
(`medvl.export.importers.key_map`) to medvl's image encoder (names of timm and open_clip) or text
encoder (names of transformers and open_clip).
"""

import torch
from torch import Tensor

from medvl.export.importers.key_map import KeyRule, counter, drop, fixed, keep, same

IMAGE = "image_encoder.backbone."
TEXT = "text_encoder.backbone."
TEXT_PROJECTION = "text_encoder.projection."
_POOLER = "BERT's pooler, which the system does not use"


def position_counter(source: str) -> KeyRule:
    """Return the rule of the numbers of positions that older transformers stored."""
    return fixed(f"{source}position_ids", counter, "a counter that older transformers stored")


def window_index(tensor: Tensor) -> Tensor:
    """Return Swin's table (w * w, w * w): the row of the bias table for each pair of cells of a
    window.
    """
    side = round(len(tensor) ** 0.5) if tensor.ndim == 2 else 0
    row_P, column_P = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    row_P = row_P.flatten()
    column_P = column_P.flatten()
    down_PP = row_P[:, None] - row_P + side - 1
    across_PP = column_P[:, None] - column_P + side - 1
    return down_PP * (2 * side - 1) + across_PP


def resnet(source: str) -> list[KeyRule]:
    """Return the rules of a ResNet with torchvision's (and timm's) names, with or without its
    classifier.
    """
    return [drop(f"{source}fc.*", "the ImageNet classifier"), keep(f"{source}**", f"{IMAGE}**")]


def sequential_resnet(source: str) -> list[KeyRule]:
    """Return the rules of a torchvision ResNet in a `Sequential`: children 0 and 1 are the stem,
    4 to 7 the stages.
    """
    children = {0: "conv1", 1: "bn1", 4: "layer1", 5: "layer2", 6: "layer3", 7: "layer4"}
    return [keep(f"{source}{number}.**", f"{IMAGE}{name}.**") for number, name in children.items()]


def vision_transformer(source: str) -> list[KeyRule]:
    """Return the rules of a vision Transformer with timm's names; other keys with the same
    prefix are not matched.
    """
    parts = ("cls_token", "pos_embed", "patch_embed.proj.*", "blocks.**", "norm.*")
    return [keep(f"{source}{part}", f"{IMAGE}{part}") for part in parts]


def hugging_face_dinov2(source: str) -> list[KeyRule]:
    """Return the rules of transformers' `Dinov2Model` before version 5."""
    return [
        keep(f"{source}embeddings.cls_token", f"{IMAGE}cls_token"),
        keep(f"{source}embeddings.position_embeddings", f"{IMAGE}pos_embed"),
        keep(f"{source}embeddings.patch_embeddings.projection.*", f"{IMAGE}patch_embed.proj.*"),
        drop(f"{source}embeddings.mask_token", "the token of masked patches, for pretraining"),
        *hugging_face_dinov2_layers(f"{source}encoder.layer", f"{IMAGE}blocks"),
        keep(f"{source}layernorm.*", f"{IMAGE}norm.*"),
    ]


def _fused_attention(source: str, inputs: str, target: str) -> list[KeyRule]:
    """Return the rules of an attention of transformers, whose query, key and value are one matrix
    in timm.

    Args:
        source: its module.
        inputs: name in it of the module of query, key and value.
        target: block of timm.
    """
    return [
        *(
            keep(f"{source}.{inputs}.{name}.*", f"{target}.attn.qkv.*", part=(index, 3))
            for index, name in enumerate(("query", "key", "value"))
        ),
        keep(f"{source}.output.dense.*", f"{target}.attn.proj.*"),
    ]


def hugging_face_dinov2_layers(source: str, target: str) -> list[KeyRule]:
    """Return the rules of layers of transformers' `Dinov2Encoder`; `target` names blocks of timm
    in medvl.
    """
    return [
        keep(f"{source}.*.norm1.*", f"{target}.*.norm1.*"),
        *_fused_attention(f"{source}.*.attention", "attention", f"{target}.*"),
        keep(f"{source}.*.layer_scale1.lambda1", f"{target}.*.ls1.gamma"),
        keep(f"{source}.*.norm2.*", f"{target}.*.norm2.*"),
        keep(f"{source}.*.mlp.fc1.*", f"{target}.*.mlp.fc1.*"),
        keep(f"{source}.*.mlp.fc2.*", f"{target}.*.mlp.fc2.*"),
        keep(f"{source}.*.layer_scale2.lambda1", f"{target}.*.ls2.gamma"),
    ]


def hugging_face_vit(source: str) -> list[KeyRule]:
    """Return the rules of transformers' `ViTModel`, whose query, key and value are fused into
    one matrix in timm.
    """
    return [
        keep(f"{source}embeddings.cls_token", f"{IMAGE}cls_token"),
        keep(f"{source}embeddings.position_embeddings", f"{IMAGE}pos_embed"),
        keep(f"{source}embeddings.patch_embeddings.projection.*", f"{IMAGE}patch_embed.proj.*"),
        *(
            keep(
                f"{source}layers.*.attention.{name}_proj.*",
                f"{IMAGE}blocks.*.attn.qkv.*",
                part=(index, 3),
            )
            for index, name in enumerate("qkv")
        ),
        keep(f"{source}layers.*.attention.o_proj.*", f"{IMAGE}blocks.*.attn.proj.*"),
        keep(f"{source}layers.*.layernorm_before.*", f"{IMAGE}blocks.*.norm1.*"),
        keep(f"{source}layers.*.layernorm_after.*", f"{IMAGE}blocks.*.norm2.*"),
        keep(f"{source}layers.*.mlp.*.*", f"{IMAGE}blocks.*.mlp.*.*"),
        keep(f"{source}layernorm.*", f"{IMAGE}norm.*"),
    ]


def hugging_face_swin(source: str) -> list[KeyRule]:
    """Return the rules of transformers' `SwinModel` before version 5.

    timm fuses query, key and value into one matrix, and downsamples at the start of a stage instead
    of the end of the previous one.
    """
    block = f"{source}encoder.layers.*.blocks.*"
    target = f"{IMAGE}layers.*.blocks.*"
    return [
        keep(f"{source}embeddings.patch_embeddings.projection.*", f"{IMAGE}patch_embed.proj.*"),
        keep(f"{source}embeddings.norm.*", f"{IMAGE}patch_embed.norm.*"),
        fixed(
            f"{block}.attention.self.relative_position_index",
            window_index,
            "computed from the window size",
        ),
        keep(
            f"{block}.attention.self.relative_position_bias_table",
            f"{target}.attn.relative_position_bias_table",
        ),
        *_fused_attention(f"{block}.attention", "self", target),
        keep(f"{block}.layernorm_before.*", f"{target}.norm1.*"),
        keep(f"{block}.layernorm_after.*", f"{target}.norm2.*"),
        keep(f"{block}.intermediate.dense.*", f"{target}.mlp.fc1.*"),
        keep(f"{block}.output.dense.*", f"{target}.mlp.fc2.*"),
        *(
            keep(
                f"{source}encoder.layers.{stage}.downsample.**",
                f"{IMAGE}layers.{stage + 1}.downsample.**",
            )
            for stage in range(3)
        ),
        keep(f"{source}layernorm.*", f"{IMAGE}norm.*"),
    ]


def hugging_face_resnet(source: str) -> list[KeyRule]:
    """Return the rules of transformers' `ResNetModel`."""
    stage = f"{source}encoder.stages."
    target = f"{IMAGE}layer"
    rules = [
        keep(f"{source}embedder.embedder.convolution.*", f"{IMAGE}conv1.*"),
        keep(f"{source}embedder.embedder.normalization.*", f"{IMAGE}bn1.*"),
    ]
    for index in range(4):
        old = f"{stage}{index}.layers.*"
        new = f"{target}{index + 1}.*"
        rules += [
            keep(f"{old}.shortcut.convolution.*", f"{new}.downsample.0.*"),
            keep(f"{old}.shortcut.normalization.*", f"{new}.downsample.1.*"),
        ]
        for layer in range(3):
            rules += [
                keep(f"{old}.layer.{layer}.convolution.*", f"{new}.conv{layer + 1}.*"),
                keep(f"{old}.layer.{layer}.normalization.*", f"{new}.bn{layer + 1}.*"),
            ]
    return rules


def hugging_face_clip_image(source: str) -> list[KeyRule]:
    """Return the rules of transformers' `CLIPVisionModel`."""
    names = {
        "embeddings.class_embedding": "class_embedding",
        "embeddings.patch_embedding.weight": "conv1.weight",
        "embeddings.position_embedding.weight": "positional_embedding",
        "pre_layrnorm.*": "ln_pre.*",
        "post_layernorm.*": "ln_post.*",
    }
    return [
        *(keep(f"{source}{key}", f"{IMAGE}{name}") for key, name in names.items()),
        *_hugging_face_clip_blocks(source, IMAGE),
    ]


def hugging_face_clip_text(source: str) -> list[KeyRule]:
    """Return the rules of transformers' `CLIPTextModel`."""
    names = {
        "embeddings.token_embedding.weight": "token_embedding.weight",
        "embeddings.position_embedding.weight": "positional_embedding",
        "final_layer_norm.*": "ln_final.*",
    }
    return [
        *(keep(f"{source}{key}", f"{TEXT}{name}") for key, name in names.items()),
        *_hugging_face_clip_blocks(source, TEXT),
    ]


def _hugging_face_clip_blocks(source: str, encoder: str) -> list[KeyRule]:
    """Return the rules of CLIP's blocks; open_clip fuses query, key and value into one matrix."""
    block = f"{source}encoder.layers.*"
    target = f"{encoder}transformer.resblocks.*"
    return [
        *(
            keep(
                f"{block}.self_attn.{name}_proj.{leaf}",
                f"{target}.attn.in_proj_{leaf}",
                part=(index, 3),
            )
            for index, name in enumerate("qkv")
            for leaf in ("weight", "bias")
        ),
        keep(f"{block}.self_attn.out_proj.*", f"{target}.attn.out_proj.*"),
        keep(f"{block}.layer_norm1.*", f"{target}.ln_1.*"),
        keep(f"{block}.layer_norm2.*", f"{target}.ln_2.*"),
        keep(f"{block}.mlp.fc1.*", f"{target}.mlp.c_fc.*"),
        keep(f"{block}.mlp.fc2.*", f"{target}.mlp.c_proj.*"),
    ]


def clip_image(source: str) -> list[KeyRule]:
    """Return the rules of OpenAI's vision Transformer or any other image encoder of open_clip."""
    return [keep(f"{source}**", f"{IMAGE}**")]


def clip_image_tower(source: str) -> list[KeyRule]:
    """Return the rules of CLIP's image encoder inside the rest of a CLIP model, as in METER."""
    unused = ("positional_embedding", "token_embedding.weight", "ln_final.*")
    leftover = (
        drop(f"{source}.{name}", "a remainder of CLIP's text encoder, never used")
        for name in unused
    )
    return [*clip_image(f"{source}.visual."), *leftover]


def clip_text(source: str) -> list[KeyRule]:
    """Return the rules of CLIP's text encoder (OpenAI, open_clip); its projection is a matrix or
    a linear layer.
    """
    return [
        keep(f"{source}text_projection", f"{TEXT_PROJECTION}matrix"),
        keep(f"{source}text_projection.*", f"{TEXT_PROJECTION}*"),
        keep(f"{source}transformer.**", f"{TEXT}transformer.**"),
        keep(f"{source}token_embedding.weight", f"{TEXT}token_embedding.weight"),
        keep(f"{source}positional_embedding", f"{TEXT}positional_embedding"),
        keep(f"{source}ln_final.*", f"{TEXT}ln_final.*"),
        keep(f"{source}cls_emb", f"{TEXT}cls_emb"),
    ]


def bert(source: str) -> list[KeyRule]:
    """Return the rules of BERT or RoBERTa with transformers' names, with or without the pooler."""
    return [
        position_counter(f"{source}embeddings."),
        drop(f"{source}pooler.dense.*", _POOLER),
        keep(f"{source}embeddings.**", f"{TEXT}embeddings.**"),
        keep(f"{source}encoder.layer.**", f"{TEXT}encoder.layer.**"),
    ]


def bert_file() -> list[KeyRule]:
    """Return the rules of a file with a pretrained BERT, given beside a system's file that has
    no text encoder.
    """
    return [
        *bert("bert."),
        *bert(""),
        *vocabulary_head("cls.predictions."),
        drop("cls.seq_relationship.*", "the head for pairs of segments, for pretraining"),
    ]


def word_head(source: str, target: str) -> list[KeyRule]:
    """Return the rules of BERT's head for masked words (`WordHead` in medvl), without its table
    of words.
    """
    names = {"transform.dense.*": "dense.*", "transform.LayerNorm.*": "norm.*", "bias": "bias"}
    return [keep(f"{source}.{old}", f"{target}.{new}") for old, new in names.items()]


def tied_word_head(source: str, words: str, target: str = "word_head") -> list[KeyRule]:
    """Return the rules of a `word_head` whose table is the embedding `words`, with a bias that
    is stored twice.
    """
    decoder = f"{source}.decoder"
    return [
        same(f"{decoder}.weight", words),
        same(f"{decoder}.bias", f"{source}.bias"),
        *word_head(source, target),
    ]


def vocabulary_head(source: str) -> list[KeyRule]:
    """Return the rule that leaves BERT's vocabulary head out."""
    return [drop(f"{source}**", "the vocabulary head, for pretraining")]
