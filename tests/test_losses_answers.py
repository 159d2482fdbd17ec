"""Answering as classification: the loss against its formula."""

import math

import pytest
import torch
from loss_checks import check_precision, check_zero_with_gradient, compare
from torch import Tensor

from medvl import losses


def naive(logits_BV: Tensor, target_BV: Tensor) -> Tensor:
    total = logits_BV.new_zeros(())
    for logits_V, target_V in zip(logits_BV, target_BV.to(logits_BV.dtype), strict=True):
        for logit, target in zip(logits_V, target_V, strict=True):
            chance = 1 / (1 + torch.exp(-logit))
            total = total - target * torch.log(chance) - (1 - target) * torch.log(1 - chance)
    return total / len(logits_BV)


def random_case(batch: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch)
    return 2 * torch.randn(batch, size, generator=generator), torch.rand(batch, size, generator=generator)


@pytest.mark.parametrize(("batch", "size"), [(1, 2), (5, 3), (8, 30)])
def test_it_is_binary_cross_entropy_summed_over_answers(batch: int, size: int) -> None:
    logits_BV, target_BV = random_case(batch, size)
    compare(lambda x: losses.answers(x, target_BV), lambda x: naive(x, target_BV), [logits_BV])


def test_it_starts_at_ln_two_an_answer() -> None:
    assert losses.answers(torch.zeros(4, 450), torch.zeros(4, 450)).item() == pytest.approx(450 * math.log(2), rel=1e-5)


def test_precision_and_nothing_to_learn_from() -> None:
    logits_BV, target_BV = random_case(4, 6)
    check_precision(lambda x: losses.answers(x, target_BV), logits_BV)
    check_zero_with_gradient(lambda x: losses.answers(x, torch.zeros(0, 6)), torch.zeros(0, 6))
    assert losses.answers(torch.full((1, 2), 1e4), torch.tensor([[1.0, 0.0]])).isfinite()


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"one shape \(B, V\), got \(2, 3\) and \(2, 4\)"):
        losses.answers(torch.zeros(2, 3), torch.zeros(2, 4))
