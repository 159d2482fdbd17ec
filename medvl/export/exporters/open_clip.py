"""Export to open_clip: a folder that `open_clip.create_model("local-dir:FOLDER")` loads."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from medvl.common.files import new_folder
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.encoders.presets import IMAGE_PRESETS, TEXT_PRESETS
from medvl.encoders.text.adapters import MatrixHead
from medvl.errors import ConfigError
from medvl.export.exporters.common import (
    Exported,
    difference,
    random_ids,
    random_pixels,
    write_card,
)
from medvl.models.base import System
from medvl.models.dual_encoders.clip import CLIP

_CONFIG = "open_clip_config.json"
_WEIGHTS = "open_clip_model.safetensors"
_TEXT_FOLDER = "text_encoder"
_RESIZE = {"crop": "shortest", "pad": "longest", "squash": "squash"}
_BERT_POOLS = {"cls": "cls_last_hidden_state_pooler", "mean": "mean_pooler"}
_CLIP_IDS = 49408
_USAGE = """import open_clip
model, _, preprocess = open_clip.create_model_and_transforms("local-dir:FOLDER")
tokenizer = open_clip.get_tokenizer("local-dir:FOLDER")"""
_BERT_USAGE = """import json
import open_clip
text_cfg = json.load(open("FOLDER/open_clip_config.json"))["model_cfg"]["text_cfg"]
text_cfg |= {"hf_model_name": "FOLDER/text_encoder", "hf_model_pretrained": False}
model, _, preprocess = open_clip.create_model_and_transforms("local-dir:FOLDER", text_cfg=text_cfg)
tokenizer = open_clip.get_tokenizer("local-dir:FOLDER")"""
_START_BIAS = -10.0  # its value is overwritten: setting it makes open_clip create the parameter


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tower:
    """The image or text half of open_clip's model."""

    fields: Mapping[str, Any]  # fields of its configuration
    tensors: Mapping[str, Tensor]
    quick_gelu: bool | None = None  # none if it makes no difference


def export_open_clip(model: System, out: Path | str) -> Exported:
    """Write a CLIP, CheXzero or SigLIP in open_clip's format: configuration, weights,
    preprocessing, card.

    open_clip builds the model again, and its embeddings are compared with medvl's before the folder
    is kept.

    Args:
        model: with encoders that open_clip has: its own; timm's by name, with a linear head; a BERT
            with open_clip's heads.
        out: new folder, which can be moved. open_clip looks for a BERT's configuration relative to
            the working directory, so the usage in `README.md` passes the path of the folder's
            `text_encoder`.

    Raises:
        ConfigError: the model is not a CLIP, or open_clip does not support one of its parts; the
            message names it.
        CheckpointError: open_clip's embeddings differ.
    """
    if not isinstance(model, CLIP):
        message = f"open_clip does not support {model.name}: export clip, chexzero or siglip"
        raise ConfigError(message, "unsupported", field="model")
    out = Path(out)
    model.eval()
    vision = _vision(model)
    text = _text(model)
    flags = {tower.quick_gelu for tower in (vision, text)} - {None}
    if len(flags) > 1:
        message = "only one encoder has CLIP's quick GELU: open_clip has a single setting for both"
        raise ConfigError(message, "unsupported")
    config: dict[str, Any] = {
        "embed_dim": _width(model.image_head, model.image_encoder.feature_dim),
        "vision_cfg": dict(vision.fields),
        "text_cfg": dict(text.fields),
        "custom_text": True,
        "quick_gelu": flags == {True},
    }
    tensors = {**vision.tensors, **text.tensors, "logit_scale": model.logit_scale}
    if hasattr(model, "logit_bias"):
        config["init_logit_bias"], tensors["logit_bias"] = (
            _START_BIAS,
            model.get_parameter("logit_bias"),
        )
    with new_folder(out) as folder:
        hugging_face = not _is_open_clip(model.text_encoder)
        if hugging_face:
            _write_bert(model, folder / _TEXT_FOLDER)
            config["text_cfg"]["hf_model_name"] = str(folder / _TEXT_FOLDER)
        differences = _compare(model, config, tensors)
        if hugging_face:
            config["text_cfg"]["hf_model_name"] = _TEXT_FOLDER
            # any name: open_clip reads the tokenizer from the folder itself
            if model.tokenizer is not None:
                config["text_cfg"]["hf_tokenizer_name"] = _TEXT_FOLDER
                model.tokenizer.save(folder)
        content = {"model_cfg": config, "preprocess_cfg": _preprocessing(model)}
        (folder / _CONFIG).write_text(json.dumps(content, indent=1) + "\n")
        stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        safetensors.torch.save_file(stored, folder / _WEIGHTS)
        write_card(
            folder,
            model,
            usage=_BERT_USAGE if hugging_face else _USAGE,
            left_out={},
            library="open_clip",
        )
    return Exported(folder=out, differences=differences, left_out={})


def _vision(model: CLIP) -> _Tower:
    encoder = model.image_encoder
    if encoder.in_channels != 3:
        raise ConfigError(
            "open_clip's image encoders take three channels, got grey images", "unsupported"
        )
    arguments = dict(model.config.image_arguments)
    size = list(encoder.image_size)
    if _is_open_clip(encoder):
        base, preset = _base(encoder, IMAGE_PRESETS)
        arguments.pop("embed_dim", None)
        fields = {**base["vision_cfg"], **preset, **arguments, "image_size": size}
        fields.pop("embed_dim", None)
        tensors = _prefixed(encoder.backbone, "visual.")
        return _Tower(fields=fields, tensors=tensors, quick_gelu=bool(base.get("quick_gelu")))
    name = _timm_name(encoder)
    if name is None or arguments or not isinstance(model.image_head, nn.Linear):
        message = (
            f"open_clip cannot build {encoder.name} with {arguments or 'these settings'}: it "
            f"supports its own image "
            "encoders, and timm's by name, without arguments, under a linear head"
        )
        raise ConfigError(message, "unsupported", field="image_encoder")
    fields = {"timm_model_name": name, "timm_pool": "", "timm_proj": "linear", "image_size": size}
    head = {"visual.head.proj.weight": model.image_head.weight}
    return _Tower(fields=fields, tensors={**_prefixed(encoder.backbone, "visual.trunk."), **head})


def _text(model: CLIP) -> _Tower:
    encoder = model.text_encoder
    if encoder.layers != (-1,):
        message = (
            f"open_clip reads the last layer of a text encoder, got a combination of "
            f"{encoder.layers}"
        )
        raise ConfigError(message, "unsupported", field="text_arguments")
    return _clip_text(model, encoder) if _is_open_clip(encoder) else _bert(model, encoder)


def _clip_text(model: CLIP, encoder: TextEncoder) -> _Tower:
    base, _ = _base(encoder, TEXT_PRESETS)
    net: Any = encoder.backbone
    fields = {
        **base["text_cfg"],
        "context_length": net.context_length,
        "vocab_size": net.vocab_size,
        "width": net.width,
        "heads": net.transformer.resblocks[0].attn.num_heads,
        "layers": len(net.transformer.resblocks),
        "pad_id": encoder.pad_id,
    }
    if encoder.pool != "eos":
        message = f"open_clip's text encoders pool by the end token, got pool={encoder.pool!r}"
        raise ConfigError(message, "unsupported", field="text_pool")
    if (
        net.vocab_size != _CLIP_IDS
        and fields.get("pool_type") != "last"
        and model.tokenizer is not None
    ):
        # CLIP's default is the highest id
        fields |= {"pool_type": "eos", "eos_id": model.tokenizer.sep_id}
    tensors = _prefixed(net, "text.")
    projection = encoder.projection
    if isinstance(projection, MatrixHead):
        tensors["text.text_projection"] = projection.matrix
    elif projection is not None:
        tensors |= _prefixed(projection, "text.text_projection.")
    return _Tower(fields=fields, tensors=tensors, quick_gelu=bool(base.get("quick_gelu")))


def _bert(model: CLIP, encoder: TextEncoder) -> _Tower:
    head = encoder.projection if encoder.projection is not None else model.text_head
    linear = isinstance(head, nn.Linear) and head.bias is None
    if not linear and not isinstance(head, nn.Sequential):
        message = (
            f"open_clip supports a linear head and CLIP's MLP over {encoder.name}, got another head"
        )
        raise ConfigError(message, "unsupported")
    # open_clip's maximum includes the padding: a mistake in its mask
    if encoder.pool not in _BERT_POOLS:
        message = f"open_clip pools a BERT by {' or '.join(_BERT_POOLS)}, got {encoder.pool}"
        raise ConfigError(message, "unsupported", field="text_pool")
    fields = {
        "context_length": model.config.max_tokens,
        "vocab_size": encoder.vocab_size,
        "hf_proj_type": "linear" if linear else "mlp",
        "hf_pooler_type": _BERT_POOLS[encoder.pool],
        "hf_model_pretrained": False,
    }
    tensors = {**_prefixed(encoder.backbone, "text.transformer."), **_prefixed(head, "text.proj.")}
    return _Tower(fields=fields, tensors=tensors)


def _base(
    encoder: ImageEncoder | TextEncoder, presets: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return open_clip's configuration of an encoder's model, and the arguments that its preset
    adds.
    """
    import open_clip

    preset = presets.get(encoder.name)
    name = (encoder.name if preset is None else preset.model).removeprefix("open_clip:")
    config = open_clip.get_model_config(name) or {"vision_cfg": {}, "text_cfg": {}}
    return config, {} if preset is None else dict(preset.arguments)


def _is_open_clip(encoder: ImageEncoder | TextEncoder) -> bool:
    return type(encoder.backbone).__module__.startswith("open_clip.")


def _timm_name(encoder: ImageEncoder) -> str | None:
    preset = IMAGE_PRESETS.get(encoder.name)
    if not type(encoder.backbone).__module__.startswith("timm."):
        return None
    if preset is None:
        return encoder.name.removeprefix("timm:")
    return None if preset.arguments else preset.model.removeprefix("timm:")


def _prefixed(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in module.state_dict().items()}


def _width(head: nn.Module, width: int) -> int:
    return head.out_features if isinstance(head, nn.Linear) else width


def _write_bert(model: CLIP, folder: Path) -> None:
    backbone: Any = model.text_encoder.backbone
    folder.mkdir()
    backbone.config.save_pretrained(folder)


def _preprocessing(model: CLIP) -> dict[str, Any]:
    encoder = model.image_encoder
    return {
        "size": list(encoder.image_size),
        "mean": list(encoder.mean),
        "std": list(encoder.std),
        "interpolation": "bilinear" if model.config.resize.startswith("bilinear") else "bicubic",
        "resize_mode": _RESIZE[model.config.fit],
    }


@torch.no_grad()
def _compare(
    model: CLIP, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, float]:
    import open_clip

    arguments = {name: value for name, value in config.items() if name != "custom_text"}
    exported: Any = open_clip.CustomTextCLIP(**arguments)
    try:
        exported.load_state_dict(tensors)
    except RuntimeError as error:
        raise ConfigError(
            f"open_clip builds this model with other tensors: {error}", "unsupported"
        ) from error
    exported.eval()
    pixels = random_pixels(model.image_encoder)
    end_id = _CLIP_IDS - 1 if model.text_encoder.vocab_size == _CLIP_IDS else None
    if model.tokenizer is not None:
        end_id = model.tokenizer.sep_id
    ids = random_ids(model.text_encoder, end_id)
    mask = torch.ones_like(ids, dtype=torch.bool)
    length = exported.text.context_length if _is_open_clip(model.text_encoder) else ids.shape[1]
    padded = nn.functional.pad(ids, (0, length - ids.shape[1]), value=model.text_encoder.pad_id)
    return {
        "image embedding": difference(
            "the image embedding",
            exported.encode_image(pixels, normalize=True),
            model.encode_image(pixels),
        ),
        "text embedding": difference(
            "the text embedding",
            exported.encode_text(padded, normalize=True),
            model.encode_text(ids, mask),
        ),
    }
