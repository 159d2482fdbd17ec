"""Stable Diffusion 1.x from a local folder in diffusers' layout, as a latent diffusion model of
medvl.

    FOLDER/unet, FOLDER/vae  config.json and diffusion_pytorch_model.safetensors
    FOLDER/text_encoder      config.json and model.safetensors, of transformers' CLIPTextModel
    FOLDER/scheduler         scheduler_config.json

Only safetensors are read; no code in the folder is run.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from medvl.common.untrusted import parse_json
from medvl.data.tokenizer.tokenizer import load_tokenizer
from medvl.encoders.pretrained import check_values
from medvl.errors import WeightsError
from medvl.export.importers.backbones import TEXT, hugging_face_clip_text
from medvl.export.importers.key_map import counter, fixed, to_medvl
from medvl.models.image_generation.autoencoder import (
    AutoencoderSizes,
    NoiseSchedule,
    UNetSizes,
    require_diffusers,
)
from medvl.models.image_generation.latent_diffusion import RoentGen, RoentGenConfig

_CLIP = "open_clip:ViT-L-14-quickgelu"
_TEXT_FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "vocab_size",
)
_CLIP_TEXT = dict(zip(_TEXT_FIELDS, (768, 12, 12, 77, 49408), strict=True))
_UNET_DEFAULTS: Mapping[str, Any] = {
    "use_linear_projection": False,
    "only_cross_attention": False,
    "dual_cross_attention": False,
    "class_embed_type": None,
    "addition_embed_type": None,
    "upcast_attention": False,
}
"""Settings of a U-Net that Stable Diffusion 2 and later change; medvl's has these."""


def load_stable_diffusion(folder: Path | str, **settings: Any) -> RoentGen:
    """Load a local folder of Stable Diffusion 1.x, or of a model fine-tuned from it, in eval mode.

    Args:
        folder: as the module's docstring describes; other files, such as safety checkers, are not
            read.
        settings: fields of `RoentGenConfig` that are not the folder's sizes, such as
            `train_text=False`.

    Raises:
        WeightsError: a file is missing or damaged, needs pickle, or describes another architecture.
        ConfigError: diffusers is not installed, or a setting is out of range.
    """
    folder = Path(folder)
    unet = _config(folder / "unet" / "config.json")
    vae = _config(folder / "vae" / "config.json")
    text = _config(folder / "text_encoder" / "config.json")
    scheduler = _config(folder / "scheduler" / "scheduler_config.json")
    with _described(folder):
        sizes = _sizes(folder, unet, vae, text, scheduler)
        config = RoentGenConfig(**{**sizes, **settings})
    tokenizer = load_tokenizer("clip", max_tokens=config.max_tokens)
    model = RoentGen.build(config, pretrained=False, tokenizer=tokenizer)
    diffusers = require_diffusers()
    for part, kind in (("unet", "UNet2DConditionModel"), ("vae", "AutoencoderKL")):
        with _described(folder / part):  # from_pretrained renames the keys of old files
            loaded = getattr(diffusers, kind).from_pretrained(
                folder / part, use_safetensors=True, local_files_only=True, low_cpu_mem_usage=False
            )
        _load(
            model.unet if part == "unet" else model.autoencoder, loaded.state_dict(), folder / part
        )
    _load(
        model.text_encoder,
        _text_weights(folder / "text_encoder" / "model.safetensors"),
        folder / "text_encoder",
    )
    if model.ema_unet is not None:
        model.ema_unet.load_state_dict(model.unet.state_dict())
    return model.eval()


def _sizes(folder: Path, unet: Any, vae: Any, text: Any, scheduler: Any) -> dict[str, Any]:
    """Return the fields of a `RoentGenConfig` that a folder determines. Raises WeightsError for
    other architectures.
    """
    heads = unet.get("attention_head_dim", 8)
    channels = tuple(unet["block_out_channels"])
    schedule = (scheduler["num_train_timesteps"], scheduler["beta_start"], scheduler["beta_end"])
    expected = (NoiseSchedule.STEPS, NoiseSchedule.BETA_START, NoiseSchedule.BETA_END)
    other = [name for name, value in _UNET_DEFAULTS.items() if unet.get(name, value) != value]
    other += ["attention_head_dim"] if not isinstance(heads, int) else []
    other += ["hidden_act"] if text.get("hidden_act") != "quick_gelu" else []
    other += (
        ["scheduler"]
        if schedule != expected or scheduler["beta_schedule"] != "scaled_linear"
        else []
    )
    if other:
        message = f"{folder} is not Stable Diffusion 1: it differs in {', '.join(other)}"
        raise WeightsError(message, "unsupported", field=other[0])
    own = {name: text[name] for name in _TEXT_FIELDS}
    changed = {
        name: value
        for name, value in own.items()
        if value != _CLIP_TEXT[name] and name != "vocab_size"
    }
    targets = {"epsilon": "epsilon", "v_prediction": "v"}
    return {
        "image_size": int(unet["sample_size"]) * 2 ** (len(vae["block_out_channels"]) - 1),
        "autoencoder": AutoencoderSizes(
            image_channels=vae["in_channels"],
            channels=tuple(vae["block_out_channels"]),
            layers=vae["layers_per_block"],
            latent_channels=vae["latent_channels"],
            groups=vae.get("norm_num_groups", 32),
            attention=vae.get("mid_block_add_attention", True),
        ),
        "unet": UNetSizes(
            channels=channels,
            cross_attention=tuple(
                kind.startswith("CrossAttn") for kind in unet["down_block_types"]
            ),
            layers=unet["layers_per_block"],
            heads=heads,
            text_width=unet["cross_attention_dim"],
            groups=unet.get("norm_num_groups", 32),
        ),
        "latent_scale": float(vae.get("scaling_factor", 0.18215)),
        "text_encoder": _CLIP,
        "text_arguments": changed,
        "vocab_size": None if own["vocab_size"] == _CLIP_TEXT["vocab_size"] else own["vocab_size"],
        "max_tokens": own["max_position_embeddings"],
        "target": targets[scheduler.get("prediction_type", "epsilon")],
    }


def _config(path: Path) -> Any:
    try:
        content = parse_json(path.read_bytes())
    except FileNotFoundError:
        message = (
            f"{path} does not exist: expected a folder of Stable Diffusion in diffusers' layout"
        )
        raise WeightsError(message, "not_found") from None
    except (ValueError, OSError) as error:
        raise WeightsError(
            f"{path} cannot be read ({type(error).__name__})", "malformed"
        ) from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path}: expected a JSON object", "malformed")
    return content


@contextlib.contextmanager
def _described(folder: Path) -> Iterator[None]:
    """Convert errors of reading a folder's configuration or weights to WeightsError."""
    try:
        yield
    except (KeyError, TypeError) as error:
        raise WeightsError(f"{folder} lacks a setting: {error}", "malformed") from error
    except (OSError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
        message = f"{folder} has no complete safetensors weights that fit its config.json: {error}"
        raise WeightsError(message, "malformed") from error


def _text_weights(path: Path) -> dict[str, Tensor]:
    """Return the text encoder's weights by medvl's names."""
    with _described(path):
        tensors = safetensors.torch.load_file(path)
    prefix = "text_model." if any(key.startswith("text_model.") for key in tensors) else ""
    table = [fixed("**.position_ids", counter, "a counter"), *hugging_face_clip_text(prefix)]
    mapped = to_medvl(tensors, table)
    if mapped.problems:
        raise WeightsError(
            f"{path} is not a CLIP text encoder: {'; '.join(mapped.problems[:4])}", "mismatch"
        )
    start = TEXT.removesuffix("backbone.")
    return {name.removeprefix(start): tensor for name, tensor in mapped.tensors.items()}


def _load(module: Any, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Load weights strictly. Raises WeightsError with the first differences."""
    own = {name: tensor.shape for name, tensor in module.state_dict().items()}
    theirs = {name: tensor.shape for name, tensor in tensors.items()}
    wrong = [name for name in {**own, **theirs} if own.get(name) != theirs.get(name)]
    if wrong:
        message = f"{folder} does not fit: {', '.join(wrong[:4])}{' ...' if len(wrong) > 4 else ''}"
        raise WeightsError(message, "mismatch")
    check_values(tensors, module.state_dict(), str(folder))
    module.load_state_dict(dict(tensors))
