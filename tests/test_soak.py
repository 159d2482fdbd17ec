"""Tests of scripts/soak.py: disturbances, measurements, and a short soak from the command line."""

import io
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import forked
from helpers.script_modules import SCRIPTS, load_script

soak = load_script("soak")


def test_slope_distinguishes_growing_memory() -> None:
    flat = [(step, 500.0 + step % 7) for step in range(100, 10_100, 100)]
    leaking = [(step, size + 0.004 * step) for step, size in flat]
    settling = [(step, size + (90.0 if step > 1500 else 0.0)) for step, size in flat]
    assert abs(soak.slope_mb(flat)) < 0.1
    assert soak.slope_mb(leaking) == pytest.approx(4.0, abs=0.1)
    assert soak.slope_mb(settling) < soak.GROWTH_MB < soak.slope_mb(leaking)


def test_memory_of_a_process_is_measured() -> None:
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            "a = bytearray(b'x') * (64 << 20); print('ready', flush=True); input()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert 64 < soak.memory_mb(process.pid) < 100
        process.kill()


def test_damage_affects_only_the_newest_checkpoint(tmp_path: Path) -> None:
    def checkpoint(step: int) -> dict[str, bytes]:
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("model.safetensors", "complete.json"):
            (folder / name).write_bytes(f"{name} of {step}".encode())
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    assert soak.newest_step(tmp_path) == 0
    older = checkpoint(4)
    assert soak.damage(tmp_path, random.Random(0)) is None
    kinds = set()
    for seed in range(30):
        newer = checkpoint(8)
        kinds.add(soak.damage(tmp_path, random.Random(seed)))
        folder = tmp_path / "checkpoints" / "step-00000008"
        assert {path.name: path.read_bytes() for path in folder.iterdir()} != newer
    assert kinds == {f"checkpoint {how}" for how in ("flipped", "cut", "emptied", "removed")}
    assert checkpoint(4) == older
    assert soak.newest_step(tmp_path) == 8


def test_log_is_read_until_a_step_or_its_end() -> None:
    log = io.StringIO(
        "going on\nstep 1 of 9: loss\nstep 2 of 9: loss\nstep 3 of 9: loss\nthe end\n"
    )
    assert soak.read_until_step(log, 2).endswith("step 2 of 9: loss\n")
    assert soak.read_until_step(log, 8).endswith("the end\n")


@pytest.mark.parametrize("seed", range(6))
def test_disturbance_ends_a_run(seed: int) -> None:
    code = "import signal, sys, time; print('ready', flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        started = time.monotonic()
        how = soak.disturb(process, random.Random(seed))
        status = process.wait(timeout=10)
    assert time.monotonic() - started < 10
    assert status == -(signal.SIGTERM if how == "terminated" else signal.SIGKILL)


# A soak trains, is disturbed and starts again, until a second has passed.
@pytest.mark.slow
def test_short_soak_reproduces_the_undisturbed_run() -> None:
    command = [
        sys.executable,
        str(SCRIPTS / "soak.py"),
        "--minutes",
        "0.02",
        "--steps-a-run",
        "8",
        "--seed",
        "3",
    ]
    result = forked.run(command, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    first, *runs = result.stdout.splitlines()
    assert re.fullmatch(r"undisturbed: 8 steps, \d+ records, weights [0-9a-f]{12}", first)
    assert runs
    assert all(run.endswith(": equal") for run in runs)
    starts = [int(re.search(r"(\d+) starts", run)[1]) for run in runs]
    assert max(starts) > 1, "no run was disturbed"
