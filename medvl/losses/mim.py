"""Masked image modelling: give back the pixels of patches that were taken out.

    mask = mask_patches(len(image_BCHW), patches=324, ratio=0.75, generator=generator, device=image_BCHW.device)
    visible_BKD = encode(mask.keep(tokens_BPD))                       # only these patches are computed
    predicted_BPD = decode(mask.restore(visible_BKD, mask_token_D))
    loss = mim(predicted_BPD, standardize(patchify(image_BCHW, 16)), mask.masked_BP)

B images, P patches, K kept patches; D, of patches, the pixels of one: patch * patch * C.
"""

import dataclasses

import torch
from torch import Tensor

from medvl.losses.precision import full_precision


@dataclasses.dataclass(frozen=True, slots=True)
class PatchMask:
    """Which patches of each image are kept, as many for each."""

    kept_BK: Tensor
    """int64, positions of the kept patches, ascending."""
    restore_BP: Tensor
    """int64: where patch p stands among the kept ones followed by the masked ones."""
    masked_BP: Tensor
    """bool, True on patches that were taken out."""

    def keep(self, x_BPD: Tensor) -> Tensor:
        """(B, K, D): the kept patches. Positions must have been embedded before."""
        return x_BPD.gather(1, self.kept_BK[:, :, None].expand(-1, -1, x_BPD.shape[2]))

    def restore(self, x_BKD: Tensor, filler_D: Tensor) -> Tensor:
        """(B, P, D): the kept patches back in their places, with the filler (the mask token) in all others."""
        batch, kept, dim = x_BKD.shape
        missing = self.restore_BP.shape[1] - kept
        full_BPD = torch.cat([x_BKD, filler_D.to(x_BKD.dtype).expand(batch, missing, dim)], dim=1)
        return full_BPD.gather(1, self.restore_BP[:, :, None].expand(-1, -1, dim))


def mask_patches(
    batch: int, patches: int, ratio: float, generator: torch.Generator, device: torch.device | str = "cpu"
) -> PatchMask:
    """Take out `round(ratio * patches)` patches of each image, evenly at random (MAE, arXiv 2111.06377, section 3).

    Args:
        batch, patches: B and P.
        ratio: share taken out; 0.75 in MAE and M3AE.
        generator: of the CPU or of the device. A CPU generator gives the same mask on every device.
        device: of the result.

    Raises ValueError when the ratio is outside [0, 1) or would leave no patch.
    """
    kept = patches - round(ratio * patches)
    if not 0 <= ratio < 1 or kept < 1:
        raise ValueError(f"masking {ratio} of {patches} patches leaves none, or is no share within [0, 1)")
    noise_BP = torch.rand(batch, patches, generator=generator, device=generator.device).to(device)
    order_BP = noise_BP.argsort(dim=1, stable=True)
    kept_BK, taken_BM = order_BP[:, :kept].sort(dim=1).values, order_BP[:, kept:].sort(dim=1).values
    restore_BP = torch.cat([kept_BK, taken_BM], dim=1).argsort(dim=1)
    return PatchMask(kept_BK, restore_BP, restore_BP >= kept)


def patchify(image_BCHW: Tensor, patch: int) -> Tensor:
    """(B, P, D): patches row by row, the pixels of each in the order (row, column, channel).

    Raises ValueError when the sides are no multiples of `patch`, in pixels.
    """
    batch, channels, height, width = image_BCHW.shape
    if height % patch or width % patch:
        raise ValueError(f"an image of {height} x {width} pixels does not divide into patches of {patch}")
    rows, columns = height // patch, width // patch
    split = image_BCHW.reshape(batch, channels, rows, patch, columns, patch)
    return split.permute(0, 2, 4, 3, 5, 1).reshape(batch, rows * columns, patch * patch * channels)


def unpatchify(patches_BPD: Tensor, patch: int, grid: tuple[int, int]) -> Tensor:
    """(B, C, H, W): the image of `patchify`, C following from D. `grid` is (rows, columns) of patches.

    Raises ValueError when grid and patch do not fit P and D.
    """
    (batch, patches, dim), (rows, columns) = patches_BPD.shape, grid
    if rows * columns != patches or dim % patch**2:
        raise ValueError(f"{patches} patches of {dim} numbers are no {rows} x {columns} grid of {patch} x {patch}")
    split = patches_BPD.reshape(batch, rows, columns, patch, patch, dim // patch**2)
    return split.permute(0, 5, 1, 3, 2, 4).reshape(batch, -1, rows * patch, columns * patch)


def blank(image_BCHW: Tensor, masked_BP: Tensor, patch: int) -> Tensor:
    """The image with zeros in the masked patches: the mean, where its pixels are normalised.

    For encoders that cannot leave patches out (SimMIM, Xie et al., arXiv 2111.09886, hides pixels likewise). Raises
    ValueError when the sides are no multiples of `patch`, in pixels.
    """
    grid = (image_BCHW.shape[2] // patch, image_BCHW.shape[3] // patch)
    return unpatchify(patchify(image_BCHW, patch).masked_fill(masked_BP[:, :, None], 0.0), patch, grid)


def standardize(patches_BPD: Tensor, eps: float = 1e-6) -> Tensor:
    """Each patch less its mean, over the root of its unbiased variance + eps (MAE's `norm_pix`). float32, no gradient.

    An even patch, such as the border of a film, becomes zeros. Raises ValueError when a patch is one number only.
    """
    if patches_BPD.shape[-1] < 2:
        raise ValueError("a patch of one number has no variance: take larger patches")
    with full_precision(patches_BPD), torch.no_grad():
        variance_BP1, mean_BP1 = torch.var_mean(patches_BPD.float(), dim=-1, correction=1, keepdim=True)
        return (patches_BPD.float() - mean_BP1) / (variance_BP1 + eps).sqrt()


def mim(predicted_BPD: Tensor, target_BPD: Tensor, masked_BP: Tensor) -> Tensor:
    """Squared error, averaged over the pixels of a patch, then over all masked patches of the batch (MAE, section 3).

    Args:
        predicted_BPD: all patches; what stands at visible ones is never read.
        target_BPD: `standardize(patchify(image))`, or plain `patchify(image)` for methods that predict raw pixels.
        masked_BP: bool. Rows of samples without an image are False throughout.

    Returns a scalar: (D - 1) / D for a decoder that says zero and standardised targets, less the share of even
    patches; 0, with a gradient of zeros, where nothing is masked. Raises ValueError on unequal shapes.
    """
    if predicted_BPD.shape != target_BPD.shape or masked_BP.shape != predicted_BPD.shape[:-1]:
        raise ValueError(
            f"predicted and target must be (B, P, D) and the mask (B, P), got {tuple(predicted_BPD.shape)}, "
            f"{tuple(target_BPD.shape)} and {tuple(masked_BP.shape)}"
        )
    with full_precision(predicted_BPD):
        index_N = masked_BP.flatten().nonzero().squeeze(1)
        predicted_ND = predicted_BPD.flatten(0, 1)[index_N].float()
        target_ND = target_BPD.flatten(0, 1)[index_N].float()
        return (predicted_ND - target_ND).square().mean(dim=-1).sum() / max(len(index_N), 1)
