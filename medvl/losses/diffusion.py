"""Losses of autoencoders and of diffusion models.

All are 0 with a zero gradient for an empty batch, and raise ValueError where shapes differ.

B batch, C channels, H and W height and width.
"""

from typing import Literal, get_args

from torch import Tensor

from medvl.losses.common import full_precision, mean_or_zero, shapes

DenoisingTarget = Literal["epsilon", "v"]


def denoising(
    predicted_BCHW: Tensor,
    target_BCHW: Tensor,
    snr_B: Tensor | None = None,
    *,
    min_snr: float | None = None,
    target: DenoisingTarget = "epsilon",
) -> Tensor:
    """Return the mean squared error of a denoiser, a scalar (Ho et al., arXiv 2006.11239, equation
    14).

    Args:
        predicted_BCHW: output of the denoiser.
        target_BCHW: the noise, or the velocity (Salimans and Ho, arXiv 2202.00512).
        snr_B: signal-to-noise ratio of each noisy image, 0 or above; needed with `min_snr`.
        min_snr: gamma of the min-SNR weights, min(SNR, gamma) / SNR for noise and min(SNR, gamma) /
            (SNR + 1) for velocity (Hang et al., arXiv 2303.09556); None weighs all images equally.
        target: "epsilon" or "v", for those weights.

    Raises ValueError where shapes differ or `snr_B` is missing, and on an unknown target.
    """
    _check_shapes(predicted_BCHW, target_BCHW)
    if target not in get_args(DenoisingTarget):
        raise ValueError(
            f"target must be one of {', '.join(get_args(DenoisingTarget))}, got {target!r}"
        )
    with full_precision(predicted_BCHW):
        error_B = (predicted_BCHW.float() - target_BCHW.float()).square().flatten(1).mean(dim=1)
        if min_snr is not None:
            if snr_B is None or snr_B.shape != error_B.shape:
                got = "none" if snr_B is None else shapes(snr_B)
                raise ValueError(f"min_snr needs snr_B of shape {shapes(error_B)}, got {got}")
            error_B = error_B * _min_snr_weights(snr_B.float(), min_snr, target)
        return mean_or_zero(error_B)


def _min_snr_weights(snr_B: Tensor, min_snr: float, target: DenoisingTarget) -> Tensor:
    if target == "v":
        return snr_B.clamp(max=min_snr) / (snr_B + 1.0)
    return (min_snr / snr_B).clamp(max=1.0)  # 1 for an SNR of 0, the last step of a schedule


def edge_l1(predicted_BCHW: Tensor, image_BCHW: Tensor) -> Tensor:
    """Return the mean absolute error of horizontal and vertical differences of neighbouring pixels,
    a scalar.

    The sum of both directions' means. It keeps edges sharp that a squared error averages away.
    """
    _check_shapes(predicted_BCHW, image_BCHW)
    with full_precision(predicted_BCHW):
        error_BCHW = predicted_BCHW.float() - image_BCHW.float()
        return mean_or_zero(error_BCHW.diff(dim=3).abs()) + mean_or_zero(
            error_BCHW.diff(dim=2).abs()
        )


def gaussian_kl(mean_BCHW: Tensor, logvar_BCHW: Tensor, pixels: int) -> Tensor:
    """Return the KL divergence of diagonal Gaussians from the standard normal, in nats per pixel of
    the image.

    Args:
        mean_BCHW, logvar_BCHW: mean and log variance of the latents.
        pixels: number of pixels of an image; the divergence is 0 with a zero gradient where it is
            0.
    """
    _check_shapes(mean_BCHW, logvar_BCHW)
    with full_precision(mean_BCHW):
        mean = mean_BCHW.float()
        logvar = logvar_BCHW.float()
        kl_BCHW = 0.5 * (mean.square() + logvar.exp() - 1.0 - logvar)
        total = mean_or_zero(kl_BCHW.flatten(1).sum(dim=1))
        return total / pixels if pixels else 0.0 * total


def reconstruction(predicted_BCHW: Tensor, image_BCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean absolute and the mean squared error of pixels, two scalars."""
    _check_shapes(predicted_BCHW, image_BCHW)
    with full_precision(predicted_BCHW):
        error_BCHW = predicted_BCHW.float() - image_BCHW.float()
        return mean_or_zero(error_BCHW.abs()), mean_or_zero(error_BCHW.square())


def _check_shapes(one_BCHW: Tensor, other_BCHW: Tensor) -> None:
    if one_BCHW.shape != other_BCHW.shape:
        raise ValueError(f"expected one shape, got {shapes(one_BCHW, other_BCHW)}")
