"""Losses of masked regions against their formulas, one region at a time."""

import math

import pytest
import torch
from helpers.loss_checks import check_precision, check_zero_with_gradient, compare
from torch import Tensor

from medvl import losses

LOGITS = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
CLASSES = torch.rand(5, 4, generator=torch.Generator().manual_seed(1)).softmax(dim=1)
CLASSES[3] = 0
LOSSES = (losses.region_regression, losses.region_kl, losses.region_labels)


@pytest.mark.parametrize("smooth", [False, True])
def test_regression(smooth: bool) -> None:
    true_ND = 3 * CLASSES

    def naive(predicted_ND: Tensor) -> Tensor:
        total = predicted_ND.new_zeros(())
        for row in range(5):
            for column in range(4):
                error = (predicted_ND[row, column] - true_ND[row, column]).abs()
                total = total + (
                    error**2 if not smooth else error**2 / 2 if error < 1 else error - 0.5
                )
        return total / 20

    compare(lambda x: losses.region_regression(x, true_ND, smooth=smooth), naive, [LOGITS])
    target_ND = true_ND.clone().requires_grad_()
    assert not losses.region_regression(LOGITS, target_ND).requires_grad  # targets are not trained


def test_classes() -> None:
    rows = (0, 1, 2, 4)  # row 3 has no class

    def kl(logits_NK: Tensor) -> Tensor:
        terms = [
            p.double() * (p.double().log() - logits_NK[row].log_softmax(dim=0)[k])
            for row in rows
            for k, p in enumerate(CLASSES[row])
        ]
        return torch.stack(terms).sum() / 4

    def labels(logits_NK: Tensor) -> Tensor:
        terms = [
            -CLASSES[row].max().double() * logits_NK[row].log_softmax(dim=0)[CLASSES[row].argmax()]
            for row in rows
        ]
        return torch.stack(terms).sum() / 4

    compare(lambda x: losses.region_kl(x, CLASSES), kl, [LOGITS])
    compare(lambda x: losses.region_labels(x, CLASSES), labels, [LOGITS])
    certain_NK = torch.eye(4)
    for loss in (losses.region_kl, losses.region_labels):
        assert loss(torch.zeros(4, 4), certain_NK).item() == pytest.approx(math.log(4))


def test_no_region_precision_and_shapes() -> None:
    for loss in LOSSES:
        check_zero_with_gradient(lambda x, loss=loss: loss(x, torch.zeros(0, 4)), torch.zeros(0, 4))
        check_precision(lambda x, loss=loss: loss(x, CLASSES), LOGITS)
        with pytest.raises(ValueError, match="one shape"):
            loss(LOGITS, CLASSES[:, :3])
