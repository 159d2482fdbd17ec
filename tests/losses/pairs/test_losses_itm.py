"""Image-text matching: the loss against its formula, and the selection of pairs."""

import math
from collections.abc import Callable

import pytest
import torch
from helpers.loss_checks import check_precision, check_zero_with_gradient, compare
from hypothesis import given, settings, strategies as st
from torch import Tensor

from medvl import losses
from medvl.losses.pairs.blockwise import name_ids, same_pairs, text_ids
from medvl.losses.pairs.image_text import MatchingPairs, hard_pairs, random_pairs


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def only_self(batch: int) -> Tensor:
    return torch.eye(batch, dtype=torch.bool)


def naive_itm(logits_B2: Tensor, matched_B: Tensor) -> Tensor:
    total = logits_B2.new_zeros(())
    for scores, matched in zip(logits_B2, matched_B.tolist(), strict=True):
        total = total - torch.log(torch.exp(scores[int(matched)]) / torch.exp(scores).sum())
    return total / len(logits_B2)


def check_pairs(pairs: MatchingPairs, same_BB: Tensor) -> None:
    """Check that positives are rows with themselves, and that no negative is marked as the same."""
    assert len(pairs) == len(pairs.image_N) == len(pairs.text_N)
    assert torch.equal(pairs.image_N[pairs.matched_N], pairs.text_N[pairs.matched_N])
    assert not same_BB[pairs.image_N, pairs.text_N][~pairs.matched_N].any()


@pytest.mark.parametrize("batch", [1, 2, 7, 32])
def test_itm_equals_two_way_cross_entropy(batch: int) -> None:
    logits_B2 = 2 * torch.randn(batch, 2, generator=seeded(batch))
    matched_B = torch.rand(batch, generator=seeded(batch + 1)) < 0.5
    compare(lambda x: losses.itm(x, matched_B), lambda x: naive_itm(x, matched_B), [logits_B2])
    assert torch.equal(losses.itm(logits_B2, matched_B), losses.itm(logits_B2, matched_B.long()))


def test_column_one_is_the_match() -> None:
    logits_B2 = torch.tensor([[-10.0, 10.0]])
    assert losses.itm(logits_B2, torch.tensor([True])) < 1e-6
    assert losses.itm(logits_B2, torch.tensor([False])) > 10


def test_itm_of_zero_logits_is_ln_2() -> None:
    head = torch.nn.Linear(1536, 2)
    torch.nn.init.normal_(head.weight, std=0.02, generator=seeded())
    torch.nn.init.zeros_(head.bias)
    states_BD = torch.tanh(0.5 * torch.randn(512, 1536, generator=seeded(1)))
    loss = losses.itm(head(states_BD), torch.arange(512) < 256)
    assert loss.item() == pytest.approx(math.log(2), rel=0.1)
    assert losses.itm(torch.zeros(8, 2), torch.arange(8) < 4).item() == pytest.approx(math.log(2))


def test_itm_without_pairs_is_zero() -> None:
    check_zero_with_gradient(
        lambda x: losses.itm(x, torch.zeros(0, dtype=torch.bool)), torch.zeros(0, 2)
    )


def test_itm_ignores_autocast() -> None:
    matched_B = torch.arange(16) % 2 == 0
    check_precision(lambda x: losses.itm(x, matched_B), torch.randn(16, 2, generator=seeded()))


@pytest.mark.parametrize("batch", [2, 3, 8, 33, 256])
def test_half_of_the_texts_keep_their_image(batch: int) -> None:
    for seed in range(20):
        pairs = random_pairs(only_self(batch), seeded(seed))
        check_pairs(pairs, only_self(batch))
        assert torch.equal(pairs.text_N, torch.arange(batch))
        assert int(pairs.matched_N.sum()) == batch // 2


def repeated(same_BB: Tensor, times: int) -> Tensor:
    """Rows that draw from a copy of the batch each, so that one call draws many times."""
    return torch.block_diag(*[(~same_BB).int()] * times) == 0


def counts(rows_N: Tensor, columns_N: Tensor, batch: int) -> Tensor:
    """Return (B, B) float: how often each row of a repeated batch has drawn each column."""
    cells_N = rows_N % batch * batch + columns_N % batch
    return torch.bincount(cells_N, minlength=batch**2).reshape(batch, batch).float()


def test_positives_and_negatives_are_drawn_uniformly() -> None:
    batch, times, draws = 6, 20, 6000
    same_BB = only_self(batch)
    same_BB[0, 1] = same_BB[1, 0] = True
    matched_TB, wrong_BB = torch.zeros(times, batch), torch.zeros(batch, batch)
    generator, same_NN = seeded(), repeated(same_BB, times)
    for _ in range(draws // times):
        pairs = random_pairs(same_NN, generator)
        matched_TB += pairs.matched_N.reshape(times, batch)
        wrong_N = ~pairs.matched_N
        wrong_BB += counts(pairs.text_N[wrong_N], pairs.image_N[wrong_N], batch)
    half_TB = torch.full((times, batch), 0.5)
    torch.testing.assert_close(matched_TB / (draws // times), half_TB, rtol=0, atol=0.15)
    torch.testing.assert_close(matched_TB.sum(0) / draws, half_TB[0], rtol=0, atol=0.03)
    even_BB = (~same_BB).float() / (~same_BB).sum(1, keepdim=True)
    torch.testing.assert_close(wrong_BB / wrong_BB.sum(1, keepdim=True), even_BB, rtol=0, atol=0.04)


def test_rows_without_a_negative_stay_positive() -> None:
    """Rows of one study have no negative; if fewer than half of the rows have one, all of these
    are negatives.
    """
    for seed in range(20):
        assert random_pairs(torch.ones(4, 4, dtype=torch.bool), seeded(seed)).matched_N.all()
        same_BB = same_pairs(torch.tensor([0, 0, 0, 0, 0, 1]))
        pairs = random_pairs(same_BB, seeded(seed))
        check_pairs(pairs, same_BB)
        assert int(pairs.matched_N.sum()) == 3
        same_BB = only_self(8)
        same_BB[:6] = same_BB[:, :6] = (
            True  # six rows are the same as all: the other two are the negatives
        )
        pairs = random_pairs(same_BB, seeded(seed))
        check_pairs(pairs, same_BB)
        assert pairs.matched_N.tolist() == [True] * 6 + [False] * 2


@settings(max_examples=60, deadline=None)
@given(groups=st.lists(st.integers(0, 4), min_size=0, max_size=12), seed=st.integers(0, 2**31))
def test_no_negative_is_a_positive(groups: list[int], seed: int) -> None:
    same_BB = same_pairs(torch.tensor(groups, dtype=torch.int64))
    similarity_BB = 100 * torch.randn(same_BB.shape, generator=seeded(seed))
    pairs = random_pairs(same_BB, seeded(seed))
    check_pairs(pairs, same_BB)
    possible = int((~same_BB).any(1).sum())
    assert int((~pairs.matched_N).sum()) == min(possible, len(groups) - len(groups) // 2)
    pairs = hard_pairs(similarity_BB, same_BB, seeded(seed))
    check_pairs(pairs, same_BB)
    assert len(pairs) == len(groups) + 2 * possible
    assert pairs.matched_N[: len(groups)].all()


def test_hard_negatives_follow_the_softmax_over_allowed_rows() -> None:
    batch, times, draws = 5, 20, 8000
    same_BB = only_self(batch)
    same_BB[0, 3] = same_BB[3, 0] = True
    similarity_BB = torch.randn(batch, batch, generator=seeded(1)) + 4 * torch.eye(batch)
    expected_BB = (
        similarity_BB.softmax(1) * ~same_BB
    )  # as published: zero what is excluded, then draw by the rest
    expected_BB /= expected_BB.sum(1, keepdim=True)
    expected_images_BB = similarity_BB.T.softmax(1) * ~same_BB.T
    expected_images_BB /= expected_images_BB.sum(1, keepdim=True)
    texts_BB, images_BB = torch.zeros(batch, batch), torch.zeros(batch, batch)
    generator, same_NN = seeded(), repeated(same_BB, times)
    similarity_NN = similarity_BB.repeat(times, times)
    for _ in range(draws // times):
        pairs = hard_pairs(similarity_NN, same_NN, generator)
        second, third = slice(times * batch, 2 * times * batch), slice(2 * times * batch, None)
        images_BB += counts(pairs.text_N[second], pairs.image_N[second], batch)
        texts_BB += counts(pairs.image_N[third], pairs.text_N[third], batch)
    torch.testing.assert_close(texts_BB / draws, expected_BB, rtol=0, atol=0.025)
    torch.testing.assert_close(images_BB / draws, expected_images_BB, rtol=0, atol=0.025)


def test_a_floor_makes_dissimilar_rows_negatives_too() -> None:
    """MUMC: softmax over the whole row + 1e-4, then the diagonal is zeroed. The two negatives
    here have 1e-4 each.
    """
    similarity_BB = torch.tensor([[0.0, -500.0, -1000.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    generator = seeded()
    drawn = [
        int(hard_pairs(similarity_BB, only_self(3), generator, 1e-4).text_N[6]) for _ in range(400)
    ]
    assert sum(text == 1 for text in drawn) / 400 == pytest.approx(0.5, abs=0.08)
    similarity_BB = torch.tensor([[5.0, 4.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    weights_B = (similarity_BB[0].softmax(0) + 0.1)[1:]
    drawn = [
        int(hard_pairs(similarity_BB, only_self(3), generator, 0.1).text_N[6]) for _ in range(400)
    ]
    assert sum(text == 1 for text in drawn) / 400 == pytest.approx(
        float(weights_B[0] / weights_B.sum()), abs=0.08
    )


def test_each_row_gives_three_pairs() -> None:
    pairs = hard_pairs(torch.zeros(4, 4), only_self(4), seeded())
    check_pairs(pairs, only_self(4))
    assert len(pairs) == 12
    assert pairs.matched_N.tolist() == [True] * 4 + [False] * 8
    assert pairs.text_N[4:8].tolist() == pairs.image_N[8:].tolist() == [0, 1, 2, 3]


def test_a_saturated_row_prefers_the_most_similar_negative() -> None:
    """The softmax is 1 on the diagonal, so zeroing it leaves zeros, which `torch.multinomial`
    rejects.
    """
    similarity_BB = torch.tensor([[0.0, -500.0, -1000.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    zeroed_BB = similarity_BB.softmax(1).fill_diagonal_(0)
    with pytest.raises(RuntimeError):
        torch.multinomial(zeroed_BB, 1)
    for seed in range(20):
        pairs = hard_pairs(similarity_BB, only_self(3), seeded(seed))
        assert pairs.text_N[6] == 1


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_similarities_are_drawn_without_an_error(value: float) -> None:
    pairs = hard_pairs(torch.full((4, 4), value), only_self(4), seeded())
    check_pairs(pairs, only_self(4))


def test_rows_that_are_all_the_same_have_no_hard_negative() -> None:
    for same_BB in (torch.ones(1, 1, dtype=torch.bool), torch.ones(4, 4, dtype=torch.bool)):
        pairs = hard_pairs(torch.zeros(same_BB.shape), same_BB, seeded())
        assert pairs.matched_N.all()
        assert len(pairs) == len(same_BB)


def test_drawing_uses_float32_and_no_gradient() -> None:
    similarity_BB = torch.randn(6, 6, generator=seeded()).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        pairs = hard_pairs(similarity_BB, only_self(6), seeded(1))
    assert not pairs.image_N.requires_grad
    assert torch.equal(pairs.text_N, hard_pairs(similarity_BB, only_self(6), seeded(1)).text_N)


def test_pairs_depend_on_the_generator_only() -> None:
    for draw in (
        lambda g: random_pairs(only_self(64), g),
        lambda g: hard_pairs(torch.zeros(64, 64), only_self(64), g),
    ):
        assert torch.equal(draw(seeded(3)).image_N, draw(seeded(3)).image_N)
        assert not torch.equal(draw(seeded(3)).image_N, draw(seeded(4)).image_N)


def test_text_ids_compare_tokens_without_padding() -> None:
    ids_BT = torch.tensor([[2, 7, 3, 0, 0], [2, 8, 3, 0, 0], [2, 7, 3, 9, 9], [2, 7, 3, 9, 9]])
    mask_BT = torch.tensor(
        [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    ).bool()
    group_B = text_ids(ids_BT, mask_BT)
    assert group_B[0] == group_B[2]  # what stands in the padding does not count
    assert len(set(group_B.tolist())) == 3
    assert text_ids(ids_BT[:0], mask_BT[:0]).shape == (0,)


def test_name_ids_are_stable() -> None:
    ids_B = name_ids(["s1", "s2", "s1"])
    assert ids_B[0] == ids_B[2] != ids_B[1]
    assert ids_B.dtype == torch.int64
    assert (ids_B >= 0).all()
    assert name_ids([]).shape == (0,)
    assert (
        name_ids(["s1"]).item() == 4958643428320449706
    )  # no process and no version gives another number


def test_same_pairs_joins_groups() -> None:
    same_BB = same_pairs(torch.tensor([0, 0, 1, 2]), torch.tensor([5, 6, 6, 7]))
    assert same_BB.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: losses.itm(torch.zeros(4, 3), torch.zeros(4)), "logits \\(B, 2\\)"),
        (lambda: losses.itm(torch.zeros(4, 2), torch.zeros(3)), "logits \\(B, 2\\)"),
        (lambda: random_pairs(torch.ones(2, 3, dtype=torch.bool), seeded()), "bool square"),
        (lambda: random_pairs(torch.ones(2, 2), seeded()), "bool square"),
        (lambda: hard_pairs(torch.zeros(3, 3), only_self(2), seeded()), "similarity is"),
        (lambda: same_pairs(), "one length"),
        (lambda: same_pairs(torch.zeros(2), torch.zeros(3)), "one length"),
    ],
)
def test_itm_rejects_invalid_arguments(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
