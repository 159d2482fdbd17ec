"""Contrastive loss with a momentum queue against ALBEF's formula in plain loops, and against
CLIP.
"""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers.loss_checks import check_one_number, check_precision, check_zero_with_gradient, compare
from torch import Tensor

from medvl import losses
from medvl.losses.pairs.image_text import MomentumQueue, clamp_temperature_, ramped_alpha

DIM = 16


def units(rows: int, seed: int = 0, dim: int = DIM) -> Tensor:
    return F.normalize(
        torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)), dim=-1
    )


def example(batch: int, held: int) -> list[Tensor]:
    return [units(batch), units(batch, 1), units(batch + held, 2), units(batch + held, 3)]


def naive_itc(
    image_BE: Tensor,
    text_BE: Tensor,
    image_NE: Tensor,
    text_NE: Tensor,
    temperature: Tensor,
    alpha: float,
    positive: list[set[int]],
) -> Tensor:
    """Section 3.2 and equation 6 of arXiv 2107.07651, a row and a key at a time; teacher targets
    are numbers.
    """
    total = image_BE.new_zeros(())
    for query_BE, own_NE, other_NE in ((image_BE, image_NE, text_NE), (text_BE, text_NE, image_NE)):
        for i in range(len(query_BE)):
            student = torch.stack([query_BE[i] @ key_E / temperature for key_E in other_NE])
            teacher = torch.stack([own_NE[i] @ key_E / temperature for key_E in other_NE]).detach()
            for j in range(len(other_NE)):
                hard = 1 / len(positive[i]) if j in positive[i] else 0.0
                target = (
                    alpha * torch.exp(teacher[j]) / torch.exp(teacher).sum() + (1 - alpha) * hard
                )
                total = (
                    total - target * torch.log(torch.exp(student[j]) / torch.exp(student).sum()) / 2
                )
    return total / len(image_BE)


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(("batch", "held"), [(1, 0), (1, 5), (4, 0), (4, 9)])
def test_itc_equals_the_paper(batch: int, held: int, alpha: float) -> None:
    own = [{i} for i in range(batch)]
    compare(
        lambda i, t, ki, kt, temperature: losses.itc(i, t, ki, kt, temperature, alpha),
        lambda i, t, ki, kt, temperature: naive_itc(i, t, ki, kt, temperature, alpha, own),
        [*example(batch, held), torch.tensor(0.2)],
    )


def test_positives_share_the_target() -> None:
    positive = [{0, 2, 6}, {1}, {0, 2}]
    positive_BN = torch.tensor([[j in row for j in range(8)] for row in positive])
    for given in (
        positive_BN,
        positive_BN & ~torch.eye(3, 8, dtype=torch.bool),
    ):  # a row's own key is always one
        compare(
            lambda i, t, ki, kt, given=given: losses.itc(i, t, ki, kt, 0.1, 0.4, given),
            lambda i, t, ki, kt: naive_itc(i, t, ki, kt, torch.tensor(0.1), 0.4, positive),
            example(3, 5),
        )


@pytest.mark.parametrize("positive", [[{0}, {1}, {2}], [{0, 2, 6}, {1}, {0, 2}]])
def test_unimodal_contrast_equals_its_formula(positive: list[set[int]]) -> None:
    """MUMC: images against images and texts against texts, one-hot targets, both halved."""

    def naive(
        image_BE: Tensor, text_BE: Tensor, image_NE: Tensor, text_NE: Tensor, temperature: Tensor
    ) -> Tensor:
        total = image_BE.new_zeros(())
        for query_BE, keys_NE in ((image_BE, image_NE), (text_BE, text_NE)):
            for query_E, wanted in zip(query_BE, positive, strict=True):
                student = torch.stack([query_E @ key_E / temperature for key_E in keys_NE])
                for j in wanted:
                    total = (
                        total
                        - torch.log(torch.exp(student[j]) / torch.exp(student).sum())
                        / len(wanted)
                        / 2
                    )
        return total / len(image_BE)

    positive_BN = torch.tensor([[j in row for j in range(8)] for row in positive])
    compare(
        lambda i, t, ki, kt, temperature: losses.unimodal_itc(
            i, t, ki, kt, temperature, positive_BN
        ),
        naive,
        [*example(3, 5), torch.tensor(0.2)],
    )


@pytest.mark.parametrize("batch", [1, 2, 7, 32])
def test_itc_without_teacher_and_queue_equals_clip(batch: int) -> None:
    """In value, and in gradient if the batch's own embeddings are the keys."""
    queue = MomentumQueue(64, DIM)

    def ours(image_BE: Tensor, text_BE: Tensor) -> Tensor:
        keys = queue.keys(image_BE, text_BE, torch.arange(batch))
        return losses.itc(
            image_BE, text_BE, keys.image_NE, keys.text_NE, 0.07, 0.0, keys.positive_BN
        )

    def clip(image_BE: Tensor, text_BE: Tensor) -> Tensor:
        return losses.clip(image_BE, text_BE, 1 / 0.07).double()

    compare(ours, clip, [units(batch), units(batch, 1)])


@pytest.mark.parametrize(("batch", "held"), [(32, 0), (32, 480), (8, 2040)])
def test_itc_of_random_embeddings_is_near_ln_n(batch: int, held: int) -> None:
    tensors = [
        units(rows, seed, 1024)
        for seed, rows in enumerate((batch, batch, batch + held, batch + held))
    ]
    assert losses.itc(*tensors, temperature=1.0).item() == pytest.approx(
        math.log(batch + held), rel=0.01
    )
    assert losses.itc(*tensors, temperature=1.0, alpha=0).item() == pytest.approx(
        math.log(batch + held), rel=0.01
    )


def test_no_gradient_reaches_the_teacher() -> None:
    """Targets are constants: keys get the gradient of the student's logits only."""
    image_BE, text_BE, image_NE, text_NE = example(3, 2)
    keys = image_NE.requires_grad_()
    losses.itc(image_BE, text_BE, keys, text_NE, 0.1, alpha=1.0).backward()
    target_BN = (text_NE[:3] @ image_NE.detach().T / 0.1).softmax(1)
    logits_BN = text_BE @ image_NE.detach().T / 0.1
    expected_NE = ((logits_BN.softmax(1) - target_BN) / 6 / 0.1).T @ text_BE
    torch.testing.assert_close(keys.grad, expected_NE, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.001, 0.5])
def test_itc_is_finite_at_both_ends_of_the_temperature(temperature: float) -> None:
    image_BE, *rest = example(8, 8)
    image_BE.requires_grad_()
    value = losses.itc(image_BE, *rest, temperature=torch.tensor(temperature))
    value.backward()
    assert torch.isfinite(value)
    assert image_BE.grad is not None
    assert torch.isfinite(image_BE.grad).all()


def test_itc_without_pairs_is_zero() -> None:
    check_zero_with_gradient(
        lambda i, t: losses.itc(i, t, units(5), units(5), 0.07), units(0), units(0)
    )


def test_itc_ignores_autocast() -> None:
    check_precision(lambda *tensors: losses.itc(*tensors, temperature=0.07), *example(8, 16))


def test_the_temperature_is_one_number() -> None:
    check_one_number(lambda temperature: losses.itc(*example(3, 2), temperature), 0.07)


def test_clamped_temperature_keeps_its_gradient() -> None:
    for start, expected in ((0.9, 0.5), (-0.2, 0.001), (0.07, 0.07)):
        temperature = torch.nn.Parameter(torch.tensor(start))
        clamp_temperature_(temperature)
        assert temperature.item() == pytest.approx(expected)
        losses.itc(*example(4, 4), temperature=temperature).backward()
        assert temperature.grad is not None
        assert temperature.grad.abs() > 0


def test_alpha_grows_linearly_over_the_ramp() -> None:
    assert [ramped_alpha(step, 4) for step in (0, 1, 2, 4, 9)] == pytest.approx(
        [0, 0.1, 0.2, 0.4, 0.4]
    )
    assert ramped_alpha(0, 0, 0.3) == 0.3


@pytest.mark.parametrize("size", [0, 1, 5, 8, 64])
@pytest.mark.parametrize("batches", [[1, 2, 3], [4, 4, 4, 4], [8], [9, 30, 1], [0, 3, 0]])
def test_the_queue_holds_the_latest_pairs(size: int, batches: list[int]) -> None:
    queue = MomentumQueue(size, DIM)
    history: list[int] = []
    for number, batch in enumerate(batches):
        names_B = torch.arange(batch) + 100 * number
        queue.enqueue(names_B[:, None].expand(-1, DIM), -names_B[:, None].expand(-1, DIM), names_B)
        history += names_B.tolist()
        assert len(queue) == min(len(history), size)
    keys = queue.keys(units(2), units(2, 1), torch.tensor([-1, -2]))
    held = keys.image_NE[2:, 0].long().tolist()
    assert sorted(held) == sorted(history[max(len(history) - size, 0) :])
    assert torch.equal(keys.text_NE[2:], -keys.image_NE[2:])
    assert torch.equal(keys.image_NE[:2], units(2))


def test_keys_start_with_the_batch_and_positives_have_equal_names() -> None:
    queue = MomentumQueue(8, DIM)
    queue.enqueue(units(3), units(3, 1), torch.tensor([7, 8, 9]))
    keys = queue.keys(units(2, 2), units(2, 3), torch.tensor([8, 5]))
    assert keys.positive_BN.int().tolist() == [[1, 0, 0, 1, 0], [0, 1, 0, 0, 0]]
    torch.testing.assert_close(keys.text_NE, torch.cat([units(2, 3), units(3, 1)]))


def test_enqueue_does_not_change_keys_before_the_backward_pass() -> None:
    queue = MomentumQueue(4, DIM)
    queue.enqueue(units(4), units(4, 1), torch.arange(4))
    image_BE = units(2, 2).requires_grad_()
    keys = queue.keys(units(2, 3), units(2, 4), torch.tensor([10, 11]))
    loss = losses.itc(image_BE, units(2, 5), keys.image_NE, keys.text_NE, 0.07)
    (expected,) = torch.autograd.grad(loss, image_BE, retain_graph=True)
    queue.enqueue(units(2, 6), units(2, 7), torch.tensor([10, 11]))
    torch.testing.assert_close(torch.autograd.grad(loss, image_BE)[0], expected, rtol=0, atol=0)


def test_the_queue_keeps_no_graph_and_is_part_of_the_state_dict() -> None:
    queue, copy = MomentumQueue(4, DIM), MomentumQueue(4, DIM)
    queue.enqueue(units(3).requires_grad_(), units(3, 1).bfloat16(), torch.arange(3))
    assert not any(buffer.requires_grad for buffer in queue.buffers())
    assert not list(queue.parameters())
    copy.load_state_dict(queue.state_dict())
    assert len(copy) == 3
    for queue_ in (queue, copy):
        queue_.enqueue(units(3, 2), units(3, 3), torch.arange(3))
    assert torch.equal(queue.image_QE, copy.image_QE)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: losses.itc(units(3), units(2), units(3), units(3), 0.1), "itc needs pairs"),
        (lambda: losses.itc(units(3), units(3), units(2), units(2), 0.1), "N of at least B"),
        (lambda: losses.itc(units(3), units(3), units(4), units(5), 0.1), "itc needs pairs"),
        (lambda: losses.itc(*example(3, 2), temperature=0), "temperature"),
        (lambda: losses.itc(*example(3, 2), temperature=0.1, alpha=1.5), "alpha must be within"),
        (
            lambda: losses.itc(*example(3, 2), 0.1, 0.4, torch.ones(3, 3).bool()),
            "positive_BN must be \\(3, 5\\)",
        ),
        (lambda: MomentumQueue(-1, 4), "expected a size of 0"),
        (
            lambda: MomentumQueue(4, 4).enqueue(units(2), units(3), torch.arange(2)),
            "do not form pairs",
        ),
    ],
)
def test_itc_rejects_invalid_arguments(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
