"""Variational autoencoder of images, the first stage of latent diffusion (Rombach et al., arXiv 2112.10752)."""

import dataclasses
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from medvl import losses
from medvl.common.checks import check_choice, check_weights
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.models.base import System, SystemConfig, zero_loss
from medvl.models.image_generation.parts import AutoencoderSizes, image_rows, to_grey, to_signal
from medvl.models.registry import register_system
from medvl.schema import Batch, Losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoencoderConfig(SystemConfig):
    """Sizes of Stable Diffusion 1; weights of the losses are medvl's own."""

    image_size: int = 512
    fit: Literal["crop", "pad", "squash"] = "pad"
    sizes: AutoencoderSizes = dataclasses.field(default_factory=AutoencoderSizes)
    l1_weight: float = 1.0
    """Weight of the mean absolute error of pixels in [-1, 1]."""
    l2_weight: float = 1.0
    """Weight of the mean squared error."""
    edge_weight: float = 0.5
    """Weight of the error of differences between neighbouring pixels (`medvl.losses.edge_l1`)."""
    kl_weight: float = 1e-3
    """Weight of the latents' KL divergence from a standard normal, in nats per pixel."""

    def __post_init__(self) -> None:
        check_choice(self.fit, ("crop", "pad", "squash"), "fit")
        check_weights(self, "l1_weight", "l2_weight", "edge_weight", "kl_weight")


@register_system("autoencoder")
class Autoencoder(System):
    """diffusers' `AutoencoderKL`, trained on images alone.

    Terms of the loss: "l1", "l2", "edges", "kl". Rombach et al. train with a perceptual and an adversarial loss as
    well, whose networks are not part of medvl; without them, fine texture is blurred.

    Attributes:
        autoencoder: diffusers' network, with its parameter names.
    """

    Config = AutoencoderConfig
    shared_encoders = ("autoencoder",)

    def __init__(self, config: AutoencoderConfig, autoencoder: nn.Module, **parts: Any) -> None:
        super().__init__(config, **parts)
        self.autoencoder = autoencoder

    @classmethod
    def build(cls, config: AutoencoderConfig, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """See the base class; weights of Stable Diffusion come with `medvl.export.load_stable_diffusion`."""
        transform = EvalTransform(size=config.image_size, fit=config.fit)
        return cls(config, config.sizes.build(config.image_size), transform=transform, tokenizer=tokenizer)

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
            l1=(l1, self.config.l1_weight),
            l2=(l2, self.config.l2_weight),
            edges=(losses.edge_l1(predicted_BCHW, signal_BCHW), self.config.edge_weight),
            kl=(losses.gaussian_kl(posterior.mean, posterior.logvar, pixels), self.config.kl_weight),
        )

    @torch.no_grad()
    def reconstruct(self, image_BCHW: Tensor) -> Tensor:
        """Return (B, H, W) uint8: images encoded and decoded, the upper limit of latent diffusion on them."""
        network: Any = self.autoencoder
        signal_BCHW = to_signal(image_BCHW, self.config.sizes.image_channels)
        return to_grey(network.decode(network.encode(signal_BCHW).latent_dist.mode()).sample)
