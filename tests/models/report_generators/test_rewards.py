"""Training on rewards: rewards of adversarial pairs, sampling, the loss of the policy, and steps that
do not depend on the batch, the number of micro-batches, or an interruption.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.errors import raises
from helpers.fusion_samples import TEXTS, flags, make_batch, shaken
from helpers.train_fakes import optim, step_of
from torch import Tensor

import medvl
from medvl.data.tokenizer.tokenizer import Tokenizer, train_words
from medvl.errors import ConfigError
from medvl.models import CXRMate, R2Gen, RewardConfig, factory
from medvl.models.report_generators.base import ReportGenerator
from medvl.models.report_generators.parts import text_rewards as rewards_of_texts
from medvl.models.report_generators.parts.rewards import policy, sample_texts, uniform_numbers
from medvl.models.report_generators.parts.text_rewards import (
    SentenceReward,
    open_reward,
    text_rewards,
)
from medvl.models.text_decoding import Decoding
from medvl.schema import Batch, TextFeatures

REFERENCE = "Small left pleural effusion. No pneumothorax. The heart is normal."
NORMAL = "No acute findings. The lungs are clear."
ADVERSARIAL = {
    # text: findings, n-grams above 0.5, novelty 1
    REFERENCE: (1.0, True, True),
    "Left pleural effusion. The heart is enlarged.": (2 / 3, False, True),
    "No left pleural effusion. No pneumothorax. The heart is normal.": (0.0, True, True),
    "Small right pleural effusion. No pneumothorax. The heart is normal.": (0.0, True, True),
    "Small left pleural effusion. Pneumothorax. The heart is normal.": (2 / 3, True, True),
    "Possible left pleural effusion. No pneumothorax. The heart is normal.": (0.0, True, True),
    " ".join([REFERENCE] * 4): (1.0, False, False),
    "Left pleural effusion. " * 8: (1.0, False, False),
    "Bilateral pleural effusion.": (0.0, False, True),
    "Edema. Pneumonia. Fracture. Left pleural effusion.": (0.4, False, True),
    NORMAL: (0.0, False, True),
    "heart the normal pneumothorax no is effusion left small": (None, False, True),
}
TINY: dict[str, Any] = {
    "image_encoder": "timm:test_vit",
    "image_arguments": {"depth": 1},
    "image_size": 64,
    "width": 16,
    "layers": 1,
    "heads": 2,
    "intermediate": 24,
    "max_tokens": 16,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_words(TEXTS, min_frequency=1)


def reward(name: str) -> Callable[[str, str], float]:
    return open_reward(name, "minilm")


def generator(
    tokenizer: Tokenizer, name: str = "cxrmate", rewards: RewardConfig | None = None, **more: Any
) -> ReportGenerator:
    torch.manual_seed(0)
    if name == "r2gen":
        more = {"memory_heads": 2, **more}
    if rewards is None:
        rewards = RewardConfig(samples=2)
    model = medvl.create_model(name, tokenizer=tokenizer, rewards=rewards, **TINY, **more)
    assert isinstance(model, CXRMate | R2Gen)
    return shaken(model).train()


def study(tokenizer: Tokenizer, size: int = 4, **fields: Any) -> Batch:
    batch = make_batch(tokenizer, size)
    sections = {"second_ids_BT": batch.ids_BT.flip(0), "second_mask_BT": batch.mask_BT.flip(0)}
    return dataclasses.replace(batch, **sections, **fields)


@pytest.mark.parametrize(("text", "expected"), ADVERSARIAL.items())
def test_rewards_of_adversarial_texts(text: str, expected: tuple[float, bool, bool]) -> None:
    findings, overlaps, is_new = expected
    if findings is not None:
        assert reward("findings")(text, REFERENCE) == pytest.approx(findings)
    assert (reward("ngrams")(text, REFERENCE) > 0.5) == overlaps
    assert (reward("novelty")(text, REFERENCE) == 1) == is_new
    assert reward("length")(REFERENCE, REFERENCE) == 1


def test_normal_reports_and_texts_without_an_end() -> None:
    assert reward("findings")(NORMAL, "The lungs are clear.") == 1
    assert reward("findings")("Edema.", NORMAL) == 0
    reward_RN = text_rewards(["findings", "ngrams"], ["", NORMAL, NORMAL], [NORMAL] * 3,
                             [True, False, True])  # fmt: skip
    assert reward_RN.tolist() == [[0, 0, 1], [0, 0, 1]]


class CountsOfWords(torch.nn.Module):
    """A text encoder whose vector of a text is the count of each word."""

    def forward(self, ids_BT: Tensor, mask_BT: Tensor) -> TextFeatures:
        counts_BV = torch.nn.functional.one_hot(ids_BT, 60).float()
        counts_BV[:, :, 0] = 0  # both ends of a text
        return TextFeatures(counts_BV.sum(dim=1), counts_BV, mask_BT)


def test_sentences_are_compared_both_ways(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    monkeypatch.setattr(factory, "preset_tokenizer", lambda name, longest: tokenizer)
    monkeypatch.setattr(
        rewards_of_texts, "create_text_encoder", lambda name, pretrained: CountsOfWords()
    )
    compare = SentenceReward("a")
    known = [word for word in tokenizer.vocabulary if word.isalpha()][:4]
    one, two = f"{known[0]} {known[1]}.", f"{known[2]} {known[3]}."
    both = f"{one} {two}"
    assert compare(both, both) == pytest.approx(1)
    assert compare(f"{two} {one}", both) == pytest.approx(1)  # the order does not count
    stop = (1 / 3) / 1  # the full stop is a word of both
    expected = (1 + (1 + stop) / 2) / 2
    assert compare(one, both) == pytest.approx(expected)
    assert compare(both, one) == pytest.approx(expected)
    assert compare(f"{one} {one}", one) == pytest.approx(1)
    assert compare("", "") == 1
    assert compare(one, "") == 0


class Fixed:
    """A `NextToken` whose words have the same scores everywhere."""

    def __init__(self, logits_V: Tensor, samples: int) -> None:
        self.logits_BV = logits_V.expand(samples, -1)

    def first(self) -> Tensor:
        return self.logits_BV

    def next(self, ids_R: Tensor, parent_R: Tensor) -> Tensor:
        return self.logits_BV[:1].expand(len(ids_R), -1)


def test_texts_follow_the_distribution() -> None:
    logits_V = torch.tensor([0.5, 1.0, -0.3, 5.0, 0.0])
    uniform_NT = torch.linspace(0, 1, 4001, dtype=torch.float64)[:-1, None]
    sampled = sample_texts(Fixed(logits_V, 4), uniform_NT, temperature=2.0, end_id=0, never=[3])
    expected_V = policy(logits_V[None], 2.0, [3]).exp()[0]
    counts_V = sampled.ids_NT[:, 0].bincount(minlength=5) / 4000
    torch.testing.assert_close(counts_V, expected_V, rtol=0, atol=1e-3)
    assert counts_V[3] == 0
    long = sample_texts(
        Fixed(logits_V, 4), uniform_numbers(0, 0, list("abcd"), 50, 6), temperature=1.0,
        end_id=0, never=[],
    )  # fmt: skip
    for ids_T, mask_T, ended in zip(long.ids_NT, long.mask_NT, long.ended_N, strict=True):
        text = ids_T[mask_T].tolist()
        assert (text[-1] == 0) == bool(ended)
        assert 0 not in text[:-1]
        assert ended or len(text) == 6


def test_numbers_depend_on_seed_step_key_and_text_alone() -> None:
    both = uniform_numbers(0, 3, ["a", "b"], 2, 5)
    assert torch.equal(uniform_numbers(0, 3, ["b"], 2, 5), both[2:])
    assert len({tuple(row) for row in both.tolist()}) == 4
    for other in ((1, 3, ["a"]), (0, 4, ["a"]), (0, 3, ["c"])):
        assert not torch.equal(uniform_numbers(*other, 2, 5), both[:2])


@pytest.mark.parametrize("name", ["cxrmate", "r2gen"])
@pytest.mark.parametrize("method", ["self_critical", "group"])
def test_the_loss_is_that_of_the_sampled_texts(
    tokenizer: Tokenizer, name: str, method: Any
) -> None:
    config = RewardConfig(method=method, samples=3, temperature=1.5, entropy_weight=0.1)
    model = generator(tokenizer, name, config)
    batch = study(tokenizer, has_image_B=flags(1, 0, 1, 1))
    count = model.loss_counts(batch)
    assert batch.sampled_ids_NT is not None
    assert batch.sampled_mask_NT is not None
    assert batch.advantage_N is not None
    assert len(batch.advantage_N) == 9  # three texts of three images
    assert batch.advantage_N.any()
    result = model(batch)
    model.eval()
    total = torch.zeros(())
    entropies = []
    kept = study(tokenizer).rows([0, 2, 3])
    for row in range(9):
        ids = batch.sampled_ids_NT[row][batch.sampled_mask_NT[row]]
        before = torch.cat([torch.tensor([tokenizer.cls_id]), ids[:-1]])[None]
        prefix = model.read(kept.rows([row // 3]))
        log_TV = policy(model.score_next(before, prefix)[0], 1.5, model.never_written())
        log_T = log_TV[torch.arange(len(ids)), ids]
        assert log_T.isfinite().all()
        if method == "group":
            total = total - batch.advantage_N[row] * len(ids)  # the ratio is 1
        else:
            total = total - batch.advantage_N[row] * log_T.sum()
        entropies.append(-(log_TV.exp() * log_TV.nan_to_num(neginf=0.0)).sum(1).mean())
    entropy = torch.stack(entropies).mean()
    torch.testing.assert_close(result.terms["entropy"], entropy.detach(), rtol=1e-4, atol=1e-5)
    if method == "group":
        assert float(count) == batch.sampled_mask_NT.sum()
        expected = total / count.squeeze()
    else:
        assert float(count) == 9
        expected = total / 9 - 0.1 * entropy
    torch.testing.assert_close(result.total, expected, rtol=1e-4, atol=1e-5)
    assert set(result.terms) == {"policy", "reward", "baseline", "tokens", "ended", "entropy"}


def test_the_baseline_is_the_greedy_text(tokenizer: Tokenizer) -> None:
    config = RewardConfig(samples=1, temperature=1e-4, weights={"ngrams": 1.0})
    model = generator(tokenizer, rewards=config)
    batch = study(tokenizer)
    model.loss_counts(batch)
    assert batch.advantage_N is not None
    assert batch.reward_K is not None
    assert not batch.advantage_N.any()  # near temperature 0 the sampled text is the greedy one
    model.eval()
    greedy = model.write_reports(study(tokenizer), decoding=Decoding())
    texts = model._texts(greedy.ids_BT, greedy.mask_BT)
    true = [f"{a} {b}" for a, b in zip(TEXTS, reversed(TEXTS), strict=True)]
    spelled = [text.replace(".", " .").lower() for text in true]
    expected = text_rewards(["ngrams"], texts, spelled, greedy.ended_B.tolist()).mean()
    torch.testing.assert_close(batch.reward_K[0], expected)
    torch.testing.assert_close(batch.reward_K[1], expected)


@pytest.mark.parametrize("method", ["self_critical", "group"])
def test_micro_batches_equal_the_whole_batch(tokenizer: Tokenizer, method: Any) -> None:
    found = []
    rewards = RewardConfig(method=method, samples=2, entropy_weight=0.0)
    for rows in ([[0, 1, 2, 3]], [[0], [1, 2, 3]]):
        model = generator(tokenizer, rewards=rewards)
        batch = study(tokenizer, has_image_B=flags(1, 1, 1, 0))
        step = step_of(model, optim(optimizer="sgd", momentum=0.0))
        result = step(5, 0.1, [batch.rows(part) for part in rows], len(rows))
        loss = torch.stack([losses.total for losses in result.losses]).mean()
        found.append((loss, result.grad_norm))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
    assert float(found[0][1]) > 0


def test_an_interrupted_run_goes_on_bit_for_bit(tokenizer: Tokenizer) -> None:
    batches = [study(tokenizer), study(tokenizer)]
    whole = generator(tokenizer)
    step = step_of(whole, optim(optimizer="adamw"))
    for number, batch in enumerate(copy.deepcopy(batches)):
        step(number, 1e-2, [batch], 1)
        if number == 0:
            saved = copy.deepcopy((whole.state_dict(), step.optimizer.state_dict()))
    torch.manual_seed(99)  # the state of global generators has no effect
    again = generator(tokenizer)
    second = step_of(again, optim(optimizer="adamw"))
    again.load_state_dict(saved[0])
    second.optimizer.load_state_dict(saved[1])
    torch.manual_seed(7)
    second(1, 1e-2, [batches[1]], 1)
    for name, value in again.state_dict().items():
        assert torch.equal(value, whole.state_dict()[name]), name


def test_validation_has_the_loss_of_words(tokenizer: Tokenizer) -> None:
    model = generator(tokenizer).eval()
    batch = study(tokenizer)
    model.loss_counts(batch)
    assert batch.advantage_N is None
    assert set(model(batch).terms) == {"words"}


@pytest.mark.training
def test_the_reward_rises(tokenizer: Tokenizer) -> None:
    """Texts near the true one are written more often, without any true word in the loss."""
    rewards = RewardConfig(samples=8, weights={"ngrams": 1.0}, entropy_weight=0.0)
    model = generator(tokenizer, rewards=rewards, sections=False)
    step = step_of(model, optim(optimizer="adamw"))
    means = []
    for number in range(40):
        result = step(number, 1e-2, [make_batch(tokenizer, 4)], 1)
        means.append(float(result.losses[0].terms["reward"]))
    assert sum(means[-10:]) > 1.5 * sum(means[:10])


def test_rewards_without_a_weight_are_not_computed() -> None:
    assert set(RewardConfig().weights) == set(rewards_of_texts.REWARDS)  # options of a run
    assert RewardConfig().used == {"findings": 1.0, "ngrams": 0.5}


def test_errors() -> None:
    with raises(ConfigError, "conflict", "samples"):
        RewardConfig(method="group")
    with raises(ConfigError, "unknown_name", "weights"):
        RewardConfig(weights={"beauty": 1.0})
    with raises(ConfigError, "empty", "weights"):
        RewardConfig(weights={"ngrams": 0.0})
