"""Non-finite values, skipped updates and their budget."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import train_fakes as fakes
from helpers.errors import raises
from helpers.train_fakes import FakeLoader, TwoTowers, TwoTowersConfig, make_batch, records, train
from torch import nn

from medvl.errors import TrainingError
from medvl.models.dual_encoders.bases.queries import QueryBook
from medvl.schema import Batch, Losses
from medvl.train.fault_tolerance import checkpoint
from medvl.train.fault_tolerance.guards import BufferGuard, LossSpikeDetector, propagate_nonfinite
from medvl.train.loop.step import Step

BAD = "s3"


@pytest.fixture(autouse=True)
def _fake_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "model_files", fakes.FakeModelFiles)


class Sick(TwoTowers):
    """Breaks in one way or another wherever the sample `BAD` is in the batch; has BatchNorm, so
    also by its buffers.
    """

    def __init__(self, how: str) -> None:
        super().__init__(TwoTowersConfig(norm=True))
        self.how = how

    def forward(self, batch: Batch) -> Losses:
        bad = BAD in batch.keys
        if bad and self.how == "activation":
            self.norm(
                torch.full((2, 8), torch.nan)
            )  # what a NaN in the input does to running statistics
        losses = super().forward(batch)
        if not bad:
            return losses
        if self.how in ("loss nan", "activation"):
            return Losses(total=losses.total * torch.nan, terms=losses.terms)
        if self.how == "loss inf, gradient finite":
            return Losses(total=losses.total + torch.inf, terms=losses.terms)
        return Losses(
            total=_BadGradient.apply(losses.total, float(self.how.split()[-1])), terms=losses.terms
        )


class _BadGradient(torch.autograd.Function):
    """The identity, but its gradient is a value of one's choice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: float) -> torch.Tensor:
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.full_like(grads[0], ctx.value), None


WAYS = ["loss nan", "loss inf, gradient finite", "gradient nan", "gradient inf", "activation"]


def step_of(model: nn.Module, precision: str = "fp32", clip_norm: float | None = None) -> Step:
    return fakes.step_of(
        model, fakes.optim(optimizer="sgd", momentum=0.9, clip_norm=clip_norm), precision
    )


@pytest.mark.fault("F14")
@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("how", WAYS)
def test_non_finite_step_changes_no_weight_buffer_or_momentum(
    how: str, clip_norm: float | None
) -> None:
    model = Sick(how)
    step = step_of(model, clip_norm=clip_norm)
    assert step(0, 0.1, [make_batch([0, 1])], 1).updated
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    momentum = step.optimizer.state[model.image.weight]["momentum_buffer"].clone()
    result = step(
        1, 0.1, [make_batch([4, 5]), make_batch([2, 3])], 2
    )  # the bad one is the second micro-batch
    assert not result.updated
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(step.optimizer.state[model.image.weight]["momentum_buffer"], momentum)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert result.nonfinite_keys() == ([] if how.startswith("gradient") else ["s2", "s3"])
    assert step(2, 0.1, [make_batch([6, 7])], 1).updated
    assert not torch.equal(model.image.weight, before["image.weight"])


@pytest.mark.fault("F14")
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("how", WAYS)
def test_update_that_the_device_leaves_out_changes_nothing(how: str, amsgrad: bool) -> None:
    """The path of a GPU, with Adam's fused kernel for the CPU: in the first step, and after one
    that was made.
    """
    batches = [[2, 3], [0, 1], [3, 4], [6, 7]]  # those with sample 3 are bad
    outcomes = []
    for fused in (True, False):
        torch.manual_seed(0)
        model = Sick(how)
        step = fakes.step_of(model, fakes.optim(amsgrad=amsgrad, clip_norm=1.0, eps=0.01))
        for group in step.optimizer.param_groups:
            group["fused"] = fused
        assert step._device_decides() is fused
        results = [step(number, 0.01, [make_batch(rows)], 1) for number, rows in enumerate(batches)]
        assert [result.updated for result in results] == [False, True, False, True]
        assert "found_inf" not in vars(step.optimizer)
        state = step.optimizer.state[model.image.weight]
        outcomes.append(
            [*model.state_dict().values(), *(value.float() for value in state.values())]
        )
    for ours, theirs in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_propagate_nonfinite_keeps_finite_losses() -> None:
    loss = torch.tensor(3.7, requires_grad=True)
    guarded = propagate_nonfinite(loss)
    guarded.backward()
    assert guarded.item() == loss.item()
    assert loss.grad is not None
    assert loss.grad.item() == 1.0


def test_buffer_guard_restores_any_dtype() -> None:
    module = nn.Module()
    module.register_buffer("queue", torch.arange(6.0).reshape(2, 3))
    module.register_buffer("count", torch.tensor(4))
    module.register_buffer("seen", torch.tensor([True, False]))
    guard = BufferGuard(module)
    guard.save()
    module.queue.fill_(torch.nan)
    module.count += 1
    module.seen.logical_not_()
    guard.restore()
    assert torch.equal(module.queue, torch.arange(6.0).reshape(2, 3))
    assert module.count.item() == 4
    assert module.seen.tolist() == [True, False]


def test_buffer_guard_leaves_what_is_written_once() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), QueryBook(["a", "b"], 2))
    guard = BufferGuard(module)
    guard.save()
    module[0](torch.randn(4, 2))
    module[1].fill(lambda sentences: torch.ones(len(sentences), 2))
    guard.restore()
    assert torch.equal(module[0].running_mean, torch.zeros(2))
    assert torch.equal(module[1].vectors_QD, torch.ones(2, 2))


@pytest.mark.fault("F14")
def test_skipped_updates_are_counted_logged_and_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = train(
        Sick("loss nan"),
        FakeLoader(16, 4),
        optim=fakes.optim(),
        config=fakes.config(tmp_path, log_every=4),
    )
    assert (result.step, result.skipped) == (8, 2)  # once an epoch
    skips = records(tmp_path, "skip")
    assert len(skips) == 2
    assert all(BAD in row["keys"] and len(row["keys"]) == 4 for row in skips)
    assert caplog.text.count("non-finite loss or gradient, update skipped; samples: ") == 2
    assert BAD in caplog.text
    assert [row["skipped"] for row in records(tmp_path, "train")] == [1, 2]
    assert all(
        row["loss"] > 0 for row in records(tmp_path, "train")
    )  # means over the updates that were made
    assert all(tensor.isfinite().all() for tensor in fakes.weights(tmp_path).values())


@pytest.mark.fault("F14")
def test_exceeded_budget_fails_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    with raises(TrainingError, "nonfinite", "nonfinite_budget") as raised:
        train(
            Sick("gradient inf"),
            FakeLoader(16, 4),
            optim=fakes.optim(),
            config=fakes.config(tmp_path, nonfinite_budget=1, checkpoint_every=1),
        )
    assert "lower optim.lr or set optim.clip_norm" in str(raised.value)
    state = json.loads((tmp_path / "last" / "train_state" / "state.json").read_text())
    assert state["skipped"] == 1
    assert 4 <= state["step"] < 8


@pytest.mark.fault("F14")
def test_budget_counts_across_interruptions(tmp_path: Path) -> None:
    def run(epochs: int) -> Any:
        settings = fakes.config(tmp_path, epochs=epochs, nonfinite_budget=2)
        return train(Sick("loss nan"), FakeLoader(16, 4), optim=fakes.optim(), config=settings)

    assert run(1).skipped == 1
    assert run(2).skipped == 2
    with raises(TrainingError, "nonfinite", "nonfinite_budget"):
        run(3)


class Steep(TwoTowers):
    """Its gradient overflows in 16 bits at the scale that a run starts with."""

    def forward(self, batch: Batch) -> Losses:
        losses = super().forward(batch)
        return Losses(total=_Steep.apply(losses.total), terms=losses.terms)


def test_fp16_scale_search_does_not_use_the_budget(device: torch.device, tmp_path: Path) -> None:
    """At the scale it starts with, this loss overflows in 16 bits: that is the search, not the
    data.
    """
    result = train(
        Steep(),
        FakeLoader(16, 4),
        optim=fakes.optim(clip_norm=1.0),
        config=fakes.config(tmp_path, precision="fp16", nonfinite_budget=0, device=device.type),
    )
    state = json.loads((result.last / "train_state" / "state.json").read_text())
    assert result.skipped == 0
    assert state["overflows"] == 4
    assert state["scaler"]["scale"] == 65536 / 2**4
    assert "overflows" in records(tmp_path, "train")[-1]


@pytest.mark.parametrize("stopped", [2, 6])
def test_resumed_fp16_run_continues_with_its_scale(
    stopped: int, device: torch.device, tmp_path: Path
) -> None:
    """Stopped in the middle of the search, and after it: the same overflows, scale and weights
    as without a stop.
    """

    def run(name: str, steps: int) -> dict[str, Any]:
        settings = {
            "epochs": None,
            "steps": steps,
            "precision": "fp16",
            "device": device.type,
            "deterministic": True,
        }
        result = train(
            Steep(),
            FakeLoader(16, 4),
            optim=fakes.optim(),
            config=fakes.config(tmp_path / name, **settings),
        )
        state = json.loads((result.last / "train_state" / "state.json").read_text())
        return {name: state[name] for name in ("scaler", "overflows", "skipped")}

    whole = run("whole", 8)
    assert run("cut", stopped)["scaler"]["scale"] == 65536 / 2 ** min(stopped, 4)
    assert run("cut", 8) == whole == {"scaler": whole["scaler"], "overflows": 4, "skipped": 0}
    assert fakes.weights_hash(tmp_path / "cut") == fakes.weights_hash(tmp_path / "whole")


def test_fp16_training_continues_after_a_spike() -> None:
    step = fakes.step_of(
        fakes.Regression(), precision="fp16", spikes=LossSpikeDetector(1.5, [1e-9] * 64)
    )
    found = [step(number, 1e-3, [make_batch([0, 1, 2, 3])], 1) for number in range(4)]
    scales = [result.scale_search for result in found]
    assert [result.spike for result in found] == [not searching for searching in scales]
    assert scales[-2:] == [False, False]
    assert step.precision.scaler.get_scale() == 65536 / 2 ** sum(scales)  # a spike is no overflow


class _Steep(torch.autograd.Function):
    """The identity, whose gradient overflows once the incoming one is above 4,096, as a 16-bit
    one would.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return torch.where(grads[0] > 4096, torch.inf, grads[0])


def test_fp16_non_finite_loss_uses_the_budget(tmp_path: Path) -> None:
    with raises(TrainingError, "nonfinite", "nonfinite_budget"):
        train(
            Sick("loss nan"),
            FakeLoader(16, 4),
            optim=fakes.optim(),
            config=fakes.config(tmp_path, precision="fp16", nonfinite_budget=0),
        )
