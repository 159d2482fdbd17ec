"""medvl to open_clip: a folder that `open_clip.create_model("local-dir:FOLDER")` loads."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medvl.common.folders import new_folder
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.encoders.presets import IMAGE_PRESETS, TEXT_PRESETS
from medvl.encoders.text.projections import MatrixHead
from medvl.errors import ConfigError
from medvl.export.exporters.common import Exported, difference, random_ids, random_pixels, write_card
from medvl.models.base import System
from medvl.models.dual_encoders.clip import CLIP

_CONFIG, _WEIGHTS, _TEXT_FOLDER = "open_clip_config.json", "open_clip_model.safetensors", "text_encoder"
_RESIZE = {"crop": "shortest", "pad": "longest", "squash": "squash"}
_BERT_POOLS = {"cls": "cls_last_hidden_state_pooler", "mean": "mean_pooler"}
_CLIP_IDS = 49408
_START_BIAS = -10.0  # any number: it makes open_clip build the parameter


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tower:
    """One half of open_clip's model."""

    fields: Mapping[str, Any]
    """Of its configuration."""
    tensors: Mapping[str, Tensor]
    quick_gelu: bool | None = None
    """None where it makes no difference."""


def export_open_clip(model: System, out: Path | str) -> Exported:
    """Write a CLIP, CheXzero or SigLIP in open_clip's format: configuration, weights, preprocessing, card.

    The model is built again by open_clip and its embeddings are compared with medvl's before anything is kept.

    Args:
        model: on towers that open_clip has: its own; timm's by name, with a linear head; a BERT with open_clip's heads.
        out: new folder. A BERT's configuration and tokenizer lie in `text_encoder`, which the configuration names by
            its full path: open_clip knows no relative ones.

    Raises:
        ConfigError: the model is no CLIP, or open_clip cannot express one of its parts; the text names it.
        CheckpointError: open_clip computes something else.
    """
    import safetensors.torch

    if not isinstance(model, CLIP):
        raise ConfigError(f"open_clip has nothing like {model.name}: only clip, chexzero and siglip can be exported")
    out = Path(out)
    model.eval()
    vision, text = _vision(model), _text(model)
    flags = {tower.quick_gelu for tower in (vision, text)} - {None}
    if len(flags) > 1:
        raise ConfigError("one tower has CLIP's quick GELU and the other one not: open_clip has one setting for both")
    config: dict[str, Any] = {
        "embed_dim": _width(model.image_head, model.image_encoder.feature_dim),
        "vision_cfg": dict(vision.fields),
        "text_cfg": dict(text.fields),
        "custom_text": True,
        "quick_gelu": flags == {True},
    }
    tensors = {**vision.tensors, **text.tensors, "logit_scale": model.logit_scale}
    if hasattr(model, "logit_bias"):
        config["init_logit_bias"], tensors["logit_bias"] = _START_BIAS, model.get_parameter("logit_bias")
    with new_folder(out) as folder:
        hugging_face = not _is_open_clip(model.text_encoder)
        if hugging_face:
            _write_bert(model, folder / _TEXT_FOLDER)
            config["text_cfg"]["hf_model_name"] = str(folder / _TEXT_FOLDER)
        differences = _prove(model, config, tensors)
        if hugging_face:
            config["text_cfg"]["hf_model_name"] = str(out.resolve() / _TEXT_FOLDER)
        content = {"model_cfg": config, "preprocess_cfg": _preprocessing(model)}
        (folder / _CONFIG).write_text(json.dumps(content, indent=1) + "\n")
        stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        safetensors.torch.save_file(stored, folder / _WEIGHTS)
        usage = 'import open_clip\nmodel, _, preprocess = open_clip.create_model_and_transforms("local-dir:FOLDER")'
        write_card(folder, model, usage=usage, left_out={}, library="open_clip")
    return Exported(folder=out, differences=differences, left_out={})


def _vision(model: CLIP) -> _Tower:
    encoder = model.image_encoder
    if encoder.in_channels != 3:
        raise ConfigError("open_clip's image towers take three channels: this one takes grey images")
    arguments = dict(model.config.image_arguments)
    size = list(encoder.image_size)
    if _is_open_clip(encoder):
        base, preset = _base(encoder, IMAGE_PRESETS)
        arguments.pop("embed_dim", None)
        known = {**base["vision_cfg"], **preset, **arguments, "image_size": size}
        known.pop("embed_dim", None)
        tensors = _prefixed(encoder.backbone, "visual.")
        return _Tower(fields=known, tensors=tensors, quick_gelu=bool(base.get("quick_gelu")))
    name = _timm_name(encoder)
    if name is None or arguments or not isinstance(model.image_head, nn.Linear):
        raise ConfigError(
            f"open_clip cannot build {encoder.name} with {arguments or 'these settings'}: it takes its own image "
            "towers, and timm's by name, without arguments, under a linear head"
        )
    fields = {"timm_model_name": name, "timm_pool": "", "timm_proj": "linear", "image_size": size}
    head = {"visual.head.proj.weight": model.image_head.weight}
    return _Tower(fields=fields, tensors={**_prefixed(encoder.backbone, "visual.trunk."), **head})


def _text(model: CLIP) -> _Tower:
    encoder = model.text_encoder
    if encoder.layers != (-1,):
        raise ConfigError(f"open_clip reads the last layer of a text encoder: this one combines {encoder.layers}")
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
        raise ConfigError(f"open_clip's text towers end in their closing token, not in pool={encoder.pool!r}")
    if net.vocab_size != _CLIP_IDS and fields.get("pool_type") != "last" and model.tokenizer is not None:
        fields |= {"pool_type": "eos", "eos_id": model.tokenizer.sep_id}  # CLIP's own is its highest id
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
        raise ConfigError(f"open_clip cannot build the head over {encoder.name}: it knows a linear one and CLIP's MLP")
    if encoder.pool not in _BERT_POOLS:  # open_clip's maximum is over the padding, by a mistake in its mask
        raise ConfigError(f"open_clip pools a BERT by {' or '.join(_BERT_POOLS)}, not by {encoder.pool}")
    fields = {
        "context_length": model.config.max_tokens,
        "vocab_size": encoder.vocab_size,
        "hf_proj_type": "linear" if linear else "mlp",
        "hf_pooler_type": _BERT_POOLS[encoder.pool],
        "hf_model_pretrained": False,
    }
    tensors = {**_prefixed(encoder.backbone, "text.transformer."), **_prefixed(head, "text.proj.")}
    return _Tower(fields=fields, tensors=tensors)


def _base(encoder: ImageEncoder | TextEncoder, presets: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(open_clip's configuration of the model that an encoder is named by, what its preset adds)."""
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
    if model.tokenizer is not None:
        model.tokenizer.save(folder)


def _preprocessing(model: CLIP) -> dict[str, Any]:
    encoder = model.image_encoder
    return {
        "size": list(encoder.image_size),
        "mean": list(encoder.mean),
        "std": list(encoder.std),
        "interpolation": "bicubic",
        "resize_mode": _RESIZE[model.config.fit],
    }


@torch.no_grad()
def _prove(model: CLIP, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Build it with open_clip and compare. Raises ConfigError when the tensors do not fit, CheckpointError when the
    embeddings differ."""
    import open_clip

    arguments = {name: value for name, value in config.items() if name != "custom_text"}
    theirs: Any = open_clip.CustomTextCLIP(**arguments)
    try:
        theirs.load_state_dict(tensors)
    except RuntimeError as error:
        raise ConfigError(f"open_clip builds this model with other tensors: {error}") from error
    theirs.eval()
    pixels = random_pixels(model.image_encoder)
    end_id = _CLIP_IDS - 1 if model.text_encoder.vocab_size == _CLIP_IDS else None
    if model.tokenizer is not None:
        end_id = model.tokenizer.sep_id
    ids = random_ids(model.text_encoder, end_id)
    mask = torch.ones_like(ids, dtype=torch.bool)
    length = theirs.text.context_length if _is_open_clip(model.text_encoder) else ids.shape[1]
    padded = nn.functional.pad(ids, (0, length - ids.shape[1]), value=model.text_encoder.pad_id)
    return {
        "image embedding": difference(
            "the image embedding", theirs.encode_image(pixels, normalize=True), model.encode_image(pixels)
        ),
        "text embedding": difference(
            "the text embedding", theirs.encode_text(padded, normalize=True), model.encode_text(ids, mask)
        ),
    }
