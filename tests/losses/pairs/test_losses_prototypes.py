"""Sinkhorn's assignments and the prototype loss against plain loops, in value and gradient."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers.loss_checks import check_precision, check_zero_with_gradient, compare
from torch import Tensor

from medvl import losses


def unit(rows: int, seed: int, dim: int = 6) -> Tensor:
    return F.normalize(torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)), dim=1)


def naive_sinkhorn(scores_BK: Tensor, epsilon: float, iterations: int) -> Tensor:
    """The algorithm of SwAV and MGCA in float64, without logarithms."""
    q_KB = torch.exp(scores_BK.detach().double() / epsilon).T
    prototypes, samples = q_KB.shape
    q_KB = q_KB / q_KB.sum()
    for _ in range(iterations):
        for k in range(prototypes):
            q_KB[k] = q_KB[k] / q_KB[k].sum() / prototypes
        for b in range(samples):
            q_KB[:, b] = q_KB[:, b] / q_KB[:, b].sum() / samples
    return (q_KB / q_KB.sum(dim=0)).T


def naive_swap(
    image_BE: Tensor, text_BE: Tensor, prototypes_KE: Tensor, temperature: float, epsilon: float
) -> Tensor:
    scores = [
        [torch.stack([row @ c for c in prototypes_KE]) for row in side]
        for side in (image_BE, text_BE)
    ]
    codes = [naive_sinkhorn(torch.stack(side), epsilon, 3) for side in scores]
    total = image_BE.new_zeros(())
    for code_BK, predicted in ((codes[0], scores[1]), (codes[1], scores[0])):
        for code_K, scores_K in zip(code_BK, predicted, strict=True):
            exponentials = torch.exp(scores_K / temperature)
            total = total - (code_K * torch.log(exponentials / exponentials.sum())).sum() / 2
    return total / len(image_BE)


@pytest.mark.parametrize("iterations", [0, 1, 3])
@pytest.mark.parametrize("epsilon", [0.05, 0.5])
def test_sinkhorn_equals_the_published_algorithm(iterations: int, epsilon: float) -> None:
    scores_BK = unit(7, 0) @ unit(5, 1).T
    actual = losses.sinkhorn(scores_BK, epsilon, iterations)
    torch.testing.assert_close(
        actual.double(), naive_sinkhorn(scores_BK, epsilon, iterations), rtol=1e-4, atol=1e-7
    )
    torch.testing.assert_close(actual.sum(dim=1), torch.ones(7))
    torch.testing.assert_close(
        losses.sinkhorn(scores_BK), losses.sinkhorn(scores_BK, 0.05, 3), rtol=0, atol=0
    )


def test_sinkhorn_uses_all_prototypes_equally() -> None:
    """After many iterations; a softmax leaves prototypes unused."""
    scores_BK = unit(12, 0) @ unit(4, 1).T + torch.tensor([0.0, 0.0, 0.0, 0.5])
    torch.testing.assert_close(
        losses.sinkhorn(scores_BK, 0.3, 200).sum(dim=0), torch.full((4,), 3.0), rtol=1e-3, atol=0
    )
    assert losses.sinkhorn(scores_BK, 0.3, 0).sum(dim=0)[3] > 4


@pytest.mark.fault("N4")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sinkhorn_does_not_overflow(dtype: torch.dtype) -> None:
    """exp(0.6 / 0.05) is infinite in float16, as in MGCA's code under mixed precision."""
    scores_BK = (unit(8, 0) @ unit(5, 1).T).to(dtype)
    scores_BK[0] = 1.0
    with torch.autocast("cpu", torch.bfloat16):
        codes_BK = losses.sinkhorn(scores_BK, 0.05)
    assert codes_BK.dtype == torch.float32
    torch.testing.assert_close(codes_BK, losses.sinkhorn(scores_BK.float(), 0.05), rtol=0, atol=0)
    assert losses.sinkhorn(1e4 * scores_BK.float(), 0.001).isfinite().all()


def test_sinkhorn_has_no_gradient_and_ignores_repetition() -> None:
    """So gathered rows, which every rank then repeats, give the same as own rows."""
    scores_BK = (unit(6, 0) @ unit(5, 1).T).requires_grad_()
    codes_BK = losses.sinkhorn(scores_BK)
    assert not codes_BK.requires_grad
    torch.testing.assert_close(losses.sinkhorn(scores_BK.repeat(2, 1))[:6], codes_BK)
    assert losses.sinkhorn(scores_BK[:0]).shape == (0, 5)


@pytest.mark.fault("N1")
@pytest.mark.parametrize(("temperature", "epsilon"), [(0.2, 0.05), (1.0, 0.3)])
def test_prototype_swap_equals_its_formula(temperature: float, epsilon: float) -> None:
    compare(
        lambda image, text, prototypes: losses.prototype_swap(
            image, text, prototypes, temperature, epsilon
        ),
        lambda image, text, prototypes: naive_swap(image, text, prototypes, temperature, epsilon),
        [unit(6, 0), unit(6, 1), unit(9, 2)],
    )
    arguments = unit(6, 0), unit(6, 1), unit(9, 2)
    default = losses.prototype_swap(*arguments)
    torch.testing.assert_close(
        default, losses.prototype_swap(*arguments, 0.2, 0.05, 3), rtol=0, atol=0
    )


def test_prototype_swap_of_equal_prototypes_is_ln_k() -> None:
    prototypes_KE = unit(1, 0).expand(7, -1)
    assert losses.prototype_swap(unit(4, 1), unit(4, 2), prototypes_KE).item() == pytest.approx(
        math.log(7)
    )


def test_prototype_swap_is_computed_in_float32_and_zero_without_pairs() -> None:
    check_precision(losses.prototype_swap, unit(6, 0), unit(6, 1), unit(9, 2))
    check_zero_with_gradient(losses.prototype_swap, unit(0, 0), unit(0, 1), unit(9, 2))


def test_prototypes_refuse_other_shapes_and_ranges() -> None:
    for arguments in (
        (unit(4, 0), unit(5, 1), unit(3, 2)),
        (unit(4, 0), unit(4, 1), unit(3, 2, dim=5)),
    ):
        with pytest.raises(ValueError, match="prototypes"):
            losses.prototype_swap(*arguments)
    with pytest.raises(ValueError, match="temperature"):
        losses.prototype_swap(unit(4, 0), unit(4, 1), unit(3, 2), temperature=0.0)
    with pytest.raises(ValueError, match="epsilon"):
        losses.sinkhorn(torch.zeros(3, 2), 0.0)
    with pytest.raises(ValueError, match="epsilon"):
        losses.sinkhorn(torch.zeros(3, 2), iterations=-1)
    with pytest.raises(ValueError, match="prototype"):
        losses.sinkhorn(torch.zeros(3, 0))
