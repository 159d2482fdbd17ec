"""SIGKILL of the ConVIRT recipe with its real loader, the same command again: the weights of a run left alone."""

import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from helpers import train_fakes as fakes
from helpers.spine_corpus import Spine

STEPS, LATEST_KILL = 18, 10
"""Killed early enough that the run cannot end before the signal arrives."""

pytestmark = pytest.mark.slow


def command(spine: Spine, run_dir: Path, workers: int) -> list[str]:
    return spine.recipe(
        run_dir, train__steps=STEPS, train__checkpoint_every=2, train__log_every=1, data__workers=workers
    )


def kill_after(spine: Spine, step: int, line: list[str]) -> subprocess.Popen[str]:
    """Start a training and kill it when it tells of that step: it alone, its workers must notice by themselves."""
    process = subprocess.Popen(
        line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=spine.home, env=spine.environment
    )
    assert process.stderr is not None
    for told in process.stderr:
        if re.search(rf"step {step} of {STEPS}\b", told):
            process.kill()
            break
    assert process.wait(timeout=60) == -signal.SIGKILL, told
    return process


@pytest.mark.fault("F8")
def test_a_killed_recipe_started_again_ends_with_the_same_weights(tmp_path: Path) -> None:
    """Also when the second start has another number of workers."""
    spine = Spine(tmp_path)
    spine.make()
    spine.run("whole", command(spine, tmp_path / "whole", workers=0))
    step = random.Random(time.time_ns()).randrange(1, LATEST_KILL + 1)
    process = kill_after(spine, step, command(spine, tmp_path / "killed", workers=2))
    shutil.copytree(tmp_path / "killed", tmp_path / "fewer", symlinks=True)
    for name, workers in (("killed", 2), ("fewer", 0)):
        spine.run(name, command(spine, tmp_path / name, workers=workers))
        (resumed,) = re.findall(r"resuming from .*step-(\d+)", spine.printed[name])
        assert (step - 1) // 2 * 2 <= int(resumed) < STEPS
        same = fakes.weights_hash(tmp_path / name) == fakes.weights_hash(tmp_path / "whole")
        assert same, f"{name} after step {step}, gone on from {resumed}"
        assert fakes.records(tmp_path / name) == fakes.records(tmp_path / "whole")
    process.communicate(timeout=30)  # stderr ends when the last worker of the killed run has ended
