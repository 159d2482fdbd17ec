"""GradCache: gradients in parts equal those of the complete batch, for every contrastive system and
on two ranks.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import train_fakes as fakes
from helpers.contrastive_systems import PAIRS, SYSTEMS, clip, convirt, make_batch
from helpers.errors import raises
from helpers.two_ranks import on_two_ranks
from torch import Tensor, nn

import medvl
from medvl.errors import CheckpointError, ConfigError
from medvl.losses.pairs.blockwise import same_pairs
from medvl.models.dual_encoders.bases.base import groups_of
from medvl.models.dual_encoders.bases.pairs import Pairs
from medvl.schema import Batch
from medvl.train.config import TrainConfig
from medvl.train.fault_tolerance import checkpoint
from medvl.train.loop.step import GradCache, Step
from medvl.train.optim.optimizer import Precision
from medvl.train.parallel.distributed import RankInfo, join

COUNTS = (2, 5)
"""Pairs of the two ranks; in parts of two, one part and three."""


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        near = {"rtol": 1e-4, "atol": 1e-6 + 1e-5 * tensor.abs().max().item()}
        torch.testing.assert_close(
            found[name], tensor, **near, msg=lambda text, n=name: f"{n}: {text}"
        )


def draw(part: int) -> None:
    torch.manual_seed(part)


def cached(model: nn.Module, part: int, batch: Batch, kind: Any = "fp32", count: int = 1) -> Any:
    return GradCache(model, part, Precision(kind, fakes.ONE_RANK.device))(batch, count, draw)


@pytest.mark.fault("N2")
@pytest.mark.parametrize("name", SYSTEMS)
def test_grad_cache_gradient_equals_that_of_the_complete_batch(name: str) -> None:
    """In parts of one, two, two and two pairs, and of all. Of the learned temperature and bias too;
    with soft targets, a missing image, texts of other lengths.
    """
    model, batch = SYSTEMS[name]().eval(), make_batch(name)
    expected = model(batch)
    (expected.total / 3).backward()
    at_once = gradients(model)
    assert any(gradient.abs().max() > 1e-4 for gradient in at_once.values())
    for part in (2, PAIRS):
        model.zero_grad(set_to_none=True)
        found = cached(model, part, batch, count=3)
        torch.testing.assert_close(found.total, expected.total)
        assert found.terms.keys() == expected.terms.keys()
        assert_same(gradients(model), at_once)


def test_grad_cache_in_parts_of_one_row_trains_batch_norms() -> None:
    """Of tiny images the last batch norm has one value per channel, of which torch takes no
    statistics.
    """
    model, batch = convirt().train(), make_batch("convirt")
    losses = cached(model, 1, batch)
    assert losses.total.isfinite()
    found = gradients(model)
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    assert all(f"{name}.weight" in found for name in norms)
    assert all(gradient.isfinite().all() for gradient in found.values())
    assert all(module.training for module in model.modules())


def test_grad_cache_passes_use_the_same_dropout() -> None:
    """Against one graph over all parts, each drawn with its own seed."""
    model, batch = clip(), make_batch()
    parts = []
    for number, rows in enumerate((slice(0, 1), slice(1, 3), slice(3, 5), slice(5, 7))):
        draw(number)
        parts.append(model.encode_pairs(make_batch(rows=rows)))
    model.compare_pairs(Pairs.cat(parts)).total.backward()
    expected = gradients(model)
    model.zero_grad(set_to_none=True)
    cached(model, 2, batch)
    assert_same(gradients(model), expected)
    model.zero_grad(set_to_none=True)
    GradCache(model, 2, Precision("fp32", fakes.ONE_RANK.device))(
        batch, 1, lambda part: draw(part + 1)
    )
    name = "text_head.weight"
    assert not torch.allclose(gradients(model)[name], expected[name], rtol=1e-2)


def test_grad_cache_builds_the_graph_of_one_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = clip()
    seen: list[tuple[int, bool]] = []
    encode = model.encode_pairs

    def record(batch: Batch) -> Pairs:
        seen.append((len(batch), torch.is_grad_enabled()))
        return encode(batch)

    monkeypatch.setattr(model, "encode_pairs", record)
    cached(model, 3, make_batch())
    assert seen == [(2, False), (2, False), (3, False), (2, True), (2, True), (3, True)]


def test_grad_cache_updates_running_statistics_once() -> None:
    """Batch norm's statistics are those of the parts, each seen once."""
    model, once = convirt(), convirt()
    cached(model, 4, make_batch("convirt"))
    with torch.no_grad():
        for rows in (slice(0, 3), slice(3, 7)):
            once.encode_pairs(make_batch("convirt", rows))
    counts = [name for name, _ in once.named_buffers() if name.endswith("num_batches_tracked")]
    assert counts
    expected = dict(once.named_buffers())
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, expected[name])
    assert expected[counts[0]] == 2


def test_grad_cache_leaves_a_frozen_encoder_without_gradient() -> None:
    model, batch = clip().eval(), make_batch()
    model.image_encoder.requires_grad_(False)
    model.image_head.requires_grad_(False)
    model(batch).total.backward()
    expected = gradients(model)
    model.zero_grad(set_to_none=True)
    cached(model, 2, batch)
    assert_same(gradients(model), expected)


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_grad_cache_supports_16_bits_and_loss_scaling(kind: Any) -> None:
    model, batch = clip().eval(), make_batch()
    precision = Precision(kind, fakes.ONE_RANK.device)
    with precision.autocast():
        total = model(batch).total
    precision.backward(total)
    expected = gradients(model)
    model.zero_grad(set_to_none=True)
    cached(model, 3, batch, kind)
    for name, found in gradients(model).items():
        assert (found - expected[name]).norm() <= 0.03 * expected[name].norm() + 1e-6, name


def step_of(model: nn.Module, part: int | None, ranks: RankInfo = fakes.ONE_RANK) -> Step:
    sgd = fakes.optim(optimizer="sgd", momentum=0.0)
    return fakes.step_of(model, sgd, ranks=ranks, grad_cache=part)


def test_grad_cache_accumulates_over_micro_batches() -> None:
    weights = []
    for part in (None, 2):
        model = clip().eval()
        micro = [make_batch(rows=slice(0, 4)), make_batch(rows=slice(4, 7))]
        result = step_of(model, part)(0, 1.0, micro, 2)
        assert result.pairs == PAIRS
        weights.append(dict(model.named_parameters()))
    assert_same(*weights)


def test_grad_cache_skips_non_finite_losses() -> None:
    model = convirt().eval()  # a part has a single text, too few for batch norm
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    encode = model.encode_text
    model.encode_text = lambda ids, mask: (
        encode(ids, mask) * torch.where(ids[:, :1] == ids[0, 0], torch.inf, 1.0)
    )
    result = step_of(model, 3)(0, 1.0, [make_batch("convirt")], 1)
    assert not result.updated
    assert result.nonfinite_keys() == list(map(str, range(PAIRS)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_grad_cache_refuses_other_models_and_compilation(tmp_path: Path) -> None:
    with raises(ConfigError, "unsupported", "grad_cache"):
        step_of(fakes.TwoTowers(), 2)
    with raises(ConfigError, "conflict", "grad_cache"):
        TrainConfig(run_dir=tmp_path, steps=1, global_batch=4, grad_cache=2, compile=True)
    with raises(ConfigError, "out_of_range", "grad_cache"):
        TrainConfig(run_dir=tmp_path, steps=1, global_batch=4, grad_cache=0)


def test_grad_cache_setting_is_used_and_part_of_the_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "model_files", fakes.FakeModelFiles)
    sizes: list[int] = []

    def run(**settings: Any) -> Any:
        model = convirt()
        encode = model.encode_pairs
        model.encode_pairs = lambda batch: sizes.append(len(batch)) or encode(batch)
        config = fakes.config(tmp_path, global_batch=4, **settings)
        return fakes.train(model, fakes.FakeLoader(8, 4), optim=fakes.optim(), config=config)

    assert run(grad_cache=3, epochs=1).step == 2
    assert sizes == [2, 2] * 4
    with raises(CheckpointError, "mismatch", "train.grad_cache"):
        run(grad_cache=2, epochs=2)


def test_positive_groups_are_numbered_consistently_across_parts() -> None:
    whole = groups_of(make_batch(), "either")
    parts = [groups_of(make_batch(rows=rows), "either") for rows in (slice(0, 3), slice(3, 7))]
    for study_or_text, first, second in zip(whole, *parts, strict=True):
        assert torch.equal(study_or_text, torch.cat([first, second]))
    assert (whole[0][:, None] == whole[0]).sum() == PAIRS + 4
    assert groups_of(make_batch(), "own") == ()
    with pytest.raises(ConfigError, match="positives is 'study', but the batches have no studies"):
        groups_of(dataclasses.replace(make_batch(), studies=None), "study")
    for name in ("convirt", "clip"):
        with raises(ConfigError, "unknown_name", "positives"):
            medvl.create_model(name, positives="texts")


def test_equal_sets_of_positive_labels_are_positives() -> None:
    """Rows: {a}, {a, b}, {a} with an uncertain b, {a, b}, none, none with the text of row 0, none."""
    nan = torch.nan
    labels_BL = torch.tensor(
        [[1, 0], [1, 1], [1, -1], [1, 1], [0, -1], [nan, nan], [0, 0]], dtype=torch.float32
    )
    ids_BT = torch.arange(7)[:, None] % 5  # rows 0 and 5, and 1 and 6, have equal texts
    batch = dataclasses.replace(
        make_batch(),
        ids_BT=ids_BT,
        mask_BT=torch.ones_like(ids_BT, dtype=torch.bool),
        labels_BL=labels_BL,
    )
    together = {(0, 2), (1, 3), (0, 5), (1, 6)}
    same_BB = same_pairs(*groups_of(batch, "labels"))
    found = {(row, column) for row, column in same_BB.nonzero().tolist() if row < column}
    assert found == together
    parts = [
        groups_of(
            dataclasses.replace(
                batch, ids_BT=ids_BT[rows], mask_BT=batch.mask_BT[rows], labels_BL=labels_BL[rows]
            ),
            "labels",
        )
        for rows in (slice(0, 3), slice(3, 7))
    ]
    for whole, first, second in zip(groups_of(batch, "labels"), *parts, strict=True):
        assert torch.equal(whole, torch.cat([first, second]))
    with pytest.raises(ConfigError, match="the data have none"):
        groups_of(dataclasses.replace(batch, labels_BL=torch.empty(7, 0)), "labels")


@pytest.fixture(scope="module")
def found() -> list[dict[str, dict[str, Tensor]]]:
    """Weights after a step on two ranks, by system, of each rank."""
    return on_two_ranks(weights_after_a_step)


@pytest.mark.fault("N2")
@pytest.mark.parametrize("name", SYSTEMS)
def test_grad_cache_on_two_ranks_equals_one(
    name: str, found: list[dict[str, dict[str, Tensor]]]
) -> None:
    """Uneven ranks, of one part and of three, against one process without parts."""
    model = SYSTEMS[name]().eval()
    step_of(model, None)(0, 1.0, [make_batch(name)], 1)
    for of_rank in found:
        assert_same(of_rank[name], dict(model.named_parameters()))


def weights_after_a_step() -> dict[str, dict[str, Tensor]]:
    """Make a step of every system on this rank, wrapped as the trainer wraps it."""
    with join("cpu") as ranks:
        mine = slice(0, COUNTS[0]) if ranks.rank == 0 else slice(COUNTS[0], PAIRS)
        weights = {}
        for name, make in SYSTEMS.items():
            model = make().eval()
            step_of(model, 2, ranks)(0, 1.0, [make_batch(name, mine)], 1)
            weights[name] = {key: parameter.detach() for key, parameter in model.named_parameters()}
        return weights
