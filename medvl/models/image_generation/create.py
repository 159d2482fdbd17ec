"""Creation of latent diffusion models from the checkpoints of their parts."""

from pathlib import Path
from typing import Any

import safetensors

from medvl.common.config_io import from_dict, to_dict
from medvl.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from medvl.errors import ConfigError
from medvl.models.checkpoint import described_model, load_parts
from medvl.models.factory import create_model
from medvl.models.image_generation.autoencoder import AutoencoderConfig
from medvl.models.image_generation.latent_diffusion import LatentDiffusion, LatentDiffusionConfig
from medvl.models.locate import TOKENIZER, WEIGHTS, find_checkpoint


def create_latent_diffusion(
    config: LatentDiffusionConfig,
    *,
    start: Path | str | None = None,
    random_unet: bool = False,
    autoencoder: Path | str | None = None,
    text: Path | str | None = None,
    tokenizer: Tokenizer | Path | str | None = None,
    pretrained: bool = False,
) -> LatentDiffusion:
    """Create a latent diffusion model from the weights of its parts; parts without weights start at random.

    Args:
        config: settings. With `autoencoder`, the sizes and the images' size must be that checkpoint's.
        start: checkpoint of a latent diffusion model, such as an imported Stable Diffusion: its U-Net and autoencoder,
            and its text encoder too where `config` names the same one and neither `text` nor `pretrained` is given.
            With its autoencoder comes the scale of the latents.
        random_unet: draw the U-Net, with the layer that maps text states to its width, at random; `start` then gives
            the other parts.
        autoencoder: checkpoint of the system `autoencoder`, in place of `start`'s. The scale of its latents is
            `config.latent_scale`; None: `measure_scale` sets it before the training.
        text: checkpoint of any system with a text encoder of the same sizes, with its tokenizer.
        tokenizer: the tokenizer or its folder. Default: that of `text`, of `start`, else the text encoder's own.
        pretrained: start the text encoder from its preset's published weights.

    Raises:
        ConfigError: no autoencoder is given, the sizes differ, or an argument contradicts another.
        CheckpointError: a checkpoint is incomplete or does not fit.
    """
    if text is not None and pretrained:
        raise ConfigError("give text or pretrained, not both", "conflict", field="text")
    if start is None and autoencoder is None:
        message = "a latent diffusion model needs a trained autoencoder; give autoencoder, or start"
        raise ConfigError(message, "missing", field="autoencoder")
    keeps_text = start is not None and text is None and not pretrained and _same_text(config, start)
    if tokenizer is None:
        tokenizer = _tokenizer(config, text if text is not None else start if keeps_text else None)
    if autoencoder is not None:
        _check_autoencoder(config, autoencoder)
    model: Any = create_model(config, pretrained=pretrained, tokenizer=tokenizer)
    if start is not None:
        kept = {
            "autoencoder": autoencoder is None,
            "unet": not random_unet,
            "text_encoder": keeps_text,
            "text_projection": keeps_text and not random_unet,
        }
        load_parts(model, start, [part for part, is_kept in kept.items() if is_kept])
        if autoencoder is None:
            with safetensors.safe_open(find_checkpoint(start) / WEIGHTS, framework="pt") as weights:
                model.latent_scale.copy_(weights.get_tensor("latent_scale"))
        if model.ema_unet is not None:
            model.ema_unet.load_state_dict(model.unet.state_dict())
    if autoencoder is not None:
        load_parts(model, autoencoder, ["autoencoder"])
    if text is not None:
        load_parts(model, text, ["text_encoder"])
    return model


def _same_text(config: LatentDiffusionConfig, start: Path | str) -> bool:
    """Return whether the text encoder of a checkpoint is the one that a configuration names."""
    theirs, ours = described_model(start)["settings"], to_dict(config)
    return config.text_weights is None and all(
        theirs.get(name) == ours[name] for name in ("text_encoder", "text_arguments")
    )


def _tokenizer(config: LatentDiffusionConfig, source: Path | str | None) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint, or CLIP's for its text encoders."""
    folder = None if source is None else find_checkpoint(source) / TOKENIZER
    if folder is not None and folder.is_dir():
        return load_tokenizer(folder, max_tokens=config.max_tokens)
    is_clip = config.text_encoder.startswith("open_clip:") or config.text_encoder == "clip_text"
    return load_tokenizer("clip", max_tokens=config.max_tokens) if is_clip else None


def _check_autoencoder(config: LatentDiffusionConfig, folder: Path | str) -> None:
    """Raise ConfigError unless a checkpoint is an autoencoder of the configuration's sizes and images."""
    described = described_model(folder)
    if described["name"] != "autoencoder":
        message = f"expected a checkpoint of the system autoencoder, got {described['name']} in {folder}"
        raise ConfigError(message, "wrong_type", field="autoencoder")
    theirs = from_dict(AutoencoderConfig, described["settings"])
    for field, their, our in (
        ("autoencoder", theirs.sizes, config.autoencoder),
        ("image_size", theirs.image_size, config.image_size),
        ("fit", theirs.fit, config.fit),
    ):
        if their != our:
            raise ConfigError(f"{folder} has {field} {their}, the model {our}", "mismatch", field=field)
