"""Checkpoints: atomic writes, detection of damage, removal of old ones, refusal of pickles."""

import errno
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import train_fakes as fakes
from helpers.errors import raises
from helpers.train_fakes import FakeLoader, TwoTowers, train
from safetensors import SafetensorError
from torch import nn

from medvl.common import files
from medvl.common.files import sha256
from medvl.errors import CheckpointError, TrainingError
from medvl.train.fault_tolerance import checkpoint
from medvl.train.fault_tolerance.checkpoint import Checkpoints, read, verify
from medvl.train.optim.optimizer import build_optimizer, load_optimizer_tensors, optimizer_tensors


@pytest.fixture(autouse=True)
def _fake_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "model_files", fakes.FakeModelFiles)


def run(run_dir: Path, **changes: Any) -> Any:
    """Eight steps, saved at each second one and where the validation is the best so far."""
    return train(
        TwoTowers(),
        FakeLoader(16, 4),
        optim=fakes.optim(),
        config=fakes.config(
            run_dir, **{"epochs": 2, "checkpoint_every": 2, "keep_last": 3, **changes}
        ),
    )


def steps(run_dir: Path) -> list[int]:
    return Checkpoints(run_dir, keep_last=1, run={}).steps()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps({"weights": [1.0]}))


def test_checkpoint_holds_model_and_run_and_verifies(tmp_path: Path) -> None:
    result = run(tmp_path)
    names = sorted(
        path.relative_to(result.last).as_posix()
        for path in result.last.rglob("*")
        if path.is_file()
    )
    state = ["train_state/optimizer.safetensors", "train_state/state.json"]
    assert names == [
        "complete.json",
        "config.json",
        "model.safetensors",
        "tokenizer/vocab.txt",
        *sorted(state),
    ]
    recorded = json.loads((result.last / "complete.json").read_text())
    assert sorted(recorded["files"]) == [name for name in names if name != "complete.json"]
    assert recorded["step"] == 8
    verify(result.last)
    saved = json.loads((result.last / "config.json").read_text())["run"]
    assert saved["train"]["global_batch"] == 4
    assert saved["optim"]["lr"] == 1e-2
    assert saved["versions"]["torch"] == torch.__version__


def test_last_is_a_relative_link_that_moves_with_the_folder(tmp_path: Path) -> None:
    run(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    assert (
        tmp_path / "moved" / "last"
    ).resolve() == tmp_path / "moved" / "checkpoints" / "step-00000008"
    verify(tmp_path / "moved" / "last")


def test_newest_and_best_checkpoints_are_kept(tmp_path: Path) -> None:
    values = iter([3.0, 1.0, 2.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    result = train(
        TwoTowers(),
        FakeLoader(16, 4),
        optim=fakes.optim(),
        config=fakes.config(
            tmp_path,
            validate_every=1,
            checkpoint_every=1,
            keep_last=2,
            best_metric="score",
            best_mode="min",
        ),
        evals=[lambda model: {"score": next(values)}],
    )
    assert steps(tmp_path) == [8, 7, 2]
    assert (result.best_step, result.best_value) == (2, 1.0)
    assert result.best == (tmp_path / "checkpoints" / "step-00000002").resolve()
    assert (tmp_path / "best").readlink() == Path("checkpoints/step-00000002")


@pytest.mark.fault("F3")
@pytest.mark.parametrize(
    "damage", [truncate, flip, empty, pickled, Path.unlink], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("name", ["model.safetensors", "train_state/state.json", "complete.json"])
def test_damaged_newest_checkpoint_falls_back_to_the_previous_one(
    name: str, damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    undisturbed = fakes.weights(run(tmp_path / "whole").last.parent.parent)
    result = run(tmp_path / "run")
    damage(result.last / name)
    loader = FakeLoader(16, 4)
    with caplog.at_level(logging.WARNING, logger="medvl"):
        train(
            TwoTowers(),
            loader,
            optim=fakes.optim(),
            config=fakes.config(tmp_path / "run", checkpoint_every=2, keep_last=3),
        )
    assert len(loader.handed_out) == 2  # from step 6 to 8
    assert "using the previous checkpoint" in caplog.text
    assert (
        name == "complete.json" or name in caplog.text
    )  # a marker may be damaged so that it accuses another file
    assert torch.equal(fakes.weights(tmp_path / "run")["image.weight"], undisturbed["image.weight"])
    assert (tmp_path / "run" / "checkpoints" / "damaged-step-00000008").is_dir()


@pytest.mark.fault("F1")
def test_partial_checkpoint_is_ignored(tmp_path: Path) -> None:
    run(tmp_path, epochs=1)
    half = tmp_path / "checkpoints" / ".step-00000008.new"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    unmarked = tmp_path / "checkpoints" / "step-00000007"
    shutil.copytree(tmp_path / "checkpoints" / "step-00000004", unmarked)
    (unmarked / "complete.json").unlink()
    assert run(tmp_path).step == 8
    assert not half.exists()


@pytest.mark.fault("F3")
def test_only_damaged_checkpoints_are_an_error(tmp_path: Path) -> None:
    run(tmp_path, epochs=1, keep_last=2)
    for folder in (tmp_path / "checkpoints").glob("step-*"):
        flip(folder / "model.safetensors")
    with raises(CheckpointError, "malformed"):
        run(tmp_path)


@pytest.mark.fault("S1")
@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (pickle.dumps({"a": 1}), "is a pickle"),
        (b"PK\x03\x04 a torch.save file", "is a pickle"),
        (b"\x08\x00\x00\x00\x00\x00\x00\x00nonsense", "is another format"),
    ],
)
def test_pickle_with_a_valid_marker_is_refused(content: bytes, kind: str, tmp_path: Path) -> None:
    """A checkpoint with correct hashes whose weights need unpickling."""
    folder = run(tmp_path / "run").last
    (folder / "model.safetensors").write_bytes(content)
    marker = json.loads((folder / "complete.json").read_text())
    marker["files"]["model.safetensors"] = {
        "sha256": sha256(folder / "model.safetensors"),
        "bytes": len(content),
    }
    (folder / "complete.json").write_text(json.dumps(marker))
    with raises(CheckpointError, "malformed", names=kind):
        verify(folder)
    with raises(CheckpointError, "malformed", names=kind):
        run(tmp_path / "other", resume=str(folder))


@pytest.mark.fault("S1")
def test_resume_refuses_a_pickled_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"a": torch.ones(1)}, path)
    with raises(CheckpointError, "wrong_type"):
        run(tmp_path / "run", resume=str(path))


def test_resume_refuses_missing_folders_and_other_folders(tmp_path: Path) -> None:
    with raises(CheckpointError, "not_found"):
        run(tmp_path / "run", resume=str(tmp_path / "nowhere"))
    (tmp_path / "folder").mkdir()
    with raises(CheckpointError, "missing"):
        run(tmp_path / "run", resume=str(tmp_path / "folder"))


def test_read_refuses_another_format_and_names_both_versions(tmp_path: Path) -> None:
    folder = run(tmp_path).last
    state = json.loads((folder / "train_state/state.json").read_text())
    (folder / "train_state/state.json").write_text(json.dumps({**state, "format": 99}))
    with raises(CheckpointError, "version", names="expected format 2, got 99"):
        read(folder)


class FullDisk(fakes.FakeModelFiles):
    """The disk is full for some of the saves, counted from 0 (the one before the first step)."""

    def __init__(self, failing: set[int], error: Exception) -> None:
        self.failing, self.error, self.saves = failing, error, 0

    def save(self, model: nn.Module, folder: Path, run: Any, *, weights: bool = True) -> None:
        self.saves += 1
        if self.saves - 1 in self.failing:
            (folder / "config.json").write_text("{")
            raise self.error
        super().save(model, folder, run)


NO_SPACE = [
    OSError(errno.ENOSPC, "No space left on device"),
    SafetensorError("I/O error: No space left on device"),
]


@pytest.mark.fault("F2")
@pytest.mark.parametrize("error", NO_SPACE, ids=["OSError", "SafetensorError"])
def test_full_disk_does_not_end_a_run_and_saving_is_retried(
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = run(tmp_path / "whole")
    disk = FullDisk({1, 2}, error)
    monkeypatch.setattr(checkpoint, "model_files", lambda: disk)
    found: list[list[int]] = []

    class Look(FakeLoader):
        def change(self, batch: Any) -> Any:
            found.append(steps(tmp_path / "run"))
            return batch

    with caplog.at_level(logging.WARNING, logger="medvl"):
        result = train(
            TwoTowers(),
            Look(16, 4),
            optim=fakes.optim(),
            config=fakes.config(tmp_path / "run", checkpoint_every=4, log_every=1, keep_last=3),
        )
    # Step 4 fails, so does the attempt after step 5; after step 6 there is room again.
    assert found == [[0]] * 6 + [[6, 0]] * 2
    assert steps(tmp_path / "run") == [8, 6, 0]
    assert result.save_failures == 2
    assert caplog.text.count("No space left on device") == 2
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    assert torch.equal(
        fakes.weights(tmp_path / "run")["image.weight"],
        fakes.weights(tmp_path / "whole")["image.weight"],
    )
    assert whole.save_failures == 0


@pytest.mark.fault("F2")
@pytest.mark.parametrize("failing", [{0}, {4}], ids=["first", "last"])
def test_first_and_last_save_must_succeed(
    failing: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(failing, NO_SPACE[0])
    monkeypatch.setattr(checkpoint, "model_files", lambda: disk)
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path)
    assert steps(tmp_path) == ([] if 0 in failing else [6, 4, 2])


@pytest.mark.fault("F2")
def test_failed_flush_leaves_checkpoints_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, epochs=1)
    before = {
        path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if "checkpoints" in path.parts
    }
    checkpoints = Checkpoints(tmp_path, keep_last=3, run={})

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    state = {"step": 9, "best": {"step": None}}
    assert checkpoints.attempt(lambda: checkpoints.save(TwoTowers(), state, {}), 9) is None
    assert checkpoints.failures == 1
    after = {
        path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if "checkpoints" in path.parts
    }
    assert {path for path in after if path.name != "checkpoints"} == {
        p for p in before if p.name != "checkpoints"
    }


@pytest.mark.fault("F2")
def test_failed_save_of_the_best_keeps_the_previous_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk({2}, NO_SPACE[0])  # saves: step 0, the best of step 1, then the best of step 2
    monkeypatch.setattr(checkpoint, "model_files", lambda: disk)
    values = iter([3.0, 1.0, 2.0, 4.0])
    result = train(
        TwoTowers(),
        FakeLoader(16, 4),
        optim=fakes.optim(),
        config=fakes.config(
            tmp_path,
            epochs=1,
            validate_every=1,
            checkpoint_every=9,
            keep_last=1,
            best_metric="score",
            log_every=9,
        ),
        evals=[lambda model: {"score": next(values)}],
    )
    assert (result.best_step, result.best_value) == (2, 1.0)
    assert result.best == (tmp_path / "checkpoints" / "step-00000001").resolve()
    verify(tmp_path / "best")


def test_failed_removal_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [True]
    discard = files.discard

    def sometimes(folder: Path) -> None:
        if broken[0] and folder.name == "step-00000000":
            raise PermissionError(errno.EACCES, "Permission denied")
        discard(folder)

    class Repair(FakeLoader):
        def change(self, batch: Any) -> Any:
            broken[0] = self.epoch == 0
            return batch

    monkeypatch.setattr(files, "discard", sometimes)
    result = train(
        TwoTowers(),
        Repair(16, 4),
        optim=fakes.optim(),
        config=fakes.config(tmp_path, checkpoint_every=2, keep_last=1),
    )
    assert steps(tmp_path) == [8]
    assert (
        result.save_failures == 2
    )  # of steps 2 and 4: the checkpoint of step 0 could not be removed


def test_without_symbolic_links_last_is_a_folder_of_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    result = run(tmp_path)
    assert not (tmp_path / "last").is_symlink()
    verify(tmp_path / "last")
    assert (tmp_path / "last" / "model.safetensors").samefile(result.last / "model.safetensors")
    monkeypatch.undo()
    monkeypatch.setattr(checkpoint, "model_files", fakes.FakeModelFiles)
    run(tmp_path, epochs=3)
    assert (tmp_path / "last").is_symlink()


@pytest.mark.fault("F19")
def test_lock_excludes_another_process_and_ends_with_it(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from medvl.common.files import RunLock\n"
        "with RunLock(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with raises(TrainingError, "in_use", "run_dir"):
            files.RunLock(tmp_path).__enter__()
        other.kill()
    with files.RunLock(tmp_path):
        pass


def test_optimizer_state_is_stored_by_parameter_name() -> None:
    def trained(optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = TwoTowers()
        built = build_optimizer(model, fakes.optim(optimizer=optimizer, weight_decay=0.1))
        for _ in range(3):
            model(fakes.make_batch([0, 1, 2])).total.backward()
            built.step()
        return model, built

    for kind in ("adam", "adamw", "sgd"):
        model, built = trained(kind)
        tensors = optimizer_tensors(built, model)
        fresh = TwoTowers()
        again = build_optimizer(fresh, fakes.optim(optimizer=kind, weight_decay=0.1))
        load_optimizer_tensors(again, fresh, tensors)
        restored = optimizer_tensors(again, fresh)
        assert restored.keys() == tensors.keys()
        assert all(torch.equal(restored[name], tensors[name]) for name in tensors)
    assert "image.weight::momentum_buffer" in tensors
    with raises(CheckpointError, "mismatch", "other"):
        load_optimizer_tensors(again, fresh, {"other::exp_avg": torch.zeros(1)})
    with raises(CheckpointError, "mismatch", "image.bias"):
        load_optimizer_tensors(again, fresh, {"image.bias::momentum_buffer": torch.zeros(3)})
