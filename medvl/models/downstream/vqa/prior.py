"""Answers that the words of a question suggest without its image, as the start of a classifier of
answers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from medvl.errors import ConfigError

# N training questions, U different ones, H buckets of tokens and pairs of tokens, V answers.

_BUCKETS = 4096
_LEAST = 1e-3
"""Bounds of a score before its logit, which are those of scores that a regression can give."""


class QuestionPrior(nn.Module):
    """Log-odds of every answer from the tokens of a question: ridge regression onto one-hot answers
    from counts of tokens and of pairs of adjacent tokens, in closed form.

    In training, the score of a question is that of the regression without this question
    (leave-one-out, from its leverage), so that what is added to it learns what the words cannot
    tell. It is the baseline `question_only` of `medvl eval vqa`, with tokens in place of words.
    """

    weight_HV: Tensor
    bias_V: Tensor
    key_U: Tensor
    leverage_U: Tensor

    def __init__(self, answers: int) -> None:
        super().__init__()
        self.register_buffer("weight_HV", torch.zeros(_BUCKETS, answers))
        self.register_buffer("bias_V", torch.zeros(answers))
        # Of the training questions, by the hash of their tokens; a checkpoint needs neither.
        self.register_buffer("key_U", torch.zeros(0, dtype=torch.int64), persistent=False)
        self.register_buffer("leverage_U", torch.zeros(0), persistent=False)

    @torch.no_grad()
    def fit(
        self, ids_NT: Tensor, mask_NT: Tensor, answers: Sequence[int], *, penalty: float = 1.0
    ) -> None:
        """Fit the regression to the answers of N questions, each the index of an answer.

        Raises ConfigError without a question.
        """
        if not answers:
            message = "a prior of questions needs training questions with an answer; got none"
            raise ConfigError(message, "empty", field="question_prior")
        device = self.bias_V.device
        rows_NT = ids_NT.masked_fill(~mask_NT, 0)
        unique_UT, row_N, count_U = torch.unique(
            rows_NT, dim=0, return_inverse=True, return_counts=True
        )
        total = len(answers)
        all_UH = _counts(unique_UT, unique_UT > 0).double()
        used_H = all_UH.any(dim=0)  # the other buckets keep a weight of 0
        counts_UH = all_UH[:, used_H]
        weight_U1 = count_U.double()[:, None]
        target_UV = torch.zeros(len(unique_UT), len(self.bias_V), dtype=torch.float64)
        one_N = torch.ones(total, dtype=torch.float64)
        target_UV.index_put_((row_N, torch.tensor(answers)), one_N, accumulate=True)
        mean_V = target_UV.sum(dim=0) / total
        mean_H = (weight_U1 * counts_UH).sum(dim=0) / total
        centred_UH = counts_UH - mean_H
        gram_HH = centred_UH.T @ (weight_U1 * centred_UH)
        gram_HH.diagonal().add_(penalty)
        root_HH = torch.linalg.cholesky(gram_HH)
        weight_HV = torch.cholesky_solve(centred_UH.T @ (target_UV - weight_U1 * mean_V), root_HH)
        self.weight_HV.zero_()
        self.weight_HV[used_H] = weight_HV.float().to(device)
        self.bias_V.copy_(mean_V - mean_H @ weight_HV)
        half_HU = torch.linalg.solve_triangular(root_HH, centred_UH.T, upper=False)
        leverage_U = half_HU.square().sum(dim=0) + 1 / total
        key_U, order_U = _keys(unique_UT, unique_UT > 0).sort()
        self.key_U = key_U.to(device)
        self.leverage_U = leverage_U[order_U].float().to(device)

    def forward(self, ids_BT: Tensor, mask_BT: Tensor, target_BV: Tensor | None = None) -> Tensor:
        """Return log-odds (B, V), float32; with the targets of training questions, without these
        questions.
        """
        score_BV = _counts(ids_BT, mask_BT) @ self.weight_HV + self.bias_V
        if target_BV is not None and len(self.key_U):
            key_B = _keys(ids_BT, mask_BT)
            place_B = torch.searchsorted(self.key_U, key_B).clamp(max=len(self.key_U) - 1)
            is_fitted_B = (self.key_U[place_B] == key_B) & (target_BV > 0).any(dim=1)
            leverage_B1 = (self.leverage_U[place_B] * is_fitted_B).clamp(max=0.99)[:, None]
            score_BV = (score_BV - leverage_B1 * target_BV) / (1 - leverage_B1)
        return score_BV.clamp(_LEAST, 1 - _LEAST).logit()


def _counts(ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return (B, H) float32: counts of tokens and of pairs of adjacent tokens, in buckets."""
    ids_BT = ids_BT.long()
    pair_BS = ids_BT[:, :-1] * 40_503 + ids_BT[:, 1:] + 1
    bucket_BN = torch.cat([ids_BT * 2_654_435_761, pair_BS * 2_246_822_519], dim=1)
    bucket_BN = (bucket_BN >> 9) % _BUCKETS
    is_real_BN = torch.cat([mask_BT, mask_BT[:, :-1] & mask_BT[:, 1:]], dim=1)
    counts_BH = torch.zeros(len(ids_BT), _BUCKETS, device=ids_BT.device)
    return counts_BH.scatter_add_(1, bucket_BN, is_real_BN.float())


def _keys(ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return (B,) int64, a hash of the tokens of each text that does not depend on padding."""
    place_T = torch.arange(1, ids_BT.shape[1] + 1, device=ids_BT.device)
    term_BT = (ids_BT.long() + 1) * (place_T * 6_364_136_223_846_793_005 + 1_442_695_040_888_963)
    return term_BT.masked_fill(~mask_BT, 0).sum(dim=1)
