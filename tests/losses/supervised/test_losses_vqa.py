"""Losses of answers against their formulas."""

import math

import pytest
import torch
from helpers.loss_checks import check_precision, check_zero_with_gradient, compare
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
    return 2 * torch.randn(batch, size, generator=generator), torch.rand(
        batch, size, generator=generator
    )


@pytest.mark.parametrize(("batch", "size"), [(1, 2), (5, 3), (8, 30)])
def test_vqa_bce_is_binary_cross_entropy_summed_over_answers(batch: int, size: int) -> None:
    logits_BV, target_BV = random_case(batch, size)
    compare(lambda x: losses.vqa_bce(x, target_BV), lambda x: naive(x, target_BV), [logits_BV])


def test_vqa_bce_of_zero_logits_is_ln_2_per_answer() -> None:
    assert losses.vqa_bce(torch.zeros(4, 450), torch.zeros(4, 450)).item() == pytest.approx(
        450 * math.log(2), rel=1e-5
    )


def test_vqa_bce_computes_in_float32_and_is_zero_without_questions() -> None:
    logits_BV, target_BV = random_case(4, 6)
    check_precision(lambda x: losses.vqa_bce(x, target_BV), logits_BV)
    check_zero_with_gradient(lambda x: losses.vqa_bce(x, torch.zeros(0, 6)), torch.zeros(0, 6))
    assert losses.vqa_bce(torch.full((1, 2), 1e4), torch.tensor([[1.0, 0.0]])).isfinite()


def test_vqa_bce_rejects_unequal_shapes() -> None:
    with pytest.raises(ValueError, match=r"one shape \(B, V\), got \(2, 3\) and \(2, 4\)"):
        losses.vqa_bce(torch.zeros(2, 3), torch.zeros(2, 4))


# Word by word


def naive_words(logits_NV: Tensor, ids_N: Tensor, weight_N: Tensor, questions: int) -> Tensor:
    total = logits_NV.new_zeros(())
    for logits_V, word, weight in zip(
        logits_NV, ids_N.tolist(), weight_N.to(logits_NV.dtype), strict=True
    ):
        total = total - weight * torch.log(torch.exp(logits_V[word]) / torch.exp(logits_V).sum())
    return total / questions


def words_case(words: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    logits_NV, weight_NV = random_case(words, size)
    return logits_NV, torch.arange(words) * 7 % size, weight_NV[:, 0]


@pytest.mark.parametrize(("words", "size", "questions"), [(1, 2, 1), (9, 5, 4), (3, 40, 6)])
def test_answer_words_are_weighted_and_averaged_over_questions(
    words: int, size: int, questions: int
) -> None:
    logits_NV, ids_N, weight_N = words_case(words, size)
    compare(
        lambda x: losses.answer_words(x, ids_N, weight_N, questions),
        lambda x: naive_words(x, ids_N, weight_N, questions),
        [logits_NV],
    )


def test_answer_words_learn_the_teachers_distribution_by_its_share() -> None:
    logits_NV, ids_N, weight_N = words_case(9, 5)
    teacher_NV = random_case(9, 5)[0].flip(0).requires_grad_()

    def naive_distilled(x: Tensor) -> Tensor:
        target_NV = teacher_NV.detach().to(x.dtype).softmax(dim=1)
        soft_N = -(target_NV * x.log_softmax(dim=1)).sum(dim=1)
        return (
            0.7 * naive_words(x, ids_N, weight_N, 4)
            + 0.3 * (soft_N * weight_N.to(x.dtype)).sum() / 4
        )

    compare(
        lambda x: losses.answer_words(x, ids_N, weight_N, 4, teacher_NV, 0.3),
        naive_distilled,
        [logits_NV],
    )
    losses.answer_words(logits_NV.requires_grad_(), ids_N, weight_N, 4, teacher_NV, 0.3).backward()
    assert teacher_NV.grad is None
    with pytest.raises(ValueError, match="alpha"):
        losses.answer_words(logits_NV, ids_N, weight_N, 4, teacher_NV, 1.5)
    with pytest.raises(ValueError, match="of one shape"):
        losses.answer_words(logits_NV, ids_N, weight_N, 4, teacher_NV[:, :3], 0.3)


def test_answer_words_start_at_ln_v_and_are_zero_without_words() -> None:
    _, ids_N, _ = words_case(6, 300)
    start = losses.answer_words(torch.zeros(6, 300), ids_N, torch.ones(6), 2)
    assert start.item() == pytest.approx(3 * math.log(300), rel=1e-5)
    nothing = torch.zeros(0, dtype=torch.int64)
    check_zero_with_gradient(
        lambda x: losses.answer_words(x, nothing, torch.zeros(0), 3), torch.zeros(0, 300)
    )


def test_answer_words_compute_in_float32() -> None:
    logits_NV, ids_N, weight_N = words_case(5, 8)
    check_precision(lambda x: losses.answer_words(x, ids_N, weight_N, 2), logits_NV)


def test_answer_words_reject_unequal_lengths() -> None:
    with pytest.raises(
        ValueError, match=r"logits \(N, V\) and ids \(N,\), got \(2, 3\) and \(3,\)"
    ):
        losses.answer_words(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64), torch.ones(3), 1)
    with pytest.raises(ValueError, match="each word needs a weight: 2 words and 3 weights"):
        losses.answer_words(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), torch.ones(3), 1)


def naive_choice(score_BO: Tensor, target_BO: Tensor) -> Tensor:
    entropies = []
    for score_O, target_O in zip(score_BO, target_BO, strict=True):
        options = [n for n, target in enumerate(target_O) if not target.isnan()]
        right = [n for n in options if target_O[n] == 1]
        if right:
            chance = sum(score_O[n].exp() for n in right) / sum(score_O[n].exp() for n in options)
            entropies.append(-torch.log(torch.as_tensor(chance)))
    return torch.stack(entropies).mean()


def test_option_choice_is_cross_entropy_over_the_options_of_each_question() -> None:
    nan = torch.nan
    target_BO = torch.tensor(
        [[0, 1, 0, 0], [1, 0, nan, nan], [0, 0, 0, nan], [nan] * 4, [1, 0, 1, nan]]
    )
    score_BO = 2 * torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    compare(
        lambda x: losses.option_choice(x, target_BO),
        lambda x: naive_choice(x, target_BO),
        [score_BO],
    )
    whole, counted = (losses.option_choice(score_BO, target_BO, count)
                      for count in (None, torch.tensor(1.5)))  # fmt: skip
    torch.testing.assert_close(counted, 2 * whole)  # of three questions with a right option
    check_precision(lambda x: losses.option_choice(x, target_BO), score_BO)
    check_zero_with_gradient(lambda x: losses.option_choice(x, target_BO[2:4]), score_BO[2:4])
    check_zero_with_gradient(lambda x: losses.option_choice(x, x[:, :0]), torch.zeros(0, 0))
    assert losses.option_choice(torch.zeros(2, 4), target_BO[:1].expand(2, 4)).item() == (
        pytest.approx(math.log(4))
    )
    with pytest.raises(ValueError, match=r"one shape \(B, O\), got \(2, 3\) and \(2, 4\)"):
        losses.option_choice(torch.zeros(2, 3), torch.zeros(2, 4))
