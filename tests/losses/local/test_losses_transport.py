"""Word-patch alignment against IPOT of one sample at a time, in value and gradient."""

from typing import Any

import pytest
import torch
from helpers.loss_checks import check_precision, check_zero_with_gradient, compare
from torch import Tensor

from medvl import losses

WORDS, PATCHES = (4, 1, 3), (5, 2, 6)
"""Real words and patches of each sample."""


def samples(seed: int = 0, width: int = 8) -> list[Tensor]:
    """(text_BME, image_BNE), padded with noise; samples have different lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(len(WORDS), max(sizes), width, generator=generator)
        for sizes in (WORDS, PATCHES)
    ]


def padding(sizes: tuple[int, ...]) -> Tensor:
    return torch.arange(max(sizes))[None] >= torch.tensor(sizes)[:, None]


def aligned(text_BME: Tensor, image_BNE: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return losses.word_patch_alignment(
        text_BME, image_BNE, padding(WORDS), padding(PATCHES), **options
    )


def naive_ipot(
    text_ME: Tensor, image_NE: Tensor, beta: float, iterations: int
) -> tuple[Tensor, Tensor]:
    """Algorithm 1 of Xie et al. for one sample, one entry after another, as UNITER and ViLT use
    it.
    """
    words, patches = len(text_ME), len(image_NE)
    cost_NM = torch.stack(
        [1 - torch.cosine_similarity(text_ME, patch[None], dim=1) for patch in image_NE]
    )
    kernel_NM = torch.exp(-cost_NM.detach() / beta)
    plan_NM, scale_M = torch.ones_like(kernel_NM), [1 / words] * words
    for _ in range(iterations):
        moved = [[kernel_NM[n, m] * plan_NM[n, m] for m in range(words)] for n in range(patches)]
        scale_N = [
            1 / (patches * sum(float(moved[n][m]) * scale_M[m] for m in range(words)))
            for n in range(patches)
        ]
        scale_M = [
            1 / (words * sum(float(moved[n][m]) * scale_N[n] for n in range(patches)))
            for m in range(words)
        ]
        rows = [
            torch.stack([scale_N[n] * moved[n][m] * scale_M[m] for m in range(words)])
            for n in range(patches)
        ]
        plan_NM = torch.stack(rows)
    return (cost_NM * plan_NM).sum(), plan_NM


@pytest.mark.parametrize(("beta", "iterations"), [(0.5, 50), (0.2, 3)])
def test_distance_and_gradient_equal_those_of_each_sample_alone(
    beta: float, iterations: int
) -> None:
    weights = (1.0, -2.0, 0.5)

    def ours(text_BME: Tensor, image_BNE: Tensor) -> Tensor:
        distance_B, _ = aligned(text_BME, image_BNE, beta=beta, iterations=iterations)
        return (distance_B * torch.tensor(weights)).sum()

    def naive(text_BME: Tensor, image_BNE: Tensor) -> Tensor:
        rows = zip(weights, text_BME, image_BNE, WORDS, PATCHES, strict=True)
        return torch.stack(
            [
                weight * naive_ipot(text[:m], image[:n], beta, iterations)[0]
                for weight, text, image, m, n in rows
            ]
        ).sum()

    compare(ours, naive, samples())


def test_plan_is_the_naive_one_and_moves_every_word() -> None:
    text_BME, image_BNE = samples()
    _, plan_BNM = aligned(text_BME.requires_grad_(), image_BNE)
    assert plan_BNM.shape == (3, 6, 4)
    assert not plan_BNM.requires_grad
    for row, (words, patches) in enumerate(zip(WORDS, PATCHES, strict=True)):
        expected_NM = naive_ipot(
            text_BME[row, :words].double(), image_BNE[row, :patches].double(), 0.5, 50
        )[1]
        torch.testing.assert_close(
            plan_BNM[row, :patches, :words].double(), expected_NM, rtol=1e-4, atol=1e-6
        )
        assert (
            plan_BNM[row].sum()
            == plan_BNM[row, :patches, :words].sum()
            == pytest.approx(1, abs=1e-5)
        )
        torch.testing.assert_close(
            plan_BNM[row, :, :words].sum(dim=0), torch.full((words,), 1 / words)
        )


def test_equal_words_and_patches_cost_nothing() -> None:
    text_BME = torch.eye(4)[None]
    none = torch.zeros(1, 4, dtype=torch.bool)
    distance_B, plan_BNM = losses.word_patch_alignment(text_BME, 3 * text_BME.flip(1), none, none)
    assert distance_B.item() == pytest.approx(0, abs=1e-3)
    torch.testing.assert_close(plan_BNM[0], torch.eye(4).flip(1) / 4, rtol=0, atol=1e-3)


@pytest.mark.parametrize("garbage", [7.0, torch.inf, torch.nan])
def test_padding_changes_neither_values_nor_gradients(garbage: float) -> None:
    results = []
    for value in (0.0, garbage):
        sides = samples()
        for sizes, side in zip((WORDS, PATCHES), sides, strict=True):
            side[padding(sizes)] = value
            side.requires_grad_()
        distance_B, plan_BNM = aligned(*sides)
        results.append((distance_B, plan_BNM, *torch.autograd.grad(distance_B.sum(), sides)))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@pytest.mark.parametrize(("words", "patches"), [(0, 3), (3, 0), (0, 0)])
def test_sample_without_words_or_patches_has_distance_zero(words: int, patches: int) -> None:
    text_BME, image_BNE = torch.randn(1, 3, 4), torch.randn(1, 3, 4)
    pads = torch.arange(3)[None] >= words, torch.arange(3)[None] >= patches
    check_zero_with_gradient(
        lambda *x: losses.word_patch_alignment(x[0], x[1], *pads)[0].sum(), text_BME, image_BNE
    )
    assert not losses.word_patch_alignment(text_BME, image_BNE, *pads)[1].any()


def test_computes_in_float32() -> None:
    check_precision(lambda *x: aligned(x[0], x[1])[0].sum(), *samples())


def test_wrong_arguments_are_refused() -> None:
    text_BME, image_BNE = samples()
    for options in ({"beta": 0.0}, {"iterations": 0}):
        with pytest.raises(ValueError, match="beta above 0"):
            aligned(text_BME, image_BNE, **options)
    for wrong in (image_BNE[:2], image_BNE[:, :2], image_BNE[:, :, :2]):
        with pytest.raises(ValueError, match="expected"):
            aligned(text_BME, wrong)
    with pytest.raises(ValueError, match="bool"):
        losses.word_patch_alignment(text_BME, image_BNE, padding(WORDS).float(), padding(PATCHES))
