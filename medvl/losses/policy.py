"""Losses of training by rewards: of texts that a model sampled, weighted by how good they are.

The texts are sampled without gradients; these losses take the scores of one pass over them, so
that their gradient is that of the policy. Logits at place t are the scores of the token at place t.

N texts, G texts of one image, R rewards; the other letters as in `medvl.schema`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from medvl.losses.common import full_precision, mean_of, shapes

_SPREAD_EPS = 1e-4
"""Added to the standard deviation of a group, as in CXRMate-2's code."""


def self_critical(
    logits_BTV: Tensor,
    sampled_BT: Tensor,
    mask_BT: Tensor,
    reward_B: Tensor,
    baseline_B: Tensor | None = None,
    entropy_weight: float = 0.0,
) -> Tensor:
    """Self-critical sequence training (Rennie et al., arXiv 1612.00563), with the entropy of EAST.

    The mean over texts of (reward - baseline) * sum over tokens of -log p(token), minus
    `entropy_weight` times the mean over texts of the mean entropy of a token, in nats. Long texts
    weigh more: there is no division by their length. EAST (arXiv 2408.03500) has weight 0.05; its
    abstract names neither sign nor reduction, and only this sign keeps the entropy high.

    Args:
        logits_BTV: scores of each token of the sampled texts; words that can never be written may
            be -inf.
        sampled_BT: int64, the sampled tokens with their closing token.
        mask_BT: bool, True on real tokens. Padding may have any logits.
        reward_B, baseline_B: reward of each text, and that of the text that it is compared with,
            such as the greedy one; None: 0. They get no gradient.
        entropy_weight: weight of the entropy.

    Returns a scalar, of which texts without tokens are 0. Raises ValueError on inconsistent shapes.
    """
    if logits_BTV.shape[:-1] != sampled_BT.shape or sampled_BT.shape != mask_BT.shape:
        raise ValueError(
            f"expected logits (B, T, V), tokens and mask (B, T), got "
            f"{shapes(logits_BTV, sampled_BT, mask_BT)}"
        )
    for name, value_B in (("reward_B", reward_B), ("baseline_B", baseline_B)):
        if value_B is not None and value_B.shape != sampled_BT.shape[:1]:
            raise ValueError(f"expected {name} of {len(sampled_BT)} texts, got {shapes(value_B)}")
    mask_BT = mask_BT.bool()
    with full_precision(logits_BTV):
        log_BTV = log_probabilities(logits_BTV, mask_BT)
        advantage_B = reward_B.detach().to(log_BTV)
        if baseline_B is not None:
            advantage_B = advantage_B - baseline_B.detach().to(log_BTV)
        logp_BT = _chosen(log_BTV, sampled_BT, mask_BT)
        loss = -(advantage_B * logp_BT.sum(dim=1)).mean()
        if not entropy_weight:
            return loss
        return loss - entropy_weight * text_entropy(log_BTV, mask_BT).mean()


def log_probabilities(logits_BTV: Tensor, mask_BT: Tensor) -> Tensor:
    """(B, T, V), in float32 or float64: log-softmax; uniform where the mask is False."""
    precise = torch.promote_types(logits_BTV.dtype, torch.float32)
    return logits_BTV.to(precise).masked_fill(~mask_BT[..., None], 0.0).log_softmax(dim=-1)


def text_entropy(log_BTV: Tensor, mask_BT: Tensor) -> Tensor:
    """(B,): mean over the real tokens of each text of the entropy of their distribution, in nats;
    0 for a text without tokens.
    """
    # A word of probability 0 adds 0; 0 * -inf would be NaN, also in the gradient.
    finite_BTV = log_BTV.masked_fill(log_BTV.isneginf(), 0.0)
    entropy_BT = -(log_BTV.exp() * finite_BTV).sum(dim=-1).masked_fill(~mask_BT, 0.0)
    return mean_of(entropy_BT.sum(dim=1), mask_BT.sum(dim=1))


def token_log_probabilities(logits_BTV: Tensor, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(B, T): log-probability of each token; 0 where the mask is False."""
    with full_precision(logits_BTV):
        log_BTV = log_probabilities(logits_BTV, mask_BT)
        return _chosen(log_BTV, ids_BT, mask_BT)


def _chosen(log_BTV: Tensor, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    index_BT1 = ids_BT.masked_fill(~mask_BT, 0)[..., None]  # padding may be no word, such as -100
    return log_BTV.gather(-1, index_BT1).squeeze(-1).masked_fill(~mask_BT, 0.0)


def group_advantages(reward_RN: Tensor, weight_R: Tensor | Sequence[float], group: int) -> Tensor:
    """(N,): weighted sum of rewards, each of them standardised among the texts of one image.

    (r - mean) / (standard deviation + 1e-4), with the unbiased standard deviation. A reward that is
    equal for all texts of an image adds 0 to them.

    Args:
        reward_RN: rewards of N texts; those of one image are side by side.
        weight_R: weight of each reward.
        group: G, the number of texts of each image, at least 2.

    Raises ValueError on inconsistent shapes.
    """
    if reward_RN.ndim != 2 or group < 2 or reward_RN.shape[1] % group:
        raise ValueError(
            f"expected rewards (R, N) of groups of {group} texts, at least 2, got "
            f"{shapes(reward_RN)}"
        )
    reward_RN = reward_RN.detach()
    reward_RIG = reward_RN.to(torch.promote_types(reward_RN.dtype, torch.float32)).unflatten(
        1, (-1, group)
    )
    weight_R = torch.as_tensor(weight_R).to(reward_RIG)
    if weight_R.shape != reward_RN.shape[:1]:
        raise ValueError(f"expected weights of {len(reward_RN)} rewards, got {shapes(weight_R)}")
    centred_RIG = reward_RIG - reward_RIG.mean(dim=2, keepdim=True)
    advantage_RIG = centred_RIG / (reward_RIG.std(dim=2, keepdim=True) + _SPREAD_EPS)
    # Rounding of the mean must not become an advantage of equal texts.
    equal_RI1 = reward_RIG.amax(dim=2, keepdim=True) == reward_RIG.amin(dim=2, keepdim=True)
    advantage_RIG = advantage_RIG.masked_fill(equal_RI1, 0.0)
    return (weight_R[:, None] * advantage_RIG.flatten(1)).sum(dim=0)


def grpo(
    logp_NT: Tensor,
    old_logp_NT: Tensor,
    mask_NT: Tensor,
    advantage_N: Tensor,
    *,
    reference_NT: Tensor | None = None,
    epsilon: float = 0.2,
    beta: float = 0.04,
) -> Tensor:
    """Group-relative policy optimisation (Shao et al., arXiv 2402.03300, equation 3), with the
    reduction of CXRMate-2: the sum over all real tokens, divided by their number.

    Per token -min(ratio A, clip(ratio, 1 - epsilon, 1 + epsilon) A) + beta (exp(d) - d - 1), where
    ratio = exp(logp - old) and d = reference - logp.

    Args:
        logp_NT: log-probabilities of the tokens by the policy that is trained.
        old_logp_NT: by the policy that sampled them; stays the same for all updates of the texts.
        mask_NT: bool, True on real tokens. Padding may have any values.
        advantage_N: of each text (`group_advantages`).
        reference_NT: by the policy that training stays near; None: no such term.
        epsilon: how far the ratio may move an update.
        beta: weight of the distance to the reference.

    Returns a scalar, 0 with a zero gradient where no token is real. Raises ValueError on
    inconsistent shapes.
    """
    tensors = [logp_NT, old_logp_NT, mask_NT, *([] if reference_NT is None else [reference_NT])]
    if any(each.shape != logp_NT.shape for each in tensors) or advantage_N.shape != (len(logp_NT),):
        raise ValueError(
            f"expected values of (N, T) tokens and advantages (N,), got "
            f"{shapes(*tensors, advantage_N)}"
        )
    mask_NT = mask_NT.bool()
    with full_precision(logp_NT):
        logp_NT = _real(logp_NT, mask_NT)
        advantage_N1 = advantage_N.detach().to(logp_NT)[:, None]
        ratio_NT = (logp_NT - _real(old_logp_NT.detach(), mask_NT)).exp()
        near_NT = ratio_NT.clamp(1 - epsilon, 1 + epsilon)
        loss_NT = -torch.minimum(ratio_NT * advantage_N1, near_NT * advantage_N1)
        if reference_NT is not None:
            change_NT = _real(reference_NT.detach(), mask_NT) - logp_NT
            loss_NT = loss_NT + beta * (change_NT.exp() - change_NT - 1)
        return mean_of(loss_NT.masked_fill(~mask_NT, 0.0).sum(), mask_NT.sum())


def _real(value_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """Return float32 or float64 values, 0 where the mask is False."""
    precise = torch.promote_types(value_NT.dtype, torch.float32)
    return value_NT.to(precise).masked_fill(~mask_NT, 0.0)
