"""Trainings in processes of their own, for tests that kill them.

train_child.py step RUN_DIR [KILL_AT]
    train; SIGKILL itself when micro-batch KILL_AT is handed out
train_child.py workers RUN_DIR            train slowly, with batches from two worker processes
train_child.py writes FOLDER
    train, and go on from what a kill before each of its operations on files would leave
"""

import hashlib
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from helpers import train_fakes as fakes
from helpers.train_fakes import FakeLoader
from medvl.data.loading.workers import with_worker_errors
from medvl.schema import Batch
from medvl.train import Cosine

WATCHED = {
    *(
        "open",
        "os.rename",
        "os.remove",
        "os.rmdir",
        "os.mkdir",
        "os.symlink",
        "os.link",
        "os.truncate",
    ),
}
"""Audit events that come before an operation on files."""


class Killed(fakes.FakeLoader):
    def __init__(self, kill_at: int | None) -> None:
        super().__init__(20, 4)
        self.kill_at = kill_at

    def change(self, batch: Batch) -> Batch:
        if self.epoch * self.steps_per_epoch + self.position - 1 == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return batch


class _Slow(Dataset[Batch]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, position: int) -> Batch:
        time.sleep(0.1)
        return fakes.make_batch(list(range(4 * position, 4 * position + 4)))


def _own_group(worker: int) -> None:
    os.setpgid(0, 0)


class Workers(fakes.FakeLoader):
    """Batches of torch's DataLoader, whose workers live as long as the loader does."""

    def __init__(self) -> None:
        super().__init__(20, 4)
        self.batches = DataLoader(
            _Slow(),
            batch_size=None,
            num_workers=2,
            persistent_workers=True,
            multiprocessing_context="fork",
            worker_init_fn=_own_group,
        )

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            self.position += 1
            yield batch
        self.epoch, self.position = self.epoch + 1, 0


def run(
    run_dir: Path,
    kill_at: int | None = None,
    steps: int = 15,
    every: int = 4,
    loader: fakes.FakeLoader | None = None,
) -> None:
    fakes.train(
        fakes.TwoTowers(fakes.TwoTowersConfig(dropout=0.3, norm=True)),
        loader or Killed(kill_at),
        optim=fakes.optim(schedule=Cosine()),
        config=fakes.config(
            run_dir, epochs=None, steps=steps, validate_every=2, checkpoint_every=every, keep_last=1
        ),
        valid_loader=fakes.valid_batches(),
    )


def kill_before_write(number: int, run_dir: Path) -> None:
    """From here on, SIGKILL before the n-th operation on the run's files."""
    left = number

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event in WATCHED and str(run_dir) in str(arguments):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def copy_before_writes(run_dir: Path, folder: Path) -> dict[bytes, Path]:
    """From here on, copy the run's files before each operation on them: what a kill at that moment
    would leave. Return the copies, which fill up: one of each state, by its hash.
    """
    states: dict[bytes, Path] = {}
    copying = False

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal copying
        if copying or event not in WATCHED or str(run_dir) not in str(arguments):
            return
        copying = True
        if run_dir.exists() and (state := _state(run_dir)) not in states:
            states[state] = folder / f"state-{len(states)}"
            shutil.copytree(run_dir, states[state], symlinks=True)
        copying = False

    sys.addaudithook(watch)
    return states


def _state(folder: Path) -> bytes:
    """Return a hash of all names, links and bytes below a folder."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        found.update(str(path.relative_to(folder)).encode() + b"\0")
        if path.is_symlink():
            found.update(os.fsencode(path.readlink()))
        elif path.is_file():
            found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.digest()


def resume_every_state(folder: Path) -> None:
    """Print `states N same M`: what kills of a training would leave, and those from which it ends
    with the weights of the whole.
    """
    whole = folder / "whole"
    states = copy_before_writes(whole, folder)
    run(whole, steps=2, every=1)
    expected, same = fakes.weights_hash(whole), 0
    for state in states.values():
        run(state, steps=2, every=1)
        same += fakes.weights_hash(state) == expected
        leftovers = [path for path in state.glob("**/.*") if path.name != ".lock"]
        if leftovers:
            raise SystemExit(f"left behind: {leftovers}")
    sys.stdout.write(f"states {len(states)} same {same}\n")


class Dying(FakeLoader):
    """Batches from two worker processes, which die at a batch of the second epoch."""

    def __init__(self, kill_at: int | None) -> None:
        super().__init__(20, 4)
        self.kill_at = kill_at

    def __iter__(self) -> Iterator[Batch]:
        places = range(self.position, self.steps_per_epoch)
        batches = DataLoader(
            _Slow(), sampler=places, batch_size=None, num_workers=2, worker_init_fn=_own_group
        )
        handed_out = with_worker_errors(batches)
        for place in places:
            if (self.epoch, place) == (1, self.kill_at):
                for process in multiprocessing.active_children():
                    process.kill()
            self.position += 1
            yield next(handed_out)
        self.epoch, self.position = self.epoch + 1, 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    with fakes.fake_files():
        if sys.argv[1] == "writes":
            resume_every_state(Path(sys.argv[2]))
        elif sys.argv[1] == "workers":
            run(Path(sys.argv[2]), steps=1000, loader=Workers())
        else:
            run(Path(sys.argv[2]), *map(int, sys.argv[3:]))
