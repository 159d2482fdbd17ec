"""Resume: an interrupted run ends with the weights of an uninterrupted one, bit for bit."""

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import train_fakes as fakes
from helpers.errors import raises
from helpers.train_fakes import FakeLoader, TwoTowers, TwoTowersConfig, records, train, weights
from safetensors.torch import load_file

from medvl.common.files import RunLock
from medvl.errors import CheckpointError
from medvl.schema import Batch
from medvl.train import Constant, Cosine, Plateau
from medvl.train.fault_tolerance import checkpoint
from medvl.train.parallel import distributed
from medvl.train.parallel.distributed import RankInfo

# 24 samples in batches of 4, three batches an update: two updates an epoch, both of three
# micro-batches; 20 samples: five batches, so the epoch's second update has two.
SETTINGS: dict[str, Any] = {"epochs": 3, "global_batch": 12, "accumulate": 3, "log_every": 2}
LAST_STEP = 6


class StopAt(FakeLoader):
    """Sends this process a signal while the given micro-batch (counted over the whole run) is
    handed out.
    """

    def __init__(self, at: int, number: signal.Signals = signal.SIGTERM) -> None:
        super().__init__(20, 4)
        self.at, self.number = at, number

    def change(self, batch: Batch) -> Batch:
        if self.epoch * self.steps_per_epoch + self.position - 1 == self.at:
            os.kill(os.getpid(), self.number)
        return batch


@pytest.fixture(autouse=True)
def _fake_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "model_files", fakes.FakeModelFiles)


def run(
    run_dir: Path, loader: FakeLoader | None = None, schedule: Any = None, **changes: Any
) -> Any:
    model = TwoTowers(TwoTowersConfig(dropout=0.3, norm=True))
    return train(
        model,
        loader or FakeLoader(20, 4),
        optim=fakes.optim(
            optimizer="sgd",
            momentum=0.9,
            clip_norm=1.0,
            schedule=schedule or Cosine(warmup_steps=2),
        ),
        config=fakes.config(run_dir, **{**SETTINGS, **changes}),
        valid_loader=fakes.valid_batches(),
    )


def assert_same_run(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    assert records(one) == records(other)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "model_files", fakes.FakeModelFiles)
        assert run(folder).step == LAST_STEP
    return folder


@pytest.mark.fault("F17")
def test_repeated_runs_are_equal_bit_for_bit(undisturbed: Path, tmp_path: Path) -> None:
    run(tmp_path)
    assert_same_run(undisturbed, tmp_path)
    assert len(records(undisturbed, "train")) == 3
    assert len(records(undisturbed, "valid")) == 3


@pytest.mark.fault("F17")
def test_seed_changes_the_weights(undisturbed: Path, tmp_path: Path) -> None:
    run(tmp_path, seed=1)
    assert not torch.equal(weights(tmp_path)["image.weight"], weights(undisturbed)["image.weight"])


@pytest.mark.fault("F4")
@pytest.mark.parametrize("at", [0, 1, 4, 5, 8, 11, 13], ids=lambda at: f"micro-batch {at}")
def test_sigterm_saves_and_exits_with_0_and_resume_is_exact(
    at: int, undisturbed: Path, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, StopAt(at))
    assert ended.value.code == 0
    epoch, position = divmod(at, 5)
    stopped = load_file(tmp_path / "last" / "train_state" / "optimizer.safetensors")
    assert "image.weight::momentum_buffer" in stopped
    assert (tmp_path / "last").readlink().name == f"step-{epoch * 2 + position // 3 + 1:08d}"
    assert run(tmp_path).step == LAST_STEP
    assert_same_run(undisturbed, tmp_path)


@pytest.mark.fault("F7")
@pytest.mark.parametrize("step", range(LAST_STEP))
def test_resume_after_any_step_is_exact(step: int, undisturbed: Path, tmp_path: Path) -> None:
    class Cut(FakeLoader):
        def change(self, batch: Batch) -> Batch:
            if self.epoch * 2 + (self.position - 1) // 3 == step:
                raise KeyboardInterrupt
            return batch

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, Cut(20, 4), checkpoint_every=1)
    assert (tmp_path / "last").readlink().name == f"step-{step:08d}"
    run(tmp_path, checkpoint_every=1)
    assert_same_run(undisturbed, tmp_path)


@pytest.mark.fault("F7")
def test_resume_with_plateau_and_adam_is_exact(tmp_path: Path) -> None:
    """The rate, and the count of validations without improvement, come back: here the rate falls
    after each one.
    """

    def go(name: str, loader: FakeLoader | None = None) -> None:
        train(
            TwoTowers(TwoTowersConfig(dropout=0.5)),
            loader or FakeLoader(20, 4),
            optim=fakes.optim(
                schedule=Plateau(factor=0.5, patience=1, threshold=0.9), weight_decay=0.1
            ),
            config=fakes.config(tmp_path / name, epochs=4, validate_every=3),
            valid_loader=fakes.valid_batches(),
        )

    go("whole")
    with pytest.raises(SystemExit):
        go("cut", StopAt(10))
    go("cut")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    assert records(tmp_path / "whole", "train")[-1]["lr"] < 1e-2


def test_finished_run_started_again_does_nothing(undisturbed: Path) -> None:
    before = weights(undisturbed)
    loader = FakeLoader(20, 4)
    result = run(undisturbed, loader)
    assert result.step == LAST_STEP
    assert result.stopped == "finished"
    assert loader.handed_out == []
    assert torch.equal(weights(undisturbed)["image.weight"], before["image.weight"])


def test_run_can_be_extended_with_a_constant_rate(tmp_path: Path) -> None:
    run(tmp_path / "whole", schedule=Constant(), epochs=4)
    run(tmp_path / "longer", schedule=Constant(), epochs=2)
    assert run(tmp_path / "longer", schedule=Constant(), epochs=4).step == 8
    assert torch.equal(
        weights(tmp_path / "whole")["image.weight"], weights(tmp_path / "longer")["image.weight"]
    )


def test_resume_from_another_runs_checkpoint(undisturbed: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path / "first", StopAt(7))
    source = str(tmp_path / "first" / "last")
    with pytest.raises(SystemExit):
        run(tmp_path / "second", StopAt(10), resume=source)
    loader = FakeLoader(20, 4)
    run(
        tmp_path / "second", loader, resume=source
    )  # given again: goes on with its own checkpoint, not from the start
    assert len(loader.handed_out) == 2
    assert torch.equal(
        weights(tmp_path / "second")["image.weight"], weights(undisturbed)["image.weight"]
    )


def test_resume_refuses_an_older_checkpoint_of_the_same_run(tmp_path: Path) -> None:
    run(tmp_path, checkpoint_every=1, keep_last=3)
    with raises(CheckpointError, "conflict", "resume"):
        run(tmp_path, resume=str(tmp_path / "checkpoints" / f"step-{LAST_STEP - 1:08d}"))


def test_resume_never_refuses_a_used_folder(undisturbed: Path, tmp_path: Path) -> None:
    with raises(CheckpointError, "exists", "resume"):
        run(undisturbed, resume="never")
    assert run(tmp_path, resume="never").step == LAST_STEP


@pytest.mark.parametrize(
    ("changes", "field", "values"),
    [
        ({"seed": 7}, "train.seed", "was 0 and is 7"),
        (
            {"accumulate": 1, "global_batch": 4},
            "train.global_batch",
            "train.accumulate was 3 and is 1",
        ),
        ({"precision": "bf16"}, "train.precision", "was 'fp32' and is 'bf16'"),
        ({"epochs": 4}, "train.total_steps", "was 6 and is 8"),
        ({"schedule": Cosine(warmup_steps=1)}, "optim.schedule.warmup_steps", "was 2 and is 1"),
        ({"schedule": Constant()}, "optim.schedule.kind", "was 'Cosine' and is 'Constant'"),
        ({"loader": FakeLoader(20, 4, data="d1")}, None, "another fingerprint"),
    ],
)
def test_resume_refuses_a_checkpoint_of_another_run(
    changes: dict[str, Any], field: str | None, values: str, undisturbed: Path
) -> None:
    before = weights(undisturbed)
    with raises(CheckpointError, "mismatch", field, names=values):
        run(undisturbed, **changes)
    assert torch.equal(weights(undisturbed)["image.weight"], before["image.weight"])


@pytest.mark.parametrize(
    ("changes", "advice", "absent"),
    [
        (
            {"accumulate": 1, "global_batch": 4},
            "--train.accumulate 3",
            "number of steps",
        ),  # which follows
        ({"seed": 7}, "--train.seed 0", "number of steps"),
        (
            {"epochs": 4},
            "the number of steps (train.epochs, train.steps) was 6 and is 8",
            "--train.total-steps",
        ),
        (
            {"schedule": Cosine(warmup_steps=1)},
            "--optim.schedule.warmup-steps 2",
            "number of steps",
        ),
        (
            {"schedule": Constant()},
            "was 'Cosine' and is 'Constant'",
            "schedule.kind Cosine",
        ),  # no option sets it
    ],
)
def test_the_refusal_names_the_options_with_which_the_run_resumes(
    changes: dict[str, Any], advice: str, absent: str, undisturbed: Path
) -> None:
    with raises(CheckpointError, "mismatch") as caught:
        run(undisturbed, **changes)
    assert advice in str(caught.value)
    assert absent not in str(caught.value)
    assert "another run_dir" in str(caught.value)


def test_resume_refuses_a_checkpoint_of_another_model(undisturbed: Path) -> None:
    with raises(CheckpointError, "mismatch", "model.settings.width"):
        train(
            TwoTowers(TwoTowersConfig(dropout=0.3, norm=True, width=9)),
            FakeLoader(20, 4),
            optim=fakes.optim(
                optimizer="sgd", momentum=0.9, clip_norm=1.0, schedule=Cosine(warmup_steps=2)
            ),
            config=fakes.config(undisturbed, **SETTINGS),
            valid_loader=fakes.valid_batches(),
        )


@pytest.mark.fault("F19")
def test_second_run_in_a_locked_folder_is_refused(tmp_path: Path) -> None:
    from medvl.errors import TrainingError

    with RunLock(tmp_path), raises(TrainingError, "in_use", "run_dir"):
        run(tmp_path)
    assert run(tmp_path).step == LAST_STEP


def test_resume_removes_later_records_and_a_truncated_line(
    undisturbed: Path, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, StopAt(6))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 99}\n{"kind": "valid", "st')
    run(tmp_path)
    assert records(tmp_path) == records(undisturbed)


def test_run_restores_generators_and_signal_handlers(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    threads = torch.get_num_threads()
    run(tmp_path)
    assert torch.equal(torch.rand(3), expected)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    assert torch.get_num_threads() == threads


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_the_heap_is_set_before_gloo_starts_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """`mallopt` is not safe beside threads that allocate memory."""
    calls = []
    monkeypatch.setattr(distributed, "rank_and_world", lambda: (0, 2))
    monkeypatch.setattr(distributed, "keep_freed_memory", lambda: calls.append("heap"))
    monkeypatch.setattr(distributed, "_init_process_group", lambda backend: calls.append(backend))
    for name in ("new_group", "destroy_process_group"):
        monkeypatch.setattr(distributed.dist, name, lambda name=name, **options: calls.append(name))
    with distributed.join("cpu"):
        assert calls == ["heap", "gloo", "new_group"]
    assert calls[3:] == ["destroy_process_group"]


@pytest.mark.parametrize(
    ("idle", "fixed", "expected"), [(0, None, 1), (1, None, 1), (9, None, 2), (1, 2, 2)]
)
def test_a_run_leaves_busy_cores_alone(
    idle: int, fixed: int | None, expected: int, two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "idle_cores", lambda: idle)
    ranks = RankInfo(rank=0, size=1, local_size=1, device=torch.device("cpu"))
    with distributed.machine_settings(ranks, fixed, False, "fp32"):
        assert torch.get_num_threads() == expected
    assert torch.get_num_threads() == 2


def test_an_error_of_a_setting_restores_the_others(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(mode: bool) -> None:
        if mode:
            raise RuntimeError("refused")

    monkeypatch.setattr(torch, "use_deterministic_algorithms", refuse)
    ranks = RankInfo(rank=0, size=1, local_size=1, device=torch.device("cpu"))
    with (
        pytest.raises(RuntimeError, match="refused"),
        distributed.machine_settings(ranks, 1, True, "fp32"),
    ):
        raise AssertionError("the run began")
    assert torch.get_num_threads() == 2


def test_a_resumed_run_takes_the_threads_of_its_checkpoint(
    two_threads: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    class Watching(StopAt):
        def change(self, batch: Batch) -> Batch:
            seen.append(torch.get_num_threads())
            return super().change(batch)

    monkeypatch.setattr(distributed, "idle_cores", lambda: 1)
    with pytest.raises(SystemExit):
        run(tmp_path, Watching(4), num_threads=None)
    monkeypatch.setattr(distributed, "idle_cores", lambda: 2)
    run(tmp_path, Watching(-1), num_threads=None)
    assert set(seen) == {1}


def test_idle_cores_are_counted() -> None:
    assert 0 <= distributed.idle_cores() <= distributed.cpu_cores()


def test_run_uses_configured_logging(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="medvl"):
        run(tmp_path)
    lines = [record.getMessage() for record in caplog.records]
    assert any(
        line.startswith("step 2 of 6: loss ") and "pairs/s" in line and "ETA" in line
        for line in lines
    )
    assert any(line.startswith("validation after step 2: loss ") for line in lines)
