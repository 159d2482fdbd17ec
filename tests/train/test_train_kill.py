"""SIGKILL at any moment: the resumed run ends with the weights of an uninterrupted one, bit for
bit.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import forked, train_fakes as fakes

CHILD = str(Path(fakes.__file__).with_name("train_child.py"))


def child(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, CHILD, *map(str, arguments)]
    return forked.run(command)


@pytest.mark.fault("F1")
def test_resume_after_a_kill_at_a_random_step_is_exact(tmp_path: Path) -> None:
    seed = time.time_ns()
    at = random.Random(seed).randrange(1, 15)
    assert child("step", tmp_path / "whole").returncode == 0
    assert child("step", tmp_path / "killed", at).returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "checkpoints" / "step-00000015").exists()
    again = child("step", tmp_path / "killed")
    assert again.returncode == 0, again.stderr
    assert fakes.weights_hash(tmp_path / "killed") == fakes.weights_hash(tmp_path / "whole"), (
        f"killed at {at}"
    )
    assert fakes.records(tmp_path / "killed") == fakes.records(tmp_path / "whole")


@pytest.mark.fault("F4")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_to_the_process_group_ends_a_run_with_workers_cleanly(
    number: signal.Signals, tmp_path: Path
) -> None:
    """As Ctrl-C in a terminal and torchrun send it. Workers in the same group would die of it,
    and the run with them.
    """
    command = [sys.executable, CHILD, "workers", str(tmp_path / "run")]
    process, stderr = forked.start_with_pipe(
        command, tmp_path / "stderr", cwd=tmp_path, new_session=True
    )
    assert process.pid is not None
    with stderr:
        for line in stderr:
            if "step 9 of 1000" in line:
                break
        os.killpg(process.pid, number)
        sent = time.monotonic()
        rest = stderr.read()
        process.join(60)
        assert (process.exitcode, "KeyboardInterrupt" in rest) == {
            "SIGTERM": (0, False),
            "SIGINT": (1, True),
        }[number.name]
    assert time.monotonic() - sent < 30
    assert f"stopped by {number.name} after step " in rest
    step = int(rest.split("after step ")[-1].split(":")[0])
    assert (tmp_path / "run" / "last").readlink().name == f"step-{step:08d}"


@pytest.mark.fault("F1")
def test_resume_after_a_kill_before_any_file_operation_is_exact(tmp_path: Path) -> None:
    ended = child("writes", tmp_path)
    assert ended.returncode == 0, ended.stderr
    _, states, _, same = ended.stdout.split()
    assert int(states) > 40  # of three checkpoints, two removals, the links, the records
    assert same == states
