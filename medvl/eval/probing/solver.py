"""Logistic regression of many labels on fixed features, by L-BFGS.

Shape letters: N images, D feature dim, L labels.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.eval.core.metrics import Array

_MAX_STEPS = 1000
TOLERANCE = 1e-4
"""Largest gradient entry at convergence, as in scikit-learn. The loss is a mean over images and independent of N."""


@dataclasses.dataclass(frozen=True, slots=True)
class Standardizer:
    """Standardisation to zero mean and unit standard deviation; constant features become 0."""

    mean_D: Tensor
    scale_D: Tensor

    @classmethod
    def fit(cls, x_ND: Tensor) -> "Standardizer":
        """Return the standardisation by mean and standard deviation of these features."""
        x_ND = x_ND.double()
        std_D = x_ND.std(dim=0, unbiased=False)
        varies_D = std_D > 1e-6 * x_ND.abs().mean(dim=0)  # relative: features may be of any scale
        return cls(x_ND.mean(dim=0), torch.where(varies_D, 1 / std_D.clamp(min=1e-30), torch.zeros_like(std_D)))

    def __call__(self, x_ND: Tensor) -> Tensor:
        """Return standardised features (N, D) in float64."""
        return (x_ND.double() - self.mean_D) * self.scale_D


@dataclasses.dataclass(frozen=True, slots=True)
class LinearProbe:
    """One logistic regression per label."""

    weight_LD: Tensor
    bias_L: Tensor
    converged: bool = True

    def probability_NL(self, x_ND: Tensor) -> Array:
        """Return float64 probabilities of standardised features."""
        return torch.sigmoid(F.linear(x_ND, self.weight_LD, self.bias_L)).numpy()


def fit_logistic(
    x_ND: Tensor, y_NL: Array, penalty: float, start: LinearProbe | None = None, *, tolerance: float = TOLERANCE
) -> LinearProbe:
    """Fit probes that minimise, per label, mean cross-entropy + penalty / 2 |weights|^2.

    The bias is not penalised. Labels are independent problems, solved jointly on the images where the label is 1 or 0.
    A label with a single class gets the probability 0.5 everywhere.

    Args:
        x_ND: standardised float64 features.
        y_NL: 1, 0 or NaN (left out).
        penalty: weight of the penalty, above 0, so that the solution is unique.
        start: initial solution, such as that for a larger penalty.
        tolerance: largest gradient entry at convergence.
    """
    known_NL, target_NL = torch.from_numpy(~np.isnan(y_NL)).double(), torch.from_numpy(np.nan_to_num(y_NL))
    both_L = torch.from_numpy((y_NL == 1).any(axis=0) & (y_NL == 0).any(axis=0)).double()
    weight_NL = both_L * known_NL / known_NL.sum(dim=0).clamp(min=1)
    weight_LD = torch.zeros(y_NL.shape[1], x_ND.shape[1], dtype=torch.float64)
    bias_L = torch.zeros(y_NL.shape[1], dtype=torch.float64)
    if start is not None:
        weight_LD, bias_L = start.weight_LD.clone(), start.bias_L.clone()
    parameters = [weight_LD.requires_grad_(), bias_L.requires_grad_()]
    optimizer = torch.optim.LBFGS(
        parameters,
        max_iter=_MAX_STEPS,
        tolerance_grad=tolerance,
        tolerance_change=1e-14,
        history_size=10,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        logits_NL = F.linear(x_ND, weight_LD, bias_L)
        loss_NL = F.binary_cross_entropy_with_logits(logits_NL, target_NL, reduction="none")
        loss = (loss_NL * weight_NL).sum() + penalty / 2 * weight_LD.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
        closure()
    steepest = max(float(parameter.grad.abs().max()) for parameter in parameters if parameter.grad is not None)
    return LinearProbe(weight_LD.detach(), bias_L.detach(), steepest <= 2 * tolerance)


def comparable_probabilities(probe: LinearProbe, x_ND: Tensor, y_NL: Array) -> Array:
    """Return probabilities (N, L) for a choice between labels.

    A label that has a single class in training gets the probability of that class, 1 or 0. The 0.5 of `fit_logistic`
    would be above those of labels that the probe has learned.

    Args:
        probe: from `fit_logistic`.
        x_ND: standardised features.
        y_NL: labels that the probe was fitted to.
    """
    positive_L, negative_L = (y_NL == 1).any(axis=0), (y_NL == 0).any(axis=0)
    return np.where(positive_L == negative_L, probe.probability_NL(x_ND), positive_L.astype(np.float64))


def fit_path(x_ND: Tensor, y_NL: Array, penalties: Sequence[float]) -> dict[float, LinearProbe]:
    """Return penalty -> probe, fitted from the largest penalty down, each from the previous solution."""
    probes: dict[float, LinearProbe] = {}
    probe = None
    for penalty in sorted(penalties, reverse=True):
        probe = probes[penalty] = fit_logistic(x_ND, y_NL, penalty, probe)
    return probes
