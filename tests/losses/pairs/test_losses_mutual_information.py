"""Bounds of mutual information against their formulas, and the critic against concatenated
pairs.
"""

import math

import pytest
import torch
from helpers.loss_checks import check_precision, check_zero_with_gradient, compare
from torch import Tensor

from medvl import losses
from medvl.losses.pairs import mutual_information

SAME = torch.eye(6, dtype=torch.bool) | (torch.arange(6)[:, None] + torch.arange(6) == 5)
"""Pairs of one study among six."""


def scores(rows: int = 6, seed: int = 0) -> Tensor:
    return 2 * torch.randn(rows, rows, generator=torch.Generator().manual_seed(seed))


def naive_dv(scores_BB: Tensor, negative_BB: Tensor) -> Tensor:
    rows = range(len(scores_BB))
    negatives = [torch.exp(scores_BB[i, j]) for i in rows for j in rows if negative_BB[i, j]]
    return torch.stack([scores_BB[i, i] for i in rows]).mean() - torch.log(
        torch.stack(negatives).mean()
    )


def naive_info_nce(scores_BB: Tensor, negative_BB: Tensor) -> Tensor:
    bounds = []
    for i in range(len(scores_BB)):
        own = torch.exp(scores_BB[i, i])
        others = [torch.exp(scores_BB[i, j]) for j in range(len(scores_BB)) if negative_BB[i, j]]
        bounds.append(torch.log(own / ((own + sum(others)) / (1 + len(others)))))
    return torch.stack(bounds).mean()


def critic(hidden: tuple[int, ...] = (8, 6)) -> losses.SeparableCritic:
    torch.manual_seed(0)
    return losses.SeparableCritic(5, 4, hidden)


def concatenated(model: losses.SeparableCritic, image_ND: Tensor, text_MD: Tensor) -> Tensor:
    """Return the scores of pairs that are concatenated one by one."""
    rows = [
        torch.stack(
            [model.rest(model.first(torch.cat([image_D, text_D])))[0] for text_D in text_MD]
        )
        for image_D in image_ND
    ]
    return torch.stack(rows)


def features(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.fault("N1")
@pytest.mark.parametrize(
    "negative_BB", [~SAME, ~torch.eye(6, dtype=torch.bool)], ids=["studies", "others"]
)
def test_bounds_equal_their_formulas(negative_BB: Tensor) -> None:
    compare(
        lambda x: losses.dv_bound(x.diagonal(), x, negative_BB),
        lambda x: naive_dv(x, negative_BB),
        [scores()],
    )
    compare(
        lambda x: losses.info_nce_bound(x.diagonal(), x, negative_BB),
        lambda x: naive_info_nce(x, negative_BB),
        [scores()],
    )
    one = losses.dv_bound(scores().diagonal(), scores()[0, 1:2])
    torch.testing.assert_close(one, scores().diagonal().mean() - scores()[0, 1])
    listed = scores()[negative_BB]
    torch.testing.assert_close(
        losses.dv_bound(scores().diagonal(), listed),
        losses.dv_bound(scores().diagonal(), scores(), negative_BB),
    )


def test_info_nce_bound_is_ln_b_less_the_cross_entropy_of_a_direction() -> None:
    x_BB = scores()
    expected = math.log(6) - torch.nn.functional.cross_entropy(x_BB, torch.arange(6))
    torch.testing.assert_close(
        losses.info_nce_bound(x_BB.diagonal(), x_BB, ~torch.eye(6, dtype=torch.bool)), expected
    )


def test_bounds_differ_in_gradient() -> None:
    """In the released code the two options are one: without the positive in the sum, gradients
    are equal.
    """
    gradients = []
    for bound in (losses.dv_bound, losses.info_nce_bound):
        x_BB = scores().requires_grad_()
        bound(x_BB.diagonal(), x_BB, ~SAME).backward()
        assert x_BB.grad is not None
        gradients.append(x_BB.grad)
    assert (gradients[0] - gradients[1]).abs().max() > 0.01


def test_bounds_of_equal_scores_are_zero_and_info_nce_is_at_most_ln_k() -> None:
    negative_BB = ~torch.eye(6, dtype=torch.bool)
    for bound in (losses.dv_bound, losses.info_nce_bound):
        assert bound(
            torch.full((6,), 3.0), torch.full((6, 6), 3.0), negative_BB
        ).item() == pytest.approx(0, abs=1e-6)
    perfect_BB = 1e4 * torch.eye(6)
    assert losses.info_nce_bound(
        perfect_BB.diagonal(), perfect_BB, negative_BB
    ).item() == pytest.approx(math.log(6))
    assert losses.dv_bound(perfect_BB.diagonal(), perfect_BB, negative_BB).item() == pytest.approx(
        1e4
    )


def test_pair_without_negatives_is_left_out() -> None:
    x_BB, negative_BB = scores(), ~SAME
    negative_BB[2] = False
    kept = [0, 1, 3, 4, 5]
    actual = losses.info_nce_bound(x_BB.diagonal(), x_BB, negative_BB)
    torch.testing.assert_close(
        actual, losses.info_nce_bound(x_BB.diagonal()[kept], x_BB[kept], negative_BB[kept])
    )


def test_bounds_without_negatives_are_zero() -> None:
    none_BB = torch.zeros(6, 6, dtype=torch.bool)
    for bound in (losses.dv_bound, losses.info_nce_bound):
        check_zero_with_gradient(lambda x, bound=bound: bound(x.diagonal(), x, none_BB), scores())
        check_zero_with_gradient(bound, torch.ones(0), torch.ones(0, 0))
    check_zero_with_gradient(losses.dv_bound, torch.ones(0), torch.ones(3))
    check_zero_with_gradient(losses.dv_bound, torch.ones(3), torch.ones(0))


def test_masked_scores_may_be_non_finite_and_bounds_are_computed_in_float32() -> None:
    for bound in (losses.dv_bound, losses.info_nce_bound):
        own_B = scores().diagonal().clone()
        x_BB = scores().masked_fill(SAME, torch.nan).requires_grad_()
        value = bound(own_B, x_BB, ~SAME)
        torch.testing.assert_close(value, bound(own_B, scores(), ~SAME))
        value.backward()
        assert x_BB.grad is not None
        assert x_BB.grad.isfinite().all()
        check_precision(lambda x, bound=bound: bound(x.diagonal(), x, ~SAME), scores())


@pytest.mark.fault("N1")
@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("hidden", [(8, 6), (7,), (8, 7, 6)])
def test_critic_equals_concatenated_pairs(
    hidden: tuple[int, ...], again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In value and in the gradients of inputs and parameters, in chunks and recomputed."""
    if again:
        monkeypatch.setattr(mutual_information, "_CPU_CHUNK_BYTES", 3 * 4 * 4 * sum(hidden))
        monkeypatch.setattr(mutual_information, "_KEPT_BYTES", 0)
    model, weight_NM = critic(hidden), features(7, 4, seed=3)
    results = []
    for score in (model, lambda image, text: concatenated(model, image, text)):
        image_ND, text_MD = features(7, 5).requires_grad_(), features(4, 4, seed=1).requires_grad_()
        scores_NM = score(image_ND, text_MD)
        leaves = [image_ND, text_MD, *model.parameters()]
        results.append([scores_NM, *torch.autograd.grad((scores_NM * weight_NM).sum(), leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_local_critic_equals_its_formula(
    reduce: mutual_information.SentenceSum, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each sentence the best region, summed over sentences; the gradient is that of the
    maximum.
    """
    if again:
        monkeypatch.setattr(mutual_information, "_CPU_CHUNK_BYTES", 1)
        monkeypatch.setattr(mutual_information, "_KEPT_BYTES", 0)
    model, lengths = critic(), [3, 1, 2, 0]
    mask_MS = torch.arange(3) < torch.tensor(lengths)[:, None]
    weight_NM = features(5, 4, seed=3)

    def naive(regions_NPD: Tensor, sentences_MSD: Tensor) -> Tensor:
        rows = []
        for regions_PD in regions_NPD:
            row = []
            for sentences_SD, length in zip(sentences_MSD, lengths, strict=True):
                best = [
                    concatenated(model, regions_PD, sentences_SD[s : s + 1]).max()
                    for s in range(length)
                ]
                total = sum(best, sentences_MSD.new_zeros(()))
                row.append(total / max(length, 1) if reduce == "mean" else total)
            rows.append(torch.stack(row))
        return torch.stack(rows)

    results = []
    for score in (
        lambda regions, sentences: model.local(regions, sentences, mask_MS, reduce),
        naive,
    ):
        regions_NPD, sentences_MSD = (
            features(5, 6, 5).requires_grad_(),
            features(4, 3, 4, seed=1).requires_grad_(),
        )
        scores_NM = score(regions_NPD, sentences_MSD)
        leaves = [regions_NPD, sentences_MSD, *model.parameters()]
        results.append([scores_NM, *torch.autograd.grad((scores_NM * weight_NM).sum(), leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("garbage", [1e4, torch.nan])
def test_padding_sentences_do_not_change_the_local_critic(garbage: float) -> None:
    model, regions_NPD, sentences_MSD = critic(), features(2, 6, 5), features(3, 2, 4, seed=1)
    expected = model.local(regions_NPD, sentences_MSD)
    padded_MSD = torch.nn.functional.pad(
        sentences_MSD, (0, 0, 0, 3), value=garbage
    ).requires_grad_()
    mask_MS = torch.arange(5).expand(3, -1) < 2
    actual = model.local(regions_NPD, padded_MSD, mask_MS)
    torch.testing.assert_close(actual, expected)
    actual.sum().backward()
    assert padded_MSD.grad is not None
    assert padded_MSD.grad.isfinite().all()
    assert not padded_MSD.grad[~mask_MS].any()


def test_padding_sentences_are_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, regions_NPD, sentences_MSD = critic(), torch.randn(2, 3, 5), torch.randn(50, 4, 4)
    mask_MS = (
        torch.arange(4) < torch.arange(50)[:, None] % 2 + 1
    )  # 75 of 200 are real, in rows of 128
    seen, score = list[int](), model._score
    monkeypatch.setattr(
        model, "_score", lambda left, right: seen.append(len(right)) or score(left, right)
    )
    total_NM = model.local(regions_NPD, sentences_MSD, mask_MS)
    assert max(seen) == 128
    alone_N1 = model.local(regions_NPD, sentences_MSD[1:2, :2])
    torch.testing.assert_close(total_NM[:, 1:2], alone_N1)


def test_critic_has_the_published_size_and_takes_16_bits_and_empty_sides() -> None:
    assert sum(
        parameter.numel() for parameter in losses.SeparableCritic(768, 768).parameters()
    ) == (1536 * 1024 + 1024 + 1024 * 512 + 512 + 512 + 1)
    model, image_ND, text_MD = critic(), features(6, 5), features(3, 4, seed=1)
    plain = model(image_ND, text_MD)
    with torch.autocast("cpu", torch.bfloat16):
        halved = model(image_ND, text_MD)
        local = model.local(image_ND[:, None], text_MD[:, None])
    assert halved.dtype == local.dtype == torch.float32
    torch.testing.assert_close(halved, plain, rtol=0.1, atol=0.02)
    torch.testing.assert_close(local, plain, rtol=0.1, atol=0.02)
    assert model.bfloat16()(image_ND.bfloat16(), text_MD.bfloat16()).dtype == torch.float32
    assert critic()(image_ND[:0], text_MD).shape == (0, 3)
    assert critic()(image_ND, text_MD[:0]).shape == (6, 0)
    assert critic().local(image_ND[:0, None], text_MD[:, None]).shape == (0, 3)
    assert critic().local(image_ND[:, None], text_MD[:, None][:, :0]).tolist() == [[0.0] * 3] * 6


def test_bounds_and_critic_refuse_other_shapes() -> None:
    with pytest.raises(ValueError, match="mask"):
        losses.dv_bound(torch.ones(3), torch.ones(3, 3), torch.ones(3, dtype=torch.bool))
    for negatives in (torch.ones(4, 3), torch.ones(3)):
        with pytest.raises(ValueError, match="negatives"):
            losses.info_nce_bound(torch.ones(3), negatives)
    with pytest.raises(ValueError, match="widths"):
        critic()(torch.ones(3, 4), torch.ones(3, 5))
    with pytest.raises(ValueError, match="regions"):
        critic().local(torch.ones(3, 5), torch.ones(3, 1, 4))
    with pytest.raises(ValueError, match="mask_MS"):
        critic().local(torch.ones(3, 1, 5), torch.ones(3, 1, 4), torch.ones(3, 2, dtype=torch.bool))
