"""Variational autoencoder of images, the first stage of latent diffusion (Rombach et al., arXiv
2112.10752).
"""

import dataclasses
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from medvl import losses
from medvl.common.config_io import check_choice, check_within
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.errors import ConfigError
from medvl.models.base import System, SystemConfig, zero_loss
from medvl.models.registry import register_system
from medvl.schema import Batch, Losses

# Shared parts of systems of image generation: diffusers' networks by their sizes, pixels, and the
# noise schedule.
#
# B batch, C channels, H and W height and width, Z latent channels.


def require_diffusers() -> Any:
    """Return the package `diffusers`. Raises ConfigError that names the extra where it is not
    installed.
    """
    try:
        import diffusers
    except ImportError as error:
        message = (
            "image generation needs diffusers; install it with `pip install medvl[generation]`"
        )
        raise ConfigError(message, "missing", field="diffusers") from error
    return diffusers


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoencoderSizes:
    """Sizes of diffusers' `AutoencoderKL`; those of Stable Diffusion 1 (83,653,863 parameters)."""

    image_channels: int = 3
    """Grey images are repeated to as many channels, and decoded ones averaged."""
    channels: tuple[int, ...] = (128, 256, 512, 512)
    """Channels of each level; between two levels, height and width are halved."""
    layers: int = 2
    """Residual blocks of a level."""
    latent_channels: int = 4
    groups: int = 32
    """Groups of the norms."""
    attention: bool = True
    """Attention at the smallest level."""

    def __post_init__(self) -> None:
        check_within(self, "[1, inf)", "image_channels", "layers", "latent_channels", "groups")
        check_groups("channels", self.channels, self.groups)

    def build(self, image_size: int) -> Any:
        """Build the network with random weights."""
        levels = len(self.channels)
        if image_size % self.reduction:
            message = f"image_size must be a multiple of {self.reduction}, got {image_size}"
            raise ConfigError(message, "conflict", field="image_size")
        network: Any = require_diffusers().AutoencoderKL(
            in_channels=self.image_channels,
            out_channels=self.image_channels,
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            block_out_channels=self.channels,
            layers_per_block=self.layers,
            latent_channels=self.latent_channels,
            norm_num_groups=self.groups,
            sample_size=image_size,
            mid_block_add_attention=self.attention,
        )
        network.trained_on = ()  # manifests, as of `medvl.encoders`
        return network

    @property
    def reduction(self) -> int:
        """Image pixels per latent, in height and in width."""
        return int(2 ** (len(self.channels) - 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class UNetSizes:
    """Sizes of diffusers' `UNet2DConditionModel`; those of Stable Diffusion 1 (859,520,964
    parameters).
    """

    channels: tuple[int, ...] = (320, 640, 1280, 1280)
    """Channels of each level; between two levels, height and width are halved."""
    cross_attention: tuple[bool, ...] = (True, True, True, False)
    """Levels that attend to the text."""
    layers: int = 2
    """Residual blocks of a level."""
    heads: int = 8
    text_width: int = 768
    """Width of the text states; others are mapped to it."""
    groups: int = 32
    """Groups of the norms."""

    def __post_init__(self) -> None:
        check_within(self, "[1, inf)", "layers", "heads", "text_width", "groups")
        check_groups("channels", self.channels, self.groups)
        check_groups("channels", self.channels, self.heads)
        if len(self.cross_attention) != len(self.channels):
            message = (
                f"expected one value for each of {len(self.channels)} levels, got "
                f"{len(self.cross_attention)}"
            )
            raise ConfigError(message, "conflict", field="cross_attention")

    def build(self, latent_channels: int, latent_size: int) -> Any:
        """Build the network with random weights."""
        down = tuple(
            "CrossAttnDownBlock2D" if each else "DownBlock2D" for each in self.cross_attention
        )
        up = tuple(
            "CrossAttnUpBlock2D" if each else "UpBlock2D" for each in reversed(self.cross_attention)
        )
        network: Any = require_diffusers().UNet2DConditionModel(
            sample_size=latent_size,
            in_channels=latent_channels,
            out_channels=latent_channels,
            down_block_types=down,
            up_block_types=up,
            block_out_channels=self.channels,
            layers_per_block=self.layers,
            attention_head_dim=self.heads,  # diffusers' name for the number of heads
            norm_num_groups=self.groups,
            cross_attention_dim=self.text_width,
        )
        network.trained_on = ()  # manifests, as of `medvl.encoders`
        return network


def check_groups(field: str, channels: tuple[int, ...], groups: int) -> None:
    """Raise ConfigError unless there are channels, each a multiple of `groups`."""
    if not channels or any(each < 1 or each % groups for each in channels):
        message = f"expected positive multiples of {groups}, got {channels}"
        raise ConfigError(message, "conflict", field=field)


def to_signal(image_BCHW: Tensor, channels: int) -> Tensor:
    """Return uint8 images as float32 in [-1, 1] with this number of channels; grey ones are
    repeated.
    """
    signal_BCHW = image_BCHW.float() / 127.5 - 1.0
    if signal_BCHW.shape[1] == channels:
        return signal_BCHW
    if channels == 1:  # BT.601 luma, as in decoding
        luma_C11 = signal_BCHW.new_tensor((0.299, 0.587, 0.114))[:, None, None]
        return (signal_BCHW * luma_C11).sum(dim=1, keepdim=True)
    return signal_BCHW.expand(-1, channels, -1, -1)


def to_grey(signal_BCHW: Tensor) -> Tensor:
    """Return (B, H, W) uint8 grey images of a signal in [-1, 1], the mean of its channels."""
    grey_BHW = signal_BCHW.float().mean(dim=1)
    return ((grey_BHW + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8)


def image_rows(batch: Batch) -> Tensor:
    """Return the images of a batch, without the placeholders of samples that have none."""
    return batch.image_BCHW if batch.has_image_B is None else batch.image_BCHW[batch.has_image_B]


class NoiseSchedule(nn.Module):
    """Stable Diffusion's noise: 1,000 steps, square roots of beta linear from .00085 to .012
    ("scaled linear").
    """

    STEPS = 1000
    BETA_START = 0.00085
    BETA_END = 0.012
    signal_S: Tensor
    """float32: share of the signal's variance at each step, the product of 1 - beta."""

    def __init__(self) -> None:
        super().__init__()
        beta_S = (
            torch.linspace(
                self.BETA_START**0.5, self.BETA_END**0.5, self.STEPS, dtype=torch.float64
            )
            ** 2
        )
        self.register_buffer("signal_S", (1.0 - beta_S).cumprod(0).float(), persistent=False)

    def add(self, latent_BZHW: Tensor, noise_BZHW: Tensor, step_B: Tensor) -> Tensor:
        """Return the noisy latents: sqrt(a) latent + sqrt(1 - a) noise."""
        signal, noise = self._weights(step_B)
        return signal * latent_BZHW + noise * noise_BZHW

    def velocity(self, latent_BZHW: Tensor, noise_BZHW: Tensor, step_B: Tensor) -> Tensor:
        """Return the target of v-prediction: sqrt(a) noise - sqrt(1 - a) latent."""
        signal, noise = self._weights(step_B)
        return signal * noise_BZHW - noise * latent_BZHW

    def snr(self, step_B: Tensor) -> Tensor:
        """Return (B,): the signal-to-noise ratio a / (1 - a)."""
        signal_B = self.signal_S[step_B]
        return signal_B / (1.0 - signal_B)

    def _weights(self, step_B: Tensor) -> tuple[Tensor, Tensor]:
        signal_B111 = self.signal_S[step_B][:, None, None, None]
        return signal_B111.sqrt(), (1.0 - signal_B111).sqrt()


EDGE_WEIGHT = 0.5
"""Weight of the error of differences between neighbouring pixels (`medvl.losses.edge_l1`), beside
the mean absolute and squared errors of pixels in [-1, 1]; medvl's own.
"""
KL_WEIGHT = 1e-3
"""Weight of the latents' KL divergence from a standard normal, in nats per pixel; medvl's own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoencoderConfig(SystemConfig):
    """Sizes of Stable Diffusion 1."""

    image_size: int = 512
    fit: Literal["crop", "pad", "squash"] = "pad"
    sizes: AutoencoderSizes = dataclasses.field(default_factory=AutoencoderSizes)
    former = (
        ("l1_weight", 1.0),
        ("l2_weight", 1.0),
        ("edge_weight", EDGE_WEIGHT),
        ("kl_weight", KL_WEIGHT),
    )

    def __post_init__(self) -> None:
        check_choice(self.fit, ("crop", "pad", "squash"), "fit")


@register_system("autoencoder")
class Autoencoder(System):
    """diffusers' `AutoencoderKL`, trained on images alone.

    Terms of the loss: "l1", "l2", "edges", "kl". Rombach et al. train with a perceptual and an
    adversarial loss as well, whose networks are not part of medvl; without them, fine texture is
    blurred.

    Attributes:
        autoencoder: diffusers' network, with its parameter names.
    """

    Config = AutoencoderConfig
    shared_encoders = ("autoencoder",)

    def __init__(self, config: AutoencoderConfig, autoencoder: nn.Module, **parts: Any) -> None:
        super().__init__(config, **parts)
        self.autoencoder = autoencoder

    @classmethod
    def build(
        cls, config: AutoencoderConfig, *, pretrained: bool, tokenizer: Tokenizer | None
    ) -> Self:
        """Build the network with random weights; `medvl.export.load_stable_diffusion` loads those
        of Stable Diffusion.
        """
        transform = EvalTransform(size=config.image_size, fit=config.fit)
        return cls(
            config, config.sizes.build(config.image_size), transform=transform, tokenizer=tokenizer
        )

    def forward(self, batch: Batch) -> Losses:
        """Return the losses of a batch of images; in eval mode the latents are the means."""
        image = image_rows(batch)
        if not len(image):
            zero = zero_loss(self)
            return Losses.sum(l1=zero, l2=zero, edges=zero, kl=zero)
        signal_BCHW = to_signal(image, self.config.sizes.image_channels)
        network: Any = self.autoencoder
        posterior = network.encode(signal_BCHW).latent_dist
        latent_BZHW = posterior.sample() if self.training else posterior.mode()
        predicted_BCHW = network.decode(latent_BZHW).sample
        l1, l2 = losses.reconstruction(predicted_BCHW, signal_BCHW)
        pixels = signal_BCHW.shape[2] * signal_BCHW.shape[3]
        return Losses.weighted(
            l1=(l1, 1.0),
            l2=(l2, 1.0),
            edges=(losses.edge_l1(predicted_BCHW, signal_BCHW), EDGE_WEIGHT),
            kl=(losses.gaussian_kl(posterior.mean, posterior.logvar, pixels), KL_WEIGHT),
        )

    @torch.no_grad()
    def reconstruct(self, image_BCHW: Tensor) -> Tensor:
        """Return (B, H, W) uint8: images encoded and decoded, the upper limit of latent
        diffusion on them.
        """
        network: Any = self.autoencoder
        signal_BCHW = to_signal(image_BCHW, self.config.sizes.image_channels)
        return to_grey(network.decode(network.encode(signal_BCHW).latent_dist.mode()).sample)
