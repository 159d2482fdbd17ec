"""Masked image modelling: pixels, order and variance against loops over single patches."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers.loss_checks import check_precision, check_zero_with_gradient, compare
from torch import Tensor

from medvl import losses
from medvl.losses.masked import PatchMask, mask_patches, patchify, standardize, unpatchify


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_image(batch: int, channels: int, height: int, width: int) -> Tensor:
    return torch.randn(batch, channels, height, width, generator=seeded())


def naive_mim(predicted_BPD: Tensor, target_BPD: Tensor, masked_BP: Tensor) -> Tensor:
    total, count = predicted_BPD.new_zeros(()), 0
    for row in range(len(masked_BP)):
        for place in range(masked_BP.shape[1]):
            if masked_BP[row, place]:
                error_D = predicted_BPD[row, place] - target_BPD[row, place].to(predicted_BPD.dtype)
                total, count = total + (error_D * error_D).sum() / len(error_D), count + 1
    return total / count


def example(batch: int = 3, ratio: float = 0.75) -> tuple[Tensor, Tensor, Tensor]:
    target_BPD = standardize(patchify(random_image(batch, 3, 16, 24), 4))
    predicted_BPD = torch.randn(target_BPD.shape, generator=seeded(1))
    return (
        predicted_BPD,
        target_BPD,
        mask_patches(batch, target_BPD.shape[1], ratio, seeded(2)).masked_BP,
    )


@pytest.mark.parametrize("channels", [1, 3])
def test_patchify_orders_pixels_by_row_column_channel(channels: int) -> None:
    image_BCHW = random_image(2, channels, 8, 12)
    patches_BPD = patchify(image_BCHW, 4)
    assert patches_BPD.shape == (2, 6, 16 * channels)
    for row in range(2):
        for column in range(3):
            for y, x, channel in np.ndindex(4, 4, channels):
                pixel = image_BCHW[:, channel, 4 * row + y, 4 * column + x]
                assert torch.equal(
                    patches_BPD[:, 3 * row + column, (4 * y + x) * channels + channel], pixel
                )


@pytest.mark.parametrize(
    ("height", "width", "patch"), [(8, 8, 8), (8, 12, 4), (30, 20, 5), (3, 2, 1)]
)
@pytest.mark.parametrize("channels", [1, 3])
def test_unpatchify_inverts_patchify(height: int, width: int, patch: int, channels: int) -> None:
    image_BCHW = random_image(2, channels, height, width)
    back_BCHW = unpatchify(patchify(image_BCHW, patch), patch, (height // patch, width // patch))
    assert torch.equal(back_BCHW, image_BCHW)


def test_targets_are_standardised_with_the_unbiased_variance() -> None:
    patches_BPD = 3 * patchify(random_image(2, 3, 8, 8), 4) + 5
    for ours_D, patch_D in zip(
        standardize(patches_BPD).flatten(0, 1), patches_BPD.flatten(0, 1), strict=True
    ):
        pixels = patch_D.double().numpy()
        expected = (pixels - pixels.mean()) / np.sqrt(pixels.var(ddof=1) + 1e-6)
        np.testing.assert_allclose(ours_D.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_a_constant_patch_becomes_zeros() -> None:
    """Films have black borders, whose standard deviation is 0."""
    assert not standardize(torch.full((1, 2, 48), 0.7310)).abs().gt(1e-3).any()
    assert not standardize(torch.zeros(1, 2, 48)).any()


def test_targets_have_no_gradient() -> None:
    assert not standardize(patchify(random_image(1, 3, 8, 8).requires_grad_(), 4)).requires_grad


@pytest.mark.parametrize("ratio", [0.1, 0.75, 0.9])
def test_mim_is_the_mean_over_pixels_then_over_masked_patches(ratio: float) -> None:
    predicted_BPD, target_BPD, masked_BP = example(ratio=ratio)
    compare(
        lambda x: losses.mim(x, target_BPD, masked_BP),
        lambda x: naive_mim(x, target_BPD, masked_BP),
        [predicted_BPD],
    )


def test_images_are_weighted_by_their_masked_patches() -> None:
    predicted_BPD, target_BPD, _ = example()
    masked_BP = torch.zeros(3, 24, dtype=torch.bool)
    masked_BP[0, :5] = masked_BP[1, :1] = True  # the third sample has no image
    predicted_BPD[2] = torch.nan
    predicted_BPD.requires_grad_()
    loss = losses.mim(predicted_BPD, target_BPD, masked_BP)
    torch.testing.assert_close(
        loss.double(), naive_mim(predicted_BPD.double(), target_BPD, masked_BP)
    )
    loss.backward()
    assert predicted_BPD.grad is not None
    assert torch.equal(predicted_BPD.grad.any(dim=2), masked_BP)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("patch", [2, 16])
def test_mim_of_zero_predictions_is_d_minus_1_over_d(channels: int, patch: int) -> None:
    target_BPD = standardize(patchify(random_image(4, channels, 64, 64), patch))
    dim = patch * patch * channels
    masked_BP = mask_patches(4, target_BPD.shape[1], 0.75, seeded()).masked_BP
    loss = losses.mim(torch.zeros_like(target_BPD), target_BPD, masked_BP)
    assert loss.item() == pytest.approx((dim - 1) / dim, rel=1e-4)


def test_mim_without_masked_patches_is_zero() -> None:
    predicted_BPD, target_BPD, masked_BP = example()
    check_zero_with_gradient(
        lambda x: losses.mim(x, target_BPD, torch.zeros_like(masked_BP)), predicted_BPD
    )
    check_zero_with_gradient(
        lambda x: losses.mim(x, target_BPD[:0], masked_BP[:0]), predicted_BPD[:0]
    )


def test_mim_ignores_autocast() -> None:
    predicted_BPD, target_BPD, masked_BP = example()
    check_precision(lambda x: losses.mim(x, target_BPD, masked_BP), predicted_BPD)
    image_BCHW = random_image(1, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(
            standardize(patchify(image_BCHW, 4)), standardize(patchify(image_BCHW, 4))
        )
        assert standardize(image_BCHW.bfloat16()).dtype == torch.float32


def mask(batch: int = 4, patches: int = 324, ratio: float = 0.75, seed: int = 0) -> PatchMask:
    return mask_patches(batch, patches, ratio, seeded(seed))


def test_mask_patches_masks_a_fixed_share_of_each_image() -> None:
    drawn = mask()
    assert drawn.kept_BK.shape == (4, 81)
    assert drawn.masked_BP.sum(1).tolist() == [243] * 4
    assert mask(patches=10, ratio=0.9).kept_BK.shape == (
        4,
        1,
    )  # 10 * (1 - 0.9) is less than one to a computer
    assert mask(ratio=0.0).kept_BK.shape == (4, 324)
    for patches, ratio, kept in (
        (256, 0.15, 217),
        (576, 0.15, 489),
        (49, 0.25, 36),
        (196, 0.75, 49),
    ):
        assert mask(patches=patches, ratio=ratio).kept_BK.shape == (
            4,
            kept,
        )  # as MAE's code, which rounds down
    assert not mask(ratio=0.0).masked_BP.any()


def test_kept_restored_and_masked_patches_agree() -> None:
    drawn = mask(patches=20)
    tokens_BPD = torch.randn(4, 20, 8, generator=seeded(1))
    filler_D = torch.full((8,), 7.0)
    kept_BKD = drawn.keep(tokens_BPD)
    for row in range(4):
        assert torch.equal(
            kept_BKD[row], tokens_BPD[row][~drawn.masked_BP[row]]
        )  # still in the image's order
    restored_BPD = drawn.restore(kept_BKD, filler_D)
    assert torch.equal(restored_BPD, torch.where(drawn.masked_BP[:, :, None], filler_D, tokens_BPD))


def test_restore_is_differentiable() -> None:
    drawn = mask(batch=2, patches=8)
    tokens_BPD, filler_D = torch.randn(2, 8, 3).requires_grad_(), torch.zeros(3).requires_grad_()
    drawn.restore(drawn.keep(tokens_BPD), filler_D).sum().backward()
    assert tokens_BPD.grad is not None
    assert filler_D.grad is not None
    assert torch.equal(tokens_BPD.grad, (~drawn.masked_BP).float()[:, :, None].expand(-1, -1, 3))
    assert filler_D.grad.tolist() == [12.0] * 3


def test_every_patch_is_masked_equally_often() -> None:
    share_P = mask(batch=8000, patches=12).masked_BP.float().mean(0)
    torch.testing.assert_close(share_P, torch.full((12,), 0.75), rtol=0, atol=0.02)


def test_masks_depend_on_the_generator_only() -> None:
    assert torch.equal(mask().masked_BP, mask().masked_BP)
    assert not torch.equal(mask().masked_BP, mask(seed=1).masked_BP)
    assert len({tuple(row) for row in mask().kept_BK.tolist()}) == 4  # each image its own


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mask(ratio=1.0), "expected a ratio"),
        (lambda: mask(ratio=-0.1), "expected a ratio"),
        (lambda: mask(patches=2, ratio=0.9), "expected a ratio"),
        (
            lambda: patchify(torch.zeros(1, 3, 10, 12), 4),
            "10 x 12 pixels does not divide into patches of 4",
        ),
        (lambda: unpatchify(torch.zeros(1, 6, 48), 4, (2, 2)), "not a 2 x 2 grid"),
        (lambda: unpatchify(torch.zeros(1, 6, 50), 4, (2, 3)), "not a 2 x 3 grid"),
        (lambda: standardize(torch.zeros(1, 4, 1)), "no variance"),
        (
            lambda: losses.mim(
                torch.zeros(1, 4, 3), torch.zeros(1, 4, 2), torch.zeros(1, 4).bool()
            ),
            "must be \\(B, P, D\\)",
        ),
        (
            lambda: losses.mim(
                torch.zeros(1, 4, 3), torch.zeros(1, 4, 3), torch.zeros(1, 3).bool()
            ),
            "must be \\(B, P, D\\)",
        ),
    ],
)
def test_mim_rejects_invalid_arguments(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
