"""A loss beside its formula written out: what the tests of all losses share."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


def compare(
    ours: Callable[..., Tensor], naive: Callable[..., Tensor], inputs: list[Tensor]
) -> None:
    """Compare value and gradients with a naive form in float64."""
    mine = [tensor.clone().requires_grad_() for tensor in inputs]
    reference = [tensor.double().requires_grad_() for tensor in inputs]
    value, expected = ours(*mine), naive(*reference)
    assert value.dtype == torch.float32
    assert value.ndim == 0
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)
    value.backward()
    expected.backward()
    for tensor, other in zip(mine, reference, strict=True):
        assert tensor.grad is not None
        torch.testing.assert_close(tensor.grad.double(), other.grad, rtol=1e-4, atol=1e-6)


def check_zero_with_gradient(loss: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Check that a loss without data is exactly 0 with zero gradients, so that DDP does not
    hang.
    """
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    value = loss(*leaves)
    assert value.item() == 0
    value.backward()
    for leaf in leaves:
        assert leaf.grad is not None
        assert not leaf.grad.any()


def check_one_number(loss: Callable[[Tensor], Tensor], value: float) -> None:
    """Check that a learned scale has the same effect with and without a dimension and in
    float64, and is one number.
    """
    results = []
    for shape in ((), (1,), (1, 1)):
        for dtype in (torch.float32, torch.float64):
            scale = torch.full(shape, value, dtype=dtype, requires_grad=True)
            result = loss(scale)
            assert result.dtype == torch.float32
            result.sum().backward()
            assert scale.grad is not None
            assert (scale.grad.shape, scale.grad.dtype) == (shape, dtype)
            results.append((result.detach(), scale.grad.float().reshape(())))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)
    with pytest.raises(ValueError, match="one number"):
        loss(torch.full((2,), value))


def check_precision(loss: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Check that autocast has no effect and that 16-bit inputs are computed in float32."""
    plain = loss(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(loss(*inputs), plain, rtol=0, atol=0)
    halves = [tensor.bfloat16() for tensor in inputs]
    assert loss(*halves).dtype == torch.float32
    torch.testing.assert_close(
        loss(*halves), loss(*[half.float() for half in halves]), rtol=0, atol=0
    )
