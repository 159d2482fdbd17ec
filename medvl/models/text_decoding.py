"""Writing a text token by token: greedy search, beam search or draws, over any model that scores the next token.

Nothing of a reference enters: a model is asked for the next token of what it has itself written so far.

B samples, K hypotheses a sample, R = B * K rows (those of a sample side by side), V vocabulary, T tokens.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from medvl.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Decoding:
    """How a text is searched for."""

    beams: int = 1
    """Hypotheses that are kept a sample; 1 is greedy."""
    max_tokens: int | None = None
    """Most tokens of a text, its closing one among them; None: as many as the model was trained with."""
    length_penalty: float = 0.0
    """Hypotheses are compared by the sum of their tokens' log-probabilities over ((5 + length) / 6) ** length_penalty
    (Wu et al., arXiv 1609.08144, equation 14): 0 is the plain sum, which favours short texts; 1 is near the mean."""

    samples: int = 0
    """Texts that are drawn for each sample from what the model takes for likely, instead of a search for the best."""
    seed: int = 0
    """Of the draws. Which texts a sample gets depends on its place in the batch as well."""

    def __post_init__(self) -> None:
        if self.samples < 0 or (self.samples and (self.beams > 1 or self.length_penalty)):
            raise ConfigError(f"samples is {self.samples}: it must not be negative, and goes without beams and penalty")
        if self.beams < 1 or (self.max_tokens is not None and self.max_tokens < 1):
            raise ConfigError(f"beams and max_tokens must be positive, got {self.beams} and {self.max_tokens}")
        if self.length_penalty < 0:
            raise ConfigError(f"length_penalty must not be negative, got {self.length_penalty}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """One text a sample; with draws, all of a sample's side by side."""

    ids_BT: Tensor
    """int64, without the closing token, padded on the right."""
    mask_BT: Tensor
    """bool, True on tokens of the text."""
    score_B: Tensor
    """What hypotheses were compared by: the log-probability, length penalty included."""
    ended_B: Tensor
    """bool: False where the text was cut at the greatest length."""


class NextToken(Protocol):
    """A model in the middle of writing."""

    def first(self) -> Tensor:
        """(B, V): logits of the first token."""

    def next(self, ids_R: Tensor, parent_R: Tensor) -> Tensor:
        """(R, V): logits of the token behind `ids_R`, each of which continues the row `parent_R` of the call before."""


@torch.no_grad()
def search(
    model: NextToken, decoding: Decoding, *, max_tokens: int, end_id: int, pad_id: int, never: Sequence[int]
) -> Generated:
    """The best text that a beam search finds for each sample, or as many draws as are asked for.

    A hypothesis that has ended keeps its place, and its score, among the K until better ones take it; the search ends
    when all have ended or are `max_tokens` long. With one beam that is greedy decoding, whatever the length penalty.

    Args:
        model: scores the next token.
        decoding: how to search.
        max_tokens: of a text, the closing token among them.
        end_id: the closing token.
        pad_id: fills up the texts that are shorter than the longest.
        never: ids that are no part of a text.
    """
    never_N = torch.tensor(sorted(never))
    logits_RV = model.first()
    batch, device = len(logits_RV), logits_RV.device
    kept = _Hypotheses(
        ids_BKT=torch.empty(batch, 1, 0, dtype=torch.int64, device=device),
        total_BK=torch.zeros(batch, 1, device=device),
        ended_BK=torch.zeros(batch, 1, dtype=torch.bool, device=device),
        length_BK=torch.zeros(batch, 1, dtype=torch.int64, device=device),
    )
    generator = torch.Generator(device).manual_seed(decoding.seed)
    while True:
        log_RV = logits_RV.float().index_fill(1, never_N.to(device), -torch.inf).log_softmax(dim=1)
        parent_BK, kept = kept.extend(log_RV.unflatten(0, (batch, -1)), decoding, end_id, generator)
        if kept.ids_BKT.shape[2] == max_tokens or bool(kept.ended_BK.all()):
            return kept.texts(decoding, pad_id)
        first_B1 = torch.arange(batch, device=device)[:, None] * (len(logits_RV) // batch)
        logits_RV = model.next(kept.ids_BKT[:, :, -1].flatten(), (first_B1 + parent_BK).flatten())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Hypotheses:
    """The K best beginnings of every sample's text, the best first."""

    ids_BKT: Tensor
    total_BK: Tensor
    """Sum of log-probabilities."""
    ended_BK: Tensor
    length_BK: Tensor
    """Tokens, the closing one among them."""

    def extend(
        self, log_BKV: Tensor, decoding: Decoding, end_id: int, generator: torch.Generator
    ) -> tuple[Tensor, "_Hypotheses"]:
        """(which hypothesis each new one continues, the continuations); the ended ones repeat their end."""
        vocabulary = log_BKV.shape[2]
        stay_V = torch.full_like(log_BKV[0, 0], -torch.inf).index_fill(
            0, torch.tensor(end_id, device=log_BKV.device), 0
        )
        log_BKV = torch.where(self.ended_BK[:, :, None], stay_V, log_BKV)
        length_BK = self.length_BK + ~self.ended_BK
        total_BN = (self.total_BK[:, :, None] + log_BKV).flatten(1)
        if decoding.samples:
            place_BK = _draw(log_BKV, decoding.samples, generator)
        else:
            ranked_BN = total_BN / _penalty(length_BK, decoding.length_penalty).repeat_interleave(vocabulary, dim=1)
            place_BK = ranked_BN.topk(min(decoding.beams, ranked_BN.shape[1]), dim=1).indices
        parent_BK, ids_BK = place_BK // vocabulary, place_BK % vocabulary
        before_BKT = self.ids_BKT.gather(1, parent_BK[:, :, None].expand(-1, -1, self.ids_BKT.shape[2]))
        return parent_BK, _Hypotheses(
            ids_BKT=torch.cat([before_BKT, ids_BK[:, :, None]], dim=2),
            total_BK=total_BN.gather(1, place_BK),
            ended_BK=ids_BK == end_id,
            length_BK=length_BK.gather(1, parent_BK),
        )

    def texts(self, decoding: Decoding, pad_id: int) -> Generated:
        """The first of every sample, or all draws."""
        chosen = slice(None) if decoding.samples else slice(1)
        ended_R, length_R = self.ended_BK[:, chosen].flatten(), self.length_BK[:, chosen].flatten()
        words_R = length_R - ended_R.long()
        width = int(words_R.max())
        mask_RT = torch.arange(width, device=words_R.device) < words_R[:, None]
        return Generated(
            ids_BT=self.ids_BKT[:, chosen, :width].flatten(0, 1).masked_fill(~mask_RT, pad_id),
            mask_BT=mask_RT,
            score_B=self.total_BK[:, chosen].flatten() / _penalty(length_R, decoding.length_penalty),
            ended_B=ended_R,
        )


def _draw(log_BKV: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    """(B, `samples`) int64: a drawn continuation, among all K * V, of every draw; at first, all continue the only one
    there is."""
    batch, kept, vocabulary = log_BKV.shape
    parent_K = torch.arange(samples, device=log_BKV.device) % kept
    id_R = log_BKV[:, parent_K].flatten(0, 1).exp().multinomial(1, generator=generator)
    return parent_K * vocabulary + id_R.view(batch, samples)


def _penalty(length: Tensor, exponent: float) -> Tensor:
    return ((5.0 + length.float()) / 6.0) ** exponent
