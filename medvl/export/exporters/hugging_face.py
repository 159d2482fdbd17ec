"""Export to transformers: folders that `AutoModel.from_pretrained` loads without custom code.

An encoder is exported where transformers has a class that computes the same; a CLIP on open_clip's own encoders becomes
one `CLIPModel`. transformers has no class for the heads and fusion-encoders of other systems: they are left out, and
the card lists them.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medvl.common.folders import new_folder
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.encoders.text.projections import MatrixHead
from medvl.errors import ConfigError
from medvl.export.exporters.common import Exported, difference, random_ids, random_pixels, write_card
from medvl.export.importers import backbones
from medvl.export.importers.backbones import IMAGE, TEXT_PROJECTION
from medvl.export.importers.key_map import KeyRule, keep, to_published
from medvl.models.base import System, TwoTowers
from medvl.models.dual_encoders.clip import CLIP

_HIGHEST_ID_IS_END = 2  # transformers' code for "the end token is the one of the highest id"
_ENCODERS = ("image_encoder", "text_encoder")
_PROJ = "proj"  # CLIP's projection of an image, inside open_clip's module
_NO_CLASS = "transformers has no class with this head; medvl's ONNX export holds it"


def export_hugging_face(model: System, out: Path | str) -> Exported:
    """Write a model's encoders, or a complete CLIP, as transformers' own classes, with a card.

    `AutoModel` loads every folder again, and its outputs are compared with medvl's before the folder is kept.

    Args:
        model: any system with an image and a text encoder.
        out: new folder: that of a `CLIPModel`, or with `image_encoder` and `text_encoder` in it.

    Raises:
        ConfigError: transformers has no class for an encoder; the message names it.
        CheckpointError: transformers' outputs differ.
    """
    if not isinstance(model, TwoTowers) or not isinstance(model.image_encoder, ImageEncoder):
        message = f"{model.name} does not have an image and a text encoder: export the system that it was made from"
        raise ConfigError(message, "unsupported")
    model.eval()
    with new_folder(Path(out)) as folder, torch.no_grad():
        clip = _is_plain_clip_model(model)
        differences = _write_clip(model, folder) if clip else _write_encoders(model, folder)
        left_out = {} if clip else _heads(model)
        if model.tokenizer is not None:
            model.tokenizer.save(folder if clip else folder / "text_encoder")
        write_card(folder, model, usage=_usage(model, clip), left_out=left_out, library="transformers")
    return Exported(folder=Path(out), differences=differences, left_out=left_out)


def _usage(model: TwoTowers, clip: bool) -> str:
    lines = ["from transformers import AutoModel"]
    if clip:
        return "\n".join([*lines, 'model = AutoModel.from_pretrained("FOLDER")'])
    pooler = ", add_pooling_layer=False" if _no_pooler(model.text_encoder.backbone) else ""
    lines.append('image_encoder = AutoModel.from_pretrained("FOLDER/image_encoder")')
    lines.append(f'text_encoder = AutoModel.from_pretrained("FOLDER/text_encoder"{pooler})')
    return "\n".join(lines)


def _heads(model: Any) -> dict[str, str]:
    """Return the parts outside of the two encoders' backbones, with the reason why they are left out."""
    parts = [name for name, child in model.named_children() if name not in _ENCODERS and _has_parameters(child)]
    if _has_parameters(model.text_encoder.projection):
        parts.append("text_encoder.projection")
    if getattr(model.image_encoder.backbone, _PROJ, None) is not None:
        parts.append(f"{IMAGE}{_PROJ}")
    return dict.fromkeys(parts, _NO_CLASS)


def _write_encoders(model: Any, folder: Path) -> dict[str, float]:
    image, text = (folder / name for name in _ENCODERS)
    return {**_write_image(model.image_encoder, image), **_write_text(model.text_encoder, text)}


def _has_parameters(module: nn.Module | None) -> bool:
    return module is not None and any(True for _ in module.parameters())


def _load_tensors(net: Any, tensors: Mapping[str, Tensor], table: Sequence[KeyRule], name: str) -> None:
    """Load medvl's tensors into transformers' module. Raises ConfigError if names or shapes differ."""
    renamed, unknown = to_published(tensors, table)
    state = net.state_dict()
    missing = [key for key in state if key not in renamed]
    shapes = [key for key, tensor in renamed.items() if key in state and state[key].shape != tensor.shape]
    differing = [*unknown, *(key for key in renamed if key not in state), *missing, *shapes]
    if differing:
        message = f"{type(net).__name__} of transformers does not compute what {name} does: {differing[0]}"
        raise ConfigError(message, "unsupported")
    net.load_state_dict(renamed)


def _write_image(encoder: ImageEncoder, folder: Path) -> dict[str, float]:
    import transformers

    net, table = _image_class(encoder)
    tensors = {f"{IMAGE}{name}": tensor for name, tensor in encoder.backbone.state_dict().items() if name != _PROJ}
    _load_tensors(net, tensors, table, encoder.name)
    net.save_pretrained(folder)
    reloaded = transformers.AutoModel.from_pretrained(folder, **_no_pooler(net)).eval()
    pixels = random_pixels(encoder)
    states, features = reloaded(pixels).last_hidden_state, encoder(pixels)
    if states.ndim == 4:
        states = states.flatten(2).transpose(1, 2)
    if encoder.config["patch_level"] != -1:  # regions come from an earlier stage, the pooled vector from the last
        return {"image vector": difference("the image vector", states.mean(dim=1), features.pooled_BD)}
    expected = features.patches_BPD
    assert expected is not None, "every class here has regions"
    states = states[:, states.shape[1] - expected.shape[1] :]  # without the class token
    if type(net).__name__ == "CLIPVisionModel":
        parent = reloaded.vision_model if hasattr(reloaded, "vision_model") else reloaded
        states = parent.post_layernorm(states)
    return {"image regions": difference("the image regions", states, expected)}


def _image_class(encoder: ImageEncoder) -> tuple[Any, Sequence[KeyRule]]:
    builders: Mapping[str, Callable[[ImageEncoder], tuple[Any, Sequence[KeyRule]]]] = {
        "timm.models.resnet.ResNet": _resnet,
        "timm.models.vision_transformer.VisionTransformer": _vision_transformer,
        "open_clip.transformer.VisionTransformer": _clip_vision,
    }
    kind = f"{type(encoder.backbone).__module__}.{type(encoder.backbone).__name__}"
    if kind not in builders:
        message = f"transformers has no class for {encoder.name} ({kind}), only for {', '.join(builders)}; use ONNX"
        raise ConfigError(message, "unsupported", field="image_encoder")
    return builders[kind](encoder)


def _resnet(encoder: ImageEncoder) -> tuple[Any, Sequence[KeyRule]]:
    import transformers

    net: Any = encoder.backbone
    stages = [net.layer1, net.layer2, net.layer3, net.layer4]
    config = transformers.ResNetConfig(
        num_channels=encoder.in_channels,
        embedding_size=net.conv1.out_channels,
        hidden_sizes=[
            stage[-1].bn3.num_features if hasattr(stage[-1], "bn3") else stage[-1].bn2.num_features for stage in stages
        ],
        depths=[len(stage) for stage in stages],
        layer_type="bottleneck" if hasattr(stages[0][0], "conv3") else "basic",
    )
    return transformers.ResNetModel(config), backbones.hugging_face_resnet("")


def _vision_transformer(encoder: ImageEncoder) -> tuple[Any, Sequence[KeyRule]]:
    import transformers

    net: Any = encoder.backbone
    block = net.blocks[0]
    config = transformers.ViTConfig(
        hidden_size=net.embed_dim,
        num_hidden_layers=len(net.blocks),
        num_attention_heads=block.attn.num_heads,
        intermediate_size=block.mlp.fc1.out_features,
        image_size=list(encoder.image_size),
        patch_size=list(net.patch_embed.patch_size),
        num_channels=encoder.in_channels,
        layer_norm_eps=net.norm.eps,
        hidden_act="gelu",
    )
    return transformers.ViTModel(config, add_pooling_layer=False), backbones.hugging_face_vit("")


def _clip_vision(encoder: ImageEncoder) -> tuple[Any, Sequence[KeyRule]]:
    import transformers

    net = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**_clip_vision_fields(encoder)))
    return net, backbones.hugging_face_clip_image("vision_model." if hasattr(net, "vision_model") else "")


def _write_text(encoder: TextEncoder, folder: Path) -> dict[str, float]:
    import transformers

    net: Any = encoder.backbone
    if not isinstance(net, transformers.PreTrainedModel):
        if not _is_plain_clip(net, "TextTransformer"):
            message = f"transformers has no class for the text encoder {encoder.name}"
            raise ConfigError(message, "unsupported", field="text_encoder")
        net = transformers.CLIPTextModel(transformers.CLIPTextConfig(**_clip_text_fields(encoder, _HIGHEST_ID_IS_END)))
        table = backbones.hugging_face_clip_text("text_model." if hasattr(net, "text_model") else "")
        tensors = {f"text_encoder.backbone.{name}": tensor for name, tensor in encoder.backbone.state_dict().items()}
        _load_tensors(net, tensors, table, encoder.name)
    net.save_pretrained(folder)
    reloaded = transformers.AutoModel.from_pretrained(folder, **_no_pooler(net)).eval()
    ids = random_ids(encoder, None)
    mask = torch.ones_like(ids, dtype=torch.bool)
    states = reloaded(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    return {"token states": difference("the token states", states, encoder.encode(encoder.embed(ids, mask), mask)[-1])}


def _no_pooler(net: Any) -> dict[str, bool]:
    """Return the argument that keeps `from_pretrained` from adding a random pooler, for classes that have one."""
    return {"add_pooling_layer": False} if hasattr(net, "pooler") and net.pooler is None else {}


def _is_plain_clip(net: Any, kind: str) -> bool:
    """Return whether one of open_clip's Transformers is OpenAI's, with nothing added."""
    if type(net).__name__ != kind or not type(net).__module__.startswith("open_clip."):
        return False
    causal = kind != "TextTransformer" or net.attn_mask is not None
    return causal and getattr(net, "attn_pool", None) is None and not getattr(net, "final_ln_after_pool", False)


def _is_plain_clip_model(model: TwoTowers) -> bool:
    return (
        isinstance(model, CLIP)
        and not hasattr(model, "logit_bias")
        and _is_plain_clip(model.image_encoder.backbone, "VisionTransformer")
        and _is_plain_clip(model.text_encoder.backbone, "TextTransformer")
        and isinstance(model.text_encoder.projection, MatrixHead)
        and model.text_encoder.pool == "eos"
    )


def _write_clip(model: Any, folder: Path) -> dict[str, float]:
    import transformers

    tokenizer, encoder = model.tokenizer, model.text_encoder
    end_id = encoder.vocab_size - 1 if tokenizer is None else tokenizer.sep_id
    config = transformers.CLIPConfig(
        vision_config=_clip_vision_fields(model.image_encoder),
        text_config=_clip_text_fields(encoder, end_id),
        projection_dim=encoder.feature_dim,
    )
    net = transformers.CLIPModel(config)
    table = [
        *backbones.hugging_face_clip_image("vision_model."),
        *backbones.hugging_face_clip_text("text_model."),
        keep("visual_projection.weight", f"{IMAGE}proj", change="transpose"),
        keep("text_projection.weight", f"{TEXT_PROJECTION}matrix", change="transpose"),
        keep("logit_scale", "logit_scale"),
    ]
    _load_tensors(net, model.state_dict(), table, model.name)
    net.save_pretrained(folder)
    reloaded = transformers.AutoModel.from_pretrained(folder).eval()
    pixels, ids = random_pixels(model.image_encoder), random_ids(encoder, end_id)
    mask = torch.ones_like(ids, dtype=torch.bool)
    output = reloaded(input_ids=ids, attention_mask=mask.long(), pixel_values=pixels)
    return {
        "image embedding": difference("the image embedding", output.image_embeds, model.encode_image(pixels)),
        "text embedding": difference("the text embedding", output.text_embeds, model.encode_text(ids, mask)),
    }


def _clip_vision_fields(encoder: ImageEncoder) -> dict[str, Any]:
    net: Any = encoder.backbone
    if not _is_plain_clip(net, "VisionTransformer") or encoder.image_size[0] != encoder.image_size[1]:
        message = f"transformers' CLIP takes square images and a plain vision Transformer, got {encoder.name}"
        raise ConfigError(message, "unsupported", field="image_encoder")
    return {
        **_clip_sizes(net.transformer),
        "image_size": encoder.image_size[0],
        "patch_size": net.patch_size[0],
        "num_channels": encoder.in_channels,
        "projection_dim": encoder.feature_dim,
    }


def _clip_text_fields(encoder: TextEncoder, end_id: int) -> dict[str, Any]:
    net: Any = encoder.backbone
    return {
        **_clip_sizes(net.transformer),
        "vocab_size": net.vocab_size,
        "max_position_embeddings": net.context_length,
        "projection_dim": encoder.feature_dim,
        "eos_token_id": end_id,
        "pad_token_id": encoder.pad_id,
        "bos_token_id": None,
    }


def _clip_sizes(transformer: Any) -> dict[str, Any]:
    block = transformer.resblocks[0]
    return {
        "hidden_size": transformer.width,
        "num_hidden_layers": len(transformer.resblocks),
        "num_attention_heads": block.attn.num_heads,
        "intermediate_size": block.mlp.c_fc.out_features,
        "hidden_act": "quick_gelu" if type(block.mlp.gelu).__name__ == "QuickGELU" else "gelu",
        "layer_norm_eps": block.ln_1.eps,
    }
