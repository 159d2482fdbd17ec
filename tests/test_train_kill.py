"""SIGKILL at any moment, the same command again: the weights of the run that was left alone, bit for bit."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import train_fakes as fakes

CHILD = str(Path(__file__).parent / "train_child.py")


def child(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, CHILD, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_killed_at_a_random_step_and_started_again(tmp_path: Path) -> None:
    seed = time.time_ns()
    at = random.Random(seed).randrange(1, 15)
    assert child("step", tmp_path / "whole").returncode == 0
    assert child("step", tmp_path / "killed", at).returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "checkpoints" / "step-00000015").exists()
    again = child("step", tmp_path / "killed")
    assert again.returncode == 0, again.stderr
    assert fakes.weights_hash(tmp_path / "killed") == fakes.weights_hash(tmp_path / "whole"), f"killed at {at}"
    assert fakes.records(tmp_path / "killed") == fakes.records(tmp_path / "whole")


@pytest.mark.slow
def test_killed_before_every_operation_on_files(tmp_path: Path) -> None:
    ended = child("writes", tmp_path)
    assert ended.returncode == 0, ended.stderr
    _, killed, _, same = ended.stdout.split()
    assert int(killed) > 100
    assert same == killed
