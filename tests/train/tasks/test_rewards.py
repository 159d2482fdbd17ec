"""Training on rewards: rewards of adversarial pairs, sampling, the loss of the policy, and steps that
do not depend on the batch, the number of micro-batches, or an interruption.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.errors import raises
from helpers.fusion_samples import TEXTS, flags, make_batch, shaken
from helpers.train_fakes import config, optim, records, step_of, train, weights
from helpers.two_ranks import on_two_ranks
from torch import Tensor

import medvl
from medvl.common.config_io import to_dict
from medvl.data.tokenizer.tokenizer import Tokenizer, train_words
from medvl.errors import CheckpointError, ConfigError
from medvl.models import CXRMate, R2Gen, factory
from medvl.models.checkpoint import save as save_checkpoint
from medvl.models.report_generators.base import ReportGenerator
from medvl.models.text_decoding import Decoding
from medvl.schema import Batch, TextFeatures
from medvl.train import Constant, RewardConfig, RewardTask, TrainResult
from medvl.train.config import REWARDS
from medvl.train.parallel.distributed import RankInfo
from medvl.train.parallel.model import DDPModel
from medvl.train.rewards import text_rewards as rewards_of_texts
from medvl.train.rewards.task import policy, sample_texts, uniform_numbers
from medvl.train.rewards.text_rewards import SentenceReward, open_reward, text_rewards

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
    " ".join([REFERENCE] * 4): (2 / (2 + 9), False, False),
    "Left pleural effusion. " * 8: (2 / (2 + 7), False, False),
    "Small left pleural effusion. There is a left effusion.": (2 / (2 + 1), False, True),
    "Small left pleural effusion. No pneumothorax. No pneumothorax.": (2 / (2 + 1), True, True),
    "No pleural effusion. No pneumothorax. Left effusion.": (0.0, False, True),
    "No right pleural effusion. No pneumothorax. Left effusion.": (1.0, False, True),
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


def generator(tokenizer: Tokenizer, name: str = "cxrmate", **more: Any) -> ReportGenerator:
    torch.manual_seed(0)
    if name == "r2gen":
        more = {"memory_heads": 2, **more}
    model = medvl.create_model(name, tokenizer=tokenizer, **TINY, **more)
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


def test_sentences_may_repeat_as_often_as_in_the_reference() -> None:
    findings = reward("findings")
    impression = f"{REFERENCE} Left effusion. No pneumothorax."
    assert findings(impression, impression) == 1
    assert findings(REFERENCE, impression) == 1
    assert findings(impression, REFERENCE) == 2 / (2 + 2)
    assert findings(f"{impression} Left effusion.", impression) == 2 / (2 + 1)
    assert findings(f"{NORMAL} The lungs are clear.", NORMAL) == 2 / (2 + 1)
    assert findings("Edema. Edema.", NORMAL) == 0
    limited = "No large effusion. Trace left effusion."
    assert findings(limited, limited) == 1  # the reference has this contradiction


def test_severities_are_those_of_present_findings() -> None:
    severities = reward("severities")
    reference = "Small left pleural effusion. Severe edema. Left pneumothorax."
    assert severities(reference, reference) == 1
    assert severities("Tiny pleural effusion. No severe edema.", reference) == 2 / 3
    assert severities("Large effusion. Edema.", reference) == 0
    assert severities("Pneumothorax.", NORMAL) == 1


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
    word_weight = 0.3 if method == "group" else 0.0
    config = RewardConfig(
        method=method, samples=3, temperature=1.5, entropy_weight=0.1, word_weight=word_weight
    )
    model = generator(tokenizer, name)
    task = RewardTask(config, model)
    given = study(tokenizer, has_image_B=flags(1, 0, 1, 1))
    batch, (count, words, tokens, _) = task.sample(given, 0)
    assert batch.sampled_ids_NT is not None
    assert batch.sampled_mask_NT is not None
    assert batch.advantage_N is not None
    assert len(batch.advantage_N) == 9  # three texts of three images
    assert batch.advantage_N.any()
    assert tokens == batch.sampled_mask_NT.sum()
    result = model(batch, task.losses)
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
        assert count == tokens
        expected = total / count + word_weight * model(given).total
    else:
        assert count == 9
        expected = total / 9 - 0.1 * entropy
    torch.testing.assert_close(result.total, expected, rtol=1e-4, atol=1e-5)
    assert words == model.loss_counts(given)
    terms = {"policy", "reward", "baseline", "tokens", "ended", "entropy"}
    assert set(result.terms) == terms | ({"words"} if word_weight else set())


def test_the_baseline_is_the_greedy_text(tokenizer: Tokenizer) -> None:
    config = RewardConfig(samples=1, temperature=1e-4, weights={"ngrams": 1.0})
    model = generator(tokenizer)
    batch, _ = RewardTask(config, model).sample(study(tokenizer), 0)
    assert batch.advantage_N is not None
    assert batch.reward_K is not None
    assert not batch.advantage_N.any()  # near temperature 0 the sampled text is the greedy one
    model.eval()
    greedy = model.write_reports(study(tokenizer), decoding=Decoding())
    texts = model.texts_of(greedy.ids_BT, greedy.mask_BT)
    true = [f"{a} {b}" for a, b in zip(TEXTS, reversed(TEXTS), strict=True)]
    spelled = [text.replace(".", " .").lower() for text in true]
    expected = text_rewards(["ngrams"], texts, spelled, greedy.ended_B.tolist()).mean()
    torch.testing.assert_close(batch.reward_K[0], expected)
    torch.testing.assert_close(batch.reward_K[1], expected)


@pytest.mark.parametrize("method", ["self_critical", "group"])
def test_micro_batches_equal_the_whole_batch(tokenizer: Tokenizer, method: Any) -> None:
    found = []
    rewards = RewardConfig(method=method, samples=2, entropy_weight=0.0, word_weight=0.5)
    for rows in ([[0, 1, 2, 3]], [[0], [1, 2, 3]]):
        model = generator(tokenizer)
        batch = study(tokenizer, has_image_B=flags(1, 1, 1, 0))
        task = RewardTask(rewards, model)
        step = step_of(model, optim(optimizer="sgd", momentum=0.0), rewards=task)
        result = step(5, 0.1, [batch.rows(part) for part in rows], len(rows))
        loss = torch.stack([losses.total for losses in result.losses]).mean()
        found.append((loss, result.grad_norm))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
    assert float(found[0][1]) > 0


class Studies:
    """A loader of the same batch, twice an epoch."""

    steps_per_epoch = 2
    global_batch = 4

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.batch = study(tokenizer)
        self.position = 0

    def __iter__(self) -> Iterator[Batch]:
        while self.position < self.steps_per_epoch:
            self.position += 1
            yield self.batch
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


def run(
    tokenizer: Tokenizer, folder: Path, rewards: RewardConfig, **changes: Any
) -> tuple[TrainResult, dict[str, Tensor]]:
    """Train for four steps; return the result and the last weights."""
    settings = {"epochs": None, "steps": 4, "checkpoint_every": 2, "log_every": 1, **changes}
    result = train(
        generator(tokenizer),
        Studies(tokenizer),
        optim=optim(optimizer="adamw", schedule=Constant()),
        config=config(folder, best_metric="loss/words", validate_every=2, **settings),
        valid_loader=[study(tokenizer)],
        rewards=rewards,
    )
    return result, weights(folder)


def test_a_run_resumes_bit_for_bit_and_ends_with_its_budget(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    rewards = RewardConfig(method="group", samples=2, reference_weight=0.5)
    result, whole = run(tokenizer, tmp_path / "whole", rewards)
    assert result.stopped == "finished"
    assert "loss/words" in result.metrics
    lines = records(tmp_path / "whole", "train")
    assert lines[0]["loss/distance"] == 0  # the first texts are of the start itself
    assert lines[-1]["loss/distance"] != 0
    spent = [line["sampled_tokens"] for line in lines]
    assert spent == sorted(set(spent))

    limited = dataclasses.replace(rewards, token_budget=spent[1])
    result, _ = run(tokenizer, tmp_path / "parts", limited)
    assert (result.stopped, result.step) == ("budget", 2)
    assert "loss/words" in result.metrics
    torch.manual_seed(99)  # the state of global generators has no effect
    result, resumed = run(tokenizer, tmp_path / "parts", rewards)
    assert (result.stopped, result.step) == ("finished", 4)
    assert records(tmp_path / "parts", "train")[-1]["sampled_tokens"] == spent[-1]
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name
    with raises(CheckpointError, "mismatch", "rewards.samples", names="--rewards.samples 2"):
        run(tokenizer, tmp_path / "parts", dataclasses.replace(rewards, samples=3))

    hurried = dataclasses.replace(rewards, second_budget=1e-6)
    result, _ = run(tokenizer, tmp_path / "seconds", hurried)
    assert (result.stopped, result.step) == ("budget", 1)
    saved = medvl.load(tmp_path / "seconds" / "last")
    assert "rewards" not in to_dict(saved.config)


def ranks_step(method: str, ranks: int) -> list[Tensor]:
    """Return the loss, gradients and spent tokens of an update of this rank's samples, one of four
    on rank 0, where the second sample has no image.
    """
    tokenizer = train_words(TEXTS, min_frequency=1)
    model = generator(tokenizer)
    batch = study(tokenizer, has_image_B=flags(1, 0, 1, 1))
    rank = dist.get_rank() if ranks > 1 else 0
    world = RankInfo(rank=rank, size=ranks, local_size=ranks, device=torch.device("cpu"))
    weights = {"ngrams": 1.0}
    config = RewardConfig(method=method, samples=2, weights=weights, word_weight=0.5)
    task = RewardTask(config, model)
    parallel = DDPModel(model, world)
    step = step_of(parallel, optim(optimizer="sgd", momentum=0.0), ranks=world, rewards=task)
    rows = [[0, 1, 2, 3], [0], [1, 2, 3]][rank + ranks - 1]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    result = step(3, 1.0, [batch.rows(rows)], 1)
    moved = [old - new for old, new in zip(before, model.parameters(), strict=True)]
    return [result.losses[0].total, torch.tensor(task.sampled_tokens), *(x.detach() for x in moved)]


@pytest.mark.parametrize("method", ["self_critical", "group"])
def test_two_ranks_equal_one(method: str) -> None:
    loss, tokens, *moved = ranks_step(method, 1)
    first, second = on_two_ranks(ranks_step, method, 2)
    torch.testing.assert_close((first[0] + second[0]) / 2, loss)
    assert first[1] == second[1] == tokens
    assert any(change.any() for change in moved)
    for one, other, expected in zip(first[2:], second[2:], moved, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-6)


def test_old_checkpoints_had_rewards_among_the_settings_of_the_model(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    save_checkpoint(generator(tokenizer), tmp_path, {})
    for rewards in (None, {"method": "group", "samples": 4}):
        saved = json.loads((tmp_path / "config.json").read_text())
        saved["model"]["settings"]["rewards"] = rewards
        (tmp_path / "config.json").write_text(json.dumps(saved))
        assert isinstance(medvl.load(tmp_path), CXRMate)
        again = medvl.create_model(generator(tokenizer).config, tokenizer=tokenizer,
                                   init_from=tmp_path)  # fmt: skip
        assert isinstance(again, CXRMate)


@pytest.mark.training
def test_the_reward_rises(tokenizer: Tokenizer) -> None:
    """Texts near the true one are written more often, without any true word in the loss."""
    rewards = RewardConfig(samples=8, weights={"ngrams": 1.0}, entropy_weight=0.0)
    model = generator(tokenizer, sections=False)
    step = step_of(model, optim(optimizer="adamw"), rewards=RewardTask(rewards, model))
    means = []
    for number in range(60):
        result = step(number, 1e-2, [make_batch(tokenizer, 4)], 1)
        means.append(float(result.losses[0].terms["reward"]))
    assert sum(means[-10:]) > 1.5 * sum(means[:10])


@pytest.mark.parametrize("name", sorted({*REWARDS} - {"sentences", "radgraph"}))
def test_every_name_of_the_settings_has_a_reward(name: str) -> None:
    assert 0 < open_reward(name, "minilm")(REFERENCE, REFERENCE) <= 1


def test_rewards_without_a_weight_are_not_computed() -> None:
    assert tuple(RewardConfig().weights) == REWARDS  # options of a run
    assert RewardConfig().used == {"findings": 1.0, "ngrams": 0.5}


def test_errors(tokenizer: Tokenizer) -> None:
    with raises(ConfigError, "conflict", "samples"):
        RewardConfig(method="group")
    with raises(ConfigError, "unknown_name", "weights"):
        RewardConfig(weights={"beauty": 1.0})
    with raises(ConfigError, "empty", "weights"):
        RewardConfig(weights={"ngrams": 0.0})
    with raises(ConfigError, "conflict", "reference_weight"):
        RewardConfig(reference_weight=0.1)
    with raises(ConfigError, "out_of_range", "token_budget"):
        RewardConfig(token_budget=0)
    with raises(ConfigError, "unsupported", "rewards"):
        RewardTask(RewardConfig(), torch.nn.Linear(1, 1))
    with raises(ConfigError, "conflict", "shard_weights"):
        RewardTask(RewardConfig(), generator(tokenizer), sharded=True)
