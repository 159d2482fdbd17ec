"""The step against plain PyTorch: accumulation, clipping, groups, rates, precision, seeds."""

import dataclasses
import itertools
import math

import pytest
import torch
from helpers import train_fakes as fakes
from helpers.errors import raises
from helpers.train_fakes import (
    FakeLoader,
    Regression,
    TwoTowers,
    TwoTowersConfig,
    make_batch,
    step_of,
)
from torch import Tensor, nn

from medvl.common.seeding import derive
from medvl.data import EvalTransform
from medvl.errors import ConfigError, TrainingError
from medvl.models import System
from medvl.schema import Batch, Losses
from medvl.train import (
    Constant,
    Cosine,
    CosineRestarts,
    Linear,
    OptimConfig,
    Plateau,
    StepDecay,
    seeded,
)
from medvl.train.optim.optimizer import LearningRate, build_optimizer, parameter_groups, set_lr
from medvl.train.parallel.distributed import BatchStream


@pytest.mark.fault("N2")
def test_accumulation_of_a_mean_loss_equals_the_large_batch() -> None:
    big, small = Regression(), Regression()
    whole = step_of(big, fakes.optim())(0, 1e-2, [make_batch(list(range(12)))], 1)
    parts = [make_batch(list(range(start, start + 4))) for start in (0, 4, 8)]
    in_parts = step_of(small, fakes.optim())(0, 1e-2, parts, 3)
    torch.testing.assert_close(small.linear.weight, big.linear.weight, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(in_parts.grad_norm, whole.grad_norm, rtol=1e-5, atol=0)
    mean = sum(losses.total for losses in in_parts.losses) / 3
    torch.testing.assert_close(mean, whole.losses[0].total)
    assert in_parts.pairs == whole.pairs == 12


@pytest.mark.parametrize(
    ("optimizer", "amsgrad"), [("adam", False), ("adam", True), ("adamw", True), ("sgd", False)]
)
def test_step_equals_the_plain_optimiser(optimizer: str, amsgrad: bool) -> None:
    config = OptimConfig(
        optimizer=optimizer,
        lr=0.03,
        weight_decay=0.1,
        momentum=0.7,
        betas=(0.8, 0.95),
        eps=1e-6,
        amsgrad=amsgrad,
    )
    ours, plain = Regression(), Regression()
    step = step_of(ours, config)
    groups = [
        {"params": [plain.linear.weight], "weight_decay": 0.1},
        {"params": [plain.linear.bias]},
    ]
    reference: torch.optim.Optimizer
    if optimizer == "sgd":
        reference = torch.optim.SGD(groups, lr=0.03, momentum=0.7, weight_decay=0.0)
    else:
        kind = torch.optim.Adam if optimizer == "adam" else torch.optim.AdamW
        settings = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.0}
        reference = kind(groups, **settings, amsgrad=amsgrad, fused=True)
    for number in range(4):
        step(number, 0.03, [make_batch([number, 10 + number])], 1)
        reference.zero_grad()
        plain(make_batch([number, 10 + number])).total.backward()
        reference.step()
    torch.testing.assert_close(ours.linear.weight, plain.linear.weight, rtol=0, atol=0)
    torch.testing.assert_close(ours.linear.bias, plain.linear.bias, rtol=0, atol=0)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_clipping_by_value_limits_each_gradient(clip_norm: float | None) -> None:
    ours, plain = Regression(), Regression()
    step = step_of(
        ours, OptimConfig(optimizer="sgd", momentum=0, lr=0.1, clip_norm=clip_norm, clip_value=0.01)
    )
    step(0, 0.1, [make_batch([1, 2, 30])], 1)
    plain(make_batch([1, 2, 30])).total.backward()
    if clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(plain.parameters(), clip_norm)
    assert plain.linear.weight.grad.abs().max() > 0.01
    expected = plain.linear.weight - 0.1 * plain.linear.weight.grad.clamp(-0.01, 0.01)
    torch.testing.assert_close(ours.linear.weight, expected)
    with raises(ConfigError, "out_of_range", "clip_value"):
        OptimConfig(clip_value=0.0)


def test_clipping_scales_the_gradient_and_returns_the_norm_before() -> None:
    model = Regression()
    before = model.linear.weight.detach().clone(), model.linear.bias.detach().clone()
    result = step_of(model, fakes.optim(optimizer="sgd", momentum=0.0, clip_norm=0.05))(
        0, 1.0, [make_batch(list(range(8)))], 1
    )
    assert result.grad_norm.item() > 0.05
    moved = torch.cat(
        [(model.linear.weight - before[0]).flatten(), (model.linear.bias - before[1]).flatten()]
    )
    assert moved.norm().item() == pytest.approx(0.05, rel=1e-4)


def test_dropout_depends_on_seed_step_and_micro_batch_only() -> None:
    def losses(seed: int, step: int, noise: int) -> list[float]:
        torch.manual_seed(noise)
        model = TwoTowers(TwoTowersConfig(dropout=0.5))
        result = step_of(model, fakes.optim(), seed=seed)(
            step, 1e-2, [make_batch([0, 1, 2])] * 2, 2
        )
        return [loss.total.item() for loss in result.losses]

    first = losses(0, 0, noise=1)
    assert first == losses(0, 0, noise=2)
    assert first[0] != first[1]
    assert first != losses(0, 1, noise=1)
    assert first != losses(1, 0, noise=1)


def test_derived_seeds_do_not_collide() -> None:
    places = list(itertools.product(range(2), range(20), range(2), range(8)))
    assert len({derive(seed, "step", *place) for seed, *place in places}) == len(places)


def test_seeded_gives_equal_models_and_restores_the_generator() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with seeded(7):
        one = nn.Linear(4, 4)
    with seeded(7):
        two = nn.Linear(4, 4)
    with seeded(8):
        other = nn.Linear(4, 4)
    assert torch.equal(one.weight, two.weight)
    assert not torch.equal(one.weight, other.weight)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.fault("N4")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bit_autocast_stays_near_32_bits_and_keeps_float32_weights(
    precision: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "medvl.train.optim.optimizer._cpu_multiplies_bf16", lambda: True
    )  # on any processor
    full, half, ranks = Regression(), Regression(), fakes.one_rank(device)
    in_full, in_half = (
        step_of(full, fakes.optim(), ranks=ranks),
        step_of(half, fakes.optim(), precision, ranks),
    )
    for number in range(5):
        in_full(number, 0.01, [make_batch([number, 5])], 1)
        tries = [in_half(number, 0.01, [make_batch([number, 5])], 1)]
        while tries[-1].scale_search:  # fp16 begins with a scale at which this loss overflows
            tries.append(in_half(number, 0.01, [make_batch([number, 5])], 1))
        assert tries[-1].updated
        assert len(tries) == 1 or (precision, number) == ("fp16", 0)
    assert half.linear.weight.dtype is torch.float32
    assert not torch.equal(half.linear.weight, full.linear.weight)
    torch.testing.assert_close(half.linear.weight, full.linear.weight, rtol=0, atol=0.02)


def test_channels_last_reaches_the_model() -> None:
    seen: list[bool] = []

    class Look(Regression):
        def forward(self, batch: object) -> object:
            seen.append(batch.image_BCHW.is_contiguous(memory_format=torch.channels_last))
            return super().forward(batch)

    batch = make_batch([0, 1])
    batch.image_BCHW = batch.image_BCHW.expand(-1, 3, -1, -1).contiguous()
    model = Look()
    model.linear = nn.Linear(3 * fakes.SIZE**2, 1)
    step_of(model, fakes.optim(), channels_last=True)(0, 1e-2, [batch], 1)
    assert seen == [True]


@pytest.mark.parametrize(
    ("fields", "during"),
    [
        ({}, True),
        ({"image_of_B": torch.tensor([0, 0])}, False),
        ({"has_image_B": torch.tensor([True, False])}, False),
        ({"has_text_B": torch.tensor([True, False])}, False),
    ],
)
def test_cudnn_does_not_benchmark_every_number_of_images(
    fields: dict[str, Tensor], during: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that share an image, or lack one, make batches of ever new numbers of images."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    step = step_of(Regression(), fakes.optim())
    step.place(dataclasses.replace(make_batch([0, 1]), **fields))
    step.place(make_batch([0, 1]))
    assert torch.backends.cudnn.benchmark is during


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 2, 3)
        self.norm = nn.LayerNorm([4, 4])  # its weight has two dimensions
        self.batch_norm = nn.BatchNorm2d(2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied_too = self.tied
        self.temperature = nn.Parameter(torch.tensor(0.1))
        self.position = nn.Parameter(torch.zeros(1, 3, 2))


def test_parameter_groups_exclude_norms_from_decay_and_skip_frozen_parameters() -> None:
    model = Towers()
    groups = parameter_groups(model, OptimConfig(lr=1e-3, weight_decay=0.2))
    decayed, spared = sorted(groups, key=lambda group: -group["weight_decay"])
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert {names[p] for p in decayed["params"]} == {
        "convolution.weight",
        "tied.weight",
        "position",
    }
    assert {names[p] for p in spared["params"]} == {
        *(
            "convolution.bias",
            "norm.weight",
            "norm.bias",
            "batch_norm.weight",
            "batch_norm.bias",
            "temperature",
        )
    }
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.2, 0.0)


def test_schedule_keeps_the_rates_of_a_models_own_groups() -> None:
    class Own(Towers):
        def parameter_groups(
            self, lr: float, weight_decay: float, layer_decay: float = 1.0
        ) -> list[dict[str, object]]:
            return [
                {
                    "params": [self.tied.weight],
                    "lr": lr * layer_decay,
                    "weight_decay": weight_decay,
                },
                {"params": [self.temperature], "lr": lr, "weight_decay": 0.0},
                {"params": [], "lr": lr, "weight_decay": 0.0},
            ]

    optimizer = build_optimizer(Own(), OptimConfig(lr=0.2, layer_decay=0.5, weight_decay=0.1))
    assert [group["lr_scale"] for group in optimizer.param_groups] == [0.5, 1.0]
    set_lr(optimizer, 0.02)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]

    class Plain(Towers):
        def parameter_groups(self, lr: float, weight_decay: float) -> list[dict[str, object]]:
            return [{"params": [self.tied.weight], "lr": lr, "weight_decay": weight_decay}]

    with raises(ConfigError, "unsupported", "layer_decay"):
        build_optimizer(Plain(), OptimConfig(layer_decay=0.5))


def test_build_optimizer_refuses_a_frozen_model() -> None:
    with raises(TrainingError, "empty"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False), OptimConfig())


def rates(schedule: object, total: int) -> list[float]:
    rate = LearningRate(OptimConfig(lr=0.4, schedule=schedule), total)
    return [rate.at(step) for step in range(total)]


def test_schedules_equal_their_closed_forms() -> None:
    assert rates(Constant(), 3) == [0.4] * 3
    assert rates(Constant(warmup_steps=2), 4) == pytest.approx([0.2, 0.4, 0.4, 0.4])
    assert rates(Linear(min_lr=0.1), 4) == pytest.approx([0.4, 0.325, 0.25, 0.175])
    assert rates(Linear(warmup_steps=2), 4) == pytest.approx([0.2, 0.4, 0.4, 0.2])
    cosine = [0.1 + 0.3 * (1 + math.cos(math.pi * step / 10)) / 2 for step in range(10)]
    assert rates(Cosine(min_lr=0.1), 10) == pytest.approx(cosine)
    assert rates(Cosine(warmup_steps=4), 3) == pytest.approx([0.1, 0.2, 0.3])


def test_cosine_restarts_are_those_of_torch() -> None:
    rate = LearningRate(
        OptimConfig(lr=0.4, schedule=CosineRestarts(epochs=3, min_lr=0.1)), 50, steps_per_epoch=2
    )
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=3, eta_min=0.1)
    for epoch in range(8):
        assert (
            rate.at(2 * epoch)
            == rate.at(2 * epoch + 1)
            == pytest.approx(optimizer.param_groups[0]["lr"])
        )
        optimizer.step()
        schedule.step()
    assert not rate.depends_on_length


def test_step_decay_equals_torch_by_epochs() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    rate = LearningRate(OptimConfig(lr=0.4, schedule=StepDecay(epochs=2)), 21, steps_per_epoch=3)
    for epoch in range(7):
        expected = optimizer.param_groups[0]["lr"]
        assert [rate.at(3 * epoch + step) for step in range(3)] == pytest.approx([expected] * 3)
        optimizer.step()
        scheduler.step()
    with raises(ConfigError, "out_of_range", "epochs"):
        StepDecay(epochs=0)


def test_cosine_equals_torch() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.01)
    expected = []
    for _ in range(20):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates(Cosine(min_lr=0.01), 20) == pytest.approx(expected)


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("patience", [0, 2])
def test_plateau_equals_torch(mode: str, patience: int) -> None:
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.4)
    reference = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode=mode, factor=0.5, patience=patience, threshold=0.05, min_lr=0.01
    )
    schedule = Plateau(factor=0.5, patience=patience, threshold=0.05, min_lr=0.01)
    rate = LearningRate(OptimConfig(lr=0.4, schedule=schedule), 1, mode)
    for value in torch.rand(40, generator=generator).add(0.5).tolist():
        reference.step(value)
        rate.observe(value)
        assert rate.at(0) == pytest.approx(optimizer.param_groups[0]["lr"])
    assert rate.at(0) == 0.01


def test_plateau_counts_nan_as_no_improvement_and_restores_its_state() -> None:
    rate = LearningRate(OptimConfig(lr=1.0, schedule=Plateau(patience=1)), 1)
    assert [rate.observe(value) for value in (math.nan, 2.0, math.nan)] == [False, False, False]
    again = LearningRate(OptimConfig(lr=1.0, schedule=Plateau(patience=1)), 1)
    again.load_state_dict(rate.state_dict())
    assert again.observe(3.0)
    assert again.at(0) == 0.5


def test_stream_groups_micro_batches_within_epochs() -> None:
    loader = FakeLoader(20, 4)
    stream = BatchStream(loader, accumulate=3)
    assert stream.steps_per_epoch == 2
    assert [stream.micro_batches(step) for step in range(4)] == [3, 2, 3, 2]
    sizes = [len(list(stream.take(step))) for step in range(4)]
    assert sizes == [3, 2, 3, 2]
    assert len(loader.handed_out) == 10
    assert sorted(key for keys in loader.handed_out[:5] for key in keys) == sorted(
        f"s{i}" for i in range(20)
    )


def test_stream_refuses_a_loader_with_another_number_of_batches() -> None:
    class Short(FakeLoader):
        @property
        def steps_per_epoch(self) -> int:
            return 7

        def __iter__(self) -> object:
            yield from [make_batch([0])] * 3

    with raises(TrainingError, "mismatch"):
        list(BatchStream(Short(20, 4), accumulate=7).take(0))

    class Long(FakeLoader):
        def __iter__(self) -> object:
            yield from [make_batch([0])] * 6

    stream = BatchStream(Long(20, 4), accumulate=1)
    with raises(TrainingError, "mismatch"):
        [list(stream.take(step)) for step in range(6)]
    with raises(TrainingError, "empty"):
        BatchStream(FakeLoader(3, 4), accumulate=1)


class SystemWithHooks(System):
    """A regression that records the calls of its hooks."""

    def __init__(self) -> None:
        super().__init__(None, transform=EvalTransform(size=16), tokenizer=None)
        self.regression = Regression()
        self.calls: list[tuple[str, int]] = []

    @classmethod
    def build(cls, config: object, *, pretrained: bool, tokenizer: object) -> "SystemWithHooks":
        return cls()

    def forward(self, batch: Batch) -> Losses:
        self.calls.append(("forward", len(batch)))
        losses = self.regression(batch)
        return Losses.sum(loss=losses.total * (math.inf if batch.keys == ["s9"] else 1.0))

    def before_step(self, step: int) -> None:
        self.calls.append(("before", step))

    def after_step(self, step: int) -> None:
        assert not torch.is_grad_enabled()
        self.calls.append(("after", step))


def test_step_calls_the_hooks_of_a_system_but_not_after_a_skipped_update() -> None:
    model = SystemWithHooks()
    step = step_of(model)
    assert step(4, 1e-2, [make_batch([0, 1]), make_batch([2])], 2).updated
    assert not step(5, 1e-2, [make_batch([9])], 1).updated
    assert model.calls == [
        *[("before", 4), ("forward", 2), ("forward", 1), ("after", 4)],
        *[("before", 5), ("forward", 1)],
    ]
