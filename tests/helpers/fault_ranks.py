"""Two ranks under torchrun, one of which is killed: torchrun restarts both.

torchrun --standalone --nproc-per-node 2 --max-restarts 1 fault_ranks.py FOLDER
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

from helpers import train_fakes as fakes
from helpers.train_ranks import training
from medvl.schema import Batch, Losses
from medvl.train import rank_and_world


class KilledOnce(fakes.FakeLoader):
    """Kills rank 1 in the middle of the second epoch's second update."""

    def change(self, batch: Batch) -> Batch:
        first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first_start and self.rank == 1 and (self.epoch, self.position) == (1, 4):
            os.kill(os.getpid(), signal.SIGKILL)
        return batch


class SpikyRank(fakes.TwoTowers):
    """Model with a loss spike on one batch on rank 1."""

    calls = 0

    def forward(self, batch: Batch) -> Losses:
        found = super().forward(batch)
        self.calls += self.training
        spike = rank_and_world()[0] == 1 and self.calls == 41
        return Losses(total=found.total * 1e4 if spike else found.total, terms=found.terms)


def main(folder: Path) -> None:
    """Finish the killed run, an uninterrupted one, and one with a spike on one rank."""
    rank, world = rank_and_world()
    options = {"norm": True, "epochs": 4, "log_every": 1, "checkpoint_every": 1, "keep_last": 20}
    training(folder / "killed", KilledOnce(20, 4, rank, world), **options)
    training(folder / "whole", **options)
    spiky = SpikyRank()
    result = training(folder / "spike", model=spiky, epochs=10, spike_factor=10.0)
    found = {
        "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        "skipped": result.skipped,
        "weights": spiky.image.weight.tolist(),
    }
    (folder / f"found-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with fakes.fake_files():
        main(Path(sys.argv[1]))  # train itself joins the ranks
