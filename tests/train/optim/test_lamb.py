"""LAMB: identities with Adam, the formula written out, exemptions, and its state."""

import pytest
import torch
from torch import nn

from medvl.train.config import OptimConfig
from medvl.train.optim.optimizer import (
    Lamb,
    build_optimizer,
    load_optimizer_tensors,
    optimizer_tensors,
)


def test_without_decay_the_direction_is_adams_and_the_length_that_of_the_weights() -> None:
    torch.manual_seed(0)
    weights = torch.randn(5, 4)
    lamb, adam = nn.Parameter(weights.clone()), nn.Parameter(weights.clone())
    optimizers = [Lamb([lamb], lr=0.01, eps=1e-6), torch.optim.Adam([adam], lr=0.01, eps=1e-6)]
    before = weights.clone()
    for _ in range(3):
        gradient = torch.randn(5, 4)
        adam_before = adam.detach().clone()
        for parameter, optimizer in zip((lamb, adam), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
        moved, adam_moved = lamb.detach() - before, adam.detach() - adam_before
        torch.testing.assert_close(moved.norm(), 0.01 * before.norm())
        torch.testing.assert_close(moved / moved.norm(), adam_moved / adam_moved.norm())
        before = lamb.detach().clone()


def test_a_ratio_of_one_is_adam_with_decay_in_the_update() -> None:
    """The weights have the norm of the first update: |w| = |r|."""
    decay, rate, eps = 0.1, 0.05, 1e-6
    gradient = torch.tensor([[2.0, -3.0], [0.5, 4.0]])
    sign = gradient / (gradient.abs() + eps)  # Adam's first update
    weights = torch.full((2, 2), 0.2)
    for _ in range(200):  # the scale at which |w| = |sign + decay * w|
        weights = weights / weights.norm() * (sign + decay * weights).norm()
    parameter = nn.Parameter(weights.clone())
    parameter.grad = gradient
    Lamb([parameter], lr=rate, weight_decay=decay, eps=eps).step()
    torch.testing.assert_close(parameter.detach(), weights - rate * (sign + decay * weights))


def test_steps_are_the_formula_written_out() -> None:
    torch.manual_seed(1)
    parameter = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))
    w, m, v = parameter.detach().clone(), torch.zeros(3, 3).double(), torch.zeros(3, 3).double()
    optimizer = Lamb([parameter], lr=0.02, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.3)
    for step in range(1, 5):
        g = torch.randn(3, 3, dtype=torch.float64)
        parameter.grad = g.clone()
        optimizer.step()
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g**2
        r = m / (1 - 0.8**step) / ((v / (1 - 0.95**step)).sqrt() + 1e-4) + 0.3 * w
        w = w - 0.02 * w.norm() / r.norm() * r
        torch.testing.assert_close(parameter.detach(), w)


def test_biases_norms_and_zero_tensors_have_a_ratio_of_one() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    nn.init.zeros_(model[0].weight)
    config = OptimConfig(optimizer="lamb", lr=0.1, eps=1e-6, weight_decay=0.5)
    optimizer = build_optimizer(model, config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for name, tensor in model.state_dict().items():  # Adam's first step, and no decay
        torch.testing.assert_close(tensor, before[name] - 0.1, msg=name)


def test_state_is_saved_and_loaded_by_name() -> None:
    def run(steps: range, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        for step in steps:
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = torch.full_like(parameter, float(step + number + 1))
            optimizer.step()

    config = OptimConfig(optimizer="lamb", lr=0.1)
    torch.manual_seed(2)
    model, copy = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = build_optimizer(model, config)
    run(range(3), optimizer, model)
    copy.load_state_dict(model.state_dict())
    other = build_optimizer(copy, config)
    stored = {
        name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, model).items()
    }  # as in a file
    load_optimizer_tensors(other, copy, stored)
    run(range(3, 5), optimizer, model)
    run(range(3, 5), other, copy)
    for ours, theirs in zip(copy.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    closure_ran = []
    assert other.step(lambda: closure_ran.append(1) or 0.5) == 0.5
    assert closure_ran == [1]
    assert other.param_groups[0]["lr"] == pytest.approx(0.1)
