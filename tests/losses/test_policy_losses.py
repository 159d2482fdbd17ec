"""Losses of training by rewards: value and gradient against loops over tokens, under masks."""

import itertools
import math

import pytest
import torch
from helpers.loss_checks import check_precision, check_zero_with_gradient, compare
from torch import Tensor

from medvl import losses

TEXTS, TOKENS, WORDS = 4, 6, 7
LENGTHS = torch.tensor([6, 3, 1, 4])
MASK_BT = torch.arange(TOKENS) < LENGTHS[:, None]
SAMPLED_BT = torch.randint(
    WORDS, (TEXTS, TOKENS), generator=torch.Generator().manual_seed(3)
).masked_fill(~MASK_BT, -100)
REWARD_B = torch.tensor([0.9, 0.2, 0.5, 0.0])
BASELINE_B = torch.tensor([0.4, 0.6, 0.5, 0.3])


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def naive_self_critical(
    logits_BTV: Tensor, reward: list[float], baseline: list[float], entropy_weight: float
) -> Tensor:
    total = torch.zeros((), dtype=logits_BTV.dtype)
    for row in range(TEXTS):
        negative_log = total.new_zeros(())
        entropy = total.new_zeros(())
        for place in range(int(LENGTHS[row])):
            scores_V = logits_BTV[row, place]
            chance_V = scores_V.exp() / scores_V.exp().sum()
            negative_log = negative_log - chance_V[SAMPLED_BT[row, place]].log()
            entropy = entropy - (chance_V * chance_V.log()).sum() / LENGTHS[row]
        total = total + (reward[row] - baseline[row]) * negative_log - entropy_weight * entropy
    return total / TEXTS


@pytest.mark.parametrize("entropy_weight", [0.0, 0.05])
@pytest.mark.parametrize("baseline_B", [None, BASELINE_B])
def test_self_critical_is_its_formula(baseline_B: Tensor | None, entropy_weight: float) -> None:
    baseline = torch.zeros(TEXTS) if baseline_B is None else baseline_B
    compare(
        lambda x: losses.self_critical(
            x, SAMPLED_BT, MASK_BT, REWARD_B, baseline_B, entropy_weight
        ),
        lambda x: naive_self_critical(x, REWARD_B.tolist(), baseline.tolist(), entropy_weight),
        [numbers(TEXTS, TOKENS, WORDS)],
    )


def test_self_critical_over_words_that_cannot_be_written_is_finite() -> None:
    logits_BTV = numbers(TEXTS, TOKENS, WORDS).double()
    logits_BTV[:, :, 0] = -torch.inf
    logits_BTV[~MASK_BT] = torch.nan
    logits_BTV.requires_grad_()
    sampled_BT = SAMPLED_BT.clamp(min=1)
    loss = losses.self_critical(logits_BTV, sampled_BT, MASK_BT, REWARD_B, BASELINE_B, 0.1)
    loss.backward()
    assert loss.isfinite()
    assert logits_BTV.grad is not None
    assert logits_BTV.grad.isfinite().all()
    assert not logits_BTV.grad[~MASK_BT].any()
    assert not logits_BTV.grad[..., 0].any()
    # The same without the word: neither its column nor padding has an effect.
    others = losses.self_critical(
        logits_BTV.detach()[..., 1:].nan_to_num(),
        sampled_BT - 1,
        MASK_BT,
        REWARD_B,
        BASELINE_B,
        0.1,
    )
    torch.testing.assert_close(loss.detach(), others)


def test_its_expectation_is_the_gradient_of_the_expected_reward() -> None:
    """All texts of two words of a vocabulary of three, each weighted by its probability."""
    texts = list(itertools.product(range(3), repeat=2))
    reward_B = torch.rand(len(texts), generator=torch.Generator().manual_seed(1)).double()
    logits_TV = numbers(2, 3).double().requires_grad_()

    def chances(logits: Tensor) -> Tensor:
        log_TV = logits.log_softmax(1)
        return torch.stack([log_TV[0, a] + log_TV[1, b] for a, b in texts]).exp()

    expected = -(chances(logits_TV) * reward_B).sum()
    (gradient,) = torch.autograd.grad(expected, logits_TV)
    weight_B = chances(logits_TV).detach() * len(texts)  # the loss is a mean over texts
    sampled_BT = torch.tensor(texts)
    everywhere = torch.ones_like(sampled_BT, dtype=torch.bool)
    for baseline in (0.0, 0.7):  # any baseline leaves the expectation as it is
        loss = losses.self_critical(
            logits_TV.expand(len(texts), -1, -1),
            sampled_BT,
            everywhere,
            weight_B * (reward_B - baseline),
        )
        (ours,) = torch.autograd.grad(loss, logits_TV)
        torch.testing.assert_close(ours, gradient)


def test_entropy_is_kept_high() -> None:
    logits_BTV = numbers(TEXTS, TOKENS, WORDS).requires_grad_()
    zero_B = torch.zeros(TEXTS)
    before = losses.self_critical(logits_BTV, SAMPLED_BT, MASK_BT, zero_B, None, 1.0)
    (gradient,) = torch.autograd.grad(before, logits_BTV)
    after_BTV = logits_BTV - 2.0 * gradient
    after = losses.self_critical(after_BTV, SAMPLED_BT, MASK_BT, zero_B, None, 1.0)
    assert (
        -math.log(WORDS) <= float(after.detach()) < float(before.detach()) < 0
    )  # minus the mean entropy


def test_group_advantages_standardise_each_reward_among_the_texts_of_an_image() -> None:
    reward_RN = torch.tensor([[1.0, 2.0, 3.0, 0.1, 0.1, 0.1], [0.0, 0.0, 1.0, 0.5, 0.0, 0.25]])
    weights = [0.3, 2.0]
    expected = []
    for start in (0, 3):
        for place in range(3):
            total = 0.0
            for weight, row in zip(weights, reward_RN.tolist(), strict=True):
                own = row[start : start + 3]
                mean = sum(own) / 3
                spread = math.sqrt(sum((x - mean) ** 2 for x in own) / 2)
                total += weight * (own[place] - mean) / (spread + 1e-4)
            expected.append(total)
    advantage_N = losses.group_advantages(reward_RN, torch.tensor(weights), group=3)
    torch.testing.assert_close(advantage_N, torch.tensor(expected))
    alone_N = losses.group_advantages(reward_RN[:1], [1.0], group=3)
    assert alone_N[3:].tolist() == [0.0, 0.0, 0.0]


def naive_grpo(
    logp_NT: Tensor, old_NT: Tensor, advantage: list[float], reference_NT: Tensor | None
) -> Tensor:
    total = logp_NT.new_zeros(())
    for row in range(TEXTS):
        for place in range(int(LENGTHS[row])):
            ratio = torch.exp(logp_NT[row, place] - old_NT[row, place])
            clipped = ratio.clamp(0.8, 1.2)
            total = total - min(ratio * advantage[row], clipped * advantage[row])
            if reference_NT is not None:
                change = reference_NT[row, place] - logp_NT[row, place]
                total = total + 0.04 * (torch.exp(change) - change - 1)
    return total / int(LENGTHS.sum())


@pytest.mark.parametrize("with_reference", [False, True])
def test_grpo_is_its_formula(with_reference: bool) -> None:
    logp_NT = -numbers(TEXTS, TOKENS).abs()
    old_NT = logp_NT + 0.3 * numbers(TEXTS, TOKENS, seed=1)
    reference_NT = logp_NT + 0.5 * numbers(TEXTS, TOKENS, seed=2) if with_reference else None
    advantage_N = torch.tensor([1.5, -0.7, 0.2, -1.0])
    reference = None if reference_NT is None else reference_NT.double()
    compare(
        lambda x: losses.grpo(x, old_NT, MASK_BT, advantage_N, reference_NT=reference_NT),
        lambda x: naive_grpo(x, old_NT.double(), advantage_N.tolist(), reference),
        [logp_NT],
    )


def test_the_first_update_of_grpo_has_the_gradient_of_the_policy() -> None:
    logp_NT = -numbers(TEXTS, TOKENS).abs().requires_grad_()
    advantage_N = torch.tensor([1.5, -0.7, 0.2, -1.0])
    losses.grpo(logp_NT, logp_NT.detach(), MASK_BT, advantage_N).backward()
    expected = (-advantage_N[:, None] / LENGTHS.sum()).masked_fill(~MASK_BT, 0.0)
    leaf = numbers(TEXTS, TOKENS).requires_grad_()
    losses.grpo(-leaf.abs(), -leaf.detach().abs(), MASK_BT, advantage_N).backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, expected * -leaf.detach().sign())


def test_padding_has_no_effect_and_no_gradient() -> None:
    logp_NT = (-numbers(TEXTS, TOKENS).abs()).masked_fill(~MASK_BT, torch.nan).requires_grad_()
    old_NT = logp_NT.detach() + 0.1
    advantage_N = torch.tensor([1.5, -0.7, 0.2, -1.0])
    loss = losses.grpo(logp_NT, old_NT, MASK_BT, advantage_N, reference_NT=old_NT)
    loss.backward()
    assert loss.isfinite()
    assert logp_NT.grad is not None
    assert logp_NT.grad.isfinite().all()
    assert not logp_NT.grad[~MASK_BT].any()
    nothing = torch.zeros_like(MASK_BT)
    check_zero_with_gradient(
        lambda x: losses.grpo(x, -numbers(TEXTS, TOKENS).abs(), nothing, advantage_N),
        -numbers(TEXTS, TOKENS, seed=1).abs(),
    )
    check_zero_with_gradient(
        lambda x: losses.self_critical(x, SAMPLED_BT, nothing, REWARD_B, BASELINE_B, 0.05),
        numbers(TEXTS, TOKENS, WORDS),
    )


def test_policy_losses_compute_in_float32() -> None:
    check_precision(
        lambda x: losses.self_critical(x, SAMPLED_BT, MASK_BT, REWARD_B, BASELINE_B, 0.05),
        numbers(TEXTS, TOKENS, WORDS),
    )
    check_precision(
        lambda x: losses.grpo(
            x, torch.zeros(TEXTS, TOKENS), MASK_BT, REWARD_B, reference_NT=numbers(TEXTS, TOKENS)
        ),
        -numbers(TEXTS, TOKENS).abs(),
    )


def test_other_shapes_are_refused() -> None:
    logits_BTV = numbers(TEXTS, TOKENS, WORDS)
    logp_NT = numbers(TEXTS, TOKENS)
    with pytest.raises(ValueError, match="logits"):
        losses.self_critical(logits_BTV[:, 1:], SAMPLED_BT, MASK_BT, REWARD_B)
    with pytest.raises(ValueError, match="reward_B"):
        losses.self_critical(logits_BTV, SAMPLED_BT, MASK_BT, REWARD_B[:, None])
    with pytest.raises(ValueError, match="advantages"):
        losses.grpo(logp_NT, logp_NT, MASK_BT, REWARD_B[:2])
    with pytest.raises(ValueError, match="groups of 4"):
        losses.group_advantages(torch.zeros(1, 6), [1.0], group=4)
    with pytest.raises(ValueError, match="weights"):
        losses.group_advantages(torch.zeros(2, 6), [1.0], group=3)
