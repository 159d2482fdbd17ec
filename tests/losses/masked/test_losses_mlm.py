"""Masked language modelling: value and gradient against plain sums, and batches without masked
tokens.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.loss_checks import check_precision, check_zero_with_gradient, compare
from torch import Tensor

from medvl import losses
from medvl.data.transforms import masked_text
from medvl.losses.masked import IGNORED, masked_positions
from medvl.models.base import sample_masked_words

BATCH, TOKENS, VOCABULARY = 5, 9, 40


def example(masked: float = 0.3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits_BTV = 3 * torch.randn(BATCH, TOKENS, VOCABULARY, generator=generator)
    labels_BT = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=generator)
    hidden_BT = torch.rand(BATCH, TOKENS, generator=generator) < masked
    return logits_BTV, labels_BT.masked_fill(~hidden_BT, IGNORED)


def naive_mlm(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    terms = []
    for row in range(len(labels_BT)):
        for place, label in enumerate(labels_BT[row].tolist()):
            if label != -100:
                scores_V = logits_BTV[row, place]
                terms.append(torch.log(torch.exp(scores_V).sum()) - scores_V[label])
    return torch.stack(terms).sum() / len(terms)


def naive_distilled(
    logits_BTV: Tensor, labels_BT: Tensor, teacher_BTV: Tensor, alpha: float
) -> Tensor:
    terms = []
    for row, place in (labels_BT != -100).nonzero().tolist():
        teacher_V = torch.exp(teacher_BTV[row, place]) / torch.exp(teacher_BTV[row, place]).sum()
        student_V = torch.exp(logits_BTV[row, place]) / torch.exp(logits_BTV[row, place]).sum()
        terms.append(-(teacher_V * torch.log(student_V)).sum())
    return (1 - alpha) * naive_mlm(logits_BTV, labels_BT) + alpha * torch.stack(terms).mean()


@pytest.mark.parametrize("masked", [0.05, 0.15, 1.0])
def test_mlm_is_the_mean_over_masked_positions(masked: float) -> None:
    logits_BTV, labels_BT = example(masked)
    compare(lambda x: losses.mlm(x, labels_BT), lambda x: naive_mlm(x, labels_BT), [logits_BTV])


def test_the_mean_is_over_positions_not_over_texts() -> None:
    logits_BTV, labels_BT = example()
    labels_BT[0], labels_BT[1:, 1:] = (
        3,
        IGNORED,
    )  # one text with all tokens masked, the others with at most one
    per_text = torch.stack(
        [losses.mlm(logits_BTV[[row]], labels_BT[[row]]) for row in range(BATCH)]
    )
    count_B = (labels_BT != IGNORED).sum(1)
    torch.testing.assert_close(
        losses.mlm(logits_BTV, labels_BT), (per_text * count_B).sum() / count_B.sum()
    )
    assert not torch.allclose(losses.mlm(logits_BTV, labels_BT), per_text[count_B > 0].mean())


def test_the_head_on_masked_positions_only_is_the_same_loss_with_the_same_gradients() -> None:
    _, labels_BT = example()
    states_BTD = torch.randn(BATCH, TOKENS, 16, generator=torch.Generator().manual_seed(1))
    heads = [torch.nn.Linear(16, VOCABULARY) for _ in range(2)]
    heads[1].load_state_dict(heads[0].state_dict())
    everywhere, selected = states_BTD.clone().requires_grad_(), states_BTD.clone().requires_grad_()
    index_N = masked_positions(labels_BT)
    full = losses.mlm(heads[0](everywhere), labels_BT)
    sparse = losses.mlm(heads[1](selected.flatten(0, 1)[index_N]), labels_BT.flatten()[index_N])
    torch.testing.assert_close(full, sparse)
    full.backward()
    sparse.backward()
    torch.testing.assert_close(everywhere.grad, selected.grad)
    torch.testing.assert_close(heads[0].weight.grad, heads[1].weight.grad)


def test_masked_positions_are_in_order() -> None:
    labels_BT = torch.tensor([[IGNORED, 7, IGNORED], [2, IGNORED, 0]])
    assert masked_positions(labels_BT).tolist() == [1, 3, 5]


def test_sums_by_text_add_up_to_the_mean_over_positions() -> None:
    generator = torch.Generator().manual_seed(4)
    logits_NV, labels_N = torch.randn(6, 9, generator=generator), torch.tensor([3, 1, 8, 0, 2, 5])
    text_N = torch.tensor([0, 0, 2, 2, 2, 3])
    sums_42 = losses.mlm_by_text(logits_NV, labels_N, text_N, 4)
    assert sums_42[:, 1].tolist() == [2, 0, 3, 1]
    assert sums_42[1, 0] == 0
    torch.testing.assert_close(sums_42[0, 0], 2 * losses.mlm(logits_NV[:2], labels_N[:2]))
    entropy, count = sums_42.sum(dim=0)
    torch.testing.assert_close(entropy / count, losses.mlm(logits_NV, labels_N))
    nothing = losses.mlm_by_text(logits_NV[:0].requires_grad_(), labels_N[:0], text_N[:0], 2)
    nothing.sum().backward()
    assert not nothing.any()
    with pytest.raises(ValueError, match="expected"):
        losses.mlm_by_text(logits_NV, labels_N, text_N[:2], 4)


def test_a_mean_count_below_one_divides_as_it_is() -> None:
    """Where only one of three micro-batches has a masked word, the mean of the three losses is
    that word's loss.
    """
    logits_NV, labels_N = torch.randn(1, 7), torch.tensor([3])
    share = torch.tensor(1 / 3)
    nothing = losses.mlm(logits_NV[:0], labels_N[:0], share)
    mean = torch.stack([losses.mlm(logits_NV, labels_N, share), nothing, nothing]).mean()
    torch.testing.assert_close(mean, losses.mlm(logits_NV, labels_N))
    other_NV = torch.randn(1, 7)
    apart = losses.symmetric_kl(logits_NV, other_NV)
    torch.testing.assert_close(losses.symmetric_kl(logits_NV, other_NV, share), 3 * apart)


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_mlm_distilled_equals_the_paper(alpha: float) -> None:
    logits_BTV, labels_BT = example()
    teacher_BTV, _ = example(seed=1)
    compare(
        lambda x: losses.mlm_distilled(x, labels_BT, teacher_BTV, alpha),
        lambda x: naive_distilled(x, labels_BT, teacher_BTV.double(), alpha),
        [logits_BTV],
    )


def test_no_gradient_reaches_the_teacher() -> None:
    logits_BTV, labels_BT = example()
    teacher_BTV = example(seed=1)[0].requires_grad_()
    losses.mlm_distilled(logits_BTV.requires_grad_(), labels_BT, teacher_BTV).backward()
    assert teacher_BTV.grad is None


@pytest.mark.parametrize("vocabulary", [1000, 30522])
def test_mlm_of_zero_logits_is_ln_v(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(64, vocabulary)
    torch.nn.init.normal_(head.weight, std=0.02, generator=generator)
    torch.nn.init.zeros_(head.bias)
    labels_N = torch.randint(vocabulary, (200,), generator=generator)
    loss = losses.mlm(head(torch.randn(200, 64, generator=generator)), labels_N)
    assert loss.item() == pytest.approx(math.log(vocabulary), rel=0.01)


def test_mlm_without_masked_tokens_is_zero() -> None:
    logits_BTV, labels_BT = example()
    nothing_BT = torch.full_like(labels_BT, IGNORED)
    check_zero_with_gradient(lambda x: losses.mlm(x, nothing_BT), logits_BTV)
    check_zero_with_gradient(lambda x: losses.mlm(x, labels_BT[0, :0]), logits_BTV[0, :0])
    check_zero_with_gradient(lambda x: losses.mlm_distilled(x, nothing_BT, logits_BTV), logits_BTV)


def test_mlm_without_masked_tokens_gives_the_head_a_gradient() -> None:
    head = torch.nn.Linear(16, VOCABULARY)
    losses.mlm(head(torch.zeros(0, 16)), torch.zeros(0, dtype=torch.int64)).backward()
    assert not head.weight.grad.any()


def test_positions_without_a_mask_are_ignored() -> None:
    logits_BTV, labels_BT = example()
    ruined_BTV = logits_BTV.clone()
    ruined_BTV[labels_BT == IGNORED] = torch.nan
    ruined_BTV.requires_grad_()
    value = losses.mlm(ruined_BTV, labels_BT)
    torch.testing.assert_close(value.detach(), losses.mlm(logits_BTV, labels_BT), rtol=0, atol=0)
    value.backward()
    assert torch.isfinite(ruined_BTV.grad).all()


def test_large_logits_stay_finite() -> None:
    logits_BTV, labels_BT = example()
    assert torch.isfinite(losses.mlm(1e4 * logits_BTV, labels_BT))


def test_mlm_ignores_autocast() -> None:
    logits_BTV, labels_BT = example()
    check_precision(lambda x: losses.mlm(x, labels_BT), logits_BTV)
    check_precision(
        lambda x, y: losses.mlm_distilled(x, labels_BT, y), logits_BTV, example(seed=1)[0]
    )


def test_masking_and_loss_use_the_same_ignored_label() -> None:
    assert masked_text.IGNORED == IGNORED


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: losses.mlm(torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.int64)),
            "last dimension V",
        ),
        (lambda: losses.mlm(torch.zeros(5), torch.tensor(1)), "last dimension V"),
        (
            lambda: losses.mlm_distilled(
                torch.zeros(2, 5), torch.zeros(2).long(), torch.zeros(2, 6)
            ),
            "equal shapes",
        ),
        (
            lambda: losses.mlm_distilled(
                torch.zeros(2, 5), torch.zeros(2).long(), torch.zeros(2, 5), 1.5
            ),
            "alpha must be within",
        ),
    ],
)
def test_mlm_rejects_invalid_arguments(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


class _Fixed(masked_text.TextMasking):
    """Returns the same masked texts each time."""

    def __init__(self, masked: masked_text.MaskedText) -> None:
        self._masked = masked

    def __call__(self, *inputs: Any) -> masked_text.MaskedText:
        return self._masked


def test_masked_positions_are_filled_up_without_effect() -> None:
    """Few numbers of masked words occur, for which code is compiled or CUDA graphs recorded."""
    generator = torch.Generator().manual_seed(2)
    ids_BT = torch.randint(5, VOCABULARY, (40, TOKENS), generator=generator)
    table_NV = torch.randn(40 * TOKENS, VOCABULARY, generator=generator)
    masked = masked_text.MaskedText(ids_BT, example(0.5)[1].repeat(8, 1))
    batch: Any = SimpleNamespace(
        ids_BT=ids_BT, mask_BT=torch.ones_like(ids_BT, dtype=torch.bool), has_text_B=None
    )
    words = sample_masked_words(batch, _Fixed(masked))
    position_N = masked_positions(words.labels_BT)
    assert len(words.position_N) % 64 == 0 < len(words.position_N) - len(position_N)
    assert torch.equal(words.position_N[: len(position_N)], position_N)
    compare(
        lambda x: losses.mlm(x[words.position_N], words.target_N),
        lambda x: F.cross_entropy(x[position_N], words.labels_BT.flatten()[position_N]),
        [table_NV],
    )
    text_N = torch.zeros_like(words.position_N)
    filled_12 = losses.mlm_by_text(table_NV[words.position_N], words.target_N, text_N, 1)
    assert filled_12[0, 1] == len(position_N)
