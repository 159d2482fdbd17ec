"""Batch norm and projection heads of sequences with padding, against torch's on the real items
alone.
"""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.models.dual_encoders.parts.layers import BatchNormHead, MaskedBatchNorm

MASK = torch.tensor(
    [[True, True, False, False], [True, True, True, True], [False] * 4, [True, False, True, False]]
)


def features(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pair(dim: int = 5) -> tuple[MaskedBatchNorm, nn.BatchNorm1d]:
    """Return the batch norm and torch's, with equal random parameters and buffers."""
    torch.manual_seed(0)
    ours, theirs = MaskedBatchNorm(dim), nn.BatchNorm1d(dim)
    for tensor in (*theirs.parameters(), theirs.running_mean, theirs.running_var):
        assert tensor is not None
        nn.init.uniform_(tensor, 0.5, 1.5)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_equals_that_of_the_real_items(training: bool) -> None:
    """In value, gradients and running statistics."""
    ours, theirs = (norm.train(training) for norm in pair())
    x_BND, weight_BND = features(4, 4, 5).requires_grad_(), features(4, 4, 5, seed=1)
    actual, expected = ours(x_BND, MASK), theirs(x_BND[MASK])
    torch.testing.assert_close(actual[MASK], expected, rtol=1e-5, atol=1e-6)
    assert not actual[~MASK].any()
    for name, buffer in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], buffer, rtol=1e-5, atol=1e-6)
    ours_grads = torch.autograd.grad((actual * weight_BND).sum(), [x_BND, *ours.parameters()])
    theirs_grads = torch.autograd.grad(
        (expected * weight_BND[MASK]).sum(), [x_BND, *theirs.parameters()]
    )
    for our, their in zip(ours_grads, theirs_grads, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(6, 5), (6, 3, 5)])
def test_batch_norm_without_mask_equals_that_of_torch(shape: tuple[int, ...]) -> None:
    ours, theirs = pair()
    x = features(*shape)
    torch.testing.assert_close(ours(x), theirs(x.flatten(0, -2)).view(shape), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("garbage", [1e4, torch.nan])
@pytest.mark.parametrize("norm_output", [False, True])
def test_padding_changes_neither_a_head_nor_its_statistics(
    norm_output: bool, garbage: float
) -> None:
    torch.manual_seed(0)
    head = BatchNormHead(5, 3, hidden=7, norm_output=norm_output)
    results = []
    for extra in (0, 6):
        model = copy.deepcopy(head)
        mask_BN = F.pad(MASK, (0, extra))
        x_BND = F.pad(features(4, 4, 5), (0, 0, 0, extra)).masked_fill(
            ~mask_BN[:, :, None], garbage if extra else 0.0
        )
        x_BND.requires_grad_()
        out_BNE = model(x_BND, mask_BN)
        assert not out_BNE[~mask_BN].any()
        (out_BNE[:, :4] * features(4, 4, 3, seed=1)).sum().backward()
        assert x_BND.grad is not None
        assert not x_BND.grad[~mask_BN].any()
        gradients = [
            parameter.grad for parameter in model.parameters() if parameter.grad is not None
        ]
        assert len(gradients) == len(list(model.parameters()))
        results.append([out_BNE[:, :4], x_BND.grad[:, :4], *gradients, *model.buffers()])
    for short, long in zip(*results, strict=True):
        torch.testing.assert_close(long, short, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm_output", [False, True])
def test_head_equals_its_layers(norm_output: bool) -> None:
    head = BatchNormHead(5, 3, hidden=7, norm_output=norm_output)
    layers = [head.inner, nn.BatchNorm1d(7), nn.ReLU(), head.outer]
    layers += [nn.BatchNorm1d(3, affine=False)] if norm_output else []
    x_BD = features(6, 5)
    torch.testing.assert_close(head(x_BD), nn.Sequential(*layers)(x_BD), rtol=1e-5, atol=1e-6)
    assert (
        sum(parameter.numel() for parameter in head.parameters()) == 5 * 7 + 7 + 2 * 7 + 7 * 3 + 3
    )


def test_fan_out_init_has_the_variances_of_lovt() -> None:
    torch.manual_seed(0)
    head = BatchNormHead(300, 200, 400, fan_out_init=True)
    assert math.isclose(head.inner.weight.std().item(), (2 / 400) ** 0.5, rel_tol=0.02)
    assert math.isclose(head.outer.weight.std().item(), (1 / 200) ** 0.5, rel_tol=0.02)
    assert not head.inner.bias.any()
    assert not head.outer.bias.any()


def test_batch_without_real_items_leaves_the_running_statistics() -> None:
    norm, _ = pair()
    before = copy.deepcopy(norm.state_dict())
    x_BND = features(2, 3, 5).requires_grad_()
    norm(x_BND, torch.zeros(2, 3, dtype=torch.bool)).sum().backward()
    assert x_BND.grad is not None
    assert not x_BND.grad.any()
    assert torch.equal(norm.running_mean, before["running_mean"])
    assert torch.equal(norm.running_var, before["running_var"])
    assert norm(features(0, 3, 5)).shape == (0, 3, 5)
    one_B1D = norm(features(1, 1, 5))  # a single item gives the bias
    torch.testing.assert_close(one_B1D[0, 0], norm.bias)
    assert norm.running_var.isfinite().all()


def test_batch_norm_has_float32_statistics() -> None:
    """The mean of 4,096 numbers near 100 has no error of 16 bits."""
    norm = MaskedBatchNorm(2)
    x_ND = (100 + features(4096, 2)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        normed_ND = norm(x_ND)
    assert normed_ND.dtype == torch.bfloat16
    expected = MaskedBatchNorm(2)
    torch.testing.assert_close(normed_ND, expected(x_ND.float()).bfloat16(), rtol=0, atol=0)
    torch.testing.assert_close(norm.running_mean, expected.running_mean, rtol=0, atol=0)


def test_batch_norm_refuses_other_masks() -> None:
    with pytest.raises(ValueError, match="mask"):
        MaskedBatchNorm(5)(features(4, 4, 5), MASK[:, :3])
