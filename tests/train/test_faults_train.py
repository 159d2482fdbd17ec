"""Faults in a run: full disk, loss spikes, diverged weights, lack of memory, late file names."""

import errno
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import forked, train_fakes as fakes
from helpers.errors import raises
from helpers.train_child import Dying
from helpers.train_fakes import FakeLoader, TwoTowers, records, train

from medvl.common import files
from medvl.data.loading.workers import worker_error
from medvl.errors import TrainingError
from medvl.schema import Batch, Losses
from medvl.train.fault_tolerance import checkpoint
from medvl.train.fault_tolerance.checkpoint import Checkpoints
from medvl.train.fault_tolerance.guards import LossSpikeDetector
from medvl.train.loop import logger

BAD = "s3"
LATE = "s1"
"""In the eighth batch of 64 samples in fours."""


@pytest.fixture(autouse=True)
def _fake_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "model_files", fakes.FakeModelFiles)


class Refusing:
    """A file on a disk that is full for some of the writes, and takes a part of one."""

    def __init__(self, file: Any, full: range) -> None:
        self.file, self.full, self.writes = file, full, 0

    def write(self, data: bytes) -> int:
        self.writes += 1
        if self.writes - 1 in self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        if self.writes == self.full.start:  # just before it is full
            return self.file.write(data[: len(data) // 2])
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.fault("F2")
def test_buffered_records_are_written_when_the_disk_has_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run(name: str) -> None:
        train(
            TwoTowers(),
            FakeLoader(32, 4),
            optim=fakes.optim(),
            config=fakes.config(tmp_path / name, log_every=1),
        )

    run("whole")
    opened = logger._BufferedLines.__init__

    def on_a_full_disk(self: logger._BufferedLines, path: Path, step: int) -> None:
        opened(self, path, step)
        self._file = Refusing(self._file, range(4, 9))

    monkeypatch.setattr(logger._BufferedLines, "__init__", on_a_full_disk)
    run("full")
    assert records(tmp_path / "full") == records(tmp_path / "whole")
    assert len(records(tmp_path / "full")) == 16
    assert caplog.text.count("metrics.jsonl cannot be written") == 1


@pytest.mark.fault("F2")
def test_lost_records_are_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/dev/full refuses every write; it is no regular file, which would be refused when it is
    opened.
    """
    monkeypatch.setattr(logger, "open_own", lambda path, buffering: path.open("ab", buffering))
    monkeypatch.setattr(logger, "remove_records_after", lambda *_: None)
    lines = logger._BufferedLines(Path("/dev/full"), 0)
    for number in range(3):
        lines.add(str(number))
    lines.flush()
    lines.close()
    assert "the last 3 records could not be written to /dev/full" in caplog.text


@pytest.mark.fault("F2")
def test_tensorboard_on_a_full_disk_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    def refuse(self: SummaryWriter, name: str, value: float, step: int) -> None:
        if step > 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SummaryWriter, "add_scalar", refuse)
    config = fakes.config(tmp_path, log_every=1, tensorboard=True)
    assert train(TwoTowers(), FakeLoader(16, 4), optim=fakes.optim(), config=config).step == 8
    assert caplog.text.count("TensorBoard file cannot be written") == 1


FULL = """
import resource, sys, pathlib
import torch
from helpers import train_fakes as fakes
from medvl.train.fault_tolerance import checkpoint
torch.set_num_threads(1)
checkpoint.model_files = fakes.FakeModelFiles
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

class Filling(fakes.FakeLoader):  # no file may grow beyond 900 bytes while steps 3 to 6 are made
    def change(self, batch):
        step = self.epoch * self.steps_per_epoch + self.position
        resource.setrlimit(resource.RLIMIT_FSIZE, (900 if 3 <= step <= 6 else hard, hard))
        return batch

result = fakes.train(fakes.TwoTowers(), Filling(16, 4), optim=fakes.optim(),
    config=fakes.config(pathlib.Path(sys.argv[1]), checkpoint_every=2, keep_last=9, log_every=1))
print(result.step, result.save_failures, file=sys.stderr)
"""


@pytest.mark.fault("F2")
def test_run_continues_at_the_file_size_limit(tmp_path: Path) -> None:
    """As the kernel does it, in the middle of a file: a limit of the process stands for the
    disk's.
    """
    (program := tmp_path / "full.py").write_text(FULL)
    command = [sys.executable, str(program), str(tmp_path)]
    # A pipe: a file of its output would reach the limit too.
    process, output = forked.start_with_pipe(command, tmp_path / "stderr", cwd=tmp_path)
    with output:
        text = output.read()
    process.join()
    assert process.exitcode == 0, text
    step, failures = map(int, text.splitlines()[-1].split())
    assert step == 8
    assert failures >= 2
    assert Checkpoints(tmp_path, keep_last=9, run={}).steps() == [
        8,
        7,
        2,
        0,
    ]  # 4 and 6 could not be; 7 is what was owed
    for folder in (tmp_path / "checkpoints").iterdir():
        checkpoint.verify(folder)
    assert [row["step"] for row in records(tmp_path, "train")] == list(range(1, 9))


@pytest.mark.fault("F6")
def test_broken_connection_is_a_dead_worker() -> None:
    for error in (ConnectionResetError(104, "Connection reset by peer"), EOFError()):
        assert "died" in str(worker_error(error))
    assert (
        worker_error(
            ConnectionResetError("Caught ConnectionResetError in DataLoader worker process 0.")
        )
        is None
    )
    assert worker_error(RuntimeError("a shape")) is None


DYING = """
import pathlib, sys
import torch
from helpers import train_fakes as fakes
from medvl.train.fault_tolerance import checkpoint
from helpers.train_child import Dying
torch.set_num_threads(1)
checkpoint.model_files = fakes.FakeModelFiles
config = fakes.config(pathlib.Path(sys.argv[1]), checkpoint_every=1)
fakes.train(fakes.TwoTowers(), Dying(2), optim=fakes.optim(), config=config)
"""


@pytest.mark.fault("F6")
def test_dead_worker_ends_a_run_with_advice_and_resume_is_exact(tmp_path: Path) -> None:
    """The run that loses its workers is a process of its own: torch raises in whatever line the
    signal finds.
    """

    def run(name: str) -> Any:
        config = fakes.config(tmp_path / name, checkpoint_every=1)
        return train(TwoTowers(), Dying(None), optim=fakes.optim(), config=config)

    killed = tmp_path / "killed"
    # torch's own timeout, without the check for dead workers, would be twice this one
    ended = forked.run([sys.executable, "-c", DYING, str(killed)])
    assert ended.returncode == 1
    assert re.search(r"LoaderError: .*worker.* with fewer --data.workers", ended.stderr)
    checkpoint.verify(killed / "last")
    run("killed")
    run("whole")
    assert fakes.weights_hash(killed) == fakes.weights_hash(tmp_path / "whole")


class Astray(TwoTowers):
    """Its weights are ruined once, in an update that looks sound: from there on no loss is
    finite.
    """

    ruined = False

    def forward(self, batch: Batch) -> Losses:
        if LATE in batch.keys and self.training and not self.ruined:
            self.ruined = True
            self.image.weight.data.fill_(torch.inf)
        return super().forward(batch)


def order(loader: FakeLoader) -> list[str]:
    return [key for keys in loader.handed_out for key in keys]


@pytest.mark.fault("F14")
def test_diverged_weights_are_rolled_back_while_data_continue(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = FakeLoader(64, 4)
    plain = FakeLoader(64, 4)
    config = fakes.config(tmp_path / "run", epochs=1, checkpoint_every=2, keep_last=9, log_every=1)
    result = train(Astray(), loader, optim=fakes.optim(), config=config)
    assert (result.step, result.skipped) == (16, 4)
    assert order(loader) == [key for batch in plain for key in batch.keys], (
        "no batch twice, none left out"
    )
    ruined = next(number for number, keys in enumerate(loader.handed_out) if LATE in keys)
    (back,) = records(tmp_path / "run", "rollback")
    assert back["step"] == ruined + 4
    source = tmp_path / "run" / "checkpoints" / back["checkpoint"]
    assert int(back["checkpoint"].split("-")[1]) < ruined
    saved_after = tmp_path / "run" / "checkpoints" / f"step-{ruined + 4:08d}"
    assert (saved_after / "model.safetensors").read_bytes() == (
        source / "model.safetensors"
    ).read_bytes()
    assert json.loads((saved_after / "train_state/state.json").read_text())["rollbacks"] == 1
    skips = records(tmp_path / "run", "skip")
    assert [row["step"] for row in skips] == list(range(ruined + 1, ruined + 5))
    assert LATE in skips[0]["keys"]
    assert all(tensor.isfinite().all() for tensor in fakes.weights(tmp_path / "run").values())
    assert "rollback 1 of 2" in caplog.text


@pytest.mark.fault("F14")
def test_rollbacks_are_limited(tmp_path: Path) -> None:
    config = fakes.config(tmp_path, epochs=1, checkpoint_every=2, rollbacks=0, nonfinite_budget=5)
    with raises(TrainingError, "nonfinite", "nonfinite_budget"):
        train(Astray(), FakeLoader(64, 4), optim=fakes.optim(), config=config)
    assert not records(tmp_path, "rollback")


@pytest.mark.fault("F14")
def test_rollback_skips_damaged_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Damaging(FakeLoader):
        def change(self, batch: Batch) -> Batch:
            if LATE in batch.keys:
                self.damaged = tmp_path / "checkpoints" / f"step-{self.position - 2:08d}"
                (self.damaged / "model.safetensors").write_bytes(b"")
            return batch

    loader = Damaging(64, 4)
    config = fakes.config(tmp_path, epochs=1, checkpoint_every=1, keep_last=9)
    assert train(Astray(), loader, optim=fakes.optim(), config=config).step == 16
    (back,) = records(tmp_path, "rollback")
    assert back["checkpoint"] < loader.damaged.name
    assert "not used for the rollback" in caplog.text


class Spiky(TwoTowers):
    """The loss of one batch is thirty times what it was."""

    def forward(self, batch: Batch) -> Losses:
        losses = super().forward(batch)
        factor = 30.0 if BAD in batch.keys and self.training else 1.0
        return Losses(total=losses.total * factor, terms=losses.terms)


def spiky_run(run_dir: Path, loader: FakeLoader | None = None, **changes: Any) -> Any:
    settings = {"epochs": 3, "spike_factor": 10.0, "log_every": 1, "checkpoint_every": 5, **changes}
    return train(
        Spiky(),
        loader or FakeLoader(64, 4),
        optim=fakes.optim(lr=1e-3),
        config=fakes.config(run_dir, **settings),
    )


@pytest.mark.fault("F15")
def test_spike_update_is_skipped_and_its_samples_logged(tmp_path: Path) -> None:
    loader = FakeLoader(64, 4)
    result = spiky_run(tmp_path, loader)
    expected = [
        step + 1
        for step, keys in enumerate(loader.handed_out)
        if BAD in keys and step >= LossSpikeDetector.FEWEST
    ]
    skips = records(tmp_path, "skip")
    assert [row["step"] for row in skips] == expected
    assert len(expected) == result.skipped == 2
    assert all(row["reason"] == "spike" and BAD in row["keys"] for row in skips)


@pytest.mark.fault("F15")
def test_spikes_are_accepted_by_default_and_count_for_the_budget(tmp_path: Path) -> None:
    assert spiky_run(tmp_path / "free", spike_factor=None).skipped == 0
    with raises(TrainingError, "nonfinite", "nonfinite_budget"):
        spiky_run(tmp_path / "budget", nonfinite_budget=1)


@pytest.mark.fault("F15")
def test_resumed_run_detects_the_same_spikes(tmp_path: Path) -> None:
    class Cut(FakeLoader):
        def change(self, batch: Batch) -> Batch:
            if self.epoch == 1 and self.position == 3:
                raise KeyboardInterrupt
            return batch

    spiky_run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        spiky_run(tmp_path / "cut", Cut(64, 4))
    spiky_run(tmp_path / "cut")
    assert records(tmp_path / "cut") == records(tmp_path / "whole")
    assert fakes.weights_hash(tmp_path / "cut") == fakes.weights_hash(tmp_path / "whole")


def test_spike_detector_needs_enough_losses() -> None:
    spikes = LossSpikeDetector(10.0)
    assert not any(
        spikes.observe(loss) for loss in [1.0] * (LossSpikeDetector.FEWEST - 1) + [1000.0]
    ), "too few to tell"
    assert not spikes.observe(10.0)
    assert spikes.observe(10.1)
    assert spikes.observe(1e9)
    again = LossSpikeDetector(10.0, spikes.state_dict())
    assert len(again.state_dict()) == LossSpikeDetector.FEWEST + 1
    assert again.observe(10.1)


NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    MemoryError(),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried"
    ),
]


@pytest.mark.fault("F16")
@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: type(error).__name__)
def test_out_of_memory_ends_with_advice(error: Exception, tmp_path: Path) -> None:
    class Large(TwoTowers):
        def forward(self, batch: Batch) -> Losses:
            raise error

    config = fakes.config(tmp_path, global_batch=8, accumulate=2)
    with raises(TrainingError, "too_large", "global_batch") as raised:
        train(Large(), FakeLoader(16, 4), optim=fakes.optim(), config=config)
    assert "set train.accumulate to 4" in str(raised.value)
    assert "train.grad_cache to 2" in str(raised.value)
    assert raised.value.__cause__ is error
    checkpoint.verify(tmp_path / "last")


@pytest.mark.fault("F16")
def test_allocator_message_is_recognised(tmp_path: Path) -> None:
    class Large(TwoTowers):
        def forward(self, batch: Batch) -> Losses:
            torch.empty(1 << 52)
            return super().forward(batch)

    with raises(TrainingError, "too_large", "global_batch"):
        train(Large(), FakeLoader(16, 4), optim=fakes.optim(), config=fakes.config(tmp_path))


def test_with_advice_keeps_other_errors(tmp_path: Path) -> None:
    class Broken(TwoTowers):
        def forward(self, batch: Batch) -> Losses:
            raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="^shapes do not fit$"):
        train(Broken(), FakeLoader(16, 4), optim=fakes.optim(), config=fakes.config(tmp_path))


@pytest.mark.fault("F20")
def test_wait_for_handles_a_late_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS may show it to the very process that renamed it."""
    now = Path.replace
    late: list[str] = []

    def later(self: Path, target: Path) -> Path:
        if self.is_dir() and not self.is_symlink():
            late.append(Path(target).name)
            threading.Timer(0.1, now, (self, target)).start()
            return Path(target)
        return now(self, target)

    def run(name: str) -> Any:
        values = iter([3.0, 1.0, 2.0, 4.0])
        return train(
            TwoTowers(),
            FakeLoader(16, 4),
            optim=fakes.optim(),
            config=fakes.config(
                tmp_path / name,
                validate_every=2,
                checkpoint_every=1,
                keep_last=1,
                best_metric="score",
            ),
            evals=[lambda model: {"score": next(values)}],
        )

    run("whole")
    monkeypatch.setattr(Path, "replace", later)
    result = run("late")
    assert "step-00000008" in late
    assert ".step-00000000.trash" in late
    assert (result.save_failures, result.best_step) == (0, 4)
    assert sorted(path.name for path in (tmp_path / "late" / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000008",
    ]
    assert (tmp_path / "late" / "best").readlink().name == "step-00000004"
    assert fakes.weights_hash(tmp_path / "late") == fakes.weights_hash(tmp_path / "whole")


@pytest.mark.fault("F20")
def test_wait_for_raises_for_a_missing_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not seen for 0 s"):
        files.wait_for(tmp_path / "never", seconds=0.1)


@pytest.mark.fault("F10")
def test_run_resumes_on_another_device(device: torch.device, tmp_path: Path) -> None:
    """From the device to the CPU and back; within rounding the losses and weights are those of a
    run on the CPU.
    """

    class Cut(FakeLoader):
        def __init__(self, cut: int | None) -> None:
            super().__init__(32, 4)
            self.cut = cut

        def change(self, batch: Batch) -> Batch:
            if self.position == self.cut:
                raise KeyboardInterrupt
            return batch

    def run(name: str, on: str, cut: int | None = None) -> Any:
        config = fakes.config(tmp_path / name, epochs=1, checkpoint_every=1, device=on, log_every=1)
        return train(TwoTowers(), Cut(cut), optim=fakes.optim(amsgrad=True), config=config)

    run("whole", "cpu")
    for on, cut in ((device.type, 3), ("cpu", 6)):
        with pytest.raises(KeyboardInterrupt):
            run("moved", on, cut)
    assert run("moved", device.type).step == 8
    for moved, whole in zip(
        fakes.records(tmp_path / "moved"), fakes.records(tmp_path / "whole"), strict=True
    ):
        assert moved.pop("kind") == whole.pop("kind")
        assert moved == pytest.approx(whole, rel=1e-4)
    for name, tensor in fakes.weights(tmp_path / "whole").items():
        torch.testing.assert_close(
            fakes.weights(tmp_path / "moved")[name], tensor, rtol=1e-3, atol=1e-4
        )


@pytest.mark.fault("F4")
def test_sigterm_during_a_save_ends_cleanly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Path] = []

    class Told(fakes.FakeModelFiles):
        def save(self, model: Any, folder: Path, run: Any, *, weights: bool = True) -> None:
            if not told:
                os.kill(os.getpid(), signal.SIGTERM)
            told.append(folder)
            super().save(model, folder, run)

    monkeypatch.setattr(checkpoint, "model_files", Told)
    with pytest.raises(SystemExit) as ended:
        train(TwoTowers(), FakeLoader(16, 4), optim=fakes.optim(), config=fakes.config(tmp_path))
    assert ended.value.code == 0
    checkpoint.verify(tmp_path / "last")


@pytest.mark.fault("F17")
def test_results_do_not_depend_on_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that jumps years ahead and back: the same weights, and no time below zero in the
    records.
    """
    train(
        TwoTowers(), FakeLoader(16, 4), optim=fakes.optim(), config=fakes.config(tmp_path / "one")
    )
    real = time.time
    jumps = iter([1e9, -1e9] * 10_000)
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    with monkeypatch.context() as patch:
        patch.setattr(logging, "_startTime", 0.0, raising=False)
        train(
            TwoTowers(),
            FakeLoader(16, 4),
            optim=fakes.optim(),
            config=fakes.config(tmp_path / "two"),
        )
    assert fakes.weights_hash(tmp_path / "one") == fakes.weights_hash(tmp_path / "two")
    rows = [
        json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()
    ]
    assert all(value >= 0 for row in rows for value in row.get("timing", {}).values())
