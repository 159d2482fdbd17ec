"""Training of report generators on rewards: texts that the model samples, and how good they are.

    images -> sampled texts -> rewards against the true report -> loss of the policy

`self_critical` compares each sampled text with the greedy one (Rennie et al., arXiv 1612.00563;
EAST, arXiv 2408.03500, with an entropy), `group` the sampled texts of one image with each other
(GRPO, Shao et al., arXiv 2402.03300). Texts are sampled without gradients from the model in eval
mode, and one pass over them gives the loss.

Draws depend on the seed, the step, the sample's key and the number of the text alone, so texts do
not depend on the batch, on the number of ranks, and on where a run was interrupted.

Letters: B samples, G texts of a sample, N = B * G texts (those of a sample side by side), T tokens,
V words, R rewards.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from medvl import losses
from medvl.common.config_io import check_choice, check_within
from medvl.common.seeding import derive
from medvl.errors import ConfigError
from medvl.models.report_generators.parts.text_rewards import REWARDS
from medvl.models.text_decoding import NextToken


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Settings of training on rewards."""

    method: Literal["self_critical", "group"] = "self_critical"
    """What a sampled text is compared with: the greedy text, or the others of its image."""
    samples: int = 1
    """Texts that are sampled for each image; 4 in CXRMate-2's `group`."""
    weights: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {**dict.fromkeys(REWARDS, 0.0), "findings": 1.0, "ngrams": 0.5}
    )
    """Weight of each of `REWARDS`; those without one are not computed."""
    text_encoder: str = "minilm"
    """Text encoder of the reward sentences, a preset with published weights."""
    temperature: float = 1.0
    """The policy's logits are divided by it, in sampling and in the loss."""
    entropy_weight: float = 0.05
    """Weight of the entropy of `self_critical`; 0.05 in EAST."""
    epsilon: float = 0.2
    """How far the ratio of probabilities may move an update of `group`."""
    seed: int = 0
    """Seed of sampling."""

    def __post_init__(self) -> None:
        check_choice(self.method, ("self_critical", "group"), "method")
        check_within(self, "[1, inf)", "samples")
        check_within(self, "(0, inf)", "temperature", "epsilon")
        check_within(self, "[0, inf)", "entropy_weight")
        for name in self.weights:
            check_choice(name, REWARDS, "weights")
        if not self.used:
            raise ConfigError("expected a reward with a weight, got none", "empty", field="weights")
        if self.method == "group" and self.samples < 2:
            message = "group compares texts of one image: set samples to 2 or more, got 1"
            raise ConfigError(message, "conflict", field="samples")

    @property
    def used(self) -> dict[str, float]:
        """Rewards that have a weight."""
        return {name: weight for name, weight in self.weights.items() if weight}


# Sampling and the loss.


@dataclasses.dataclass(frozen=True, slots=True)
class Sampled:
    """Sampled texts of a batch."""

    ids_NT: Tensor
    """int64, with the closing token of texts that ended."""
    mask_NT: Tensor
    """bool, True on real tokens and the closing one."""
    ended_N: Tensor


def sample_texts(
    model: NextToken,
    uniform_NT: Tensor,
    *,
    temperature: float,
    end_id: int,
    never: Sequence[int],
) -> Sampled:
    """Sample texts by inverting the cumulative distribution at numbers in [0, 1).

    Args:
        model: scores the next token of B samples.
        uniform_NT: the numbers, for N = B * G texts of at most T tokens.
        temperature: divisor of the logits.
        end_id: the closing token.
        never: ids that must not appear in a text.
    """
    device = uniform_NT.device
    texts, longest = uniform_NT.shape
    logits_RV = model.first()
    parent_N = torch.arange(texts, device=device) // (texts // len(logits_RV))
    ended_N = torch.zeros(texts, dtype=torch.bool, device=device)
    ids = []
    masks = []
    for step in range(longest):
        log_NV = policy(logits_RV[parent_N] if step == 0 else logits_RV, temperature, never)
        id_N = _invert(log_NV, uniform_NT[:, step]).masked_fill(ended_N, end_id)
        ids.append(id_N)
        masks.append(~ended_N)
        ended_N = ended_N | (id_N == end_id)
        if bool(ended_N.all()) or step + 1 == longest:
            break
        logits_RV = model.next(id_N, parent_N)
        parent_N = torch.arange(texts, device=device)
    return Sampled(torch.stack(ids, dim=1), torch.stack(masks, dim=1), ended_N)


def policy(logits: Tensor, temperature: float, never: Sequence[int]) -> Tensor:
    """Return log-probabilities over the last axis, -inf for ids that must not appear."""
    never_M = torch.tensor(sorted(never), dtype=torch.int64, device=logits.device)
    return (logits.float() / temperature).index_fill(-1, never_M, -torch.inf).log_softmax(dim=-1)


def uniform_numbers(seed: int, step: int, keys: Sequence[str], samples: int, tokens: int) -> Tensor:
    """(B * `samples`, `tokens`) float64 in [0, 1): numbers of each text, from the seed, the step,
    the sample's key and the number of the text.
    """
    rows = [
        np.random.Generator(
            np.random.PCG64(derive(seed, f"sampled text of {key}", step, number))
        ).random(tokens)
        for key in keys
        for number in range(samples)
    ]
    return torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, tokens)


def advantages(config: RewardConfig, reward_RN: Tensor, baseline_RB: Tensor | None) -> Tensor:
    """(N,): how much better each sampled text is than what it is compared with."""
    weight_R = torch.tensor([*config.used.values()], device=reward_RN.device)
    if config.method == "group":
        return losses.group_advantages(reward_RN, weight_R, config.samples)
    assert baseline_RB is not None, "self_critical compares with the greedy text"
    baseline_RN = baseline_RB.repeat_interleave(config.samples, dim=1)
    return (weight_R[:, None] * (reward_RN - baseline_RN)).sum(dim=0)


def _invert(log_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """(N,) int64: the word at whose place the cumulative distribution exceeds a number."""
    cumulative_NV = log_NV.double().exp().cumsum(dim=1)
    threshold_N1 = (uniform_N.to(cumulative_NV) * cumulative_NV[:, -1])[:, None]
    id_N = torch.searchsorted(cumulative_NV, threshold_N1, right=True).squeeze(1)
    # Rounding could place a number at the very end, behind the last word with a probability.
    words_V = torch.arange(log_NV.shape[1], device=log_NV.device)
    last_N = torch.where(log_NV.isneginf(), 0, words_V).amax(dim=1)
    return torch.minimum(id_N, last_N)
