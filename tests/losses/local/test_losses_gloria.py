"""GLoRIA's local loss against the paper's equations in plain loops, in value and gradient."""

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.loss_checks import check_precision, check_zero_with_gradient, compare
from helpers.train_fakes import one_rank
from torch import Tensor

from medvl import losses
from medvl.losses.local import gloria
from medvl.losses.local.gloria import WordPool, gloria_attention, gloria_contrast, gloria_similarity
from medvl.train.parallel.distributed import machine_settings

LENGTHS = [3, 7, 1, 5, 7, 2]
"""Words of the texts: unequal numbers, two equal texts."""


def naive_attention(regions_PE: Tensor, words_WE: Tensor, temp1: float) -> Tensor:
    """Return (W, P) by equations 2 and 3: each region's softmax over words, then each word's
    softmax over regions.
    """
    exponentials_WP = torch.exp(words_WE @ regions_PE.T)
    weights_WP = torch.exp(temp1 * exponentials_WP / exponentials_WP.sum(0))
    return weights_WP / weights_WP.sum(1, keepdim=True)


def naive_similarity(
    regions_PE: Tensor, words_WE: Tensor, temp1: float, temp2: float, pool: WordPool
) -> Tensor:
    """Return equations 4 to 6 for one image and one text without padding."""
    contexts_WE = naive_attention(regions_PE, words_WE, temp1) @ regions_PE
    products_W = (contexts_WE * words_WE).sum(1)
    matches_W = products_W / (contexts_WE.norm(dim=1) * words_WE.norm(dim=1))
    scaled = torch.exp(temp2 * matches_W)
    return torch.log({"sum": scaled.sum(), "mean": scaled.mean(), "max": scaled.max()}[pool])


def naive_similarities(
    regions_NPE: Tensor,
    words_MWE: Tensor,
    lengths: list[int],
    temp1: float = 4.0,
    temp2: float = 5.0,
    pool: WordPool = "sum",
) -> Tensor:
    """The double loop over images and texts."""
    rows = []
    for regions_PE in regions_NPE:
        texts = zip(words_MWE, lengths, strict=True)
        row = [
            naive_similarity(regions_PE, words_WE[:length], temp1, temp2, pool)
            for words_WE, length in texts
        ]
        rows.append(torch.stack(row))
    return torch.stack(rows)


def naive_contrast(similarity_BB: Tensor, temp3: float = 10.0) -> Tensor:
    """Return the sum of both directions of equation 7, with its ratio of exponentials."""
    exponential_BB = torch.exp(temp3 * (similarity_BB - similarity_BB.max()))
    total = similarity_BB.new_zeros(())
    for i in range(len(similarity_BB)):
        total = total - torch.log(exponential_BB[i, i] / exponential_BB[i].sum())
        total = total - torch.log(exponential_BB[i, i] / exponential_BB[:, i].sum())
    return total / len(similarity_BB)


def pairs(
    lengths: list[int], regions: int = 9, dim: int = 16, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return regions, words with random padding, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    regions_BPE = torch.randn(len(lengths), regions, dim, generator=generator) / 2
    words_BWE = torch.randn(len(lengths), max(*lengths, 1), dim, generator=generator)
    return regions_BPE, words_BWE, torch.arange(words_BWE.shape[1]) < torch.tensor(lengths)[:, None]


def both(*arguments: Any, **options: Any) -> Tensor:
    """Return the sum of both directions, as in GLoRIA."""
    image_to_text, text_to_image = losses.gloria_local(*arguments, **options)
    return image_to_text + text_to_image


@functools.cache
def exact(regions: int) -> list[Tensor]:
    """Return the loss of `pairs` by the paper's equations, in float64, and its gradients for
    regions and words.
    """
    leaves = [tensor.double().requires_grad_() for tensor in pairs(LENGTHS, regions)[:2]]
    value = naive_contrast(naive_similarities(*leaves, LENGTHS))
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def with_gradients(inputs: tuple[Tensor, Tensor, Tensor], **options: Any) -> list[Tensor]:
    """Return the loss and its gradients for regions and words."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs[:2]]
    value = both(*leaves, inputs[2], **options)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


@pytest.mark.fault("N1")
@pytest.mark.parametrize("regions", [9, 24], ids=["by gram", "by context"])  # of 16 dimensions
def test_gloria_local_equals_the_paper(regions: int) -> None:
    regions_BPE, words_BWE, mask_BW = pairs(LENGTHS, regions)
    compare(
        lambda region, word: both(region, word, mask_BW),
        lambda region, word: naive_contrast(naive_similarities(region, word, LENGTHS)),
        [regions_BPE, words_BWE],
    )


@pytest.mark.fault("N4")
@pytest.mark.parametrize("regions", [9, 24], ids=["by gram", "by context"])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize(("precision", "near"), [("fp32", 1e-5), ("bf16", 5e-3)])
def test_gloria_local_equals_the_paper_on_a_device(
    regions: int,
    again: bool,
    precision: str,
    near: float,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a run in 16 bits as well, which multiplies float32 in TF32 on a GPU. Relative distances
    of all values.
    """
    if again:
        monkeypatch.setattr(gloria, "_KEPT_BYTES", 0)
    inputs = pairs(LENGTHS, regions)
    ranks = one_rank(device)
    with (
        machine_settings(ranks, 1, False, precision),
        torch.autocast(device.type, torch.bfloat16, precision == "bf16"),
    ):
        placed = tuple(tensor.to(device) for tensor in inputs)
        for chunk in (None, 4):
            for ours, theirs in zip(
                with_gradients(placed, chunk=chunk), exact(regions), strict=True
            ):
                assert (ours.cpu() - theirs).norm() < near * theirs.norm()


@pytest.mark.fault("N1")
@pytest.mark.parametrize("regions", [9, 24], ids=["by gram", "by context"])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
def test_chunks_do_not_change_the_loss(
    regions: int, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = pairs(LENGTHS, regions)
    whole = with_gradients(inputs)
    if again:
        monkeypatch.setattr(gloria, "_KEPT_BYTES", 0)
    for chunk in (1, 2, 4, 5, 6, 100):
        for ours, theirs in zip(with_gradients(inputs, chunk=chunk), whole, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.fault("N1")
@pytest.mark.parametrize("regions", [9, 24], ids=["by gram", "by context"])
@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
def test_padded_regions_and_words_do_not_change_the_loss(
    regions: int, chunk: int | None, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU."""
    inputs = pairs(LENGTHS, regions)
    plain = with_gradients(inputs, chunk=chunk)
    compared: list[tuple[int, ...]] = []
    compute = gloria._compare

    def watched(*arguments: Any) -> Tensor:
        compared.append((arguments[0].shape[1], arguments[2].shape[1]))
        return compute(*arguments)

    monkeypatch.setattr(gloria, "_compare", watched)
    monkeypatch.setattr(gloria, "_MULTIPLE", 8)
    if again:
        monkeypatch.setattr(gloria, "_KEPT_BYTES", 0)
    for ours, theirs in zip(with_gradients(inputs, chunk=chunk), plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)
    assert set(compared) == {(regions + -regions % 8, 8)}


@pytest.mark.parametrize("temps", [(4.0, 5.0, 10.0), (1.0, 1.0, 1.0), (9.0, 2.0, 20.0)])
def test_temperatures_are_applied_as_in_the_paper(temps: tuple[float, float, float]) -> None:
    temp1, temp2, temp3 = temps
    regions_BPE, words_BWE, mask_BW = pairs([4, 2, 6])
    compare(
        lambda region, word: both(region, word, mask_BW, temp1, temp2, temp3),
        lambda region, word: naive_contrast(
            naive_similarities(region, word, [4, 2, 6], temp1, temp2), temp3
        ),
        [regions_BPE, words_BWE],
    )
    if temps == (4.0, 5.0, 10.0):
        torch.testing.assert_close(
            losses.gloria_local(regions_BPE, words_BWE, mask_BW),
            losses.gloria_local(regions_BPE, words_BWE, mask_BW, temp1=4.0, temp2=5.0, temp3=10.0),
        )


@pytest.mark.parametrize("pool", ["sum", "mean", "max"])
def test_similarity_compares_any_images_with_any_texts(pool: WordPool) -> None:
    regions_NPE = pairs([1, 1, 1, 1])[0]
    _, words_MWE, mask_MW = pairs(LENGTHS, seed=1)
    weight_NM = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    compare(
        lambda region, word: (
            gloria_similarity(region, word, mask_MW, pool=pool, chunk=4) * weight_NM
        ).sum(),
        lambda region, word: (
            naive_similarities(region, word, LENGTHS, pool=pool) * weight_NM
        ).sum(),
        [regions_NPE, words_MWE],
    )
    assert gloria_similarity(regions_NPE, words_MWE[:0], mask_MW[:0]).shape == (4, 0)
    assert gloria_similarity(regions_NPE[:0], words_MWE, mask_MW).shape == (0, 6)


def test_chunk_size_follows_the_memory_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of short texts hold more texts; with too small a budget a chunk holds one."""
    regions_BPE, words_BWE, mask_BW = pairs(LENGTHS)
    seen: list[tuple[int, ...]] = []
    compute = gloria._compare

    def watched(*inputs: Any) -> Tensor:
        seen.append(tuple(inputs[3].shape))
        return compute(*inputs)

    monkeypatch.setattr(gloria, "_compare", watched)
    whole = gloria_similarity(regions_BPE, words_BWE, mask_BW)
    monkeypatch.setattr(gloria, "_CHUNK_BYTES", gloria._CHUNK_TENSORS * 4 * 6 * 9 * 14)  # 14 words
    torch.testing.assert_close(gloria_similarity(regions_BPE, words_BWE, mask_BW), whole)
    monkeypatch.setattr(gloria, "_CHUNK_BYTES", 1)
    torch.testing.assert_close(gloria_similarity(regions_BPE, words_BWE, mask_BW), whole)
    assert seen == [(6, 7), (2, 7), (2, 5), (2, 2), (1, 7), (1, 7), (1, 5), (1, 3), (1, 2), (1, 1)]


@pytest.mark.parametrize("garbage", [1e4, torch.inf, torch.nan])
def test_padding_does_not_change_the_loss(garbage: float) -> None:
    """GLoRIA's zero-shot code attends to padding, which raises a text's score from -2.6 to 0."""
    regions_BPE, words_BWE, mask_BW = pairs(LENGTHS)
    clean = gloria_similarity(regions_BPE, words_BWE, mask_BW)
    longer_BWE = F.pad(words_BWE, (0, 0, 0, 5)).masked_fill(
        ~F.pad(mask_BW, (0, 5))[:, :, None], garbage
    )
    longer_BWE.requires_grad_()
    actual = gloria_similarity(regions_BPE, longer_BWE, F.pad(mask_BW, (0, 5)))
    torch.testing.assert_close(actual, clean, rtol=0, atol=0)
    actual.square().sum().backward()
    assert longer_BWE.grad is not None
    assert longer_BWE.grad.isfinite().all()
    assert not longer_BWE.grad[~F.pad(mask_BW, (0, 5))].any()
    for i, length in enumerate(LENGTHS):  # nor does the company
        alone = gloria_similarity(
            regions_BPE, words_BWE[i : i + 1, :length], mask_BW[i : i + 1, :length]
        )
        torch.testing.assert_close(alone[:, 0], clean[:, i], rtol=1e-5, atol=1e-6)


def test_masks_may_have_gaps() -> None:
    regions_BPE, words_BWE, mask_BW = pairs(LENGTHS)
    mask_BW[1, [0, 3]] = False
    actual = gloria_similarity(regions_BPE, words_BWE, mask_BW)[:, 1]
    kept_1WE = words_BWE[1:2, mask_BW[1]]
    expected = gloria_similarity(regions_BPE, kept_1WE, torch.ones(1, 5, dtype=torch.bool))[:, 0]
    torch.testing.assert_close(actual, expected)


def test_a_text_without_words_is_left_out() -> None:
    lengths = [3, 0, 7, 5, 0]
    kept = [0, 2, 3]
    regions_BPE, words_BWE, mask_BW = pairs(lengths)
    compare(
        lambda region, word: both(region, word, mask_BW, chunk=2),
        lambda region, word: (
            naive_contrast(naive_similarities(region[kept], word[kept], [3, 7, 5]))
            + 0 * (region.sum() + word.sum())
        ),
        [regions_BPE, words_BWE],
    )
    torch.testing.assert_close(
        gloria_similarity(regions_BPE, words_BWE, mask_BW)[:, [1, 4]],
        torch.full((5, 2), -5.0),
        rtol=0,
        atol=0,
    )


def test_loss_without_any_word_is_zero() -> None:
    regions_BPE, words_BWE, mask_BW = pairs([0, 0])
    check_zero_with_gradient(
        lambda region, word: both(region, word, mask_BW), regions_BPE, words_BWE
    )
    none_MWE, none_MW = words_BWE[:, :0], mask_BW[:, :0]
    assert gloria_similarity(regions_BPE, none_MWE, none_MW).tolist() == [
        [-5.0, -5.0],
        [-5.0, -5.0],
    ]


def test_loss_of_a_single_pair_is_zero() -> None:
    regions_BPE, words_BWE, mask_BW = pairs([4])
    assert [loss.item() for loss in losses.gloria_local(regions_BPE, words_BWE, mask_BW)] == [0, 0]


def test_zero_vectors_have_a_finite_gradient() -> None:
    regions_BPE, words_BWE, mask_BW = pairs([2, 3])
    regions_BPE[0] = 0
    words_BWE[1, 0] = 0
    leaves = [regions_BPE.requires_grad_(), words_BWE.requires_grad_()]
    both(*leaves, mask_BW).backward()
    assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in leaves)


def test_large_scores_stay_finite() -> None:
    regions_BPE, words_BWE, mask_BW = pairs(LENGTHS)
    leaves = [(30 * regions_BPE).requires_grad_(), (30 * words_BWE).requires_grad_()]
    total = both(*leaves, mask_BW)
    total.backward()
    assert total.isfinite()
    assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in leaves)


def test_loss_of_random_embeddings_is_near_ln_b() -> None:
    """With unrelated embeddings and equally many words in every text."""
    batch = 32
    regions_BPE, words_BWE, mask_BW = pairs([20] * batch, regions=49, dim=256)
    for loss in losses.gloria_local(regions_BPE, words_BWE, mask_BW):
        assert loss.item() == pytest.approx(math.log(batch), abs=0.4)


def test_the_first_loss_is_image_to_text() -> None:
    similarity_BB = torch.tensor([[1.0, 0.0], [3.0, 2.0]])
    image_to_text, text_to_image = gloria_contrast(
        similarity_BB, torch.ones(2, dtype=torch.bool), 1.0
    )
    assert image_to_text.item() == pytest.approx(
        (math.log1p(math.exp(-1)) + math.log1p(math.exp(1))) / 2
    )
    assert text_to_image.item() == pytest.approx(
        (math.log1p(math.exp(2)) + math.log1p(math.exp(-2))) / 2
    )


def test_attention_equals_that_of_the_similarity() -> None:
    regions_BPE, words_BWE, mask_BW = pairs(LENGTHS)
    attention_BWP = gloria_attention(regions_BPE, words_BWE, mask_BW)
    for i, length in enumerate(LENGTHS):
        expected = naive_attention(regions_BPE[i].double(), words_BWE[i, :length].double(), 4.0)
        torch.testing.assert_close(
            attention_BWP[i, :length].double(), expected, rtol=1e-5, atol=1e-7
        )
    assert not attention_BWP[~mask_BW].any()
    torch.testing.assert_close(attention_BWP.sum(dim=2), mask_BW.float())


def test_gloria_local_ignores_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the backward pass recomputes."""
    inputs = pairs(LENGTHS)
    check_precision(lambda region, word: both(region, word, inputs[2]), *inputs[:2])
    plain = with_gradients(inputs)
    monkeypatch.setattr(gloria, "_KEPT_BYTES", 0)
    leaves = [tensor.clone().requires_grad_() for tensor in inputs[:2]]
    with torch.autocast("cpu", torch.bfloat16):
        value = both(*leaves, inputs[2])
    for ours, theirs in zip([value, *torch.autograd.grad(value, leaves)], plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"words_BWE": torch.zeros(3, 4, 8)}, "needs pairs, got 2 images and 3 texts"),
        ({"regions_BPE": torch.zeros(0, 5, 8), "words_BWE": torch.zeros(0, 4, 8)}, "needs pairs"),
        ({"words_BWE": torch.zeros(2, 4, 9)}, r"regions must be \(N, P, E\), words \(M, W, E\)"),
        ({"word_mask_BW": torch.ones(2, 5, dtype=torch.bool)}, "and their mask"),
        ({"regions_BPE": torch.zeros(2, 0, 8)}, "at least one region"),
        ({"temp1": 0.0}, "temp1 0.0"),
        ({"temp2": -1.0}, "temp2 -1.0"),
        ({"temp3": 0.0}, "temp3 must be above 0"),
        ({"pool": "median"}, "one of sum, mean, max"),
    ],
)
def test_gloria_local_rejects_invalid_arguments(change: dict, message: str) -> None:
    arguments = {
        "regions_BPE": torch.zeros(2, 5, 8),
        "words_BWE": torch.zeros(2, 4, 8),
        "word_mask_BW": torch.ones(2, 4, dtype=torch.bool),
    }
    with pytest.raises(ValueError, match=message):
        losses.gloria_local(**arguments | change)
    with pytest.raises(ValueError, match=r"similarities \(B, B\)"):
        gloria_contrast(torch.zeros(2, 3), torch.ones(2, dtype=torch.bool))
