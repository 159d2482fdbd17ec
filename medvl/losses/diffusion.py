"""Losses of autoencoders and of diffusion models.

B batch, C channels, H and W height and width.
"""

import torch.nn.functional as F
from torch import Tensor

from medvl.losses.precision import full_precision, shapes


def denoising(
    predicted_BCHW: Tensor,
    target_BCHW: Tensor,
    snr_B: Tensor | None = None,
    *,
    min_snr: float | None = None,
    target: str = "epsilon",
) -> Tensor:
    """Return the mean squared error of a denoiser, a scalar (Ho et al., arXiv 2006.11239, equation 14).

    Args:
        predicted_BCHW: output of the denoiser.
        target_BCHW: the noise, or the velocity (Salimans and Ho, arXiv 2202.00512).
        snr_B: signal-to-noise ratio of each noisy image; needed with `min_snr`.
        min_snr: gamma of the min-SNR weights, min(SNR, gamma) / SNR for noise and min(SNR, gamma) / (SNR + 1) for
            velocity (Hang et al., arXiv 2303.09556); None weighs all images equally.
        target: "epsilon" or "v", for those weights.

    Raises ValueError where shapes differ or `snr_B` is missing.
    """
    if predicted_BCHW.shape != target_BCHW.shape:
        raise ValueError(f"expected one shape, got {shapes(predicted_BCHW, target_BCHW)}")
    with full_precision(predicted_BCHW):
        error_B = (predicted_BCHW.float() - target_BCHW.float()).square().flatten(1).mean(dim=1)
        if min_snr is not None:
            if snr_B is None:
                raise ValueError("min_snr needs snr_B")
            snr_B = snr_B.float()
            error_B = error_B * snr_B.clamp(max=min_snr) / (snr_B + (1.0 if target == "v" else 0.0))
        return error_B.mean()


def edge_l1(predicted_BCHW: Tensor, image_BCHW: Tensor) -> Tensor:
    """Return the mean absolute error of horizontal and vertical differences of neighbouring pixels, a scalar.

    The sum of both directions' means. It keeps edges sharp that a squared error averages away.
    """
    with full_precision(predicted_BCHW):
        error_BCHW = predicted_BCHW.float() - image_BCHW.float()
        return error_BCHW.diff(dim=3).abs().mean() + error_BCHW.diff(dim=2).abs().mean()


def gaussian_kl(mean_BCHW: Tensor, logvar_BCHW: Tensor, pixels: int) -> Tensor:
    """Return the KL divergence of diagonal Gaussians from the standard normal, in nats per pixel of the image.

    Args:
        mean_BCHW, logvar_BCHW: mean and log variance of the latents.
        pixels: number of pixels of an image.
    """
    with full_precision(mean_BCHW):
        mean, logvar = mean_BCHW.float(), logvar_BCHW.float()
        kl_BCHW = 0.5 * (mean.square() + logvar.exp() - 1.0 - logvar)
        return kl_BCHW.flatten(1).sum(dim=1).mean() / pixels


def reconstruction(predicted_BCHW: Tensor, image_BCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean absolute and the mean squared error of pixels, two scalars."""
    with full_precision(predicted_BCHW):
        predicted, image = predicted_BCHW.float(), image_BCHW.float()
        return F.l1_loss(predicted, image), F.mse_loss(predicted, image)
