"""Soak test: a training run with repeated faults compared with an undisturbed one, and memory over
many steps.

    python scripts/soak.py                       # one hour
    python scripts/soak.py --minutes 2           # shorter
    python scripts/soak.py --steps 10000         # memory over 10,000 steps, without faults

Trains the recipe `convirt_mimic.py tiny` on a small phantom, once undisturbed and then repeatedly
with random kills (SIGKILL of the run or of a loader worker, SIGTERM), pauses, damage to the newest
checkpoint, partial files in the run's folder, and another number of workers at each restart.
Records and weights of every run must be bitwise equal to those of the undisturbed run. With
`--steps`, prints the memory of a long run and its worker, and the slope of a fitted line. The exit
status is 1 if a run differs or memory grows.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import IO

import numpy as np

ROOT = Path(__file__).parent.parent
CHECKPOINT_EVERY = 4
MAX_RESTARTS = 200
STEADY_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}
"""Settings that return freed memory to the system and limit oneDNN's kernel cache (1,024 kernels by
default, one per text length), whose variation of 100 MB would hide a leak.
"""
GROWTH_MB = 2.0
"""Limit of growth in MB per thousand steps; a leak of one tensor per step is far above it."""


@dataclasses.dataclass(frozen=True)
class Bench:
    """A phantom corpus, and the command that trains on it."""

    home: Path

    def prepare(self) -> None:
        """Create corpus, shards and vocabulary with the command line."""
        self.home.mkdir(parents=True, exist_ok=True)
        salt = self.home / "salt"
        salt.write_text("5a" * 32 + "\n")
        salt.chmod(0o600)
        corpus, shards = str(self.home / "corpus"), str(self.home / "shards")
        for arguments in (
            [
                "phantom",
                "mimic-cxr",
                "--out",
                corpus,
                "--patients",
                "40",
                "--size",
                "96",
                "--workers",
                "1",
            ],
            [
                "shards",
                "mimic-cxr",
                "--root",
                corpus,
                "--out",
                shards,
                "--short-side",
                "64",
                "--workers",
                "1",
            ],
            [
                "vocab",
                "--data",
                f"{shards}/train",
                "--out",
                str(self.home / "vocab"),
                "--size",
                "400",
                "--min-frequency",
                "1",
            ],
        ):
            command = [sys.executable, "-m", "medvl", *arguments]
            subprocess.run(
                command,
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=self.environment,
            )

    @property
    def environment(self) -> dict[str, str]:
        """Environment of every command: one thread, no network, freed memory returned to the
        system.
        """
        fixed = {
            "MEDVL_SALT_FILE": str(self.home / "salt"),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        return {
            **os.environ,
            **STEADY_MEMORY,
            "NO_ALBUMENTATIONS_UPDATE": "1",
            "PYTHONPATH": str(ROOT),
            **fixed,
        }

    def train(
        self, name: str, steps: int, workers: int, **changes: object
    ) -> subprocess.Popen[str]:
        """Start the recipe, with its log on stderr."""
        settings = {
            "data.train": self.home / "shards" / "train",
            "data.valid": self.home / "shards" / "validate",
            "data.tokenizer": self.home / "vocab",
            "data.workers": workers,
            "model.image-size": 64,
            "data.image.size": 64,
            "train.run-dir": self.home / name,
            "train.global-batch": 8,
            "train.steps": steps,
            "train.epochs": 100_000,
            "train.num-threads": 1,
            "train.log-every": 1,
            "train.validate-every": 10,
            "train.best-metric": "loss",
            "train.best-mode": "min",
            "train.checkpoint-every": CHECKPOINT_EVERY,
            "optim.schedule.warmup-steps": 2,
            **{name.replace("__", ".").replace("_", "-"): value for name, value in changes.items()},
        }
        flags = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
        command = [sys.executable, str(ROOT / "recipes" / "convirt_mimic.py"), "tiny", *flags]
        return subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.home,
            env=self.environment,
        )

    def result(self, name: str) -> tuple[str, list[dict[str, object]]]:
        """Return the hash of the last weights, and the records without timings."""
        weights = (self.home / name / "last" / "model.safetensors").read_bytes()
        rows = [
            json.loads(line)
            for line in (self.home / name / "metrics.jsonl").read_text().splitlines()
        ]
        for row in rows:
            row.pop("timing", None)
        return hashlib.sha256(weights).hexdigest(), rows


def read_until_step(stderr: IO[str], step: int) -> str:
    """Read the log of a run until it reaches a step or ends; return the last lines."""
    log: list[str] = []
    for line in stderr:
        log = [*log[-5:], line]
        match = re.search(r"step (\d+) of \d+:", line)
        if match and int(match[1]) >= step:
            break
    return "".join(log)


def newest_step(run_dir: Path) -> int:
    """Return the step of the newest checkpoint folder, intact or not; 0 without one."""
    return max((int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*")), default=0)


def children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    try:
        return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:  # it has ended
        return []


def damage(run_dir: Path, rng: random.Random) -> str | None:
    """Damage a file of the newest checkpoint and return how; None if there are fewer than two
    checkpoints.
    """
    folders = sorted((run_dir / "checkpoints").glob("step-*"))
    if len(folders) < 2:
        return None
    path = rng.choice(sorted(path for path in folders[-1].rglob("*") if path.is_file()))
    how = rng.choice(["flipped", "cut", "emptied", "removed"])
    content = bytearray(path.read_bytes())
    if how == "removed":
        path.unlink()
    elif how == "flipped" and content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
    else:
        path.write_bytes(content[: len(content) // 2] if how == "cut" else b"")
    return f"checkpoint {how}"


def leave_partial_files(run_dir: Path) -> None:
    """Leave a partial checkpoint and half a record, as a run killed during writing."""
    half = run_dir / "checkpoints" / ".step-99999999.new"
    half.mkdir(parents=True, exist_ok=True)
    (half / "model.safetensors").write_bytes(b"half")
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 99')


def disturb(process: subprocess.Popen[str], rng: random.Random) -> str:
    """Disturb a run at random and return how."""
    how = rng.choice(["killed", "killed", "terminated", "worker killed", "paused and killed"])
    workers = children(process.pid)
    if how == "worker killed" and workers:
        os.kill(rng.choice(workers), signal.SIGKILL)
        return how
    if how == "paused and killed":
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        process.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGTERM if how == "terminated" else signal.SIGKILL)
    return "killed" if how == "worker killed" else how


def disturbed_run(
    bench: Bench, name: str, steps: int, end: float, rng: random.Random
) -> Counter[str]:
    """Restart a run with disturbances until it finishes, undisturbed after `end`; return their
    counts by kind.
    """
    done: Counter[str] = Counter()
    run_dir = bench.home / name
    while done["starts"] < MAX_RESTARTS:
        done["starts"] += 1
        process = bench.train(name, steps, workers=rng.randrange(3))
        assert process.stderr is not None
        goal = newest_step(run_dir) + rng.randrange(0, 2 * CHECKPOINT_EVERY)
        undisturbed = goal >= steps or time.monotonic() > end
        log = read_until_step(process.stderr, steps + 1 if undisturbed else goal)
        if not undisturbed and process.poll() is None:
            done[disturb(process, rng)] += 1
        log += process.stderr.read()
        status = process.wait()
        if status == 0 and newest_step(run_dir) >= steps:
            return done
        if undisturbed:
            sys.exit(f"an undisturbed run ended with status {status}:\n{log}")
        if rng.random() < 0.4 and (how := damage(run_dir, rng)) is not None:
            done[how] += 1
        if rng.random() < 0.3:
            leave_partial_files(run_dir)
            done["partial files"] += 1
    sys.exit(f"{name} did not finish within {MAX_RESTARTS} restarts")


def soak(bench: Bench, minutes: float, steps: int, seed: int) -> bool:
    """Repeat disturbed runs until the time is over; return whether all equal the undisturbed
    one.
    """
    process = bench.train("undisturbed", steps, workers=0)
    _, log = process.communicate()
    if process.returncode:
        sys.exit(f"the undisturbed run failed:\n{log[-2000:]}")
    expected = bench.result("undisturbed")
    end = time.monotonic() + 60 * minutes
    rng = random.Random(seed)
    all_equal, number = True, 0
    print(
        f"undisturbed: {steps} steps, {len(expected[1])} records, weights {expected[0][:12]}",
        flush=True,
    )
    while number == 0 or time.monotonic() < end:
        number += 1
        done = disturbed_run(bench, f"run-{number}", steps, end, rng)
        same = bench.result(f"run-{number}") == expected
        all_equal &= same
        what = ", ".join(
            f"{count} {kind}" for kind, count in sorted(done.items()) if kind != "starts"
        )
        print(
            f"run {number}: {done['starts']} starts; {what}: {'equal' if same else 'DIFFERENT'}",
            flush=True,
        )
        if same:
            shutil.rmtree(bench.home / f"run-{number}")
    return all_equal


def memory_mb(pid: int) -> float:
    """Return the resident memory of a process in MB, without mapped files (the shards)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return (
        sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
        / 1024
    )


def slope_mb(points: list[tuple[int, float]]) -> float:
    """Return the slope of a line through the last 80% of (step, MB), in MB per thousand steps."""
    step, size = np.array(points[len(points) // 5 :]).T
    return float(np.polyfit(step, size, 1)[0] * 1000)


def watch_memory(bench: Bench, steps: int) -> bool:
    """Print the memory of a long run and its worker; return whether it is stable."""
    every = max(1, steps // 100)
    process = bench.train(
        "long", steps, workers=1, model__image_size=32, data__image__size=32,
        train__log_every=every, train__validate_every=10 * every,
        train__checkpoint_every=20 * every,
    )  # fmt: skip
    assert process.stderr is not None
    own: list[tuple[int, float]] = []
    worker: list[tuple[int, float]] = []
    for line in process.stderr:
        match = re.search(r"step (\d+) of \d+:", line)
        if match and int(match[1]) < steps:
            step = int(match[1])
            own.append((step, memory_mb(process.pid)))
            worker.append((step, sum(memory_mb(child) for child in children(process.pid))))
            if step % (10 * every) == 0:
                print(
                    f"step {step:6}: run {own[-1][1]:7.1f} MB, workers {worker[-1][1]:7.1f} MB",
                    flush=True,
                )
    if process.wait():
        sys.exit(f"the run ended with status {process.returncode}")
    slopes = slope_mb(own), slope_mb(worker)
    print(f"memory per thousand steps: run {slopes[0]:+.2f} MB, workers {slopes[1]:+.2f} MB")
    return max(slopes) < GROWTH_MB


def main() -> None:
    """Prepare the data, then run the soak test or measure memory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=60.0,
        help="duration of the disturbances; the current run then finishes undisturbed",
    )
    parser.add_argument("--steps-a-run", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="seed of the disturbances")
    parser.add_argument("--steps", type=int, help="measure memory over this many steps instead")
    parser.add_argument(
        "--home", type=Path, help="folder for the data and the runs; default: a temporary one"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options.home or Path(folder))
        bench.prepare()
        if options.steps is not None:
            passed = watch_memory(bench, options.steps)
        else:
            passed = soak(bench, options.minutes, options.steps_a_run, options.seed)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
