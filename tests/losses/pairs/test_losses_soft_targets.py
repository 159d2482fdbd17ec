"""The contrastive loss with soft targets against its formula in plain loops, in value and
gradient.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers.loss_checks import check_one_number, check_precision, check_zero_with_gradient, compare
from torch import Tensor

from medvl import losses
from medvl.losses.pairs.contrastive import LabelSimilarity

IMAGE_LABELS = torch.tensor(
    [[1.0, 0.0, 1.0, -1.0], [0.0, 0.0, 0.0, 1.0], [torch.nan] * 4, [1.0, 1.0, 1.0, 1.0]]
)
TEXT_LABELS = torch.tensor([[0.0, torch.nan, 1.0, -1.0], [1.0, 1.0, 0.0, 1.0]])


def naive_soft_targets(
    image_NE: Tensor, text_ME: Tensor, scale: Tensor, targets_NM: Tensor
) -> Tensor:
    """Return equations 3 to 6 of arXiv 2210.10163, with their ratios of exponentials."""
    images, texts = len(image_NE), len(text_ME)
    total = image_NE.new_zeros(())
    for i in range(images):
        targets = [torch.exp(targets_NM[i, k]) for k in range(texts)]
        matches = [torch.exp(scale * image_NE[i] @ text_ME[k]) for k in range(texts)]
        for target, match in zip(targets, matches, strict=True):
            total = total - target / sum(targets) * torch.log(match / sum(matches)) / images / 2
    for k in range(texts):
        targets = [torch.exp(targets_NM[i, k]) for i in range(images)]
        matches = [torch.exp(scale * image_NE[i] @ text_ME[k]) for i in range(images)]
        for target, match in zip(targets, matches, strict=True):
            total = total - target / sum(targets) * torch.log(match / sum(matches)) / texts / 2
    return total


def sides(images: int, texts: int, dim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Return unit embeddings of images and texts, and their similarities."""
    generator = torch.Generator().manual_seed(10 * images + texts)
    image_NE, text_ME = (
        F.normalize(torch.randn(rows, dim, generator=generator), dim=1) for rows in (images, texts)
    )
    return image_NE, text_ME, 2 * torch.randn(images, texts, generator=generator)


@pytest.mark.fault("N1")
@pytest.mark.parametrize(("images", "texts"), [(5, 5), (3, 7), (6, 2), (1, 4)])
def test_soft_targets_equal_the_paper(images: int, texts: int) -> None:
    image_NE, text_ME, targets_NM = sides(images, texts)
    compare(
        lambda image, text, scale: losses.soft_targets(image, text, targets_NM, scale),
        lambda image, text, scale: naive_soft_targets(image, text, scale, targets_NM.double()),
        [image_NE, text_ME, torch.tensor(14.3)],
    )


def test_soft_targets_that_are_one_hot_give_the_loss_of_clip() -> None:
    image_NE, text_ME, _ = sides(6, 6)
    own_NN = torch.zeros(6, 6).masked_fill(~torch.eye(6, dtype=torch.bool), -torch.inf)
    actual = losses.soft_targets(image_NE, text_ME, own_NN, 10.0)
    torch.testing.assert_close(actual, losses.clip(image_NE, text_ME, 10.0))


def test_targets_have_no_gradient_and_each_side_its_own_mean() -> None:
    image_NE, text_ME, targets_NM = sides(3, 5)
    targets_NM.requires_grad_()
    assert not losses.soft_targets(image_NE, text_ME, targets_NM, 10.0).requires_grad
    # Without any similarity, each direction has uniform targets and uniform matches.
    zeros = losses.soft_targets(torch.zeros(3, 8), torch.zeros(5, 8), torch.zeros(3, 5), 10.0)
    assert zeros.item() == pytest.approx((math.log(5) + math.log(3)) / 2)


def test_soft_targets_of_a_missing_side_are_zero() -> None:
    for images, texts in ((0, 4), (4, 0), (0, 0)):
        targets_NM = torch.zeros(images, texts)
        check_zero_with_gradient(
            lambda image, text, targets_NM=targets_NM: losses.soft_targets(
                image, text, targets_NM, 10.0
            ),
            torch.ones(images, 8),
            torch.ones(texts, 8),
        )


def test_soft_targets_are_computed_in_float32() -> None:
    image_NE, text_ME, targets_NM = sides(6, 9)
    check_precision(
        lambda image, text: losses.soft_targets(image, text, targets_NM, 14.3), image_NE, text_ME
    )


def test_the_scale_is_one_number() -> None:
    image_NE, text_ME, targets_NM = sides(6, 9)
    check_one_number(lambda scale: losses.soft_targets(image_NE, text_ME, targets_NM, scale), 14.3)


@pytest.mark.parametrize(("kind", "limit"), [("dot", 4.0), ("clamp", 1.0), ("cosine", 1.0)])
def test_label_similarity_equals_its_formula(kind: LabelSimilarity, limit: float) -> None:
    actual = losses.label_similarity(IMAGE_LABELS, TEXT_LABELS, kind)
    for i, image_L in enumerate(IMAGE_LABELS.nan_to_num(0.0)):
        for k, text_L in enumerate(TEXT_LABELS.nan_to_num(0.0)):
            expected = sum(float(a) * float(b) for a, b in zip(image_L, text_L, strict=True))
            if kind == "clamp":
                expected = min(max(expected, -1.0), 1.0)
            elif kind == "cosine":
                expected /= max(float(image_L.norm() * text_L.norm()), 1e-12)
            assert actual[i, k].item() == pytest.approx(expected, abs=1e-6)
    assert actual.abs().max() <= limit + 1e-6
    assert not actual[2].any()  # no label is known


def test_label_similarity_of_the_cosine_is_the_default_and_ignores_autocast() -> None:
    expected = losses.label_similarity(IMAGE_LABELS, TEXT_LABELS, "cosine")
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(
            losses.label_similarity(IMAGE_LABELS, TEXT_LABELS), expected, rtol=0, atol=0
        )


def test_targets_of_the_product_are_nearly_one_hot_among_samples_with_many_labels() -> None:
    """The largest target of a sample with all 14 labels, besides one such text and 14 with one
    label each.
    """
    image_1L, text_ML = torch.ones(1, 14), torch.cat([torch.ones(1, 14), torch.eye(14)])
    largest = [
        losses.label_similarity(image_1L, text_ML, kind).softmax(dim=1).max()
        for kind in ("dot", "cosine")
    ]
    assert largest[0] > 0.9999
    assert largest[1] < 0.2


@pytest.mark.parametrize("shape", [(3, 4), (4, 3), (5,)])
def test_soft_targets_refuse_other_shapes(shape: tuple[int, ...]) -> None:
    image_NE, text_ME, _ = sides(3, 5)
    with pytest.raises(ValueError, match="targets"):
        losses.soft_targets(image_NE, text_ME, torch.zeros(shape), 10.0)
    with pytest.raises(ValueError, match="labels"):
        losses.label_similarity(IMAGE_LABELS, TEXT_LABELS[:, :3])
