"""Losses within samples against their formulas in plain loops, in value and gradient, with
masks.
"""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers.loss_checks import check_precision, check_zero_with_gradient, compare
from torch import Tensor

from medvl import losses

LENGTHS = [4, 6, 1, 3]
"""Items of the samples."""
Loss = Callable[..., Tensor]


def items(lengths: list[int], dim: int = 5, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return two sets of items with random padding, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    a_BNE, b_BNE = (
        torch.randn(len(lengths), max(lengths), dim, generator=generator) for _ in range(2)
    )
    return a_BNE, b_BNE, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def cosine(a_E: Tensor, b_E: Tensor) -> Tensor:
    return (a_E @ b_E) / (a_E.norm() * b_E.norm())


def naive_nce(
    a_BNE: Tensor,
    b_BNE: Tensor,
    lengths: list[int],
    weights: Tensor,
    positives: Tensor,
    temperature: float,
) -> Tensor:
    """The loops over samples, items and candidates."""
    samples = []
    for a_NE, b_NE, length, weight_N in zip(a_BNE, b_BNE, lengths, weights, strict=True):
        if not length:
            continue
        sample = a_BNE.new_zeros(())
        for i in range(length):
            scores = [cosine(a_NE[i], b_NE[j]) / temperature for j in range(length)]
            shares = [
                positives[i, j] / sum(positives[i, k] for k in range(length)) for j in range(length)
            ]
            loss = torch.log(sum((torch.exp(score) for score in scores), a_BNE.new_zeros(())))
            for share, score in zip(shares, scores, strict=True):
                loss = loss - share * score
            sample = sample + loss * weight_N[i] / sum(weight_N[k] for k in range(length))
        samples.append(sample)
    return torch.stack(samples).mean()


def naive_alignment(a_BNE: Tensor, b_BNE: Tensor, lengths: list[int]) -> Tensor:
    samples = [
        torch.stack(
            [
                (a / a.norm() - b / b.norm()).square().sum()
                for a, b in zip(a_NE[:n], b_NE[:n], strict=True)
            ]
        )
        for a_NE, b_NE, n in zip(a_BNE, b_BNE, lengths, strict=True)
    ]
    return torch.stack([sample.mean() for sample in samples]).mean()


def naive_uniformity(z_BNE: Tensor, lengths: list[int], t: float) -> Tensor:
    samples = []
    for z_NE, length in zip(z_BNE, lengths, strict=True):
        if length < 2:
            continue
        unit_NE = [z / z.norm() for z in z_NE[:length]]
        pairs = [(i, j) for i in range(length) for j in range(length) if i != j]
        potentials = [torch.exp(-t * (unit_NE[i] - unit_NE[j]).square().sum()) for i, j in pairs]
        samples.append(torch.log(torch.stack(potentials).mean()))
    return torch.stack(samples).mean()


@pytest.mark.fault("N1")
@pytest.mark.parametrize("temperature", [0.3, 0.1])
@pytest.mark.parametrize("weighted", [False, True], ids=["equal", "weighted"])
@pytest.mark.parametrize("positives", ["own", "near"])
def test_within_sample_nce_equals_its_formula(
    temperature: float, weighted: bool, positives: str
) -> None:
    a_BNE, b_BNE, mask_BN = items(LENGTHS)
    weights_BN = (
        torch.rand(mask_BN.shape, generator=torch.Generator().manual_seed(1)) if weighted else None
    )
    near_NN = losses.grid_positives(2, 3) if positives == "near" else None
    compare(
        lambda a, b: losses.within_sample_nce(a, b, mask_BN, weights_BN, near_NN, temperature),
        lambda a, b: naive_nce(
            a,
            b,
            LENGTHS,
            torch.ones(mask_BN.shape) if weights_BN is None else weights_BN.double(),
            torch.eye(6) if near_NN is None else near_NN.double(),
            temperature,
        ),
        [a_BNE, b_BNE],
    )


def test_within_sample_nce_has_the_defaults_of_lovt_and_no_gradient_of_weights() -> None:
    a_BNE, b_BNE, _ = items([5, 5])
    weights_BN, positives_NN = (
        torch.rand(2, 5, requires_grad=True),
        torch.rand(5, 5, requires_grad=True),
    )
    default = losses.within_sample_nce(a_BNE, b_BNE)
    torch.testing.assert_close(
        default, losses.within_sample_nce(a_BNE, b_BNE, positives_NN=torch.eye(5))
    )
    torch.testing.assert_close(
        default, losses.within_sample_nce(a_BNE, b_BNE, temperature=0.3), rtol=0, atol=0
    )
    assert not losses.within_sample_nce(a_BNE, b_BNE, None, weights_BN, positives_NN).requires_grad
    assert not torch.isclose(default, losses.within_sample_nce(b_BNE, a_BNE))  # one direction


def test_within_sample_nce_of_random_items_is_ln_n() -> None:
    a_BNE, b_BNE, _ = items([32] * 4, dim=4096)
    assert losses.within_sample_nce(a_BNE, b_BNE, temperature=1.0).item() == pytest.approx(
        math.log(32), rel=0.01
    )


def test_item_whose_positives_are_padding_is_left_out() -> None:
    a_BNE, b_BNE, mask_BN = items([3, 4])
    next_NN = torch.eye(4).roll(1, dims=1)  # the positive of an item is the following one
    actual = losses.within_sample_nce(a_BNE, b_BNE, mask_BN, positives_NN=next_NN)
    weights_BN = torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    torch.testing.assert_close(
        actual, losses.within_sample_nce(a_BNE, b_BNE, mask_BN, weights_BN, next_NN)
    )


WITH_MASK: dict[str, Loss] = {
    "nce": lambda a, b, mask: losses.within_sample_nce(a, b, mask, mask * 0.5),
    "nce by distance": lambda a, b, mask: losses.within_sample_nce(
        a, b, mask, positives_NN=losses.grid_positives(1, mask.shape[1], threshold=0.2)
    ),
    "alignment": losses.local_alignment,
    "uniformity": lambda a, b, mask: (
        losses.local_uniformity(a, mask) + losses.local_uniformity(b, mask)
    ),
}


@pytest.mark.parametrize("garbage", [1e4, torch.inf, torch.nan])
@pytest.mark.parametrize("name", [name for name in WITH_MASK if name != "nce by distance"])
def test_padding_does_not_change_the_loss(name: str, garbage: float) -> None:
    """In MGCA's released code padding words are candidates, and the loss grows with the longest
    text of a batch.
    """
    a_BNE, b_BNE, mask_BN = items(LENGTHS)
    expected = WITH_MASK[name](a_BNE, b_BNE, mask_BN)
    longer_BN = F.pad(mask_BN, (0, 5))
    leaves = [
        F.pad(x, (0, 0, 0, 5)).masked_fill(~longer_BN[:, :, None], garbage) for x in (a_BNE, b_BNE)
    ]
    for leaf in leaves:
        leaf.requires_grad_()
    actual = WITH_MASK[name](*leaves, longer_BN)
    torch.testing.assert_close(actual, expected)
    actual.backward()
    for leaf in leaves:
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()
        assert not leaf.grad[~longer_BN].any()


@pytest.mark.parametrize("name", WITH_MASK)
def test_masks_may_have_gaps_and_samples_no_item(name: str) -> None:
    """The mean is over samples with items, or with pairs of them."""
    a_BNE, b_BNE, _ = items([5, 5, 5])
    mask_BN = torch.tensor([[True, False, True, True, False], [False] * 5, [True] * 5])
    loss = WITH_MASK[name] if name != "nce by distance" else WITH_MASK["nce"]
    each = [
        loss(
            a_BNE[i : i + 1, mask_BN[i]],
            b_BNE[i : i + 1, mask_BN[i]],
            mask_BN[i : i + 1, mask_BN[i]],
        )
        for i in (0, 2)
    ]
    leaves = [tensor.clone().requires_grad_() for tensor in (a_BNE, b_BNE)]
    actual = loss(*leaves, mask_BN)
    torch.testing.assert_close(actual, torch.stack(each).mean())
    actual.backward()
    for leaf in leaves:
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()
        assert not leaf.grad[1].any()


@pytest.mark.parametrize("name", WITH_MASK)
@pytest.mark.parametrize(
    "shape", [(2, 3), (0, 3), (2, 0)], ids=["padding", "no sample", "no place"]
)
def test_loss_without_items_is_zero(name: str, shape: tuple[int, int]) -> None:
    if name == "nce by distance" and not shape[1]:
        return
    mask_BN = torch.zeros(shape, dtype=torch.bool)
    check_zero_with_gradient(
        lambda a, b: WITH_MASK[name](a, b, mask_BN), torch.ones(*shape, 4), torch.ones(*shape, 4)
    )


@pytest.mark.parametrize("name", WITH_MASK)
def test_losses_are_computed_in_float32(name: str) -> None:
    a_BNE, b_BNE, mask_BN = items(LENGTHS)
    check_precision(lambda a, b: WITH_MASK[name](a, b, mask_BN), a_BNE, b_BNE)


def test_alignment_equals_its_formula() -> None:
    a_BNE, b_BNE, mask_BN = items(LENGTHS)
    compare(
        lambda a, b: losses.local_alignment(a, b, mask_BN),
        lambda a, b: naive_alignment(a, b, LENGTHS),
        [a_BNE, b_BNE],
    )
    assert losses.local_alignment(a_BNE, 3 * a_BNE).item() == pytest.approx(0.0, abs=1e-6)
    assert losses.local_alignment(a_BNE, -a_BNE).item() == pytest.approx(4.0)
    chosen_BN = torch.eye(4, 6)  # weights that leave one item
    actual = losses.local_alignment(a_BNE, b_BNE, None, chosen_BN)
    torch.testing.assert_close(
        actual,
        naive_alignment(
            a_BNE[chosen_BN.bool()][:, None], b_BNE[chosen_BN.bool()][:, None], [1] * 4
        ),
    )


@pytest.mark.parametrize("t", [2.0, 0.5])
def test_uniformity_equals_its_formula(t: float) -> None:
    z_BNE, _, mask_BN = items(LENGTHS)
    compare(
        lambda z: losses.local_uniformity(z, mask_BN, t),
        lambda z: naive_uniformity(z, LENGTHS, t) + 0 * z.sum(),
        [z_BNE],
    )
    torch.testing.assert_close(
        losses.local_uniformity(z_BNE, mask_BN), losses.local_uniformity(z_BNE, mask_BN, 2.0)
    )


def test_uniformity_is_zero_for_equal_items_and_lower_for_spread_ones() -> None:
    """With a finite gradient also where items coincide."""
    equal_BNE = torch.ones(2, 4, 3, requires_grad=True)
    value = losses.local_uniformity(equal_BNE)
    assert value.item() == pytest.approx(0.0, abs=1e-6)
    value.backward()
    assert equal_BNE.grad is not None
    assert equal_BNE.grad.isfinite().all()
    opposite_BNE = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])
    assert losses.local_uniformity(opposite_BNE).item() == pytest.approx(-8.0)


@pytest.mark.parametrize(("height", "width"), [(7, 7), (3, 5), (1, 4)])
@pytest.mark.parametrize(("threshold", "smoothing"), [(0.5, 1.0), (0.3, 0.0), (2.0, 4.0)])
def test_grid_positives_equal_the_rule_of_lovt(
    height: int, width: int, threshold: float, smoothing: float
) -> None:
    actual = losses.grid_positives(height, width, threshold, smoothing)
    cells = [(row, column) for row in range(height) for column in range(width)]
    for i, (row, column) in enumerate(cells):
        shares = []
        for other_row, other_column in cells:
            distance = math.hypot(row - other_row, column - other_column) / math.hypot(
                height, width
            )
            shares.append(math.exp(-smoothing * distance) if distance <= threshold else 0.0)
        expected = torch.tensor(shares) / sum(shares)
        torch.testing.assert_close(actual[i], expected)


def test_grid_positives_have_the_published_defaults() -> None:
    torch.testing.assert_close(
        losses.grid_positives(7, 7), losses.grid_positives(7, 7, 0.5, 1.0), rtol=0, atol=0
    )
    assert torch.equal(losses.grid_positives(4, 3, threshold=0.0), torch.eye(12))


def test_losses_refuse_other_shapes() -> None:
    a_BNE, b_BNE, mask_BN = items([2, 3])
    for loss in (losses.within_sample_nce, losses.local_alignment):
        with pytest.raises(ValueError, match="one shape"):
            loss(a_BNE, b_BNE[:, :2])
        with pytest.raises(ValueError, match="mask_BN"):
            loss(a_BNE, b_BNE, mask_BN[:, :2])
        with pytest.raises(ValueError, match="weights_BN"):
            loss(a_BNE, b_BNE, mask_BN, torch.ones(2))
    with pytest.raises(ValueError, match="positives_NN"):
        losses.within_sample_nce(a_BNE, b_BNE, positives_NN=torch.eye(4))
    with pytest.raises(ValueError, match="temperature"):
        losses.within_sample_nce(a_BNE, b_BNE, temperature=0.0)
    with pytest.raises(ValueError, match="above 0"):
        losses.local_uniformity(a_BNE, t=0.0)
    with pytest.raises(ValueError, match="grid"):
        losses.grid_positives(0, 4)


def test_the_symmetric_loss_is_the_mean_of_both_directions() -> None:
    a_BNE, b_BNE, mask_BN = items(LENGTHS)
    weights_BN = torch.rand(mask_BN.shape, generator=torch.Generator().manual_seed(1))
    options = (mask_BN, weights_BN, None, 0.1)
    both = losses.within_sample_nce(a_BNE, b_BNE, *options, symmetric=True)
    directions = losses.within_sample_nce(a_BNE, b_BNE, *options) + losses.within_sample_nce(
        b_BNE, a_BNE, *options
    )
    torch.testing.assert_close(both, directions / 2)
