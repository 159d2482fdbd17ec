"""Contrastive losses against the papers' formulas in plain loops, in value and gradient."""

import math

import pytest
import torch
from helpers.loss_checks import check_one_number, compare
from torch import Tensor

from medvl import losses
from medvl.losses.pairs import blockwise


def cosine(a_E: Tensor, b_E: Tensor) -> Tensor:
    return (a_E @ b_E) / (a_E.norm() * b_E.norm())


def naive_convirt(
    image_BE: Tensor, text_BE: Tensor, temperature: float, image_weight: float
) -> Tensor:
    """Return equations 2 to 4 of arXiv 2010.00747, with their ratio of exponentials."""
    total = image_BE.new_zeros(())
    for i in range(len(image_BE)):
        pair = torch.exp(cosine(image_BE[i], text_BE[i]) / temperature)
        to_texts = sum(
            torch.exp(cosine(image_BE[i], text_BE[k]) / temperature) for k in range(len(text_BE))
        )
        to_images = sum(
            torch.exp(cosine(text_BE[i], image_BE[k]) / temperature) for k in range(len(image_BE))
        )
        total = total - image_weight * torch.log(pair / to_texts)
        total = total - (1 - image_weight) * torch.log(pair / to_images)
    return total / len(image_BE)


def naive_clip(image_BE: Tensor, text_BE: Tensor, scale: Tensor) -> Tensor:
    total = image_BE.new_zeros(())
    for i in range(len(image_BE)):
        logits_from_image = torch.stack(
            [scale * image_BE[i] @ text_BE[k] for k in range(len(text_BE))]
        )
        logits_from_text = torch.stack(
            [scale * text_BE[i] @ image_BE[k] for k in range(len(image_BE))]
        )
        total = (
            total - logits_from_image.log_softmax(0)[i] / 2 - logits_from_text.log_softmax(0)[i] / 2
        )
    return total / len(image_BE)


def naive_siglip(image_BE: Tensor, text_BE: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    total = image_BE.new_zeros(())
    for i in range(len(image_BE)):
        for k in range(len(text_BE)):
            sign = 1.0 if i == k else -1.0
            total = total + torch.log(
                1 + torch.exp(-sign * (scale * image_BE[i] @ text_BE[k] + bias))
            )
    return total / len(image_BE)


def pairs(batch: int, dim: int = 16, unit: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch)
    tensors = [torch.randn(batch, dim, generator=generator, dtype=torch.float64) for _ in range(2)]
    if unit:
        tensors = [torch.nn.functional.normalize(tensor, dim=-1) for tensor in tensors]
    return tensors[0].float(), tensors[1].float()


@pytest.mark.parametrize("batch", [1, 2, 9])
@pytest.mark.parametrize(
    ("temperature", "weight"), [(0.1, 0.75), (0.07, 0.5), (1.0, 0.0), (0.5, 1.0)]
)
def test_convirt_equals_the_paper(batch: int, temperature: float, weight: float) -> None:
    compare(
        lambda image, text: losses.convirt(image, text, temperature, weight),
        lambda image, text: naive_convirt(image, text, temperature, weight),
        list(pairs(batch)),
    )


def test_convirt_has_the_published_defaults() -> None:
    image_BE, text_BE = pairs(9)
    torch.testing.assert_close(
        losses.convirt(image_BE, text_BE), losses.convirt(image_BE, text_BE, 0.1, 0.75)
    )


def test_convirt_weights_the_image_to_text_direction() -> None:
    """Swapping images and texts swaps the directions."""
    image_BE, text_BE = pairs(6)
    torch.testing.assert_close(
        losses.convirt(image_BE, text_BE, 0.1, 0.75), losses.convirt(text_BE, image_BE, 0.1, 0.25)
    )
    assert not torch.allclose(
        losses.convirt(image_BE, text_BE, 0.1, 0.75), losses.convirt(image_BE, text_BE, 0.1, 0.25)
    )


@pytest.mark.parametrize("batch", [1, 2, 9])
def test_clip_equals_the_paper(batch: int) -> None:
    compare(losses.clip, naive_clip, [*pairs(batch, unit=True), torch.tensor(14.3)])


@pytest.mark.parametrize("batch", [1, 2, 9])
def test_siglip_equals_the_paper(batch: int) -> None:
    compare(
        losses.siglip,
        naive_siglip,
        [*pairs(batch, unit=True), torch.tensor(10.0), torch.tensor(-10.0)],
    )


@pytest.mark.parametrize("aligned", [True, False])
def test_losses_stay_finite_at_temperature_one_hundredth(aligned: bool) -> None:
    """A ratio of exponentials is 0/0 or inf/inf here."""
    image_BE, text_BE = pairs(16, unit=True)
    if aligned:
        text_BE = image_BE.clone()
    for loss in (
        lambda image, text: losses.convirt(image, text, temperature=0.01),
        lambda image, text: losses.clip(image, text, 100.0),
        lambda image, text: losses.siglip(image, text, 100.0, -10.0),
    ):
        image = image_BE.clone().requires_grad_()
        value = loss(image, text_BE)
        value.backward()
        assert torch.isfinite(value)
        assert image.grad is not None
        assert torch.isfinite(image.grad).all()
    if aligned:
        assert losses.convirt(image_BE, text_BE, temperature=0.01) < 1e-6


@pytest.mark.parametrize("batch", [8, 64])
def test_losses_of_random_embeddings_have_their_expected_value(batch: int) -> None:
    """It is ln B, and for the sigmoid softplus of +-bias for the B pairs of each row."""
    image_BE, text_BE = pairs(batch, dim=4096, unit=True)
    assert losses.convirt(image_BE, text_BE, temperature=1.0).item() == pytest.approx(
        math.log(batch), rel=0.01
    )
    assert losses.clip(image_BE, text_BE, 1.0).item() == pytest.approx(math.log(batch), rel=0.01)
    expected = math.log1p(math.exp(10)) + (batch - 1) * math.log1p(math.exp(-10))
    assert losses.siglip(image_BE, text_BE, 0.0, -10.0).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.fault("N4")
def test_losses_ignore_autocast() -> None:
    image_BE, text_BE = pairs(32, unit=True)
    for loss in (
        losses.convirt,
        lambda i, t: losses.clip(i, t, 14.3),
        lambda i, t: losses.siglip(i, t, 10.0, -10.0),
    ):
        plain = loss(image_BE, text_BE)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(loss(image_BE, text_BE), plain, rtol=0, atol=0)
        assert loss(image_BE.bfloat16(), text_BE.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("block_bytes", [2**24, 4 * 6 * 2])
def test_scales_and_biases_are_one_number(
    block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockwise, "_CPU_BLOCK_BYTES", block_bytes)
    sides = pairs(6, unit=True)
    check_one_number(lambda scale: losses.clip(*sides, scale), 2.0)
    check_one_number(lambda scale: losses.siglip(*sides, scale, -1.0), 2.0)
    check_one_number(lambda bias: losses.siglip(*sides, 2.0, bias), -1.0)


def test_losses_do_not_depend_on_the_order_of_pairs() -> None:
    image_BE, text_BE = pairs(12)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        losses.convirt(image_BE, text_BE), losses.convirt(image_BE[order], text_BE[order])
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2, 3), torch.zeros(3, 3)), "must both be"),
        ((torch.zeros(0, 3), torch.zeros(0, 3)), "at least one pair"),
        ((torch.zeros(2, 3), torch.zeros(2, 3), 0.0), "temperature"),
        ((torch.zeros(2, 3), torch.zeros(2, 3), 0.1, 1.5), "image_weight"),
    ],
)
def test_losses_reject_invalid_arguments(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        losses.convirt(*arguments)
