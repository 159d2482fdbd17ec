"""Training of report generators on rewards: texts that the model samples, and how good they are.

    images -> sampled texts -> rewards against the true report -> loss of the policy

`self_critical` compares each sampled text with the greedy one (Rennie et al., arXiv 1612.00563;
EAST, arXiv 2408.03500, with an entropy), `group` the sampled texts of one image with each other
(GRPO, Shao et al., arXiv 2402.03300). Texts are sampled without gradients from the model in eval
mode, and one pass over them gives the loss. Each text is used for one update, where the ratio of
GRPO is 1 and its clipping has no effect.

Draws depend on the seed, the step, the sample's key and the number of the text alone, so texts do
not depend on the batch, on the number of ranks, and on where a run was interrupted. All texts of
an image are on one rank, so that the statistics of its group need no other; the loss is the mean
over all texts (`self_critical`) or tokens (`group`) of an update, over micro-batches and ranks.

Letters: B samples, G texts of a sample, N = B * G texts (those of a sample side by side), T tokens,
V words, R rewards.
"""

import copy
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from medvl import losses
from medvl.common.seeding import derive
from medvl.errors import ConfigError
from medvl.losses.common import mean_of
from medvl.losses.policy import log_probabilities, text_entropy, token_log_probabilities
from medvl.models.base import evaluating, update_mean, zero_loss
from medvl.models.fusion_encoders.parts.encoder import Tokens
from medvl.models.report_generators.base import IGNORED, ReportGenerator
from medvl.models.text_decoding import Decoding, Generated, NextToken, search
from medvl.schema import Batch, Losses
from medvl.train.config import RewardConfig
from medvl.train.rewards.text_rewards import text_rewards


class RewardTask:
    """Training on rewards, in place of the loss of words: the texts of a batch, and their loss.

    Attributes:
        sampled_tokens: tokens of all sampled texts of the run, over all ranks.
        seconds: seconds of sampling and of rewards, on the mean of the ranks.

    Args:
        config: settings.
        model: the report generator that is trained, on its device, at the start of the run.
        sharded: whether each rank holds a part of the weights.

    Raises ConfigError for another system, without a tokenizer, and with sharded weights.
    """

    def __init__(self, config: RewardConfig, model: nn.Module, *, sharded: bool = False) -> None:
        if not isinstance(model, ReportGenerator):
            name = getattr(model, "name", type(model).__name__)
            message = f"expected a report generator to train on rewards, got {name}"
            raise ConfigError(message, "unsupported", field="rewards")
        if sharded:
            message = "training on rewards writes texts, for which weights must be whole"
            raise ConfigError(f"{message}: leave it unset", "conflict", field="shard_weights")
        model.require_tokenizer("training on rewards")
        self.config = config
        self.model = model
        self.sampled_tokens = 0
        self.seconds = 0.0
        self._start: ReportGenerator | None = None
        if config.reference_weight:
            self._start = copy.deepcopy(model).eval().requires_grad_(False)

    @property
    def exhausted(self) -> bool:
        """Whether a budget is used up."""
        config = self.config
        tokens, seconds = config.token_budget, config.second_budget
        return (tokens is not None and self.sampled_tokens >= tokens) or (
            seconds is not None and self.seconds >= seconds
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: texts follow from the step, budgets do not."""
        return {"sampled_tokens": self.sampled_tokens, "seconds": self.seconds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.sampled_tokens = state["sampled_tokens"]
        self.seconds = state["seconds"]

    def sample(self, batch: Batch, step: int) -> tuple[Batch, Tensor]:
        """Sample texts for the images of a batch.

        Returns the batch with these texts and their advantages, and (4,) float32: how many texts
        or tokens its loss is a sum over, the words of its true reports, its sampled tokens, and the
        seconds that this took.
        """
        started = time.perf_counter()
        config = self.config
        model = self.model
        tokenizer = model.require_tokenizer("training on rewards")
        row_K = model.trained_rows(batch)
        device = batch.ids_BT.device
        if not len(row_K):
            ids_NT = batch.ids_BT.new_zeros(0, 1)
            none = torch.zeros(4, device=device)
            return _with_texts(batch, ids_NT, ids_NT.bool(), none[:0], none), none
        samples = batch.rows(row_K.tolist())
        numbers_NT = uniform_numbers(
            config.seed, step, samples.keys, config.samples, model.longest_text
        )
        with evaluating(model), torch.no_grad():
            prefix = model.read(samples)
            sampled = sample_texts(
                model.writer(prefix, tokenizer.cls_id),
                numbers_NT.to(device),
                temperature=config.temperature,
                end_id=tokenizer.sep_id,
                never=model.never_written(),
            )
            greedy = None
            if config.method == "self_critical":
                greedy = search(
                    model.writer(prefix, tokenizer.cls_id),
                    Decoding(),
                    max_tokens=model.longest_text,
                    end_id=tokenizer.sep_id,
                    pad_id=tokenizer.pad_id,
                    never=model.never_written(),
                )
        reward_RN, baseline_RB = self._rewards(model, samples, sampled, greedy)
        weight_R = torch.tensor([*config.used.values()], device=device)
        tokens = sampled.mask_NT.sum().float()
        no_baseline = torch.zeros((), device=device)
        reward_K = torch.stack(
            [
                (weight_R @ reward_RN).mean(),
                no_baseline if baseline_RB is None else (weight_R @ baseline_RB).mean(),
                tokens / len(sampled.ids_NT),
                sampled.ended_N.float().mean(),
            ]
        )
        advantage_N = advantages(config, reward_RN, baseline_RB)
        batch = _with_texts(batch, sampled.ids_NT, sampled.mask_NT, advantage_N, reward_K)
        texts = torch.tensor(float(len(sampled.ids_NT)), device=device)
        seconds = torch.tensor(time.perf_counter() - started, device=device)
        count = tokens if config.method == "group" else texts
        return batch, torch.stack([count, model.loss_counts(samples)[0], tokens, seconds])

    def spend(self, tokens: float, seconds: float) -> None:
        """Count the tokens and seconds of an update, over all ranks."""
        self.sampled_tokens += round(tokens)
        self.seconds += seconds

    def losses(self, model: ReportGenerator, batch: Batch) -> Losses:
        """Return the losses of the sampled texts of a batch: one pass over them in eval mode, with
        gradients.

        "policy" is minimised, and with a weight "words". For the log: "reward", "baseline" (reward
        of the greedy texts), "tokens" and "ended" (of sampled texts), "entropy" in nats, and with a
        reference "distance".
        """
        config = self.config
        ids_NT = batch.sampled_ids_NT
        mask_NT = batch.sampled_mask_NT
        advantage_N = batch.advantage_N
        assert ids_NT is not None, "the training step samples the texts of a batch"
        assert mask_NT is not None, "sampled texts have a mask"
        assert advantage_N is not None, "sampled texts have advantages"
        assert batch.reward_K is not None, "sampled texts have rewards"
        reward, baseline, tokens, ended = batch.reward_K
        log = {"reward": reward, "baseline": baseline, "tokens": tokens, "ended": ended}
        nothing = reward.new_zeros(())
        if not len(ids_NT):
            zero = zero_loss(model)
            log |= {"entropy": nothing, **({} if self._start is None else {"distance": nothing})}
            log |= {"words": nothing} if config.word_weight else {}
            return Losses(zero, {"policy": zero, **log})
        # Sampled texts are not rows of the batch.
        images = _with_texts(batch, None, None, None, None)
        samples = images.rows(model.trained_rows(batch).tolist())
        with evaluating(model, gradients=True):
            prefix = model.read(samples)
            log_NTV = self._log_probabilities(model, prefix, ids_NT)
        if config.method == "group":
            logp_NT = token_log_probabilities(log_NTV, ids_NT, mask_NT)
            reference_NT = None
            if self._start is not None:
                with torch.no_grad():
                    start_NTV = self._log_probabilities(
                        self._start, self._start.read(samples), ids_NT
                    )
                    reference_NT = token_log_probabilities(start_NTV, ids_NT, mask_NT)
                    log["distance"] = (logp_NT - reference_NT).sum() / mask_NT.sum()
            # One update of each text: the policy that sampled is the one that is trained.
            loss = losses.grpo(
                logp_NT,
                logp_NT.detach(),
                mask_NT,
                advantage_N,
                reference_NT=reference_NT,
                beta=config.reference_weight,
            )
            count = mask_NT.sum()
        else:
            loss = losses.self_critical(
                log_NTV, ids_NT, mask_NT, advantage_N, entropy_weight=config.entropy_weight
            )
            count = torch.tensor(len(ids_NT), device=ids_NT.device)
        with torch.no_grad():
            log["entropy"] = text_entropy(log_probabilities(log_NTV, mask_NT), mask_NT).mean()
        mean = update_mean(batch, loss * count, count)
        if not config.word_weight:
            return Losses(mean, {"policy": mean, **log})
        with evaluating(model, gradients=True):
            words = _word_loss(model, samples, prefix)
        return Losses(mean + config.word_weight * words, {"policy": mean, "words": words, **log})

    def _log_probabilities(self, model: ReportGenerator, prefix: Tokens, ids_NT: Tensor) -> Tensor:
        """(N, T, V): log-probabilities of the words of sampled texts."""
        row_N = torch.arange(len(ids_NT), device=ids_NT.device) // self.config.samples
        scores_NTV = model.score_words(ids_NT, prefix.rows(row_N))
        return policy(scores_NTV, self.config.temperature, model.never_written())

    def _rewards(
        self, model: ReportGenerator, batch: Batch, sampled: "Sampled", greedy: Generated | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return (R, N) rewards of sampled texts, and (R, B) of greedy ones."""
        config = self.config
        _, target_BT = model.words_and_targets(batch)
        known_BT = target_BT != IGNORED
        references = model.texts_of(target_BT.masked_fill(~known_BT, 0), known_BT)
        device = target_BT.device
        names = [*config.used]
        reward_RN = text_rewards(
            names,
            model.texts_of(sampled.ids_NT, sampled.mask_NT),
            [text for text in references for _ in range(config.samples)],
            sampled.ended_N.tolist(),
            config.text_encoder,
        ).to(device)
        if greedy is None:
            return reward_RN, None
        texts = model.texts_of(greedy.ids_BT, greedy.mask_BT)
        ended = greedy.ended_B.tolist()
        baseline_RB = text_rewards(names, texts, references, ended, config.text_encoder)
        return reward_RN, baseline_RB.to(device)


def _word_loss(model: ReportGenerator, batch: Batch, prefix: Tokens) -> Tensor:
    """(): mean loss of the words of true reports, over an update as `update_mean`."""
    ids_BT, target_BT = model.words_and_targets(batch)
    mean_K = batch.mean_counts_K
    count = (target_BT != IGNORED).sum() if mean_K is None else mean_K[1]
    return mean_of(model.word_loss(ids_BT, target_BT, prefix), count)


def _with_texts(
    batch: Batch,
    ids_NT: Tensor | None,
    mask_NT: Tensor | None,
    advantage_N: Tensor | None,
    reward_K: Tensor | None,
) -> Batch:
    return dataclasses.replace(
        batch,
        sampled_ids_NT=ids_NT,
        sampled_mask_NT=mask_NT,
        advantage_N=advantage_N,
        reward_K=reward_K,
    )


# Sampling.


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
