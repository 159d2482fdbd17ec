"""Restart by torchrun after one of two ranks is killed: the curve equals that of an
uninterrupted run.
"""

import json
import logging
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from helpers import forked, train_fakes as fakes, train_ranks as ranks

from medvl.train.fault_tolerance import checkpoint

SCRIPT = str(Path(ranks.__file__).with_name("fault_ranks.py"))

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _fake_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "model_files", fakes.FakeModelFiles)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("ranks")
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
    ]
    ended = forked.run(
        [sys.executable, *command, SCRIPT, str(target)], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ended.returncode == 0, ended.stderr
    return target


def found(folder: Path) -> list[dict]:
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.fault("F5")
def test_restart_after_a_killed_rank_is_exact(folder: Path) -> None:
    assert [rank["restarts"] for rank in found(folder)] == [1, 1], "nobody was killed"
    assert fakes.records(folder / "killed") == fakes.records(folder / "whole")
    assert len(fakes.records(folder / "whole", "train")) == 12
    assert fakes.weights_hash(folder / "killed") == fakes.weights_hash(folder / "whole")


@pytest.mark.fault("F15")
def test_spike_on_one_rank_is_skipped_on_both(folder: Path) -> None:
    first, second = found(folder)
    assert first["skipped"] == second["skipped"] == 1
    assert first["weights"] == second["weights"]
    (skip,) = fakes.records(folder / "spike", "skip")
    assert skip["reason"] == "spike"


@pytest.mark.fault("F9")
@pytest.mark.fault("F10")
def test_checkpoint_of_two_ranks_resumes_on_one(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """DDP's checkpoint without DDP, from the middle of an epoch."""
    run_dir = tmp_path / "one"
    (run_dir / "checkpoints").mkdir(parents=True)
    shutil.copytree(
        folder / "whole" / "checkpoints" / "step-00000005",
        run_dir / "checkpoints" / "step-00000005",
    )
    with caplog.at_level(logging.WARNING, logger="medvl"):
        result = ranks.training(
            run_dir, norm=True, epochs=4, log_every=1, checkpoint_every=1, keep_last=20
        )
    assert result.step == 12
    assert "was written on 2 ranks, this run has 1" in caplog.text
    for name, tensor in fakes.weights(folder / "whole").items():
        if name.startswith("norm"):
            continue  # batch norm sees a rank's half of a batch there and the whole here
        torch.testing.assert_close(fakes.weights(run_dir)[name], tensor, rtol=0.2, atol=0.05)
