"""Losses of boxes and masks against their formulas in plain loops, in value and gradient."""

import math

import pytest
import torch
from helpers.loss_checks import check_zero_with_gradient
from torch import Tensor

from medvl import losses


def naive_boxes(
    logits: Tensor, boxes: Tensor, labels: Tensor, true: Tensor, inner: Tensor
) -> tuple[Tensor, Tensor]:
    count = max(1, int(inner.sum()))
    focal = torch.zeros((), dtype=logits.dtype)
    for logit, label in zip(logits.flatten(), labels.flatten(), strict=True):
        p = 1 / (1 + torch.exp(-logit))
        focal = focal - (
            0.25 * (1 - p) ** 2 * torch.log(p) if label else 0.75 * p**2 * torch.log(1 - p)
        )
    places = torch.zeros((), dtype=boxes.dtype)
    for b in range(boxes.shape[0]):
        for c in range(boxes.shape[1]):
            if not inner[b, c]:
                continue
            a, t = boxes[b, c], true[b, c]
            wide = (torch.minimum(a[2], t[2]) - torch.maximum(a[0], t[0])).clamp(min=0)
            high = (torch.minimum(a[3], t[3]) - torch.maximum(a[1], t[1])).clamp(min=0)
            union = (a[2] - a[0]) * (a[3] - a[1]) + (t[2] - t[0]) * (t[3] - t[1]) - wide * high
            hull = (torch.maximum(a[2], t[2]) - torch.minimum(a[0], t[0])) * (
                torch.maximum(a[3], t[3]) - torch.minimum(a[1], t[1])
            )
            places = places + 1 - wide * high / union + (hull - union) / hull
    return focal / count, places / count


def case(inner: bool = True) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    logits = torch.randn(2, 6, 3, requires_grad=True)
    corner = torch.rand(2, 6, 2) * 10
    boxes = torch.cat([corner, corner + 1 + torch.rand(2, 6, 2) * 8], dim=2).requires_grad_()
    other = torch.rand(2, 6, 2) * 10
    true = torch.cat([other, other + 1 + torch.rand(2, 6, 2) * 8], dim=2)
    return (
        logits,
        boxes,
        (torch.rand(2, 6, 3) < 0.3).float(),
        true,
        (torch.rand(2, 6) < 0.5) & inner,
    )


def test_detection_equals_the_formulas() -> None:
    logits, boxes, *rest = case()
    actual, expected = losses.detection(logits, boxes, *rest), naive_boxes(logits, boxes, *rest)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    ours = torch.autograd.grad(sum(actual), (logits, boxes))
    theirs = torch.autograd.grad(sum(expected), (logits, boxes))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_detection_without_boxes_has_a_zero_box_loss_and_gradient() -> None:
    logits, boxes, labels, true, inner = case(inner=False)
    focal, place = losses.detection(logits, boxes, labels * 0, true.fill_(math.nan), inner)
    assert place == 0
    (focal + place).backward()
    assert boxes.grad is not None
    assert not boxes.grad.any()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def naive_masks(logits: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    entropy, dice, planes = 0.0, 0.0, 0
    for plane, share in zip(logits.flatten(0, 1), shares.flatten(0, 1), strict=True):
        p = 1 / (1 + torch.exp(-plane))
        entropy = entropy - (share * torch.log(p) + (1 - share) * torch.log(1 - p)).mean()
        dice = dice + 1 - (2 * (p * share).sum() + 1) / (p.sum() + share.sum() + 1)
        planes += 1
    return entropy / planes, dice / planes


def test_bce_dice_equals_the_formulas() -> None:
    torch.manual_seed(1)
    logits = torch.randn(3, 2, 4, 5, requires_grad=True)
    shares = torch.rand(3, 2, 4, 5)
    shares[0] = 0
    actual, expected = losses.bce_dice(logits, shares), naive_masks(logits, shares)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        torch.autograd.grad(sum(actual), logits),
        torch.autograd.grad(sum(expected), logits),
        rtol=1e-4,
        atol=1e-6,
    )


def test_dice_of_an_empty_mask_and_an_empty_prediction_is_zero() -> None:
    entropy, dice = losses.bce_dice(torch.full((1, 1, 8, 8), -30.0), torch.zeros(1, 1, 8, 8))
    assert entropy < 1e-6
    assert dice < 1e-6
    _, marked = losses.bce_dice(torch.full((1, 1, 8, 8), 30.0), torch.zeros(1, 1, 8, 8))
    assert marked == pytest.approx(1 - 1 / 65)


@pytest.mark.parametrize("shape", [(0, 2, 4, 4), (3, 0, 4, 4)])
def test_bce_dice_without_planes_is_zero(shape: tuple[int, ...]) -> None:
    for part in (0, 1):
        check_zero_with_gradient(
            lambda x, part=part: losses.bce_dice(x, torch.zeros(shape))[part], torch.zeros(shape)
        )


def test_dense_losses_compute_in_float32() -> None:
    logits, boxes, *rest = case()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = losses.detection(logits.bfloat16(), boxes, *rest)
        masks = losses.bce_dice(logits[None].bfloat16(), torch.zeros(1, *logits.shape))
    assert {loss.dtype for loss in (*actual, *masks)} == {torch.float32}


def test_bce_dice_rejects_unequal_shapes() -> None:
    with pytest.raises(ValueError, match="one shape"):
        losses.bce_dice(torch.zeros(1, 1, 4, 4), torch.zeros(1, 2, 4, 4))


# LViT


def naive_lvit(prob: Tensor, mask: Tensor) -> Tensor:
    """As the released code: Dice per image with both masks scaled by a half, cross-entropy
    counted over the batch.
    """
    dice = torch.zeros((), dtype=prob.dtype)
    positive, negative = [], []
    for p, t in zip(prob.flatten(1), mask.flatten(1), strict=True):
        p, t = 0.5 * p, 0.5 * t
        dice = dice + 1 - (2 * (p * t).sum() + 1e-5) / ((p * p).sum() + (t * t).sum() + 1e-5)
        for a, b in zip(2 * p, 2 * t, strict=True):
            (positive if b > 0.5 else negative).append(
                -torch.log(a) if b > 0.5 else -torch.log(1 - a)
            )
    entropy = sum(torch.stack(values).mean() / 2 for values in (positive, negative) if values)
    return 0.5 * dice / len(prob) + 0.5 * entropy


@pytest.mark.parametrize("marked", ["some", "one image without", "none", "all"])
def test_lvit_equals_its_formula(marked: str) -> None:
    torch.manual_seed(0)
    prob = (torch.rand(3, 1, 5, 4) * 0.9 + 0.05).requires_grad_()
    mask = (torch.rand(3, 1, 5, 4) < 0.3).float()
    mask[1] *= marked != "one image without"
    mask = mask * (marked != "none") + (marked == "all") * (1 - mask)
    expected, value = naive_lvit(prob, mask), losses.lvit(prob, mask)
    torch.testing.assert_close(value, expected)
    (gradient,), (wanted,) = torch.autograd.grad(value, prob), torch.autograd.grad(expected, prob)
    torch.testing.assert_close(gradient, wanted)


def test_lvit_of_an_image_without_a_mask_is_near_one() -> None:
    """The published Dice loss at p = 0.1 on 224 x 224 pixels; its value does not depend on a
    falling p.
    """
    prob, mask = torch.full((1, 1, 224, 224), 0.1), torch.zeros(1, 1, 224, 224)
    entropy = -0.5 * math.log(0.9)
    dice = 2 * losses.lvit(prob, mask) - entropy
    assert dice.item() == pytest.approx(1 - 1e-5 / (0.01 * 224**2 / 4 + 1e-5), abs=1e-6)
    small = torch.full((1, 1, 4, 5), 0.1)
    assert (2 * losses.lvit(small, small * 0) - entropy).item() == pytest.approx(0.9998, abs=1e-6)


def test_lvit_weights_leave_images_out_and_planes_are_averaged() -> None:
    torch.manual_seed(1)
    prob, mask = torch.rand(4, 2, 6, 6), (torch.rand(4, 2, 6, 6) < 0.4).float()
    weight = torch.tensor([1.0, 0, 1, 0])
    both = torch.stack(
        [losses.lvit(prob[:, n : n + 1], mask[:, n : n + 1]) for n in range(2)]
    ).mean()
    torch.testing.assert_close(losses.lvit(prob, mask), both)
    torch.testing.assert_close(losses.lvit(prob, mask, weight), losses.lvit(prob[::2], mask[::2]))
    prob.requires_grad_()
    nothing = losses.lvit(prob, mask, torch.zeros(4))
    assert nothing.item() == 0
    assert not torch.autograd.grad(nothing, prob)[0].any()
    with torch.autocast("cpu", torch.bfloat16):
        assert losses.lvit(prob.bfloat16(), mask).dtype == torch.float32
    with pytest.raises(ValueError, match=r"one shape \(B, 1, H, W\)"):
        losses.lvit(prob[0], mask[0])


def test_contrastive_mask_is_one_minus_the_cosine() -> None:
    torch.manual_seed(2)
    prob, reference = torch.rand(3, 1, 4, 4), torch.rand(3, 1, 4, 4).round()
    reference[2] = 0
    expected = [
        1 - float((p * r).sum() / max(float(p.norm() * r.norm()), 1e-8))
        for p, r in zip(prob, reference, strict=True)
    ]
    assert losses.contrastive_mask(prob, reference).tolist() == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match="one shape"):
        losses.contrastive_mask(prob, reference[:2])


def test_lvit_counts_pixels_and_images_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the sums of another rank, loss and gradient are those of the joint batch."""
    torch.manual_seed(3)
    prob, mask = torch.rand(5, 1, 4, 4).requires_grad_(), (torch.rand(5, 1, 4, 4) < 0.3).float()
    whole = losses.lvit(prob, mask)
    (expected,) = torch.autograd.grad(whole, prob)
    sums: list[Tensor] = []
    monkeypatch.setattr("medvl.losses.supervised.gather", lambda x: sums.append(x.detach()) or x)
    losses.lvit(prob[3:], mask[3:])
    monkeypatch.setattr("medvl.losses.supervised.gather", lambda x: torch.cat([x, sums[0]]))
    own = losses.lvit(prob[:3], mask[:3])
    torch.testing.assert_close(own, whole)
    torch.testing.assert_close(torch.autograd.grad(own, prob)[0][:3], expected[:3])
