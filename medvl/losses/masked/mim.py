"""Masked image modelling: prediction of the pixels of masked patches.

    mask = mask_patches(len(image_BCHW), patches=324, ratio=0.75, generator=generator, device=image_BCHW.device)
    visible_BKD = encode(mask.keep(tokens_BPD))                       # only these patches are encoded
    predicted_BPD = decode(mask.restore(visible_BKD, mask_token_D))
    loss = mim(predicted_BPD, standardize(patchify(image_BCHW, 16)), mask.masked_BP)

B images, P patches, K kept patches; D values of a patch: patch * patch * C.
"""

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from medvl.losses.precision import full_precision, shapes

_ROUNDING = 1e-6
"""Larger than the error of a product: (1 - 0.9) * 10 is slightly less than one in floating point."""


@dataclasses.dataclass(frozen=True, slots=True)
class PatchMask:
    """Kept and masked patches of each image, equally many in each."""

    kept_BK: Tensor
    """int64, positions of the kept patches, ascending."""
    restore_BP: Tensor
    """int64: index of patch p in the kept ones followed by the masked ones."""
    masked_BP: Tensor
    """bool, True on masked patches."""

    def keep(self, x_BPD: Tensor) -> Tensor:
        """Return (B, K, D): the kept patches. Add position embeddings before."""
        return x_BPD.gather(1, self.kept_BK[:, :, None].expand(-1, -1, x_BPD.shape[2]))

    def restore(self, x_BKD: Tensor, filler_D: Tensor) -> Tensor:
        """Return (B, P, D): the kept patches in their places, and the filler (the mask token) in all others."""
        batch, kept, dim = x_BKD.shape
        missing = self.restore_BP.shape[1] - kept
        full_BPD = torch.cat([x_BKD, filler_D.to(x_BKD.dtype).expand(batch, missing, dim)], dim=1)
        return full_BPD.gather(1, self.restore_BP[:, :, None].expand(-1, -1, dim))


def mask_patches(
    batch: int, patches: int, ratio: float, generator: torch.Generator, device: torch.device | str = "cpu"
) -> PatchMask:
    """Keep floor((1 - ratio) * patches) patches of each image, uniformly at random (MAE, arXiv 2111.06377, section 3).

    The released code of MAE, M3AE and M2I2 rounds down too: of 256 patches, a ratio of 0.15 keeps 217.

    Args:
        batch, patches: B and P.
        ratio: share to mask; 0.75 in MAE and M3AE.
        generator: generator on the CPU or on the device. A CPU generator gives the same mask on every device.
        device: device of the result.

    Raises ValueError when the ratio is outside [0, 1) or would leave no patch.
    """
    kept = math.floor((1 - ratio) * patches + _ROUNDING)
    if not 0 <= ratio < 1 or kept < 1:
        raise ValueError(f"expected a ratio within [0, 1) that keeps a patch, got {ratio} of {patches} patches")
    noise_BP = torch.rand(batch, patches, generator=generator, device=generator.device).to(device)
    order_BP = noise_BP.argsort(dim=1, stable=True)
    kept_BK, taken_BM = order_BP[:, :kept].sort(dim=1).values, order_BP[:, kept:].sort(dim=1).values
    restore_BP = torch.cat([kept_BK, taken_BM], dim=1).argsort(dim=1)
    return PatchMask(kept_BK, restore_BP, restore_BP >= kept)


def mask_blocks(
    batch: int, grid: tuple[int, int], scales: Sequence[int], ratio: float, generator: torch.Generator
) -> Tensor:
    """(B, P) bool: mask square blocks of s x s cells, with one of the scales drawn for each image.

    At each scale `round(ratio * blocks)` blocks are masked, but at least one, and not all if there are several.

    Args:
        batch: B.
        grid: (h, w) of the cells, multiples of every scale; P = h * w.
        scales: sides of the blocks in cells.
        ratio: share of the blocks to mask.
        generator: generator on the CPU.
    """
    choices = []
    for scale in scales:
        blocks = (grid[0] // scale, grid[1] // scale)
        count = blocks[0] * blocks[1]
        masked = min(max(round(ratio * count), 1), max(count - 1, 1))
        rank_BQ = torch.rand(batch, count, generator=generator).argsort(dim=1).argsort(dim=1)
        mask_Bhw = (rank_BQ < masked).unflatten(1, blocks)
        choices.append(mask_Bhw.repeat_interleave(scale, dim=1).repeat_interleave(scale, dim=2).flatten(1))
    drawn_B = torch.randint(len(choices), (batch,), generator=generator)
    return torch.stack(choices)[drawn_B, torch.arange(batch)]


def patchify(image_BCHW: Tensor, patch: int) -> Tensor:
    """Return (B, P, D): patches row by row, the pixels of each in the order (row, column, channel).

    Raises ValueError unless height and width are multiples of `patch`, in pixels.
    """
    batch, channels, height, width = image_BCHW.shape
    if height % patch or width % patch:
        raise ValueError(f"an image of {height} x {width} pixels does not divide into patches of {patch}")
    rows, columns = height // patch, width // patch
    split = image_BCHW.reshape(batch, channels, rows, patch, columns, patch)
    return split.permute(0, 2, 4, 3, 5, 1).reshape(batch, rows * columns, patch * patch * channels)


def unpatchify(patches_BPD: Tensor, patch: int, grid: tuple[int, int]) -> Tensor:
    """Return (B, C, H, W): the inverse of `patchify`. `grid` is (rows, columns) of patches; C follows from D.

    Raises ValueError where grid and patch do not fit P and D.
    """
    (batch, patches, dim), (rows, columns) = patches_BPD.shape, grid
    if rows * columns != patches or dim % patch**2:
        raise ValueError(f"{patches} patches of {dim} values are not a {rows} x {columns} grid of {patch} x {patch}")
    split = patches_BPD.reshape(batch, rows, columns, patch, patch, dim // patch**2)
    return split.permute(0, 5, 1, 3, 2, 4).reshape(batch, -1, rows * patch, columns * patch)


def blank(image_BCHW: Tensor, masked_BP: Tensor, patch: int) -> Tensor:
    """Return the image with zeros, the mean of normalised pixels, in the masked patches.

    For encoders that cannot drop patches, as in SimMIM (Xie et al., arXiv 2111.09886). Raises ValueError unless height
    and width are multiples of `patch`, in pixels.
    """
    grid = (image_BCHW.shape[2] // patch, image_BCHW.shape[3] // patch)
    return unpatchify(patchify(image_BCHW, patch).masked_fill(masked_BP[:, :, None], 0.0), patch, grid)


def standardize(patches_BPD: Tensor, eps: float = 1e-6) -> Tensor:
    """Standardise each patch by its mean and unbiased variance + eps (MAE's `norm_pix`); float32, no gradient.

    A constant patch, such as the border of a film, becomes zeros. Raises ValueError for patches of one number.
    """
    if patches_BPD.shape[-1] < 2:
        raise ValueError("a patch of one value has no variance: use larger patches")
    with full_precision(patches_BPD), torch.no_grad():
        variance_BP1, mean_BP1 = torch.var_mean(patches_BPD.float(), dim=-1, correction=1, keepdim=True)
        return (patches_BPD.float() - mean_BP1) / (variance_BP1 + eps).sqrt()


def mim(predicted_BPD: Tensor, target_BPD: Tensor, masked_BP: Tensor) -> Tensor:
    """Squared error, averaged over the pixels of a patch, then over all masked patches of the batch (MAE, section 3).

    Args:
        predicted_BPD: all patches; visible ones are ignored.
        target_BPD: `standardize(patchify(image))`, or plain `patchify(image)` for methods that predict raw pixels.
        masked_BP: bool; all False for samples without an image.

    Returns a scalar: (D - 1) / D for predictions of zero and standardised targets, less the share of constant patches;
    0 with a zero gradient where nothing is masked. Raises ValueError on unequal shapes.
    """
    if predicted_BPD.shape != target_BPD.shape or masked_BP.shape != predicted_BPD.shape[:-1]:
        got = shapes(predicted_BPD, target_BPD, masked_BP)
        raise ValueError(f"predicted and target must be (B, P, D) and the mask (B, P), got {got}")
    with full_precision(predicted_BPD):
        index_N = masked_BP.flatten().nonzero().squeeze(1)
        predicted_ND = predicted_BPD.flatten(0, 1)[index_N].float()
        target_ND = target_BPD.flatten(0, 1)[index_N].float()
        return (predicted_ND - target_ND).square().mean(dim=-1).sum() / max(len(index_N), 1)
