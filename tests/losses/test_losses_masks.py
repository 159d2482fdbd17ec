"""Masks of losses: numbers have the effect of booleans, and other shapes are refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from medvl import losses
from medvl.losses.local.gloria import gloria_contrast

ROWS, ITEMS = 4, 6


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mask() -> Tensor:
    """Return a bool mask with True on the first items of every row, of which a row may have
    none.
    """
    return torch.arange(ITEMS) < torch.tensor([3, 6, 0, 1])[:, None]


def detection(inner_BP: Tensor) -> Tensor:
    box_B64 = torch.tensor([0.1, 0.1, 0.9, 0.9]).repeat(ROWS, ITEMS, 1)
    labels = numbers(ROWS, ITEMS, 2, seed=1) > 0
    return torch.stack(
        losses.detection(numbers(ROWS, ITEMS, 2), box_B64, labels, box_B64.round(), inner_BP)
    )


MASKED: dict[str, Callable[[Tensor], Tensor]] = {
    "detection": detection,
    "gloria_local": lambda m: sum(
        losses.gloria_local(numbers(ROWS, 9, 8), numbers(ROWS, ITEMS, 8), m)
    ),
    "gloria_contrast": lambda m: sum(gloria_contrast(numbers(ROWS, ROWS), m[:, 0])),
    "statement_contrast": lambda m: sum(losses.statement_contrast(numbers(ROWS, ITEMS), m)),
    "multi_positive": lambda m: losses.multi_positive(numbers(ROWS, ITEMS), m),
    "multi_positive, ignored": lambda m: losses.multi_positive(
        numbers(ROWS, ITEMS), mask().roll(1, 0), m
    ),
    "itm": lambda m: losses.itm(numbers(ROWS, 2), torch.tensor([1, 0, 1, 0]), m[:, 0]),
    "mim": lambda m: losses.mim(numbers(ROWS, ITEMS, 8), numbers(ROWS, ITEMS, 8, seed=1), m),
    "within_sample_nce": lambda m: losses.within_sample_nce(
        numbers(ROWS, ITEMS, 8), numbers(ROWS, ITEMS, 8, seed=1), m
    ),
    "dv_bound": lambda m: losses.dv_bound(numbers(ROWS), numbers(ROWS, ITEMS), m),
    "info_nce_bound": lambda m: losses.info_nce_bound(numbers(ROWS), numbers(ROWS, ITEMS), m),
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32])
@pytest.mark.parametrize("name", MASKED)
def test_masks_of_numbers_are_those_of_booleans(name: str, dtype: torch.dtype) -> None:
    expected = MASKED[name](mask())
    assert expected.isfinite().all()
    torch.testing.assert_close(MASKED[name](mask().to(dtype)), expected, rtol=0, atol=0)


def test_masks_and_weights_of_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="counted_B"):
        losses.itm(numbers(ROWS, 2), torch.ones(ROWS), torch.ones(ROWS, 1, dtype=torch.bool))
    with pytest.raises(ValueError, match="weight_B"):
        losses.lvit(torch.rand(ROWS, 1, 4, 4), torch.ones(ROWS, 1, 4, 4), torch.ones(ROWS, 1))


def test_an_unknown_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="bound"):
        losses.information_bound(
            numbers(3, 3), torch.arange(3), ~torch.eye(3, dtype=torch.bool), "nce"
        )
