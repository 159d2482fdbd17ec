"""UNITER and LXMERT: masked regions, box codes of a grid, the mix of tasks, and the layers
across both sides.
"""

import dataclasses
import math
from typing import Any

import pytest
import torch
from helpers.errors import raises
from helpers.fusion_samples import flags, make_batch, shaken, tiny_model, tiny_tokenizer

from medvl import losses
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.encoders.regions import box_code
from medvl.errors import ConfigError
from medvl.models.fusion_encoders.bases.region_model import (
    RegionMask,
    grid_boxes,
    sample_region_mask,
)
from medvl.schema import Batch

SYSTEMS = {"uniter": 7, "lxmert": 4}
"""System -> numbers of its box code."""
CLASSES = 6


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


def region_batch(tokenizer: Tokenizer, size: int = 4, **fields: Any) -> Batch:
    """Return regions of a detector with boxes and distributions; image 1 has three instead of
    five.
    """
    generator = torch.Generator().manual_seed(2)
    regions_BPD, corner_BP4 = (
        torch.randn(size, 5, 9, generator=generator),
        torch.rand(size, 5, 4, generator=generator) / 2,
    )
    boxes_BP4 = torch.cat([corner_BP4[..., :2], corner_BP4[..., :2] + corner_BP4[..., 2:]], dim=2)
    classes_BPK = torch.rand(size, 5, CLASSES, generator=generator).softmax(dim=2)
    for tensor in (regions_BPD, boxes_BP4, classes_BPK):
        tensor[1, 3:] = 0
    given = {
        "regions_BPD": regions_BPD,
        "region_boxes_BP4": boxes_BP4,
        "region_classes_BPK": classes_BPK,
    }
    return make_batch(tokenizer, size, **{**given, **fields})


def region_model(name: str, tokenizer: Tokenizer, **settings: Any) -> Any:
    source = {
        "image_encoder": f"regions:9+{SYSTEMS[name]}",
        "image_arguments": {},
        "region_classes": CLASSES,
    }
    return tiny_model(name, tokenizer, **{**source, **settings})


def test_masks_follow_their_shares_and_leave_padding_out() -> None:
    torch.manual_seed(0)
    real_BP = torch.ones(400, 20, dtype=torch.bool)
    real_BP[:, 15:] = False
    mask = sample_region_mask(real_BP, 0.3, zeros=0.8, replaced=0.1)
    assert not mask.masked_BP[:, 15:].any()
    assert mask.masked_BP.sum() / real_BP.sum() == pytest.approx(0.3, abs=0.02)
    own_BP = torch.arange(8000).view(400, 20)
    assert torch.equal(mask.source_BP[~mask.masked_BP], own_BP[~mask.masked_BP])
    source_N = mask.source_BP[mask.masked_BP]
    assert (source_N == -1).float().mean() == pytest.approx(0.8, abs=0.03)
    assert (source_N == own_BP[mask.masked_BP]).float().mean() == pytest.approx(0.1, abs=0.03)
    rare = sample_region_mask(real_BP, 1e-6).masked_BP
    assert (rare.sum(dim=1) == 1).all()  # at least one of each image
    assert not sample_region_mask(torch.zeros(2, 3, dtype=torch.bool), 0.5).masked_BP.any()


def test_cells_of_a_grid_have_the_boxes_of_their_places() -> None:
    boxes_P4 = grid_boxes(2, 4)
    assert boxes_P4[5].tolist() == [0.25, 0.5, 0.5, 1.0]
    assert (box_code(boxes_P4, 7)[:, 6] == 1 / 8).all()


@pytest.mark.parametrize("name", SYSTEMS)
def test_input_is_the_sum_of_two_normalised_projections(name: str, tokenizer: Tokenizer) -> None:
    model = shaken(region_model(name, tokenizer)).eval()
    batch = region_batch(tokenizer)
    regions = model.read_regions(model.image_input_of(batch), None)
    layer = model.image_input
    boxes = layer.norm_boxes(layer.project_boxes(box_code(batch.region_boxes_BP4, SYSTEMS[name])))
    expected = layer.norm(layer.project(batch.regions_BPD)) + boxes
    torch.testing.assert_close(layer(regions.states_BND), expected)
    assert regions.mask_BN.tolist()[1] == [True] * 3 + [False] * 2
    mask = RegionMask(
        torch.tensor([[1, 1, 1, 0, 0]] * 4).bool(), torch.arange(20).view(4, 5).clone()
    )
    mask.source_BP[:, 0], mask.source_BP[:, 1] = -1, 14
    read_BPD = batch.regions_BPD.clone()
    read_BPD[:, 0], read_BPD[:, 1] = 0, batch.regions_BPD[2, 4]
    torch.testing.assert_close(
        layer(regions.states_BND, mask), layer.norm(layer.project(read_BPD)) + boxes
    )
    added_D = torch.arange(9.0)
    read_BPD[:, :3] += added_D
    torch.testing.assert_close(
        layer(regions.states_BND, mask, added_D), layer.norm(layer.project(read_BPD)) + boxes
    )


@pytest.mark.parametrize("name", SYSTEMS)
def test_region_terms_are_those_of_a_pass_over_masked_regions(
    name: str, tokenizer: Tokenizer
) -> None:
    """The truth of a region does not change with what is masked; LXMERT's rows read the images
    sampled for them.
    """
    model = shaken(region_model(name, tokenizer)).eval()
    assert model.inputs.regions
    assert model.inputs.region_classes
    batch = region_batch(tokenizer, has_image_B=flags(1, 1, 1, 0))
    torch.manual_seed(0)
    corruption = model.corrupt(batch)
    terms = model.losses(model.predict(batch, corruption), corruption).terms
    mask = model.mask_of(corruption)
    assert not mask.masked_BP[3].any()
    regions = model.read_regions(model.image_input_of(batch), batch.has_image_B)
    image, rows = model.embed_regions(regions, mask), torch.arange(4)
    if name == "uniter":
        text = model.text_tokens(batch.ids_BT, batch.mask_BT)
    else:
        pairs = corruption.of(model.itm)
        rows = rows.index_copy(0, pairs.text_N, pairs.image_N)
        text = model.text_tokens(corruption.of(model.mlm).ids_BT, batch.mask_BT)
    states_BPD = model.fuse(text, image.rows(rows)).image.states_BND
    places = [(row, p) for row in range(4) for p in range(5) if mask.masked_BP[rows[row], p]]
    states_ND = torch.stack([states_BPD[row, p] for row, p in places])
    features_ND = torch.stack([batch.regions_BPD[rows[row], p] for row, p in places])
    classes_NK = torch.stack([batch.region_classes_BPK[rows[row], p] for row, p in places])
    if name == "uniter":
        expected = {
            "mrfr": losses.region_regression(model.score_features(states_ND), features_ND),
            "mrc": losses.region_kl(model.mrc_head(states_ND), classes_NK),
        }
    else:
        expected = {
            "region_features": losses.region_regression(
                model.feature_head(model.region_head(states_ND)), features_ND, smooth=True
            ),
            "object_labels": losses.region_labels(
                model.object_head(model.region_head(states_ND)), classes_NK
            ),
        }
    for key, value in expected.items():
        torch.testing.assert_close(terms[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SYSTEMS)
def test_detector_regions_train_every_parameter(name: str, tokenizer: Tokenizer) -> None:
    model, batch = region_model(name, tokenizer), region_batch(tokenizer, 6)
    torch.manual_seed(0)
    result = model(batch)
    result.total.backward()
    assert all(
        p.grad is not None and p.grad.any()
        for n, p in model.named_parameters()
        if "key.bias" not in n
    )
    if name == "uniter":
        uniform = torch.full_like(batch.region_classes_BPK, 1 / CLASSES)
        assert result.terms["mrc"] < math.log(CLASSES)  # from a flat prediction to a distribution
        assert model(dataclasses.replace(batch, region_classes_BPK=uniform)).terms["mrc"] < 0.05
    with raises(ConfigError, "missing", "region_classes_BPK"):
        model(dataclasses.replace(batch, region_classes_BPK=None))
    with raises(ConfigError, "mismatch", "image_encoder"):
        region_model(name, tokenizer, image_encoder="regions:9")


def test_tasks_are_mixed_two_two_one_one(tokenizer: Tokenizer) -> None:
    model = region_model("uniter", tokenizer, task_mix=True)
    batch = region_batch(tokenizer)
    assert len(model.step_objectives) == 5  # before the first step
    counts: dict[str, int] = {}
    for step in range(600):
        model.before_step(step)
        first = model.step_objectives[0].name
        counts[first] = counts.get(first, 0) + 1
        assert ("wpa" in [objective.name for objective in model.step_objectives]) == (
            first == "itm"
        )
    for task, share in (("mlm", 2), ("itm", 2), ("mrfr", 1), ("mrc", 1)):
        assert counts[task] / 600 == pytest.approx(share / 6, abs=0.05)
    seen = set()
    for step in range(12):
        model.before_step(step)
        model.zero_grad(set_to_none=True)
        result = model(batch)
        active = {objective.name for objective in model.step_objectives}
        seen |= active
        assert {name for name, value in result.terms.items() if value != 0} <= active
        assert list(result.terms) == [objective.name for objective in model.objectives]
        result.total.backward()
        assert all(
            parameter.grad is not None for parameter in model.parameters()
        )  # no rank waits for another
    assert seen == {"mlm", "itm", "wpa", "mrfr", "mrc"}
    assert len(model.eval().step_objectives) == 5


@pytest.mark.parametrize("name", SYSTEMS)
def test_weights_of_masked_regions_scale_their_terms(name: str, tokenizer: Tokenizer) -> None:
    """The last two terms are the regions' features and classes."""
    results = []
    for weights in ({}, {"region_feature_weight": 3.0, "region_class_weight": 0.25}):
        model = region_model(name, tokenizer, **weights).eval()
        model.load_state_dict(results[0][0] if results else model.state_dict())
        torch.manual_seed(1)
        results.append((model.state_dict(), model(region_batch(tokenizer))))
    (_, plain), (_, weighted) = results
    features, classes = list(plain.terms)[-2:]
    torch.testing.assert_close(weighted.terms, plain.terms)  # terms are without their weights
    more = 2 * plain.terms[features] - 0.75 * plain.terms[classes]
    torch.testing.assert_close(weighted.total, plain.total + more)
    for field in ("region_feature_weight", "region_class_weight"):
        with raises(ConfigError, "out_of_range", field):
            region_model(name, tokenizer, **{field: 0.0})


def test_cross_attention_is_shared_by_both_sides(tokenizer: Tokenizer) -> None:
    """As released: one attention for words to regions and for regions to words; then each side
    has layers of its own.
    """
    model = shaken(tiny_model("lxmert", tokenizer)).eval()
    batch = make_batch(tokenizer, 3)
    text, image = (
        model.text_tokens(batch.ids_BT, batch.mask_BT),
        model.image_tokens(batch.image_BCHW),
    )
    (layer, *_), real = model.cross_layers, batch.mask_BT[:, None]
    words = layer.cross_attention(text.states_BND, image.states_BND, None)
    cells = layer.cross_attention(image.states_BND, text.states_BND, real)
    words = layer.text_feed_forward(layer.text_attention(words, words, real))
    cells = layer.image_feed_forward(layer.image_attention(cells, cells, None))
    after = layer(text, image)
    torch.testing.assert_close(after[0].states_BND, words)
    torch.testing.assert_close(after[1].states_BND, cells)


@pytest.mark.parametrize("task", ["mlm", "itm", "mrfr", "mrc"])
@pytest.mark.parametrize(
    ("image", "text"),
    [
        ((1, 0, 1, 0), (0, 1, 0, 1)),
        ((1, 1, 1, 1), (0, 0, 0, 0)),
        ((0, 0, 0, 0), (1, 1, 1, 1)),
        ((0,) * 4, (0,) * 4),
    ],
)
def test_a_step_of_one_task_runs_without_a_complete_pair(
    task: str, image: tuple[int, ...], text: tuple[int, ...], tokenizer: Tokenizer
) -> None:
    """Its loss is finite, and every parameter that the task trains has a gradient, as DDP needs
    on each rank.
    """
    model = region_model("uniter", tokenizer, task_mix=True).train()
    model.before_step(next(step for step in range(99) if task_of_step(model, step) == task))
    model(region_batch(tokenizer)).total.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    result = model(region_batch(tokenizer, has_image_B=flags(*image), has_text_B=flags(*text)))
    result.total.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert trained <= gradients.keys()
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert result.total.isfinite()
    if task == "itm":  # no pair has a match
        assert float(result.total.detach()) == 0
        assert all(float(gradient.abs().max()) == 0 for gradient in gradients.values())


def task_of_step(model: Any, step: int) -> str:
    model.before_step(step)
    names = {objective.name for objective in model.step_objectives} - {"wpa"}
    return str(*names)
