"""Losses of autoencoders and diffusion models against their formulas."""

from collections.abc import Callable

import pytest
import torch
from helpers.loss_checks import check_zero_with_gradient

from medvl import losses


@pytest.fixture(scope="module")
def pair() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 3, 2, 4, 5, generator=generator, dtype=torch.float64)
    return first.requires_grad_(), second


def test_the_denoising_loss_is_the_mean_squared_error(
    pair: tuple[torch.Tensor, torch.Tensor],
) -> None:
    predicted, target = pair
    loss = losses.denoising(predicted, target)
    assert loss.item() == pytest.approx(((predicted - target) ** 2).mean().item(), rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, predicted)
    assert torch.allclose(gradient, 2 * (predicted - target) / predicted.numel(), atol=1e-7)


@pytest.mark.parametrize(("target", "one"), [("epsilon", 0.0), ("v", 1.0)])
def test_min_snr_weighs_clean_images_down(
    pair: tuple[torch.Tensor, torch.Tensor], target: str, one: float
) -> None:
    snr = [0.5, 5.0, 80.0]
    loss = losses.denoising(*pair, torch.tensor(snr), min_snr=5.0, target=target)
    rows = [
        ((a - b) ** 2).mean() * min(s, 5.0) / (s + one) for a, b, s in zip(*pair, snr, strict=True)
    ]
    assert loss.item() == pytest.approx(float(sum(rows)) / 3, rel=1e-6)


def test_denoising_refuses_other_shapes_and_a_missing_ratio(
    pair: tuple[torch.Tensor, torch.Tensor],
) -> None:
    with pytest.raises(ValueError, match="shape"):
        losses.denoising(pair[0], pair[1][:2])
    with pytest.raises(ValueError, match="snr_B"):
        losses.denoising(*pair, min_snr=5.0)


def test_min_snr_keeps_images_without_any_signal(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    """A schedule may end at a signal-to-noise ratio of 0: its weight is 1 for noise and 0 for
    velocity.
    """
    snr = torch.tensor([0.0, 0.0, 0.0])
    assert losses.denoising(*pair, snr, min_snr=5.0).item() == losses.denoising(*pair).item()
    assert losses.denoising(*pair, snr, min_snr=5.0, target="v").item() == 0


def test_losses_of_an_empty_batch_are_zero() -> None:
    empty, snr = torch.zeros(0, 2, 4, 5), torch.zeros(0)
    check_zero_with_gradient(losses.denoising, empty, empty)
    check_zero_with_gradient(lambda a, b: losses.denoising(a, b, snr, min_snr=5.0), empty, empty)
    check_zero_with_gradient(losses.edge_l1, empty, empty)
    check_zero_with_gradient(
        lambda mean, logvar: losses.gaussian_kl(mean, logvar, 20), empty, empty
    )
    for part in (0, 1):
        check_zero_with_gradient(
            lambda a, b, part=part: losses.reconstruction(a, b)[part], empty, empty
        )


@pytest.mark.parametrize("shape", [(2, 3, 0, 4), (2, 3, 4, 5), (0, 3, 4, 5)])
def test_kl_of_images_without_pixels_is_zero(shape: tuple[int, ...]) -> None:
    check_zero_with_gradient(
        lambda mean, logvar: losses.gaussian_kl(mean, logvar, 0),
        torch.ones(shape),
        torch.ones(shape),
    )


def test_an_image_of_one_pixel_has_no_edges() -> None:
    pixel = torch.ones(2, 1, 1, 1)
    check_zero_with_gradient(losses.edge_l1, pixel, 2 * pixel)


def test_losses_refuse_tensors_that_would_be_broadcast(
    pair: tuple[torch.Tensor, torch.Tensor],
) -> None:
    predicted, grey = pair[0], pair[1][:, :1]
    calls: list[Callable[[], object]] = [
        lambda: losses.edge_l1(predicted, grey),
        lambda: losses.reconstruction(predicted, grey),
        lambda: losses.gaussian_kl(predicted, grey, 100),
        lambda: losses.denoising(*pair, torch.ones(3, 1, 1, 1), min_snr=5.0),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="shape"):
            call()


def test_denoising_refuses_an_unknown_target(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="target"):
        losses.denoising(*pair, target="velocity")


def test_edges_and_pixels(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    error = pair[0] - pair[1]
    across = (error[..., 1:] - error[..., :-1]).abs().mean()
    down = (error[..., 1:, :] - error[..., :-1, :]).abs().mean()
    assert losses.edge_l1(*pair).item() == pytest.approx(float(across + down), rel=1e-6)
    l1, l2 = losses.reconstruction(*pair)
    assert (l1.item(), l2.item()) == pytest.approx(
        (float(error.abs().mean()), float((error**2).mean())), rel=1e-6
    )


def test_kl_is_that_of_torch(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    mean, logvar = pair[0].float(), pair[1].float()
    gaussian = torch.distributions.Normal(mean, (0.5 * logvar).exp())
    standard = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
    expected = torch.distributions.kl_divergence(gaussian, standard).flatten(1).sum(1).mean() / 100
    assert losses.gaussian_kl(mean, logvar, 100).item() == pytest.approx(expected.item(), rel=1e-5)
