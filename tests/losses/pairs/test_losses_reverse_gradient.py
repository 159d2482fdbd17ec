"""Gradient reversal, and the loss of a discriminator of images and texts, against their
formulas.
"""

import pytest
import torch
from helpers.loss_checks import check_precision, check_zero_with_gradient, compare
from torch import Tensor, nn

from medvl import losses


def features(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def discriminator() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LeakyReLU(0.2), nn.Linear(6, 1))


def naive(image_NE: Tensor, text_ME: Tensor) -> Tensor:
    """Cross-entropy item by item, with the gradient of its negative for the features."""
    judge, errors = discriminator().double(), []
    for sign, side_NE in ((1, image_NE), (-1, text_ME)):
        errors += [torch.log1p(torch.exp(-sign * judge(item_E))) for item_E in side_NE]
    value = torch.cat(errors).mean()
    return 2 * value.detach() - value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reversed_gradient(dtype: torch.dtype) -> None:
    x_BE = features(3, 4).to(dtype).requires_grad_()
    actual = losses.reverse_gradient(x_BE, 0.5)
    assert torch.equal(actual, x_BE)
    actual.square().sum().backward()
    assert x_BE.grad is not None
    torch.testing.assert_close(x_BE.grad, -0.5 * 2 * x_BE.detach())
    x_BE.grad = None
    losses.reverse_gradient(x_BE).sum().backward()
    torch.testing.assert_close(x_BE.grad, torch.full_like(x_BE, -1.0))
    with pytest.raises(ValueError, match="weight"):
        losses.reverse_gradient(x_BE, -1.0)


@pytest.mark.fault("N1")
@pytest.mark.parametrize(("images", "texts"), [(5, 5), (3, 7), (1, 4)])
def test_confusion_equals_its_formula_and_reverses_the_gradient_of_features(
    images: int, texts: int
) -> None:
    inputs = [features(images, 4), features(texts, 4, seed=1)]
    compare(lambda *sides: losses.modality_confusion(discriminator(), *sides), naive, inputs)


def test_the_discriminator_learns_to_separate() -> None:
    """Its own gradient is that of the cross-entropy."""
    image_NE, text_ME, ours, other = (
        features(5, 4),
        features(3, 4, seed=1),
        discriminator(),
        discriminator(),
    )
    losses.modality_confusion(ours, image_NE, text_ME).backward()
    logits_N = other(torch.cat([image_NE, text_ME]))[:, 0]
    nn.functional.binary_cross_entropy_with_logits(
        logits_N, torch.tensor([1.0] * 5 + [0.0] * 3)
    ).backward()
    for parameter, expected in zip(ours.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


def test_confusion_is_computed_in_float32_and_zero_without_rows() -> None:
    def loss(*sides: Tensor) -> Tensor:
        return losses.modality_confusion(discriminator(), *sides)

    check_precision(loss, features(5, 4), features(3, 4, seed=1))
    check_zero_with_gradient(loss, features(0, 4), features(0, 4))
    with pytest.raises(ValueError, match="images"):
        loss(features(5, 4), features(3, 5))
