"""Latent diffusion from text (Rombach et al., arXiv 2112.10752), on any text encoder of medvl.

B batch, Z latent channels, H and W height and width of the latents, T text tokens, D width of the
text states.
"""

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, Unpack

import safetensors
import torch
from torch import Tensor, nn

from medvl import losses
from medvl.common.config_io import check_choice, check_within, from_dict, to_dict
from medvl.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import TextEncoder, create_text_encoder, parameter_groups
from medvl.errors import ConfigError
from medvl.models.base import (
    EncoderArguments,
    Parts,
    System,
    SystemConfig,
    complete_rows,
    zero_loss,
)
from medvl.models.checkpoint import load_parts
from medvl.models.checkpoint_folder import TOKENIZER, WEIGHTS, described_model, find_checkpoint
from medvl.models.factory import create_model
from medvl.models.image_generation.autoencoder import (
    AutoencoderConfig,
    AutoencoderSizes,
    NoiseSchedule,
    UNetSizes,
    to_grey,
    to_signal,
)
from medvl.models.registry import register_system
from medvl.schema import Batch, Losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentDiffusionConfig(SystemConfig):
    """Settings of latent diffusion; sizes of Stable Diffusion 1 with a BERT as text encoder."""

    image_size: int = 512
    fit: Literal["crop", "pad", "squash"] = "pad"
    autoencoder: AutoencoderSizes = dataclasses.field(default_factory=AutoencoderSizes)
    unet: UNetSizes = dataclasses.field(default_factory=UNetSizes)
    latent_scale: float | None = None
    """Factor that gives the latents a variance near 1; None takes that of the checkpoint that the
    autoencoder and the U-Net come from, or else measures it on the training images.
    """
    text_encoder: str = "pubmedbert"
    text_arguments: EncoderArguments = dataclasses.field(default_factory=dict)
    text_weights: str | None = None
    """Initial weights of the text encoder: a file, a folder with one, or `OWNER/NAME@COMMIT[:FILE]`
    on the hub; None takes those that `pretrained` selects. `create_model` reads them; a checkpoint
    has weights of its own.
    """
    text_mask: bool = True
    """Attend to real tokens only. False pads each text to `max_tokens` with its last token and
    attends to all of them, as Stable Diffusion does with CLIP's text encoder.
    """
    max_tokens: int = 128
    vocab_size: int | None = None
    """Embeddings of the text encoder; None takes the tokenizer's size where one is given, else
    the preset's.
    """
    train_text: bool = False
    """Train the text encoder with the U-Net; else it is frozen."""
    text_lr_mult: float = 1.0
    """Learning rate of a trained text encoder, as a multiple of the U-Net's."""
    target: Literal["epsilon", "v"] = "epsilon"
    """What the U-Net predicts: the noise, or the velocity (Salimans and Ho, arXiv 2202.00512)."""
    min_snr: float | None = None
    """Gamma of min-SNR weights (Hang et al., arXiv 2303.09556; 5 is usual); None weighs all
    noise levels equally.
    """
    caption_dropout: float = 0.1
    """Share of texts that are replaced by the empty text in training, which classifier-free
    guidance needs.
    """
    ema_decay: float = 0.0
    """Decay of the moving average of the U-Net's weights, which evaluation then uses; 0 is without.
    It starts low: min(decay, (1 + updates) / (10 + updates)).
    """
    gradient_checkpointing: bool = False
    """Recompute the U-Net's blocks in the backward pass: less memory for a third more
    arithmetic.
    """

    def __post_init__(self) -> None:
        check_choice(self.fit, ("crop", "pad", "squash"), "fit")
        check_choice(self.target, ("epsilon", "v"), "target")
        check_within(self, "[0, 1)", "caption_dropout", "ema_decay")
        check_within(self, "(0, inf)", "latent_scale", "text_lr_mult", "min_snr")
        check_within(self, "[3, inf)", "max_tokens")
        size = self.image_size // self.autoencoder.reduction
        halvings = len(self.unet.channels) - 1
        if size % 2**halvings:
            message = (
                f"latents of {size} x {size} cannot be halved {halvings} times by the "
                f"U-Net; use fewer levels"
            )
            raise ConfigError(message, "conflict", field="image_size")


@register_system("latent_diffusion")
class LatentDiffusion(System):
    """A frozen autoencoder, a U-Net that removes noise from its latents, and a text encoder that
    the U-Net attends to.

    The loss, "denoising", is the mean squared error of the predicted noise or velocity at a random
    noise level.

    Attributes:
        autoencoder, unet: diffusers' networks, with its parameter names. The autoencoder is never
            trained.
        text_encoder: shared with other systems; frozen unless `config.train_text`.
        text_projection: maps text states to the width that the U-Net attends to; the identity where
            widths agree.
        ema_unet: moving average of the U-Net, or None; `denoiser` is the one to evaluate.
        latent_scale: factor of the latents.
    """

    Config: ClassVar[type[SystemConfig]] = LatentDiffusionConfig
    shared_encoders = ("autoencoder", "text_encoder")
    latent_scale: Tensor

    def __init__(self, config: Any, text_encoder: TextEncoder, **parts: Unpack[Parts]) -> None:
        super().__init__(config, **parts)
        self.autoencoder: Any = config.autoencoder.build(config.image_size).requires_grad_(False)
        sizes = config.unet
        latent_size = config.image_size // config.autoencoder.reduction
        self.unet: Any = sizes.build(config.autoencoder.latent_channels, latent_size)
        if config.gradient_checkpointing:
            self.unet.enable_gradient_checkpointing()
        self.text_encoder = text_encoder.requires_grad_(config.train_text)
        fits = text_encoder.token_dim == sizes.text_width
        self.text_projection = (
            nn.Identity() if fits else nn.Linear(text_encoder.token_dim, sizes.text_width)
        )
        self.ema_unet: Any = (
            copy.deepcopy(self.unet).requires_grad_(False) if config.ema_decay else None
        )
        self.schedule = NoiseSchedule()
        # 0: not measured yet
        self.register_buffer("latent_scale", torch.tensor(config.latent_scale or 0.0))
        self.train(self.training)

    @classmethod
    def build(cls, config: Any, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """Apply `pretrained` to the text encoder.

        Weights of Stable Diffusion come with `medvl.export.load_stable_diffusion`.
        """
        arguments: dict[str, Any] = {**config.text_arguments, "vocab_size": config.vocab_size}
        text_encoder = create_text_encoder(config.text_encoder, pretrained=pretrained, **arguments)
        if config.max_tokens > text_encoder.max_tokens:
            message = (
                f"{config.text_encoder} reads at most {text_encoder.max_tokens} tokens, "
                f"got {config.max_tokens}"
            )
            raise ConfigError(message, "too_large", field="max_tokens")
        transform = EvalTransform(size=config.image_size, fit=config.fit)
        return cls(config, text_encoder, transform=transform, tokenizer=tokenizer)

    def train(self, mode: bool = True) -> Self:
        """Set the mode as `nn.Module.train` does; frozen parts stay in eval mode."""
        super().train(mode)
        self.autoencoder.eval()
        if not self.config.train_text:
            self.text_encoder.eval()
        if self.ema_unet is not None:
            self.ema_unet.eval()
        return self

    @property
    def denoiser(self) -> Any:
        """The U-Net that is trained, in training mode; else its moving average, if there is one."""
        return self.unet if self.training or self.ema_unet is None else self.ema_unet

    def forward(self, batch: Batch) -> Losses:
        """Return the loss of a training batch; a `LatentBatch` has latents, and text states of a
        frozen encoder.
        """
        moments_BCHW = getattr(batch, "moments_BCHW", None)
        states_BTD = getattr(batch, "states_BTD", None)
        ids_BT = batch.ids_BT
        mask_BT = batch.mask_BT
        if moments_BCHW is None:
            row_K = complete_rows(batch)
            if not len(row_K):
                return Losses.sum(denoising=zero_loss(self))
            ids_BT = ids_BT[row_K]
            mask_BT = mask_BT[row_K]
            moments_BCHW = self.encode_moments(batch.image_BCHW[row_K])
        latent_BZHW = self._sample(moments_BCHW) * self.latent_scale
        states_BTD, mask_BT = self._drop_captions(ids_BT, mask_BT, states_BTD)
        step_B = torch.randint(
            0, self.schedule.STEPS, (len(latent_BZHW),), device=latent_BZHW.device
        )
        noise_BZHW = torch.randn_like(latent_BZHW)
        noisy_BZHW = self.schedule.add(latent_BZHW, noise_BZHW, step_B)
        is_v = self.config.target == "v"
        target_BZHW = (
            self.schedule.velocity(latent_BZHW, noise_BZHW, step_B) if is_v else noise_BZHW
        )
        predicted_BZHW = self.predict(noisy_BZHW, step_B, states_BTD, mask_BT)
        return Losses.sum(
            denoising=losses.denoising(
                predicted_BZHW,
                target_BZHW,
                self.schedule.snr(step_B),
                min_snr=self.config.min_snr,
                target=self.config.target,
            )
        )

    def predict(
        self, noisy_BZHW: Tensor, step_B: Tensor, states_BTD: Tensor, mask_BT: Tensor
    ) -> Tensor:
        """Return the U-Net's prediction of the noise or velocity, (B, Z, H, W)."""
        mask = mask_BT if self.config.text_mask else None
        text_BTD = self.text_projection(states_BTD)
        output: Tensor = self.denoiser(
            noisy_BZHW,
            step_B,
            encoder_hidden_states=text_BTD,
            encoder_attention_mask=mask,
            return_dict=False,
        )[0]
        return output

    @torch.no_grad()
    def encode_moments(self, image_BCHW: Tensor) -> Tensor:
        """Return (B, 2Z, H, W): mean and log variance of the latents of uint8 images, before
        scaling.
        """
        signal_BCHW = to_signal(image_BCHW, self.config.autoencoder.image_channels)
        moments_BCHW: Tensor = self.autoencoder.encode(signal_BCHW).latent_dist.parameters
        return moments_BCHW

    @torch.no_grad()
    def decode(self, latent_BZHW: Tensor) -> Tensor:
        """Return images in [-1, 1], (B, C, height, width), of scaled latents."""
        image_BCHW: Tensor = self.autoencoder.decode(latent_BZHW / self.latent_scale).sample
        return image_BCHW

    def reconstruct(self, image_BCHW: Tensor) -> Tensor:
        """Return (B, H, W) uint8: images encoded and decoded, the upper limit of generated
        images.
        """
        mean_BZHW = self.encode_moments(image_BCHW).chunk(2, dim=1)[0]
        return to_grey(self.decode(mean_BZHW * self.latent_scale))

    def text_ids(self, ids_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids and mask as the text encoder reads them: padded to `max_tokens` without
        `text_mask`.
        """
        if self.config.text_mask:
            return ids_BT, mask_BT
        last_B1 = ids_BT.gather(1, mask_BT.sum(dim=1, keepdim=True).clamp(min=1) - 1)
        short = self.config.max_tokens - ids_BT.shape[1]
        ids_BT = torch.cat(
            [torch.where(mask_BT, ids_BT, last_B1), last_B1.expand(-1, short)], dim=1
        )
        return ids_BT, torch.ones_like(ids_BT, dtype=torch.bool)

    def encode_text(self, ids_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return the text encoder's states (B, T, D) and their mask (B, T)."""
        ids_BT, mask_BT = self.text_ids(ids_BT, mask_BT)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.config.train_text):
            return self.text_encoder(ids_BT, mask_BT).tokens_BTD, mask_BT

    def empty_text(self) -> tuple[Tensor, Tensor]:
        """Return ids and mask (1, T) of the empty text."""
        if self.tokenizer is None:
            message = (
                "caption dropout and guidance need the empty text: give a tokenizer, or "
                "set caption_dropout 0"
            )
            raise ConfigError(message, "missing", field="tokenizer")
        return self.tokenize([""])

    def _sample(self, moments_BCHW: Tensor) -> Tensor:
        """Draw latents from their Gaussians."""
        mean_BZHW, logvar_BZHW = moments_BCHW.float().chunk(2, dim=1)
        return (
            mean_BZHW + torch.randn_like(mean_BZHW) * (0.5 * logvar_BZHW.clamp(-30.0, 20.0)).exp()
        )

    def _drop_captions(
        self, ids_BT: Tensor, mask_BT: Tensor, states_BTD: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return text states and their mask; in training, those of the empty text in place of
        some.
        """
        if not (self.training and self.config.caption_dropout):
            return (
                self.encode_text(ids_BT, mask_BT) if states_BTD is None else (states_BTD, mask_BT)
            )
        drop_B1 = torch.rand(len(ids_BT), 1, device=ids_BT.device) < self.config.caption_dropout
        empty_1T, real_1T = self.empty_text()
        if states_BTD is None:
            ids_BT = _replace(ids_BT, empty_1T, drop_B1)
            mask_BT = _replace(mask_BT, real_1T, drop_B1)
            return self.encode_text(ids_BT, mask_BT)
        empty_1TD, real_1T = self.encode_text(empty_1T, real_1T)
        states_BTD = _replace(states_BTD, empty_1TD.to(states_BTD.dtype), drop_B1[:, :, None])
        return states_BTD, _replace(mask_BT, real_1T, drop_B1)

    def before_step(self, step: int) -> None:
        """Raise ConfigError at the first step where the latents' scale was not measured."""
        if step == 0 and not float(self.latent_scale):
            message = (
                "latent_scale is not known: call measure_scale with latents of training images"
            )
            raise ConfigError(message, "missing", field="latent_scale")

    def measure_scale(self, moments_BCHW: Tensor) -> None:
        """Set `latent_scale` to 1 / standard deviation of latents, unless the config or a
        checkpoint has set it.
        """
        if not float(self.latent_scale):
            mean_BZHW, logvar_BZHW = moments_BCHW.double().chunk(2, dim=1)
            variance = mean_BZHW.var() + logvar_BZHW.exp().mean()
            self.latent_scale.copy_(variance.rsqrt())

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Update the moving average of the U-Net."""
        if self.ema_unet is None:
            return
        decay = min(self.config.ema_decay, (2 + step) / (11 + step))
        torch._foreach_lerp_(
            list(self.ema_unet.parameters()), list(self.unet.parameters()), 1.0 - decay
        )

    def parameter_groups(self, lr: float, weight_decay: float) -> list[dict[str, Any]]:
        """Return optimiser groups: a trained text encoder at `text_lr_mult` times the rate of the
        U-Net.
        """
        groups: list[dict[str, Any]] = []
        parts: Sequence[tuple[str, float]] = (
            ("unet", 1.0),
            ("text_projection", 1.0),
            ("text_encoder", self.config.text_lr_mult),
        )
        for name, multiple in parts:
            own = parameter_groups(getattr(self, name), lr * multiple, weight_decay)
            groups += [{**each, "name": f"{name}: {each['name']}"} for each in own]
        return groups


def _replace(values: Tensor, empty: Tensor, drop: Tensor) -> Tensor:
    """Return rows (B, T, ...), padded with zeros to the longer length; where `drop` is True, the
    row `empty`.
    """
    length = max(values.shape[1], empty.shape[1])
    padded = [
        torch.cat([each, each.new_zeros(len(each), length - each.shape[1], *each.shape[2:])], dim=1)
        for each in (values, empty)
    ]
    return torch.where(drop, padded[1], padded[0])


# Creation of latent diffusion models from the checkpoints of their parts.


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
    """Create a latent diffusion model from the weights of its parts; parts without weights start at
    random.

    Args:
        config: settings. With `autoencoder`, the sizes and the images' size must be that
            checkpoint's.
        start: checkpoint of a latent diffusion model, such as an imported Stable Diffusion: its
            U-Net and autoencoder, and its text encoder too where `config` names the same one and
            neither `text` nor `pretrained` is given. With its autoencoder comes the scale of the
            latents.
        random_unet: draw the U-Net, with the layer that maps text states to its width, at random;
            `start` then gives the other parts.
        autoencoder: checkpoint of the system `autoencoder`, in place of `start`'s. The scale of its
            latents is `config.latent_scale`; None: `measure_scale` sets it before the training.
        text: checkpoint of any system with a text encoder of the same sizes, with its tokenizer.
        tokenizer: the tokenizer or its folder. Default: that of `text`, of `start`, else the text
            encoder's own.
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
        from_start = {
            "autoencoder": autoencoder is None,
            "unet": not random_unet,
            "text_encoder": keeps_text,
            "text_projection": keeps_text and not random_unet,
        }
        load_parts(model, start, [part for part, is_kept in from_start.items() if is_kept])
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
    theirs = described_model(start)["settings"]
    ours = to_dict(config)
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
    """Raise ConfigError unless a checkpoint is an autoencoder of the configuration's sizes and
    images.
    """
    description = described_model(folder)
    if description["name"] != "autoencoder":
        name = description["name"]
        message = f"expected a checkpoint of the system autoencoder, got {name} in {folder}"
        raise ConfigError(message, "wrong_type", field="autoencoder")
    theirs = from_dict(AutoencoderConfig, description["settings"])
    for field, their, our in (
        ("autoencoder", theirs.sizes, config.autoencoder),
        ("image_size", theirs.image_size, config.image_size),
        ("fit", theirs.fit, config.fit),
    ):
        if their != our:
            raise ConfigError(
                f"{folder} has {field} {their}, the model {our}", "mismatch", field=field
            )


# RoentGen: Stable Diffusion adapted to chest radiographs (Chambon et al., arXiv 2211.12737,
# Nature BME 2024).


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoentGenConfig(LatentDiffusionConfig):
    """Stable Diffusion 1.4's sizes with CLIP's text encoder trained beside the U-Net, the paper's
    best variant.

    Other variants of the paper: `train_text=False`; a domain's text encoder, frozen, with its own
    mask (`text_encoder="radbert", text_mask=True, train_text=False, max_tokens=128`); U-Net from
    random weights (`create_latent_diffusion(..., random_unet=True)`). The scale of the latents,
    0.18215, is that of the checkpoint of Stable Diffusion; with another autoencoder it is measured.
    The paper does not mention caption dropout. Without it, the unconditional branch of the guidance
    stays the photograph model's, as in the public code of RoentGen-v2; with 0.1, the default here,
    it learns radiographs.
    """

    text_encoder: str = "open_clip:ViT-L-14-quickgelu"
    text_mask: bool = False
    max_tokens: int = 77
    train_text: bool = True


@register_system("roentgen")
class RoentGen(LatentDiffusion):
    """Latent diffusion with Stable Diffusion's parts: autoencoder, U-Net, and all 77 states of
    CLIP's text encoder.

    Start from a local folder of Stable Diffusion 1.x (`medvl.export.load_stable_diffusion`); the
    weights that the authors trained are not public.
    """

    Config = RoentGenConfig
