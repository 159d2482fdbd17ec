"""MedCLIP: its loss written out, rows with one side only, padding, batch norm, parts, and its
published shapes.
"""

import dataclasses
import math
from typing import Any

import pytest
import torch
from helpers.contrastive_systems import PAIRS, make_batch, medclip
from helpers.errors import raises
from torch import Tensor

import medvl
from medvl.errors import ConfigError
from medvl.schema import Batch, Inputs
from medvl.train.loop.step import GradCache
from medvl.train.optim.optimizer import Precision


def whole(**changes: Any) -> Batch:
    return dataclasses.replace(make_batch("medclip"), **{"has_image_B": None, **changes})


def flags(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


def similarity(one_L: Tensor, two_L: Tensor, kind: str) -> float:
    """Released products are of 1, 0 and -1 (uncertain)."""
    if kind == "cosine":
        one_L, two_L = (one_L == 1).float(), (two_L == 1).float()
        norms = one_L.norm() * two_L.norm()
        return float(one_L @ two_L / norms) if norms else 0.0
    product = float(one_L.nan_to_num() @ two_L.nan_to_num())
    return max(-1.0, min(1.0, product)) if kind == "clamp" else product


def naive(model: Any, batch: Batch, kind: str = "cosine") -> float:
    """Equations 3 to 6 of the paper, row by row."""
    with_image = (
        range(len(batch))
        if batch.has_image_B is None
        else batch.has_image_B.nonzero().flatten().tolist()
    )
    with_text = (
        range(len(batch))
        if batch.has_text_B is None
        else batch.has_text_B.nonzero().flatten().tolist()
    )
    scale, losses = model.logit_scale.exp(), []
    image_BE = model.encode_image(batch.image_BCHW)
    has_B = flags(*[1] * len(batch)) if batch.has_second_text_B is None else batch.has_second_text_B
    with_second = [row for row in with_text if has_B[row]]
    sides = (
        (batch.ids_BT, batch.mask_BT, with_text),
        (batch.second_ids_BT, batch.second_mask_BT, with_second),
    )
    for ids_BT, mask_BT, with_text in sides:
        text_BE = model.encode_text(ids_BT, mask_BT)

        def direction(rows: Any, columns: Any, row_BE: Tensor, column_BE: Tensor) -> float:
            total = 0.0
            for row in rows:
                logits = torch.stack(
                    [scale * row_BE[row] @ column_BE[column] for column in columns]
                )
                labels = [
                    similarity(batch.labels_BL[row], batch.labels_BL[column], kind)
                    for column in columns
                ]
                total -= float((torch.tensor(labels).softmax(0) * logits.log_softmax(0)).sum())
            return total / len(rows)

        losses.append(direction(with_image, with_text, image_BE, text_BE))
        losses.append(direction(with_text, with_image, text_BE, image_BE))
    return sum(losses) / 4


@pytest.mark.parametrize("kind", ["cosine", "dot", "clamp"])
def test_the_loss_is_the_papers(kind: str) -> None:
    model = medclip(label_similarity=kind).eval()
    batch = whole()
    batch.labels_BL[0, 0] = torch.nan
    batch.labels_BL[1, :2] = batch.labels_BL[2, 0] = -1
    with torch.no_grad():
        assert model(batch).total.item() == pytest.approx(naive(model, batch, kind), rel=1e-4)
        some = dataclasses.replace(
            batch, has_image_B=flags(1, 1, 0, 1, 0, 0, 1), has_text_B=flags(0, 1, 1, 0, 1, 1, 1)
        )
        assert model(some).total.item() == pytest.approx(naive(model, some, kind), rel=1e-4)


def test_samples_without_a_second_text_have_no_column_for_it() -> None:
    model, batch = medclip().eval(), whole(has_text_B=flags(0, 1, 1, 1, 1, 1, 1))
    some = dataclasses.replace(batch, has_second_text_B=flags(1, 0, 1, 1, 0, 1, 1))
    none = dataclasses.replace(batch, has_second_text_B=flags(*[0] * PAIRS))
    alone = dataclasses.replace(batch, second_ids_BT=None, second_mask_BT=None)
    with torch.no_grad():
        assert model(some).total.item() == pytest.approx(naive(model, some), rel=1e-4)
        assert model(none).total.item() == pytest.approx(model(alone).total.item(), rel=1e-6)


def test_the_initial_loss_is_that_of_a_guess() -> None:
    """At a scale of 1, all logits are nearly equal."""
    model = medclip(temperature=1.0).eval()
    assert abs(model(whole()).total.item() - math.log(PAIRS)) < 0.3


def test_images_and_texts_of_different_samples_train_together() -> None:
    """Halves of which one has images only and the other texts only have a loss, and all
    parameters a gradient.
    """
    model = medclip().train()
    batch = whole(has_image_B=torch.arange(PAIRS) < 3, has_text_B=torch.arange(PAIRS) >= 3)
    losses = model(batch)
    losses.total.backward()
    assert losses.total > 0
    without = [
        name
        for name, p in model.named_parameters()
        if p.grad is None or not p.grad.isfinite().all()
    ]
    assert not without
    still = {
        name for name, p in model.named_parameters() if p.grad is not None and not p.grad.any()
    }
    assert all("key.bias" in name for name in still)  # of attention, whose softmax cancels it


def test_placeholders_change_nothing() -> None:
    """Neither the loss nor the statistics of the batch norm, in training mode."""
    batch = whole(has_image_B=torch.arange(PAIRS) < 4, has_text_B=torch.arange(PAIRS) >= 2)
    results = []
    for fill in (0, 255):
        model = medclip().train()
        model.text_encoder.eval()  # no dropout
        image_BCHW, ids_BT = batch.image_BCHW.clone(), batch.ids_BT.clone()
        image_BCHW[4:], ids_BT[:2] = fill, 7 + fill % 2
        loss = model(dataclasses.replace(batch, image_BCHW=image_BCHW, ids_BT=ids_BT)).total
        results.append((loss, dict(model.image_encoder.named_buffers())))
    torch.testing.assert_close(results[0], results[1])


def test_a_texts_vector_does_not_depend_on_padding() -> None:
    model, batch = medclip().eval(), whole()
    padded = torch.nn.functional.pad(batch.ids_BT, (0, 9))
    mask = torch.nn.functional.pad(batch.mask_BT, (0, 9))
    torch.testing.assert_close(
        model.encode_text(padded, mask), model.encode_text(batch.ids_BT, batch.mask_BT)
    )


def test_parts_of_a_batch_give_the_gradient_of_the_whole() -> None:
    """Also where a part has no image, and another no text."""
    batch = whole(has_image_B=flags(0, 0, 1, 1, 1, 1, 1), has_text_B=flags(1, 1, 1, 1, 1, 0, 0))
    model = medclip().eval()
    model(batch).total.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    GradCache(model, 2, Precision("fp32", torch.device("cpu")))(batch, 1, lambda part: None)
    for name, parameter in model.named_parameters():
        near = {"rtol": 1e-4, "atol": 1e-6 + 1e-5 * expected[name].abs().max().item()}
        torch.testing.assert_close(parameter.grad, expected[name], **near)


def test_the_scale_starts_as_published_and_is_limited() -> None:
    model = medclip().train()
    assert model.logit_scale.exp().item() == pytest.approx(1 / 0.07)
    with torch.no_grad():
        model.logit_scale.fill_(9.0)
    model(whole())
    assert model.logit_scale.item() == pytest.approx(math.log(100))


@pytest.mark.parametrize(
    ("image_encoder", "parameters"), [("resnet50", 24_556_608), ("swin_tiny", 27_912_570)]
)
def test_published_sizes(image_encoder: str, parameters: int) -> None:
    with torch.device("meta"):
        model: Any = medvl.create_model("medclip", image_encoder=image_encoder)
    parts = (model.image_encoder, model.image_head)
    assert sum(p.numel() for part in parts for p in part.parameters()) == parameters
    assert model.text_head.weight.shape == (512, 768)
    assert model.text_head.bias is None
    assert model.transform.fit == "pad"


def test_a_text_is_drawn_once_where_its_policy_is_not_random() -> None:
    assert medclip().inputs == Inputs(second_text=True, labels=True)
    assert medclip(two_texts=False).inputs == Inputs(labels=True)


def test_unknown_similarities_are_refused() -> None:
    with raises(ConfigError, "unknown_name", "label_similarity"):
        medclip(label_similarity="euclid")


@pytest.mark.parametrize("images", [0, 3])
def test_placeholders_of_a_batch_without_images_do_not_enter_batch_norms(images: int) -> None:
    """Such as a part of texts alone, with `grad_cache` or from shards without images."""
    model = medclip().train()
    before = {name: value.clone() for name, value in model.named_buffers() if "running_" in name}
    model(whole(has_image_B=torch.arange(PAIRS) < images))
    for name, value in model.named_buffers():
        assert name not in before or torch.equal(value, before[name]) == (not images), name
