"""Classification of findings: the loss against its formula, and labels that are unknown."""

import math

import pytest
import torch
from helpers.loss_checks import check_precision, check_zero_with_gradient, compare
from torch import Tensor

from medvl import losses

TARGET_BL = torch.tensor(
    [[1.0, 0.0, torch.nan], [0.0, torch.nan, torch.nan], [1.0, 1.0, 0.0], [0.0, 1.0, 1.0]]
)


def naive(logits_BL: Tensor, target_BL: Tensor) -> Tensor:
    total, known = logits_BL.new_zeros(()), 0
    for logits_L, target_L in zip(logits_BL, target_BL, strict=True):
        for logit, target in zip(logits_L, target_L.tolist(), strict=True):
            if not math.isnan(target):
                chance = 1 / (1 + torch.exp(-logit))
                total, known = total - torch.log(chance if target == 1 else 1 - chance), known + 1
    return total / known


def logits() -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def loss_and_gradient(target_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and its gradient."""
    leaf_BL = logits().requires_grad_()
    loss = losses.multilabel_bce(leaf_BL, target_BL)
    return loss.detach(), torch.autograd.grad(loss, leaf_BL)[0]


def test_multilabel_bce_equals_the_formula() -> None:
    compare(
        lambda x: losses.multilabel_bce(x, TARGET_BL), lambda x: naive(x, TARGET_BL), [logits()]
    )


def test_multilabel_bce_starts_at_ln_2_and_is_zero_without_known_labels() -> None:
    assert losses.multilabel_bce(torch.zeros(4, 3), TARGET_BL).item() == pytest.approx(math.log(2))
    check_zero_with_gradient(
        lambda x: losses.multilabel_bce(x, torch.full((4, 3), torch.nan)), logits()
    )


def test_unknown_labels_are_ignored_whatever_their_logit() -> None:
    wild = torch.where(TARGET_BL.isnan(), torch.tensor(torch.inf), logits()).requires_grad_()
    loss = losses.multilabel_bce(wild, TARGET_BL)
    torch.testing.assert_close(loss, losses.multilabel_bce(logits(), TARGET_BL))


def test_uncertain_labels_are_ignored_like_unknown_ones() -> None:
    uncertain_BL = torch.where(TARGET_BL.isnan(), torch.tensor(-1.0), TARGET_BL)
    expected, found = (loss_and_gradient(target_BL) for target_BL in (TARGET_BL, uncertain_BL))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(losses.multilabel_bce(logits(), uncertain_BL.long()), expected[0])
    assert losses.known_labels(uncertain_BL).sum() == (~TARGET_BL.isnan()).sum()
    check_zero_with_gradient(lambda x: losses.multilabel_bce(x, torch.full((4, 3), -1.0)), logits())


def test_multilabel_bce_computes_in_float32() -> None:
    check_precision(lambda x: losses.multilabel_bce(x, TARGET_BL), logits())


def test_multilabel_bce_rejects_unequal_shapes() -> None:
    with pytest.raises(
        ValueError, match=r"labels need logits and targets of one shape \(B, L\), got \(4, 3\)"
    ):
        losses.multilabel_bce(logits(), TARGET_BL[:, :2])
