"""medvl to transformers: folders that `AutoModel.from_pretrained` loads, none of them with code of its own.

A tower goes where transformers has a class that computes the same; a CLIP on open_clip's own towers becomes one
`CLIPModel`. Heads and fusion-encoders of other systems have no class there and are left out, which the card says.
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
from medvl.export.importers.backbones import (
    IMAGE,
    TEXT_PROJECTION,
    hugging_face_clip_image,
    hugging_face_clip_text,
    hugging_face_resnet,
    hugging_face_vit,
)
from medvl.export.importers.key_map import Line, keep, to_theirs
from medvl.models.base import System, TwoTowers
from medvl.models.dual_encoders.clip import CLIP

_ANY_END = 2  # transformers' sign for "the closing token is the one of the highest id"
_TOWERS = ("image_encoder", "text_encoder")
_PROJ = "proj"  # CLIP's projection of an image, in the library's own module
_HEADS = "transformers has no class with this head; medvl's ONNX export holds it"


def export_hugging_face(model: System, out: Path | str) -> Exported:
    """Write a model's towers, or a whole CLIP, as transformers' own classes, with a card.

    Every folder is loaded again by `AutoModel` and its outputs are compared with medvl's before anything is kept.

    Args:
        model: any system with two towers.
        out: new folder: that of a `CLIPModel`, or with `image_encoder` and `text_encoder` in it.

    Raises:
        ConfigError: transformers has no class for one of the towers; the text says which.
        CheckpointError: transformers computes something else.
    """
    if not isinstance(model, TwoTowers) or not isinstance(model.image_encoder, ImageEncoder):
        raise ConfigError(f"{model.name} has no two towers of its own: export the system that it was made of")
    model.eval()
    with new_folder(Path(out)) as folder, torch.no_grad():
        whole = _is_whole_clip(model)
        differences = _write_clip(model, folder) if whole else _write_towers(model, folder)
        left_out = {} if whole else _heads(model)
        if model.tokenizer is not None:
            model.tokenizer.save(folder if whole else folder / "text_encoder")
        write_card(folder, model, usage=_usage(model, whole), left_out=left_out, library="transformers")
    return Exported(folder=Path(out), differences=differences, left_out=left_out)


def _usage(model: TwoTowers, whole: bool) -> str:
    lines = ["from transformers import AutoModel"]
    if whole:
        return "\n".join([*lines, 'model = AutoModel.from_pretrained("FOLDER")'])
    pooler = ", add_pooling_layer=False" if _no_pooler(model.text_encoder.backbone) else ""
    lines.append('image_encoder = AutoModel.from_pretrained("FOLDER/image_encoder")')
    lines.append(f'text_encoder = AutoModel.from_pretrained("FOLDER/text_encoder"{pooler})')
    return "\n".join(lines)


def _heads(model: Any) -> dict[str, str]:
    """What is in neither tower, or over one."""
    parts = [name for name, child in model.named_children() if name not in _TOWERS and _filled(child)]
    if _filled(model.text_encoder.projection):
        parts.append("text_encoder.projection")
    if getattr(model.image_encoder.backbone, _PROJ, None) is not None:
        parts.append(f"{IMAGE}{_PROJ}")
    return dict.fromkeys(parts, _HEADS)


def _write_towers(model: Any, folder: Path) -> dict[str, float]:
    image, text = (folder / name for name in _TOWERS)
    return {**_write_image(model.image_encoder, image), **_write_text(model.text_encoder, text)}


def _filled(module: nn.Module | None) -> bool:
    return module is not None and any(True for _ in module.parameters())


def _fill(net: Any, tensors: Mapping[str, Tensor], table: Sequence[Line], what: str) -> None:
    """Give transformers' module our tensors. Raises ConfigError where the two do not have the same ones."""
    found, unknown = to_theirs(tensors, table)
    state = net.state_dict()
    missing = [name for name in state if name not in found]
    shapes = [name for name, tensor in found.items() if name in state and state[name].shape != tensor.shape]
    strange = [*unknown, *(name for name in found if name not in state), *missing, *shapes]
    if strange:
        raise ConfigError(f"{type(net).__name__} of transformers does not compute what {what} does: {strange[0]}")
    net.load_state_dict(found)


def _write_image(encoder: ImageEncoder, folder: Path) -> dict[str, float]:
    import transformers

    net, table = _image_class(encoder)
    tensors = {f"{IMAGE}{name}": tensor for name, tensor in encoder.backbone.state_dict().items() if name != _PROJ}
    _fill(net, tensors, table, encoder.name)
    net.save_pretrained(folder)
    again = transformers.AutoModel.from_pretrained(folder, **_no_pooler(net)).eval()
    pixels = random_pixels(encoder)
    found, features = again(pixels).last_hidden_state, encoder(pixels)
    if found.ndim == 4:
        found = found.flatten(2).transpose(1, 2)
    if encoder.config["patch_level"] != -1:  # regions are of an earlier stage, the vector is of the last
        return {"image vector": difference("the image vector", found.mean(dim=1), features.pooled_BD)}
    expected = features.patches_BPD
    assert expected is not None, "every class here has regions"
    found = found[:, found.shape[1] - expected.shape[1] :]  # behind the class token, where there is one
    if type(net).__name__ == "CLIPVisionModel":
        found = (
            again.vision_model.post_layernorm(found) if hasattr(again, "vision_model") else again.post_layernorm(found)
        )
    return {"image regions": difference("the image regions", found, expected)}


def _image_class(encoder: ImageEncoder) -> tuple[Any, Sequence[Line]]:
    """(transformers' model at random weights, how its keys correspond to ours)."""
    makers: Mapping[str, Callable[[ImageEncoder], tuple[Any, Sequence[Line]]]] = {
        "timm.models.resnet.ResNet": _resnet,
        "timm.models.vision_transformer.VisionTransformer": _vision_transformer,
        "open_clip.transformer.VisionTransformer": _clip_vision,
    }
    kind = f"{type(encoder.backbone).__module__}.{type(encoder.backbone).__name__}"
    if kind not in makers:
        raise ConfigError(
            f"{encoder.name} is a {kind}, for which transformers has no class that computes the same: exported are "
            f"{', '.join(makers)}. ONNX takes any"
        )
    return makers[kind](encoder)


def _resnet(encoder: ImageEncoder) -> tuple[Any, Sequence[Line]]:
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
    return transformers.ResNetModel(config), hugging_face_resnet("")


def _vision_transformer(encoder: ImageEncoder) -> tuple[Any, Sequence[Line]]:
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
    return transformers.ViTModel(config, add_pooling_layer=False), hugging_face_vit("")


def _clip_vision(encoder: ImageEncoder) -> tuple[Any, Sequence[Line]]:
    import transformers

    net = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**_clip_vision_fields(encoder)))
    return net, hugging_face_clip_image("vision_model." if hasattr(net, "vision_model") else "")


def _write_text(encoder: TextEncoder, folder: Path) -> dict[str, float]:
    import transformers

    net: Any = encoder.backbone
    if not isinstance(net, transformers.PreTrainedModel):
        if not _is_plain_clip(net, "TextTransformer"):
            raise ConfigError(f"the text encoder {encoder.name} is none that transformers has a class for")
        net = transformers.CLIPTextModel(transformers.CLIPTextConfig(**_clip_text_fields(encoder, _ANY_END)))
        table = hugging_face_clip_text("text_model." if hasattr(net, "text_model") else "")
        tensors = {f"text_encoder.backbone.{name}": tensor for name, tensor in encoder.backbone.state_dict().items()}
        _fill(net, tensors, table, encoder.name)
    net.save_pretrained(folder)
    again = transformers.AutoModel.from_pretrained(folder, **_no_pooler(net)).eval()
    ids = random_ids(encoder, None)
    mask = torch.ones_like(ids, dtype=torch.bool)
    found = again(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    return {"token states": difference("the token states", found, encoder.encode(encoder.embed(ids, mask), mask)[-1])}


def _no_pooler(net: Any) -> dict[str, bool]:
    """What keeps `from_pretrained` from adding a pooler at random weights, where the class has one."""
    return {"add_pooling_layer": False} if hasattr(net, "pooler") and net.pooler is None else {}


def _is_plain_clip(net: Any, kind: str) -> bool:
    """Whether one of open_clip's own Transformers is OpenAI's, with nothing added."""
    if type(net).__name__ != kind or not type(net).__module__.startswith("open_clip."):
        return False
    causal = kind != "TextTransformer" or net.attn_mask is not None
    return causal and getattr(net, "attn_pool", None) is None and not getattr(net, "final_ln_after_pool", False)


def _is_whole_clip(model: TwoTowers) -> bool:
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
        *hugging_face_clip_image("vision_model."),
        *hugging_face_clip_text("text_model."),
        keep("visual_projection.weight", f"{IMAGE}proj", change="transposed"),
        keep("text_projection.weight", f"{TEXT_PROJECTION}matrix", change="transposed"),
        keep("logit_scale", "logit_scale"),
    ]
    _fill(net, model.state_dict(), table, model.name)
    net.save_pretrained(folder)
    again = transformers.AutoModel.from_pretrained(folder).eval()
    pixels, ids = random_pixels(model.image_encoder), random_ids(encoder, end_id)
    mask = torch.ones_like(ids, dtype=torch.bool)
    output = again(input_ids=ids, attention_mask=mask.long(), pixel_values=pixels)
    return {
        "image embedding": difference("the image embedding", output.image_embeds, model.encode_image(pixels)),
        "text embedding": difference("the text embedding", output.text_embeds, model.encode_text(ids, mask)),
    }


def _clip_vision_fields(encoder: ImageEncoder) -> dict[str, Any]:
    net: Any = encoder.backbone
    if not _is_plain_clip(net, "VisionTransformer") or encoder.image_size[0] != encoder.image_size[1]:
        raise ConfigError(f"{encoder.name} is no plain CLIP on square images, which transformers' class is")
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
