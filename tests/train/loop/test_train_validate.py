"""Validation, best checkpoint, early stopping, and records."""

import itertools
import json
import logging
import math
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import train_fakes as fakes
from helpers.errors import raises
from helpers.train_fakes import ONE_RANK, FakeLoader, TwoTowers, TwoTowersConfig, records, train
from torch import nn

from medvl.common.process import console
from medvl.errors import ConfigError, TrainingError
from medvl.losses.common import gather
from medvl.models.base import evaluating
from medvl.schema import Batch, Losses
from medvl.train import Constant, Cosine, Linear, Plateau
from medvl.train.fault_tolerance import checkpoint
from medvl.train.loop.logger import BestTracker, LossMeter, RunLogger, remove_records_after
from medvl.train.loop.state import validation_loss
from medvl.train.loop.step import StepResult
from medvl.train.optim.optimizer import Precision


@pytest.fixture(autouse=True)
def _fake_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "model_files", fakes.FakeModelFiles)


def run(run_dir: Path, scores: Iterator[float], patience: int | None = None, **changes: Any) -> Any:
    """Eight steps with a validation after each; the metric is what the test says."""
    return train(
        TwoTowers(),
        FakeLoader(16, 4),
        optim=fakes.optim(),
        config=fakes.config(
            run_dir,
            **{
                "best_metric": "auroc",
                "best_mode": "max",
                "validate_every": 1,
                "early_stop_patience": patience,
                **changes,
            },
        ),
        evals=[lambda model: {"auroc": next(scores)}],
    )


def validate(model: nn.Module, batches: list[Batch]) -> dict[str, float]:
    with evaluating(model):
        return validation_loss(
            model,
            batches,
            ranks=ONE_RANK,
            precision=Precision("fp32", ONE_RANK.device),
            seed=0,
            place=lambda batch: batch,
        )


def test_validation_loss_is_the_mean_over_samples() -> None:
    model = TwoTowers(TwoTowersConfig(dropout=0.5, norm=True))
    batches = fakes.valid_batches()
    assert [len(batch) for batch in batches] == [4, 4, 4, 4, 2]
    found = validate(model, batches)
    model.eval()
    with torch.no_grad():
        each = [(len(batch), model(batch)) for batch in batches]
    expected = sum(size * losses.total.item() for size, losses in each) / 18
    assert found["loss"] == pytest.approx(expected, rel=1e-6)
    assert found["loss"] == pytest.approx(found["loss/image_to_text"] + found["loss/text_to_image"])


def test_validation_is_deterministic_and_restores_modes() -> None:
    class Masking(TwoTowers):
        def forward(self, batch: Batch) -> Losses:
            assert not self.training
            assert not torch.is_grad_enabled()
            return Losses.sum(masked=super().forward(batch).total * torch.rand(()))

    model = Masking(TwoTowersConfig(norm=True))
    model.norm.eval()  # a model may keep a part in eval mode
    first = validate(model, fakes.valid_batches())
    torch.rand(5)
    assert validate(model, fakes.valid_batches()) == first
    assert model.training
    assert not model.norm.training


def test_non_finite_validation_loss_is_nan_and_never_best() -> None:
    class Broken(nn.Module):
        def forward(self, batch: Batch) -> Losses:
            return Losses.sum(broken=torch.tensor(torch.inf))

    assert math.isnan(validate(Broken(), fakes.valid_batches())["loss"])
    tracker = BestTracker(mode="min", patience=None)
    assert not tracker.observe(1, math.nan)
    assert tracker.best is None


def test_no_validation_batch_is_an_error() -> None:
    with raises(TrainingError, "empty"):
        validate(TwoTowers(), [])


def test_the_best_step_and_early_stopping(tmp_path: Path) -> None:
    scores = iter([0.5, 0.7, 0.7, 0.6, 0.8, math.nan, 0.75, 0.1])
    result = run(tmp_path, scores, patience=3)
    assert (result.stopped, result.step) == (
        "finished",
        8,
    )  # the third one in a row without improvement is the last
    assert (result.best_step, result.best_value) == (5, 0.8)
    assert result.metrics == {"auroc": 0.1}
    assert [row["auroc"] for row in records(tmp_path, "valid")] == [
        0.5,
        0.7,
        0.7,
        0.6,
        0.8,
        None,
        0.75,
        0.1,
    ]


def test_early_stopping_ends_the_run_saves_it_and_stays_ended(tmp_path: Path) -> None:
    result = run(tmp_path, iter([0.9, 0.8, 0.7, 0.6]), patience=2)
    assert (result.stopped, result.step, result.best_step) == ("early_stop", 3, 1)
    assert result.last.name == "step-00000003"
    again = run(tmp_path, iter([]), patience=2)
    assert (again.stopped, again.step, again.metrics) == ("early_stop", 3, {"auroc": 0.7})


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_run_ends_well_on_a_metric_that_is_not_finite(value: float, tmp_path: Path) -> None:
    """JSON has no such numbers: the last save would fail, and the final weights be lost."""
    result = run(tmp_path, itertools.chain([0.5] * 7, [value]))
    assert (result.stopped, result.last.name, result.best_value) == (
        "finished",
        "step-00000008",
        0.5,
    )
    assert result.save_failures == 0
    assert math.isnan(run(tmp_path, iter([])).metrics["auroc"])


def test_unknown_best_metric_is_refused(tmp_path: Path) -> None:
    with raises(ConfigError, "unknown_name", "best_metric"):
        run(tmp_path, iter([0.5]), best_metric="aurok")
    stopped = (tmp_path / "last").readlink().name
    assert stopped != "step-00000000"
    assert run(tmp_path, itertools.repeat(0.5)).step > int(stopped.removeprefix("step-"))


def test_two_evaluators_with_one_name_are_refused(tmp_path: Path) -> None:
    with raises(ConfigError, "conflict", "evals"):
        train(
            TwoTowers(),
            FakeLoader(16, 4),
            optim=fakes.optim(),
            config=fakes.config(tmp_path, best_metric="auroc"),
            evals=[lambda model: {"auroc": 0.5}, lambda model: {"auroc": 0.6}],
        )


def test_plateau_and_early_stopping_need_a_validation(tmp_path: Path) -> None:
    with raises(ConfigError, "conflict", "schedule"):
        train(
            TwoTowers(),
            FakeLoader(16, 4),
            optim=fakes.optim(schedule=Plateau()),
            config=fakes.config(tmp_path),
        )
    with raises(ConfigError, "conflict", "early_stop_patience"):
        train(
            TwoTowers(),
            FakeLoader(16, 4),
            optim=fakes.optim(),
            config=fakes.config(tmp_path, early_stop_patience=1),
        )


def test_loader_with_another_batch_size_is_refused(tmp_path: Path) -> None:
    with raises(ConfigError, "mismatch", "global_batch"):
        train(
            TwoTowers(),
            FakeLoader(16, 4),
            optim=fakes.optim(),
            config=fakes.config(tmp_path, accumulate=2),
        )


def test_validation_and_records_follow_their_intervals(tmp_path: Path) -> None:
    train(
        TwoTowers(),
        FakeLoader(20, 4),
        optim=fakes.optim(),
        config=fakes.config(
            tmp_path, validate_every=4, log_every=3, checkpoint_every=6, keep_last=9
        ),
        valid_loader=fakes.valid_batches(),
    )
    assert [row["step"] for row in records(tmp_path, "valid")] == [4, 8, 10]
    assert [row["step"] for row in records(tmp_path, "train")] == [3, 6, 9, 10]
    kept = sorted(int(path.name[5:]) for path in (tmp_path / "checkpoints").iterdir())
    best = {row["step"] for row in records(tmp_path, "valid")}
    assert {0, 6, 10} <= set(kept) <= {0, 6, 10} | best


def test_a_run_on_little_data_shortens_warmup_and_intervals(tmp_path: Path) -> None:
    """In proportion to the steps that the settings are meant for; a resumed run does so again."""
    optim = fakes.optim(schedule=Cosine(warmup_steps=100))
    settings = {
        "scale_below": 1000,
        "validate_every": 250,
        "checkpoint_every": 250,
        "log_every": 1,
        "keep_last": 9,
    }
    config = fakes.config(tmp_path, epochs=2, **settings)
    train(
        TwoTowers(),
        FakeLoader(84, 4),
        optim=optim,
        config=config,
        valid_loader=fakes.valid_batches(),
    )
    rates = [row["lr"] for row in records(tmp_path, "train")]
    assert len(rates) == 42
    assert rates.index(max(rates)) in (3, 4)  # four steps of warm-up
    assert max(rates) == pytest.approx(optim.lr)
    assert [row["step"] for row in records(tmp_path, "valid")] == [10, 20, 30, 40, 42]
    again = train(
        TwoTowers(),
        FakeLoader(84, 4),
        optim=optim,
        config=config,
        valid_loader=fakes.valid_batches(),
    )
    assert again.step == 42


@pytest.mark.parametrize(
    ("schedule", "warned"),
    [
        (Cosine(warmup_steps=100), True),
        (Linear(warmup_steps=6), True),
        (Constant(warmup_steps=2), True),
        (Plateau(warmup_steps=11), True),
        (Cosine(warmup_steps=1), False),
        (Constant(), False),
    ],
)
def test_settings_for_a_longer_run_are_named(
    schedule: Any, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ten steps here: a warm-up of more than an eighth of them, and validation that would come
    later.
    """
    config = fakes.config(tmp_path, validate_every=11 if warned else 10)
    with caplog.at_level("WARNING", "medvl"):
        train(
            TwoTowers(), FakeLoader(20, 4), optim=fakes.optim(schedule=schedule), config=config,
            valid_loader=fakes.valid_batches(),
        )  # fmt: skip
    assert ("--optim.schedule.warmup-steps 1 " in caplog.text) == warned
    assert ("--train.validate-every 2 " in caplog.text) == warned


def test_record_is_the_mean_since_the_previous_one(tmp_path: Path) -> None:
    settings = {"optim": fakes.optim(), "valid_loader": None}
    train(
        TwoTowers(),
        FakeLoader(24, 4),
        config=fakes.config(tmp_path / "each", epochs=1, log_every=1),
        **settings,
    )
    train(
        TwoTowers(),
        FakeLoader(24, 4),
        config=fakes.config(tmp_path / "three", epochs=1, log_every=3),
        **settings,
    )
    each, threes = records(tmp_path / "each", "train"), records(tmp_path / "three", "train")
    for name in ("loss", "loss/image_to_text", "grad_norm"):
        means = [sum(row[name] for row in each[start : start + 3]) / 3 for start in (0, 3)]
        assert [row[name] for row in threes] == pytest.approx(means)
    assert [row["epoch"] for row in threes] == [0.5, 1.0]
    timing = json.loads((tmp_path / "three" / "metrics.jsonl").read_text().splitlines()[0])[
        "timing"
    ]
    assert timing["pairs_per_second"] > 0
    assert 0 <= timing["wait_share"] <= 1


def test_loss_meter_refuses_changing_terms() -> None:
    def result(**terms: float) -> StepResult:
        losses = Losses.sum(**{name: torch.tensor(value) for name, value in terms.items()})
        return StepResult(losses=[losses], grad_norm=torch.tensor(1.0), keys=[["a"]], updated=True)

    window = LossMeter(ONE_RANK)
    window.add(result(mlm=1.0))
    with raises(TrainingError, "mismatch"):
        window.add(result(itm=1.0))


def test_tensorboard_holds_the_scalars(tmp_path: Path) -> None:
    train(
        TwoTowers(),
        FakeLoader(16, 4),
        optim=fakes.optim(),
        config=fakes.config(tmp_path, tensorboard=True, log_every=2),
        valid_loader=fakes.valid_batches(),
    )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    losses = {event.step: event.value for event in events.Scalars("train/loss")}
    assert losses == pytest.approx({row["step"]: row["loss"] for row in records(tmp_path, "train")})
    assert [event.step for event in events.Scalars("valid/loss")] == [4, 8]


def test_missing_wandb_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with raises(ConfigError, "missing", "wandb"):
        train(
            TwoTowers(),
            FakeLoader(16, 4),
            optim=fakes.optim(),
            config=fakes.config(tmp_path, wandb="project"),
        )


def test_wandb_receives_the_records_under_one_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FakeWandb:
        def __init__(self) -> None:
            self.ids: list[str] = []
            self.logged: list[dict[str, float]] = []

        def init(self, **options: Any) -> "FakeWandb":
            assert (options["project"], options["resume"]) == ("project", "allow")
            self.ids.append(options["id"])
            self.config = options["config"]
            return self

        def log(self, row: dict[str, float]) -> None:
            self.logged.append(row)

        def finish(self) -> None:
            self.ids.append("finished")

    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for epochs in (1, 2):
        train(
            TwoTowers(),
            FakeLoader(16, 4),
            optim=fakes.optim(),
            config=fakes.config(tmp_path, wandb="project", epochs=epochs, log_every=4),
            run={"recipe": "convirt", "train_manifest": {"patients": ["0" * 20]}},
        )
    assert fake.ids[0] == fake.ids[2]
    assert fake.ids[1] == fake.ids[3] == "finished"
    assert [row["step"] for row in fake.logged] == [4, 8]
    assert fake.config["recipe"] == "convirt"
    assert fake.config["train"]["epochs"] == 2
    assert fake.config["optim"]["lr"] > 0
    assert "train_manifest" not in json.dumps(fake.config)
    assert "train/loss" in fake.logged[0]


def test_nan_and_infinity_become_null(tmp_path: Path) -> None:
    journal = RunLogger(fakes.config(tmp_path), step=0, total_steps=1, active=True)
    journal.record("train", 1, {"loss": math.nan, "nested": {"a": math.inf}})
    journal.close()
    assert records(tmp_path) == [{"kind": "train", "step": 1, "loss": None, "nested": {"a": None}}]


def test_remove_records_after_keeps_earlier_records(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\nnonsense\n{"step": 3}\n{"step": 2')
    remove_records_after(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_terminal_shows_a_bar_with_the_remaining_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    logger = RunLogger(fakes.config(tmp_path), step=0, total_steps=4, active=True)
    for _ in range(2):
        time.sleep(0.15)
        logger.advance()
    timing = {"pairs_per_second": 8.0, "wait_share": 0.0, "seconds_left": 1.0}
    logger.log_progress(2, {"loss": 0.5, "lr": 1e-3}, timing)
    logger.close()
    shown = capsys.readouterr().err
    assert "2/4" in shown
    assert re.search(r"\d\d:\d\d<\d\d:\d\d", shown), "elapsed and remaining time"
    assert "loss 0.5000" in shown


def test_console_logs_to_stderr_without_configured_logging(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("medvl")
    monkeypatch.setattr(logger, "propagate", False)  # pytest's own handlers sit on the root
    with console(active=True):
        logging.getLogger("medvl.train.loop.trainer").info("step 1")
    with console(active=False):
        logging.getLogger("medvl.train.loop.trainer").info("rank 1 is silent")
    assert capsys.readouterr().err.endswith(" step 1\n")
    assert logger.handlers == []


def test_gather_is_the_identity_on_one_rank() -> None:
    x_BE = torch.rand(3, 2)
    assert gather(x_BE) is x_BE


def test_run_dir_may_be_a_string(tmp_path: Path) -> None:
    folder: Any = str(tmp_path / "run")
    result = run(folder, iter([0.123456789] * 8))
    assert result.last.parent.parent == tmp_path / "run"
    assert "best auroc 0.1235: " in str(result)


class Nothing(TwoTowers):
    """A model whose first batches have nothing to learn from, as those without a pair."""

    def __init__(self, empty: int) -> None:
        super().__init__()
        self.left = empty

    def forward(self, batch: Batch) -> Losses:
        losses = super().forward(batch)
        self.left -= 1
        return losses if self.left < 0 else Losses.sum(loss=0 * losses.total)


@pytest.mark.parametrize(
    ("empty", "epochs", "fails"), [(3, 2, False), (4, 2, True), (100, 1, True)]
)
def test_training_on_nothing_ends_with_an_error(
    tmp_path: Path, empty: int, epochs: int, fails: bool
) -> None:
    """Four updates an epoch: an epoch without any loss or gradient is an error, a part of one is
    not.
    """
    loader, config = FakeLoader(16, 4), fakes.config(tmp_path, epochs=epochs)
    if fails:
        with raises(TrainingError, "empty", "data.train"):
            train(Nothing(empty), loader, optim=fakes.optim(), config=config)
    else:
        assert (
            train(Nothing(empty), loader, optim=fakes.optim(), config=config).stopped == "finished"
        )
