"""Two nodes of two ranks each, one torchrun agent per node; the second node is lost once and
replaced.

torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-id ID
node_ranks.py FOLDER
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

from helpers import train_fakes as fakes
from helpers.train_ranks import training
from medvl.schema import Batch
from medvl.train import rank_and_world
from medvl.train.doctor.checks import check_nodes
from medvl.train.parallel.distributed import join


class LosesItsNode(fakes.FakeLoader):
    """Kills this rank and its agent in the second epoch, on the node that LOSES_NODE names."""

    def change(self, batch: Batch) -> Batch:
        if os.environ.get("LOSES_NODE") and (self.epoch, self.position) == (1, 4):
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return batch


def main(folder: Path) -> None:
    """Finish the run that loses a node, then an undisturbed one, and check the nodes."""
    rank, world = rank_and_world()
    # DDP orders its buckets anew after the first step unless it looks for unused parameters, and
    # gloo's sum over four ranks depends on a gradient's place in its bucket: a restarted run would
    # be equal up to rounding only.
    options = {
        "epochs": 4,
        "log_every": 1,
        "checkpoint_every": 1,
        "keep_last": 20,
        "find_unused_parameters": True,
    }
    training(folder / "lost", LosesItsNode(20, 4, rank, world), **options)
    training(folder / "whole", **options)
    with join() as ranks:
        report = check_nodes(ranks, 0.0, folder, megabytes=1)
    found = {
        "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        "nodes": [rank["node"] for rank in report.ranks],
        "problems": list(report.problems),
    }
    (folder / f"found-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with fakes.fake_files():
        main(Path(sys.argv[1]))
