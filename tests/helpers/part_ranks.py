"""Sharded trainings that write checkpoints in parts, on two ranks.

part_ranks.py FOLDER
    kill one of two forked ranks before operations on files, then resume
"""

import errno
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import medvl
from helpers import train_fakes as fakes
from helpers.train_child import kill_before_write
from medvl.models import checkpoint as model_checkpoint
from medvl.models.checkpoint_folder import read_weights
from medvl.schema import Batch
from medvl.train import TrainResult, rank_and_world
from medvl.train.fault_tolerance import checkpoint

TOWERS = {"text_encoder": "tiny_bert", "vocab_size": 40, "image_size": 32, "projection_dim": 16}
UNSHARDED = {"shard_weights": False, "sharded_checkpoints": False}


def towers(norm: bool = False) -> fakes.TwoTowers:
    """A width that two ranks cannot share evenly; running statistics and dropout on demand."""
    return fakes.TwoTowers(fakes.TwoTowersConfig(width=9, norm=norm, dropout=0.3 * norm))


def convirt() -> nn.Module:
    """A real system, with batch norms and a frozen text layer."""
    torch.manual_seed(0)
    return medvl.create_model(
        "convirt", **TOWERS, image_encoder="resnet_tiny", frozen_text_layers=1
    )


class Pairs(fakes.FakeLoader):
    """The order of the fake loader, with larger images, for a real system."""

    def change(self, batch: Batch) -> Batch:
        batch.image_BCHW = nn.functional.interpolate(batch.image_BCHW, size=32)
        return batch


def run(run_dir: Path, model: nn.Module, **settings: Any) -> TrainResult:
    """Train two updates an epoch, sharded where there are two ranks."""
    rank, world = rank_and_world()
    loader, real = fakes.FakeLoader(16, 8, rank, world), not isinstance(model, fakes.TwoTowers)
    sharded = {"shard_weights": True, "sharded_checkpoints": True, "log_every": 1, "keep_last": 1}
    with fakes.fake_files((lambda: model_checkpoint) if real else fakes.FakeModelFiles):
        return fakes.train(
            model,
            Pairs(16, 8, rank, world) if real else loader,
            optim=fakes.optim(lr=1e-3, eps=1e-6, weight_decay=0.1, clip_norm=0.5),
            config=fakes.config(run_dir, **{"global_batch": 8, "epochs": 1, **sharded, **settings}),
        )


def in_fork(rank: int, store: Path, run_dir: Path, number: int | None) -> int:
    """Train two steps as one of two ranks in a forked process, killed before an operation;
    return its id.
    """
    child = os.fork()
    if child:
        return child
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        if number is not None:
            kill_before_write(number, run_dir)
        run(run_dir, towers(norm=True), steps=2, epochs=None, checkpoint_every=1)
    except BaseException as error:
        sys.stderr.write(f"rank {rank}: {type(error).__name__}: {str(error)[:2000]}\n")
        os._exit(1)
    os._exit(0)


def train_forked(folder: Path, run_dir: Path, number: int | None = None, victim: int = 0) -> bool:
    """Train on two forked ranks, one of which may be killed; return whether it was."""
    store = folder / f"store {run_dir.name} {number}"
    children = [
        in_fork(rank, store, run_dir, number if rank == victim else None) for rank in (0, 1)
    ]
    code = os.waitstatus_to_exitcode(os.waitpid(children[victim], 0)[1])
    other = children[1 - victim]
    if code:
        os.kill(other, signal.SIGKILL)  # as torchrun ends the other ranks
    ended = os.waitstatus_to_exitcode(os.waitpid(other, 0)[1])
    if code not in (0, -signal.SIGKILL) or (not code and ended):
        raise SystemExit(f"a training failed: {code}, {ended}")
    return code != 0


def kill_at_writes(folder: Path) -> None:
    """Print `killed N same M`: trainings killed before an operation, and those that then ended
    with the same bits.
    """
    if train_forked(folder, folder / "whole"):
        raise SystemExit("the undisturbed training was killed")
    expected = read_weights(folder / "whole" / "last")
    killed = same = 0
    for victim, numbers in ((0, (35, 110)), (1, (6,))):
        for number in numbers:
            run_dir = folder / f"run {victim} {number}"
            if not train_forked(folder, run_dir, number, victim):
                break
            for step in checkpoint.Checkpoints(run_dir, 1, {}).steps():
                checkpoint.verify(run_dir / "checkpoints" / f"step-{step:08d}")
            if train_forked(folder, run_dir):
                raise SystemExit("the resumed training was killed")
            ours = read_weights(run_dir / "last")
            same += all(torch.equal(ours[name], tensor) for name, tensor in expected.items())
            left = [path for path in run_dir.glob("**/.*") if path.name != ".lock"]
            if left:
                raise SystemExit(f"left behind: {left}")
            killed += 1
    sys.stdout.write(f"killed {killed} same {same}\n")


def full_disk(folder: Path) -> dict[str, Any]:
    """Train while the disk of rank 1 is full for the second checkpoint; return what this rank
    noticed.
    """
    from medvl.train.fault_tolerance import checkpoint as checkpoint_parts

    writer, calls = torch.distributed.checkpoint.HuggingFaceStorageWriter, 0
    original, untouched = checkpoint_parts.write_parts, writer.write_data

    def refuse(*arguments: Any) -> Any:
        if calls == 3 and rank_and_world()[0] == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return untouched(*arguments)

    def write(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        with mock.patch.object(writer, "write_data", refuse):
            original(*arguments)

    with mock.patch.object(checkpoint_parts, "write_parts", write):
        result = run(folder / "disk", towers(), epochs=2, checkpoint_every=2)
    return {"step": result.step, "failures": result.save_failures, "last": result.last.name}


def checks(folder: Path) -> dict[str, Any]:
    """Do everything that two ranks do, every training into a folder of its own."""
    for kind in ("parts", "gathered"):
        in_parts = {"sharded_checkpoints": kind == "parts"}
        run(folder / f"convirt {kind}", convirt(), steps=1, **in_parts)
        run(folder / f"towers {kind}", towers(), **in_parts)
        run(folder / f"norm {kind}", towers(norm=True), **in_parts)
    run(folder / "undisturbed", towers(norm=True), epochs=2)
    copies = {
        "resumed": "norm parts",
        "ddp": "towers parts",
        "alone": "towers parts",
        "from gathered": "towers gathered",
    }
    if rank_and_world()[0] == 0:
        for copy, original in copies.items():
            shutil.copytree(folder / original, folder / copy, symlinks=True)
    dist.barrier()
    model = towers(norm=True)
    run(folder / "resumed", model, epochs=2)
    run(folder / "ddp", towers(), epochs=2, **UNSHARDED)
    run(folder / "from gathered", towers(), epochs=2)
    saved = read_weights(folder / "resumed" / "last")
    kept = all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    return {"kept": kept, "disk": full_disk(folder)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    kill_at_writes(Path(sys.argv[1]))
