"""Key maps of the backbones that published systems are made of; a system's table puts them together.

Every function takes the beginning of the backbone's keys in the file and gives lines
(`medvl.export.importers.key_map`) whose other
side is medvl's image encoder (timm's and open_clip's names) or text encoder (transformers' and open_clip's names).
"""

from medvl.export.importers.key_map import Line, drop, keep

IMAGE, TEXT = "image_encoder.backbone.", "text_encoder.backbone."
TEXT_PROJECTION = "text_encoder.projection."
_COUNTER = "a counter that older transformers stored"
_POOLER = "BERT's pooler, which the system does not use"


def resnet(source: str) -> list[Line]:
    """A ResNet under torchvision's names, which are timm's as well, with or without its classifier."""
    return [drop(f"{source}fc.*", "the ImageNet classifier"), keep(f"{source}**", f"{IMAGE}**")]


def sequential_resnet(source: str) -> list[Line]:
    """The children of torchvision's ResNet in a `Sequential`: 0 and 1 are its stem, 4 to 7 its stages."""
    children = {0: "conv1", 1: "bn1", 4: "layer1", 5: "layer2", 6: "layer3", 7: "layer4"}
    return [keep(f"{source}{number}.**", f"{IMAGE}{name}.**") for number, name in children.items()]


def vision_transformer(source: str) -> list[Line]:
    """A vision Transformer under timm's names; only those, so that its keys may stand among others."""
    parts = ("cls_token", "pos_embed", "patch_embed.proj.*", "blocks.**", "norm.*")
    return [keep(f"{source}{part}", f"{IMAGE}{part}") for part in parts]


def hugging_face_vit(source: str) -> list[Line]:
    """transformers' `ViTModel`: timm's fused attention matrix in three."""
    return [
        keep(f"{source}embeddings.cls_token", f"{IMAGE}cls_token"),
        keep(f"{source}embeddings.position_embeddings", f"{IMAGE}pos_embed"),
        keep(f"{source}embeddings.patch_embeddings.projection.*", f"{IMAGE}patch_embed.proj.*"),
        *(
            keep(f"{source}layers.*.attention.{name}_proj.*", f"{IMAGE}blocks.*.attn.qkv.*", part=(index, 3))
            for index, name in enumerate("qkv")
        ),
        keep(f"{source}layers.*.attention.o_proj.*", f"{IMAGE}blocks.*.attn.proj.*"),
        keep(f"{source}layers.*.layernorm_before.*", f"{IMAGE}blocks.*.norm1.*"),
        keep(f"{source}layers.*.layernorm_after.*", f"{IMAGE}blocks.*.norm2.*"),
        keep(f"{source}layers.*.mlp.*.*", f"{IMAGE}blocks.*.mlp.*.*"),
        keep(f"{source}layernorm.*", f"{IMAGE}norm.*"),
    ]


def hugging_face_swin(source: str) -> list[Line]:
    """transformers' `SwinModel` as it was stored before its version 5: timm's fused attention matrix in three, and the
    step down in resolution at the end of a stage instead of the beginning of the next."""
    block, ours = f"{source}encoder.layers.*.blocks.*", f"{IMAGE}layers.*.blocks.*"
    return [
        keep(f"{source}embeddings.patch_embeddings.projection.*", f"{IMAGE}patch_embed.proj.*"),
        keep(f"{source}embeddings.norm.*", f"{IMAGE}patch_embed.norm.*"),
        drop(f"{block}.attention.self.relative_position_index", "computed anew from the window's size"),
        keep(
            f"{block}.attention.self.relative_position_bias_table",
            f"{ours}.attn.relative_position_bias_table",
        ),
        *(
            keep(f"{block}.attention.self.{name}.*", f"{ours}.attn.qkv.*", part=(index, 3))
            for index, name in enumerate(("query", "key", "value"))
        ),
        keep(f"{block}.attention.output.dense.*", f"{ours}.attn.proj.*"),
        keep(f"{block}.layernorm_before.*", f"{ours}.norm1.*"),
        keep(f"{block}.layernorm_after.*", f"{ours}.norm2.*"),
        keep(f"{block}.intermediate.dense.*", f"{ours}.mlp.fc1.*"),
        keep(f"{block}.output.dense.*", f"{ours}.mlp.fc2.*"),
        *(
            keep(f"{source}encoder.layers.{stage}.downsample.**", f"{IMAGE}layers.{stage + 1}.downsample.**")
            for stage in range(3)
        ),
        keep(f"{source}layernorm.*", f"{IMAGE}norm.*"),
    ]


def hugging_face_resnet(source: str) -> list[Line]:
    """transformers' `ResNetModel`: its stem, stages and shortcuts by names of their own."""
    stage, ours = f"{source}encoder.stages.", f"{IMAGE}layer"
    lines = [
        keep(f"{source}embedder.embedder.convolution.*", f"{IMAGE}conv1.*"),
        keep(f"{source}embedder.embedder.normalization.*", f"{IMAGE}bn1.*"),
    ]
    for index in range(4):
        here, there = f"{stage}{index}.layers.*", f"{ours}{index + 1}.*"
        lines += [
            keep(f"{here}.shortcut.convolution.*", f"{there}.downsample.0.*"),
            keep(f"{here}.shortcut.normalization.*", f"{there}.downsample.1.*"),
        ]
        for place in range(3):
            lines += [
                keep(f"{here}.layer.{place}.convolution.*", f"{there}.conv{place + 1}.*"),
                keep(f"{here}.layer.{place}.normalization.*", f"{there}.bn{place + 1}.*"),
            ]
    return lines


def hugging_face_clip_image(source: str) -> list[Line]:
    """transformers' `CLIPVisionModel`."""
    ours = {
        "embeddings.class_embedding": "class_embedding",
        "embeddings.patch_embedding.weight": "conv1.weight",
        "embeddings.position_embedding.weight": "positional_embedding",
        "pre_layrnorm.*": "ln_pre.*",
        "post_layernorm.*": "ln_post.*",
    }
    return [
        *(keep(f"{source}{theirs}", f"{IMAGE}{name}") for theirs, name in ours.items()),
        *_hugging_face_clip_blocks(source, IMAGE),
    ]


def hugging_face_clip_text(source: str) -> list[Line]:
    """transformers' `CLIPTextModel`."""
    ours = {
        "embeddings.token_embedding.weight": "token_embedding.weight",
        "embeddings.position_embedding.weight": "positional_embedding",
        "final_layer_norm.*": "ln_final.*",
    }
    return [
        *(keep(f"{source}{theirs}", f"{TEXT}{name}") for theirs, name in ours.items()),
        *_hugging_face_clip_blocks(source, TEXT),
    ]


def _hugging_face_clip_blocks(source: str, tower: str) -> list[Line]:
    """CLIP's fused attention matrix in three."""
    block, ours = f"{source}encoder.layers.*", f"{tower}transformer.resblocks.*"
    return [
        *(
            keep(f"{block}.self_attn.{name}_proj.{leaf}", f"{ours}.attn.in_proj_{leaf}", part=(index, 3))
            for index, name in enumerate("qkv")
            for leaf in ("weight", "bias")
        ),
        keep(f"{block}.self_attn.out_proj.*", f"{ours}.attn.out_proj.*"),
        keep(f"{block}.layer_norm1.*", f"{ours}.ln_1.*"),
        keep(f"{block}.layer_norm2.*", f"{ours}.ln_2.*"),
        keep(f"{block}.mlp.fc1.*", f"{ours}.mlp.c_fc.*"),
        keep(f"{block}.mlp.fc2.*", f"{ours}.mlp.c_proj.*"),
    ]


def clip_image(source: str) -> list[Line]:
    """OpenAI's vision Transformer, whose names are open_clip's; or any other image tower of open_clip."""
    return [keep(f"{source}**", f"{IMAGE}**")]


def clip_text(source: str) -> list[Line]:
    """The text tower of OpenAI's CLIP and of open_clip, its projection a matrix or a linear layer."""
    return [
        keep(f"{source}text_projection", f"{TEXT_PROJECTION}matrix"),
        keep(f"{source}text_projection.*", f"{TEXT_PROJECTION}*"),
        keep(f"{source}transformer.**", f"{TEXT}transformer.**"),
        keep(f"{source}token_embedding.weight", f"{TEXT}token_embedding.weight"),
        keep(f"{source}positional_embedding", f"{TEXT}positional_embedding"),
        keep(f"{source}ln_final.*", f"{TEXT}ln_final.*"),
        keep(f"{source}cls_emb", f"{TEXT}cls_emb"),
    ]


def bert(source: str) -> list[Line]:
    """BERT or RoBERTa under transformers' names, with or without the pooler."""
    return [
        drop(f"{source}embeddings.position_ids", _COUNTER),
        drop(f"{source}pooler.dense.*", _POOLER),
        keep(f"{source}embeddings.**", f"{TEXT}embeddings.**"),
        keep(f"{source}encoder.layer.**", f"{TEXT}encoder.layer.**"),
    ]


def masked_words(source: str) -> list[Line]:
    """BERT's head over the vocabulary, where nothing of ours reads it."""
    return [drop(f"{source}**", "the head over the vocabulary, of pretraining")]
