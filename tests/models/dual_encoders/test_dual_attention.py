"""Attention between sequences, pooling by attention and by sentence, against plain loops;
padding changes nothing.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.errors import raises
from torch import Tensor, nn

from medvl.errors import ConfigError
from medvl.models.dual_encoders.bases.local import SentencePool, pool_sentences
from medvl.models.dual_encoders.parts.layers import (
    AttentionPool,
    CrossAttention,
    attend,
    attention_weights,
    clip_to_percentiles,
)

MASK = torch.tensor([[True, True, False], [True, True, True], [False] * 3, [True, False, True]])
SENTENCES = torch.tensor(
    [[-1, 0, 0, 1, 1, -1, -1], [-1, 0, 1, 1, 3, 3, -1], [-1] * 7, [0, 0, 0, 0, 0, 0, 0]]
)
"""The second text has no token of its sentence 2, the third no sentence."""


def features(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def naive_attend(query_QE: Tensor, key_KE: Tensor, value_KD: Tensor, scale: float) -> Tensor:
    """One sample without padding."""
    rows = []
    for query_E in query_QE:
        exponentials = [torch.exp(scale * query_E @ key_E) for key_E in key_KE]
        weighted = [
            e / sum(exponentials) * value_D
            for e, value_D in zip(exponentials, value_KD, strict=True)
        ]
        rows.append(sum(weighted, value_KD.new_zeros(value_KD.shape[1])))
    return torch.stack(rows)


def check_padding(
    function: Callable[[Tensor, Tensor], Tensor], x_BND: Tensor, mask_BN: Tensor
) -> None:
    """Check that more padding, finite or not, changes neither the result nor the gradient."""
    results = []
    for extra, garbage in ((0, 0.0), (5, 1e4), (5, torch.nan)):
        longer_BN = F.pad(mask_BN, (0, extra))
        leaf = (
            F.pad(x_BND, (0, 0, 0, extra))
            .masked_fill(~longer_BN[:, :, None], garbage)
            .requires_grad_()
        )
        out = function(leaf, longer_BN)
        (out * features(*out.shape, seed=9)).sum().backward()
        assert leaf.grad is not None
        assert not leaf.grad[~longer_BN].any()
        results.append((out, leaf.grad[mask_BN.nonzero(as_tuple=True)]))
    for out, grad in results[1:]:
        torch.testing.assert_close(out, results[0][0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grad, results[0][1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_attend_equals_its_formula(scale: float) -> None:
    query_BQE, key_BKE, value_BKD = (
        features(4, 2, 5),
        features(4, 3, 5, seed=1),
        features(4, 3, 6, seed=2),
    )
    actual = attend(query_BQE, key_BKE, MASK, scale, value_BKD=value_BKD)
    for i, mask_K in enumerate(MASK):
        if mask_K.any():
            expected = naive_attend(query_BQE[i], key_BKE[i, mask_K], value_BKD[i, mask_K], scale)
            torch.testing.assert_close(actual[i], expected, rtol=1e-4, atol=1e-5)
    assert not actual[2].any()
    torch.testing.assert_close(
        attend(query_BQE, key_BKE, scale=scale),
        attend(query_BQE, key_BKE, None, scale, value_BKD=key_BKE),
    )


def test_attention_weights_sum_to_one_over_real_keys_and_are_float32() -> None:
    query_BQE, key_BKE = features(4, 2, 5), features(4, 3, 5, seed=1)
    plain = attention_weights(query_BQE, key_BKE, MASK, 10.0)
    torch.testing.assert_close(plain.sum(dim=2), MASK.any(dim=1).float()[:, None].expand(-1, 2))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(
            attention_weights(query_BQE, key_BKE, MASK, 10.0), plain, rtol=0, atol=0
        )
    assert attend(query_BQE.bfloat16(), key_BKE.bfloat16(), MASK).dtype == torch.float32
    assert attend(query_BQE, key_BKE[:, :0]).tolist() == [[[0.0] * 5] * 2] * 4


def test_padding_does_not_change_attention() -> None:
    query_BQE = features(4, 2, 5)
    check_padding(
        lambda key, mask: attend(query_BQE, key, mask, 3.0), features(4, 3, 5, seed=1), MASK
    )


def test_cross_attention_equals_its_formula() -> None:
    """In eval mode, where the norm does not depend on the other samples."""
    torch.manual_seed(0)
    cross = CrossAttention(6, temperature=0.5).eval()
    a_BND, b_BMD = features(4, 3, 6), features(4, 5, 6, seed=1)
    for_a, for_b = cross(a_BND, b_BMD, MASK)
    assert not for_a[~MASK].any()
    for i, mask_N in enumerate(MASK):
        a_ND, b_MD = a_BND[i, mask_N], b_BMD[i]
        scale = 1 / (0.5 * 6**0.5)
        sides = [(a_ND, b_MD, for_a[i, mask_N])] + (
            [(b_MD, a_ND, for_b[i])] if mask_N.any() else []
        )
        for query_QD, other_KD, actual in sides:
            if len(query_QD):
                attended = naive_attend(
                    cross.key(query_QD), cross.key(other_KD), cross.value(other_KD), scale
                )
                torch.testing.assert_close(
                    actual, cross.norm(cross.out(attended)), rtol=1e-4, atol=1e-5
                )


def test_padding_does_not_change_cross_attention() -> None:
    """In training mode, with the batch's own statistics; as queries and as keys."""
    torch.manual_seed(0)
    cross, b_BMD = CrossAttention(6), features(4, 5, 6, seed=1)
    for side in (0, 1):
        check_padding(
            lambda a, mask, side=side: cross(a, b_BMD, mask)[side][:, :3], features(4, 3, 6), MASK
        )


def test_attention_pool_equals_torchs_attention_of_the_mean() -> None:
    torch.manual_seed(0)
    pool, x_BND = AttentionPool(8, heads=2), features(4, 3, 8)
    pooled_BD, weight_BN = pool(x_BND, MASK)
    for i, mask_N in enumerate(MASK):
        if not mask_N.any():
            assert not pooled_BD[i].any()
            assert not weight_BN[i].any()
            continue
        x_1ND = x_BND[i : i + 1, mask_N]
        expected_11D, expected_11N = pool.attention(x_1ND.mean(dim=1, keepdim=True), x_1ND, x_1ND)
        torch.testing.assert_close(pooled_BD[i], expected_11D[0, 0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(weight_BN[i, mask_N], expected_11N[0, 0], rtol=1e-5, atol=1e-6)


def test_padding_does_not_change_attention_pooling() -> None:
    """In LoVT's released code the query is twice as large without padding as with as much
    padding again.
    """
    torch.manual_seed(0)
    pool = AttentionPool(8, heads=2)
    check_padding(lambda x, mask: pool(x, mask)[0], features(4, 3, 8), MASK)
    check_padding(lambda x, mask: pool(x, mask)[1][:, :3], features(4, 3, 8), MASK)


@pytest.mark.parametrize("module", [CrossAttention, AttentionPool])
def test_modules_run_under_autocast(module: type[nn.Module]) -> None:
    torch.manual_seed(0)
    instance, x_BND = module(8).eval(), features(4, 3, 8)
    arguments = (x_BND, x_BND, MASK, MASK) if module is CrossAttention else (x_BND, MASK)
    plain = instance(*arguments)[0]
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(instance(*arguments)[0].float(), plain, rtol=0.1, atol=0.03)


@pytest.mark.parametrize("pool", ["max", "mean"])
def test_pooled_sentences_equal_a_loop(pool: SentencePool) -> None:
    tokens_BTD = features(4, 7, 5)
    sentences_BSD, mask_BS = pool_sentences(tokens_BTD, SENTENCES, pool=pool)
    assert mask_BS.tolist() == [
        [True, True, False, False],
        [True, True, False, True],
        [False] * 4,
        [True, False, False, False],
    ]
    for i, sentence_T in enumerate(SENTENCES):
        for s in range(4):
            of_sentence = tokens_BTD[i, sentence_T == s]
            if len(of_sentence):
                expected = of_sentence.amax(dim=0) if pool == "max" else of_sentence.mean(dim=0)
                torch.testing.assert_close(sentences_BSD[i, s], expected)
            else:
                assert not sentences_BSD[i, s].any()


@pytest.mark.parametrize("pool", ["max", "mean"])
def test_tokens_outside_of_sentences_change_nothing(pool: SentencePool) -> None:
    inside_BT = SENTENCES >= 0

    def pooled(tokens: Tensor, mask: Tensor) -> Tensor:
        sentence_BT = F.pad(SENTENCES, (0, mask.shape[1] - 7), value=-1)
        return pool_sentences(tokens, sentence_BT, 4, pool)[0]

    check_padding(pooled, features(4, 7, 5), inside_BT)


@pytest.mark.parametrize("pool", ["max", "mean"])
def test_pooled_sentences_of_16_bits_and_of_no_sentence(pool: SentencePool) -> None:
    tokens_BTD = features(4, 7, 5).bfloat16()
    sentences_BSD, _ = pool_sentences(tokens_BTD, SENTENCES, 4, pool)
    assert sentences_BSD.dtype == torch.float32
    torch.testing.assert_close(
        sentences_BSD, pool_sentences(tokens_BTD.float(), SENTENCES, 4, pool)[0]
    )
    none_BT = torch.full((4, 7), -1)
    sentences_BSD, mask_BS = pool_sentences(tokens_BTD, none_BT, pool=pool)
    assert sentences_BSD.shape == (4, 0, 5)
    assert mask_BS.shape == (4, 0)


def test_unknown_pool_is_refused() -> None:
    with raises(ConfigError, "unknown_name", "pool", names="sum"):
        pool_sentences(features(4, 7, 5), SENTENCES, pool="sum")


def test_weights_are_limited_to_percentiles_of_the_real_items() -> None:
    weight_BN = features(4, 9).square()
    mask_BN = torch.arange(9) < torch.tensor([9, 6, 1, 0])[:, None]
    actual_BN = clip_to_percentiles(weight_BN.masked_fill(~mask_BN, torch.inf), mask_BN)
    for row, count in enumerate((9, 6, 1, 0)):
        known = weight_BN[row, :count].numpy()
        expected = known.clip(*np.quantile(known, [0.1, 0.9])) if count else known
        torch.testing.assert_close(
            actual_BN[row, :count], torch.from_numpy(expected.astype(np.float32))
        )
        assert not actual_BN[row, count:].any()
    assert clip_to_percentiles(weight_BN[:0], mask_BN[:0]).shape == (0, 9)
    assert clip_to_percentiles(None, mask_BN) is None
