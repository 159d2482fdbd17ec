"""Text generation token by token: greedy search, beam search or sampling, with any model that
scores the next token.

A model is given the tokens that it has generated so far, never a reference text.

B samples, K hypotheses a sample, R = B * K rows (those of a sample side by side), V vocabulary, T
tokens.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from medvl.common.config_io import check_within
from medvl.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Decoding:
    """Settings of text generation."""

    beams: int = 1
    """Hypotheses for each sample; 1 is greedy."""
    max_tokens: int | None = None
    """Maximum number of tokens, including the closing one; None: as in training."""
    length_penalty: float = 0.0
    """Hypotheses are compared by the sum of their tokens' log-probabilities over ((5 + length) / 6)
    ** length_penalty (Wu et al., arXiv 1609.08144, equation 14): 0 is the plain sum, which favours
    short texts; 1 is near the mean.
    """

    block_ngrams: int = 0
    """Length of n-grams that are not repeated within a text, 3 for trigrams; 0 allows every
    repetition.
    """
    ngram_penalty: float | None = None
    """Penalty subtracted from the log-probability of a token for each earlier occurrence of the
    n-gram that it would complete, in place of forbidding repetitions. R2Gen's code has 2 ln 2 =
    1.386. None forbids them.
    """

    samples: int = 0
    """Number of texts to sample from the model's distribution for each sample, instead of a
    search for the best.
    """
    seed: int = 0
    """Seed of sampling. The texts of a sample also depend on its position in the batch."""

    def __post_init__(self) -> None:
        check_within(self, "[0, inf)", "samples", "length_penalty", "block_ngrams", "ngram_penalty")
        check_within(self, "(0, inf)", "beams", "max_tokens")
        if self.samples and (self.beams > 1 or self.length_penalty):
            message = f"samples excludes beams and length_penalty, got {self.samples}"
            raise ConfigError(message, "conflict", field="samples")
        if self.ngram_penalty is not None and not self.block_ngrams:
            message = (
                f"ngram_penalty {self.ngram_penalty} needs block_ngrams; set the length "
                f"of the n-grams"
            )
            raise ConfigError(message, "conflict", field="ngram_penalty")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """One text for each sample; with sampling, all texts of a sample side by side."""

    ids_BT: Tensor
    """int64, without the closing token, padded on the right."""
    mask_BT: Tensor
    """bool, True on tokens of the text."""
    score_B: Tensor
    """Log-probability including the length penalty, by which hypotheses are compared."""
    ended_B: Tensor
    """bool: False if the text was cut at the maximum length."""


class NextToken(Protocol):
    """Interface of a model that writes texts token by token."""

    def first(self) -> Tensor:
        """(B, V): logits of the first token."""

    def next(self, ids_R: Tensor, parent_R: Tensor) -> Tensor:
        """(R, V): logits of the token after `ids_R`, which continue the rows `parent_R` of the
        previous call.
        """


@torch.no_grad()
def search(
    model: NextToken,
    decoding: Decoding,
    *,
    max_tokens: int,
    end_id: int,
    pad_id: int,
    never: Sequence[int],
) -> Generated:
    """Return the best text of a beam search for each sample, or `decoding.samples` sampled texts.

    A finished hypothesis keeps its score and stays among the K until better ones replace it. The
    search ends when all are finished or `max_tokens` long. One beam is greedy decoding with any
    length penalty.

    Args:
        model: scores the next token.
        decoding: settings.
        max_tokens: maximum length of a text, including the closing token.
        end_id: the closing token.
        pad_id: padding of shorter texts.
        never: ids that must not appear in a text.
    """
    # without ids, torch would make it a float
    never_N = torch.tensor(sorted(never), dtype=torch.int64)
    logits_RV = model.first()
    batch = len(logits_RV)
    device = logits_RV.device
    hypotheses = _Hypotheses(
        ids_BKT=torch.empty(batch, 1, 0, dtype=torch.int64, device=device),
        total_BK=torch.zeros(batch, 1, device=device),
        ended_BK=torch.zeros(batch, 1, dtype=torch.bool, device=device),
        length_BK=torch.zeros(batch, 1, dtype=torch.int64, device=device),
    )
    generator = torch.Generator(device).manual_seed(decoding.seed)
    while True:
        log_RV = logits_RV.float().index_fill(1, never_N.to(device), -torch.inf).log_softmax(dim=1)
        log_RV = log_RV - _repetition_penalty(hypotheses.ids_BKT.flatten(0, 1), log_RV, decoding)
        parent_BK, hypotheses = hypotheses.extend(
            log_RV.unflatten(0, (batch, -1)), decoding, end_id, generator
        )
        if hypotheses.ids_BKT.shape[2] == max_tokens or bool(hypotheses.ended_BK.all()):
            return hypotheses.texts(decoding, pad_id)
        first_B1 = torch.arange(batch, device=device)[:, None] * (len(logits_RV) // batch)
        logits_RV = model.next(
            hypotheses.ids_BKT[:, :, -1].flatten(), (first_B1 + parent_BK).flatten()
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Hypotheses:
    """The K best prefixes of every sample's text, best first."""

    ids_BKT: Tensor
    total_BK: Tensor
    """Sum of log-probabilities."""
    ended_BK: Tensor
    length_BK: Tensor
    """Tokens, including the closing one."""

    def extend(
        self, log_BKV: Tensor, decoding: Decoding, end_id: int, generator: torch.Generator
    ) -> tuple[Tensor, "_Hypotheses"]:
        """Return the parent of each new hypothesis, and the new hypotheses; finished ones repeat
        the closing token.
        """
        vocabulary = log_BKV.shape[2]
        stay_V = torch.full_like(log_BKV[0, 0], -torch.inf).index_fill(
            0, torch.tensor(end_id, device=log_BKV.device), 0
        )
        log_BKV = torch.where(self.ended_BK[:, :, None], stay_V, log_BKV)
        length_BK = self.length_BK + ~self.ended_BK
        total_BN = (self.total_BK[:, :, None] + log_BKV).flatten(1)
        if decoding.samples:
            place_BK = _sample(log_BKV, decoding.samples, generator)
        else:
            ranked_BN = total_BN / _penalty(length_BK, decoding.length_penalty).repeat_interleave(
                vocabulary, dim=1
            )
            place_BK = ranked_BN.topk(min(decoding.beams, ranked_BN.shape[1]), dim=1).indices
        parent_BK = place_BK // vocabulary
        ids_BK = place_BK % vocabulary
        before_BKT = self.ids_BKT.gather(
            1, parent_BK[:, :, None].expand(-1, -1, self.ids_BKT.shape[2])
        )
        return parent_BK, _Hypotheses(
            ids_BKT=torch.cat([before_BKT, ids_BK[:, :, None]], dim=2),
            total_BK=total_BN.gather(1, place_BK),
            ended_BK=ids_BK == end_id,
            length_BK=length_BK.gather(1, parent_BK),
        )

    def texts(self, decoding: Decoding, pad_id: int) -> Generated:
        """Return the best text of every sample, or all sampled texts."""
        columns = slice(None) if decoding.samples else slice(1)
        ended_R = self.ended_BK[:, columns].flatten()
        length_R = self.length_BK[:, columns].flatten()
        words_R = length_R - ended_R.long()
        width = int(words_R.max())
        mask_RT = torch.arange(width, device=words_R.device) < words_R[:, None]
        return Generated(
            ids_BT=self.ids_BKT[:, columns, :width].flatten(0, 1).masked_fill(~mask_RT, pad_id),
            mask_BT=mask_RT,
            score_B=self.total_BK[:, columns].flatten()
            / _penalty(length_R, decoding.length_penalty),
            ended_B=ended_R,
        )


def _sample(log_BKV: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    """(B, `samples`) int64: a random continuation, among all K * V, for each sampled text.

    In the first step all texts continue the only prefix.
    """
    batch, hypotheses, vocabulary = log_BKV.shape
    parent_K = torch.arange(samples, device=log_BKV.device) % hypotheses
    id_R = log_BKV[:, parent_K].flatten(0, 1).exp().multinomial(1, generator=generator)
    return parent_K * vocabulary + id_R.view(batch, samples)


def _repetition_penalty(ids_RT: Tensor, log_RV: Tensor, decoding: Decoding) -> Tensor:
    """(R, V): penalty of each token for the n-gram that it would repeat; infinite where this is
    forbidden.
    """
    length = decoding.block_ngrams
    tokens = ids_RT.shape[1]
    none_RV = torch.zeros_like(log_RV)
    if not length or tokens < length:
        return none_RV
    ngrams_RNL = ids_RT.unfold(1, length, 1)
    last_R1L = ids_RT[:, None, tokens - length + 1 :]
    repeated_RN = (ngrams_RNL[:, :, :-1] == last_R1L).all(dim=2)
    times_RV = none_RV.scatter_add(1, ngrams_RNL[:, :, -1], repeated_RN.to(none_RV.dtype))
    if decoding.ngram_penalty is None:
        return none_RV.masked_fill(times_RV > 0, torch.inf)
    return decoding.ngram_penalty * times_RV


def _penalty(length: Tensor, exponent: float) -> Tensor:
    return ((5.0 + length.float()) / 6.0) ** exponent
